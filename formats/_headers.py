"""Reading config.json and the headers of shards, strictly: what is accepted here is trusted everywhere.

Every header field is checked before it sizes anything.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError
from . import DTYPES, Shape

MAX_HEADER = 100_000_000  # the safetensors library refuses longer ones


class Stored(NamedTuple):
    """One tensor on disk: safetensors dtype, shape, file name, absolute offset and bytes of its data."""

    dtype: str
    shape: Shape
    file: str
    offset: int
    nbytes: int

    @property
    def range(self) -> Range:
        """Its bytes in its shard."""
        return Range(self.file, self.offset, self.offset + self.nbytes)


class Range(NamedTuple):
    """Bytes `start` to `stop` (exclusive) of a shard."""

    file: str
    start: int
    stop: int


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key under which `model-2` comes before `model-10`."""
    return [(int(digits or 0), text) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def read_file(path: Path) -> bytes:
    """All bytes of a small file. Raises CheckpointError where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None


def parse_json(raw: bytes, where: Path | str) -> dict[str, Any]:
    """A JSON object without duplicate keys. Raises CheckpointError on anything else."""
    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {twice!r} stands in it twice")
    return value


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


def read_header(path: Path) -> tuple[int, bytes]:
    """File size and the raw JSON header of a shard. Raises CheckpointError where there is none."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError(f"{path}: is no file")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = header_length(file.read(8), size, path)
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    if len(raw) != length:
        raise CheckpointError(f"{path}: ends within its header")
    return size, raw


def header_length(prefix: bytes, size: int, where: Path | str) -> int:
    """Bytes of a shard's header, from its first eight bytes. Raises CheckpointError where that cannot be."""
    length: int = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= length <= min(size - 8, MAX_HEADER):
        raise CheckpointError(f"{where}: not a safetensors file: a header of {length:,} bytes in a file of {size:,}")
    return length


def parse_header(raw: bytes, size: int, file: str, where: Path | str) -> Iterator[tuple[str, Stored]]:
    """The tensors of one shard, by offset. `size` is the file's; the data must fill it without overlap or hole."""
    header = parse_json(raw, where)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{where}: __metadata__ is not a map from text to text")
    start = 8 + len(raw)
    found = [(name, _stored(name, entry, file, start, where)) for name, entry in header.items()]
    found.sort(key=lambda item: (item[1].offset, item[1].nbytes))
    end = start
    for name, stored in found:
        if stored.offset != end:
            what = "overlaps the tensor before it" if stored.offset < end else "leaves a hole before it"
            raise CheckpointError(
                f"{where}: {name} {what} (offset {stored.offset - start:,}, expected {end - start:,})"
            )
        end += stored.nbytes
    if end != size:
        what = f"truncated: the header needs {end:,} bytes" if end > size else f"longer than its header's {end:,} bytes"
        raise CheckpointError(f"{where}: {what}, the file has {size:,}")
    yield from found


def _stored(name: str, entry: Any, file: str, start: int, where: Path | str) -> Stored:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: {name}: expected dtype, shape and data_offsets, found {str(entry)[:80]}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where}: {name}: unknown dtype {str(dtype)[:40]!r}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{where}: {name}: shape {str(shape)[:60]} or data_offsets {str(offsets)[:60]} are no sizes"
        )
    nbytes = math.prod(shape) * DTYPES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(
            f"{where}: {name}: {dtype} {shape} takes {nbytes:,} bytes, but its offsets span {offsets[1] - offsets[0]:,}"
        )
    return Stored(dtype, tuple(shape), file, start + offsets[0], nbytes)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
