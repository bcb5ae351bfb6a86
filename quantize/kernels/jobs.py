"""What a launch of cuda.cu is told and what it leaves (job.h), and which kernel does which conversion.

Nothing here needs a card, or what talks to one.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from . import OBJECTIVES, Matrix, Report, Target, check_convertible, code_bytes, scale_bytes
from .build import GROUPS, TO_BF16, TO_E4M3_BLOCKS, TO_E4M3_CHANNELS, TO_INT4, Kernel
from .native import _FAULTS, _KINDS, _SCALES

ALIGNED = 256  # of what lies in an arena: more than any vector of a kernel, and what a copy likes
MOST_JOBS = 65535  # of a launch: the most that a grid's y may be
_WHOLE = 31  # the shift of a scale that stands for all rows, or all columns
_VECTOR = 8  # neighbours in a row that one thread holds; they share a scale
_MOST_ELEMENTS = 2**31 - 1
_NO_FAULT = 2**64 - 1


class Job(ctypes.Structure):
    """A row block of one matrix. Addresses are of the card's memory, multiples of 16."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("codes", "scales", "out_codes", "out_scales")),
        *((name, ctypes.c_uint64) for name in ("column_weights", "total")),
        *((name, ctypes.c_uint32) for name in ("rows", "cols", "scale_kind", "row_shift", "col_shift")),
        *((name, ctypes.c_uint32) for name in ("scale_cols", "objective", "power_of_two")),
    )


class Partial(ctypes.Structure):
    """What one thread block found, or all of a job. Where there is something rare, the CPU does the job once more."""

    _fields_ = (
        ("fault", ctypes.c_uint64),
        *((name, ctypes.c_double) for name in ("error2", "norm2")),
        *((name, ctypes.c_uint32) for name in ("tiny_scales", "zero_blocks", "negative_zeros", "rare")),
    )


class Work(NamedTuple):
    """One row block to convert. The matrix and the outputs lie in a lane's arenas; column weights lie anywhere."""

    matrix: Matrix
    target: Target
    codes_out: memoryview
    scales_out: memoryview | None


class Addresses(NamedTuple):
    """Where a work's parts lie on the card; 0 for a part that it does not have."""

    codes: int
    scales: int
    codes_out: int
    scales_out: int
    column_weights: int
    total: int


def kernel_of(matrix: Matrix, target: Target) -> Kernel | None:
    """The kernel that makes `target` of `matrix`; None where only the CPU does that conversion."""
    if _shifts(matrix) is None or matrix.cols % _VECTOR or not 0 < matrix.rows * matrix.cols <= _MOST_ELEMENTS:
        return None
    if target.kind == "bf16":
        return TO_BF16.get(matrix.kind)
    if target.kind == "e4m3" and target.block == (128, 128):
        return TO_E4M3_BLOCKS.get(matrix.kind)
    if target.kind == "e4m3" and target.block[0] == 1 and not 0 < target.block[1] < matrix.cols:
        return TO_E4M3_CHANNELS.get(matrix.kind)
    if target.kind == "int4" and target.block in [(1, group) for group in GROUPS] and not matrix.cols % target.block[1]:
        return TO_INT4.get((matrix.kind, target.block[1], target.method))
    return None


def supports(matrix: Matrix, target: Target) -> bool:
    """Is there a kernel for this conversion? Only kind, shape and block of the matrix are looked at."""
    return kernel_of(matrix, target) is not None


def needs(matrix: Matrix, target: Target) -> tuple[int, int]:
    """Bytes of a lane's source and of its result that a supported conversion takes, all that goes with it included."""
    kernel = kernel_of(matrix, target)
    assert kernel is not None
    weights = 0 if target.column_weights is None else 4 * matrix.cols
    source = (code_bytes(matrix), scale_bytes(matrix), weights, ctypes.sizeof(Job))
    partials = ctypes.sizeof(Partial) * kernel.tiles(matrix.rows, matrix.cols)
    result = (*check_convertible(matrix, target), ctypes.sizeof(Partial), partials)
    return sum(map(aligned, source)), sum(map(aligned, result))


def aligned(nbytes: int) -> int:
    """Bytes up to the next place of an arena."""
    return -(-nbytes // ALIGNED) * ALIGNED


def job(work: Work, at: Addresses) -> Job:
    """What a kernel is told of a work that `supports` is true for."""
    matrix, target = work.matrix, work.target
    shifts = _shifts(matrix)
    assert shifts is not None
    return Job(
        *(at.codes, at.scales, at.codes_out, at.scales_out, at.column_weights, at.total),
        *(matrix.rows, matrix.cols),
        _KINDS.index(_SCALES[matrix.scale_dtype]) if matrix.scale_dtype else 0,
        *shifts,
        1 if shifts[1] == _WHOLE else -(-matrix.cols // matrix.block[1]),
        OBJECTIVES.index(target.objective),
        target.power_of_two,
    )


def report(matrix: Matrix, found: Partial) -> Report:
    """What a job's total says, as the CPU's kernels tell it."""
    if found.fault != _NO_FAULT:
        fault = _FAULTS[found.fault & 7]
        index = found.fault >> 3 & (2**58 - 1)
        scale = fault is not None and fault.startswith("scale")
        row, column = divmod(index, -(-matrix.cols // (matrix.block[1] or matrix.cols)) if scale else matrix.cols)
        return Report(fault, row, column)
    return Report(
        error2=found.error2,
        norm2=found.norm2,
        tiny_scales=found.tiny_scales,
        zero_blocks=found.zero_blocks,
        negative_zeros=found.negative_zeros,
    )


def _shifts(matrix: Matrix) -> tuple[int, int] | None:
    """log2 of the extents of a source's scale blocks; None where kernels do not know these blocks."""
    if matrix.scale_dtype is None:
        return _WHOLE, _WHOLE
    rows = _shift(matrix.block[0], matrix.rows, 1)
    cols = _shift(matrix.block[1], matrix.cols, _VECTOR)
    return None if rows is None or cols is None else (rows, cols)


def _shift(extent: int, whole: int, least: int) -> int | None:
    if extent == 0 or extent >= whole:
        return _WHOLE
    return extent.bit_length() - 1 if extent >= least and not extent & (extent - 1) else None
