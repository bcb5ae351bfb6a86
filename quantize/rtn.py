"""Round to nearest: the scale follows from the largest magnitude of a block alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..formats import Grid, Quantized
from .grid import block_amax, e4m3_scales, int4_scales, nearest_e4m3, nearest_int4

if TYPE_CHECKING:
    from torch import Tensor

INT4_DIVISOR = 7.5  # compressed-tensors' choice for -8..7: half a step is clipped at one end


def rtn(weight: Tensor, grid: Grid, *, power_of_two: bool = True) -> Quantized:
    """float32 [N, K] -> the nearest codes of an e4m3 or int4 grid. `power_of_two` is about e4m3 scales."""
    amax = block_amax(weight, grid.block)
    if grid.kind == "e4m3":
        scales = e4m3_scales(amax, power_of_two=power_of_two)
        return Quantized(nearest_e4m3(weight, scales, grid.block), scales)
    assert grid.kind == "int4" and grid.block[0] == 1
    scales = int4_scales(amax, INT4_DIVISOR)
    codes = nearest_int4(weight.reshape(len(weight), -1, grid.block[1]), scales[..., None])
    return Quantized(codes.flatten(1).to(torch.int8), scales)
