"""A card without a GPU: CUDA kernels and the program around them run on the CPU (tests/cuda_host).

`kernels` compiles a CUDA source with the host's compiler; `driver` makes the libcuda.so.1 that runs them. A process
that is started with `environment` finds this driver and no other:

    folder = hostcard.shared_folder(tmp_path_factory)
    libraries = hostcard.kernels(folder, source, names)
    subprocess.run([sys.executable, "-c", script], env=hostcard.environment(folder, libraries, order="backward"))

Both need g++, and phasefold's own compiled kernels need it too.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

SOURCES = Path(__file__).with_name("cuda_host")
COMPILER = shutil.which("g++")
SIGNATURE = "const Job*, u64, Partial*"  # of every kernel
ORDERS = {"forward": 0, "backward": 1}  # in which blocks and threads run; else the seed of a shuffle, 2 or more

# One copy of shared variables for each library, no FMA that is not spelled out. What runs here was compiled here.
FLAGS = ("-fPIC", "-shared", "-fno-gnu-unique", "-ffp-contract=off")
# the process ends at undefined behaviour: shifts, overflows, addresses at no multiple of their type's alignment
SANITIZED = ("-fsanitize=undefined", "-fno-sanitize-recover=all")


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all processes of a test session, in which what is built once lies for all of them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "hostcard"
    folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(out: Path, arguments: Sequence[str | Path]) -> None:
    if COMPILER is None:
        raise RuntimeError("the tests of the CUDA code compile it for the CPU with g++, which is not found")
    unfinished = out.with_suffix(".unfinished")
    command = [COMPILER, *arguments, *FLAGS, f"-I{SOURCES}", "-o", unfinished, "-ldl"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{result.stderr}")
    unfinished.rename(out)


def _mark(parts: Iterable[Path], *more: str) -> str:
    return hashlib.sha256(b"".join([*(part.read_bytes() for part in parts), *map(str.encode, more)])).hexdigest()[:12]


def driver(folder: Path) -> Path:
    """The folder that holds libcuda.so.1; compiles it if it is not there yet."""
    found = folder / f"driver-{_mark(sorted(SOURCES.iterdir()))}"
    with _alone(folder):
        if not (found / "libcuda.so.1").exists():
            found.mkdir(exist_ok=True)
            _compile(found / "libcuda.so.1", ["-std=c++20", "-Wl,-soname,libcuda.so.1", SOURCES / "driver.cpp"])
    return found


def _unit(source: Path, names: Sequence[str], signature: str) -> str:
    lines = ['#include "launcher.h"', f'#include "{source}"']
    lines += [f"template __global__ void {name}({signature});" for name in names if "<" in name]
    lines += ['extern "C" void* host_kernel(const char* name) {']
    lines += [f'  if (!strcmp(name, "{n}")) return (void*)static_cast<void (*)({signature})>({n});' for n in names]
    return "\n".join([*lines, "  return nullptr;", "}", ""])


def kernels(
    folder: Path, source: Path, names: Sequence[str], *, signature: str = SIGNATURE, options: Sequence[str] = ()
) -> list[Path]:
    """Shared libraries of the kernels of a CUDA source, by NVRTC's name expressions, under the same mangled names.

    There is one for each template, so that a block's shared memory is not poisoned for kernels that do not run.
    options: more of the compiler's, as SANITIZED.
    """
    templates: dict[str, list[str]] = {}
    for name in names:
        templates.setdefault(name.split("<")[0], []).append(name)
    flags = ["-std=c++17", "-O2", *options]
    parts = sorted((source, *source.parent.glob("*.h"), *SOURCES.glob("*.h")))

    def build(template: str) -> Path:
        unit = _unit(source, templates[template], signature)
        path = folder / f"{template}-{_mark(parts, unit, *flags)}.cpp"
        library = path.with_suffix(".so")
        if not library.exists():
            path.write_text(unit)
            _compile(library, [*flags, path])
        return library

    with _alone(folder), ThreadPoolExecutor(2) as pool:
        return list(pool.map(build, templates))


class LaunchError(Exception):
    """What a kernel did that a GPU forbids."""


class Library:
    """Kernels of one library of `kernels`, launched without a driver, on memory of this process. For one thread."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.host_kernel.restype = ctypes.c_void_p
        self._library.host_launch.restype = ctypes.c_char_p
        self._library.host_switches.restype = ctypes.c_uint64

    def launch(self, name: str, grid: tuple[int, int], threads: int, *arguments: int, order: str | int) -> None:
        """`name` is a name expression, the arguments are the kernel's three: addresses and a number."""
        kernel = self._library.host_kernel(name.encode())
        if kernel is None:
            raise KeyError(name)
        words, address = (ctypes.c_uint64 * 3)(*arguments), ctypes.c_void_p()
        seed = ctypes.c_uint64(ORDERS.get(str(order), order))
        wrong = self._library.host_launch(ctypes.c_void_p(kernel), *grid, threads, words, seed, ctypes.byref(address))
        if wrong is not None:
            raise LaunchError(f"{name}: {wrong.decode()}")

    @property
    def switches(self) -> int:
        """Changes from one thread to another so far."""
        return self._library.host_switches()


def environment(
    folder: Path,
    libraries: Sequence[Path] = (),
    *,
    devices: int = 1,
    capability: str = "9.0",
    name: str = "host",
    version: int = 13000,
    init: int = 0,
    memory: int | None = None,
    pinned: int | None = None,
    fail_at: int = 0,
    fail_with: int = 719,
    order: str | int = "forward",
    log: Path | None = None,
) -> dict[str, str]:
    """This process's environment, and in it a driver with these cards.

    version: the driver's, 12040 is 12.4. init: what cuInit answers. memory, pinned: bytes of a card, and of what can be
    pinned; more is refused. fail_at: the launch that fails, from 1, with the error `fail_with`. log: a file that gets a
    line for each operation when it is enqueued and one when it is carried out.
    """
    major, minor = capability.split(".")
    settings = {
        "KERNELS": ":".join(map(str, libraries)),
        "DEVICES": devices,
        "CAPABILITY": int(major) * 10 + int(minor),
        "NAME": name,
        "VERSION": version,
        "INIT": init,
        "MEMORY": "" if memory is None else memory,
        "PINNED": "" if pinned is None else pinned,
        "FAIL_AT": fail_at,
        "FAIL_WITH": fail_with,
        "ORDER": ORDERS.get(str(order), order),
        "LOG": "" if log is None else log,
    }
    return {
        **os.environ,
        **{f"HOSTCARD_{key}": str(value) for key, value in settings.items()},
        "LD_LIBRARY_PATH": f"{driver(folder)}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":"),
    }
