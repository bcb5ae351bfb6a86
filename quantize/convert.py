"""Carrying a plan out: units in parallel, shards finished one by one; a rerun goes on where the last one stopped."""

from __future__ import annotations

import contextlib
import math
import resource
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import CheckpointError, PlanError
from ..formats import formats
from ..formats.checkpoint import INDEX, MANIFEST, WORK, Reader, side_files
from ..formats.manifest import Manifest
from ..formats.statistics import Statistics
from . import kernels, output
from .blocks import Buffers, StoredMatrix, row_blocks, scale_rows
from .guide import Guide, check_statistics, guided
from .kv import added_bytes
from .origin import origins
from .plan import Plan
from .shard import Outcome, ShardWriter
from .units import Shard, Unit

Progress = Callable[[int], None]


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
) -> Result:
    """Write the artifact that `plan` describes into `out`, or go on with it.

    Needs no memory but a few row blocks a worker; GPTQ `guide.worker_bytes`. `progress` is told the source bytes of
    each unit that is done. statistics: those that the plan was made with, where any of its units is guided by them.
    `notice` is told in a sentence where finished shards are made anew, because a file of the source has changed.
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
    guide = Guide(statistics, workers) if statistics else None
    sides = side_files(source)
    if output.is_finished(out, plan):
        done, resumed = _already_done(plan, out), len(plan.shards)
    else:
        held = output.finished_shards(out, plan)
        output.check_space(out, sum(sides.values()) + sum(s.size for s in plan.shards if s.file not in held))
        with output.claim(out, plan) as given_up:
            if given_up and notice:
                notice(f"{source} has changed since this job began (size or time of its files): {given_up:,} finished "
                       "shards that come from changed files are made anew")  # fmt: skip
            if output.is_finished(out, plan):  # by another process, between the question and the lock
                done, resumed = _already_done(plan, out), len(plan.shards)
            else:
                held = output.finished_shards(out, plan)
                resumed = len(held)
                if progress:
                    progress(sum(u.source_bytes for s in plan.shards if s.file in held for u in s.units))
                try:
                    _write_shards(plan, out, [s for s in plan.shards if s.file not in held], workers, progress, guide)
                except BaseException:
                    if not output.finished_shards(out, plan):  # nothing to go on with: give the folder free
                        output.remove_work(out)
                    raise
                done = _finish(plan, out, sides)
    return Result(
        plan,
        kernels.backend(),
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


def _write_shards(
    plan: Plan, out: Path, shards: list[Shard], workers: int, progress: Progress | None, guide: Guide | None
) -> None:
    reader, stop, lock = Reader(plan.checkpoint), threading.Event(), threading.Lock()
    opened: list[ShardWriter] = []

    def tasks() -> Iterator[tuple[ShardWriter, Unit]]:
        for shard in shards:
            with output.writing(out):
                opened.append(ShardWriter(out, shard))
            for unit in shard.units:
                yield opened[-1], unit

    todo = tasks()

    def work() -> None:
        buffers = Buffers()
        try:
            while not stop.is_set():
                with lock:
                    task = next(todo, None)
                if task is None:
                    return
                writer, unit = task
                with output.writing(out):
                    outcome = run_unit(unit, reader, writer, buffers, stop, guide)
                    if not stop.is_set() and writer.finish_unit(unit, outcome):
                        writer.close()
                        with lock:
                            opened.remove(writer)
                if progress:
                    with lock:
                        progress(unit.source_bytes)
        except BaseException:
            stop.set()
            raise

    workers = min(workers, sum(len(shard.units) for shard in shards))
    if not workers:
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="phasefold")
    try:
        with guide.one_thread() if guide else contextlib.nullcontext():
            for future in [pool.submit(work) for _ in range(workers)]:
                future.result()
    finally:  # also on SIGINT: let the workers end their row block, then clear what is half done
        stop.set()
        pool.shutdown(wait=True)
        reader.close()
        for writer in opened:
            writer.abandon()
        for path in out.glob(f"*{output.PARTIAL}"):
            path.unlink(missing_ok=True)


def run_unit(
    unit: Unit,
    reader: Reader,
    writer: ShardWriter,
    buffers: Buffers,
    stop: threading.Event,
    guide: Guide | None = None,
) -> Outcome:
    """Work on one unit: read its rows block by block, choose or check, write. Raises CheckpointError on bad values."""
    if unit.action == "added":
        writer.write(added_bytes(unit), unit.outputs[0].offset)
        return Outcome()
    source = StoredMatrix(reader, unit.module, unit.source, unit.source_format, unit.shape, unit.scaling)
    target_format = formats()[unit.target_format]
    target = kernels.Target(
        target_format.grid.kind if not target_format.plain else unit.target_format,
        target_format.grid.block,
        unit.method,
        unit.objective,
        unit.power_of_two,
    )
    method, whole = None, False
    if guide and guided(unit):
        target, method, whole = guide.search(unit, target)
    same = unit.kept or (unit.action == "repacked" and not target_format.plain)
    error2 = norm2 = 0.0
    tiny = zero = 0
    for first, last in [(0, source.rows)] if whole else row_blocks(unit.shape, unit.source[0]):
        if stop.is_set():
            return Outcome()
        matrix = source.read(first, last, buffers)
        if same:
            report, results = kernels.check(matrix), (matrix.codes, matrix.scales)
        else:
            results = _result_buffers(unit, first, last, source.rows, buffers)
            report = kernels.convert(matrix, target, *results)
            if guide and whole:
                report, method = guide.improve(unit, matrix, report, method, results)
        if report.fault is not None:
            where = source.where(report.fault, report.row, report.column, first)
            raise CheckpointError(f"{where}: {report.fault}")
        if not math.isfinite(report.error2):
            raise CheckpointError(
                f"{unit.module}: weights near the largest float32 round to infinity in {unit.target_format} "
                f"(rows {first} to {last - 1})"
            )
        if unit.lossless and report.error2 != 0.0:
            raise CheckpointError(
                f"{unit.module}: {unit.source_format} cannot be cast to {unit.target_format} without loss: its scales "
                f"span too many powers of two within one block (rows {first} to {last - 1})"
            )
        error2, norm2 = error2 + report.error2, norm2 + report.norm2
        if first == 0 or source.grid.block[0]:  # the scale of a whole tensor is met in each of its blocks
            tiny, zero = tiny + report.tiny_scales, zero + report.zero_blocks
        _write_rows(writer, unit, first, source.rows, results)
    _write_shape(unit, source, writer, buffers, same=same)
    return Outcome(error2, norm2, tiny, zero, method)


def _result_buffers(
    unit: Unit, first: int, last: int, rows: int, buffers: Buffers
) -> tuple[memoryview, memoryview | None]:
    grid = formats()[unit.target_format].grid
    codes = buffers.get("codes_out", unit.outputs[0].part.nbytes // rows * (last - first))
    if grid.kind == "plain":
        return codes, None
    start, stop = scale_rows(grid.block[0], first, last, rows)
    line = unit.outputs[1].part.nbytes // grid.scale_shape(unit.shape)[0]
    return codes, buffers.get("scales_out", line * (stop - start))


def _write_rows(
    writer: ShardWriter, unit: Unit, first: int, rows: int, results: tuple[kernels.Buffer, kernels.Buffer | None]
) -> None:
    """Write codes, and scales where there are any, of the rows that begin with `first`."""
    codes, scales = results
    grid = formats()[unit.target_format].grid
    place = unit.outputs[0]
    writer.write(codes, place.offset + place.part.nbytes // rows * first)
    if scales is not None:
        place = unit.outputs[1]
        line = place.part.nbytes // grid.scale_shape(unit.shape)[0]
        writer.write(scales, place.offset + line * scale_rows(grid.block[0], first, first, rows)[0])


def _write_shape(unit: Unit, source: StoredMatrix, writer: ShardWriter, buffers: Buffers, *, same: bool) -> None:
    """The constant part of packed INT4, taken over or made."""
    raw = source.check_shape_tensor(buffers)
    if len(unit.outputs) > 2:
        data = raw if same and raw is not None else struct.pack("<qq", *unit.shape)
        writer.write(data, unit.outputs[2].offset)


def _finish(plan: Plan, out: Path, sides: Iterable[str]) -> Manifest:
    """Side files, index, manifest and, last, config.json."""
    records = output.finished_shards(out, plan)
    files = {shard.file: {k: records[shard.file][k] for k in ("bytes", "sha256")} for shard in plan.shards}
    with output.writing(out):
        for name in sides:
            files[name] = output.copy_side_file(plan.checkpoint.folder / name, out / name)
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
            notes=list(plan.notes),
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
