"""The verb load: a runtime, or transformers, is asked itself, in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from . import draw
from .options import Artifact, Json, SharedFusion, ends_cleanly, print_json
from .verdict import given, pointing_to_check

if TYPE_CHECKING:
    from ..serving.runtimes.load import Loaded


class Runtime(StrEnum):
    """What `load` can load into."""

    reference = "reference"
    transformers = "transformers"
    vllm = "vllm"
    sglang = "sglang"


class Mode(StrEnum):
    """How a serving runtime is asked."""

    dry = "dry"
    reference = "reference"
    real = "real"


_TEXT = ("--prompt", "--tokens")
_DRY = ("--tp", "--sm", "--data")
#: what else than --python and --timeout means something to `load`, by runtime and mode
_TAKEN: dict[str, dict[str, tuple[str, ...]]] = {
    "reference": {"real": _TEXT},
    "transformers": {"real": _TEXT},
    "vllm": {"dry": _DRY, "reference": (*_TEXT, "--kv-dtype"), "real": (*_TEXT, "--tp", "--kv-dtype")},
    "sglang": {"dry": (*_DRY, "--no-shared-fusion"), "real": (*_TEXT, "--tp", "--kv-dtype", "--no-shared-fusion")},
}


def load(
    artifact: Artifact,
    runtime: Annotated[Runtime, typer.Option(help="What to load it into.")] = Runtime.reference,
    mode: Annotated[
        Mode | None,
        typer.Option(help="vllm, sglang: dry (their loader, no GPU), reference (decoded weights), real (needs a GPU)."),
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="Interpreter that has the runtime; else this one's, or that of `make runtimes`.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="How many tokens to generate; 16 if not given.")] = None,
    tp: Annotated[
        int | None, typer.Option(min=1, help="Tensor-parallel size of vllm and sglang; 1 if not given.")
    ] = None,
    sm: Annotated[
        int | None, typer.Option(help="Compute capability that a dry load pretends; 90 if not given.")
    ] = None,
    data: Annotated[
        bool, typer.Option("--data", help="Dry load with the weights read, not from headers only.")
    ] = False,
    kv_dtype: Annotated[str | None, typer.Option(help="KV dtype to generate with; auto if not given.")] = None,
    shared_fusion: SharedFusion = True,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which it is stopped.")] = 1800.0,
    as_json: Json = False,
) -> None:
    """Really load it, in a process of its own, and account for every tensor; exits 3 where that fails."""
    from ..serving.deployment import kv_dtype as dtype_of
    from ..serving.runtimes.load import load as carry_out

    asked = {
        "--prompt": prompt, "--tokens": tokens, "--tp": tp, "--sm": sm, "--data": data, "--kv-dtype": kv_dtype,
        "--no-shared-fusion": not shared_fusion,
    }  # fmt: skip
    modes = [str(mode)] if mode else list(_TAKEN[runtime])
    if useless := given(_without(asked, runtime, modes)):
        how = f" --mode {mode}" if mode else ""
        raise UsageError(f"{useless}: without meaning for load --runtime {runtime}{how}; leave it out")
    interpreter = Path(python) if python else None
    with ends_cleanly("interrupted"), pointing_to_check(Path(artifact)):
        done = carry_out(
            Path(artifact), str(runtime), mode=mode and str(mode), python=interpreter, prompt=prompt,
            tokens=tokens or 16, tp=tp or 1, sm=sm or 90, data=data, kv_dtype=dtype_of(kv_dtype or "auto"),
            shared_fusion=shared_fusion, timeout=timeout,
        )  # fmt: skip
    if unused := given(_without(asked, runtime, [done.mode])):  # which mode it would be, only the runtime knew
        done.notes.append(f"{unused}: not used in mode {done.mode}")
    if as_json:
        print_json({"ok": done.ok, **asdict(done)})
    else:
        draw.loaded(artifact, done)
        if hint := _hint(artifact, done, fused=shared_fusion):
            draw.say(hint)
    if not done.ok:
        raise typer.Exit(3)


def _without(asked: Mapping[str, Any], runtime: str, modes: list[str]) -> dict[str, Any]:
    """The options that none of these modes takes; nothing for a mode that the runtime has not, which it says itself."""
    if not set(modes) <= _TAKEN[runtime].keys():
        return {}
    taken = {name for mode in modes for name in _TAKEN[runtime][mode]}
    return {name: value for name, value in asked.items() if name not in taken}


def _hint(artifact: str, done: Loaded, *, fused: bool) -> str:
    """What to do about a load that failed, "" where there is nothing to say."""
    if done.ok or done.gap:
        return ""
    if done.runtime == "sglang" and fused and any("shared_expert" in name for name in done.unexpected):
        return "SGLang fused the shared experts with the routed ones; `launch` starts it without: --no-shared-fusion"
    runtime = f" --runtime {done.runtime}" if done.runtime in ("vllm", "sglang") else ""
    return f"`phasefold check {artifact}{runtime}` tells what the load rules find, and what to change"
