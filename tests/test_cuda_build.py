"""Every CUDA kernel compiles for the cards that are supported, on a machine without any, and keeps to its registers."""

from __future__ import annotations

import ctypes
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phasefold.errors import LoadError
from phasefold.quantize.kernels import METHODS, OBJECTIVES, build, jobs, native
from phasefold.quantize.kernels.build import KERNELS, Built, Resources, compile_source

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120")
SHARED = 48 << 10  # bytes that a block has on every card without asking for more
SMALL = "template <int n> __global__ void small(float* p) { p[0] = n; }\n"
NAMES = ("small<1>",)


def guilty(found: dict[str, Resources]) -> dict[str, Resources]:
    """Those that do not keep what they hold in registers, or ask for much shared memory."""
    return {name: r for name, r in found.items() if r.stack or r.spill_stores or r.spill_loads or not r.shared < SHARED}


@pytest.mark.parametrize("kind", build.KINDS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_compiles_without_spills(arch: str, kind: str) -> None:
    names = [name for name in KERNELS if f"<{build.KINDS[kind]}" in name] + [build.SUM_PARTIALS.name]
    assert len(names) == 13
    found = compile_source(build.source(), names, arch).resources()
    assert set(found) == set(names)
    assert not guilty(found)
    assert all(r.registers * KERNELS[name].threads <= 65536 for name, r in found.items())


def test_the_table_has_every_kernel() -> None:
    assert len(KERNELS) == 6 * (3 + 3 * 3) + 1
    found = re.findall(r"__global__ void __launch_bounds__\((\d+)[^)]*\)\s+(\w+)\(", build.source())
    bounds = {name: int(threads) for threads, name in found}
    assert {re.split("<", name)[0]: kernel.threads for name, kernel in KERNELS.items()} == bounds


ARRAY = """
__global__ void k(float* p) {
  float a[99];
  for (int i = 0; i < 99; i++) a[int(p[i])] = i;
  p[0] = a[int(p[1])];
}"""
SPILL = """
__global__ void __launch_bounds__(1024, 2) k(float* p) {
  float a[64];
#pragma unroll
  for (int i = 0; i < 64; i++) a[i] = p[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; i++) p[(63 - i) * 1024 + threadIdx.x] = a[i] * a[(i + 7) % 64];
}"""
CALL = """
__device__ __noinline__ float deep(float* p) {
  float a[99];
  for (int i = 0; i < 99; i++) a[int(p[i])] = i;
  return a[int(p[1])];
}
__global__ void k(float* p) { p[0] = deep(p); }"""
MUCH = """
__global__ void k(float* p) {
  __shared__ float a[12288];
  a[threadIdx.x] = p[0];
  __syncthreads();
  p[1] = a[int(p[2])];
}"""


@pytest.mark.parametrize("source", [ARRAY, SPILL, CALL, MUCH], ids=["array", "spill", "call", "shared"])
def test_guilty_kernels_are_found(source: str) -> None:
    found = compile_source(source, ["k"], "sm_90a").resources()
    assert guilty(found)
    assert (found["k"].shared == SHARED) == (source == MUCH)
    assert (found["k"].spill_stores > 0 and found["k"].spill_loads > 0) == (source == SPILL)


def test_a_report_that_cannot_be_read_is_no_acquittal() -> None:
    built = compile_source(SMALL, NAMES, "sm_90a")
    assert built.resources()["small<1>"].registers > 0
    with pytest.raises(KeyError):
        built._replace(report=built.report.replace("stack frame", "frame")).resources()
    with pytest.raises(KeyError):
        built._replace(report="").resources()


def layout(kind: type[ctypes.Structure], extra: int = 0) -> str:
    lines = [f'static_assert(sizeof({kind.__name__}) == {ctypes.sizeof(kind) + extra}, "");']
    for name, *_ in kind._fields_:
        field = getattr(kind, name)
        member = f"{kind.__name__}, {name}"
        lines += [
            f'static_assert(__builtin_offsetof({member}) == {field.offset}, "");',
            f'static_assert(sizeof({kind.__name__}::{name}) == {field.size}, "");',
        ]
    return "\n".join(lines)


def test_structures_are_those_of_the_kernels() -> None:
    enums = [f'static_assert({name} == {native._KINDS.index(kind)}, "");' for kind, name in build.KINDS.items()]
    enums += [f'static_assert(k{method.capitalize()} == {i}, "");' for i, method in enumerate(METHODS)]
    enums += [f'static_assert(kOverflow == {len(native._FAULTS) - 1} && {OBJECTIVES.index("mse")} == 2, "");']
    text = "\n".join([build.source(), layout(jobs.Job), layout(jobs.Partial), *enums])
    assert compile_source(text, ["sum_partials"], "sm_90a").cubin
    with pytest.raises(LoadError, match="static assertion failed"):
        compile_source(build.source() + "\n" + layout(jobs.Job, extra=8), ["sum_partials"], "sm_90a")


def entries(cache: Path) -> list[Path]:
    return sorted(cache.iterdir())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "source", lambda: SMALL)


def forged(entry: Path) -> Built:
    """Write something else into an entry, with its right checksum."""
    built = Built(b"a cubin\nof two lines", {"small<1>": "_Zsmall"}, "a report")
    build._write(entry, built)
    return built


@pytest.mark.usefixtures("small")
def test_what_was_compiled_is_kept(tmp_path: Path) -> None:
    first = build.build(NAMES, "sm_90a", tmp_path / "new" / "cache")
    (entry,) = entries(tmp_path / "new" / "cache")
    assert first.cubin.startswith(b"\x7fELF") and first.symbols["small<1>"].encode() in first.cubin
    assert build.build(NAMES, "sm_90a", entry.parent) == first
    other = forged(entry)
    assert build.build(NAMES, "sm_90a", entry.parent) == other  # it is read, not compiled again
    assert build.build(NAMES, "sm_80", entry.parent) not in (first, other)
    assert build.build(("small<2>",), "sm_90a", entry.parent) not in (first, other)
    assert len(entries(entry.parent)) == 3


@pytest.mark.usefixtures("small")
def test_another_source_and_another_compiler_are_another_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.build(NAMES, "sm_90a", tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(build, "source", lambda: SMALL.replace("= n", "= n + 1"))
        build.build(NAMES, "sm_90a", tmp_path)
    monkeypatch.setattr(build, "nvrtc_version", lambda: (13, 99))
    build.build(NAMES, "sm_90a", tmp_path)
    assert len(entries(tmp_path)) == 3


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("damage", ["empty", "short", "flipped", "folder"])
def test_a_damaged_entry_is_made_anew(tmp_path: Path, damage: str) -> None:
    built = build.build(NAMES, "sm_90a", tmp_path)
    (entry,) = entries(tmp_path)
    whole = entry.read_bytes()
    entry.unlink()
    if damage == "folder":
        entry.mkdir()
    else:
        entry.write_bytes({"empty": b"", "short": whole[:-1], "flipped": whole[:-9] + b"?" + whole[-8:]}[damage])
    again = build.build(NAMES, "sm_90a", tmp_path)
    assert again.symbols == built.symbols and again.cubin.startswith(b"\x7fELF")
    assert len(entries(tmp_path)) == 1  # and no unfinished file beside it
    if damage != "folder":
        assert build._read(entry) == again


@contextmanager
def full_disk() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("small")
def test_no_cache_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("where a folder should be")
    assert build.build(NAMES, "sm_90a", tmp_path / "file" / "cache").cubin
    with full_disk():
        assert build.build(NAMES, "sm_90a", tmp_path / "full").cubin
    assert entries(tmp_path / "full") == []
    monkeypatch.setattr(build, "cache_folder", lambda: None)
    assert build.build(NAMES, "sm_90a").cubin


def test_the_cache_lies_in_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert build.cache_folder() == tmp_path / "xdg/phasefold/kernels"
    for useless in ("", "relative/cache"):  # as XDG has it
        monkeypatch.setenv("XDG_CACHE_HOME", useless)
        assert build.cache_folder() == tmp_path / "home/.cache/phasefold/kernels"


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        *(((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 9), "sm_89"), ((9, 0), "sm_90a")),
        *(((10, 0), "sm_100a"), ((10, 3), "sm_103a"), ((12, 0), "sm_120"), ((12, 1), "sm_121")),
    ],
)
def test_architecture_of_a_card(capability: tuple[int, int], arch: str) -> None:
    assert build.architecture("NVIDIA Card", *capability) == arch
    assert compile_source(SMALL, NAMES, arch).cubin


def test_cards_that_nothing_can_be_compiled_for() -> None:
    with pytest.raises(LoadError, match=r"^NVIDIA T4 is sm_75, sm_80 or newer is needed$"):
        build.architecture("NVIDIA T4", 7, 5)
    with pytest.raises(LoadError, match=r"^NVIDIA Z is sm_990, which NVRTC 1[234]\.\d+ does not know: pip install"):
        build.architecture("NVIDIA Z", 99, 0)
    with pytest.raises(LoadError, match=r"^NVRTC \S+ cannot compile the kernels for sm_990 \(.*--gpu-architecture"):
        compile_source(SMALL, NAMES, "sm_990")


@pytest.mark.parametrize(
    ("text", "names", "found"),
    [
        (
            build.source().replace("struct Partial;", "struct Partial; nothing;"),
            ["sum_partials"],
            r"job\.h\(\d+\): error",
        ),
        (
            build.source() + "\n__global__ void broken() { nothing; }",
            ["broken"],
            r'cuda\.cu\(\d+\): error: .*"nothing"',
        ),
        (SMALL, ["large<1>"], r'error: identifier "large" is undefined'),
    ],
    ids=["header", "kernel", "name"],
)
def test_a_failed_compile_is_a_sentence(text: str, names: list[str], found: str) -> None:
    with pytest.raises(LoadError) as raised:
        compile_source(text, names, "sm_90a")
    assert re.fullmatch(
        rf"NVRTC \S+ cannot compile the kernels for sm_90a \(.*{found}.*\); --device cpu works without them",
        str(raised.value),
    )


def test_lines_are_those_of_the_files() -> None:
    folder = Path(build.__file__).parent
    name, line = "", 0
    for text in build.source().splitlines():
        if mark := re.fullmatch(r'#line (\d+) "(.*)"', text):
            name, line = mark[2], int(mark[1])
            lines = (folder / name).read_text().splitlines()
        else:
            assert lines[line - 1] == text, f"{name}:{line}"
            line += 1
    assert name == "cuda.cu" and line == len(lines) + 1
    assert "#include" not in re.sub("//.*", "", build.source())


def test_the_cpu_needs_nothing_of_cuda() -> None:
    """Not even where it is installed: what a conversion imports, and `auto` without a driver, leave it alone."""
    script = (
        "import sys; import phasefold.quantize.convert, phasefold.quantize.device as device;"
        "from phasefold.quantize.kernels import build, jobs; device.choose('cpu');"
        "print([name for name in sys.modules if name.split('.')[0] == 'cuda'])"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"
