"""What benchmarks/kernels.py measures of a card: kernels on memory that is filled already, and whole lanes.

Times are those of CUDA events around launches in a row. Each launch goes through several GB, many times what the card's
L2 holds, and is followed by the summing up of what its thread blocks found, as in a conversion.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

from cuda.core import Buffer, EventOptions, LaunchConfig, launch

from phasefold.quantize import kernels
from phasefold.quantize.cards import LANE_BYTES
from phasefold.quantize.kernels import Matrix, Report, Target
from phasefold.quantize.kernels.build import SUM_PARTIALS
from phasefold.quantize.kernels.card import Arena, Card, Lane
from phasefold.quantize.kernels.jobs import (
    MOST_JOBS,
    Addresses,
    Job,
    Partial,
    Work,
    aligned,
    job,
    kernel_of,
    needs,
    report,
)

NOTHING = memoryview(b"")


class Sizes(NamedTuple):
    """nbytes: what a launch reads and writes, about. launches: in a row, between two events. rounds: of these."""

    nbytes: int
    launches: int
    rounds: int


class Rates(NamedTuple):
    """GB per second, medians. moved: codes and scales, read and written. copied: as many bytes by a copy within the
    card's memory. source: codes and scales read."""

    moved: float
    copied: float
    source: float


def seconds(stream: Any, enqueue: Callable[[], None], sizes: Sizes) -> float:
    """Of one `enqueue`, by events around several; the median of the rounds. One goes before, untimed."""
    timed = EventOptions(timing_enabled=True)
    enqueue()
    stream.sync()
    found = []
    for _ in range(sizes.rounds):
        start = stream.record(options=timed)
        for _ in range(sizes.launches):
            enqueue()
        end = stream.record(options=timed)
        end.sync()
        found.append((end - start) / 1000 / sizes.launches)
    return statistics.median(found)


def taken(room: Arena, data: kernels.Buffer) -> memoryview:
    """A copy of `data` in an arena."""
    view = room.take(len(data))
    view[:] = data
    return view


class Parts(NamedTuple):
    """Bytes of one job's parts: codes and scales of the source, and of the result."""

    codes: int
    scales: int
    codes_out: int
    scales_out: int

    @classmethod
    def of(cls, matrix: Matrix, target: Target) -> Parts:
        return cls(kernels.code_bytes(matrix), kernels.scale_bytes(matrix), *kernels.check_convertible(matrix, target))


def kernel_rates(card: Card, matrix: Matrix, target: Target, sizes: Sizes) -> Rates:
    """Speed of a conversion's kernel on as many copies of a matrix as the bytes allow, one launch for all.

    Raises AssertionError where the last copy's result is not the CPU's; what cuda-core raises where the card fails,
    or has no such memory.
    """
    kernel, parts = kernel_of(matrix, target), Parts.of(matrix, target)
    assert kernel is not None
    count, tiles = max(1, min(MOST_JOBS, sizes.nbytes // sum(parts))), kernel.tiles(matrix.rows, matrix.cols)
    run, add = card.kernel(kernel), card.kernel(SUM_PARTIALS)
    source, result = sum(map(aligned, parts[:2])), sum(map(aligned, parts[2:]))
    partials = aligned(count * ctypes.sizeof(Partial))
    area = count * (source + result) + partials + count * tiles * ctypes.sizeof(Partial)
    with ExitStack() as opened:
        lane = opened.enter_context(Lane(card, source + aligned(count * ctypes.sizeof(Job)), result + partials))
        device = card.enter()
        stream = device.create_stream()
        opened.callback(stream.close)
        memory = device.allocate(area, stream=stream)
        opened.callback(memory.close, stream)
        start = int(memory.handle)
        results, totals = start + count * source, start + count * (source + result)

        def at(address: int, nbytes: int) -> Buffer:
            return Buffer.from_handle(address, nbytes, owner=memory)

        codes = taken(lane.source, matrix.codes)
        if matrix.scales is not None:
            taken(lane.source, matrix.scales)
        table = lane.source.take(count * ctypes.sizeof(Job))
        told = (Job * count).from_buffer(table)
        for i in range(count):
            from_, to = start + i * source, results + i * result
            scales, scales_out = from_ + aligned(parts.codes), to + aligned(parts.codes_out)
            total = totals + i * ctypes.sizeof(Partial)
            addresses = Addresses(from_, scales if parts.scales else 0, to, scales_out, 0, total)
            told[i] = job(Work(matrix, target, NOTHING, NOTHING), addresses)
        lane.source.copy(lane.source.used, stream, to_card=True)
        first = at(lane.source.on_card(codes, parts.codes), source)
        for i in range(count):
            at(start + i * source, source).copy_from(first, stream=stream)

        jobs_at, partials_at = lane.source.on_card(table, len(table)), totals + partials
        arguments = jobs_at, tiles, partials_at

        def convert() -> None:
            launch(stream, LaunchConfig((tiles, count), block=kernel.threads), run, *arguments)
            launch(stream, LaunchConfig((1, count), block=SUM_PARTIALS.threads), add, *arguments)

        moved = count * sum(parts)
        took = seconds(stream, convert, sizes)
        results_view, totals_view = lane.result.take(result), lane.result.take(count * ctypes.sizeof(Partial))
        for view, address in ((results_view, results + (count - 1) * result), (totals_view, totals)):
            at(lane.result.on_card(view, len(view)), len(view)).copy_from(at(address, len(view)), stream=stream)
        lane.result.copy(lane.result.used, stream, to_card=False)
        stream.sync()
        check(matrix, target, results_view, (Partial * count).from_buffer(totals_view)[count - 1])

        half = min(moved, area) // 2  # a copy reads and writes each byte of it
        copy = seconds(stream, lambda: at(start + half, half).copy_from(at(start, half), stream=stream), sizes)
    return Rates(moved / took / 1e9, 2 * half / copy / 1e9, count * sum(parts[:2]) / took / 1e9)


def check(matrix: Matrix, target: Target, results: memoryview, total: Partial) -> None:
    """AssertionError where what was timed is not what the CPU makes of the matrix."""
    parts = Parts.of(matrix, target)
    codes, scales = bytearray(parts.codes_out), bytearray(parts.scales_out)
    expected, found = kernels.convert(matrix, target, codes, scales or None), report(matrix, total)
    after = aligned(parts.codes_out)
    told = f"{matrix.kind} -> {target.kind} {target.block} {target.method}: {found}, on the CPU {expected}"
    assert not total.rare and found.fault == expected.fault, told
    assert abs(found.error2 - expected.error2) <= 1e-5 * expected.error2, told
    assert results[: parts.codes_out] == codes and results[after : after + parts.scales_out] == scales, told


# ---- with the copies


class Filled:
    """A lane full of works, made of one matrix. For one thread."""

    def __init__(self, lane: Lane, matrix: Matrix, target: Target, room: int) -> None:
        self.lane, self.matrix, self.target = lane, matrix, target
        self.count = room // sum(needs(matrix, target))
        self.stream = lane.card.enter().create_stream()
        for work in self._works():
            for view, data in ((work.matrix.codes, matrix.codes), (work.matrix.scales, matrix.scales)):
                if data is not None:
                    memoryview(view)[:] = data
        self.source = self.count * (kernels.code_bytes(matrix) + kernels.scale_bytes(matrix))

    def _works(self) -> list[Work]:
        """Room for all works, at the same places each time."""
        self.lane.clear()
        parts, (source, result) = Parts.of(self.matrix, self.target), (self.lane.source, self.lane.result)
        works = []
        for _ in range(self.count):
            scales = source.take(parts.scales) if parts.scales else None
            matrix = self.matrix._replace(codes=source.take(parts.codes), scales=scales)
            scales_out = result.take(parts.scales_out) if parts.scales_out else None
            works.append(Work(matrix, self.target, result.take(parts.codes_out), scales_out))
        return works

    def convert(self) -> list[Report]:
        """As the converter does it, but for reading and writing."""
        self.lane.card.enter()
        return self.lane.convert(self._works())

    def copy(self) -> None:
        """The bytes of the works to the card and back, and nothing else."""
        self.lane.card.enter()
        self._works()
        self.lane.source.copy(self.lane.source.used, self.stream, to_card=True)
        self.lane.result.copy(self.lane.result.used, self.stream, to_card=False)
        self.stream.sync()


def lane_rates(card: Card, matrix: Matrix, target: Target, lanes: int, turns: int) -> tuple[float, float]:
    """GB of source per second of wall time through so many lanes at once, `turns` times each: converted, and copied."""
    source, result = needs(matrix, target)
    room = max(LANE_BYTES, source + result)
    count = room // (source + result)
    with ExitStack() as opened, ThreadPoolExecutor(lanes) as pool:
        made = [opened.enter_context(Lane(card, count * source, count * result)) for _ in range(lanes)]
        filled = [Filled(lane, matrix, target, room) for lane in made]
        for one in filled:
            opened.callback(one.stream.close)

        def rate(work: Callable[[Filled], object]) -> float:
            def repeated(one: Filled) -> None:
                for _ in range(turns):
                    work(one)

            for one in filled:
                work(one)
            start = time.perf_counter()
            list(pool.map(repeated, filled))
            return sum(one.source for one in filled) * turns / (time.perf_counter() - start) / 1e9

        return rate(Filled.convert), rate(Filled.copy)
