"""One unit while it is worked on: row block after row block is read, converted or looked through, judged and written.

`run_unit` does all of it on the CPU. The card's workers (`cards.py`) do the same steps for many units at once.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Iterator

from ..errors import CheckpointError
from ..formats import formats
from ..formats.checkpoint import Reader
from . import kernels
from .blocks import Buffers, Room, StoredMatrix, row_blocks, scale_rows
from .guide import Guide, guided
from .kv import added_bytes
from .shard import Outcome, ShardWriter
from .units import Unit


def stored(unit: Unit, reader: Reader) -> StoredMatrix:
    """Where a unit is read from."""
    return StoredMatrix(reader, unit.module, unit.source, unit.source_format, unit.shape, unit.scaling)


def stays(unit: Unit) -> bool:
    """Whether a unit's codes and scales are written as they are read."""
    return unit.kept or (unit.action == "repacked" and not formats()[unit.target_format].plain)


def target_of(unit: Unit) -> kernels.Target:
    """What the kernels make of a unit, as far as the plan tells: see `Guide.search`."""
    found = formats()[unit.target_format]
    kind = unit.target_format if found.plain else found.grid.kind
    return kernels.Target(kind, found.grid.block, unit.method, unit.objective, unit.power_of_two)


class UnitRun:
    """A unit on its way, one that has a source.

    source: where it is read from. target: what the kernels make of it. same: bytes stay as they are. whole: rows are
    worked on all at once, since GPTQ goes on with the matrix.
    """

    def __init__(self, unit: Unit, reader: Reader, writer: ShardWriter, guide: Guide | None = None) -> None:
        self.unit, self.writer, self.guide = unit, writer, guide
        self.source = stored(unit, reader)
        self.grid = formats()[unit.target_format].grid
        self.target = target_of(unit)
        self.method: str | None = None
        self.whole = False
        if guide and guided(unit):
            self.target, self.method, self.whole = guide.search(unit, self.target)
        self.same = stays(unit)
        self._outcome = Outcome()

    def blocks(self) -> Iterator[tuple[int, int]]:
        """(first, last + 1) rows of each block that the CPU works on at once."""
        return iter([(0, self.source.rows)]) if self.whole else row_blocks(self.unit.shape, self.unit.source[0])

    def room_for_results(self, first: int, last: int, room: Room) -> tuple[memoryview, memoryview | None]:
        """Codes and scales of these rows, yet to be made."""
        codes = room.get("codes_out", self.unit.outputs[0].part.nbytes // self.source.rows * (last - first))
        if self.grid.kind == "plain":
            return codes, None
        start, stop = scale_rows(self.grid.block[0], first, last, self.source.rows)
        return codes, room.get("scales_out", self._scale_line() * (stop - start))

    def settle(
        self,
        first: int,
        matrix: kernels.Matrix,
        report: kernels.Report,
        results: tuple[kernels.Buffer, kernels.Buffer | None],
    ) -> None:
        """Judge what a kernel reports of the row block that begins with `first`, and write it.

        Raises CheckpointError on bad values.
        """
        unit, source, last = self.unit, self.source, first + matrix.rows
        if report.fault is not None:
            where = source.where(report.fault, report.row, report.column, first)
            raise CheckpointError(f"{where}: {report.fault}")
        if not math.isfinite(report.error2):
            raise CheckpointError(
                f"{unit.module}: weights near the largest float32 round to infinity in {unit.target_format} "
                f"(rows {first} to {last - 1})"
            )
        if unit.lossless and not self._equal(matrix, results):
            raise CheckpointError(
                f"{unit.module}: {unit.source_format} cannot be cast to {unit.target_format} without loss: its scales "
                f"span too many powers of two within one block (rows {first} to {last - 1})"
            )
        codes, scales = results
        place = unit.outputs[0]
        self.writer.write(codes, place.offset + place.part.nbytes // source.rows * first)
        if scales is not None:
            line = scale_rows(self.grid.block[0], first, first, source.rows)[0]
            self.writer.write(scales, unit.outputs[1].offset + self._scale_line() * line)
        before = self._outcome
        counted = first == 0 or source.grid.block[0]  # the scale of a whole tensor is met in each of its blocks
        self._outcome = Outcome(
            before.error2 + report.error2,
            before.norm2 + report.norm2,
            before.tiny_scales + (report.tiny_scales if counted else 0),
            before.zero_blocks + (report.zero_blocks if counted else 0),
        )

    def _equal(self, matrix: kernels.Matrix, results: tuple[kernels.Buffer, kernels.Buffer | None]) -> bool:
        """Whether a result has the source's values. Sums of squares cannot tell: 2^-75 squared is 0 in float32."""
        codes, scales = results
        dtype = None if scales is None else self.unit.outputs[1].part.dtype
        made = kernels.Matrix(self.target.kind, codes, scales, dtype, matrix.rows, matrix.cols, self.target.block)
        report = kernels.compare(matrix, made)
        return report.fault is None and report.max_error == 0.0

    def finish(self) -> Outcome:
        """Once all blocks are settled: the constant part of packed INT4, taken over or made."""
        raw = self.source.check_shape_tensor(Buffers())
        if len(self.unit.outputs) > 2:
            data = raw if self.same and raw is not None else struct.pack("<qq", *self.unit.shape)
            self.writer.write(data, self.unit.outputs[2].offset)
        return self._outcome._replace(method=self.method)

    def _scale_line(self) -> int:
        """Bytes of one row of the result's scales."""
        return self.unit.outputs[1].part.nbytes // self.grid.scale_shape(self.unit.shape)[0]


def run_unit(
    unit: Unit,
    reader: Reader,
    writer: ShardWriter,
    buffers: Buffers,
    stop: threading.Event,
    guide: Guide | None = None,
    device: str = "cpu",
) -> Outcome:
    """Work on one unit on the CPU; device: where GPTQ does its linear algebra, as torch names it.

    Raises CheckpointError on bad values.
    """
    if unit.action == "added":
        writer.write(added_bytes(unit), unit.outputs[0].offset)
        return Outcome()
    run = UnitRun(unit, reader, writer, guide)
    for first, last in run.blocks():
        if stop.is_set():
            return Outcome()
        matrix = run.source.read(first, last, buffers)
        results: tuple[kernels.Buffer, kernels.Buffer | None]
        if run.same:
            report, results = kernels.check(matrix), (matrix.codes, matrix.scales)
        else:
            results = made = run.room_for_results(first, last, buffers)
            report = kernels.convert(matrix, run.target, *made)
            if guide and run.whole:
                report, run.method = guide.improve(unit, matrix, report, run.method, made, device)
        run.settle(first, matrix, report, results)
    return run.finish()
