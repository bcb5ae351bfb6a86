"""The compiled kernels, by ctypes: `phasefold._codec`, a shared library with a plain C ABI (kernels/cpu.cpp).

A call costs some microseconds, copies nothing and releases the GIL. The library holds one set of loops for each
instruction set; all give the same bits, and `level` picks one (tests do; otherwise it is the best that runs here).
"""

from __future__ import annotations

import ctypes
import importlib.util
from contextlib import ExitStack
from functools import cache

from . import (
    METHODS,
    OBJECTIVES,
    Buffer,
    Matrix,
    Report,
    Target,
    check_convertible,
    check_matrix,
    code_bytes,
    scale_bytes,
)

LEVELS = ("native", "native-avx2", "native-avx512")

# The numbers of cpu.cpp's enums are the places in these, and in the package's tuples of methods and objectives.
_KINDS = ("f32", "bf16", "f16", "e4m3", "int4", "e2m1", "e8m0")
_SCALES = {"F32": "f32", "BF16": "bf16", "F16": "f16", "F8_E8M0": "e8m0", "U8": "e8m0"}
_FAULTS = (
    None,
    "weight is not finite",
    "scale is not finite",
    "scale is negative",
    "scale is zero where codes are not",
    "no exact INT4 inverse",
    "weight overflows BF16",
)


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "scale_kind")),
        *((name, ctypes.c_int64) for name in ("rows", "cols", "block_rows", "block_cols")),
        *((name, ctypes.c_void_p) for name in ("codes", "scales")),
    )


class _Target(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "method", "objective", "power_of_two")),
        *((name, ctypes.c_int64) for name in ("block_rows", "block_cols")),
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "column_weights")),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("fault", "row", "column", "tiny_scales", "zero_blocks")),
        ("negative_zeros", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("error2", "norm2", "max_error")),
    )


class _View(ctypes.Structure):
    """CPython's Py_buffer, part of the stable ABI since 3.11."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("format", "shape", "strides", "suboffsets", "internal")),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The loaded library, or None where the package was installed without one."""
    spec = importlib.util.find_spec(f"{__name__.split('.')[0]}._codec")
    if spec is None or spec.origin is None:
        return None
    codec = ctypes.CDLL(spec.origin)
    for name, arguments in {"convert": 3, "check": 2, "compare": 3}.items():
        function = getattr(codec, f"phasefold_{name}")
        function.argtypes = (ctypes.c_int, *[ctypes.c_void_p] * arguments)
        function.restype = None
    return codec


@cache
def best_level() -> int:
    """The place in LEVELS of the best instruction set that this CPU runs; -1 without a library."""
    codec = library()
    return -1 if codec is None else int(codec.phasefold_level())


class _Addresses(ExitStack):
    """Addresses of buffers, held until the block ends. Works for read-only ones, which ctypes' from_buffer refuses."""

    def of(self, buffer: Buffer | None, nbytes: int, *, writable: bool = False) -> int | None:
        if nbytes == 0:
            return None
        view = _View()
        _get_buffer(ctypes.py_object(buffer), ctypes.byref(view), int(writable))
        self.callback(_release_buffer, ctypes.byref(view))
        if view.len != nbytes:
            raise ValueError(f"buffer of {view.len} bytes where {nbytes} are needed")
        address: int | None = view.buf
        return address


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.restype = None


def _matrix(addresses: _Addresses, m: Matrix) -> _Matrix:
    check_matrix(m)
    return _Matrix(
        _KINDS.index(m.kind),
        _KINDS.index(_SCALES[m.scale_dtype]) if m.scale_dtype else 0,
        m.rows,
        m.cols,
        m.block[0] or m.rows,
        m.block[1] or m.cols,
        addresses.of(m.codes, code_bytes(m)),
        addresses.of(m.scales, scale_bytes(m)),
    )


def _report(r: _Report) -> Report:
    return Report(
        _FAULTS[r.fault],
        r.row,
        r.column,
        r.error2,
        r.norm2,
        r.tiny_scales,
        r.zero_blocks,
        r.max_error,
        r.negative_zeros,
    )


def convert(
    matrix: Matrix, target: Target, codes_out: Buffer, scales_out: Buffer | None, *, level: int | None = None
) -> Report:
    """See kernels.convert."""
    codec = library()
    assert codec is not None
    codes, scales = check_convertible(matrix, target)
    report = _Report()
    with _Addresses() as addresses:
        source = _matrix(addresses, matrix)
        weights = target.column_weights
        result = _Target(
            _KINDS.index(target.kind),
            METHODS.index(target.method),
            OBJECTIVES.index(target.objective),
            target.power_of_two,
            target.block[0] or matrix.rows,
            target.block[1] or matrix.cols,
            addresses.of(codes_out, codes, writable=True),
            addresses.of(scales_out, scales, writable=True),
            addresses.of(weights, 0 if weights is None else 4 * matrix.cols),
        )
        codec.phasefold_convert(
            best_level() if level is None else level, ctypes.byref(source), ctypes.byref(result), ctypes.byref(report)
        )
    return _report(report)


def check(matrix: Matrix, *, level: int | None = None) -> Report:
    """See kernels.check."""
    codec = library()
    assert codec is not None
    report = _Report()
    with _Addresses() as addresses:
        source = _matrix(addresses, matrix)
        codec.phasefold_check(best_level() if level is None else level, ctypes.byref(source), ctypes.byref(report))
    return _report(report)


def compare(a: Matrix, b: Matrix, *, level: int | None = None) -> Report:
    """See kernels.compare."""
    codec = library()
    assert codec is not None
    report = _Report()
    with _Addresses() as addresses:
        left, right = _matrix(addresses, a), _matrix(addresses, b)
        codec.phasefold_compare(
            best_level() if level is None else level, ctypes.byref(left), ctypes.byref(right), ctypes.byref(report)
        )
    return _report(report)
