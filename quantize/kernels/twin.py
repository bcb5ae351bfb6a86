"""The torch twin of the compiled kernels, and their definition: decode, then a method, then encode.

Not fused: a row block exists as float32 between the steps. It serves where the package was built without a compiler,
and the tests hold the compiled kernels against it, bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...formats import Grid, Quantized, expand_scales
from ...formats.int4 import pack, unpack
from ...formats.mxfp4 import E2M1
from ..grid import TINY, block_amax
from ..inverse import NoInverseError, inverse
from ..mse import search
from ..rtn import rtn
from . import Buffer, Matrix, Report, Target, check_convertible, check_matrix

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "int4": torch.int32,
    "e2m1": torch.uint8,
}
_SCALE_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.float8_e8m0fnu,
}
_BF16_OVERFLOW = 3.3961775e38  # halfway between the largest BF16 and the next: it and all above round to infinity


def _tensor(buffer: Buffer, dtype: torch.dtype) -> Tensor:
    """A copy: torch warns about read-only memory."""
    return torch.frombuffer(bytearray(buffer), dtype=torch.uint8).view(dtype)


def _values(matrix: Matrix) -> Tensor:
    """The codes' values without their scales, float32 [rows, cols]."""
    check_matrix(matrix)
    stored = _tensor(matrix.codes, _DTYPES[matrix.kind]).view(matrix.rows, -1)
    if matrix.kind == "int4":
        return unpack(stored).float()
    if matrix.kind == "e2m1":
        return torch.tensor(E2M1)[torch.stack([stored & 15, stored >> 4], dim=-1).flatten(-2).long()]
    return stored.float()


def _scales(matrix: Matrix) -> Tensor | None:
    """float32 [ceil(rows / block rows), ceil(cols / block columns)]; None for plain kinds."""
    if matrix.scales is None or matrix.scale_dtype is None:
        return None
    shape = Grid(matrix.kind, matrix.block).scale_shape((matrix.rows, matrix.cols))
    return _tensor(matrix.scales, _SCALE_DTYPES[matrix.scale_dtype]).float().view(shape)


def decode(matrix: Matrix) -> Tensor:
    """float32 [rows, cols]: code times scale, rounded once."""
    values, scales = _values(matrix), _scales(matrix)
    return values if scales is None else values * expand_scales(scales, matrix.block, (matrix.rows, matrix.cols))


def _first(mask: Tensor, fault: str) -> Report | None:
    """A report on the first true element of a mask, in row-major order."""
    if not bool(mask.any()):
        return None
    row, column = divmod(int(mask.flatten().byte().argmax()), mask.shape[1])
    return Report(fault, row, column)


def _scale_fault(matrix: Matrix) -> Report | None:
    scales = _scales(matrix)
    if scales is None:
        return None
    used = block_amax(_values(matrix), matrix.block) != 0
    bad = {
        "scale is not finite": ~scales.isfinite(),
        "scale is negative": scales < 0,
        "scale is zero where codes are not": (scales == 0) & used,
    }
    reports = [report for fault, mask in bad.items() if (report := _first(mask, fault))]
    return min(reports, key=lambda report: (report.row, report.column), default=None)


def check(matrix: Matrix) -> Report:
    """See kernels.check."""
    if fault := _scale_fault(matrix) or _first(~decode(matrix).isfinite(), "weight is not finite"):
        return fault
    scales = _scales(matrix)
    if scales is None:
        return Report()
    zero = block_amax(_values(matrix), matrix.block) == 0
    return Report(tiny_scales=_num_tiny(scales), zero_blocks=int(zero.sum()))


def _num_tiny(scales: Tensor | None) -> int:
    return 0 if scales is None else int(((scales > 0) & (scales < TINY)).sum())


def _quantize(weight: Tensor, target: Target) -> Quantized:
    grid = Grid(target.kind, target.block)
    if target.method == "search":
        columns = target.column_weights
        weights = None if columns is None else _tensor(columns, torch.float32)
        return search(weight, grid, objective=target.objective, column_weights=weights)
    return inverse(weight, grid) if target.method == "inverse" else rtn(weight, grid, power_of_two=target.power_of_two)


def convert(matrix: Matrix, target: Target, codes_out: Buffer, scales_out: Buffer | None) -> Report:
    """See kernels.convert."""
    check_convertible(matrix, target)
    weight = decode(matrix)
    if fault := _scale_fault(matrix) or _first(~weight.isfinite(), "weight is not finite"):
        return fault
    norm2 = weight.double().square().sum().item()
    if target.kind == "bf16":
        if fault := _first(weight.abs() >= _BF16_OVERFLOW, "weight overflows BF16"):
            return fault
        rounded = weight.bfloat16()
        _write(codes_out, rounded)
        return Report(error2=_sum_of_squares(weight, rounded), norm2=norm2, tiny_scales=_num_tiny(_scales(matrix)))
    try:
        quantized = _quantize(weight, target)
    except NoInverseError as error:
        return Report("no exact INT4 inverse", error.row, error.column)
    codes, scales = quantized.codes, quantized.scales
    assert scales_out is not None
    _write(codes_out, pack(codes) if target.kind == "int4" else codes)
    _write(scales_out, scales.bfloat16() if target.kind == "int4" else scales)
    result = codes.float() * expand_scales(scales, target.block, (matrix.rows, matrix.cols))
    exact = target.kind == "int4" and target.method == "inverse"  # there, the reference is bf16(q * s), and it is equal
    return Report(
        error2=0.0 if exact else _sum_of_squares(weight, result),
        norm2=norm2,
        tiny_scales=_num_tiny(_scales(matrix)) + _num_tiny(scales),
        zero_blocks=int((block_amax(weight, target.block) == 0).sum()),
        negative_zeros=int(((weight == 0) & weight.signbit()).sum()) if exact else 0,
    )


def _sum_of_squares(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).square().sum().item()


def _write(out: Buffer, tensor: Tensor) -> None:
    raw = tensor.contiguous().flatten().view(torch.uint8)
    if len(memoryview(out).cast("B")) != raw.numel():
        raise ValueError(f"buffer of {len(out)} bytes where {raw.numel()} are needed")
    torch.frombuffer(out, dtype=torch.uint8).copy_(raw)


def compare(a: Matrix, b: Matrix) -> Report:
    """See kernels.compare."""
    left, right = decode(a), decode(b)
    faults = (
        _scale_fault(a),
        _scale_fault(b),
        _first(~left.isfinite(), "weight is not finite"),
        _first(~right.isfinite(), "weight is not finite"),
    )
    for fault in faults:
        if fault:
            return fault
    return Report(
        error2=_sum_of_squares(left, right),
        norm2=left.double().square().sum().item(),
        max_error=float((left - right).abs().max()),
    )
