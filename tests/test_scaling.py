"""Powers of two on stored matrices: what torch decodes afterwards is torch.ldexp of what it decoded before."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from phasefold.quantize.kernels import Matrix
from phasefold.quantize.scaling import MOST, Inexact, Scaling, apply, room

patient = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])

PLAIN = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
SCALES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E8M0": torch.float8_e8m0fnu,
          "U8": torch.float8_e8m0fnu}  # fmt: skip
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
#: kind, block, dtype of the scales
FORMS = [("bf16", (0, 0), None), ("f16", (0, 0), None), ("f32", (0, 0), None), ("e4m3", (128, 128), "F32"),
         ("e4m3", (128, 128), "F8_E8M0"), ("e4m3", (128, 128), "BF16"), ("e4m3", (1, 0), "F32"),
         ("e4m3", (0, 0), "F32"), ("int4", (1, 32), "BF16"), ("int4", (1, 64), "F16"),
         ("e2m1", (1, 32), "U8")]  # fmt: skip


class Case(NamedTuple):
    """A stored matrix, and which of its features are to be multiplied."""

    kind: str
    block: tuple[int, int]
    dtype: str | None
    shape: tuple[int, ...]
    codes: bytearray
    scales: bytearray | None
    scaling: Scaling

    def matrix(self) -> Matrix:
        rows, columns = self.shape if len(self.shape) == 2 else (1, self.shape[0])
        return Matrix(self.kind, self.codes, self.scales, self.dtype, rows, columns, self.block)

    def copy(self) -> "Case":
        return self._replace(
            codes=bytearray(self.codes), scales=None if self.scales is None else bytearray(self.scales)
        )

    def decoded(self) -> torch.Tensor:
        """float64 [features, columns], by torch's own dtypes."""
        raw = torch.frombuffer(bytearray(self.codes), dtype=torch.uint8)
        if self.kind in PLAIN:
            return raw.view(PLAIN[self.kind]).view(self.shape[0], -1).double()
        rows, columns = self.shape
        if self.kind == "e4m3":
            values = raw.view(torch.float8_e4m3fn).view(rows, columns).double()
        else:
            nibbles = torch.stack([raw & 15, raw >> 4], -1).flatten().long().view(rows, columns)
            values = (nibbles - 8).double() if self.kind == "int4" else E2M1.double()[nibbles]
        height, width = self.block[0] or rows, self.block[1] or columns
        scales = torch.frombuffer(bytearray(self.scales), dtype=torch.uint8).view(SCALES[self.dtype]).double()
        scales = scales.view(-(-rows // height), -1).repeat_interleave(height, 0)[:rows]
        return values * scales.repeat_interleave(width, 1)[:, :columns]

    def chosen(self) -> torch.Tensor:
        numbers = torch.arange(self.shape[0]) % self.scaling.period
        return (numbers >= self.scaling.first) & (numbers < self.scaling.last)


@st.composite
def cases(draw: st.DrawFn, forms: list = FORMS) -> Case:
    kind, block, dtype = draw(st.sampled_from(forms))
    seed = np.random.default_rng(draw(st.integers(0, 2**32)))
    vector = kind in PLAIN and draw(st.booleans())
    rows, columns = draw(st.integers(1, 300)), draw(st.sampled_from([64, 192]))
    shape: tuple[int, ...] = (rows,) if vector else (rows, columns)
    size = rows if vector else rows * columns
    if kind in PLAIN:  # magnitudes of a narrow or a wide range, some zeros; exponents that BF16 and F32 have, or F16
        low, high = (-24, 15) if kind == "f16" else (-140, 120)
        middle, spread = draw(st.integers(low, high)), draw(st.sampled_from([0, 3, 20]))
        powers = np.clip(seed.integers(middle - spread, middle + spread + 1, size), low, high)
        values = torch.from_numpy(np.ldexp(seed.integers(-255, 256, size) / 128, powers)).to(PLAIN[kind])
        codes = bytearray(values.contiguous().view(torch.uint8).numpy().tobytes())
    elif kind == "e4m3":
        middle = draw(st.integers(0, 15)) * 8
        values = np.clip(seed.integers(middle - 20, middle + 21, size), 0, 126) | seed.integers(0, 2, size) << 7
        codes = bytearray(values.astype(np.uint8).tobytes())
    else:
        codes = bytearray(seed.integers(0, 256, size // 2, np.uint8).tobytes())
    scales = None
    if dtype is not None:
        height, width = block[0] or rows, block[1] or columns
        count = -(-rows // height) * -(-columns // width)
        middle = draw(st.integers(-14, 14)) if dtype == "F16" else draw(st.integers(-110, 110))
        powers = np.clip(seed.integers(middle - 3, middle + 4, count), -126, 126)
        if dtype in ("F8_E8M0", "U8"):
            scales = bytearray((powers + 127).astype(np.uint8).tobytes())
        else:
            numbers = torch.from_numpy(np.ldexp(seed.integers(64, 128, count) / 64, powers)).to(SCALES[dtype])
            scales = bytearray(numbers.view(torch.uint8).numpy().tobytes())
    period = draw(st.sampled_from([1, 2, 24, 64, 128, 160, 300]))
    first = draw(st.integers(0, period - 1))
    return Case(
        kind, block, dtype, shape, codes, scales, Scaling(0, first, draw(st.integers(first + 1, period)), period)
    )


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int64)


@patient
@given(cases(), st.data())
def test_products_are_exact_and_undone_to_the_byte(case: Case, data: st.DataObject) -> None:
    least, most = room(case.matrix(), case.scaling, 0, case.shape)
    assert -MOST <= least <= 0 <= most <= MOST
    before, chosen = case.decoded(), case.chosen()
    for exponent in {least, most, data.draw(st.integers(least, most))}:
        done, scaling = case.copy(), case.scaling._replace(exponent=exponent)
        apply(done.matrix(), scaling, 0, case.shape)
        expected = torch.where(chosen[:, None], torch.ldexp(before, torch.tensor(exponent)), before)
        assert torch.equal(bits(done.decoded()), bits(expected)), (case.kind, exponent)
        apply(done.matrix(), scaling._replace(exponent=-exponent), 0, case.shape)
        assert (done.codes, done.scales) == (case.codes, case.scales)


@patient
@given(cases([form for form in FORMS if form[0] in ("bf16", "f16", "f32", "e4m3")]))
def test_beyond_the_room_something_is_lost(case: Case) -> None:
    """Where codes change, `room` leaves out nothing; only for the largest BF16, and for F32, it keeps a distance."""
    least, most = room(case.matrix(), case.scaling, 0, case.shape)
    for exponent in (least - 1, most + 1):
        if abs(exponent) > MOST or (exponent > 0 and case.kind == "bf16") or case.kind == "f32":
            continue
        done, scaling = case.copy(), case.scaling._replace(exponent=exponent)
        try:
            apply(done.matrix(), scaling, 0, case.shape)
        except Inexact:
            continue
        # not lost: then it was the scales' distance from what F32 and BF16 can hold that counted
        assert case.kind == "e4m3" and done.scales != case.scales


@patient
@given(cases(), st.data())
def test_row_blocks_come_to_the_same_as_the_whole(case: Case, data: st.DataObject) -> None:
    assume(len(case.shape) == 2 and (case.kind in PLAIN or case.block != (0, 0)))
    least, most = room(case.matrix(), case.scaling, 0, case.shape)
    scaling = case.scaling._replace(exponent=data.draw(st.integers(least, most)))
    whole, pieces, rooms = case.copy(), [], []
    apply(whole.matrix(), scaling, 0, case.shape)
    rows = case.shape[0]
    lines = None if case.scales is None else len(case.scales) // -(-rows // (case.block[0] or rows))
    for first in range(0, rows, 128):
        last = min(first + 128, rows)
        codes = bytearray(case.codes[len(case.codes) // rows * first : len(case.codes) // rows * last])
        scales = None
        if case.scales is not None and lines is not None:
            height = case.block[0] or rows
            scales = bytearray(case.scales[first // height * lines : -(-last // height) * lines])
        matrix = Matrix(case.kind, codes, scales, case.dtype, last - first, case.shape[1], case.block)
        rooms.append(room(matrix, scaling, first, case.shape))
        apply(matrix, scaling, first, case.shape)
        pieces.append((codes, scales))
    assert b"".join(codes for codes, _ in pieces) == whole.codes
    assert whole.scales is None or b"".join(scales for _, scales in pieces if scales) == whole.scales
    assert (max(low for low, _ in rooms), min(high for _, high in rooms)) == (least, most)


@pytest.mark.parametrize(
    ("kind", "value", "least", "most"),
    [
        ("bf16", 1.0, -64, 64),
        ("bf16", 3.0e38, -64, 0),  # near the largest: what may become of it must not overflow either
        ("bf16", 2.0**-133, 0, 64),  # the smallest denormal
        ("bf16", 1.5 * 2.0**-126, -6, 64),  # seven bits below the first: one of them is set
        ("f16", 65504.0, -14 - 15, 0),
        ("f16", 2.0**-24, 0, 39),
        ("f16", -1.0, -24, 15),
        ("f32", 0.0, -64, 64),
        ("f32", 2.0**-149, 0, 64),
        ("f32", 1 + 2.0**-23, -64, 64),
        ("f32", (1 + 2.0**-23) * 2.0**-100, -10, 64),
    ],
)
def test_room_of_one_number(kind: str, value: float, least: int, most: int) -> None:
    numbers = torch.tensor([0.0, value], dtype=PLAIN[kind])
    codes = bytearray(numbers.view(torch.uint8).numpy().tobytes())
    assert room(Matrix(kind, codes, None, None, 1, 2), Scaling(0), 0, (2,)) == (least, most)


def test_codes_move_where_a_block_holds_other_rows() -> None:
    """192 = 128 + 64 rows a head: of 128-row blocks, each but the first is mixed. One subnormal code ends it."""
    codes = torch.full((384, 128), 0x38, dtype=torch.uint8)  # 1.0
    scales = torch.ones(3, 1)
    heads = Scaling(3, 128, 192, 192)

    def stored() -> tuple[bytearray, bytearray]:
        return bytearray(codes.numpy().tobytes()), bytearray(scales.view(torch.uint8).numpy().tobytes())

    held = stored()
    matrix = Matrix("e4m3", *held, "F32", 384, 128, (128, 128))
    assert room(matrix, heads, 0, (384, 128)) == (-9, 8)  # 1.0 is eight doublings from 256, nine halvings from 2^-9
    apply(matrix, heads, 0, (384, 128))
    after = torch.frombuffer(held[0], dtype=torch.uint8).view(384, 128)
    assert held[1] == stored()[1] and set(after[128:192].unique().tolist()) == {0x50}  # 8.0
    assert set(after[:128].unique().tolist()) | set(after[192:320].unique().tolist()) == {0x38}
    codes[320, 5] = 0x01  # 2^-9, in a rope row
    held = stored()
    matrix = Matrix("e4m3", *held, "F32", 384, 128, (128, 128))
    assert room(matrix, heads, 0, (384, 128)) == (0, 8)
    with pytest.raises(Inexact, match=r"0.00195312 times 2\^-1"):
        apply(matrix, heads._replace(exponent=-1), 0, (384, 128))


def test_what_is_not_finite_stays_so() -> None:
    """It is for the converter to find and name; a fold must not hide it."""
    numbers = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1.0]], dtype=torch.bfloat16)
    codes = bytearray(numbers.view(torch.uint8).numpy().tobytes())
    matrix = Matrix("bf16", codes, None, None, 1, 4)
    assert room(matrix, Scaling(0), 0, (1, 4)) == (-64, 64)
    apply(matrix, Scaling(5), 0, (1, 4))
    after = torch.frombuffer(codes, dtype=torch.bfloat16)
    assert after[0].isnan() and after[1:].tolist() == [float("inf"), -float("inf"), 32.0]
    codes, scale = bytearray([0x7F, 0xFF, 0x38]), bytearray(torch.tensor([float("nan")]).view(torch.uint8).numpy())
    matrix = Matrix("e4m3", codes, scale, "F32", 1, 3, (128, 128))
    apply(matrix, Scaling(2), 0, (1, 3))
    assert codes == bytes([0x7F, 0xFF, 0x38]) and torch.frombuffer(scale, dtype=torch.float32).isnan().all()
