"""Carrying a plan out: units in parallel, shards finished one by one; a rerun goes on where the last one stopped."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import PlanError, ResumeError
from ..formats import formats
from ..formats.checkpoint import CARD, INDEX, MANIFEST, WINDOW, WORK
from ..formats.manifest import Manifest
from ..formats.statistics import Statistics
from . import kernels, output
from .claim import Claim, claim, settled
from .guide import Guide, check_statistics, guided
from .origin import origins
from .plan import Plan
from .units import Unit
from .workers import Executor, Progress, Spent, scratch, write_shards

if TYPE_CHECKING:
    from .cards import Cards


@dataclass(frozen=True, slots=True)
class Result:
    """A finished conversion. `errors`: role -> mean relative error of the units that were chosen anew or decoded."""

    plan: Plan
    backend: str
    resumed_shards: int
    wall_seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    source_bytes: int
    errors: Mapping[str, float]
    manifest: Manifest


def convert(
    plan: Plan,
    out: Path,
    *,
    workers: int = 2,
    progress: Progress | None = None,
    statistics: Statistics | None = None,
    notice: Callable[[str], None] | None = None,
    cards: Cards | None = None,
    executor: Executor | None = None,
) -> Result:
    """Write the artifact that `plan` describes into `out`, or go on with it.

    Needs no memory but a few row blocks a worker; GPTQ `guide.worker_bytes`. `progress` is told the source bytes of
    each unit that is done. statistics: those that the plan was made with, where any of its units is guided by them.
    `notice` is told in a sentence where finished shards are made anew, because a file of the source has changed.
    cards: where units are converted, by its lanes instead of `workers`; else on the CPU.
    executor: writes the shards instead of this process's threads, see `ray_tasks`.
    Raises PhasefoldError with the first thing that is wrong; finished shards stay, and the folder never looks whole.
    """
    began = clocks()
    source = plan.checkpoint.folder
    output.check_place(source, out)
    guide, algebra = guide_of(plan, statistics, workers, cards)
    sides, spent = plan.checkpoint.side_files(), Spent()
    if output.is_finished(out, plan):
        done, resumed = already_done(plan, out), len(plan.shards)
    else:
        held = output.finished_shards(out, plan)
        left = [shard for shard in plan.shards if shard.file not in held]
        need = sum(sides.values()) + sum(shard.size for shard in left)
        output.check_space(out, need + scratch(plan.checkpoint, out, left))
        with claim(out, plan, algebra) as held_by:
            tell_claim(plan, held_by, notice)
            if output.is_finished(out, plan):  # by another process, between the question and the lock
                done, resumed = already_done(plan, out), len(plan.shards)
            else:
                held = output.finished_shards(out, plan)
                resumed = len(held)
                if notice and (sent := output.sent_shards(out, plan)):
                    notice(
                        f"{len(sent):,} shards were sent to {sent[0]} and are not here any more: they are made again"
                    )
                if progress:
                    progress(sum(u.source_bytes for s in plan.shards if s.file in held for u in s.units))
                todo = [shard for shard in plan.shards if shard.file not in held]
                try:
                    if executor:
                        spent = executor(plan, out, todo, progress)
                    else:
                        spent = write_shards(plan.checkpoint, out, todo, workers, progress, guide, cards)
                    if spent.busy:
                        raise ResumeError(f"{out / spent.busy[0].file}: another process is writing it")
                except BaseException:
                    # nothing to go on with: give the folder free; of a source on the Hub pieces may wait in it
                    if not (out / WINDOW).exists() and not output.finished_shards(out, plan):
                        output.remove_work(out)
                    raise
                done = finish_job(plan, out, sides, held_by)
    return result_since(began, plan, cards, resumed, done, spent)


def clocks() -> tuple[float, float]:
    """Wall and CPU seconds, from which a result counts."""
    return time.monotonic(), time.process_time()


def result_since(
    began: tuple[float, float], plan: Plan, cards: Cards | None, resumed: int, done: Manifest, spent: Spent
) -> Result:
    """The result of a job that began then, and took `spent` elsewhere."""
    wall, cpu = clocks()
    return Result(
        plan,
        str(cards) if cards else kernels.backend(),
        resumed,
        wall - began[0],
        cpu - began[1] + spent.cpu_seconds,
        max(peak_rss(), spent.peak_rss_bytes),
        plan.checkpoint.total_size,
        mean_errors(plan.units(), done.units),
        done,
    )


def guide_of(
    plan: Plan, statistics: Statistics | None, workers: int, cards: Cards | None
) -> tuple[Guide | None, set[str]]:
    """What chooses numbers by statistics, where any are, and the devices on which its algebra runs.

    Raises PlanError where statistics are lacking or others than planned, or where there is nobody to work.
    """
    if workers < 1:
        raise PlanError(f"workers is {workers}, at least one is needed")
    if any(map(guided, plan.units())):
        if statistics is None:
            raise PlanError(f"{plan.recipe.name}: planned with statistics, but none are given; give the same folder")
        check_statistics(plan, statistics)
    algebra = set(cards.algebra.values()) if cards else {"cpu"}
    return Guide(statistics, workers, algebra) if statistics else None, algebra


def tell_claim(plan: Plan, claim: Claim, notice: Callable[[str], None] | None) -> None:
    """Say what is made anew, and where GPTQ ran on several devices: its choices may differ between them."""
    if claim.given_up and notice:
        notice(f"{plan.checkpoint.label} has changed since this job began (size or time of its files), or phasefold "
               f"has: {claim.given_up:,} finished shards are made anew")  # fmt: skip
    if len(claim.algebra) > 1 and notice:
        notice(f"GPTQ of this job ran on {' and '.join(claim.algebra)}, whose codes differ by what rounding "
               "makes of the order of sums; the manifest says so")  # fmt: skip


def already_done(plan: Plan, out: Path) -> Manifest:
    """The manifest of a job that is finished; what it left of its work goes. Raises ResumeError as `check_finished`."""
    done = output.check_finished(out, plan)
    if (out / WORK).exists():
        output.remove_work(out)
    return done


def finish_job(plan: Plan, out: Path, sides: Iterable[str], claim: Claim) -> Manifest:
    """Side files, index, manifest and, last, config.json. Raises ResumeError as `settled` does."""
    manifest = write_small_files(plan, out, sides, claim, settled(plan, out))
    with output.writing(out):
        output.atomic_write(out / "config.json", plan.config)
        output.remove_work(out)
    return manifest


def write_small_files(
    plan: Plan, out: Path, sides: Iterable[str], claim: Claim, records: Mapping[str, Mapping[str, Any]]
) -> Manifest:
    """All but shards and config.json, which would say that all is there. records: of every shard."""
    files = {shard.file: {k: records[shard.file][k] for k in ("bytes", "sha256")} for shard in plan.shards}
    with output.writing(out):
        for left in out.glob(f"*{output.PARTIAL}"):  # of a process that was killed, and whose shard another has made
            left.unlink(missing_ok=True)
        for name in sides:
            copied = output.copy_side_file(plan.checkpoint.folder / name, out / name)
            if name != CARD:
                files[name] = copied
        for name, data in ((INDEX, index_of(plan)), ("config.json", plan.config)):
            files[name] = output.file_entry(data)
            if name != "config.json":
                output.atomic_write(out / name, data)
        units = {name: unit for shard in plan.shards for name, unit in records[shard.file]["units"].items()}
        manifest = Manifest(
            tool=__version__,
            phase=plan.recipe.phase,
            architecture=plan.architecture,
            source={
                **plan.checkpoint.place.identity(),
                "digest": plan.checkpoint.digest,
                "tensors": len(plan.checkpoint.tensors),
                "total_size": plan.checkpoint.total_size,
                "origins": origins(plan.checkpoint),
            },
            recipe=plan.recipe.to_json(),
            plan=plan.digest,
            shard_bytes=plan.shard_bytes,
            output_bytes=plan.output_bytes,
            files=dict(sorted(files.items())),
            units={unit.module: units[unit.module] for unit in plan.units()},
            dropped=dict(plan.dropped),
            scales={
                key: sum(records[shard.file]["scales"][key] for shard in plan.shards)
                for key in ("tiny_scales", "zero_blocks")
            },
            notes=[*plan.notes, *([f"GPTQ ran on {', '.join(claim.algebra)}"] if claim.algebra else [])],
            extras=plan.extras.to_json(),
        )
        output.atomic_write(out / MANIFEST, manifest.to_bytes())
    return manifest


def index_of(plan: Plan) -> bytes:
    """The index as it is written."""
    return output.to_json({"metadata": {"total_size": plan.output_bytes}, "weight_map": plan.weight_map}, indent=2)


def peak_rss() -> int:
    """Largest resident set of this process, bytes. Linux's ru_maxrss would count the process that started this one."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def mean_errors(units: Iterable[Unit], recorded: Mapping[str, list[Any]]) -> dict[str, float]:
    """Role -> mean relative error of the units whose numbers were chosen anew or decoded."""
    sums: dict[str, list[float]] = {}
    for unit in units:
        if unit.action == "added":
            continue
        if unit.action == "quantized" or formats()[unit.target_format].plain != formats()[unit.source_format].plain:
            sums.setdefault(unit.role, []).append(recorded[unit.module][3])
    return {role: sum(errors) / len(errors) for role, errors in sums.items()}
