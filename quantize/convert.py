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
from ..errors import PlanError
from ..formats import formats
from ..formats.checkpoint import CARD, INDEX, MANIFEST, WORK, side_files
from ..formats.manifest import Manifest
from ..formats.statistics import Statistics
from . import kernels, output
from .guide import Guide, check_statistics, guided
from .origin import origins
from .plan import Plan
from .units import Unit
from .workers import Progress, write_shards

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
) -> Result:
    """Write the artifact that `plan` describes into `out`, or go on with it.

    Needs no memory but a few row blocks a worker; GPTQ `guide.worker_bytes`. `progress` is told the source bytes of
    each unit that is done. statistics: those that the plan was made with, where any of its units is guided by them.
    `notice` is told in a sentence where finished shards are made anew, because a file of the source has changed.
    cards: where units are converted, by its lanes instead of `workers`; else on the CPU.
    Raises PhasefoldError with the first thing that is wrong; finished shards stay, and the folder never looks whole.
    """
    wall, cpu = time.monotonic(), time.process_time()
    source = plan.checkpoint.folder
    output.check_place(source, out)
    if workers < 1:
        raise PlanError(f"workers is {workers}, at least one is needed")
    if any(map(guided, plan.units())):
        if statistics is None:
            raise PlanError(f"{plan.recipe.name}: planned with statistics, but none are given; give the same folder")
        check_statistics(plan, statistics)
    algebra = set(cards.algebra.values()) if cards else {"cpu"}
    guide = Guide(statistics, workers, algebra) if statistics else None
    sides = side_files(source)
    if output.is_finished(out, plan):
        done, resumed = _already_done(plan, out), len(plan.shards)
    else:
        held = output.finished_shards(out, plan)
        output.check_space(out, sum(sides.values()) + sum(s.size for s in plan.shards if s.file not in held))
        with output.claim(out, plan, algebra) as claim:
            if claim.given_up and notice:
                notice(f"{source} has changed since this job began (size or time of its files): {claim.given_up:,} "
                       "finished shards that come from changed files are made anew")  # fmt: skip
            if len(claim.algebra) > 1 and notice:
                notice(f"GPTQ of this job ran on {' and '.join(claim.algebra)}, whose codes differ by what rounding "
                       "makes of the order of sums; the manifest says so")  # fmt: skip
            if output.is_finished(out, plan):  # by another process, between the question and the lock
                done, resumed = _already_done(plan, out), len(plan.shards)
            else:
                held = output.finished_shards(out, plan)
                resumed = len(held)
                if progress:
                    progress(sum(u.source_bytes for s in plan.shards if s.file in held for u in s.units))
                try:
                    write_shards(
                        plan, out, [s for s in plan.shards if s.file not in held], workers, progress, guide, cards
                    )
                except BaseException:
                    if not output.finished_shards(out, plan):  # nothing to go on with: give the folder free
                        output.remove_work(out)
                    raise
                done = _finish(plan, out, sides, claim)
    return Result(
        plan,
        str(cards) if cards else kernels.backend(),
        resumed,
        time.monotonic() - wall,
        time.process_time() - cpu,
        peak_rss(),
        plan.checkpoint.total_size,
        mean_errors(plan.units(), done.units),
        done,
    )


def _already_done(plan: Plan, out: Path) -> Manifest:
    done = output.check_finished(out, plan)
    if (out / WORK).exists():
        output.remove_work(out)
    return done


def _finish(plan: Plan, out: Path, sides: Iterable[str], claim: output.Claim) -> Manifest:
    """Side files, index, manifest and, last, config.json."""
    records = output.finished_shards(out, plan)
    files = {shard.file: {k: records[shard.file][k] for k in ("bytes", "sha256")} for shard in plan.shards}
    with output.writing(out):
        for left in out.glob(f"*{output.PARTIAL}"):  # of a process that was killed, and whose shard another has made
            left.unlink(missing_ok=True)
        for name in sides:
            copied = output.copy_side_file(plan.checkpoint.folder / name, out / name)
            if name != CARD:
                files[name] = copied
        index = {"metadata": {"total_size": plan.output_bytes}, "weight_map": plan.weight_map}
        for name, data in ((INDEX, output.to_json(index, indent=2)), ("config.json", plan.config)):
            files[name] = output.file_entry(data)
            if name != "config.json":
                output.atomic_write(out / name, data)
        units = {name: unit for shard in plan.shards for name, unit in records[shard.file]["units"].items()}
        manifest = Manifest(
            tool=__version__,
            phase=plan.recipe.phase,
            architecture=plan.architecture,
            source={
                "name": plan.checkpoint.folder.resolve().name,
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
        output.atomic_write(out / "config.json", plan.config)
        output.remove_work(out)
    return manifest


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
