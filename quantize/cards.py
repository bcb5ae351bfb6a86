"""Conversion on graphics cards: each thread has a lane, and while one lane's card works, others read and write.

A thread fills its lane with row blocks of as many units as find room, lets the card convert them in one go, and writes
what comes back. What no kernel does (copies, GPTQ, odd shapes) it does on the CPU, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ..errors import LoadError, PlanError
from ..formats.checkpoint import Reader
from .blocks import ROWS, Buffers
from .guide import Guide, guided
from .kernels import Matrix, Target
from .kernels.jobs import Work, needs, supports
from .plan import Plan
from .units import Unit
from .work import UnitRun, run_unit, stays, stored, target_of

if TYPE_CHECKING:
    from .kernels.card import Card, Lane
    from .workers import Tasks

#: a lane's memory at most: enough for copies to run at full speed; as much is pinned in main memory
LANE_BYTES = 64 << 20
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
    """The cards of a job, and how many lanes of what size they have.

    memory: bytes of each card for its lanes; what GPTQ takes comes on top. workers: lanes of all cards together, two a
    card at least. notes: what is not done on them. Raises PlanError where a lane would be too small.
    """

    def __init__(self, cards: list[Card], plan: Plan, memory: int, workers: int) -> None:
        self.cards, self.lanes = cards, max(workers, 2 * len(cards))
        self.notes: tuple[str, ...] = ()
        self._algebra = {card.ordinal: "cpu" for card in cards}  # as torch names it
        if any(unit.method == "gptq" for unit in plan.units()):
            if _torch_has_cuda():
                self._algebra = {ordinal: f"cuda:{ordinal}" for ordinal in self._algebra}
            else:
                self.notes = ("GPTQ stays on the CPU: this torch was built without CUDA",)
        on_a_card = -(-self.lanes // len(cards))
        room = min(LANE_BYTES, memory // on_a_card)
        least = _least(plan)
        self.lane = Share(room * least.source // (least.source + least.result), 0)
        self.lane = Share(self.lane.source, room - self.lane.source)
        if not self.lane.holds(least):
            raise PlanError(
                f"{memory / 1e6:,.0f} MB of a card's memory are too little for {on_a_card} workers: 128 rows of the "
                f"widest matrix take {(least.source + least.result) / 1e6:,.1f} MB each; give --device-memory more, or "
                "fewer --workers"
            )

    def __str__(self) -> str:
        return ", ".join(map(str, self.cards))

    def jobs(self, tasks: Tasks, reader: Reader, guide: Guide | None) -> list[Callable[[], None]]:
        """What each thread is to do: one a lane, cards in turn."""
        return [partial(self._work, self.cards[i % len(self.cards)], tasks, reader, guide) for i in range(self.lanes)]

    def _work(self, card: Card, tasks: Tasks, reader: Reader, guide: Guide | None) -> None:
        from .kernels.card import Lane

        buffers, mine = Buffers(), None
        with Lane(card, *self.lane) as lane:
            load = _Load(lane, self.lane, tasks)
            while not tasks.stop.is_set() and (task := tasks.take(mine, apart=True)) is not None:
                mine, unit = task
                if _for_cards(unit, reader):
                    load.add(UnitRun(unit, reader, mine, guide))
                    continue
                try:
                    outcome = run_unit(unit, reader, mine, buffers, tasks.stop, guide, self._algebra[card.ordinal])
                except RuntimeError as error:
                    if type(error).__name__ != "OutOfMemoryError":  # torch's, which may not have been imported
                        raise
                    raise LoadError(
                        f"{card}: GPTQ of {unit.module} needs more memory than is free on it; --device cpu needs none"
                    ) from None
                tasks.done(mine, unit, outcome)
            if not tasks.stop.is_set():
                load.deliver()


class _Load:
    """What a lane holds: row blocks that wait for the card, and units that are done when these are."""

    def __init__(self, lane: Lane, capacity: Share, tasks: Tasks) -> None:
        self.lane, self.capacity, self.tasks = lane, capacity, tasks
        self._blocks: list[tuple[UnitRun, int, int, Work]] = []
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
            self._blocks.append((run, first, last, Work(matrix, run.target, *run.room_for_results(first, last, self))))
        self._runs.append(run)

    def _rows_of_piece(self, run: UnitRun) -> int:
        """Whole multiples of 128."""
        few = Share(*needs(run.source.outline(0, min(ROWS, run.source.rows)), run.target))
        fit = min(self.capacity.source // few.source, self.capacity.result // few.result)
        return max(1, int(fit * PIECE)) * ROWS

    def deliver(self) -> None:
        """Let the card convert what the lane holds, write it, and note the units that are complete."""
        reports = self.lane.convert([work for _, _, _, work in self._blocks])
        for (run, first, last, work), report in zip(self._blocks, reports, strict=True):
            run.settle(first, last, report, (work.codes_out, work.scales_out))
        self.lane.clear()
        for run in self._runs:
            self.tasks.done(run.writer, run.unit, run.finish())
        self._blocks, self._runs, self._taken = [], [], Share(0, 0)


def open_cards(ordinals: tuple[int, ...], plan: Plan, memory: int, workers: int) -> Cards:
    """The cards with these numbers: see `Cards`. Raises LoadError where one cannot be used."""
    from .kernels.card import open_card

    return Cards([open_card(ordinal) for ordinal in ordinals], plan, memory, workers)


def _torch_has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


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
    sources, results = zip(*seen.values(), strict=True)
    return Share(max(sources), max(results))
