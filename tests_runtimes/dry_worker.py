"""Worker: dry loads by a runtime, each in a fork of one process that has imported it already (an import takes seconds).

python dry_worker.py RUNTIME SM: a line of JSON [folder, {argument: value}] on stdin -> a line "ANSWER {...}", a Dry's
fields.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

#: what takes long to import, and must not be imported before the runtime believes in its card
_SLOW = {
    "vllm": ("vllm.engine.arg_utils", "vllm.model_executor.model_loader", "vllm.model_executor.models.deepseek_v2"),
    "sglang": ("sglang.srt.models.registry",),
}


def answer(runtime: str, folder: str, arguments: dict[str, Any], sm: int) -> None:
    """Load and print; what the runtime itself prints goes to stderr."""
    dry_load = import_module(f"phasefold.serving.runtimes.{runtime}_dry").dry_load
    out = os.dup(1)
    os.dup2(2, 1)
    dry = dry_load(Path(folder), sm=sm, **arguments)
    os.write(out, f"ANSWER {json.dumps(dataclasses.asdict(dry))}\n".encode())


def main() -> None:
    """Answer until stdin ends."""
    runtime, sm = sys.argv[1], int(sys.argv[2])
    fake = import_module(f"phasefold.serving.runtimes.{runtime}_fake")
    fake.pretend_cuda(*((sm, 8) if runtime == "sglang" else (sm,)))
    import torch

    for name in _SLOW[runtime]:
        import_module(name)
    torch.set_num_threads(1)
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            code = 1
            try:
                answer(runtime, *json.loads(line), sm)
                code = 0
            finally:
                os._exit(code)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            print("FAILED", flush=True)


if __name__ == "__main__":
    main()
