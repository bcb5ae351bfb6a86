"""MXFP4 (OCP microscaling) in compressed-tensors' `mxfp4-pack-quantized` layout, as Kimi-K3 ships it. Only read.

Two e2m1 codes a byte, the even element in the low nibble; one E8M0 scale (2^(byte - 127)) for 32 elements.
Source of the code table: OCP Microscaling Formats v1.0, 5.3.3 and 5.4.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from . import Format, Grid, Part, Shape, expand_scales

if TYPE_CHECKING:
    from torch import Tensor

GRID = Grid("e2m1", (1, 32))
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def parts(shape: Shape) -> tuple[Part, ...]:
    """Codes and scales of an [N, K] matrix, K a multiple of 32."""
    rows, columns = shape
    return Part(".weight_packed", "U8", (rows, columns // 2)), Part(".weight_scale", "U8", (rows, columns // 32))


def recognise(found: Mapping[str, Part], shape: Shape) -> bool:
    """U8 codes and U8 (or F8_E8M0) scales of the right shapes."""
    if found.keys() != {".weight_packed", ".weight_scale"} or shape[1] % 32:
        return False
    codes, scale = parts(shape)
    return (
        found[".weight_packed"] == codes
        and found[".weight_scale"].shape == scale.shape
        and found[".weight_scale"].dtype in ("U8", "F8_E8M0")
    )


def decode(tensors: Mapping[str, Tensor], shape: Shape) -> Tensor:
    """U8 codes and scales -> float32 [N, K]; every product is exact."""
    import torch

    packed = tensors[".weight_packed"]
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    scales = tensors[".weight_scale"].view(torch.float8_e8m0fnu).float()
    return torch.tensor(E2M1)[nibbles.long()] * expand_scales(scales, GRID.block, shape)


FORMATS = (Format("mxfp4", GRID, parts, recognise, decode),)
