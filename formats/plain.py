"""Weights stored as ordinary floats: BF16 (the one that is written), F16 and F32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from . import Format, Grid, Part, Shape

if TYPE_CHECKING:
    from torch import Tensor


def _format(name: str, dtype: str) -> Format:
    def parts(shape: Shape) -> tuple[Part, ...]:
        return (Part(".weight", dtype, shape),)

    def recognise(found: Mapping[str, Part], shape: Shape) -> bool:
        return dict(found) == {".weight": parts(shape)[0]}

    def decode(tensors: Mapping[str, Tensor], shape: Shape) -> Tensor:
        return tensors[".weight"].float()

    return Format(name, Grid("plain"), parts, recognise, decode)


FORMATS = (_format("bf16", "BF16"), _format("f16", "F16"), _format("f32", "F32"))
