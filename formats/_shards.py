"""Where the bytes of shards lie: in the checkpoint's folder, or where `phasefold.hub` reads them, by the same words."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from ..errors import CheckpointError
from ._headers import Range, natural, read_header

_OPEN_FILES = 4  # a thread's: codes and scales, of the source, may lie in different shards


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

    def sha256(self, file: str) -> str | None:
        """Of the whole shard, where somebody vouches for it; it is not hashed for this."""
        ...

    def scratch(self, order: Sequence[tuple[str, Sequence[Range]]], out: Path) -> int:
        """Bytes on the disk of `out` that reading in this order takes for itself. order: see `ShardReader.expect`."""
        ...

    def absolute(self) -> Shards:
        """The same, for processes that work in another folder."""
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

    label: what messages call it. repo: where it is on the Hub. small: the files of a repo that lie in the folder, which
    is a cache: others may have put more there. None: all that lie there count.
    """

    folder: Path
    shards: Shards
    label: str
    repo: Repo | None = None
    small: frozenset[str] | None = None

    def identity(self) -> dict[str, str]:
        """What a manifest says of it: name, and the repo and revision of one on the Hub."""
        if self.repo is None:
            return {"name": self.folder.resolve().name}
        name = self.repo.name.rpartition("/")[2]
        return {"name": name, "repo": self.repo.name, "revision": self.repo.revision}


def in_folder(place: Path | Place) -> Place:
    """A folder with everything in it, as a place; a place stays as it is."""
    return place if isinstance(place, Place) else Place(place, FolderShards(place), str(place))


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

    def sha256(self, file: str) -> str | None:
        """Nobody does."""
        return None

    def scratch(self, order: Sequence[tuple[str, Sequence[Range]]], out: Path) -> int:
        """None: it is read where it lies."""
        return 0

    def absolute(self) -> FolderShards:
        """See `Shards`."""
        return FolderShards(self.folder.absolute())

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
