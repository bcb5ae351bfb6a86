"""The threads of a conversion: who works on which unit, and what happens when one of them fails."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..formats.checkpoint import Checkpoint, Reader
from . import output
from .blocks import Buffers
from .guide import Guide
from .shard import Busy, Outcome, ShardWriter
from .units import Shard, Unit
from .work import run_unit

if TYPE_CHECKING:
    from .cards import Cards
    from .plan import Plan

Progress = Callable[[int], None]


class Landing(Protocol):
    """Takes shards that are finished, and bounds what lies here of them and of those in work."""

    def may_begin(self, shard: Shard) -> bool:
        """Whether there is room for one more; if so it is taken. Raises what has gone wrong with earlier ones."""
        ...

    def wait(self) -> None:
        """For room, a short while."""
        ...

    def landed(self, shard: Shard) -> None:
        """One is finished."""
        ...

    def given_up(self, shard: Shard) -> None:
        """One that was to begin is left to another process: its room is free."""
        ...


@dataclass
class _Open:
    """A shard that is being written: its units that nobody has taken yet."""

    writer: ShardWriter
    left: Iterator[Unit]


@dataclass
class Tasks:
    """Hands out the units of a job, shard after shard, and closes each shard with its last unit.

    closed: told the name of each shard that is finished, by this process or by another one.
    sources: of each shard the files that it is made of, and their stamps before the first of them is read.
    busy: shards that another process is writing.
    stop: set when a worker has failed or the job is interrupted; all then end soon.
    """

    out: Path
    shards: list[Shard]
    progress: Progress | None
    closed: Callable[[str], None]
    sources: Mapping[str, Mapping[str, Any]]
    landing: Landing | None = None
    busy: list[Shard] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _opened: list[_Open] = field(default_factory=list)
    _begun: int = 0

    def take(
        self,
        mine: ShardWriter | None = None,
        *,
        apart: bool = False,
        before_waiting: Callable[[], None] = lambda: None,
    ) -> tuple[ShardWriter, Unit] | None:
        """The next unit, of the shard that is open; None when there are no more. Waits while there is no room for one.

        apart: of a shard of the worker's own (`mine` is the one it had last), and only at the end of others'. To hash a
        shard is one thread's work at a time; shards side by side are hashed side by side. before_waiting: what the
        worker has to end first, because others may wait for it.
        """
        while not self.stop.is_set():
            with self._lock:
                for shard in self._in_order(mine, apart):
                    if (unit := next(shard.left, None)) is not None:
                        return shard.writer, unit
                if self._begun == len(self.shards) or self.landing is None:
                    return None
            before_waiting()
            self.landing.wait()
        return None

    def _in_order(self, mine: ShardWriter | None, apart: bool) -> Iterator[_Open]:
        yield from [shard for shard in self._opened if shard.writer is mine or not apart]
        while self._begun < len(self.shards):
            shard = self.shards[self._begun]
            if self.landing is not None and not self.landing.may_begin(shard):
                break
            self._begun += 1
            if (writer := self._writer(shard)) is not None:
                self._opened.append(_Open(writer, iter(shard.units)))
                yield self._opened[-1]
            elif self.landing is not None:
                self.landing.given_up(shard)
        yield from self._opened

    def _writer(self, shard: Shard) -> ShardWriter | None:
        """None where another process, with another part of this job, has written the shard by now, or is at it."""
        if output.record_of(self.out, shard) is None:
            try:
                writer = ShardWriter(self.out, shard, self.sources.get(shard.file))
            except Busy:
                self.busy.append(shard)
                self.closed(shard.file)
                return None
            if output.record_of(self.out, shard) is None:
                return writer
            writer.abandon()  # it has landed between the question and the lock
        if self.progress:
            self.progress(shard.source_bytes)
        self.closed(shard.file)
        return None

    def done(self, writer: ShardWriter, unit: Unit, outcome: Outcome) -> None:
        """A unit is written."""
        if self.stop.is_set():  # it may have been left half-way
            return
        if writer.finish_unit(unit, outcome):
            writer.close()
            self.closed(writer.shard.file)
            with self._lock:
                self._opened = [shard for shard in self._opened if shard.writer is not writer]
            if self.landing is not None:
                self.landing.landed(writer.shard)
        if self.progress:
            with self._lock:
                self.progress(unit.source_bytes)

    def abandon(self) -> None:
        """Let half-written shards go."""
        for shard in self._opened:
            shard.writer.abandon()


def source_tensors(shard: Shard) -> list[str]:
    """What is read for an output shard, in the order of its units."""
    return [unit.module + part.suffix for unit in shard.units for part in unit.source]


def scratch(checkpoint: Checkpoint, out: Path, shards: Sequence[Shard]) -> int:
    """Bytes on the disk of `out` that reading the source for these shards takes; 0 where it lies in a folder."""
    ranges = [(shard.file, [checkpoint.tensors[name].range for name in source_tensors(shard)]) for shard in shards]
    return checkpoint.shards.scratch(ranges, out)


def _sources(checkpoint: Checkpoint, shards: Sequence[Shard]) -> dict[str, dict[str, Any]]:
    """Of each shard the source's files that it is made of, with their stamps."""
    tensors, now = checkpoint.tensors, output.stamps(checkpoint)
    files = {shard.file: dict.fromkeys(tensors[name].file for name in source_tensors(shard)) for shard in shards}
    return {shard: {file: now[file] for file in made} for shard, made in files.items()}


class Spent(NamedTuple):
    """What writing shards took in other processes than this one, and which were left to those who were writing them."""

    cpu_seconds: float = 0.0
    peak_rss_bytes: int = 0
    busy: Sequence[Shard] = ()


#: writes shards of a plan into a folder that is claimed for it
Executor = Callable[["Plan", Path, list[Shard], Progress | None], Spent]


def write_shards(
    checkpoint: Checkpoint,
    out: Path,
    shards: list[Shard],
    workers: int,
    progress: Progress | None,
    guide: Guide | None,
    cards: Cards | None = None,
    landing: Landing | None = None,
    stop: threading.Event | None = None,
) -> Spent:
    """Write shards by `workers` threads, each of which works on a unit at a time, or by the lanes of cards.

    landing: where finished shards go on from here, and what says when there is room for more.
    stop: set by others, ends it soon; what is half written goes.
    """
    if not shards:
        return Spent()
    reader = Reader(checkpoint)
    reader.expect([(shard.file, source_tensors(shard)) for shard in shards])
    tasks = Tasks(
        out, shards, progress, reader.let_go, _sources(checkpoint, shards), landing, stop=stop or threading.Event()
    )

    def work() -> None:
        buffers = Buffers()
        while not tasks.stop.is_set() and (task := tasks.take()) is not None:
            writer, unit = task
            tasks.done(writer, unit, run_unit(unit, reader, writer, buffers, tasks.stop, guide))

    jobs: list[Callable[[], None]]
    if cards is None:
        jobs = [work] * min(workers, sum(len(shard.units) for shard in shards))
    else:
        jobs = cards.jobs(tasks, reader, guide)

    def guarded(job: Callable[[], None]) -> None:
        try:
            with output.writing(out):
                job()
        except BaseException as error:
            failed.append(error)  # others may now fail because of it, and are not what is told
            tasks.stop.set()
            reader.give_up()
            raise

    failed: list[BaseException] = []
    pool = ThreadPoolExecutor(len(jobs), thread_name_prefix="phasefold")
    try:
        with guide.one_thread() if guide else contextlib.nullcontext():
            for future in [pool.submit(guarded, job) for job in jobs]:
                future.exception()
        if failed:
            raise failed[0]
    finally:  # also on SIGINT: let the workers end their row block, then clear what is half done
        tasks.stop.set()
        reader.give_up()
        pool.shutdown(wait=True)
        reader.close()
        tasks.abandon()
    return Spent(busy=tuple(tasks.busy))
