"""How numbers lie on disk: one file a storage format, each a `FORMATS` tuple of frozen values.

A quantized matrix of shape [N, K] is stored as *codes* and *scales*. Which values a code may take and how many elements
share a scale is its `Grid`; formats with equal grids hold the same numbers, so one becomes the other without loss.
Nothing here imports torch before it is asked to decode or encode, so that planning stays fast.
"""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]

#: bytes an element, by safetensors' name of the dtype
DTYPES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip

#: dtypes in which an unquantized tensor may be stored
PLAIN = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class Grid:
    """The values that a weight may take: `code * scale`, one scale for a block of elements.

    kind: "plain" (no scales), "e4m3" (OCP FP8, finite, +-448), "int4" (-8..7) or "e2m1" (OCP FP4).
    block: (rows, columns) that share a scale; 0 stands for the whole extent.
    """

    kind: str
    block: tuple[int, int] = (0, 0)

    def scale_shape(self, shape: Shape) -> tuple[int, int]:
        """Scales of an [N, K] matrix, as [ceil(N / rows), ceil(K / columns)]; edge blocks may be ragged."""
        rows, columns = self.block
        return -(-shape[0] // (rows or shape[0])), -(-shape[1] // (columns or shape[1]))


class Part(NamedTuple):
    """One tensor of a stored matrix: its name is the module's name and `suffix`."""

    suffix: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class Quantized:
    """What a method chose, before it is laid out for the disk.

    codes: [N, K], int8 in -8..7 for int4, float8_e4m3fn for e4m3.
    scales: [ceil(N / rows), ceil(K / columns)], float32, already rounded to the dtype that is stored.
    """

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True, slots=True)
class Format:
    """One storage format, as data and three functions.

    name: as recipes and reports write it.
    parts(shape): what an [N, K] matrix is stored as: codes first, then scales, then constants.
    recognise(found, shape): is this what lies there? `found` maps suffix -> Part, all parts of one module.
    decode(parts, shape): the stored tensors by suffix (any rows of them, cut at scale blocks) -> float32 [N, K].
    encode(quantized): -> (codes, scales) as they are stored; None where the format is only read.
    scheme: the entry in a compressed-tensors `config_groups` (without targets); None where there is none.
    """

    name: str
    grid: Grid
    parts: Callable[[Shape], tuple[Part, ...]]
    recognise: Callable[[Mapping[str, Part], Shape], bool]
    decode: Callable[[Mapping[str, Tensor], Shape], Tensor]
    encode: Callable[[Quantized], tuple[Tensor, Tensor]] | None = None
    scheme: Mapping[str, Any] | None = None

    @property
    def plain(self) -> bool:
        """True where the weight is stored as an ordinary float tensor."""
        return self.grid.kind == "plain"


@cache
def formats() -> Mapping[str, Format]:
    """All formats by name. Every module of this package that has a `FORMATS` tuple takes part."""
    found: dict[str, Format] = {}
    for module in pkgutil.iter_modules(__path__):
        for item in getattr(importlib.import_module(f".{module.name}", __name__), "FORMATS", ()):
            found[item.name] = item
    return found


@lru_cache(maxsize=4096)
def recognise(parts: tuple[Part, ...], shape: Shape) -> Format | None:
    """The format of the parts that lie under one module's name, or None where they fit none."""
    found = {part.suffix: part for part in parts}
    return next((item for item in formats().values() if item.recognise(found, shape)), None)


def expand_scales(scales: Tensor, block: tuple[int, int], shape: Shape) -> Tensor:
    """Scales [ceil(N/rows), ceil(K/columns)] -> float32 [N, K], each repeated over its block."""
    rows, columns = block[0] or shape[0], block[1] or shape[1]
    wide = scales.float().repeat_interleave(rows, 0)[: shape[0]]
    return wide.repeat_interleave(columns, 1)[:, : shape[1]]


def decode_e4m3(codes: Tensor, scales: Tensor, block: tuple[int, int], shape: Shape) -> Tensor:
    """float8_e4m3fn [N, K] and its scales -> float32 [N, K]; the product is rounded once, to float32."""
    grid = Grid("e4m3", block)
    return codes.float() * expand_scales(scales.reshape(grid.scale_shape(shape)), block, shape)


def make_header(tensors: Iterable[tuple[str, str, Shape]]) -> tuple[bytes, list[int]]:
    """Prefix and header of a shard that holds (name, dtype, shape) in this order, and the absolute offset of each."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends = [0]
    for name, dtype, shape in tensors:
        ends.append(ends[-1] + math.prod(shape) * DTYPES[dtype])
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": ends[-2:]}
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)  # data starts aligned, as the safetensors library writes it
    prefix = struct.pack("<Q", len(raw)) + raw
    return prefix, [len(prefix) + end for end in ends[:-1]]
