"""The exact inverse of an INT4 checkpoint's BF16 copy: the codes and scales with w = bf16(q * s), bit for bit.

The largest magnitude of a group is bf16(m * s) for the largest |q| = m, so s is bf16(amax / m) or a neighbour of it:
rounding twice moves it by at most one step (for 14 of 128 significands, 148, 156 .. 252, it does). m is 7 in a group
that was quantized with amax / 7; the others are tried for checkpoints made otherwise. -0.0 becomes code 0, thus 0.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..formats import Grid, Quantized
from .grid import block_amax, divide, nearest_int4

if TYPE_CHECKING:
    from torch import Tensor

LEVELS = (7.0, 8.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0)


class NoInverseError(ValueError):
    """A group for which no code and BF16 scale give the weights."""

    def __init__(self, row: int, column: int) -> None:
        super().__init__(f"no exact INT4 inverse for the group at [{row}, {column}]")
        self.row, self.column = row, column


def inverse(weight: Tensor, grid: Grid) -> Quantized:
    """float32 [N, K] -> int4 codes and BF16 scales that reproduce it; NoInverseError at the first group without."""
    group = grid.block[1]
    grouped = weight.reshape(len(weight), -1, group)
    amax = block_amax(weight, grid.block)
    found = torch.where(amax == 0, 1.0, 0.0)
    for level in LEVELS:
        middle = divide(amax, level).bfloat16().view(torch.int16).int()
        for step in (0, -1, 1):
            scales = (middle + step).to(torch.int16).view(torch.bfloat16).float()
            usable = (found == 0) & scales.isfinite() & (scales > 0)
            if not usable.any():
                continue
            wide = torch.where(usable, scales, 1.0)[..., None]
            equal = (nearest_int4(grouped, wide) * wide).bfloat16().float() == grouped
            found = torch.where(usable & equal.all(-1), scales, found)
    if not bool(found.all()):
        row, index = (found == 0).nonzero()[0].tolist()
        raise NoInverseError(row, index * group)
    return Quantized(nearest_int4(grouped, found[..., None]).flatten(1).to(torch.int8), found)
