"""What becomes of each tensor, and where it lies in the output: units, and the shards that they fill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..formats import DTYPES, Part, Shape, make_header
from .scaling import Scaling


class Output(NamedTuple):
    """One tensor of a shard: absolute file offset, and its part of the stored matrix."""

    name: str
    part: Part
    offset: int


class Unit(NamedTuple):
    """One matrix (or one plain tensor) and what becomes of it.

    action: "copied" (bytes), "folded" (copied, but for powers of two), "repacked" (the same numbers in another
        container), "quantized" (numbers chosen anew) or "added" (KV scales: they have no source).
    source: the stored parts, names are `module + suffix`. outputs: what is written, in the same order as `parts`.
    method, objective, power_of_two: how codes and scales are chosen where they are.
    lossless: the result must decode to the source's exact values, or the tensor is refused.
    scaling: powers of two by which the source is multiplied as it is read, whatever the action.
    value: of what is added.
    """

    module: str
    role: str
    shape: Shape
    action: str
    source: tuple[Part, ...]
    source_format: str
    target_format: str
    outputs: tuple[Output, ...]
    method: str = "rtn"
    objective: str = "weighted"
    power_of_two: bool = False
    lossless: bool = False
    scaling: Scaling | None = None
    value: float | None = None

    @property
    def kept(self) -> bool:
        """Written in the form in which it is read, under the same names."""
        return self.action in ("copied", "folded")

    @property
    def source_bytes(self) -> int:
        """Bytes read for this unit."""
        return sum(part.nbytes for part in self.source)


@dataclass(frozen=True, slots=True)
class Shard:
    """One output file: its header as it will be written, its size, and the units that fill it."""

    file: str
    header: bytes
    size: int
    units: tuple[Unit, ...]

    @property
    def source_bytes(self) -> int:
        """Bytes read for it."""
        return sum(unit.source_bytes for unit in self.units)


def lay_out(units: list[Unit], limit: int) -> tuple[Shard, ...]:
    """Cut units into shards of at most `limit` bytes of tensors, in their order; a larger unit gets one of its own."""
    groups: list[list[Unit]] = [[]]
    size = 0
    for unit in units:
        nbytes = sum(output.part.nbytes for output in unit.outputs)
        if groups[-1] and size + nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(unit)
        size += nbytes
    return tuple(_shard(f"model-{n:05d}-of-{len(groups):05d}.safetensors", group) for n, group in enumerate(groups, 1))


def _shard(file: str, units: list[Unit]) -> Shard:
    """Lay a shard out without holes and with every tensor aligned to its element size.

    Units stand one after the other, those with wide dtypes first, so that the file is complete from the front as they
    are finished. Where odd sizes would misalign a tensor, all tensors are sorted by the width of their dtype instead.
    """
    parts = {unit.module: sorted(unit.outputs, key=lambda output: -_width(output.part)) for unit in units}
    widest = {module: _width(outputs[0].part) for module, outputs in parts.items()}
    units = sorted(units, key=lambda unit: -widest[unit.module])
    order = [output for unit in units for output in parts[unit.module]]
    header, offsets = make_header((o.name, o.part.dtype, o.part.shape) for o in order)
    if any(offset % _width(output.part) for output, offset in zip(order, offsets, strict=True)):
        order.sort(key=lambda output: -_width(output.part))
        header, offsets = make_header((o.name, o.part.dtype, o.part.shape) for o in order)
    placed = {o.name: o._replace(offset=offset) for o, offset in zip(order, offsets, strict=True)}
    size = offsets[-1] + order[-1].part.nbytes
    return Shard(file, header, size, tuple(u._replace(outputs=tuple(placed[o.name] for o in u.outputs)) for u in units))


def _width(part: Part) -> int:
    return DTYPES[part.dtype]
