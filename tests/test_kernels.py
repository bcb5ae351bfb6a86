"""The compiled kernels equal their torch twin bit for bit; both obey the formats' definitions."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from matrices import FLAVOURS, PLAIN, SCALES, assert_reports_agree, plain, raw, stored, values

from phasefold.formats import Grid, formats
from phasefold.formats.int4 import pack, unpack
from phasefold.quantize import kernels
from phasefold.quantize.grid import nearest_e4m3
from phasefold.quantize.kernels import Matrix, Report, Target, native, twin
from phasefold.quantize.mse import element_weights, search, search_errors
from phasefold.quantize.rtn import rtn

torch.set_num_threads(1)
LEVELS = range(native.best_level() + 1)  # every instruction set that this machine runs; none without a library
BACKENDS = ("torch", *(native.LEVELS[level] for level in LEVELS))
each_backend = pytest.mark.parametrize("backend", BACKENDS)
many = functools.partial(hypothesis.settings, deadline=None, derandomize=True, print_blob=False)

TARGETS = [
    Target("bf16"),
    *(Target("e4m3", block, power_of_two=p) for block in ((128, 128), (1, 0)) for p in (True, False)),
    *(Target("int4", (1, g)) for g in (32, 64, 128)),
    *(Target("int4", (1, g), "search", o) for g in (32, 64, 128) for o in ("weighted", "weighted2", "mse")),
    *(Target("int4", (1, g), "inverse") for g in (32, 64, 128)),
]


@dataclass(frozen=True)
class Result:
    report: Report
    codes: bytearray
    scales: bytearray

    def int4(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        words = torch.frombuffer(self.codes, dtype=torch.int32).view(rows, -1)
        return unpack(words), torch.frombuffer(self.scales, dtype=torch.bfloat16).view(rows, -1).float()


def run(backend: str, matrix: Matrix, target: Target) -> Result:
    codes, scales = (bytearray(n) for n in kernels.check_convertible(matrix, target))
    if backend == "torch":
        return Result(twin.convert(matrix, target, codes, scales), codes, scales)
    level = native.LEVELS.index(backend)
    return Result(native.convert(matrix, target, codes, scales or None, level=level), codes, scales)


def assert_same(matrix: Matrix, target: Target) -> None:
    """All backends give the twin's bytes and report."""
    expected = run("torch", matrix, target)
    for backend in BACKENDS[1:]:
        found = run(backend, matrix, target)
        assert_reports_agree(found.report, expected.report)
        if expected.report.fault:
            continue
        for name in ("scales", "codes"):
            a, b = getattr(found, name), getattr(expected, name)
            if a != b:
                at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
                shape = matrix.rows, matrix.cols
                pytest.fail(f"{backend}: {target} of {shape}: {name} byte {at} is {a[at]:#x}, twin {b[at]:#x}")


Case = tuple[str, int, tuple[int, int], str]  # the arguments of `stored`


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(["f32", "bf16", "f16", "e4m3", "int4", "e2m1"]))
    rows, groups = draw(st.sampled_from([1, 2, 3, 130, 257])), draw(st.integers(1, 19))
    ragged = draw(st.integers(-40, 40)) if kind in PLAIN or kind == "e4m3" else 0
    cols = max(1, groups * 128 + ragged * draw(st.booleans()))
    return kind, draw(st.integers(0, 10**6)), (rows, cols), draw(st.sampled_from(FLAVOURS))


# ---- native = twin


@many(max_examples=400)
@hypothesis.given(cases(), st.sampled_from(TARGETS[:8]))
def test_conversion_equals_the_twin(case: Case, target: Target) -> None:
    hypothesis.assume(target.kind != "int4" or case[2][1] % target.block[1] == 0)
    assert_same(stored(*case), target)


@many(max_examples=200)
@hypothesis.given(cases(), st.sampled_from(TARGETS[8:]))
def test_search_and_inverse_equal_the_twin(case: Case, target: Target) -> None:
    hypothesis.assume(target.kind != "int4" or case[2][1] % target.block[1] == 0)
    assert_same(stored(*case), target)


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_million_values_equal_the_twin(target: Target, flavour: str) -> None:
    rows = 16 if target.method != "rtn" else 129
    assert_same(plain(values(flavour, 7, (rows, 2048 + 384)).clamp(-3e38, 3e38)), target)


@many(max_examples=150)
@hypothesis.given(cases(), st.integers(0, 10**6))
def test_check_and_compare_equal_the_twin(case: Case, seed: int) -> None:
    matrix = stored(*case)
    kinds = ["f32", "bf16", "e4m3", *(["int4", "e2m1"] if matrix.cols % 128 == 0 else [])]
    other = stored(kinds[seed % len(kinds)], seed, (matrix.rows, matrix.cols), "gauss")
    for level in LEVELS:
        assert native.check(matrix, level=level) == twin.check(matrix)
        assert_reports_agree(native.compare(matrix, other, level=level), twin.compare(matrix, other))


@pytest.mark.parametrize("objective", ["weighted", "weighted2", "mse"])
def test_column_weights_equal_the_twin(objective: str) -> None:
    weights = raw(torch.rand(384, generator=torch.Generator().manual_seed(3)) + 0.1)
    for flavour, group in itertools.product(FLAVOURS, (32, 64, 128)):
        target = Target("int4", (1, group), "search", objective, column_weights=weights)
        assert_same(plain(values(flavour, 5, (5, 384))), target)


def test_the_default_backend_is_the_one_installed() -> None:
    built = importlib.util.find_spec("phasefold._codec") is not None
    assert kernels.backend() == (BACKENDS[-1] if built else "torch")
    assert kernels.backend() in ("torch", *native.LEVELS)
    matrix, target = stored("bf16", 1, (3, 256), "gauss"), Target("e4m3", (128, 128))
    codes, scales = bytearray(3 * 256), bytearray(8)
    report = kernels.convert(matrix, target, memoryview(codes), memoryview(scales))
    assert Result(report, codes, scales) == run(BACKENDS[-1], matrix, target)
    assert kernels.check(matrix).fault is None
    assert kernels.compare(matrix, matrix).max_error == 0


def test_threads_do_not_disturb_each_other() -> None:
    matrices = [plain(values("gauss", seed, (128, 1024)), "bf16") for seed in range(8)]
    jobs = [(matrix, target) for matrix in matrices for target in TARGETS[:9]]
    alone = [run(BACKENDS[-1], *job) for job in jobs]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda job: run(BACKENDS[-1], *job), jobs)) == alone


# ---- the definitions


@each_backend
def test_all_e4m3_codes_are_torchs(backend: str) -> None:
    codes = torch.arange(256).to(torch.uint8)
    codes = codes[(codes & 127) != 127].view(1, -1)
    scales = torch.ones(1)
    matrix = Matrix("e4m3", raw(codes), raw(scales), "F32", 1, codes.numel(), (0, 0))
    decoded = torch.frombuffer(run(backend, matrix, Target("bf16")).codes, dtype=torch.bfloat16)
    assert torch.equal(decoded.view(torch.int16), codes.view(torch.float8_e4m3fn).bfloat16().view(torch.int16)[0])
    again = run(backend, matrix, Target("e4m3", (1, 0)))  # amax 448, scale 1
    assert again.codes == raw(codes) and again.scales == raw(scales)


@each_backend
def test_e4m3_rounding_is_torchs_cast(backend: str) -> None:
    codes = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (codes[1:] + codes[:-1]) / 2
    x = torch.cat([codes, middle, middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(500.0))])
    x = torch.cat([x, -x])[None]
    result = run(backend, plain(x), Target("e4m3", (1, 0)))
    assert result.codes == raw(x.clamp(-448, 448).to(torch.float8_e4m3fn))
    assert raw(nearest_e4m3(torch.tensor([[463.0, 464.0, 480.0, 2.0**-10, -0.0]]), torch.ones(1, 1), (0, 0))) == bytes(
        [126, 126, 126, 0, 128]
    )


@each_backend
def test_int4_words(backend: str) -> None:
    row = torch.arange(-8, 8).float().repeat(2)[None]
    words = torch.tensor([[0x76543210, 0xFEDCBA98 - (1 << 32)] * 2], dtype=torch.int32)
    matrix = Matrix("int4", raw(words), raw(torch.ones(1, 1).bfloat16()), "BF16", 1, 32, (1, 32))
    assert run(backend, matrix, Target("bf16")).codes == raw(row.bfloat16())
    result = run(backend, plain(row), Target("int4", (1, 32), "inverse"))  # amax 8: the scale is 8 / 8
    assert result.codes == raw(words) and result.scales == raw(torch.ones(1).bfloat16())
    assert torch.equal(unpack(words), row.to(torch.int8)) and torch.equal(pack(row.to(torch.int8)), words)


def test_decode_is_that_of_the_formats() -> None:
    shape = (256, 384)
    for item in formats().values():
        if item.plain:
            continue
        found = next(
            m for seed in range(99) if (m := stored(item.grid.kind, seed, shape, "gauss")).block == item.grid.block
        )
        dtype, scale = twin._DTYPES[found.kind], SCALES[str(found.scale_dtype)]
        parts = [part.suffix for part in item.parts(shape)]
        tensors = {
            parts[0]: torch.frombuffer(bytearray(found.codes), dtype=torch.uint8).view(dtype).view(shape[0], -1),
            parts[1]: torch.frombuffer(bytearray(found.scales or b""), dtype=scale).view(item.grid.scale_shape(shape)),
        }
        if found.kind == "e4m3" and found.scale_dtype == "U8":
            tensors[parts[1]] = tensors[parts[1]].view(torch.float8_e8m0fnu)
        assert torch.equal(item.decode(tensors, shape), twin.decode(found)), item.name


def test_compressed_tensors_unpacks_our_words() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    weight = values("gauss", 1, (6, 256))
    result = run(BACKENDS[-1], plain(weight), Target("int4", (1, 32)))
    codes, scales = result.int4(6)
    words = torch.frombuffer(result.codes, dtype=torch.int32).view(6, -1)
    assert torch.equal(helpers.unpack_from_int32(words, 4, weight.shape), codes)
    expected = rtn(weight, Grid("int4", (1, 32)))
    assert torch.equal(codes, expected.codes) and torch.equal(scales, expected.scales)


# ---- search


@pytest.mark.parametrize("objective", ["weighted", "weighted2", "mse"])
def test_search_is_never_worse_than_rtn(objective: str) -> None:
    for flavour, group in itertools.product(["gauss", "zeros", "boundaries"], (32, 64, 128)):
        weight, grid = values(flavour, 11, (8, 1024)), Grid("int4", (1, group))
        elements = weight.reshape(8, -1, group).permute(2, 0, 1)
        weights = element_weights(elements, objective)
        found, plainly = search(weight, grid, objective=objective), rtn(weight, grid)
        least = search_errors(elements, weights, found.scales)
        assert bool((least <= search_errors(elements, weights, plainly.scales)).all())


@pytest.mark.parametrize(
    ("tail", "method", "expected"),
    [
        ("gauss", "rtn", (9.5, 10.3, 11.1)),
        ("gauss", "search", (8.6, 9.5, 10.1)),
        ("t5", "rtn", (12.0, 14.0, 16.3)),
        ("t5", "search", (11.0, 12.9, 14.7)),
    ],
)
def test_relative_error_of_int4(tail: str, method: str, expected: tuple[float, float, float]) -> None:
    torch.manual_seed(0)
    shape = (512, 2048)
    weight = torch.randn(shape) if tail == "gauss" else torch.distributions.StudentT(5.0).sample(shape)
    for group, percent in zip((32, 64, 128), expected, strict=True):
        report = run(BACKENDS[-1], plain(weight), Target("int4", (1, group), method, "mse")).report
        assert 100 * (report.error2 / report.norm2) ** 0.5 == pytest.approx(percent, rel=0.02)


def test_relative_error_of_fp8() -> None:
    weight = torch.randn(256, 2048, generator=torch.Generator().manual_seed(0))
    for power_of_two in (True, False):
        report = run(BACKENDS[-1], plain(weight), Target("e4m3", (128, 128), power_of_two=power_of_two)).report
        assert 100 * (report.error2 / report.norm2) ** 0.5 == pytest.approx(2.65, rel=0.02)


# ---- inverse


def copied(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The BF16 copy of an INT4 matrix with groups of 32."""
    return (codes.reshape(*scales.shape, 32) * scales[..., None]).bfloat16().float().flatten(1)


@each_backend
def test_inverse_finds_every_scale(backend: str) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-7, 8, (256, 1024), generator=generator).float()
    codes[:, ::32] = 7.0  # amax / 7, as quantization leaves it
    scales = torch.randint(0x0100, 0x7A00, (256, 32), generator=generator)
    unreachable = torch.arange(148, 253, 8)  # significands that no bf16(a / 7) has
    scales[0, :14] = 0x3C00 + unreachable - 128
    scales = scales.to(torch.int16).view(torch.bfloat16).float()
    codes[1, :32] = 0
    for kind in ("bf16", "f32"):
        result = run(backend, plain(copied(codes, scales), kind), Target("int4", (1, 32), "inverse"))
        assert result.report.fault is None and result.report.error2 == 0 and result.report.zero_blocks == 1
        found_codes, found_scales = result.int4(256)
        scales[1, 0] = 1.0
        assert torch.equal(found_codes.float(), codes) and torch.equal(found_scales, scales)


@each_backend
@pytest.mark.parametrize("level", range(1, 9))
def test_inverse_of_groups_that_do_not_reach_seven(backend: str, level: int) -> None:
    generator = torch.Generator().manual_seed(level)
    codes = torch.randint(-level, min(level, 7) + 1, (16, 256), generator=generator).float()
    codes[:, ::32] = -level
    weight = copied(codes, torch.rand(16, 8, generator=generator).bfloat16().float())
    weight[3, 5], codes[3, 5] = -0.0, 0.0
    result = run(backend, plain(weight), Target("int4", (1, 32), "inverse"))
    negative_zeros = int(((weight == 0) & weight.signbit()).sum())
    assert result.report.fault is None and result.report.negative_zeros == negative_zeros > 0
    assert torch.equal(copied(*(t.float() for t in result.int4(16))), weight + 0.0)


@each_backend
def test_inverse_refuses_other_weights(backend: str) -> None:
    weight = torch.zeros(4, 256)
    weight[2, 64:96] = torch.randn(32, generator=torch.Generator().manual_seed(0))
    report = run(backend, plain(weight, "bf16"), Target("int4", (1, 32), "inverse")).report
    assert report == Report("no exact INT4 inverse", 2, 64)


# ---- faults


@each_backend
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite(backend: str, target: Target, bad: float) -> None:
    for kind, (row, column) in itertools.product(PLAIN, ((0, 0), (129, 383), (4, 200))):
        weight = torch.zeros(130, 384)
        weight[row, column] = weight[129, 383] = bad
        assert run(backend, plain(weight, kind), target).report == Report("weight is not finite", row, column)


@each_backend
def test_other_faults(backend: str) -> None:
    def report(kind: str, codes: list[int], scales: list[float], dtype: str = "F32") -> Report:
        grid = {"e4m3": 128, "int4": 32, "e2m1": 32}
        stored_scales = torch.tensor(scales).to(SCALES[dtype])
        cols = len(codes) * (1 if kind == "e4m3" else 2)
        matrix = Matrix(kind, bytes(codes), raw(stored_scales), dtype, 1, cols, (1, grid[kind]))
        found = run(backend, matrix, Target("bf16")).report
        if backend != "torch":
            checked = native.check(matrix, level=native.LEVELS.index(backend))
            assert checked.fault == found.fault or found.fault == "weight overflows BF16"
        assert twin.check(matrix).fault in (found.fault, None)
        return found

    ones = [0x38] * 384
    assert report("e4m3", [*ones[:300], 0xFF, *ones[301:]], [1, 1, 1]) == Report("weight is not finite", 0, 300)
    assert report("e4m3", ones, [1, float("nan"), -1]) == Report("scale is not finite", 0, 1)
    assert report("e4m3", ones, [1, 1, -1]) == Report("scale is negative", 0, 2)
    assert report("e4m3", ones, [1, 0, float("inf")]) == Report("scale is zero where codes are not", 0, 1)
    assert report("e4m3", [*ones[:128], *[0, 0x80] * 64, *ones[:128]], [1, 0, 1]).fault is None
    assert report("e4m3", [*ones[:130], 0x7E, *ones[131:]], [1, 3e38, 1]) == Report("weight is not finite", 0, 130)
    assert report("int4", [0x88] * 15 + [0x98], [0], "BF16").fault == "scale is zero where codes are not"
    assert report("int4", [0x88] * 16, [0], "BF16").fault is None
    assert report("int4", [0x88] * 15 + [0x78], [3e38]).fault is None
    assert report("int4", [0x88] * 15 + [0x08], [3e38]) == Report("weight is not finite", 0, 31)
    assert report("e2m1", [0x11] * 16, [255], "U8").fault == "scale is not finite"
    assert run(backend, plain(torch.tensor([[1.0, 3.3961775e38]])), Target("bf16")).report == Report(
        "weight overflows BF16", 0, 1
    )


@each_backend
def test_counts(backend: str) -> None:
    weight = torch.zeros(2, 256)
    weight[0, :128], weight[1, 130] = 1e-40, 3e38
    report = run(backend, plain(weight), Target("int4", (1, 128))).report
    assert (report.tiny_scales, report.zero_blocks) == (1, 2)
    report = run(backend, plain(weight), Target("e4m3", (128, 128))).report
    assert (report.tiny_scales, report.zero_blocks) == (0, 0)
    tiny = Matrix("e4m3", b"\x38" * 128, torch.tensor([1e-40]).numpy().tobytes(), "F32", 1, 128, (1, 128))
    for target in (Target("bf16"), Target("e4m3", (128, 128))):  # the source's, then one more of the result at most
        assert run(backend, tiny, target).report.tiny_scales == 1


def test_sizes_are_checked() -> None:
    matrix = plain(torch.zeros(2, 96))
    with pytest.raises(ValueError, match="96 columns"):
        run(BACKENDS[-1], matrix, Target("int4", (1, 64)))
    with pytest.raises(ValueError, match="buffer of 3 bytes where 192 are needed"):
        kernels.convert(matrix, Target("e4m3", (128, 128)), bytearray(3), bytearray(4))
    for bad in (
        matrix._replace(rows=0),
        matrix._replace(kind="e4m3"),
        Matrix("int4", b"\0" * 8, b"\0" * 4, "F32", 1, 15, (1, 0)),
        Matrix("e2m1", b"\0" * 8, b"\0" * 12, "F32", 1, 16, (1, 7)),
    ):
        with pytest.raises(ValueError, match="matrix"):
            kernels.check(bad)
    with pytest.raises(ValueError, match="no method"):
        run(BACKENDS[-1], matrix, Target("int4", (1, 32), "best"))
    with pytest.raises(ValueError, match="compare"):
        kernels.compare(matrix, plain(torch.zeros(2, 97)))
