"""Faults in the pages of a KV cache: what happens when tables, tags and contents part ways.

They are injected into schedules of many requests whose pages hold recognisable numbers, one for each prefix of
tokens. Two worlds run each schedule, one with the tag check and one without, and what a request reads is compared with
what it wrote.
"""

import copy
import random

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from phasefold.errors import PageError
from phasefold.serving.paged.pages import Lease, PagePool

SIZE, PAGES = 4, 14


class World:
    """A pool, contents for it, and requests that write a token a step and read all of theirs."""

    def __init__(self, *, tracked: bool) -> None:
        self.pool = PagePool(PAGES, SIZE, tracked=tracked)
        self.contents = torch.zeros(PAGES, SIZE, dtype=torch.int64)
        self.tokens: dict[int, list[int]] = {}
        self.leases: dict[int, Lease] = {}
        self.stopped: dict[int, str] = {}
        self.kept: list[Lease] = []  # copies of leases, for giving them back once more
        self.wrong: set[int] = set()  # requests that have read what is not theirs
        self.late = 0  # errors in giving back
        self.held: dict[int, set[int]] = {}  # all pages that a request has ever held
        self.tainted: set[int] = set()  # pages that a fault made free while somebody held them

    @staticmethod
    def marks(tokens: list[int], start: int = 0) -> torch.Tensor:
        """A number for each token that depends on all tokens before it, as a row of a cache does."""
        return torch.tensor([hash(tuple(tokens[: i + 1])) for i in range(start, len(tokens))], dtype=torch.int64)

    def slots(self, lease: Lease, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.arange(length)
        return lease.table[at // SIZE], at % SIZE

    def write(self, number: int, new: list[int]) -> None:
        """What an engine does in a forward pass, for one request whose pages have been checked."""
        lease, tokens = self.leases[number], self.tokens[number]
        before = lease.length
        tokens += new
        pages, offsets = self.slots(lease, len(tokens))
        self.contents[pages[before:], offsets[before:]] = self.marks(tokens, before)
        if not torch.equal(self.contents[pages, offsets], self.marks(tokens)):
            self.wrong.add(number)
        self.pool.commit(lease, tokens)

    def start(self, number: int, prompt: list[int]) -> None:
        lease = self.pool.open(prompt)
        try:
            self.pool.grow(lease, len(prompt))
        except PageError:
            self.give_back(lease)
            return
        self.leases[number], self.tokens[number] = lease, list(prompt[: lease.length])
        self.held[number] = set(lease.pages)
        self.kept.append(copy.deepcopy(lease))
        if errors := self.pool.check([lease]):
            self.stop(number, str(errors[0]))
            return
        self.write(number, list(prompt[lease.length :]))

    def step(self, token: int) -> None:
        for number, lease in list(self.leases.items()):
            try:
                self.pool.grow(lease, lease.length + 1)
            except PageError:
                self.finish(number)
        numbers = list(self.leases)
        for number in numbers:
            self.held[number] |= set(self.leases[number].pages)
        errors = self.pool.check([self.leases[number] for number in numbers])
        for place, error in errors.items():
            self.stop(numbers[place], str(error))
        for number in list(self.leases):
            self.write(number, [token])

    def stop(self, number: int, words: str) -> None:
        self.stopped[number] = words
        self.finish(number)

    def finish(self, number: int) -> None:
        if number in self.leases:
            self.give_back(self.leases.pop(number))

    def give_back(self, lease: Lease) -> None:
        self.late += self.pool.release(lease) is not None

    def entry(self, number: int, place: int) -> tuple[torch.Tensor, int]:
        lease = self.leases[number]
        return lease.table, place % len(lease.pages)

    # the faults

    def stale(self, number: int, place: int, page: int) -> set[int]:
        """An entry leads to a page that is, or will be, another's."""
        table, index = self.entry(number, place)
        table[index] = page
        return {number}

    def reuse(self, number: int, place: int) -> set[int]:
        """A page goes back to the free ones, to the front, while requests read it."""
        page = self.leases[number].pages[place % len(self.leases[number].pages)]
        self.pool.references[page] = 0
        self.pool.free = {page: None} | self.pool.free
        self.tainted.add(page)
        return set()

    def swap(self, one: int, place: int, other: int, place2: int) -> set[int]:
        (a, i), (b, j) = self.entry(one, place), self.entry(other, place2)
        a[i], b[j] = int(b[j]), int(a[i])
        return {one, other}

    def free_again(self, which: int) -> set[int]:
        """A copy of a lease is given back: its request may run, be over, or its pages may be others' by now."""
        lease = copy.deepcopy(self.kept[which % len(self.kept)])
        self.tainted |= set(lease.pages)
        self.give_back(lease)
        return set()


class Schedules(RuleBasedStateMachine):
    """The same schedule in both worlds. What happens to the one must explain what happens to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.off = World(tracked=True), World(tracked=False)
        self.next = 0
        self.touched: set[int] = set()
        self.faults = 0

    def fault(self, name: str, *arguments: int, needs: tuple[int, ...] = ()) -> None:
        for world in (self.on, self.off):
            if all(number in world.leases for number in needs):
                self.touched |= getattr(world, name)(*arguments)
        self.faults += 1

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def start(self, prompt: list[int]) -> None:
        if len(self.on.leases) < 5 and len(self.off.leases) < 5:
            self.on.start(self.next, prompt)
            self.off.start(self.next, prompt)
            self.next += 1

    @rule(token=st.integers(0, 1))
    def step(self, token: int) -> None:
        self.on.step(token)
        self.off.step(token)

    @rule(pick=st.integers(0, 99))
    def finish(self, pick: int) -> None:
        if self.next:
            self.on.finish(pick % self.next)
            self.off.finish(pick % self.next)

    @rule(pick=st.integers(0, 99), place=st.integers(0, 9), page=st.integers(1, PAGES - 1))
    def stale_mapping(self, pick: int, place: int, page: int) -> None:
        if running := sorted(self.on.leases):
            number = running[pick % len(running)]
            self.fault("stale", number, place, page, needs=(number,))

    @rule(pick=st.integers(0, 99), place=st.integers(0, 9))
    def early_reuse(self, pick: int, place: int) -> None:
        if running := sorted(self.on.leases):
            number = running[pick % len(running)]
            self.fault("reuse", number, place, needs=(number,))

    @rule(picks=st.tuples(st.integers(0, 99), st.integers(0, 99)), place=st.integers(0, 9), other=st.integers(0, 9))
    def swapped(self, picks: tuple[int, int], place: int, other: int) -> None:
        if running := sorted(self.on.leases):
            one, two = (running[pick % len(running)] for pick in picks)
            self.fault("swap", one, place, two, other, needs=(one, two))

    @rule(which=st.integers(0, 99))
    def double_free(self, which: int) -> None:
        if self.on.kept and self.off.kept:
            self.fault("free_again", which)

    @invariant()
    def nothing_wrong_is_read_with_the_check(self) -> None:
        assert not self.on.wrong
        assert all("page" in words and "expected tag" in words and "found tag" in words
                   for words in self.on.stopped.values())  # fmt: skip

    @invariant()
    def only_those_that_a_fault_has_touched_are_stopped(self) -> None:
        for number in self.on.stopped:
            assert number in self.touched or self.on.held[number] & self.on.tainted
        if not self.faults:
            assert not self.on.late and not self.off.wrong and self.on.pool.counters.mismatches == 0


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(
    max_examples=1000,
    stateful_step_count=30,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


def schedule(kind: str, chance: random.Random) -> Schedules:
    """One random schedule with faults of one kind."""
    run = Schedules()
    for _ in range(25):
        number = chance.randrange
        match chance.choice(["start", "start", "step", "step", "step", "finish", kind, kind]):
            case "start":
                run.start([number(2) for _ in range(1 + number(12))])
            case "step":
                run.step(number(2))
            case "finish":
                run.finish(number(99))
            case "stale_mapping":
                run.stale_mapping(number(99), number(9), 1 + number(PAGES - 1))
            case "early_reuse":
                run.early_reuse(number(99), number(9))
            case "swapped":
                run.swapped((number(99), number(99)), number(9), number(9))
            case "double_free":
                run.double_free(number(99))
        run.nothing_wrong_is_read_with_the_check()
        run.only_those_that_a_fault_has_touched_are_stopped()
    return run


@pytest.mark.parametrize("kind", ["stale_mapping", "early_reuse", "swapped", "double_free"])
def test_each_kind_of_fault_is_caught_and_does_damage_without_the_check(kind: str) -> None:
    chance = random.Random(kind)
    stopped = damaged = 0
    for _ in range(800):
        run = schedule(kind, chance)
        stopped += bool(run.on.stopped)
        damaged += bool(run.off.wrong)
    assert stopped > 200 and damaged > 200, (stopped, damaged)


def test_no_fault_no_alarm() -> None:
    chance = random.Random(0)
    for _ in range(300):
        run = schedule("step", chance)
        assert run.on.pool.counters.mismatches == 0 and not run.on.stopped
        for number, lease in list(run.on.leases.items()):
            run.on.finish(number)
            assert lease.pages == []
        pool = run.on.pool
        assert sorted(pool.free) == list(range(1, PAGES)) and not any(pool.references)
        assert pool.counters.checks > 0 and run.off.pool.counters.checks == 0
