"""A card as the converter sees it: lanes, launches and what they leave equal the CPU's; failures are sentences.

The kernels run on the CPU, under hostcard's driver, called by cuda-core as a GPU's would be.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import hostcard
import pytest
from card_program import CONVERSIONS

from phasefold.quantize.kernels import Matrix, Target, build, jobs

PROGRAM = Path(__file__).with_name("card_program.py")
SOURCE = Path(build.__file__).with_name("cuda.cu")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    names = [kernel_of(kind, target) for kind, target in CONVERSIONS] + [build.SUM_PARTIALS.name]
    folder = hostcard.shared_folder(tmp_path_factory)
    return folder, hostcard.kernels(folder, SOURCE, names)


def kernel_of(kind: str, target: Target) -> str:
    scaled = kind not in ("bf16", "f16", "f32")
    kernel = jobs.kernel_of(Matrix(kind, b"", b"" if scaled else None, "F32" if scaled else None, 8, 256), target)
    assert kernel is not None
    return kernel.name


def run(libraries: tuple[Path, list[Path]], *arguments: str, **card: Any) -> str:
    env = hostcard.environment(*libraries, **card)
    env["XDG_CACHE_HOME"] = str(libraries[0] / "cache")
    done = subprocess.run([sys.executable, PROGRAM, *arguments], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("order", ["forward", "backward", 7])
def test_many_matrices_in_one_go(libraries: tuple[Path, list[Path]], order: int | str) -> None:
    assert int(run(libraries, "equal", "5", order=order)) > 2  # faults, which are the CPU's too


def test_weights_that_float32_cannot_square(libraries: tuple[Path, list[Path]]) -> None:
    run(libraries, "rare")


def test_two_lanes_on_each_of_two_cards(libraries: tuple[Path, list[Path]]) -> None:
    run(libraries, "threads", devices=2)


def test_more_jobs_than_a_launch_has(libraries: tuple[Path, list[Path]]) -> None:
    run(libraries, "split")


def test_what_is_no_work_for_a_lane(libraries: tuple[Path, list[Path]]) -> None:
    run(libraries, "refused")


LESS, NO_CARD = "give a smaller --device-memory, or --device cpu", "--device cpu works without a card"


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ({"memory": 1 << 20}, f"8 MB of its memory are not free; {LESS}"),
        ({"pinned": 1 << 20}, f"8 MB of pinned host memory are not free; {LESS}"),
        ({"fail_at": 1}, f"converting failed (CUDA_ERROR_LAUNCH_FAILED); {NO_CARD}"),
        ({"fail_at": 9, "fail_with": 700}, f"converting failed (CUDA_ERROR_ILLEGAL_ADDRESS); {NO_CARD}"),
        ({"fail_at": 3, "fail_with": 2}, f"converting failed (CUDA_ERROR_OUT_OF_MEMORY); {NO_CARD}"),
    ],
    ids=["memory", "pinned", "first launch", "later launch", "launch memory"],
)
def test_a_failure_is_a_sentence(libraries: tuple[Path, list[Path]], card: dict[str, int], expected: str) -> None:
    assert run(libraries, "sentence", name="NVIDIA H200", **card) == f"cuda:0 (NVIDIA H200): {expected}\n"


def test_a_card_that_is_gone(libraries: tuple[Path, list[Path]]) -> None:
    told = run(libraries, "sentence", init=100)
    assert told == f"cuda:0: starting the card failed (CUDA_ERROR_NO_DEVICE); {NO_CARD}\n"


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
