"""GPTQ against the textbook: one column at a time, an explicit inverse, float64."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from phasefold.formats import Grid, Quantized, expand_scales
from phasefold.quantize.gptq import DAMPING, Factors, factor, gptq, one_thread, output_error, shrink, want, weight_error
from phasefold.quantize.mse import search
from phasefold.quantize.rtn import rtn

MANY = 1 << 40  # tokens: all that one could wish for
SHAPES = [(5, 32, 32), (16, 96, 32), (7, 192, 64), (8, 256, 128), (3, 640, 128)]


def problem(rows: int, columns: int, group: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Quantized]:
    """A weight, correlated inputs [tokens, columns] with some strong channels, and the plain search's result."""
    made = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=made) * 0.02
    mixing = torch.randn(columns, columns, generator=made) * torch.linspace(1, 0.05, columns) / columns**0.5
    inputs = torch.randn(tokens, columns, generator=made) @ (mixing + 0.3 * torch.eye(columns))
    inputs *= 1 + 4 * (torch.rand(columns, generator=made) > 0.95)
    return weight, inputs, search(weight, Grid("int4", (1, group)), objective="mse")


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def factored(hessian: Tensor, tokens: int = MANY) -> Factors:
    found = factor(hessian, tokens)
    assert found is not None
    return found


def damped(hessian: Tensor, share: float = DAMPING[0]) -> Tensor:
    """Float64, as `factor` takes it."""
    wide = hessian.double()
    return wide + share * wide.diagonal().mean() * torch.eye(len(wide), dtype=torch.float64)


def objective(weight: Tensor, found: Quantized, hessian: Tensor) -> float:
    group = weight.shape[1] // found.scales.shape[1]
    error = weight.double() - found.codes.double() * expand_scales(found.scales, (1, group), weight.shape).double()
    return ((error @ hessian.double()) * error).sum().item()


def textbook(weight: Tensor, hessian: Tensor, scales: Tensor, order: list[int]) -> tuple[Tensor, Tensor]:
    """Frantar et al., algorithm 1 without its shortcuts -> codes, and what was rounded, both [N, K] float64.

    The inverse of what is left is updated by Gaussian elimination after each column.
    """
    group = weight.shape[1] // scales.shape[1]
    wide, left = weight.double().clone(), list(order)
    inverse = torch.linalg.inv(hessian[left][:, left])
    codes, quotients = torch.zeros_like(wide), torch.zeros_like(wide)
    while left:
        column = left[0]
        scale = scales[:, column // group].double()
        quotients[:, column] = wide[:, column] / scale
        codes[:, column] = quotients[:, column].round().clamp(-8, 7)
        error = (wide[:, column] - codes[:, column] * scale) / inverse[0, 0]
        wide[:, left] -= error[:, None] * inverse[0]
        inverse = (inverse - inverse[:, :1] * inverse[:1] / inverse[0, 0])[1:, 1:]
        left = left[1:]
    return codes, quotients


@pytest.mark.parametrize("tokens", [4096, 40])
@pytest.mark.parametrize(("rows", "columns", "group"), SHAPES)
def test_equals_the_textbook(rows: int, columns: int, group: int, tokens: int) -> None:
    weight, inputs, searched = problem(rows, columns, group, tokens)
    hessian = inputs.T @ inputs / tokens
    factors = factored(hessian)
    found = gptq(weight, searched.scales, factors, sweeps=0)
    order = factors.order.tolist()
    codes, quotients = textbook(weight, damped(hessian), searched.scales, order)
    for row in range(rows):  # float32 may part from float64 at a tie; what follows in that row is another problem
        differing = [column for column in order if found.codes[row, column] != codes[row, column]]
        if differing:
            place = quotients[row, differing[0]]
            assert abs(place - place.floor() - 0.5) < 1e-4, (row, differing[0], place, found.codes[row, differing[0]])
    ours, theirs = (objective(weight, q, damped(hessian)) for q in (found, Quantized(codes, searched.scales)))
    assert abs(ours - theirs) <= 1e-6 * theirs or (found.codes != codes).any()
    assert (found.codes != codes).any(1).sum() <= 1 + rows // 8
    assert found.scales is searched.scales and found.codes.dtype == torch.int8


@pytest.mark.parametrize("tokens", [2048, 40, 3])
@pytest.mark.parametrize(("rows", "columns", "group"), SHAPES)
def test_each_pass_lowers_the_objective(rows: int, columns: int, group: int, tokens: int) -> None:
    weight, inputs, searched = problem(rows, columns, group, tokens, seed=1)
    hessian = inputs.T @ inputs / tokens
    factors = factored(hessian)
    values = [objective(weight, gptq(weight, searched.scales, factors, sweeps), damped(hessian)) for sweeps in range(4)]
    assert all(after <= before * (1 + 1e-6) for before, after in pairwise(values)), values
    assert values[0] < objective(weight, searched, damped(hessian))
    assert values[2] < values[0] or columns == 32 or tokens == 3


@pytest.mark.parametrize("group", [32, 64, 128])
def test_inputs_without_correlation_give_the_search_exactly(group: int) -> None:
    weight, _, searched = problem(9, 256, group, 1)
    activity = torch.rand(256, generator=torch.Generator().manual_seed(2)) + 0.1
    for hessian in (torch.eye(256), 3.7 * torch.eye(256), torch.diag(activity)):
        factors = factored(hessian)
        found = gptq(weight, searched.scales, factors)
        assert torch.equal(found.codes, searched.codes), (found.codes != searched.codes).nonzero()[0].tolist()


def test_the_order_of_rounding_leaves_no_trace_in_the_layout() -> None:
    """Columns dealt to other places within their groups: the same codes, dealt alike."""
    weight, inputs, searched = problem(6, 128, 32, 500)
    made = torch.Generator().manual_seed(3)
    deal = torch.cat([torch.randperm(32, generator=made) + start for start in range(0, 128, 32)])
    hessian = inputs.T @ inputs / 500
    one, two = factored(hessian), factored(hessian[deal][:, deal])
    assert torch.equal(deal[two.order], one.order)
    assert hessian.diagonal()[one.order].diff().max() <= 0
    found, dealt = gptq(weight, searched.scales, one), gptq(weight[:, deal], searched.scales, two)
    assert torch.equal(found.codes[:, deal], dealt.codes)


def test_channels_that_never_were_active_are_rounded_on_their_own() -> None:
    weight, inputs, searched = problem(6, 128, 64, 300)
    dead = torch.tensor([0, 17, 64, 127])
    inputs[:, dead] = 0
    factors = factored(inputs.T @ inputs / 300)
    assert set(factors.order[-4:].tolist()) == set(dead.tolist())
    found = gptq(weight, searched.scales, factors)
    assert torch.equal(found.codes[:, dead], searched.codes[:, dead]) and bool((found.codes[:, dead] != 0).any())
    other = weight.clone()
    other[:, dead] *= 0.5  # no other column has anything to do with them
    again = gptq(other, searched.scales, factors)
    living = [column for column in range(128) if column not in dead]
    assert torch.equal(again.codes[:, living], found.codes[:, living])


def test_a_hessian_without_a_factor() -> None:
    factored(torch.ones(64, 64))  # one token
    far = torch.eye(64) + 9 * torch.eye(64).roll(1, 0) + 9 * torch.eye(64).roll(-1, 0)  # eigenvalues down to -17
    for bad in (torch.zeros(64, 64), -torch.eye(64), torch.full((64, 64), torch.inf), far):
        assert factor(bad, MANY) is None
    indefinite = torch.eye(64)
    indefinite[0, 1] = indefinite[1, 0] = 1.05  # an eigenvalue of -0.05: ten times the damping is enough
    assert abs(factored(indefinite).around.abs().max() - 1.05 / (1 + 10 * DAMPING[0])) < 1e-6
    assert abs(factored(torch.ones(8, 8), 8).around.max() - 1 / (1 + DAMPING[0] + DAMPING[1] / 2)) < 1e-6


def test_shrinking() -> None:
    _, inputs, _ = problem(1, 64, 32, 200)
    own, pool = inputs[:64].T @ inputs[:64] / 64, inputs.T @ inputs / 200
    assert want(0, 64) == 1 and want(64, 64) == 0.5
    assert torch.equal(shrink(own, 0, pool), pool)
    assert torch.allclose(shrink(own, 64, pool), (own + pool) / 2)
    alone = shrink(own, 64)
    assert torch.allclose(alone.diagonal(), own.diagonal())
    alone.fill_diagonal_(0)
    assert torch.allclose(alone, own.clone().fill_diagonal_(0) / 2)


def test_few_tokens_are_worse_than_the_search_unless_shrunk() -> None:
    """What the shrinkage is for: 64 tokens of 256 channels, judged by 4,000 others."""
    weight, inputs, _ = problem(32, 256, 128, 6000)
    few, pool, unseen = inputs[:64], inputs[64:2000], inputs[2000:]
    own = few.T @ few / 64
    searched = search(weight, Grid("int4", (1, 128)), objective="mse", column_weights=own.diagonal().contiguous())
    plain, shrunk = factored(own), factored(shrink(own, 64, pool.T @ pool / len(pool)), 64)
    without, found, base = (
        output_error(weight, result, unseen)
        for result in (gptq(weight, searched.scales, plain), gptq(weight, searched.scales, shrunk), searched)
    )
    assert found < 0.8 * base and found < 0.8 * without, (found, without, base)


def test_beats_the_textbook_with_plain_scales() -> None:
    """Group scales from RTN, damping 0.01, no second pass: what GPTQ usually is."""
    weight, inputs, _ = problem(32, 256, 128, 8000)
    seen, unseen = inputs[:4000], inputs[4000:]
    hessian = seen.T @ seen / 4000
    grid = Grid("int4", (1, 128))
    searched = search(weight, grid, objective="mse", column_weights=hessian.diagonal().contiguous())
    factors = factored(hessian)
    plain = rtn(weight, grid)
    order = hessian.diagonal().argsort(descending=True).tolist()
    codes, _ = textbook(weight, damped(hessian, 0.01), plain.scales, order)
    ours = output_error(weight, gptq(weight, searched.scales, factors), unseen)
    theirs = output_error(weight, Quantized(codes, plain.scales), unseen)
    assert ours < 0.9 * theirs and theirs < output_error(weight, searched, unseen)


def test_errors_are_what_they_say() -> None:
    weight, inputs, searched = problem(2050, 64, 32, 10)
    difference = weight.double() - searched.codes.double() * searched.scales.double().repeat_interleave(32, 1)
    assert abs(weight_error(weight, searched) / difference.square().sum().item() - 1) < 1e-6
    assert abs(output_error(weight, searched, inputs) / (difference @ inputs.double().T).square().sum() - 1) < 1e-5


def test_one_thread_is_given_back() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), one_thread():
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == before


def test_no_tensor_is_made_on_another_device() -> None:
    """`meta` stands for a graphics card: it cannot be mixed with the CPU either."""
    shapes: tuple[tuple[int, ...], ...] = ((64, 128), (64, 4), (128, 128), (128, 128))
    weight, scales, ahead, around = (torch.empty(shape, device="meta") for shape in shapes)
    order = torch.empty(128, dtype=torch.int64, device="meta")
    found = gptq(weight, scales, Factors(order, ahead, around))
    assert found.codes.device.type == "meta" and found.codes.shape == weight.shape
