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
from ..formats.checkpoint import CARD, INDEX, MANIFEST, WINDOW
from ..formats.statistics import Statistics
from ..quantize import output
from ..quantize.claim import claim, settled
from ..quantize.convert import Result, clocks, guide_of, index_of, result_since, tell_claim, write_small_files
from ..quantize.plan import Plan
from ..quantize.units import Shard
from ..quantize.workers import Progress, Spent, scratch, write_shards
from .push import About, Pushed, card_of, pushed
from .tree import Meant, meant, of_file
from .upload import Upload

if TYPE_CHECKING:
    from ..quantize.cards import Cards

#: bytes of a commit; twice that of shards may lie here, in work, finished, or sent and not committed
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
    sides = plan.checkpoint.side_files()
    if output.is_finished(out, plan):
        raise ResumeError(f"{out}: holds the whole artifact already; `phasefold push {out} {upload.repo}` sends it")
    with claim(out, plan, algebra) as held_by:
        tell_claim(plan, held_by, notice)
        _forget_lost(plan, out, upload, notice)
        records = output.finished_shards(out, plan, place)
        expected = _expected(plan, sides, records)
        if len(records) == len(plan.shards):  # the manifest is known, and may be there
            write_small_files(plan, out, sides, held_by, records)
            expected[MANIFEST] = of_file(out / MANIFEST)
        todo = [shard for shard in plan.shards if shard.file not in records]
        output.check_space(out, min(2 * BATCH_BYTES, sum(s.size for s in todo)) + scratch(plan.checkpoint, out, todo))
        try:
            there = upload.begin(expected)
        except HubError:
            if not records and not (out / WINDOW).exists():  # nothing is made yet: give the folder free
                output.remove_work(out)
            raise
        sender = _Sender(out, upload)
        for shard in plan.shards:
            if shard.file in there and shard.file in records:
                sender.let_go(shard.file)
                upload.skipped[shard.file] = shard.size
        if progress:
            progress(sum(shard.source_bytes for shard in plan.shards if shard.file in records))
        with sender:
            for shard in plan.shards:
                if shard.file in records and shard.file not in there:
                    sender.landed(shard)
            busy = write_shards(plan.checkpoint, out, todo, workers, progress, guide, cards, sender).busy
        if busy:
            raise ResumeError(f"{out / busy[0].file}: another process is writing it")
        manifest = write_small_files(plan, out, sides, held_by, settled(plan, out, place))
        small: dict[str, bytes | Path] = {name: out / name for name in (*sides, INDEX, MANIFEST) if name != CARD}
        small["config.json"] = plan.config
        small[CARD] = card_of(out, plan.config, manifest, upload, about).encode()
        revision = upload.finish(small)
        job = output.claim_path(out)
        output.atomic_write(
            job, output.to_json(json.loads(job.read_bytes()) | {"pushed": f"{place} ({revision[:12]})"})
        )
    return Streamed(result_since(began, plan, cards, len(records), manifest, Spent()), pushed(upload, revision))


def _forget_lost(plan: Plan, out: Path, upload: Upload, notice: Callable[[str], None] | None) -> None:
    """Take back the records of shards that were sent and are in the branch no more: they are made again, and said."""
    sent = {
        file: one for file, one in output.finished_shards(out, plan, str(upload)).items() if not (out / file).exists()
    }
    there = upload.present({file: Meant(int(one["bytes"]), str(one["sha256"])) for file, one in sent.items()})
    if lost := [file for file in sent if file not in there]:
        for file in lost:
            output.record_path(out, file).unlink()
        if notice:
            notice(f"{upload}: {lost[0]} and {len(lost) - 1:,} more were sent there and are gone; they are made anew")


def _expected(plan: Plan, sides: Iterable[str], records: Mapping[str, Mapping[str, Any]]) -> dict[str, Meant]:
    """Every file that the artifact will have, with what is known of it; of the manifest only that it will be there."""
    found = {shard.file: Meant(shard.size, records.get(shard.file, {}).get("sha256")) for shard in plan.shards}
    found |= {name: of_file(plan.checkpoint.folder / name) for name in sides if name != CARD}
    return found | {INDEX: meant(index_of(plan)), "config.json": meant(plan.config), MANIFEST: Meant(-1, None)}


class _Sender:
    """A thread that sends shards as they are finished, and lets go those that the Hub has: a `Landing`.

    A context manager: leaving it waits until all are sent; an exception leaves at once.
    """

    def __init__(self, out: Path, upload: Upload) -> None:
        self.out, self.upload = out, upload
        self._changed = threading.Condition()
        self._waiting: deque[Shard] = deque()
        self._here: dict[str, int] = {}  # bytes of shards in work, or finished and not yet let go
        self._full = self._ends = self._stops = False
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

    def may_begin(self, shard: Shard) -> bool:
        """See `Landing`."""
        with self._changed:
            if self._error:
                raise self._error
            self._full = bool(self._here) and sum(self._here.values()) + shard.size > 2 * BATCH_BYTES
            if self._full:
                self._changed.notify_all()
            else:
                self._here[shard.file] = shard.size
            return not self._full

    def wait(self) -> None:
        """See `Landing`."""
        with self._changed:
            self._changed.wait(timeout=0.5)

    def landed(self, shard: Shard) -> None:
        """See `Landing`."""
        with self._changed:
            self._here[shard.file] = shard.size
            self._waiting.append(shard)
            self._changed.notify_all()

    def given_up(self, shard: Shard) -> None:
        """See `Landing`."""
        with self._changed:
            self._here.pop(shard.file, None)
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            while not self._stops:
                shard = self._next()
                if self._stops:
                    return
                if shard is not None:
                    record = output.record_of(self.out, shard)
                    if record is None:
                        raise HubError(f"{self.out / shard.file}: has gone before it was sent; give the command again")
                    self.upload.add(shard.file, self.out / shard.file, shard.size, str(record["sha256"]))
                else:  # all is sent, or workers wait for room
                    self.upload.commit()
                with self._changed:
                    there = [file for file in self._here if file in self.upload.committed]
                for file in there:
                    self.let_go(file)
                if shard is None and self._ends:
                    return
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> Shard | None:
        """The next shard to send; None where what was sent is to be committed now."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ends or (self._full and self.upload.pending))
            return self._waiting.popleft() if self._waiting else None

    def let_go(self, file: str) -> None:
        """The Hub has a shard: note it, then delete it here."""
        path = output.record_path(self.out, file)
        record = json.loads(path.read_bytes())
        if record.get("sent") != str(self.upload):
            output.atomic_write(path, output.to_json(record | {"sent": str(self.upload)}))
        (self.out / file).unlink(missing_ok=True)
        with self._changed:
            self._here.pop(file, None)
            self._changed.notify_all()
