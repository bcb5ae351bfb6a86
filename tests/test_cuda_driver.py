"""The card without a GPU sees what it is there for: races, divergence, overruns, forgotten waits, memory that ends."""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import hostcard
import pytest

SIGNATURE = "const float*, u64, float*"
SOURCE = hostcard.SOURCES / "probes.cu"
NAMES = (
    *(f"{name}<{b}>" for name in ("reverse", "sums") for b in ("true", "false")),
    *(f"diverges<{how}>" for how in range(6)),
    "unwritten<0>",
    "turns<0>",
    "copy",
)
FLOATS = ctypes.c_float * 128


@dataclass(frozen=True)
class Built:
    folder: Path
    libraries: dict[str, Path]  # by template


@pytest.fixture(scope="module")
def built(host_folder: Path) -> Built:
    found = Built(host_folder, {})
    libraries = hostcard.kernels(host_folder, SOURCE, NAMES, signature=SIGNATURE)
    found.libraries.update(zip(dict.fromkeys(name.split("<")[0] for name in NAMES), libraries, strict=True))
    return found


def launch(built: Built, name: str, order: str | int) -> list[float]:
    """128 numbers after a launch of one block of 64 threads, or of two."""
    values, found = FLOATS(*range(128)), FLOATS()
    library = hostcard.Library(built.libraries[name.split("<")[0]])
    blocks = 1 if name.startswith(("sums", "diverges")) else 2
    library.launch(name, (blocks, 1), 64, ctypes.addressof(values), 128, ctypes.addressof(found), order=order)
    return list(found)


@pytest.mark.parametrize("name", ["reverse", "sums"])
def test_only_kernels_with_all_barriers_give_the_same_in_any_order(built: Built, name: str) -> None:
    orders = ("forward", "backward", 2, 3, 4)
    whole = [launch(built, f"{name}<true>", order) for order in orders]
    reversed_ = [float(start + 63 - i) for start in (0, 64) for i in range(64)]
    assert whole == [reversed_ if name == "reverse" else [8128.0] * 64 + [0.0] * 64] * len(orders)
    for order in orders:
        assert launch(built, f"{name}<false>", order) != whole[0], f"{name} without a barrier, {order}"


def test_threads_and_blocks_run_in_the_order_that_is_asked_for(built: Built) -> None:
    forward, backward, some, other = (launch(built, "turns<0>", order)[:127] for order in ("forward", "backward", 2, 3))
    assert forward == list(map(float, range(127)))
    assert backward == [127.0 - i for i in range(127)]
    assert len({tuple(order) for order in (forward, backward, some, other)}) == 4
    assert len(set(some)) == len(set(other)) == 127


def test_each_block_finds_its_shared_memory_poisoned(built: Built) -> None:
    assert all(map(math.isnan, launch(built, "unwritten<0>", "forward")))


@pytest.mark.parametrize("order", ["forward", "backward", 5])
@pytest.mark.parametrize(
    "how, text",
    [
        (0, "warps diverge: thread 0 waits at a barrier .*thread 32 has ended"),
        (1, "warps diverge: thread 0 waits at a barrier .*thread 32 waits at a barrier"),
        (2, r"a warp diverges: thread (0|32) has ended, thread (1|33) waits at a shuffle"),
        (3, r"a warp diverges: thread (0|32) waits for some lanes only"),
        (4, r"a warp diverges: thread (0|32) waits at a shuffle .*thread (1|33) waits at a vote"),
        (5, "warps diverge: thread 0 has ended, thread 32 waits at a barrier"),
    ],
)
def test_divergence_is_a_fault(built: Built, how: int, text: str, order: str | int) -> None:
    with pytest.raises(hostcard.LaunchError, match=text):
        launch(built, f"diverges<{how}>", order)


def test_fibers_without_assembler(built: Built) -> None:
    """As on a machine that is no x86-64."""
    names = ["sums<true>", "sums<false>"]
    (library,) = hostcard.kernels(built.folder, SOURCE, names, signature=SIGNATURE, options=["-DHOST_UCONTEXT"])
    portable = Built(built.folder, {"sums": library})
    for order in ("forward", "backward", 2):
        for name in names:
            assert launch(portable, name, order) == launch(built, name, order)


def test_undefined_behaviour_ends_the_process(built: Built) -> None:
    (library,) = hostcard.kernels(built.folder, SOURCE, ["copy"], signature=SIGNATURE, options=hostcard.SANITIZED)
    script = """
import ctypes, pathlib, sys
sys.path.insert(0, sys.argv[2])
import hostcard

library, numbers = hostcard.Library(pathlib.Path(sys.argv[1])), (ctypes.c_float * 128)()
for offset in (64, 66):
    at = ctypes.addressof(numbers)
    library.launch("copy", (1, 1), 32, at, 32, at + offset, order="forward")
    print(offset, flush=True)
"""
    command = [sys.executable, "-c", script, str(library), str(Path(hostcard.__file__).parent)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode and result.stdout == "64\n" and "misaligned address" in result.stderr


def test_a_cubins_names_are_the_host_compilers(built: Built) -> None:
    from cuda.core import Program, ProgramOptions

    program = Program(SOURCE.read_text(), "c++", ProgramOptions(std="c++17", arch="sm_90"))
    symbols = program.compile("cubin", name_expressions=NAMES).symbol_mapping
    for name in NAMES:
        library = ctypes.CDLL(str(built.libraries[name.split("<")[0]]))
        assert hasattr(library, symbols[name].decode()), name


# ---- through cuda-core and the driver, in processes that end with what they checked

PROGRAM = """
import ctypes
import sys
from pathlib import Path

from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, LegacyPinnedMemoryResource, Program, ProgramOptions, launch

device = Device(0)
device.set_current()
stream, other = device.create_stream(), device.create_stream()
pinned = LegacyPinnedMemoryResource()
FLOATS = ctypes.c_float * 1000


def host():
    buffer = pinned.allocate(4000)
    return buffer, FLOATS.from_address(int(buffer.handle))


def kernel(name="copy"):
    options = ProgramOptions(std="c++17", arch="sm_90")
    program = Program(Path(sys.argv[1]).read_text(), "c++", options)
    return program.compile("cubin", name_expressions=("copy",)).get_kernel(name)


def start(kernel, count, on=stream):  # copies so many elements of `source`
    launch(on, LaunchConfig(grid=4, block=256), kernel, source, ctypes.c_uint64(count), target)


def fails(call):
    try:
        call()
    except Exception as error:
        return str(error).split(":")[0]
    return "no error"


source, target = (device.allocate(4000, stream=stream) for _ in range(2))
"""


def run(built: Built, script: str, **settings: object) -> subprocess.CompletedProcess[str]:
    environment = hostcard.environment(built.folder, list(built.libraries.values()), **settings)
    command = [sys.executable, "-c", PROGRAM + script, str(SOURCE)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result


def test_operations_wait_for_a_sync_and_memory_is_poisoned(built: Built, tmp_path: Path) -> None:
    script = """
from math import isnan

(a, values), (b, found) = host(), host()
address_of_b = int(b.handle)
assert isnan(values[0]) and isnan(found[999])
values[:] = range(1000)
source.copy_from(a, stream=stream)
start(kernel(), 900)
target.copy_to(b, stream=stream)
other.record()
assert isnan(found[0])
other.sync()
assert isnan(found[0])
values[7] = 1234.0  # too early: the copy has not begun
event = stream.record()
event.sync()
assert found[:7] == list(map(float, range(7))) and found[7] == 1234.0 and found[899] == 899.0
assert isnan(found[900]) and isnan(found[999])

start(kernel(), 1000)
assert driver.cuMemcpyDtoH(address_of_b, int(target.handle), 4000)[0] == 0  # does not wait for this stream
assert isnan(found[950]) and found[899] == 899.0
stream.sync()

numbers = FLOATS(*range(1000))  # pageable: the driver takes the bytes at once
address = ctypes.addressof(numbers)
assert driver.cuMemcpyHtoDAsync(int(source.handle), address, 4000, stream.handle)[0] == 0
numbers[0] = 99.0
start(kernel(), 1000)
assert driver.cuMemcpyDtoHAsync(address, int(target.handle), 4000, stream.handle)[0] == 0
assert numbers[:] == list(map(float, range(1000)))
"""
    run(built, script, log=tmp_path / "log")
    lines = (tmp_path / "log").read_text().splitlines()
    first = lines.index("sync 0:2")  # the other stream's, when the first one's three lie there and none has begun
    before = [line for line in lines[:first] if line.startswith(("enqueue 0:1", "run"))]
    assert before == [
        "enqueue 0:1 copy pinned device 4000",
        "enqueue 0:1 launch _Z4copyPKfyPf 4 1 256",
        "enqueue 0:1 copy device pinned 4000",
    ]
    assert sum("pageable" in line and line.startswith("run") for line in lines) == 2


def test_an_overrun_is_an_illegal_address_and_stays(built: Built) -> None:
    script = """
start(kernel(), 1001)
print(fails(stream.sync), fails(other.sync), fails(lambda: device.allocate(16, stream=stream)))
"""
    result = run(built, script)
    assert result.stdout.split() == ["CUDA_ERROR_ILLEGAL_ADDRESS"] * 3
    assert "copy" in result.stderr and "block (3, 0), thread 232: no memory at" in result.stderr
    assert "0 bytes behind an allocation of 4000 bytes" in result.stderr
    freed = """
address = int(target.handle)
target.close(stream)
launch(stream, LaunchConfig(grid=4, block=256), kernel(), source, ctypes.c_uint64(1000), ctypes.c_uint64(address))
print(fails(stream.sync))
"""
    again = run(built, freed)
    assert again.stdout.split() == ["CUDA_ERROR_ILLEGAL_ADDRESS"] and "that is freed" in again.stderr


def test_another_cards_memory_is_out_of_reach(built: Built) -> None:
    script = """
far = Device(1)
far.set_current()
target = far.allocate(4000, stream=far.create_stream())
device.set_current()
start(kernel(), 1000)
print(fails(stream.sync), len(Device.get_all_devices()))
"""
    result = run(built, script, devices=2)
    assert result.stdout.split() == ["CUDA_ERROR_ILLEGAL_ADDRESS", "2"] and "of another card" in result.stderr


def test_a_launch_fails_when_told(built: Built) -> None:
    script = """
a, (b, found) = kernel(), host()
source.fill(0, stream=stream)
start(a, 10)
stream.sync()
start(a, 10)
target.copy_to(b, stream=stream)
print(fails(stream.sync), found[0], fails(lambda: start(a, 10)), fails(stream.sync))
"""
    failed = "CUDA_ERROR_LAUNCH_FAILED"
    assert run(built, script, fail_at=2).stdout.split() == [failed, "nan", failed, failed]
    assert run(built, script, fail_at=3).stdout.split() == ["no", "error", "0.0", "no", "error", failed]


def test_memory_ends(built: Built) -> None:
    script = """
print(fails(lambda: device.allocate(2001, stream=stream)), fails(lambda: pinned.allocate(5001)))
target.close(stream)
room = device.allocate(6000, stream=stream)
a, values = host()
print(fails(host))
"""
    result = run(built, script, memory=10000, pinned=5000)
    assert result.stdout.split() == ["CUDA_ERROR_OUT_OF_MEMORY"] * 3


def test_what_a_card_refuses(built: Built) -> None:
    grid = "launch(stream, LaunchConfig(grid=(1, 65536), block=32), kernel(), source, ctypes.c_uint64(1), target)"
    script = f"""
print(fails(lambda: {grid}))
print(driver.cuGraphCreate(0)[0].name)
print(fails(lambda: kernel("_Z5turnsILi0EEvPKfyPf")))  # the cubin has it not
"""
    result = run(built, script)
    assert result.stdout.split() == [f"CUDA_ERROR_{e}" for e in ("INVALID_VALUE", "NOT_SUPPORTED", "NOT_FOUND")]
    assert "cuGraphCreate is called, which the host card does not have" in result.stderr
    older = run(built, "print(device.compute_capability, device.name, fails(kernel))", capability="8.0", name="old")
    assert older.stdout.split()[-2:] == ["old", "CUDA_ERROR_NO_BINARY_FOR_GPU"]


@pytest.mark.parametrize("settings, text", [({"devices": 0}, "NO_DEVICE"), ({"init": 803}, "SYSTEM_DRIVER_MISMATCH")])
def test_no_card(built: Built, settings: dict[str, int], text: str) -> None:
    environment = hostcard.environment(built.folder, **settings)
    command = [sys.executable, "-c", "from cuda.core import Device; Device(0).set_current()"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode and text in result.stderr
