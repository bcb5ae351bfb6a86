"""Every kernel gives the CPU's bytes and report: on a card, or run on the CPU under its driver (tests/hostcard.py)."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from matrices import FLAVOURS, PLAIN, assert_reports_agree, plain, raw, stored, values

from phasefold.quantize import kernels
from phasefold.quantize.kernels import Matrix, Report, Target
from phasefold.quantize.kernels.build import KERNELS
from phasefold.quantize.kernels.card import Card, Lane, open_card
from phasefold.quantize.kernels.jobs import Work, kernel_of, needs, supports

SEED = int.from_bytes(os.urandom(4))  # fresh inputs in every run; a failure tells it
KINDS = (*PLAIN, "e4m3", "int4", "e2m1")
TARGETS = [
    Target("bf16"),
    *(Target("e4m3", block, power_of_two=p) for block in ((128, 128), (1, 0)) for p in (True, False)),
    *(Target("int4", (1, g), method) for g in (32, 64, 128) for method in ("rtn", "inverse")),
    *(Target("int4", (1, g), "search", o) for g in (32, 64, 128) for o in ("weighted", "weighted2", "mse")),
]
# one row, less than a tile, more than one, ragged both ways; columns that fill no vector of a warp; a row of many turns
SHAPES = [(1, 128), (33, 384), (130, 256), (257, 128), (5, 1152), (2, 4352)]
Case = tuple[Matrix, Target]


@pytest.fixture(scope="module")
def card(ordinal: int) -> Card:
    return open_card(ordinal)


@pytest.fixture(scope="module")
def lane(card: Card) -> Iterator[Lane]:
    with Lane(card, 48 << 20, 48 << 20) as lane:
        yield lane


def on_card(lane: Lane, cases: list[Case]) -> list[tuple[Report, bytes, bytes]]:
    """Report, codes and scales of each, all of one batch, with outputs that were poisoned before."""
    works = []
    for matrix, target in cases:
        codes, scales, dtype = lane.source.take(len(matrix.codes)), None, matrix.scale_dtype
        codes[:] = matrix.codes
        if matrix.scales is not None:
            scales = lane.source.take(len(matrix.scales))
            scales[:] = matrix.scales
        sizes = kernels.check_convertible(matrix, target)
        outs = [lane.result.take(size) if size else None for size in sizes]
        for out in filter(None, outs):
            out[:] = b"\xa5" * len(out)
        works.append(Work(matrix._replace(codes=codes, scales=scales, scale_dtype=dtype), target, *outs))
    reports = lane.convert(works)
    found = [(r, bytes(w.codes_out), bytes(w.scales_out or b"")) for r, w in zip(reports, works, strict=True)]
    lane.clear()
    return found


def on_cpu(matrix: Matrix, target: Target) -> tuple[Report, bytes, bytes]:
    codes, scales = (bytearray(n) for n in kernels.check_convertible(matrix, target))
    return kernels.convert(matrix, target, codes, scales or None), bytes(codes), bytes(scales)


def assert_same(lane: Lane, cases: list[Case]) -> None:
    for (matrix, target), found in zip(cases, on_card(lane, cases), strict=True):
        expected = on_cpu(matrix, target)
        print(f"seed {SEED}: {target} of {matrix.kind} {matrix.rows} x {matrix.cols}, block {matrix.block}")
        assert_reports_agree(found[0], expected[0])
        if expected[0].fault is None:
            for name, a, b in zip(("codes", "scales"), found[1:], expected[1:], strict=True):
                if a != b:
                    at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
                    pytest.fail(f"{name} byte {at} is {a[at]:#x}, the CPU's {b[at]:#x}")


def ordinary(kind: str, seed: int, shape: tuple[int, int], flavour: str) -> Matrix:
    """A made matrix, in which each vector of a kernel has its largest magnitude between 2^-30 and 2^56, or is zero."""
    if kind not in PLAIN:
        return stored(kind, seed, shape, "gauss")
    weight = values("gauss" if flavour == "spread" else flavour, seed, shape)
    if flavour == "spread":
        weight *= 2.0 ** torch.randint(-15, 45, (shape[0], 1), generator=torch.Generator().manual_seed(seed))
    if flavour == "special":
        weight = weight.clamp(-(2.0**50), 2.0**50)
        weight[:, ::8] = 2.0
    return plain(weight.clamp(-6e4, 6e4) if kind == "f16" else weight, kind)


def _supported(make: Callable[..., Matrix], kind: str, target: Target) -> list[Case]:
    """Each shape with two of the flavours."""
    draw = random.Random(f"{SEED} {kind} {target}")
    pairs = [(shape, flavour) for shape in SHAPES for flavour in draw.sample(FLAVOURS, 2)]
    made = ((make(kind, draw.randrange(10**6), *pair), target) for pair in pairs)
    return [case for case in made if supports(*case)]


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_gives_the_cpus_bytes(lane: Lane, kind: str, target: Target) -> None:
    redone = lane.redone
    cases = _supported(ordinary, kind, target)
    assert len(cases) == 2 * len(SHAPES)
    assert_same(lane, cases)
    assert lane.redone == redone  # else the CPU is compared with itself


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_lane_gives_the_cpus_bytes_of_any_numbers(lane: Lane, kind: str, target: Target) -> None:
    assert_same(lane, _supported(stored, kind, target)[::3])


def test_all_kernels_were_tried() -> None:
    cases = [case for kind in KINDS for target in TARGETS for case in _supported(ordinary, kind, target)]
    tried = {kernel_of(*case) for case in cases}
    assert {kernel.name for kernel in tried} == KERNELS.keys() - {"sum_partials"}


@pytest.mark.parametrize("objective", kernels.OBJECTIVES)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_weights_of_columns(lane: Lane, objective: str, group: int) -> None:
    generator = torch.Generator().manual_seed(SEED)
    weights = raw(torch.rand(384, generator=generator).pow(4))
    target = Target("int4", (1, group), "search", objective, column_weights=weights)
    assert_same(lane, [(stored(kind, SEED % 1000, (70, 384), "gauss"), target) for kind in KINDS])


def test_many_matrices_in_a_batch(lane: Lane) -> None:
    draw = random.Random(SEED)
    cases = []
    while len(cases) < 300:
        shape = draw.randrange(1, 40), 128 * draw.randrange(1, 4)
        case = stored(draw.choice(KINDS), draw.randrange(10**6), shape, draw.choice(FLAVOURS)), draw.choice(TARGETS)
        if supports(*case) and case[1].method != "inverse":
            cases.append(case)
    assert_same(lane, cases)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_a_weight_that_is_not_finite_is_told_with_its_place(lane: Lane, target: Target, bad: float) -> None:
    draw = random.Random(SEED)
    cases, places = [], []
    for kind in PLAIN:
        weight = values("gauss", SEED, (130, 384))
        places.append((draw.randrange(130), draw.randrange(384)))
        row, column = places[-1]
        weight[row, column:] = weight[129, 383] = bad
        cases.append((plain(weight, kind), target))
    redone = lane.redone
    for (row, column), (report, _, _) in zip(places, on_card(lane, cases), strict=True):
        assert report == Report("weight is not finite", row, column), f"seed {SEED}"
    assert lane.redone == redone  # it is the card that tells it


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_e4m3s_nan_is_told_with_its_place(lane: Lane, target: Target) -> None:
    draw = random.Random(f"{SEED} {target}")
    matrix = stored("e4m3", 0, (130, 384), "gauss")
    assert matrix.block == (128, 128)
    cases, places = [], []
    for word in (0, 4):  # of the two that a thread holds of a vector
        row, column, codes = (
            draw.randrange(130),
            8 * draw.randrange(48) + word + draw.randrange(4),
            bytearray(matrix.codes),
        )
        for bad in (row * 384 + column, row * 384 + column // 8 * 8 + 7, len(codes) - 1):
            codes[bad] = draw.choice([0x7F, 0xFF])
        cases.append((matrix._replace(codes=codes), target))
        places.append((row, column))
    redone = lane.redone
    for (row, column), (report, _, _) in zip(places, on_card(lane, cases), strict=True):
        assert report == Report("weight is not finite", row, column), f"seed {SEED}"
    assert lane.redone == redone


@pytest.mark.parametrize("target", [TARGETS[0], TARGETS[1], TARGETS[3], TARGETS[5], TARGETS[-1]], ids=str)
def test_bad_scales_are_told_before_bad_weights(lane: Lane, target: Target) -> None:
    """As the CPU does: the first scale that is NaN, negative, or zero over codes; tiny ones are counted."""
    codes = bytearray(range(1, 121)) * 640  # e4m3: neither zero nor NaN
    cases = []
    for bad in (float("nan"), float("inf"), -1.0, 0.0, 1e-39, 2.0**-149, 2.0**101):
        for place in (0, 2, 4):
            scales = torch.full((2, 3), 0.01)
            scales.view(-1)[place:] = bad
            some = Matrix("e4m3", codes[: 130 * 384], raw(scales), "F32", 130, 384, (128, 128))
            cases.append((some, target))
            cases.append((some._replace(codes=codes[: 130 * 384 - 1] + b"\x7f"), target))
            cases.append((some._replace(codes=bytes(130 * 384)), target))  # a zero scale over zeros is no fault
    assert_same(lane, cases)


def test_a_weight_that_overflows_bf16(lane: Lane) -> None:
    weight = values("gauss", SEED, (70, 256))
    weight[69, 255] = weight[33, 3] = weight[33, 6] = -3.4e38
    [(report, _, _)] = on_card(lane, [(plain(weight), Target("bf16"))])
    assert report == Report("weight overflows BF16", 33, 3)


def test_what_has_no_exact_inverse(lane: Lane) -> None:
    weight = torch.ones(70, 256)
    weight[40, 200] = 0.37
    for group, column in ((32, 192), (64, 192), (128, 128)):
        [(report, _, _)] = on_card(lane, [(plain(weight, "bf16"), Target("int4", (1, group), "inverse"))])
        assert report == Report("no exact INT4 inverse", 40, column)


def test_the_exact_inverse_of_int4(lane: Lane) -> None:
    generator = torch.Generator().manual_seed(SEED)
    for group in (32, 64, 128):
        codes = torch.randint(-8, 8, (70, 512), generator=generator).float()
        codes[::2] *= torch.rand(35, 512, generator=generator) < 0.03  # few codes: more than one scale would do
        scales = torch.rand(70, 512 // group, generator=generator).add(0.01).bfloat16().float()
        weight = (codes * scales.repeat_interleave(group, 1)).bfloat16()
        case = plain(weight, "bf16"), Target("int4", (1, group), "inverse")
        assert on_cpu(*case)[0].fault is None
        assert_same(lane, [case])


def test_two_runs_leave_the_same(lane: Lane) -> None:
    cases = [(stored("bf16", 5, (257, 1152), "gauss"), target) for target in TARGETS if target.method != "inverse"]
    assert on_card(lane, cases) == on_card(lane, cases)  # the sums of errors too


def test_threads_with_lanes_of_their_own(ordinals: tuple[int, ...]) -> None:
    """Two lanes on each of two cards, where there are two."""
    cards = [open_card(ordinal) for ordinal in ordinals]

    def work(seed: int) -> None:
        with Lane(cards[seed % len(cards)], 4 << 20, 4 << 20) as lane:
            for i in range(4):
                assert_same(lane, [(stored("bf16", seed + i, (130, 256), "gauss"), target) for target in TARGETS[:4]])

    with ThreadPoolExecutor(2 * len(cards)) as pool:
        list(pool.map(work, range(4)))


@pytest.mark.parametrize("target", [t for t in TARGETS if t.method != "inverse"], ids=str)
def test_weights_that_float32_cannot_square(lane: Lane, target: Target) -> None:
    """Where the card's sums would be wrong, the CPU is asked: for such matrices only, of all in a batch."""
    redone = lane.redone
    steps = 1 + torch.arange(128).repeat(4, 1) / 128
    sizes = (2.0**120, 1.0, 2.0**-75, 2.0**-130)
    cases = [(plain(steps * size, kind), target) for kind in ("f32", "bf16") for size in sizes]
    assert_same(lane, cases)
    assert lane.redone - redone == len(cases) - 2
    assert all(0 < report.norm2 < float("inf") for report, _, _ in on_card(lane, cases))


def test_more_jobs_than_a_launch_has(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phasefold.quantize.kernels.card.MOST_JOBS", 3)
    assert_same(lane, [(plain(torch.full((2, 32), i + 1.0), "bf16"), Target("bf16")) for i in range(8)])


def test_what_is_no_work_for_a_lane(card: Card) -> None:
    """Buffers that are not the lane's, wrong sizes, a conversion that has no kernel, room that there is not."""
    with Lane(card, 4096, 4096) as lane:
        codes, out = lane.source.take(128), lane.result.take(128)
        matrix = Matrix("bf16", codes, None, None, 2, 32)
        good = Work(matrix, Target("bf16"), out, None)
        for wrong in (
            good._replace(matrix=matrix._replace(codes=bytes(128))),
            good._replace(codes_out=memoryview(bytearray(128))),
            good._replace(codes_out=codes),
            good._replace(codes_out=out[:-1]),
            good._replace(matrix=matrix._replace(codes=codes[8:], rows=1, cols=56), codes_out=out[:112]),
            good._replace(matrix=matrix._replace(rows=1, cols=12)),
        ):
            with pytest.raises(ValueError, match=r"^buffer|^no kernel"):
                lane.convert([wrong])
            lane.clear()
            lane.source.take(128), lane.result.take(128)
        assert lane.convert([]) == []
        lane.source.take(lane.source.free)
        for nbytes in (1, 256):
            with pytest.raises(ValueError, match=f"{nbytes} bytes of an arena that has 0 left"):
                lane.source.take(nbytes)


def test_needs_are_enough_and_no_more(card: Card) -> None:
    cases = [(stored(kind, 3, (70, 384), "gauss"), TARGETS[-1]) for kind in KINDS]
    source, result = (sum(column) for column in zip(*(needs(*case) for case in cases), strict=True))
    with Lane(card, source, result) as lane:
        assert_same(lane, cases)
        room = lane.source.take(source)
        with pytest.raises(ValueError, match="1 bytes of an arena that has 0 left"):
            lane.source.take(1)
        del room
