"""What waits in a window: whole shards or ranges of them, fetched in pieces, on disk."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import HubError
from ..formats.checkpoint import Range
from .tree import Entry

PIECE = 16 << 20  # of one request: long enough for a connection to come to speed, short enough to be lost
_MUCH = 4  # a shard of which a step needs more than this part is fetched whole
_GAP = 1 << 20  # ranges that lie nearer to each other are one


@dataclass(eq=False)
class Item:
    """A shard, or a range of one, on its way into the window.

    entry: what the Hub says of the shard, where it is fetched whole; else None. steps: those that still need it.
    """

    file: str
    start: int
    stop: int
    entry: Entry | None
    home: Path
    steps: set[int] = field(default_factory=set)
    ready: bool = False
    begun: bool = False
    settling: bool = False
    _todo: list[int] = field(default_factory=list)
    _left: set[int] = field(default_factory=set)
    _handle: int = -1
    _damaged: bool = False

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def path(self) -> Path:
        """Where it lies once it is ready."""
        return self.home / f"{self.file}.{self.start}-{self.stop}"

    @property
    def partial(self) -> Path:
        """Where it lies before that; beside it a journal says which pieces are there."""
        return self.path.with_name(self.path.name + ".partial")

    @property
    def journal(self) -> Path:
        """A line a piece, in any order."""
        return self.path.with_name(self.path.name + ".pieces")

    @property
    def here(self) -> bool:
        """Whether it takes room on disk."""
        return self.begun or self.ready

    @property
    def complete(self) -> bool:
        """Whether every piece has come."""
        return self.begun and not self._left

    def found(self) -> None:
        """See what an earlier run has left of it, which is hashed once more. A range without a hash is not trusted."""
        if self.entry and self.path.exists() and self.path.stat().st_size == self.size:
            os.replace(self.path, self.partial)
            self.journal.write_text("".join(f"{number}\n" for number in range(-(-self.size // PIECE))))
        if self.entry and self.partial.exists() and self.journal.exists():
            self.begin()
        else:
            self.remove()

    def begin(self) -> None:
        """Make room for it on disk; what an earlier run has noted as fetched is kept."""
        self.home.mkdir(parents=True, exist_ok=True)
        count = -(-self.size // PIECE)
        done: set[int] = set()
        with contextlib.suppress(OSError, ValueError):
            done = {int(line) for line in self.journal.read_text().splitlines()} & set(range(count))
        self._handle = os.open(self.partial, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._handle, self.size)
        self._left = set(range(count)) - done
        self._todo = sorted(self._left)
        self.begun = True

    def take(self) -> tuple[int, int] | None:
        """The next piece that nobody fetches yet, as (first byte, behind the last) of the item."""
        if not self._todo:
            return None
        number = self._todo.pop(0)
        return number * PIECE, min((number + 1) * PIECE, self.size)

    def put(self, piece: tuple[int, int], data: bytearray) -> None:
        """Write a piece that has come."""
        if self._handle < 0:  # dropped meanwhile
            return
        done = 0
        while done < len(data):
            done += os.pwrite(self._handle, memoryview(data)[done:], piece[0] + done)
        number = piece[0] // PIECE
        with open(self.journal, "a") as journal:
            journal.write(f"{number}\n")
        self._left.discard(number)

    def is_good(self) -> bool:
        """Once it is complete: flush it, and hash it if it is a whole shard."""
        os.fsync(self._handle)
        return self.entry is None or self._hash(self.entry) == (self.entry.sha256 or self.entry.oid)

    def settle(self, good: bool) -> None:
        """Give it its name; or begin anew, if it is damaged for the first time. Raises HubError at the second."""
        self.settling = False
        self.journal.unlink(missing_ok=True)
        os.close(self._handle)
        self._handle = -1
        if good:
            os.replace(self.partial, self.path)
            self.ready = True
            return
        if self._damaged:
            raise HubError(f"{self.file}: what the Hub sends does not have the hash that it names, twice")
        self._damaged = True
        self.begin()

    def _hash(self, entry: Entry) -> str:
        """Of its bytes, as the Hub names them: sha256, or git's where the file is not LFS."""
        prefix = b"blob %d\0" % self.size
        digest = hashlib.sha256() if entry.sha256 else hashlib.sha1(prefix, usedforsecurity=False)
        view, done = memoryview(bytearray(1 << 20)), 0
        while done < self.size:
            got = os.preadv(self._handle, [view[: self.size - done]], done)
            if got == 0:
                raise OSError(errno.EIO, "shrank while it was hashed", str(self.partial))
            digest.update(view[:got])
            done += got
        return digest.hexdigest()

    def close(self) -> None:
        """Nothing is written to it any more."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1

    def remove(self) -> None:
        """Let it go, whatever there is of it."""
        self.close()
        self.begun, self.ready, self._todo, self._left = False, False, [], set()
        for path in (self.path, self.partial, self.journal):
            path.unlink(missing_ok=True)


def most_at_once(items: Sequence[Item], order: Sequence[tuple[str, Sequence[Range]]]) -> tuple[str, int]:
    """The step that needs most at once, and how many bytes."""
    need = [0] * len(order)
    for item in items:
        for number in item.steps:
            need[number] += item.size
    return max(((step, nbytes) for (step, _), nbytes in zip(order, need, strict=True)), key=lambda one: one[1])


def items_of(order: Sequence[tuple[str, Sequence[Range]]], files: Mapping[str, Entry], home: Path) -> list[Item]:
    """What has to be fetched for steps that read these ranges.

    A shard is fetched whole for a step that needs much of it, and for those beside it that need any of it.
    """
    needs = [_by_file(ranges) for _, ranges in order]
    whole = [
        {file for file, ranges in need.items() if _MUCH * sum(r.stop - r.start for r in ranges) >= files[file].nbytes}
        for need in needs
    ]
    found: dict[Range, Item] = {}
    for number, need in enumerate(needs):
        near = set().union(*whole[max(number - 1, 0) : number + 2])
        for file, ranges in need.items():
            entry = files[file] if file in near else None
            for part in [Range(file, 0, files[file].nbytes)] if entry else ranges:
                item = found.setdefault(part, Item(*part, entry=entry, home=home))
                item.steps.add(number)
    return list(found.values())


def _by_file(ranges: Sequence[Range]) -> dict[str, list[Range]]:
    """The ranges of each file, in order, those that lie near to each other as one."""
    found: dict[str, list[Range]] = {}
    for one in sorted(one for one in ranges if one.stop > one.start):
        held = found.setdefault(one.file, [])
        if held and one.start <= held[-1].stop + _GAP:
            held[-1] = Range(one.file, held[-1].start, max(one.stop, held[-1].stop))
        else:
            held.append(one)
    return found
