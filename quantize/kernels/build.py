"""Compiling the CUDA kernels (cuda.cu) at first use, for the card that is there, with a cache on disk.

The compiler is NVRTC, by NVIDIA's own Python (extra `cuda`): no toolkit, and neither a driver nor a
card is needed to compile. What a conversion on the CPU imports never imports it. A cache that cannot be read or written
costs the time to compile, some tenths of a second a kernel, and nothing else.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ...errors import LoadError

INSTALL = "install phasefold with its extra cuda"
INSTALL_12 = "install phasefold with its extra cuda12, in an environment of its own"

_FOLDER = Path(__file__).parent
#: see codec.h: no multiplication and addition may become one, subnormals stay, divisions and roots round correctly
_OPTIONS = {
    "std": "c++17",
    "fma": False,
    "ftz": False,
    "prec_div": True,
    "prec_sqrt": True,
    "ptxas_options": ["-v"],
}
_OLDEST = (8, 0)


class Kernel(NamedTuple):
    """A kernel of cuda.cu. name: the C++ expression. tile: rows and columns of a thread block; 0 stands for all."""

    name: str
    threads: int
    tile: tuple[int, int]

    def tiles(self, rows: int, cols: int) -> int:
        """Thread blocks for a [rows, cols] job: the grid's x."""
        return -(-rows // (self.tile[0] or rows)) * -(-cols // (self.tile[1] or cols))


#: enumerators of kinds.h, by a Matrix's kind
KINDS = {"f32": "kF32", "bf16": "kBF16", "f16": "kF16", "e4m3": "kE4M3", "int4": "kInt4", "e2m1": "kE2M1"}
GROUPS = (32, 64, 128)
_METHODS = {"rtn": "kRtn", "inverse": "kInverse"}

# Tiles and threads are those of cuda.cu and block.h.
SUM_PARTIALS = Kernel("sum_partials", 256, (0, 0))
TO_BF16 = {kind: Kernel(f"to_bf16<{k}>", 256, (32, 256)) for kind, k in KINDS.items()}
TO_E4M3_BLOCKS = {kind: Kernel(f"to_e4m3_blocks<{k}>", 512, (128, 128)) for kind, k in KINDS.items()}
TO_E4M3_CHANNELS = {kind: Kernel(f"to_e4m3_channels<{k}>", 256, (1, 0)) for kind, k in KINDS.items()}
TO_INT4 = {
    (kind, group, method): Kernel(f"to_int4<{k}, {group}, {m}>", 256, (32, 256))
    for kind, k in KINDS.items()
    for group in GROUPS
    for method, m in _METHODS.items()
} | {
    (kind, group, "search"): Kernel(f"search_int4<{k}, {group}>", 64, (group // 4, 256))
    for kind, k in KINDS.items()
    for group in GROUPS
}
KERNELS = {
    kernel.name: kernel
    for kernel in (
        *(k for table in (TO_BF16, TO_E4M3_BLOCKS, TO_E4M3_CHANNELS) for k in table.values()),
        *TO_INT4.values(),
        SUM_PARTIALS,
    )
}


class Resources(NamedTuple):
    """What a kernel takes: a thread's registers and bytes of local memory (spills or else), a block's shared bytes."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


class Built(NamedTuple):
    """A compiled module. symbols: kernel's name -> name in the cubin. report: what the assembler says of each."""

    cubin: bytes
    symbols: dict[str, str]
    report: str

    def resources(self) -> dict[str, Resources]:
        """Kernel's name -> what it takes; KeyError where the report tells nothing of one."""
        found = resources(self.report)
        return {name: found[symbol] for name, symbol in self.symbols.items()}


def resources(report: str) -> dict[str, Resources]:
    """Symbol -> what that kernel takes, by ptxas' report, functions that it calls included."""
    sections = re.split(r"Compiling entry function '(\S+)' for ", report)
    found = {}
    for symbol, text in zip(sections[1::2], sections[2::2], strict=True):
        frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
        used = re.search(r"Used (\d+) registers", text)
        if not frames or not used:
            continue  # a report of another kind: its reader misses the symbol
        stack, stores, loads = (sum(int(frame[i]) for frame in frames) for i in range(3))
        shared = re.search(r"(\d+) bytes smem", text)
        found[symbol] = Resources(int(used[1]), stack, stores, loads, int(shared[1]) if shared else 0)
    return found


def source(name: str = "cuda.cu") -> str:
    """cuda.cu with what it includes in place, so that the compiler reads no file; errors still tell file and line."""
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate((_FOLDER / name).read_text(encoding="utf-8").splitlines(), 1):
        included = re.fullmatch(r'#include "(\w+\.h)"', line.rstrip())
        lines += [source(included[1]), f'#line {number + 1} "{name}"'] if included else [line]
    return "\n".join(lines)


def nvrtc_version() -> tuple[int, int]:
    """Of the NVRTC that is installed: (13, 5), say. LoadError where there is none."""
    try:
        import cuda.core  # noqa: F401  (without it there is no use for NVRTC)
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except ImportError:
        raise LoadError(f"cuda-core is not installed: {INSTALL}") from None
    except RuntimeError:  # no library where cuda-bindings looks for it
        raise LoadError(f"NVRTC is not installed: {INSTALL}") from None
    return major, minor


def architecture(card: str, major: int, minor: int) -> str:
    """What to compile for: sm_90a for 9.0, say. LoadError for a card that is too old, or too new for this NVRTC."""
    if (major, minor) < _OLDEST:
        raise LoadError(f"{card} is sm_{major}{minor}, sm_{_OLDEST[0]}{_OLDEST[1]} or newer is needed")
    version = nvrtc_version()
    from cuda.bindings import nvrtc

    known = nvrtc.nvrtcGetSupportedArchs()[1]
    if 10 * major + minor not in known:
        raise LoadError(
            f"{card} is sm_{major}{minor}, which NVRTC {version[0]}.{version[1]} does not know: "
            "pip install --upgrade nvidia-cuda-nvrtc"
        )
    return f"sm_{major}{minor}{'a' if major in (9, 10) else ''}"  # these have a form for one card alone: all of it


def cache_folder() -> Path | None:
    """Where compiled kernels are kept: phasefold/kernels in the user's cache. None where the user has none."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = given if given.is_absolute() else Path(os.path.expanduser("~/.cache"))
    return folder / "phasefold" / "kernels" if folder.is_absolute() else None


def build(names: Sequence[str], arch: str, cache: Path | None = None) -> Built:
    """The kernels of these names (of KERNELS) for one architecture (sm_90a, say): from the cache, or compiled.

    cache: another folder than cache_folder(). Raises LoadError where nothing can compile here or the compiler fails.
    """
    text, version = source(), nvrtc_version()
    key = hashlib.sha256(json.dumps([text, _OPTIONS, arch, list(names), version]).encode()).hexdigest()
    folder = cache or cache_folder()
    if folder is None:
        return compile_source(text, names, arch)
    file = folder / f"{arch}-{key[:40]}.kernels"
    built = _read(file)
    if built is None:
        built = compile_source(text, names, arch)
        _write(file, built)
    return built


def compile_source(text: str, names: Sequence[str], arch: str) -> Built:
    """Compile `text` and instantiate the kernels of these names. LoadError with the first error of the compiler."""
    version = nvrtc_version()
    from cuda.core import Program, ProgramOptions
    from cuda.core._utils.cuda_utils import NVRTCError  # cuda-core raises it, but has no public name for it

    report = io.StringIO()
    try:
        program = Program(text, "c++", ProgramOptions(name="cuda.cu", arch=arch, **_OPTIONS))
        code = program.compile("cubin", name_expressions=list(names), logs=report)
    except NVRTCError as error:
        first = re.search(r"^.*\berror\b.*$", str(error).partition("log:")[2], re.MULTILINE)
        raise LoadError(
            f"NVRTC {version[0]}.{version[1]} cannot compile the kernels for {arch} "
            f"({first[0].strip() if first else str(error).splitlines()[0]}); --device cpu works without them"
        ) from None
    symbols = {name: code.symbol_mapping[name].decode() for name in names}
    return Built(bytes(code.code), symbols, report.getvalue().rstrip("\0\n"))


# An entry of the cache: the SHA-256 of the rest, a line of JSON (symbols and report), the cubin.
def _read(file: Path) -> Built | None:
    """None where there is no such entry, or a damaged one."""
    try:
        digest, _, rest = file.read_bytes().partition(b"\n")
    except OSError:
        return None
    if hashlib.sha256(rest).hexdigest().encode() != digest:
        return None
    head, _, cubin = rest.partition(b"\n")
    symbols, report = json.loads(head)
    return Built(cubin, symbols, report)


def _write(file: Path, built: Built) -> None:
    """Whole or not at all; without a word where the place is read-only or full."""
    rest = json.dumps([built.symbols, built.report]).encode() + b"\n" + built.cubin
    part = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as opened:
            part = opened.name
            opened.write(hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
        os.replace(part, file)
    except OSError:
        if part is not None:
            with suppress(OSError):
                os.unlink(part)
