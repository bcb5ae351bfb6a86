"""GPTQ: INT4 codes that make up for each other's rounding errors, as the inputs of a matrix let them.

With E = W - Q and H the mean of x x^T over a matrix's inputs, the squared error of its output is tr(E H E^T). Columns
are rounded one after the other, the most active first, each so as to make up for the errors before it, as far as it can
if the columns after it do the same (Frantar et al. 2210.17323). What a column owes to those before it follows from one
Cholesky factor: with H = (I + U) D (I + U)^T, U strictly upper, column k is rounded from W_k + sum_j<k E_j U_jk. That
is GPTQ without its inverse (Chee et al. 2307.13304). Two more passes then visit each column again, all others held as
they are (coordinate descent, Behdin et al. 2309.01885): they can only lower the objective, and do so by 3 to 4 %.

Scales are given and stay: groups are those of the columns as they are stored, whatever the order of rounding, so no
index is written (static groups). Everything is float32 and done by one thread: see `one_thread`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import Quantized, expand_scales
from .grid import nearest_int4

BLOCK = 128  # columns that are rounded before the rest hears of it
SWEEPS = 2
#: share of the mean of H's diagonal that is added to it: with all tokens that one could wish for, and for want of any
DAMPING = (0.01, 0.1)
MORE = (1, 10, 100)  # times that, one after the other until H has a Cholesky factor
_ROWS = 1024  # of a matrix that are held in double


class Factors(NamedTuple):
    """What all matrices that read one input share.

    order: int64 [K], the columns as they are rounded. Row k of the others belongs to the k-th of these, and holds what
    the error of each column adds to it: ahead, F32 [K, K], strictly lower, in the first pass; around, F32 [K, K], zero
    on the diagonal, when all others stand.
    """

    order: Tensor
    ahead: Tensor
    around: Tensor


def want(tokens: int, columns: int) -> float:
    """l = K / (tokens + K): how far the Hessian of so many tokens is from one that can be relied on, 1 for none."""
    return columns / (tokens + columns)


def shrink(own: Tensor, tokens: int, pool: Tensor | None = None) -> Tensor:
    """(1 - l) own + l target -> float32 [K, K].

    The target is the pool's Hessian; without one, own's diagonal, as if the channels had nothing to do with each other.
    """
    share = want(tokens, len(own))
    mixed = own.float() * (1 - share)
    if pool is not None:
        return mixed.add_(pool.float(), alpha=share)
    mixed.diagonal().add_(own.diagonal().float(), alpha=share)
    return mixed


def factor(hessian: Tensor, tokens: int) -> Factors | None:
    """Damp and factor a Hessian, float32 [K, K]; None where it has no Cholesky factor at any damping.

    tokens: those of the matrix itself that are behind it.

    A channel that never was active has a row of zeros: it is rounded last, on its own, to the nearest code.
    """
    diagonal = hessian.diagonal()
    order = torch.argsort(diagonal, descending=True, stable=True)
    sorted_ = hessian[order][:, order]
    mean = float(diagonal.double().mean())
    if not 0 < mean < float("inf"):
        return None
    damped = sorted_.diagonal().clone()
    least = DAMPING[0] + DAMPING[1] * want(tokens, len(hessian))
    for times in MORE:
        sorted_.diagonal().copy_(damped + times * least * mean)
        lower, info = torch.linalg.cholesky_ex(sorted_.flip(0, 1))
        if int(info) == 0:
            upper = lower.flip(0, 1)  # sorted = upper upper^T
            ahead = torch.div(upper.T, upper.diagonal()[:, None]).tril_(-1)
            around = torch.div(sorted_, sorted_.diagonal()[:, None])
            around.fill_diagonal_(0.0)
            return Factors(order, ahead, around)
    return None


def gptq(weight: Tensor, scales: Tensor, factors: Factors, sweeps: int = SWEEPS) -> Quantized:
    """float32 [N, K] and scales of its groups, float32 [N, K / group] -> codes on these scales."""
    rows, columns = weight.shape
    weight_KN = weight.T[factors.order].contiguous()
    scales_GN, groups = scales.T.contiguous(), factors.order // (columns // scales.shape[1])
    codes_KN = torch.empty((columns, rows), dtype=torch.int8, device=weight.device)
    error_KN = torch.zeros_like(weight_KN)
    for coefficients in (factors.ahead, *[factors.around] * sweeps):
        _sweep(weight_KN, scales_GN, groups, coefficients, codes_KN, error_KN, first=coefficients is factors.ahead)
    codes = torch.empty_like(codes_KN)
    codes[factors.order] = codes_KN
    return Quantized(codes.T.contiguous(), scales)


def _sweep(
    weight_KN: Tensor,
    scales_GN: Tensor,
    groups: Tensor,
    coefficients: Tensor,
    codes_KN: Tensor,
    error_KN: Tensor,
    *,
    first: bool,
) -> None:
    """Round every column anew, in place, from the weight and what the other columns' errors add to it."""
    for start in range(0, len(weight_KN), BLOCK):
        block, reach = slice(start, start + BLOCK), start if first else len(weight_KN)
        wanted = torch.addmm(weight_KN[block], coefficients[block, :reach], error_KN[:reach])
        inner, scales = coefficients[block, block], scales_GN[groups[block]]
        for k, scale in enumerate(scales):
            code = nearest_int4(wanted[k], scale)
            error = weight_KN[start + k] - code * scale
            moved = error - error_KN[start + k]
            codes_KN[start + k], error_KN[start + k] = code, error
            wanted[k + 1 :].addr_(inner[k + 1 :, k], moved)


def output_error(weight: Tensor, found: Quantized, inputs: Tensor) -> float:
    """||(W - Q) X^T||^2 for inputs X, float32 [m, K]."""
    total = 0.0
    for start in range(0, len(weight), _ROWS):
        total += (_difference(weight, found, start) @ inputs.T).double().square().sum().item()
    return total


def weight_error(weight: Tensor, found: Quantized) -> float:
    """||W - Q||^2."""
    starts = range(0, len(weight), _ROWS)
    return sum(_difference(weight, found, start).double().square().sum().item() for start in starts)


def _difference(weight: Tensor, found: Quantized, start: int) -> Tensor:
    rows = weight[start : start + _ROWS]
    group = weight.shape[1] // found.scales.shape[1]
    scales = found.scales[start : start + _ROWS]
    return rows - found.codes[start : start + _ROWS].float() * expand_scales(scales, (1, group), tuple(rows.shape))


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread for each of ours: the order of its sums must not depend on how many cores there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
