"""Rows of a stored matrix times a power of two, exactly, in the form in which they are stored.

A matrix in plain floats: the numbers themselves. A quantized one: the scales of blocks whose rows are all multiplied
(the codes stay), and where a block holds other rows too, as e4m3 blocks of 128 rows may, the codes of the rows. Nothing
is ever rounded: what would be is refused, and `room` says before how far one can go. numpy is imported when it is used.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ..formats import Shape
from .kernels import Matrix

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: exponents beyond this are refused: no cache needs them, and 2^64 is still far from what a float can hold
MOST = 64
#: what scales stay within, so that their products with codes are normal numbers in F32 and in BF16, too
_SCALES = (2.0**-100, 2.0**100)
_SCALES_F16 = (2.0**-14, 65504.0)
#: plain floats: log2 of the smallest step, and the largest value. BF16's step for F32 as well, and less than its
#: largest value for both: F32 may yet become BF16, by rounding
_FLOATS = {"BF16": (-133, 2.0**126), "F32": (-133, 2.0**126), "F16": (-24, 65504.0)}
_E4M3 = (-9, 448.0)


class Scaling(NamedTuple):
    """Output features to multiply by 2^exponent: those with first <= number % period < last, of the whole matrix.

    Output features are the rows of a matrix, and the elements of a vector.
    """

    exponent: int
    first: int = 0
    last: int = 1
    period: int = 1

    def covers(self, number: int) -> bool:
        """Whether this feature is multiplied."""
        return self.first <= number % self.period < self.last

    def before(self, number: int) -> int:
        """How many of the features below `number` are multiplied."""
        whole, rest = divmod(number, self.period)
        return whole * (self.last - self.first) + min(max(rest - self.first, 0), self.last - self.first)


class Inexact(ValueError):
    """A product that the stored form cannot hold."""


def apply(matrix: Matrix, scaling: Scaling, first: int, shape: Shape) -> None:
    """Multiply the features of a row block in its writable buffers. Raises Inexact; the buffers are then undefined.

    first: number of the block's first row. shape: of the whole matrix, [out, in], or of the vector. Numbers that are
    not finite stay so, for whoever looks for them.
    """
    codes, scales = _chosen(matrix, scaling, first, shape)
    if scales is not None and matrix.scale_dtype:
        held = _array(matrix.scales, matrix.scale_dtype).reshape(len(scales), -1)
        held[scales] = _multiplied(held[scales], matrix.scale_dtype, scaling.exponent)
    if codes.any():
        dtype = "E4M3" if matrix.kind == "e4m3" else matrix.kind.upper()
        held = _array(matrix.codes, dtype).reshape(len(codes), -1)
        held[codes] = _multiplied(held[codes], dtype, scaling.exponent)


def room(matrix: Matrix, scaling: Scaling, first: int, shape: Shape) -> tuple[int, int]:
    """(least, most) exponents by which the features of a row block can be multiplied, from -MOST to MOST; 0 always is.

    scaling: which features; its exponent does not matter.
    """
    codes, scales = _chosen(matrix, scaling, first, shape)
    least, most = -MOST, MOST
    if scales is not None and matrix.scale_dtype:
        held = _array(matrix.scales, matrix.scale_dtype).reshape(len(scales), -1)
        values = _magnitudes(_values(held[scales], matrix.scale_dtype))
        bounds = _SCALES_F16 if matrix.scale_dtype == "F16" else _SCALES
        if values.size:
            least, most = -_halvings(float(values.min()), bounds[0]), _doublings(float(values.max()), bounds[1])
    if codes.any():
        dtype = "E4M3" if matrix.kind == "e4m3" else matrix.kind.upper()
        values = _magnitudes(_values(_array(matrix.codes, dtype).reshape(len(codes), -1)[codes], dtype))
        step, largest = _E4M3 if dtype == "E4M3" else _FLOATS[dtype]
        if values.size:
            least = max(least, min(step - _last_place(values, step), 0))
            most = min(most, _doublings(float(values.max()), largest))
    return least, most


def _chosen(
    matrix: Matrix, scaling: Scaling, first: int, shape: Shape
) -> tuple[NDArray[np.bool_], NDArray[np.bool_] | None]:
    """Which features' codes are multiplied, and which rows of scales; None where there are no scales."""
    import numpy as np

    total, count = shape[0], matrix.cols if len(shape) == 1 else matrix.rows
    numbers = np.arange(first, first + count) % scaling.period
    codes: NDArray[np.bool_] = (numbers >= scaling.first) & (numbers < scaling.last)
    if matrix.scales is None:
        return codes, None
    height = matrix.block[0] or total
    blocks = range(first // height, -(-(first + count) // height))
    edges = [(block * height, min((block + 1) * height, total)) for block in blocks]
    whole = np.array([scaling.before(stop) - scaling.before(start) == stop - start for start, stop in edges])
    of_row = np.arange(first, first + count) // height - blocks.start
    return codes & ~whole[of_row], whole


def _array(buffer: Any, dtype: str) -> NDArray[Any]:
    import numpy as np

    kinds = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
    return np.frombuffer(buffer, kinds.get(dtype, np.uint8))


def _values(held: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """What stored numbers stand for, float32, exactly."""
    import numpy as np

    values: NDArray[np.float32]
    if dtype == "BF16":
        values = (held.astype(np.uint32) << 16).view(np.float32)
    elif dtype == "E4M3":
        values = _e4m3()[held]
    elif dtype in ("F8_E8M0", "U8"):
        # 2^-127, which is smaller than the smallest normal number, is exact in float32 all the same
        powers = np.ldexp(np.float32(1), held.astype(np.int32) - 127)
        values = np.where(held == 255, np.float32("nan"), powers)
    else:
        values = held.astype(np.float32)
    return values


def _multiplied(held: NDArray[Any], dtype: str, exponent: int) -> NDArray[Any]:
    """The stored form of the products. Raises Inexact."""
    import numpy as np

    values = _values(held, dtype)
    with np.errstate(all="ignore"):
        products = values * np.float32(2.0**exponent)
        if dtype == "BF16":
            result = (products.view(np.uint32) >> 16).astype(np.uint16)
        elif dtype == "E4M3":
            result = _e4m3_codes(exponent)[held]
        elif dtype in ("F8_E8M0", "U8"):
            result = np.where(held == 255, 255, np.clip(held.astype(np.int32) + exponent, 0, 254)).astype(np.uint8)
        else:
            result = products.astype(held.dtype)
        back = _values(result, dtype) * np.float32(2.0**-exponent)
        exact = (back == values) | ~np.isfinite(values)
    if not exact.all():
        raise Inexact(f"{values[~exact][0]:g} times 2^{exponent}")
    return result


@cache
def _e4m3() -> NDArray[np.float32]:
    """The values of the 256 codes."""
    import numpy as np

    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent > 0, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(mantissa * 1.0, -9))
    value = np.where(code & 127 == 127, np.nan, value)
    return np.where(code > 127, -value, value).astype(np.float32)


@cache
def _e4m3_codes(exponent: int) -> NDArray[np.uint8]:
    """Code -> the code of its value times 2^exponent; itself where that is no code."""
    import numpy as np

    values = _e4m3()
    code_of = {(float(value), code > 127): code for code, value in enumerate(values)}  # -0.0 has a code of its own
    found = [code_of.get((float(value) * 2.0**exponent, code > 127), code) for code, value in enumerate(values)]
    return np.array(found, np.uint8)


def _magnitudes(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """|x| of what is finite and not 0; zeros can be multiplied by anything."""
    import numpy as np

    found = np.abs(values)
    return found[np.isfinite(found) & (found > 0)]


def _doublings(value: float, largest: float) -> int:
    """How often `value` can be doubled without going beyond `largest`, up to MOST."""
    number = 0
    while number < MOST and value * 2.0 ** (number + 1) <= largest:
        number += 1
    return number


def _halvings(value: float, smallest: float) -> int:
    """How often `value` can be halved without going below `smallest`, up to MOST."""
    number = 0
    while number < MOST and value * 2.0 ** -(number + 1) >= smallest:
        number += 1
    return number


def _last_place(values: NDArray[np.float32], step: int) -> int:
    """log2 of the smallest bit that is set in any of some positive numbers.

    A lower bound of it where that is so far from 2^step that it says enough.
    """
    import numpy as np

    least = int(np.frexp(values.min())[1]) - 24  # no float32 has a bit below this one
    if least - MOST >= step:
        return least
    bits = values.view(np.uint32)
    exponent = np.maximum(bits >> 23, 1).astype(np.int32)
    significand = np.where(bits >> 23 > 0, bits & 0x7FFFFF | 0x800000, bits & 0x7FFFFF).astype(np.int64)
    lowest = (significand & -significand).astype(np.float64)
    return int((exponent + np.frexp(lowest)[1] - 1).min()) - 150
