"""A target and how it is run, as lm-eval's model_args name them, to a runner and its tokenizer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ..calib.text import load_tokenizer
from ..errors import LoadError, UsageError
from .batches import check_run
from .runner import Runner
from .target import Target, parse_target

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kMGT]?)(i?)B?")


def open_target(
    target: str,
    *,
    dtype: str = "bfloat16",
    batch_size: int | str = 8,
    memory: int | str = "16GB",
    device: str = "cpu",
    way: str = "auto",
    work: str | Path | None = None,
    trust_remote_code: bool = False,
) -> tuple[Runner, Any]:
    """As `phasefold eval` runs it. memory: bytes, or a size with its unit. Raises UsageError, and as runners do."""
    given = parse_target(target)
    if given.url is not None:
        raise UsageError(f"{target}: a server is no phasefold model; lm-eval asks it as local-completions")
    if not str(batch_size).isdecimal() or int(batch_size) < 1:
        raise UsageError(f"batch_size={batch_size}: expected 1 or more; a phasefold model does not try sizes by itself")
    batch = int(batch_size)
    tokenizer = load_tokenizer(given.folders[0], trust_remote_code=trust_remote_code)
    room, place = size_of(memory), Path(work) if work else None
    if given.is_pair:
        from .served import Served

        check_pair_way(given, dtype, batch, room, way)
        pair: Any = Served(
            *given.folders, kv=given.kv, scales=given.scales, batch=batch, device=device, dtype=check_run(dtype, batch)
        )
        return pair, tokenizer
    from .whole import open_runner

    folder = given.folders[0]
    return open_runner(folder, dtype=dtype, batch=batch, memory=room, device=device, way=way, work=place), tokenizer


def check_pair_way(pair: Target, dtype: str, batch: int, memory: int, way: str) -> None:
    """A pair runs in memory, both models: UsageError for another way, LoadError where they are larger."""
    from .whole import needed

    if way == "layers":
        raise UsageError(f"{pair.text}: a pair is served from memory; layer by layer its artifacts run one at a time")
    width = check_run(dtype, batch).itemsize
    need = sum(needed(folder, width, batch) for folder in pair.folders)
    if way == "auto" and need > memory:
        raise LoadError(
            f"{pair.text}: both models take {need / 1e9:.2f} GB, --memory allows {memory / 1e9:.2f} GB: allow more, or "
            "evaluate each artifact by itself"
        )


def size_of(text: int | str) -> int:
    """Bytes, or a size with its unit: GB = 10^9, GiB = 2^30."""
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise UsageError(f"memory={text}: is no size; write 16GB or 4GiB")
    step = 1024 if match[3] else 1000
    return int(float(match[1]) * step ** " kMGT".index(match[2] or " "))
