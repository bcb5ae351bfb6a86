"""`phasefold load`: really load an artifact into a runtime, in a process of its own, with a time limit.

A runtime has its own Python where its packages do not go together with ours; it needs no phasefold there: the worker
runs from this package's folder. What the runtime cannot do is told as its gap, what the artifact lacks as missing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, LoadError, UsageError
from .logs import about_weights, flat
from .versions import gap_of, proven

RUNTIMES = ("reference", "transformers", "vllm", "sglang")
MODES = {"vllm": ("dry", "reference", "real"), "sglang": ("dry", "real")}  # of the others there is one only
_POLL = 0.2  # seconds between two looks at the worker and its memory
_START = """
import importlib.util, runpy, sys
here = sys.argv[1]
spec = importlib.util.spec_from_file_location("phasefold", here + "/__init__.py", submodule_search_locations=[here])
sys.modules["phasefold"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
runpy.run_module("phasefold.serving.runtimes.worker", run_name="__main__")
"""


@dataclass(slots=True)
class Loaded:
    """What came of it.

    proven: this version is one that our tests were run with. mode: "dry", "reference" (decoded weights) or "real".
    missing: parameters with nothing, or not everything, written. unexpected: checkpoint tensors that nobody took.
    text: what was generated; None in dry mode. gap: a limit of the runtime itself, "" where none was met. refused: the
    runtime's own exception. optional: parameters that may stay unwritten, and why. methods: kernels -> modules.
    peak_rss_bytes: most memory of the worker and its processes.
    """

    runtime: str
    version: str = ""
    proven: bool = False
    mode: str = ""
    model_class: str = ""
    tensors: int = 0
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    text: str | None = None
    token_ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    gap: str = ""
    refused: str = ""
    optional: list[str] = field(default_factory=list)
    methods: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    wall_seconds: float = 0.0
    peak_rss_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Loaded, all of it, and where it was to generate it did."""
        whole = not (self.missing or self.unexpected or self.refused or self.gap)
        return whole and (self.mode == "dry" or self.text is not None)


def load(
    folder: Path,
    runtime: str,
    *,
    mode: str | None = None,
    python: Path | None = None,
    prompt: str | None = None,
    tokens: int = 16,
    tp: int = 1,
    sm: int = 90,
    data: bool = False,
    kv_dtype: str = "auto",
    shared_fusion: bool = True,
    dtype: str = "bfloat16",
    timeout: float = 1800.0,
) -> Loaded:
    """Ask a runtime to load a folder and, but in dry mode, to continue a prompt by `tokens` tokens.

    mode: "dry", "reference" or "real"; without it "real" where the runtime can run here, else "dry". python: the
    interpreter that has the runtime. sm: compute capability that a dry load pretends. data: a dry load reads the
    weights too, and looks for what was never written by its value. shared_fusion: SGLang may serve shared experts as
    routed ones. dtype: in which vLLM's reference mode computes.
    timeout: seconds.
    Raises LoadError where the runtime cannot be asked: not installed, killed, crashed, out of time; CheckpointError
    where the folder cannot be opened, UsageError for a mode that the runtime has not.
    """
    if mode is not None and mode not in MODES.get(runtime, ("real",)):
        raise UsageError(f"{runtime}: has no mode {mode!r}, only {', '.join(MODES.get(runtime, ('real',)))}")
    interpreter = python or find_python(runtime)
    job = {
        "folder": str(Path(folder).resolve()), "runtime": runtime, "mode": mode, "prompt": prompt, "tokens": tokens,
        "tp": tp, "sm": sm, "data": data, "kv_dtype": kv_dtype, "shared_fusion": shared_fusion, "dtype": dtype,
    }  # fmt: skip
    found = run_worker(interpreter, job, timeout)
    if "error" in found:
        raise (CheckpointError if found["damaged"] else LoadError)(found["error"])
    known = {name: found[name] for name in Loaded.__dataclass_fields__ if name in found}
    loaded = Loaded(**known | {"runtime": runtime})
    loaded.proven = proven("transformers" if runtime == "reference" else runtime, loaded.version.rpartition(" ")[2])
    if loaded.refused and not loaded.gap:
        loaded.gap = gap_of(runtime, loaded.version, " ".join([loaded.refused, *loaded.log]))
    if loaded.refused and loaded.gap:
        loaded.missing.clear()  # it stopped half way, so that says nothing of the artifact
    return loaded


def find_python(runtime: str) -> Path:
    """The interpreter that has a runtime: this one, or that of the environment beside it. Raises LoadError."""
    module = "transformers" if runtime == "reference" else runtime
    if runtime not in RUNTIMES:
        raise LoadError(f"{runtime!r} is no runtime; there are {', '.join(RUNTIMES)}")
    if importlib.util.find_spec(module) is not None:
        return Path(sys.executable)
    beside = Path(f"{sys.prefix}-{runtime}", "bin", "python")
    if beside.exists():
        return beside
    raise LoadError(
        f"{runtime}: neither this Python nor {beside} has it; `make runtimes` builds what there is for this machine, "
        f"or give the Python that has it with --python"
    )


def run_worker(python: Path, job: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Start the worker on a job, wait for it, end it and all that it started; -> its answer. Raises LoadError."""
    who = f"{job['runtime']} on {job['folder']}"
    with tempfile.TemporaryDirectory(prefix="phasefold-") as place, open(Path(place, "output"), "w+b") as output:
        result = Path(place, "result.json")
        command = [str(python), "-c", _START, str(Path(__file__).resolve().parents[2])]
        try:
            worker = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise LoadError(f"{python}: cannot be started ({error.strerror})") from None
        started, peak = time.monotonic(), 0
        try:
            assert worker.stdin is not None
            with contextlib.suppress(BrokenPipeError), worker.stdin as stdin:  # a dead one is told below
                stdin.write(json.dumps(job | {"result": str(result)}).encode())
            while worker.poll() is None and time.monotonic() - started < timeout:
                peak = max(peak, _group_memory(worker.pid))
                time.sleep(_POLL)
            late = worker.poll() is None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)  # itself, if it still runs, and whatever it left behind
            worker.wait()
        if late:
            raise LoadError(f"{who}: not done after {timeout:g} s, so it was ended{_last_lines(output)}")
        if not result.exists():
            raise LoadError(f"{who}: {_death(worker.returncode)}{_last_lines(output)}")
        answer: dict[str, Any] = json.loads(result.read_bytes())
        if answer.get("mode") == "real" and job["runtime"] in MODES:  # whose engines run in processes of their own
            answer["log"] = [*answer.get("log", []), *_warnings(output)]
    answer["peak_rss_bytes"] = max(peak, answer["peak_rss_bytes"])
    return answer


def _death(code: int) -> str:
    if code >= 0:
        return f"the worker ended with status {code} and no answer"
    name = signal.Signals(-code).name
    hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"the worker was ended by {name}{hint}"


def _last_lines(output: Any) -> str:
    """The end of what a worker printed, to be put behind a message."""
    output.seek(max(0, os.fstat(output.fileno()).st_size - 4000))
    lines = [flat(line, 200) for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    return f"; its last lines: {' | '.join(lines[-3:])}" if lines else ""


def _warnings(output: Any) -> list[str]:
    """The warnings about weights among what a worker and its processes printed, each once."""
    output.seek(0)
    lines = (line.decode(errors="replace") for line in output)
    return list(dict.fromkeys(flat(line) for line in lines if re.search("WARN|ERROR", line) and about_weights(line)))


def _group_memory(group: int) -> int:
    """Bytes that the processes of a group hold now, what they share counted once; 0 where there is no /proc."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, StopIteration):
            if int(stat.read_bytes().rpartition(b")")[2].split()[2]) == group:
                held = (stat.parent / "smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) * 1024 for line in held if line.startswith("Pss:"))
    return total
