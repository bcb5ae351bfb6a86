"""Which part of a tensor a view of it covers, as boxes, and how much some boxes cover together.

All in bytes, so that a view of another dtype fits as well. Tensors may be "meta": only sizes and strides are read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Box = tuple[tuple[int, int], ...]  # [start, end) in each dimension of a Geometry


class Geometry(NamedTuple):
    """How a tensor lies in its storage.

    offset: its first byte. dims: (size, stride in bytes) of each dimension, widest stride first, the last one that of
    the bytes of an element; dimensions of size 1 or stride 0 are left out.
    """

    offset: int
    dims: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements."""
        return math.prod(size for size, _ in self.dims)


def geometry(tensor: Tensor) -> Geometry:
    """The geometry of a tensor or of a view of one."""
    size = tensor.element_size()
    dims = [
        (int(n), int(stride) * size)
        for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if n != 1 and stride
    ]
    dims.sort(key=lambda dim: -dim[1])
    return Geometry(int(tensor.storage_offset()) * size, (*dims, (size, 1)))


def boxes(view: Geometry, home: Geometry) -> list[Box]:
    """The boxes of `home` that a view of the same storage covers. `home` must be dense: its elements leave no gap."""
    if view.nbytes == 0:
        return []
    if view == home:
        return [tuple((0, size) for size, _ in home.dims)]
    return _cover(view.offset - home.offset, _merged(view.dims), home)


def _merged(dims: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """Dimensions that follow each other without a gap as one, the narrowest stride first."""
    merged: list[tuple[int, int]] = []
    for size, stride in reversed(dims):
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    return merged


def _cover(offset: int, runs: list[tuple[int, int]], home: Geometry) -> list[Box]:
    """Boxes of what starts at byte `offset` and is repeated by each of `runs`, as (times, stride)."""
    ranges, rest = [], offset
    for _, stride in home.dims:
        ranges.append((rest // stride, rest // stride + 1))
        rest %= stride
    for number, (size, stride) in enumerate(runs):
        others = [*runs[:number], *runs[number + 1 :]]
        axis = next((axis for axis, (_, wide) in enumerate(home.dims) if wide == stride), None)
        if axis is None or ranges[axis][1] - ranges[axis][0] > 1:  # within a dimension: each copy is a box of its own
            return [box for copy in range(size) for box in _cover(offset + copy * stride, others, home)]
        while size > 1:
            start, extent = ranges[axis][0], home.dims[axis][0]
            if start + size <= extent:
                ranges[axis], size = (start, start + size), 1
            elif (part := extent - start if start else size - size % extent) < size and (start or size % extent):
                wide = home.dims[axis][1]  # cut where it wraps around
                times = part * wide // stride
                head = _cover(offset, [*others, (times, stride)], home)
                return head + _cover(offset + times * stride, [*others, (runs[number][0] - times, stride)], home)
            else:
                ranges[axis], size, axis = (0, extent), size // extent, axis - 1
    return [tuple(ranges)]


def volume(covered: Iterable[Box]) -> int:
    """Bytes in the union of boxes of one geometry."""
    groups: dict[tuple[int, int], set[Box]] = {}
    for box in covered:
        if not box:
            return 1
        groups.setdefault(box[0], set()).add(box[1:])
    ranges = sorted(groups)
    if all(left[1] <= right[0] for left, right in itertools.pairwise(ranges)):
        return sum((end - start) * volume(groups[start, end]) for start, end in ranges)
    edges = sorted({edge for span in ranges for edge in span})
    total = 0
    for start, end in itertools.pairwise(edges):
        inside = {rest for span in ranges if span[0] <= start and end <= span[1] for rest in groups[span]}
        total += (end - start) * volume(inside)
    return total
