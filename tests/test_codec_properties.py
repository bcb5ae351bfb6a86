"""Properties of the codecs that hold for any weights: over shapes, groups and raw bit patterns, extremes included."""

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phasefold.formats import formats
from phasefold.quantize import kernels
from phasefold.quantize.kernels import Matrix, Report, Target, twin

patient = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# BF16 as bits: everything up to 2^125 (beyond, rounding up can leave float32: the converter refuses that), and more
# often than chance zeros, denormals, the largest and values near one
bits = st.one_of(
    st.integers(0, 0x7E00),
    st.integers(0x8000, 0xFE00),
    st.sampled_from([0, 0x8000, 1, 0x007F, 0x0080, 0x7E00, 0xFE00]),
    st.integers(0x3C00, 0x4100),
)


@st.composite
def weights(draw: st.DrawFn, multiple: int = 8) -> torch.Tensor:
    """BF16 [rows, columns]; a few values drawn, spread over the matrix by chance."""
    rows, columns = draw(st.integers(1, 140)), multiple * draw(st.integers(1, max(1, 320 // multiple)))
    values = np.array(draw(st.lists(bits, min_size=1, max_size=40)), np.uint16)
    chosen = np.random.default_rng(draw(st.integers(0, 2**32))).integers(0, len(values), (rows, columns))
    return torch.from_numpy(values[chosen].astype(np.int16)).view(torch.bfloat16)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def convert(weight: torch.Tensor, target: Target, by=kernels) -> tuple[bytes, bytes, Report]:
    """BF16 weights by one target: codes, scales, report."""
    rows, columns = weight.shape
    matrix = Matrix("bf16", raw(weight), None, None, rows, columns)
    code_bytes, scale_bytes = kernels.check_convertible(matrix, target)
    codes, scales = bytearray(code_bytes), bytearray(scale_bytes)
    report = by.convert(matrix, target, codes, scales)
    return bytes(codes), bytes(scales), report


def decode(codes: bytes, scales: bytes, name: str, shape: torch.Size) -> torch.Tensor:
    """float32 by the format's own decode."""
    item = formats()[name]
    stored = {}
    types = {"F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32, "I32": torch.int32, "BF16": torch.bfloat16}
    for part, data in zip(item.parts(tuple(shape)), (codes, scales), strict=False):
        stored[part.suffix] = torch.frombuffer(bytearray(data), dtype=types[part.dtype]).view(part.shape)
    return item.decode(stored, tuple(shape))


@patient
@given(weights(), st.booleans(), st.sampled_from(["fp8-block", "fp8-channel"]))
def test_fp8_is_finite_near_and_its_own_image(weight: torch.Tensor, power_of_two: bool, name: str) -> None:
    target = Target("e4m3", formats()[name].grid.block, power_of_two=power_of_two)
    codes, scales, report = convert(weight, target)
    assert report.fault is None
    assert not any(code & 0x7F == 0x7F for code in codes)
    steps = torch.frombuffer(bytearray(scales), dtype=torch.float32)
    assert bool((steps.isfinite() & (steps >= 2.0**-126)).all())
    got = decode(codes, scales, name, weight.shape)
    wide = decode(b"\x38" * len(codes), scales, name, weight.shape)  # code 0x38 is 1.0: each element's scale
    assert bool(((got - weight.float()).abs() <= weight.float().abs() / 16 + wide * 2.0**-10 * 1.001).all())
    if power_of_two:
        assert bool((steps.view(torch.int32) & 0x807FFFFF == 0).all())
        if bool((got == got.bfloat16().float()).all()):
            again = convert(got.bfloat16(), target)
            assert torch.equal(decode(*again[:2], name, weight.shape), got)


@patient
@given(st.data(), st.sampled_from([32, 64, 128]), st.sampled_from(["rtn", "search"]))
def test_int4_is_near_and_search_is_never_worse(data: st.DataObject, group: int, method: str) -> None:
    weight = data.draw(weights(multiple=group))
    objective = data.draw(st.sampled_from(["weighted", "weighted2", "mse"]))
    codes, scales, report = convert(weight, Target("int4", (1, group), method, objective))
    assert report.fault is None
    steps = torch.frombuffer(bytearray(scales), dtype=torch.bfloat16).float()
    assert bool((steps.isfinite() & (steps > 0)).all())
    if method == "rtn":
        got = decode(codes, scales, f"int4-g{group}", weight.shape).double()
        wide = steps.double().view(len(weight), -1).repeat_interleave(group, 1)
        outside = (weight.double() / wide).abs() > 7.5 * 1.005  # the scale is BF16: amax may lie a little beyond 7.5
        assert not bool(outside.any()) or float(steps.min()) < 1e-37
        near = ((got - weight.double()).abs() <= wide * 0.55) | (wide < 1e-37)
        assert bool(near.all())
    elif objective == "mse":
        plain = convert(weight, Target("int4", (1, group)))[2]
        assert report.error2 <= plain.error2 * (1 + 1e-6)


@patient
@given(st.data(), st.sampled_from([32, 64, 128]))
def test_the_inverse_finds_any_int4_checkpoint(data: st.DataObject, group: int) -> None:
    """Any codes with a 7, any BF16 scale that is normal: w = bf16(q * s) gives codes and scales back."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows, groups = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 4))
    codes = torch.from_numpy(rng.integers(-7, 8, (rows, groups, group)))
    codes[:, :, 0] = 7
    scales = torch.from_numpy(rng.integers(0x0400, 0x7C00, (rows, groups)).astype(np.int16)).view(torch.bfloat16)
    weight = (codes.float() * scales.float()[..., None]).bfloat16().flatten(1)
    packed, found, report = convert(weight, Target("int4", (1, group), "inverse"))
    assert report.fault is None and report.error2 == 0.0
    assert torch.equal(torch.frombuffer(bytearray(found), dtype=torch.bfloat16).view(rows, groups), scales)
    assert torch.equal(decode(packed, found, f"int4-g{group}", weight.shape).bfloat16(), weight)


@patient
@given(st.data(), st.sampled_from(["rtn", "search"]), st.sampled_from([32, 64, 128, 0]))
def test_what_is_compiled_gives_the_twins_bits(data: st.DataObject, method: str, group: int) -> None:
    weight = data.draw(weights(multiple=group or 8))
    power_of_two = data.draw(st.booleans())
    target = Target("int4", (1, group), method) if group else Target("e4m3", (128, 128), power_of_two=power_of_two)
    ours, theirs = convert(weight, target), convert(weight, target, by=twin)
    for what, a, b in zip(("codes", "scales"), ours, theirs, strict=False):
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        assert first is None, f"{what} differ at byte {first}: {a[first]} and {b[first]}"


def test_all_nibbles_and_all_e4m3_codes() -> None:
    words = np.array([[0x76543210, 0xFEDCBA98]], np.uint32)
    item = formats()["int4-g32"]
    packed = torch.from_numpy(np.tile(words, 2).view(np.int32))
    parts = {".weight_packed": packed, ".weight_scale": torch.ones(1, 1).bfloat16()}
    assert item.decode(parts, (1, 32)).tolist() == [[*range(-8, 8), *range(-8, 8)]]
    codes = torch.arange(256, dtype=torch.uint8)
    ones = {".weight": codes.view(torch.float8_e4m3fn).view(2, 128), ".weight_scale_inv": torch.ones(1, 1)}
    values = formats()["fp8-block"].decode(ones, (2, 128)).flatten()
    sign, exponent, mantissa = codes >> 7, (codes >> 3 & 15).int(), (codes & 7).float()
    expected = torch.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * torch.exp2(exponent.float() - 7))
    expected = torch.where(sign == 1, -expected, expected)
    finite = (codes & 0x7F) != 0x7F
    assert torch.equal(values[finite], expected[finite]) and bool(values[~finite].isnan().all())
