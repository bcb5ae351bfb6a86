"""Every kernel gives the CPU's bytes and report: on a card, or run on the CPU under its driver (tests/hostcard.py)."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
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
# one row, less than a tile, more than one, ragged both ways; columns that fill no vector of a warp
SHAPES = [(1, 128), (33, 384), (130, 256), (257, 128), (5, 1152)]
Case = tuple[Matrix, Target]


@pytest.fixture(scope="module")
def card() -> Card:
    return open_card(0)


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
        what = f"seed {SEED}: {target} of {matrix.kind} {matrix.rows} x {matrix.cols}, block {matrix.block}"
        assert found[0].fault == expected[0].fault, what
        assert_reports_agree(found[0], expected[0])
        if expected[0].fault is None:
            for name, a, b in zip(("codes", "scales"), found[1:], expected[1:], strict=True):
                at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
                assert at is None, f"{what}: {name} byte {at} is {a[at]:#x}, the CPU's {b[at]:#x}"


def _supported(kind: str, target: Target) -> list[Case]:
    made = (
        (stored(kind, SEED % 10**6 + i, shape, flavour), target)
        for i, (shape, flavour) in enumerate(itertools.product(SHAPES, FLAVOURS))
    )
    return [case for case in made if supports(*case)]


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_gives_the_cpus_bytes(lane: Lane, kind: str, target: Target) -> None:
    cases = _supported(kind, target)
    assert len(cases) >= 10
    assert_same(lane, cases)


def test_all_kernels_were_tried() -> None:
    tried = {kernel_of(*case) for kind in KINDS for target in TARGETS for case in _supported(kind, target)}
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
        weight[places[-1]] = weight[129, 383] = bad
        cases.append((plain(weight, kind), target))
    for (row, column), (report, _, _) in zip(places, on_card(lane, cases), strict=True):
        assert report == Report("weight is not finite", row, column), f"seed {SEED}"


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_e4m3s_nan_is_told_with_its_place(lane: Lane, target: Target) -> None:
    draw = random.Random(SEED)
    matrix = stored("e4m3", 0, (130, 384), "gauss")
    assert matrix.block == (128, 128)
    row, column, codes = draw.randrange(130), draw.randrange(384), bytearray(matrix.codes)
    codes[row * 384 + column] = draw.choice([0x7F, 0xFF])
    codes[-1] = 0x7F
    [(report, _, _)] = on_card(lane, [(matrix._replace(codes=codes), target)])
    assert report == Report("weight is not finite", row, column), f"seed {SEED}"


@pytest.mark.parametrize("target", [TARGETS[0], TARGETS[1], TARGETS[3], TARGETS[5], TARGETS[-1]], ids=str)
def test_bad_scales_are_told_before_bad_weights(lane: Lane, target: Target) -> None:
    """As the CPU does: the first scale that is NaN, negative, or zero over codes; tiny ones are counted."""
    codes = bytearray(range(1, 121)) * 640  # e4m3: neither zero nor NaN
    cases = []
    for bad in (float("nan"), float("inf"), -1.0, 0.0, 1e-39, 2.0**-149, 2.0**101):
        for place in range(6):
            scales = torch.full((2, 3), 0.01)
            scales.view(-1)[place:] = bad
            some = Matrix("e4m3", codes[: 200 * 384], raw(scales), "F32", 200, 384, (128, 128))
            cases.append((some, target))
            cases.append((some._replace(codes=codes[: 200 * 384 - 1] + b"\x7f"), target))
            cases.append((some._replace(codes=bytes(200 * 384)), target))  # a zero scale over zeros is no fault
    assert_same(lane, cases)


def test_a_weight_that_overflows_bf16(lane: Lane) -> None:
    weight = values("gauss", SEED, (70, 256))
    weight[69, 255] = weight[33, 7] = -3.4e38
    [(report, _, _)] = on_card(lane, [(plain(weight), Target("bf16"))])
    assert report == Report("weight overflows BF16", 33, 7)


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
        scales = torch.rand(70, 512 // group, generator=generator).add(0.01).bfloat16().float()
        weight = (codes * scales.repeat_interleave(group, 1)).bfloat16()
        case = plain(weight, "bf16"), Target("int4", (1, group), "inverse")
        assert on_cpu(*case)[0].fault is None
        assert_same(lane, [case])


def test_two_runs_leave_the_same(lane: Lane) -> None:
    cases = [(stored("bf16", 5, (257, 1152), "gauss"), target) for target in TARGETS if target.method != "inverse"]
    assert on_card(lane, cases) == on_card(lane, cases)  # the sums of errors too


def test_threads_with_lanes_of_their_own(card: Card) -> None:
    def work(seed: int) -> None:
        with Lane(card, 4 << 20, 4 << 20) as lane:
            for i in range(4):
                assert_same(lane, [(stored("bf16", seed + i, (130, 256), "gauss"), target) for target in TARGETS[:4]])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_needs_are_enough_and_no_more(card: Card) -> None:
    cases = [(stored(kind, 3, (70, 384), "gauss"), TARGETS[-1]) for kind in KINDS]
    source, result = (sum(column) for column in zip(*(needs(*case) for case in cases), strict=True))
    with Lane(card, source, result) as lane:
        assert_same(lane, cases)
        room = lane.source.take(source)
        with pytest.raises(ValueError, match="1 bytes of an arena that has 0 left"):
            lane.source.take(1)
        del room
