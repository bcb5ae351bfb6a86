"""Arithmetic that all methods share: amax of blocks, scales rounded to their dtype, the nearest code.

Every step is one float32 operation with one rounding, in the order in which kernels/codec.h does it, so that compiled
kernels and torch agree bit for bit. Divisions are `torch.div(tensor, tensor)`: with a Python number torch may multiply
by a reciprocal instead, which differs in a quarter of the values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..formats import expand_scales

if TYPE_CHECKING:
    from torch import Tensor

E4M3_MAX = 448.0
TINY = 2.0**-126  # the smallest normal float32: e4m3 scales never go below
BF16_TINY = 2.0**-133  # the smallest BF16 denormal


def divide(dividend: Tensor, divisor: float) -> Tensor:
    """A true float32 division by a number."""
    return torch.div(dividend, torch.full_like(dividend, divisor))


def block_amax(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of each block of an [N, K] matrix -> [ceil(N / rows), ceil(K / columns)]; 0 = whole extent."""
    (num_rows, num_columns), (rows, columns) = weight.shape, block
    rows, columns = rows or num_rows, columns or num_columns
    above, left = -(-num_rows // rows), -(-num_columns // columns)
    padded = torch.nn.functional.pad(weight.abs(), (0, left * columns - num_columns, 0, above * rows - num_rows))
    return padded.reshape(above, rows, left, columns).amax(dim=(1, 3))


def e4m3_scales(amax: Tensor, *, power_of_two: bool) -> Tensor:
    """amax / 448, or the power of two at or above it; at least 2^-126; 1 where a block is zero. float32 as `amax`."""
    scales = divide(amax, E4M3_MAX).clamp(min=TINY)
    if power_of_two:  # up to the next exponent unless the mantissa is zero
        scales = ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(amax == 0, 1.0, scales)


def int4_scales(amax: Tensor, divisor: float) -> Tensor:
    """amax / divisor rounded to BF16; never 0 but for a zero group, which gets 1. float32 as `amax`."""
    scales = divide(amax, divisor).bfloat16().float().clamp(min=BF16_TINY)
    return torch.where(amax == 0, 1.0, scales)


def nearest_e4m3(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """weight / scale -> float8_e4m3fn [N, K]: nearest, ties to even, saturating; -0.0 keeps its sign."""
    wide = expand_scales(scales, block, tuple(weight.shape))
    return torch.div(weight, wide).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def nearest_int4(weight: Tensor, scales: Tensor) -> Tensor:
    """weight / scale (broadcast) -> float32 integers in -8..7: nearest, ties to even."""
    return torch.div(weight, scales).round_().clamp_(-8, 7)
