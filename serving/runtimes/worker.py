"""The process in which a runtime is asked: reads a job, a JSON object, from stdin and writes one JSON object to a file.

A file, because runtimes write what they like to stdout. The parent (`load`) starts it under the runtime's own Python,
ends it when its time is over, and tells how it died where it did. It takes nothing for granted but the standard
library, torch and safetensors.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, PhasefoldError
from .logs import flat, one_line


def main() -> None:
    """Do the job on stdin; the answer goes to its "result" file, whole or not at all."""
    job = json.load(sys.stdin)
    result = Path(job.pop("result"))
    started = time.monotonic()
    try:
        answer = ask(**job)
    except PhasefoldError as error:
        answer = {"error": flat(str(error)), "damaged": isinstance(error, CheckpointError)}
    answer["wall_seconds"] = round(time.monotonic() - started, 2)
    answer["peak_rss_bytes"] = peak_rss()
    partial = result.with_suffix(".partial")
    partial.write_text(json.dumps(answer))
    os.replace(partial, result)


def ask(
    folder: str, runtime: str, mode: str | None, prompt: str | None, tokens: int, **deployment: Any
) -> dict[str, Any]:
    """One runtime's answer: version, mode, missing, unexpected, text, refused, gap, methods, optional, notes, log."""
    path, mode = Path(folder), mode or _mode_of(runtime)
    if mode == "dry":
        return _dry(path, runtime, **deployment)
    if runtime == "vllm" and mode == "reference" and (gap := _no_cpu_path(path)):
        return _dry(path, runtime, **deployment) | {"gap": gap}
    try:
        found = _generate(path, runtime, mode, prompt, tokens, **deployment)
    except PhasefoldError:
        raise
    except Exception as error:  # a runtime may raise anything; what it raises is its answer
        traceback.print_exc()
        found = {"version": _version(runtime), "refused": one_line(_cause(error))}
    return {"mode": mode, **found}


def _mode_of(runtime: str) -> str:
    """ "real" where the runtime can run here: transformers and the reference anywhere, the others on a GPU."""
    if runtime == "vllm":
        from vllm.platforms import current_platform

        return "real" if current_platform.is_cuda_alike() else "dry"
    if runtime == "sglang":
        import torch

        return "real" if torch.cuda.is_available() else "dry"
    return "real"


def _dry(
    path: Path, runtime: str, *, tp: int, sm: int, data: bool, shared_fusion: bool, **unused: str
) -> dict[str, Any]:
    if runtime == "vllm":
        from .vllm_dry import dry_load

        dry = dry_load(path, tp=tp, data=data, sm=sm)
    else:
        from . import sglang_dry

        dry = sglang_dry.dry_load(path, tp=tp, data=data, sm=sm, disable_shared_experts_fusion=not shared_fusion)
    return {
        "mode": "dry",
        "version": dry.version,
        "model_class": dry.model_class,
        "tensors": dry.tensors,
        "missing": dry.unwritten,
        "unexpected": dry.not_taken,
        "optional": dry.optional,
        "methods": dry.methods,
        "refused": dry.refused,
        "log": dry.log,
    }


def _generate(
    path: Path,
    runtime: str,
    mode: str,
    prompt: str | None,
    tokens: int,
    *,
    tp: int,
    kv_dtype: str,
    shared_fusion: bool,
    dtype: str,
    **unused: int,
) -> dict[str, Any]:
    if runtime == "reference":
        from ..paged import reference

        return reference.generate(path, prompt, tokens)
    if runtime == "transformers":
        from . import transformers_load

        return transformers_load.generate(path, prompt, tokens)
    if mode == "reference":
        from . import vllm_reference

        return vllm_reference.generate(path, prompt, tokens, kv_dtype=kv_dtype, dtype=dtype)
    if runtime == "vllm":
        from . import vllm_real

        return vllm_real.generate(path, prompt, tokens, tp=tp, kv_dtype=kv_dtype)
    from . import sglang_real

    return sglang_real.generate(path, prompt, tokens, tp=tp, kv_dtype=kv_dtype, shared_fusion=shared_fusion)


def _no_cpu_path(path: Path) -> str:
    """What keeps vLLM from generating with decoded weights on a CPU; "" where nothing is known to."""
    from ...families import identify
    from ...formats.checkpoint import open_checkpoint

    if identify(open_checkpoint(path).config).text.get("index_topk"):
        return f"vllm {_version('vllm')} has no sparse attention (DSA) on a CPU: dry load only"
    return ""


def _version(runtime: str) -> str:
    module = "transformers" if runtime == "reference" else runtime
    return str(__import__(module).__version__)


def _cause(error: BaseException) -> BaseException:
    """The innermost exception: engines wrap what a model raised in words of their own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def peak_rss() -> int:
    """Bytes of the most memory that this process had resident, as Linux counts it since it was started."""
    try:
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
