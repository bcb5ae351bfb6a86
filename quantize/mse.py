"""INT4 scale search without data: for each group the scale, out of a few, with the least weighted squared error.

Which candidates: amax / d for nine d. 7.5 comes first and wins ties, so no group is worse than under RTN; 7 clips
nothing; larger ones clip. The rest was chosen greedily (Gaussian and Student-t5, g32/g64/g128, all objectives): these
nine are within 0.2 % of the error of 35 candidates.

Which weights: plain squared error ("mse") clips the large weights that matter most in down projections, where its
output error came out worse than RTN's; sqrt(sigma^2 + x^2) ("weighted") keeps them, sigma^2 + x^2 ("weighted2") more
so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..formats import Grid, Quantized
from .grid import block_amax, int4_scales, nearest_int4

if TYPE_CHECKING:
    from torch import Tensor

DIVISORS = (7.5, 7.0, 7.25, 7.75, 8.0, 8.25, 8.5, 8.75, 9.25)
RANGE = (2.0**-60, 2.0**60)  # amax outside: squares would over- or underflow, and RTN's scale is taken


def add_up(terms: Tensor) -> Tensor:
    """Sum over the first dimension, one by one: the order that the kernels keep."""
    total = torch.zeros_like(terms[0])
    for term in terms:
        total = total + term
    return total


def element_weights(elements: Tensor, objective: str) -> Tensor:
    """[group, N, groups] float32 -> weights of the squared errors, same shape."""
    if objective == "mse":
        return torch.ones_like(elements)
    squares = elements * elements
    weights = add_up(squares) * (1 / len(elements)) + squares  # the mean is exact: a group is a power of two
    return weights.sqrt() if objective == "weighted" else weights


def search_errors(elements: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    """Weighted squared error of each group, [N, groups], under `scales` [N, groups].

    The code tried is the integer nearest to the exact product with the float32 inverse of the scale (it has 48 bits:
    double), as kernels have it from one FMA. Where another is nearest to x / scale, both are equally near to 2^-22.
    """
    inverse = torch.div(torch.ones_like(scales), scales)
    codes = (elements.double() * inverse.double()).round_().clamp_(-8, 7).float()
    error = elements - codes * scales
    return add_up(error * error * weights)


def search(
    weight: Tensor, grid: Grid, *, objective: str = "weighted", column_weights: Tensor | None = None
) -> Quantized:
    """float32 [N, K] -> int4 codes and BF16 scales. `column_weights` [K] multiply the objective's weights."""
    group = grid.block[1]
    grouped = weight.reshape(len(weight), -1, group)
    elements = grouped.permute(2, 0, 1).contiguous()  # [group, N, groups]
    weights = element_weights(elements, objective)
    if column_weights is not None:
        weights = weights * column_weights.view(-1, group).T[:, None]
    amax = block_amax(weight, grid.block)
    first = best = int4_scales(amax, DIVISORS[0])
    least = search_errors(elements, weights, best)
    for divisor in DIVISORS[1:]:
        scales = int4_scales(amax, divisor)
        errors = search_errors(elements, weights, scales)
        better = errors < least
        best, least = torch.where(better, scales, best), torch.where(better, errors, least)
    best = torch.where((amax >= RANGE[0]) & (amax <= RANGE[1]), best, first)
    return Quantized(nearest_int4(grouped, best[..., None]).flatten(1).to(torch.int8), best)
