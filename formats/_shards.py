"""Where the bytes of shards lie, and how their headers are read.

Most lie in the checkpoint's folder. `phasefold.hub` has another place for them, which speaks the same words.
Reading is strict, because what is accepted here is trusted everywhere: every header field is checked before it sizes
anything.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..errors import CheckpointError
from . import DTYPES, Shape

MAX_HEADER = 100_000_000  # the safetensors library refuses longer ones
_OPEN_FILES = 4  # a thread's: codes and scales, of the source, may lie in different shards


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


class ShardReader(Protocol):
    """Positioned reads, from any number of threads."""

    def read(self, file: str, offset: int, out: memoryview, what: str) -> None:
        """Fill `out` with a shard's bytes from `offset` on. Raises PhasefoldError, and names the tensor: `what`."""
        ...

    def expect(self, order: Sequence[tuple[str, Sequence[Range]]]) -> None:
        """What will be read, step by step: so that it can be fetched ahead. Steps have names."""
        ...

    def let_go(self, step: str) -> None:
        """A step is done."""
        ...

    def give_up(self) -> None:
        """Whoever waits for bytes is to wait no longer; from any thread."""
        ...

    def close(self) -> None:
        """No other thread may be reading."""
        ...


class Shards(Protocol):
    """A checkpoint's shards, wherever they lie. A value that can be sent to other processes."""

    def names(self) -> Sequence[str]:
        """All of them, in natural order (2 before 10)."""
        ...

    def heads(self, files: Sequence[str]) -> Iterator[tuple[int, bytes]]:
        """File size and raw JSON header of each. Raises CheckpointError where there is none."""
        ...

    def samples(self, places: Mapping[str, Sequence[int]], nbytes: int) -> list[bytes]:
        """Of each file up to `nbytes` at each of its places, one after the other."""
        ...

    def stamp(self, file: str) -> list[int | str]:
        """Differs once a shard has changed."""
        ...

    def open(self) -> ShardReader:
        """For reading weights."""
        ...


class Repo(NamedTuple):
    """A repo on the Hub at a commit. asked: the branch, tag or commit that was asked for; None: the main branch."""

    name: str
    revision: str
    asked: str | None


class Place(NamedTuple):
    """Where a checkpoint is: the folder of its small files, and its shards.

    label: what messages call it. repo: where it is on the Hub.
    """

    folder: Path
    shards: Shards
    label: str
    repo: Repo | None = None

    def identity(self) -> dict[str, str]:
        """What a manifest says of it: name, and the repo and revision of one on the Hub."""
        if self.repo is None:
            return {"name": self.folder.resolve().name}
        name = self.repo.name.rpartition("/")[2]
        return {"name": name, "repo": self.repo.name, "revision": self.repo.revision}


def in_folder(place: Path | Place) -> Place:
    """A folder with everything in it, as a place; a place stays as it is."""
    return place if isinstance(place, Place) else Place(place, FolderShards(place), str(place))


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key under which `model-2` comes before `model-10`."""
    return [(int(digits or 0), text) for text, digits in re.findall(r"(\D*)(\d*)", name)]


@dataclass(frozen=True)
class FolderShards:
    """The shards of a folder."""

    folder: Path

    def names(self) -> Sequence[str]:
        """See `Shards`."""
        return sorted((name for name in os.listdir(self.folder) if name.endswith(".safetensors")), key=natural)

    def heads(self, files: Sequence[str]) -> Iterator[tuple[int, bytes]]:
        """See `Shards`."""
        return (read_header(self.folder / file) for file in files)

    def samples(self, places: Mapping[str, Sequence[int]], nbytes: int) -> list[bytes]:
        """See `Shards`."""
        found = []
        for file, wanted in places.items():
            path = self.folder / file
            try:
                with open(path, "rb", buffering=0) as opened:
                    found.append(b"".join(os.pread(opened.fileno(), nbytes, place) for place in wanted))
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
        return found

    def stamp(self, file: str) -> list[int | str]:
        """Size and time of change, nanoseconds."""
        try:
            found = (self.folder / file).stat()
        except OSError as error:
            raise CheckpointError(f"{error.filename}: cannot be read ({error.strerror})") from None
        return [found.st_size, found.st_mtime_ns]

    def open(self) -> FolderReader:
        """See `Shards`."""
        return FolderReader(self.folder)


class FolderReader:
    """Each thread holds a few files open, so that a checkpoint of any number of shards can be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._local = threading.local()
        self._all: list[dict[str, int]] = []  # what each thread holds open

    def read(self, file: str, offset: int, out: memoryview, what: str) -> None:
        """See `ShardReader`."""
        path = self.folder / file
        try:
            handle, done = self._open(file, path), 0
            while done < len(out):
                got = os.preadv(handle, [out[done:]], offset + done)
                if got == 0:
                    raise CheckpointError(f"{path}: truncated while it was read (at {what})")
                done += got
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror}), at {what}") from None

    def _open(self, file: str, path: Path) -> int:
        held: dict[str, int] | None = getattr(self._local, "held", None)
        if held is None:
            held = self._local.held = {}
            self._all.append(held)
        if file not in held:
            if len(held) == _OPEN_FILES:
                os.close(held.pop(next(iter(held))))
            held[file] = os.open(path, os.O_RDONLY)
        return held[file]

    def expect(self, order: Sequence[tuple[str, Sequence[Range]]]) -> None:
        """Nothing to do: it is here."""

    def let_go(self, step: str) -> None:
        """Nothing to do."""

    def give_up(self) -> None:
        """Nothing to do: nobody waits."""

    def close(self) -> None:
        """See `ShardReader`."""
        for held in self._all:
            while held:
                os.close(held.popitem()[1])


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
