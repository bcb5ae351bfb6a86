"""A conversion whose finished shards go up to a repo while later ones are made, and are let go here.

The output folder keeps what is small: the claim, the records of all shards with their hashes, and at the end the side
files, the index and the manifest; no config.json, because the weights are not there. Given again, the same job sends
what is not on the Hub yet, and nothing else.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import HubError, ResumeError
from ..formats.checkpoint import CARD, INDEX, MANIFEST, side_files
from ..formats.statistics import Statistics
from ..quantize import output
from ..quantize.claim import claim
from ..quantize.convert import Result, clocks, guide_of, index_of, result_since, tell_algebra, write_small_files
from ..quantize.plan import Plan
from ..quantize.units import Shard
from ..quantize.workers import Progress, Spent, write_shards
from .push import About, Pushed, card_of, pushed
from .tree import Meant, meant, of_file
from .upload import Upload

if TYPE_CHECKING:
    from ..quantize.cards import Cards

#: bytes of a commit, and of shards that wait for the connection: with the shards that are written, and the window of a
#: source on the Hub, this is all that lies on disk
BATCH_BYTES = 10_000_000_000


class Streamed(NamedTuple):
    """What was converted, and what was pushed."""

    result: Result
    pushed: Pushed


def convert_to_repo(
    plan: Plan,
    out: Path,
    upload: Upload,
    about: About,
    *,
    workers: int = 2,
    progress: Progress | None = None,
    statistics: Statistics | None = None,
    notice: Callable[[str], None] | None = None,
    cards: Cards | None = None,
) -> Streamed:
    """Convert into a repo, or go on with it; arguments as `quantize.convert.convert` takes them.

    about: what the card says besides what the manifest knows. Raises PhasefoldError with the first thing that is wrong,
    where that can be known before anything is written; the branch never looks whole before it is.
    """
    began = clocks()
    source, place = plan.checkpoint.folder, str(upload)
    output.check_place(source, out)
    guide, algebra = guide_of(plan, statistics, workers, cards)
    sides = side_files(source)
    if output.is_finished(out, plan):
        raise ResumeError(f"{out}: holds the whole artifact already; `phasefold push {out} {upload.repo}` sends it")
    output.check_space(out, min(2 * BATCH_BYTES, sum(shard.size for shard in plan.shards)))
    with claim(out, plan, algebra) as held_by:
        tell_algebra(held_by, notice)
        records = output.finished_shards(out, plan, place)
        expected = _expected(plan, sides, records)
        if len(records) == len(plan.shards):  # the manifest is known, and may be there
            write_small_files(plan, out, sides, held_by, records)
            expected[MANIFEST] = of_file(out / MANIFEST)
        there = upload.begin(expected)
        sender = _Sender(out, upload, place)
        for shard in plan.shards:
            if shard.file in there and shard.file in records:
                sender.let_go(shard.file)
                upload.skipped[shard.file] = shard.size
            elif shard.file in records and not (out / shard.file).exists():
                raise HubError(f"{upload}: {shard.file} was sent there, and is gone; delete {out} to begin anew")
        if progress:
            progress(sum(shard.source_bytes for shard in plan.shards if shard.file in records))
        todo = [shard for shard in plan.shards if shard.file not in records]
        with sender:
            for shard in plan.shards:
                if shard.file in records and shard.file not in there:
                    sender.offer(shard)
            busy = write_shards(plan.checkpoint, out, todo, workers, progress, guide, cards, sender.offer).busy
        if busy:
            raise ResumeError(f"{out / busy[0].file}: another process is writing it")
        manifest = write_small_files(plan, out, sides, held_by, output.finished_shards(out, plan, place))
        small: dict[str, bytes | Path] = {name: out / name for name in (*sides, INDEX, MANIFEST) if name != CARD}
        small["config.json"] = plan.config
        small[CARD] = card_of(out, plan.config, manifest, upload, about).encode()
        revision = upload.finish(small)
    return Streamed(result_since(began, plan, cards, len(records), manifest, Spent()), pushed(upload, revision))


def _expected(plan: Plan, sides: Iterable[str], records: Mapping[str, Mapping[str, Any]]) -> dict[str, Meant]:
    """Every file that the artifact will have, with what is known of it; of the manifest only that it will be there."""
    found = {shard.file: Meant(shard.size, records.get(shard.file, {}).get("sha256")) for shard in plan.shards}
    found |= {name: of_file(plan.checkpoint.folder / name) for name in sides if name != CARD}
    return found | {INDEX: meant(index_of(plan)), "config.json": meant(plan.config), MANIFEST: Meant(-1, None)}


class _Sender:
    """A thread that sends shards as they are finished, and lets go those that the Hub has.

    A context manager: leaving it waits until all are sent; an exception leaves at once.
    """

    def __init__(self, out: Path, upload: Upload, place: str) -> None:
        self.out, self.upload, self.place = out, upload, place
        self._changed = threading.Condition()
        self._waiting: deque[Shard] = deque()
        self._bytes = 0  # of shards that are finished and not sent
        self._ends = self._stops = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True, name="push")

    def __enter__(self) -> _Sender:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._changed:
            self._ends, self._stops = True, kind is not None
            self._changed.notify_all()
        if kind is not None:  # an upload under way cannot be stopped, and is not waited for
            self._thread.join(timeout=1)
            return
        self._thread.join()
        if self._error:
            raise self._error

    def offer(self, shard: Shard) -> None:
        """Have a finished shard sent. Waits where too much is waiting already; raises what sending has raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes == 0 or self._bytes + shard.size <= BATCH_BYTES or self._error)
            if self._error:
                raise self._error
            self._waiting.append(shard)
            self._bytes += shard.size
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            while (shard := self._next()) is not None:
                record = output.record_of(self.out, shard)
                if record is None:
                    raise HubError(f"{self.out / shard.file}: has gone before it was sent; give the same command again")
                self.upload.add(shard.file, self.out / shard.file, shard.size, str(record["sha256"]))
                with self._changed:
                    self._bytes -= shard.size
                    self._changed.notify_all()
                self._let_go_committed()
            if not self._stops:
                self.upload.commit()
                self._let_go_committed()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> Shard | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ends)
            return self._waiting.popleft() if self._waiting and not self._stops else None

    def _let_go_committed(self) -> None:
        for file in [file for file in self.upload.committed if (self.out / file).exists()]:
            if output.record_path(self.out, file).exists():
                self.let_go(file)

    def let_go(self, file: str) -> None:
        """The Hub has a shard: note it, then delete it here."""
        path = output.record_path(self.out, file)
        record = json.loads(path.read_bytes())
        if record.get("sent") != self.place:
            output.atomic_write(path, output.to_json(record | {"sent": self.place}))
        (self.out / file).unlink(missing_ok=True)
