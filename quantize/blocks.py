"""A stored matrix, read in blocks of rows: the unit of work that fits the cache and bounds the memory.

Blocks are whole multiples of 128 rows (but the last), so that every scale block lies in one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

from ..errors import CheckpointError
from ..formats import Part, Shape, formats
from ..formats.checkpoint import Reader
from .kernels import Matrix, code_bytes, scale_bytes
from .scaling import Inexact, Scaling, apply

ROWS = 128
TARGET_BYTES = 2 << 20  # of codes in a block: about the size of an L2 cache


class Room(Protocol):
    """Where row blocks lie."""

    def get(self, name: str, nbytes: int) -> memoryview:
        """A writable view for what has this name; names of results end in `_out`."""
        ...


class Buffers:
    """Named scratch buffers of one thread, grown as needed and reused."""

    def __init__(self) -> None:
        self._held: dict[str, bytearray] = {}

    def get(self, name: str, nbytes: int) -> memoryview:
        """A writable view of `nbytes`; valid until the name is asked for again."""
        if len(self._held.get(name, b"")) < nbytes:
            self._held[name] = bytearray(nbytes)
        return memoryview(self._held[name])[:nbytes]


def as_matrix(shape: Shape) -> tuple[int, int]:
    """(rows, columns) of a tensor of any rank: the last dimension is the row."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def row_blocks(shape: Shape, codes: Part) -> Iterator[tuple[int, int]]:
    """(first, last + 1) rows of each block of a matrix whose codes are stored as `codes`."""
    rows, _ = as_matrix(shape)
    row_bytes = max(codes.nbytes // max(rows, 1), 1)
    step = max(ROWS, TARGET_BYTES // (row_bytes * ROWS) * ROWS)
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def scale_rows(block_rows: int, first: int, last: int, rows: int) -> tuple[int, int]:
    """The rows of the scales that belong to rows first..last of the codes."""
    height = block_rows or rows
    return first // height, -(-last // height)


class StoredMatrix:
    """One matrix of a checkpoint: where its parts lie, and how to read some rows of it.

    scaling: what it is seen as differs from what is stored by powers of two: a fold (see `fold`).
    """

    def __init__(
        self,
        reader: Reader,
        module: str,
        parts: tuple[Part, ...],
        storage: str,
        shape: Shape,
        scaling: Scaling | None = None,
    ) -> None:
        self.reader, self.module, self.shape, self.scaling = reader, module, shape, scaling
        self.grid = formats()[storage].grid
        self.kind = storage if self.grid.kind == "plain" else self.grid.kind
        self.codes, self.rest = parts[0], parts[1:]
        self.rows, self.columns = as_matrix(shape)

    def outline(self, first: int, last: int) -> Matrix:
        """Rows first..last (exclusive), of which nothing has been read: codes and scales are empty."""
        dtype = None if self.kind in ("bf16", "f16", "f32") else self.rest[0].dtype
        scales = None if dtype is None else b""
        return Matrix(self.kind, b"", scales, dtype, last - first, self.columns, self.grid.block)

    def read(self, first: int, last: int, buffers: Room, prefix: str = "") -> Matrix:
        """Rows first..last (exclusive) in the buffers `prefix + "codes"` and `prefix + "scales"`.

        Raises CheckpointError where they cannot be read, or scaled without loss.
        """
        matrix = self.outline(first, last)
        codes = buffers.get(prefix + "codes", code_bytes(matrix))
        self.reader.read(self.module + self.codes.suffix, self.codes.nbytes // max(self.rows, 1) * first, codes)
        matrix = matrix._replace(codes=codes)
        if matrix.scale_dtype is not None:
            part = self.rest[0]
            line = part.nbytes // self.grid.scale_shape(self.shape)[0]
            scales = buffers.get(prefix + "scales", scale_bytes(matrix))
            start, _ = scale_rows(self.grid.block[0], first, last, self.rows)
            self.reader.read(self.module + part.suffix, line * start, scales)
            matrix = matrix._replace(scales=scales)
        if self.scaling:
            try:
                apply(matrix, self.scaling, first, self.shape)
            except Inexact as error:
                rows = f"rows {first} to {last - 1}, {self.kind}"
                raise CheckpointError(
                    f"{self.module}{self.codes.suffix}: cannot be folded or unfolded without loss: {error} ({rows}); "
                    "convert from the checkpoint that the folded one was made from"
                ) from None
        return matrix

    def check_shape_tensor(self, buffers: Room, prefix: str = "") -> memoryview | None:
        """The bytes of `weight_shape`, checked to say what the config says; None where the format has none."""
        part = next((part for part in self.rest if part.suffix == ".weight_shape"), None)
        if part is None:
            return None
        raw = buffers.get(prefix + "shape", part.nbytes)
        self.reader.read(self.module + part.suffix, 0, raw)
        width = part.nbytes // 2
        said = [int.from_bytes(raw[i * width : (i + 1) * width], "little", signed=True) for i in (0, 1)]
        if said != list(self.shape):
            raise CheckpointError(f"{self.module}{part.suffix}: says {said}, the config calls for {list(self.shape)}")
        return raw

    def where(self, what: str, row: int, column: int, first: int) -> str:
        """The name and coordinate of a fault that a kernel reported for a block that starts at row `first`."""
        if what.startswith("scale"):
            row += scale_rows(self.grid.block[0], first, first, self.rows)[0]
            return f"{self.module}{self.rest[0].suffix}[{row}, {column}]"
        name = f"{self.module}{self.codes.suffix}"
        return f"{name}[{column}]" if len(self.shape) < 2 else f"{name}[{row + first}, {column}]"
