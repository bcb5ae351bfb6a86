"""Conversion on graphics cards: each thread has a lane, and while one lane's card works, others read and write.

A thread fills its lane with row blocks of as many units as find room, lets the card convert them in one go, and writes
what comes back. What no kernel does (copies, GPTQ, odd shapes) it does on the CPU, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ..errors import LoadError, PlanError
from ..formats.checkpoint import Reader
from .blocks import ROWS, Buffers
from .device import Devices
from .guide import Guide, guided
from .kernels import Matrix, Target
from .kernels.build import INSTALL
from .kernels.jobs import ALIGNED, Work, needs, supports
from .plan import Plan
from .units import Unit
from .work import UnitRun, run_unit, stays, stored, target_of

if TYPE_CHECKING:
    from .kernels.card import Card, Lane
    from .workers import Tasks

#: a lane's memory at most: enough for copies to run at full speed; as much is pinned in main memory
LANE_BYTES = 64 << 20
#: lanes of a card: as many as can keep it busy, and no more shards open at once than that
MOST_LANES = 8
#: a matrix is cut into pieces of about this share of a lane, so that little of a lane stays empty
PIECE = 1 / 8


class Share(NamedTuple):
    """Bytes of a lane: for sources and what a launch is told, for results and what it leaves."""

    source: int
    result: int

    def and_(self, more: Share) -> Share:
        return Share(self.source + more.source, self.result + more.result)

    def holds(self, asked: Share) -> bool:
        return asked.source <= self.source and asked.result <= self.result


class Cards:
    """Cards with their lanes, opened for one job; a context manager that gives them back.

    memory: bytes of each card for its lanes; what GPTQ takes comes on top. workers: lanes of all cards together, from
    two to eight a card. algebra: where each card's workers do the linear algebra of GPTQ, as torch names it. notes:
    what is not done on the cards. Raises PlanError where a lane would be too small, LoadError where a card fails.
    """

    def __init__(self, cards: Sequence[Card], plan: Plan, memory: int, workers: int) -> None:
        from .kernels.card import Lane

        self.cards = cards
        self.algebra, self.notes = _algebra(cards, plan)
        count = min(max(workers, 2 * len(cards)), MOST_LANES * len(cards))
        self.share = _share(plan, memory, -(-count // len(cards)))
        with ExitStack() as opened:
            self.lanes = [opened.enter_context(Lane(cards[i % len(cards)], *self.share)) for i in range(count)]
            self._opened = opened.pop_all()

    def __enter__(self) -> Cards:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def __str__(self) -> str:
        return ", ".join(map(str, self.cards))

    @property
    def redone(self) -> int:
        """Row blocks that the CPU has converted once more: see `Lane.convert`."""
        return sum(lane.redone for lane in self.lanes)

    def jobs(self, tasks: Tasks, reader: Reader, guide: Guide | None) -> list[Callable[[], None]]:
        """What each thread is to do, one a lane."""
        return [partial(self._work, lane, tasks, reader, guide) for lane in self.lanes]

    def _work(self, lane: Lane, tasks: Tasks, reader: Reader, guide: Guide | None) -> None:
        buffers, mine, load = Buffers(), None, _Load(lane, self.share, tasks)
        device = self.algebra[lane.card.ordinal]
        while (
            not tasks.stop.is_set() and (task := tasks.take(mine, apart=True, before_waiting=load.deliver)) is not None
        ):
            if task[0] is not mine:  # a shard is left behind complete, not open
                load.deliver()
            mine, unit = task
            if _for_cards(unit, reader):
                load.add(UnitRun(unit, reader, mine, guide))
                continue
            try:
                outcome = run_unit(unit, reader, mine, buffers, tasks.stop, guide, device)
            except RuntimeError as error:  # of torch's, which has many for a card that is full or that it does not know
                if unit.method != "gptq" or device == "cpu":
                    raise
                what = str(error).partition("\n")[0]
                raise LoadError(f"{lane.card}: GPTQ of {unit.module} failed ({what}); give --device cpu") from None
            tasks.done(mine, unit, outcome)
        if not tasks.stop.is_set():
            load.deliver()


def _algebra(cards: Sequence[Card], plan: Plan) -> tuple[dict[int, str], tuple[str, ...]]:
    """Where the linear algebra of GPTQ is done, by card, and what is to be said of it."""
    if any(unit.method == "gptq" for unit in plan.units()):
        import torch

        if torch.cuda.is_available():
            return {card.ordinal: f"cuda:{card.ordinal}" for card in cards}, ()
        notes: tuple[str, ...] = ("GPTQ stays on the CPU: this torch cannot use the card",)
    else:
        notes = ()
    return {card.ordinal: "cpu" for card in cards}, notes


def _share(plan: Plan, memory: int, lanes: int) -> Share:
    """What each of a card's lanes holds: sources and results in the proportion that the job has them."""
    room, least = min(LANE_BYTES, memory // lanes), _least(plan)
    source = room * least.source // (least.source + least.result) // ALIGNED * ALIGNED
    share = Share(source, (room - source) // ALIGNED * ALIGNED)
    if not share.holds(least):
        raise PlanError(
            f"{memory / 1e6:,.1f} MB of a card's memory are too little for {lanes} workers: 128 rows of the widest "
            f"matrix take {(least.source + least.result) / 1e6:,.1f} MB each; give --device-memory more, or fewer "
            "--workers"
        )
    return share


class _Load:
    """What a lane holds: row blocks that wait for the card, and units that are done when these are."""

    def __init__(self, lane: Lane, capacity: Share, tasks: Tasks) -> None:
        self.lane, self.capacity, self.tasks = lane, capacity, tasks
        self._blocks: list[tuple[UnitRun, int, Work]] = []
        self._runs: list[UnitRun] = []
        self._taken = Share(0, 0)

    def get(self, name: str, nbytes: int) -> memoryview:
        """Room in the lane, of results where the name ends in `_out`: see `blocks.Room`."""
        return (self.lane.result if name.endswith("_out") else self.lane.source).take(nbytes)

    def add(self, run: UnitRun) -> None:
        """Read a unit into the lane, which is delivered whenever it is full."""
        step = self._rows_of_piece(run)
        for first in range(0, run.source.rows, step):
            if self.tasks.stop.is_set():
                return
            last = min(first + step, run.source.rows)
            asked = Share(*needs(run.source.outline(first, last), run.target))
            if not self.capacity.holds(self._taken.and_(asked)):
                self.deliver()
            self._taken = self._taken.and_(asked)
            matrix = run.source.read(first, last, self)
            self._blocks.append((run, first, Work(matrix, run.target, *run.room_for_results(first, last, self))))
        self._runs.append(run)

    def _rows_of_piece(self, run: UnitRun) -> int:
        """Whole multiples of 128."""
        few = Share(*needs(run.source.outline(0, min(ROWS, run.source.rows)), run.target))
        fit = min(self.capacity.source // few.source, self.capacity.result // few.result)
        return max(1, int(fit * PIECE)) * ROWS

    def deliver(self) -> None:
        """Let the card convert what the lane holds, if anything, write it, and note the units that are complete."""
        reports = self.lane.convert([work for _, _, work in self._blocks])
        for (run, first, work), report in zip(self._blocks, reports, strict=True):
            run.settle(first, work.matrix, report, (work.codes_out, work.scales_out))
        self.lane.clear()
        for run in self._runs:
            self.tasks.done(run.writer, run.unit, run.finish())
        self._blocks, self._runs, self._taken = [], [], Share(0, 0)


def open_cards(
    devices: Devices, plan: Plan, memory: int, workers: int, *, or_cpu: bool = False
) -> tuple[Cards | None, str]:
    """The chosen cards, ready for a job, and their name; None where it is the CPU's, with the reason in its name.

    memory, workers: see `Cards`. or_cpu: the CPU may take the place of cards that fail, as one does that another
    program has filled; else that raises LoadError.
    """
    if not devices.cards:
        return None, devices.name
    reader = Reader(plan.checkpoint)
    if not any(unit.method == "gptq" or _for_cards(unit, reader) for unit in plan.units()):
        return None, "cpu (nothing in this job is a card's work)"
    try:
        try:
            from .kernels.card import open_card
        except ImportError as error:  # what it needs of cuda-core has no public name
            raise LoadError(f"this cuda-core is not one that phasefold knows ({error}); {INSTALL}") from None
        return Cards([open_card(ordinal) for ordinal in devices.cards], plan, memory, workers), devices.name
    except LoadError as error:
        if not or_cpu:
            raise
        return None, f"cpu ({error})"


def _first_rows(unit: Unit, reader: Reader) -> tuple[Matrix, Target]:
    """A unit's first rows, unread, and what becomes of them, with room for weights of its columns where it has any."""
    source, target = stored(unit, reader), target_of(unit)
    if guided(unit):
        target = target._replace(objective="mse", column_weights=b"")
    return source.outline(0, min(ROWS, source.rows)), target


def _for_cards(unit: Unit, reader: Reader) -> bool:
    """Whether a kernel does this unit."""
    if unit.action == "added" or stays(unit) or unit.method == "gptq":
        return False
    return supports(*_first_rows(unit, reader))


def _least(plan: Plan) -> Share:
    """What a lane must hold: 128 rows of any matrix that is for the cards."""
    reader, seen = Reader(plan.checkpoint), {}
    for unit in plan.units():
        key = unit.action, unit.shape, unit.source_format, unit.target_format, unit.method, guided(unit)
        if key not in seen:
            seen[key] = needs(*_first_rows(unit, reader)) if _for_cards(unit, reader) else (1, 1)
    return Share(max(source for source, _ in seen.values()), max(result for _, result in seen.values()))
