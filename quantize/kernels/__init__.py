"""One call works on one row block of a matrix: decode the source, choose codes, pack them, sum the error.

`convert`, `check` and `compare` run the compiled kernels (native.py) where the package was built with a compiler, and
else their torch twin (twin.py), which gives the same bits and is the definition. Buffers are those of Python: nothing
here imports torch or numpy while the library is there.

What a report's fault means: it is the first one, scales before weights before what the target cannot hold, each in
row-major order; a scale's place is its place among the scales. The output buffers of a call with a fault are undefined.
"""

from __future__ import annotations

from typing import NamedTuple

Buffer = bytes | bytearray | memoryview

#: bits an element, by kind
_BITS = {"f32": 32, "bf16": 16, "f16": 16, "e4m3": 8, "int4": 4, "e2m1": 4}
#: bytes a scale, by safetensors' name
_SCALE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E8M0": 1, "U8": 1}
_PLAIN = ("f32", "bf16", "f16")
METHODS = ("rtn", "search", "inverse")
OBJECTIVES = ("weighted", "weighted2", "mse")
_SMALLEST_BLOCK = 8


class Matrix(NamedTuple):
    """Rows of a stored matrix: any rows of it, cut at scale blocks.

    kind: "bf16", "f16", "f32" (no scales), "e4m3", "int4" (offset-binary I32 words) or "e2m1" (two a byte).
    scale_dtype: safetensors' name; U8 is read as E8M0.
    block: (rows, columns) that share a scale; 0 stands for the whole extent.
    """

    kind: str
    codes: Buffer
    scales: Buffer | None
    scale_dtype: str | None
    rows: int
    cols: int
    block: tuple[int, int] = (0, 0)


class Target(NamedTuple):
    """What rows become: "bf16", "e4m3" (float32 scales; of 128x128 blocks, channels ...) or "int4" (BF16 scales).

    method: for int4 "rtn", "search" (its `objective`: "weighted", "weighted2" or "mse") or "inverse".
    power_of_two: round e4m3 scales up to a power of two.
    column_weights: float32 [cols], for the search: each column's share in the error.
    """

    kind: str
    block: tuple[int, int] = (0, 0)
    method: str = "rtn"
    objective: str = "weighted"
    power_of_two: bool = True
    column_weights: Buffer | None = None


class Report(NamedTuple):
    """What a call found; with a fault, all other numbers but its place are 0.

    error2, norm2: sums of (w - result)^2 and w^2 (compare: (a - b)^2 and a^2); max_error: compare's largest |a - b|.
    tiny_scales: scales below 2^-126, which hardware that flushes denormals reads as 0, of the matrix and of the result.
    zero_blocks: blocks of zeros, of the result (check: of the matrix). negative_zeros: those that an inverse has lost.
    """

    fault: str | None = None
    row: int = 0
    column: int = 0
    error2: float = 0.0
    norm2: float = 0.0
    tiny_scales: int = 0
    zero_blocks: int = 0
    max_error: float = 0.0
    negative_zeros: int = 0


def check_matrix(matrix: Matrix) -> None:
    """ValueError where a matrix is none: it is empty, kind and scales do not agree, or blocks share a byte."""
    bits, (rows, cols) = _BITS[matrix.kind], (matrix.rows, matrix.cols)
    if rows < 1 or cols < 1 or min(matrix.block) < 0:
        raise ValueError(f"matrix of {rows} x {cols} with block {matrix.block}")
    if (matrix.scale_dtype is None) != (matrix.kind in _PLAIN) or (matrix.scales is None) != (matrix.kind in _PLAIN):
        raise ValueError(f"{matrix.kind} matrix with scales of {matrix.scale_dtype}")
    if cols * bits % 8 or matrix.block[1] * bits % 8:
        raise ValueError(f"{matrix.kind} matrix of {cols} columns with block {matrix.block}")


def code_bytes(matrix: Matrix) -> int:
    """Bytes of a matrix's codes."""
    return matrix.rows * matrix.cols * _BITS[matrix.kind] // 8


def num_scales(rows: int, cols: int, block: tuple[int, int]) -> int:
    """Scales of a [rows, cols] matrix with this block."""
    return -(-rows // (block[0] or rows)) * -(-cols // (block[1] or cols))


def scale_bytes(matrix: Matrix) -> int:
    """Bytes of a matrix's scales; 0 for plain kinds."""
    if matrix.scale_dtype is None:
        return 0
    return num_scales(matrix.rows, matrix.cols, matrix.block) * _SCALE_BYTES[matrix.scale_dtype]


def check_convertible(matrix: Matrix, target: Target) -> tuple[int, int]:
    """Bytes of the codes and of the scales that a conversion writes; ValueError where there is no such conversion."""
    rows, cols = matrix.rows, matrix.cols
    elements = rows * cols
    if target.method not in METHODS or target.objective not in OBJECTIVES:
        raise ValueError(f"no method {target.method} with objective {target.objective}")
    if target.kind == "bf16":
        return 2 * elements, 0
    if target.kind == "e4m3":
        if 0 < target.block[1] < _SMALLEST_BLOCK:
            raise ValueError(f"e4m3 block of {target.block[1]} columns, at least {_SMALLEST_BLOCK} are supported")
        return elements, 4 * num_scales(rows, cols, target.block)
    if target.kind != "int4" or target.block not in ((1, 32), (1, 64), (1, 128)) or cols % target.block[1]:
        raise ValueError(f"no conversion of {cols} columns to {target.kind} with block {target.block}")
    return elements // 2, 2 * elements // target.block[1]


def backend() -> str:
    """What runs here: "native-avx512", "native-avx2", "native" (compiled for any CPU) or "torch"."""
    level = native.best_level()
    return "torch" if level < 0 else native.LEVELS[level]


def convert(matrix: Matrix, target: Target, codes_out: Buffer, scales_out: Buffer | None) -> Report:
    """Convert a row block into writable buffers of exactly the result's size."""
    if native.library() is not None:
        return native.convert(matrix, target, codes_out, scales_out)
    from . import twin

    return twin.convert(matrix, target, codes_out, scales_out)


def check(matrix: Matrix) -> Report:
    """Look for faults, count tiny scales and blocks of zeros."""
    if native.library() is not None:
        return native.check(matrix)
    from . import twin

    return twin.check(matrix)


def compare(a: Matrix, b: Matrix) -> Report:
    """How far matrix b is from matrix a, of equal shape."""
    if (a.rows, a.cols) != (b.rows, b.cols):
        raise ValueError(f"compare [{a.rows}, {a.cols}] with [{b.rows}, {b.cols}]")
    if native.library() is not None:
        return native.compare(a, b)
    from . import twin

    return twin.compare(a, b)


from . import native  # noqa: E402  (it needs the names above)
