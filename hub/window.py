"""Shards of a repo that are read weight by weight: fetched ahead in pieces, kept in a window of disk, and let go.

What will be read is told step by step (a step is an output shard). A source shard of which a step needs much is fetched
whole and held against the Hub's sha256; of others only the ranges that are needed, for which nothing vouches but
their length and the connection. Files of the next steps are fetched while earlier ones are worked on, as long as all of
them fit. A job that is killed finds its pieces again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..errors import HubError, PhasefoldError
from ..formats.checkpoint import Range
from .patience import Notice
from .pieces import Item, items_of, most_at_once
from .ranges import Closed, fetch
from .tree import Entry

LIMIT = 20_000_000_000
THREADS = 4  # that fetch, all of them pieces of the item that is needed first


def check_disk(place: Path, need: int) -> None:
    """HubError where a disk has no room for a window that takes so many bytes more."""
    while not place.exists():
        place = place.absolute().parent
    if need > (free := shutil.disk_usage(place).free):
        raise HubError(
            f"{place}: the window takes {need / 1e6:,.0f} MB more, the disk has {free / 1e6:,.0f} MB free; give "
            "--window less, or --window-dir elsewhere"
        )


def limit_for(repo: str, items: Sequence[Item], order: Sequence[tuple[str, Sequence[Range]]], asked: int | None) -> int:
    """Bytes that a window may hold. Raises HubError where that is asked to be less than one step needs."""
    step, need = most_at_once(items, order)
    if asked is not None and need > asked:
        raise HubError(
            f"{repo}: {step} needs {need / 1e6:,.1f} MB of the source at once, the window holds {asked / 1e6:,.1f} MB; "
            f"give --window {-(-need // 10**9)}GB, or a smaller --shard-size"
        )
    return asked or max(LIMIT, need)


def _is(handle: int, path: Path) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _sweep(place: Path) -> None:
    """Delete what killed processes have left of a repo, which nobody holds, once a job is done with it."""
    for home in place.glob("window-*"):
        with contextlib.suppress(OSError):
            handle = os.open(home / "lock", os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(home)
            finally:
                os.close(handle)
    with contextlib.suppress(OSError):
        place.rmdir()


class Window:
    """A `ShardReader` over a repo at a commit.

    place: the folder in which items wait, which others may share (each takes a folder of its own in it); None: a
    temporary one. limit: bytes that may lie there; None: `LIMIT`, or what one step needs if that is more. What nobody
    has announced by `expect` is fetched as it is read.
    """

    def __init__(
        self,
        repo: str,
        revision: str,
        files: Mapping[str, Entry],
        place: Path | None,
        limit: int | None,
        notice: Notice | None = None,
    ) -> None:
        self.repo, self.revision, self.files, self.notice = repo, revision, files, notice
        self.limit, self._asked, self._place = limit or LIMIT, limit, place
        self._home: Path | None = None
        self._lock_handle = -1
        self._changed = threading.Condition()
        self._items: dict[str, list[Item]] = {}  # by file
        self._steps: dict[str, int] = {}
        self._held = 0  # bytes that lie here, or have their place here
        self._error: BaseException | None = None
        self._closed = False
        self._threads: list[threading.Thread] = []

    def read(self, file: str, offset: int, out: memoryview, what: str) -> None:
        """See `ShardReader`. Waits where the bytes are still on their way."""
        if not len(out):
            return
        with self._changed:
            item = self._item(file, offset, offset + len(out))
            while item is not None and not item.ready:
                if self._error:
                    raise self._error
                if self._closed:
                    raise HubError(f"{self.repo}: {file} is not fetched any more (at {what})")
                self._changed.wait()
                item = self._item(file, offset, offset + len(out))  # it may have been let go
            if item is not None:
                handle = os.open(item.path, os.O_RDONLY)
        if item is None:
            out[:] = self._fetch(file, offset, offset + len(out))
            return
        try:
            done = 0
            while done < len(out):
                got = os.preadv(handle, [out[done:]], offset - item.start + done)
                if got == 0:
                    raise HubError(f"{item.path}: truncated while it was read (at {what})")
                done += got
        finally:
            os.close(handle)

    def _item(self, file: str, start: int, stop: int) -> Item | None:
        """What holds these bytes, or will: of several items the one that comes first."""
        found = [i for i in self._items.get(file, ()) if i.steps and i.start <= start and stop <= i.stop]
        return min(found, key=lambda item: min(item.steps), default=None)

    def expect(self, order: Sequence[tuple[str, Sequence[Range]]]) -> None:
        """See `ShardReader`. Raises HubError where a step alone needs more than the window holds."""
        if not order:
            return
        try:
            home = self._claim_home()
        except OSError as error:
            raise self._told(error) from None
        items = items_of(order, self.files, home)
        self.limit = limit_for(self.repo, items, order, self._asked)
        self._steps = {step: number for number, (step, _) in enumerate(order)}
        wanted = {path.name for item in items for path in (item.path, item.partial, item.journal)}
        for path in home.iterdir():
            if path.name not in wanted and path.name != "lock":
                path.unlink()
        self._check_room(home, items)
        for item in items:
            self._items.setdefault(item.file, []).append(item)
            item.found()
            self._held += item.size if item.here else 0
        for item in reversed(sorted((i for i in items if i.here), key=lambda item: min(item.steps))):
            if self._held > self.limit:  # an earlier run had a larger window
                self._drop(item)
        self._threads = [threading.Thread(target=self._work, daemon=True, name=f"fetch-{n}") for n in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def _check_room(self, home: Path, items: Sequence[Item]) -> None:
        """HubError where the disk is too small for the window, before anything is fetched."""
        there = sum(path.stat().st_blocks * 512 for path in home.iterdir())
        check_disk(home, min(self.limit, sum(item.size for item in items)) - there)

    def let_go(self, step: str) -> None:
        """See `ShardReader`."""
        with self._changed:
            number = self._steps.get(step)
            for item in [item for items in self._items.values() for item in items if number in item.steps]:
                item.steps.discard(number)
                if not item.steps:
                    self._drop(item)
            self._changed.notify_all()

    def give_up(self) -> None:
        """See `ShardReader`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """See `ShardReader`. What waits here stays for the next run, unless all steps are done."""
        self.give_up()
        until = time.monotonic() + 2
        for thread in self._threads:  # one that hangs in a request ends with it; it writes nothing any more
            thread.join(timeout=max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            for item in (item for items in self._items.values() for item in items):
                item.close()
        if self._home is not None:
            if self._place is None or not any(item.steps for items in self._items.values() for item in items):
                shutil.rmtree(self._home, ignore_errors=True)
                if self._place is not None:
                    _sweep(self._home.parent)
            os.close(self._lock_handle)
            self._home = None

    def _fetch(self, file: str, start: int, stop: int) -> bytearray:
        return fetch(self.repo, self.revision, file, start, stop, notice=self.notice, closed=lambda: self._closed)

    def _claim_home(self) -> Path:
        """A folder of our own: the first that no other process holds, so that a job finds its pieces again."""
        if self._place is None:
            home = self._home = Path(tempfile.mkdtemp(prefix="phasefold-window-"))
            self._lock_handle = os.open(home / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            return home
        place = self._place / f"{self.repo.replace('/', '--')}@{self.revision[:12]}"  # never another one's shards
        place.mkdir(parents=True, exist_ok=True)
        for number in range(4096):
            home = place / f"window-{number}"
            try:
                home.mkdir(parents=True, exist_ok=True)
                handle = os.open(home / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            except FileNotFoundError:  # somebody has just swept it away
                continue
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is(handle, home / "lock"):  # else its owner has just removed it
                    self._home, self._lock_handle = home, handle
                    return home
            os.close(handle)
        raise HubError(f"{self._place}: other processes hold all its windows")

    def _work(self) -> None:
        try:
            while (task := self._next()) is not None:
                item, piece = task
                if piece is not None:
                    data = self._fetch(item.file, item.start + piece[0], item.start + piece[1])
                    with self._changed:
                        if self._closed:
                            return
                        item.put(piece, data)
                        self._changed.notify_all()
                    continue
                good = item.is_good()
                with self._changed:
                    if self._closed:  # the folder is no longer ours
                        return
                    item.settle(good)
                    if not item.steps:
                        self._drop(item)
                    self._changed.notify_all()
                if not good and self.notice:
                    self.notice(f"{self.repo}: {item.file} came damaged, its hash is not the Hub's; fetched once more")
        except Closed:
            pass
        except BaseException as error:
            with self._changed:
                self._error = self._error or self._told(error)
                self._changed.notify_all()

    def _told(self, error: BaseException) -> BaseException:
        if isinstance(error, OSError) and not isinstance(error, PhasefoldError):
            return HubError(f"{self._home}: the window cannot be written ({error.strerror or error})")
        return error

    def _next(self) -> tuple[Item, tuple[int, int] | None] | None:
        """The next piece to fetch, or an item whose pieces are all there; waits for room. None: nothing more to do."""
        with self._changed:
            while not (self._closed or self._error):
                if not any(item.steps for items in self._items.values() for item in items):
                    return None
                for item in self._in_order():
                    if not item.begun:
                        if not self._room(item):
                            break
                        item.begin()
                        self._held += item.size
                    if item.complete and not item.settling:
                        item.settling = True
                        return item, None
                    if (piece := item.take()) is not None:
                        return item, piece
                self._changed.wait()
        return None

    def _in_order(self) -> Iterator[Item]:
        """What is not here yet and still needed, by the first step that needs it."""
        waiting = [item for items in self._items.values() for item in items if item.steps and not item.ready]
        return iter(sorted(waiting, key=lambda item: (min(item.steps), item.file, item.start)))

    def _room(self, wanted: Item) -> bool:
        """Whether there is room for an item; items that are needed later than it give theirs."""
        here = [i for items in self._items.values() for i in items if i.here and i.steps and not i.settling]
        later = sorted((i for i in here if min(i.steps) > min(wanted.steps)), key=lambda item: min(item.steps))
        while self._held + wanted.size > self.limit and later:
            self._drop(later.pop())
        return self._held + wanted.size <= self.limit

    def _drop(self, item: Item) -> None:
        if item.settling and not item.ready:  # whoever looks at it drops it
            return
        if item.here:
            self._held -= item.size
        item.remove()
