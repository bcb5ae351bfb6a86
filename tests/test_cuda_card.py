"""What a card's failures are told as, which conversions have a kernel, and what a launch of it is told.

Failures are those that hostcard's driver plays. What lanes and kernels do when all is well is in tests_cuda.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import hostcard
import pytest

from phasefold.quantize.kernels import Matrix, Target, build, jobs

# five conversions of one row, each of two launches, in a lane of 8 MB
PROGRAM = """
import struct
from phasefold.errors import LoadError
from phasefold.quantize.kernels import Matrix, Target, card, jobs

try:
    with card.Lane(card.open_card(0), 4 << 20, 4 << 20) as lane:
        for _ in range(5):
            codes = lane.source.take(64)
            codes[:] = struct.pack("<f", 1.0)[2:] * 32
            out = lane.result.take(64)
            lane.convert([jobs.Work(Matrix("bf16", codes, None, None, 1, 32), Target("bf16"), out, None)])
            assert out == codes
    print("done")
except LoadError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def card(host_folder: Path, host_kernels: list[Path]) -> tuple[Path, list[Path]]:
    return host_folder, host_kernels


def told(card: tuple[Path, list[Path]], **settings: Any) -> str:
    """What PROGRAM prints with such a card."""
    env = hostcard.environment(*card, name="NVIDIA H200", **settings)
    env["XDG_CACHE_HOME"] = str(card[0] / "cache")
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


LESS, NO_CARD = "give a smaller --device-memory, or --device cpu", "--device cpu works without a card"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "done"),
        ({"fail_at": 11}, "done"),
        ({"memory": 1 << 20}, f"cuda:0 (NVIDIA H200): 8.4 MB of its memory are not free; {LESS}"),
        ({"pinned": 1 << 20}, f"cuda:0 (NVIDIA H200): 8.4 MB of pinned host memory are not free; {LESS}"),
        ({"fail_at": 1}, f"cuda:0 (NVIDIA H200): converting failed (CUDA_ERROR_LAUNCH_FAILED); {NO_CARD}"),
        (
            {"fail_at": 9, "fail_with": 700},
            f"cuda:0 (NVIDIA H200): converting failed (CUDA_ERROR_ILLEGAL_ADDRESS); {NO_CARD}",
        ),
        (
            {"fail_at": 10, "fail_with": 2},
            f"cuda:0 (NVIDIA H200): converting failed (CUDA_ERROR_OUT_OF_MEMORY); {NO_CARD}",
        ),
        ({"init": 100}, f"cuda:0: starting the card failed (CUDA_ERROR_NO_DEVICE); {NO_CARD}"),
        ({"capability": "7.5"}, "NVIDIA H200 is sm_75, sm_80 or newer is needed"),
    ],
    ids=["none", "too late", "memory", "pinned", "first launch", "later launch", "last launch", "gone", "old"],
)
def test_a_failure_is_a_sentence(card: tuple[Path, list[Path]], settings: dict[str, Any], expected: str) -> None:
    assert told(card, **settings) == f"{expected}\n"


PLAIN, SCALED = Matrix("bf16", b"", None, None, 64, 256), Matrix("e4m3", b"", b"", "F32", 64, 256, (128, 128))
INT4 = Target("int4", (1, 32))


@pytest.mark.parametrize(
    ("matrix", "target", "name"),
    [
        (PLAIN, Target("bf16"), "to_bf16<kBF16>"),
        (SCALED, Target("e4m3", (128, 128)), "to_e4m3_blocks<kE4M3>"),
        (PLAIN, Target("e4m3", (1, 0)), "to_e4m3_channels<kBF16>"),
        (PLAIN, Target("e4m3", (1, 256)), "to_e4m3_channels<kBF16>"),
        (PLAIN, Target("e4m3", (1, 300)), "to_e4m3_channels<kBF16>"),
        (PLAIN, Target("e4m3", (1, 128)), None),
        (PLAIN, Target("e4m3", (0, 0)), None),
        (PLAIN._replace(kind="f32"), Target("int4", (1, 64), "inverse"), "to_int4<kF32, 64, kInverse>"),
        (SCALED, Target("int4", (1, 128), "search"), "search_int4<kE4M3, 128>"),
        (PLAIN, Target("int4", (1, 16)), None),
        (PLAIN._replace(cols=80), INT4, None),
        (PLAIN._replace(cols=260), Target("bf16"), None),
        (SCALED._replace(block=(1, 0)), INT4, "to_int4<kE4M3, 32, kRtn>"),
        (SCALED._replace(block=(0, 0)), INT4, "to_int4<kE4M3, 32, kRtn>"),
        (SCALED._replace(block=(2, 8)), INT4, "to_int4<kE4M3, 32, kRtn>"),
        (SCALED._replace(block=(100, 300)), INT4, "to_int4<kE4M3, 32, kRtn>"),
        (SCALED._replace(block=(3, 128)), INT4, None),
        (SCALED._replace(block=(1, 4)), INT4, None),
        (SCALED._replace(block=(1, 48)), INT4, None),
        (PLAIN._replace(rows=1 << 23, cols=256), Target("bf16"), None),
        (PLAIN._replace(rows=(1 << 23) - 1, cols=256), Target("bf16"), "to_bf16<kBF16>"),
    ],
)
def test_which_kernel(matrix: Matrix, target: Target, name: str | None) -> None:
    kernel = jobs.kernel_of(matrix, target)
    assert (kernel and kernel.name) == name
    assert jobs.supports(matrix, target) == (name is not None)


@pytest.mark.parametrize(
    ("name", "rows", "cols", "tiles"),
    [
        ("to_bf16<kBF16>", 33, 257, 4),
        ("to_e4m3_blocks<kBF16>", 128, 128, 1),
        ("to_e4m3_blocks<kBF16>", 129, 129, 4),
        ("to_e4m3_channels<kBF16>", 129, 5000, 129),
        ("search_int4<kBF16, 32>", 9, 256, 2),
        ("search_int4<kBF16, 128>", 33, 512, 4),
        ("sum_partials", 1000, 1000, 1),
    ],
)
def test_tiles(name: str, rows: int, cols: int, tiles: int) -> None:
    assert build.KERNELS[name].tiles(rows, cols) == tiles


def test_places_of_faults() -> None:
    def found(fault: str, index: int, matrix: Matrix) -> tuple[str | None, int, int]:
        number = jobs._FAULTS.index(fault)
        return jobs.report(matrix, jobs.Partial(fault=1 << 61 | index << 3 | number, error2=3.0, tiny_scales=4))[:3]

    assert found("weight is not finite", 300, PLAIN) == ("weight is not finite", 1, 44)
    assert found("scale is negative", 5, SCALED) == ("scale is negative", 2, 1)
    assert found("scale is negative", 5, SCALED._replace(block=(1, 0))) == ("scale is negative", 5, 0)
    assert found("weight overflows BF16", (1 << 31) - 2, PLAIN._replace(cols=8))[1:] == ((1 << 28) - 1, 6)
