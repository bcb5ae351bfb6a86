"""INT4 in compressed-tensors' `pack-quantized` layout: symmetric groups along the input dimension.

Eight codes share one little-endian I32 word, element 0 in the lowest nibble, stored with an offset of 8
(nibble = code + 8). The scale is BF16, one for each group; the value is `code * scale`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from . import PLAIN, Format, Grid, Part, Quantized, Shape, expand_scales

if TYPE_CHECKING:
    from torch import Tensor


def unpack(words: Tensor) -> Tensor:
    """int32 [N, K/8] -> int8 [N, K] with values in -8..7."""
    import torch

    nibbles = torch.stack([(words >> 4 * i) & 15 for i in range(8)], dim=-1)
    return (nibbles.flatten(-2) - 8).to(torch.int8)


def pack(codes: Tensor) -> Tensor:
    """int8 [N, K] with values in -8..7, K a multiple of 8 -> int32 [N, K/8]."""
    import torch

    nibbles = (codes.to(torch.int64) + 8).reshape(codes.shape[0], -1, 8)
    words = (nibbles << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _format(group: int) -> Format:
    grid = Grid("int4", (1, group))

    def parts(shape: Shape) -> tuple[Part, ...]:
        rows, columns = shape
        return (
            Part(".weight_packed", "I32", (rows, columns // 8)),
            Part(".weight_scale", "BF16", (rows, columns // group)),
            Part(".weight_shape", "I64", (2,)),
        )

    def recognise(found: Mapping[str, Part], shape: Shape) -> bool:
        if found.keys() != {".weight_packed", ".weight_scale", ".weight_shape"} or shape[1] % group:
            return False
        packed, scale, _ = parts(shape)
        return (
            found[".weight_packed"] == packed
            and (found[".weight_scale"].dtype in PLAIN and found[".weight_scale"].shape == scale.shape)
            and (found[".weight_shape"].dtype in ("I32", "I64") and found[".weight_shape"].shape == (2,))
        )

    def decode(tensors: Mapping[str, Tensor], shape: Shape) -> Tensor:
        return unpack(tensors[".weight_packed"]).float() * expand_scales(tensors[".weight_scale"], grid.block, shape)

    def encode(quantized: Quantized) -> tuple[Tensor, Tensor]:
        return pack(quantized.codes), quantized.scales.bfloat16()

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    scheme = {"format": "pack-quantized", "weights": {**weights, "dynamic": False}, "input_activations": None}
    return Format(f"int4-g{group}", grid, parts, recognise, decode, encode, scheme)


FORMATS = (_format(32), _format(64), _format(128))
