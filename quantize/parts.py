"""A job in parts, by processes that know nothing of each other: arrays of SLURM or Kubernetes over a shared folder.

Part i of n takes a run of neighbouring shards, about an n-th of the source's bytes: two parts read no more than one
source shard in common. Parts may be started in any order, side by side, again, and with another n. Whoever is last
finishes the job.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ResumeError, UsageError
from ..formats.statistics import Statistics
from . import kernels, output
from .claim import claim_done, share
from .convert import Result, already_done, clocks, finish_job, guide_of, peak_rss, result_since, tell_claim
from .plan import Plan
from .units import Shard
from .workers import Progress, Spent, scratch, write_shards

if TYPE_CHECKING:
    from .cards import Cards


class Part(NamedTuple):
    """Part `number` of `total`, from 1 on."""

    number: int
    total: int

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"


@dataclass(frozen=True, slots=True)
class PartResult:
    """A part that is done.

    resumed_shards: shards of this part that were there before; shards_done: that are there now; shards_missing: of the
    whole job. finished: the whole job was, before this part began. source_bytes: of this part.
    """

    plan: Plan
    part: Part
    backend: str
    resumed_shards: int
    shards_done: int
    shards_missing: int
    finished: bool
    wall_seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    source_bytes: int


def parse(text: str) -> Part:
    """ "2/8". Raises UsageError for anything but i/n with 1 <= i <= n."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--part {text}: expected i/n with i from 1 to n, as 2/8")
    return Part(int(match[1]), int(match[2]))


def shards_of(plan: Plan, part: Part) -> list[Shard]:
    """The shards of a part; none where there are more parts than shards.

    A shard belongs to the part in whose n-th of the source's bytes its middle lies.
    """
    sizes = [max(shard.source_bytes, 1) for shard in plan.shards]
    whole, before, found = sum(sizes), 0, []
    for shard, size in zip(plan.shards, sizes, strict=True):
        if (2 * before + size) * part.total // (2 * whole) == part.number - 1:
            found.append(shard)
        before += size
    return found


def convert_part(
    plan: Plan,
    out: Path,
    part: Part,
    *,
    workers: int = 2,
    progress: Progress | None = None,
    statistics: Statistics | None = None,
    notice: Callable[[str], None] | None = None,
    cards: Cards | None = None,
) -> PartResult:
    """Write the shards of one part into `out`, beside other parts that do the same. Arguments as `convert` takes them.

    Never finishes the job, nor clears its folder. Raises PhasefoldError with the first thing that is wrong, and
    ResumeError where at the end another process (a part of another n) is still writing a shard of this part.
    """
    wall, cpu = time.monotonic(), time.process_time()
    output.check_place(plan.checkpoint.folder, out)
    guide, algebra = guide_of(plan, statistics, workers, cards)
    mine = shards_of(plan, part)

    def done() -> set[str]:
        return {shard.file for shard in mine if output.record_of(out, shard) is not None}

    def result(resumed: int, missing: int, *, finished: bool) -> PartResult:
        seconds, took = time.monotonic() - wall, time.process_time() - cpu
        read = sum(shard.source_bytes for shard in mine)
        now = len(mine) if finished else len(done())
        backend = str(cards) if cards else kernels.backend()
        return PartResult(plan, part, backend, resumed, now, missing, finished, seconds, took, peak_rss(), read)

    if output.is_finished(out, plan):
        already_done(plan, out)
        return result(len(mine), 0, finished=True)
    held = done()
    left = [shard for shard in mine if shard.file not in held]
    output.check_space(out, sum(shard.size for shard in left) + scratch(plan.checkpoint, out, left))
    with share(out, plan, str(part), algebra) as claim:
        tell_claim(plan, claim, notice)
        if output.is_finished(out, plan):  # by another process, between the question and the lock
            already_done(plan, out)
            return result(len(mine), 0, finished=True)
        held = done()
        if progress:
            progress(sum(shard.source_bytes for shard in mine if shard.file in held))
        todo = [shard for shard in mine if shard.file not in held]
        while todo:
            busy = write_shards(plan.checkpoint, out, todo, workers, progress, guide, cards).busy
            left = [shard for shard in busy if output.record_of(out, shard) is None]
            if len(left) == len(todo):
                raise ResumeError(
                    f"{out / left[0].file}: another process is writing it, and {len(left) - 1} more of part {part}; "
                    "its other shards are done, give the same command again"
                )
            todo = left
        return result(len(held), len(plan.shards) - len(output.finished_shards(out, plan)), finished=False)


def finish_parts(plan: Plan, out: Path) -> tuple[Result, bool]:
    """Make an artifact of a job whose shards are done: side files, index, manifest, config.json.

    Also whether it was one before. Raises ResumeError where shards are missing, where parts are still being worked on,
    or where the folder was begun with another plan, by another version of phasefold, or with other source files.
    """
    began = clocks()
    source = plan.checkpoint.folder
    output.check_place(source, out)
    sides = plan.checkpoint.side_files()
    if before := output.is_finished(out, plan):
        done = already_done(plan, out)
    else:
        with claim_done(out, plan) as claim:
            if before := output.is_finished(out, plan):
                done = already_done(plan, out)
            else:
                done = finish_job(plan, out, sides, claim)
    return result_since(began, plan, None, len(plan.shards), done, Spent()), before
