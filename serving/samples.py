"""Are two checkpoints roundings of the same weights? A few values of each kind of matrix say so, in any formats.

A stored value stands for the interval of weights that round to it. Of one weight, two roundings have intervals that
meet: always, where both round to the nearest code. So weights that were trained on, or are another model's, show as
values whose intervals lie apart. What is smaller than the rounding of both formats does not show. Reads a few hundred
kilobytes and needs no torch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from ..families import Model
from ..formats import Part, Shape, recognise
from ..formats.checkpoint import Checkpoint, Reader
from ..formats.manifest import Manifest
from ..formats.mxfp4 import E2M1
from ..quantize.blocks import Buffers, StoredMatrix
from ..quantize.scaling import Scaling
from .survey import PARTS

_MATRICES = 4  # of a kind, evenly over the layers and experts
_ROWS, _COLUMNS = 4, 128  # of a matrix
_APART = 1 / 64  # of a matrix's values; roundings of one weight have none, or a few where kernels rounded otherwise
_FLOATS = {"bf16": ("H", 2.0**-8), "f16": ("e", 2.0**-11), "f32": ("f", 2.0**-24)}  # half a step of the last place
#: relative, what one more rounding to FP8 adds: a release in BF16 beside INT4 made of its FP8 release
ONE_MORE = 2.0**-4
_FLOAT32 = 1e-5
#: times the error of a whole matrix whose codes were fitted to its inputs: so far its sampled rows may be off
_FITTED = 3.0


Folds = Mapping[str, Scaling]


class Sample(NamedTuple):
    """What was compared: how many matrices, the names of those that differ, and the largest relative distance.

    The distance is the norm of the differences by that of the values; 1.4 between weights that have nothing in common.
    """

    compared: int
    differing: list[str]
    distance: float


def fitted(*manifests: Manifest | None) -> dict[str, float]:
    """Modules whose codes make up for each other's errors (GPTQ), and are not the nearest -> their relative error."""
    found: dict[str, float] = {}
    for manifest in filter(None, manifests):
        for module, unit in manifest.units.items():
            if len(unit) > 4 and str(unit[4]).startswith("gptq"):
                found[module] = found.get(module, 0.0) + float(unit[3])
    return found


def compare_weights(
    model: Model,
    first: Checkpoint,
    second: Checkpoint,
    folds: tuple[Folds, Folds] = ({}, {}),
    slack: float = 0.0,
    errors: Mapping[str, float] = MappingProxyType({}),
) -> Sample:
    """Compare matrices that both hold in a known format. slack: relative, added to the intervals.

    folds: of each checkpoint, module -> the powers of two that undo its folding.
    errors: see `fitted`; these matrices are judged by their distance.

    Raises CheckpointError where a shard cannot be read.
    """
    readers = Reader(first), Reader(second)
    compared, differing, distance = 0, [], 0.0
    try:
        for module, shape in _chosen(model, first, second):
            found = [_stored(reader, module, shape) for reader in readers]
            if found[0] is None or found[1] is None:
                continue
            compared += 1
            apart, total, error, norm = 0, 0, 0.0, 0.0
            # the last row too: of q_b_proj and kv_a_proj_with_mqa it is one of the rope's
            for row in sorted({round(step * (shape[0] - 1) / (_ROWS - 1)) for step in range(_ROWS)}):
                powers = [_power(fold.get(module), row) for fold in folds]
                pairs = zip(_row(found[0], row, powers[0]), _row(found[1], row, powers[1]), strict=True)
                for (a, width), (b, other) in pairs:
                    room = width + other + (slack + _FLOAT32) * max(abs(a), abs(b))
                    apart, total = apart + (abs(a - b) > room), total + 1
                    error, norm = error + (a - b) ** 2, norm + max(a * a, b * b)
            allowed = (_FITTED * errors.get(module, 0.0)) ** 2 * norm
            if (error > allowed if allowed else apart > total * _APART) or not math.isfinite(error):
                differing.append(module)
                distance = max(distance, math.sqrt(error / norm) if 0 < norm < math.inf else math.inf)
    finally:
        for reader in readers:
            reader.close()
    return Sample(compared, differing, distance)


def _power(fold: Scaling | None, row: int) -> float:
    return 2.0**fold.exponent if fold and fold.covers(row) else 1.0


def _chosen(model: Model, first: Checkpoint, second: Checkpoint) -> Iterator[tuple[str, Shape]]:
    """Modules that both hold: of each role and name some, first and last among them."""
    kinds: dict[tuple[str, str], list[tuple[str, Shape]]] = {}
    for spec in model.tensors():
        module = spec.name.removesuffix(".weight")
        if len(spec.shape) != 2 or module == spec.name or -1 in spec.shape:
            continue
        if all(spec.name in held or f"{module}.weight_packed" in held for held in (first.tensors, second.tensors)):
            kinds.setdefault((spec.role, module.rpartition(".")[2]), []).append((module, spec.shape))
    for held in kinds.values():
        places = {round(step * (len(held) - 1) / (_MATRICES - 1)) for step in range(_MATRICES)}
        yield from (held[place] for place in sorted(places))


def _stored(reader: Reader, module: str, shape: Shape) -> StoredMatrix | None:
    """The matrix as it lies there; None where it has no format, which is what `check` is for."""
    tensors = reader.checkpoint.tensors
    parts = tuple(
        Part(suffix, tensors[module + suffix].dtype, tensors[module + suffix].shape)
        for suffix in PARTS
        if module + suffix in tensors
    )
    known = recognise(parts, shape)
    return StoredMatrix(reader, module, parts, known.name, shape) if known else None


def _row(matrix: StoredMatrix, row: int, power: float = 1.0) -> Iterator[tuple[float, float]]:
    """(value, how far from it the weight may have been) for columns in the middle of a row, times `power`."""
    start = matrix.columns // 2 // _COLUMNS * _COLUMNS
    stop = min(start + _COLUMNS, matrix.columns)
    held = matrix.read(row, row + 1, Buffers())
    if held.kind in _FLOATS:
        code, half = _FLOATS[held.kind]
        for value in struct.unpack(f"<{held.cols}{code}", held.codes)[start:stop]:
            number = struct.unpack("<f", struct.pack("<I", value << 16))[0] if code == "H" else value
            yield number * power, abs(number) * half * power
        return
    width = matrix.grid.block[1] or matrix.columns
    scales = _numbers(bytes(held.scales or b""), held.scale_dtype or "")
    number_of, half_of = _CODES[held.kind]
    codes = bytes(held.codes)
    for column in range(start, stop):
        number = number_of(codes, column)
        scale = scales[column // width] * power
        yield number * scale, half_of(abs(number)) * abs(scale) if scale else 0.0


def _numbers(raw: bytes, dtype: str) -> list[float]:
    if dtype in ("U8", "F8_E8M0"):
        return [2.0 ** (byte - 127) if byte < 255 else math.nan for byte in raw]
    if dtype == "BF16":
        raw = b"".join(b"\0\0" + raw[place : place + 2] for place in range(0, len(raw), 2))
    code = "e" if dtype == "F16" else "f"
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw))


def _nibble(codes: bytes, column: int) -> int:
    return codes[column // 2] >> 4 * (column % 2) & 15


def _e4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return math.nan if byte & 127 == 127 else -value if byte > 127 else value


_E4M3 = [_e4m3(byte) for byte in range(256)]

#: kind -> (code at a column, half the distance to the next code). The last codes hold whatever was clipped there; for
#: INT4 from 7 on, because some quantizers do not use -8.
_CODES: dict[str, tuple[Callable[[bytes, int], float], Callable[[float], float]]] = {
    "e4m3": (lambda codes, k: _E4M3[codes[k]], lambda code: math.inf if code == 448 else max(code / 16, 2.0**-10)),
    "int4": (lambda codes, k: _nibble(codes, k) - 8, lambda code: math.inf if code >= 7 else 0.5),
    "e2m1": (lambda codes, k: E2M1[_nibble(codes, k)], lambda code: math.inf if code == 6 else max(code / 4, 0.25)),
}
