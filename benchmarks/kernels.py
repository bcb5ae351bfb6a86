"""Speed of the kernels, one thread, in GB of source per CPU-second, beside a memcpy of the same BF16 rows.

Row blocks of 128 x 7168 (or --cols) as a conversion hands them out: sources rotate through --blocks of them, results
go to one buffer. Of several rounds the best counts. --twin also times the torch twin.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from collections.abc import Callable

from phasefold.quantize import kernels
from phasefold.quantize.kernels import Matrix, Report, Target, native

Convert = Callable[[Matrix, Target, bytearray, bytearray], Report]

FP8 = Target("e4m3", (128, 128))
INT4 = {group: Target("int4", (1, group)) for group in (32, 128)}
SEARCH = {group: Target("int4", (1, group), "search") for group in (32, 128)}
MSE = Target("int4", (1, 128), "search", "mse")
BF16 = Target("bf16")
INVERSE = Target("int4", (1, 32), "inverse")


def best_rate(work: Callable[[Matrix], object], matrices: list[Matrix], rounds: int) -> float:
    """GB of source per CPU-second."""
    nbytes = sum(kernels.code_bytes(m) + kernels.scale_bytes(m) for m in matrices)
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        for matrix in matrices:
            work(matrix)
        times.append(time.thread_time() - start)
    return nbytes / min(times) / 1e9


def gaussian_bf16(rows: int, cols: int, seed: int) -> Matrix:
    """BF16 rows with a standard deviation of 0.02; 4096 distinct draws are enough for a clock."""
    draw = random.Random(seed)
    pool = [draw.gauss(0, 0.02) for _ in range(4096)]
    values = array("f", (pool[draw.getrandbits(12)] for _ in range(rows * cols)))
    codes = bytearray(2 * rows * cols)
    raw = values.tobytes()
    codes[0::2], codes[1::2] = raw[2::4], raw[3::4]  # the upper half of a float32
    return Matrix("bf16", codes, None, None, rows, cols)


def converted(matrix: Matrix, target: Target, convert: Convert) -> Matrix:
    """The result of a conversion, as a source."""
    codes, scales = (bytearray(n) for n in kernels.check_convertible(matrix, target))
    report = convert(matrix, target, codes, scales)
    assert report.fault is None, report
    dtype = {"e4m3": "F32", "int4": "BF16", "bf16": None}[target.kind]
    return Matrix(target.kind, codes, scales or None, dtype, matrix.rows, matrix.cols, target.block)


def into_one_buffer(convert: Convert, like: Matrix, target: Target) -> Callable[[Matrix], Report]:
    """A conversion that writes each result over the last."""
    codes, scales = (bytearray(n) for n in kernels.check_convertible(like, target))
    return lambda matrix: convert(matrix, target, codes, scales)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--cols", type=int, default=7168)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--level", choices=native.LEVELS, help="instruction set; default: the best that runs here")
    parser.add_argument("--twin", action="store_true", help="time the torch twin too")
    arguments = parser.parse_args()

    level = native.LEVELS.index(arguments.level) if arguments.level else None

    def convert(matrix: Matrix, target: Target, codes: bytearray, scales: bytearray) -> Report:
        return native.convert(matrix, target, codes, scales, level=level)

    bf16 = [gaussian_bf16(arguments.rows, arguments.cols, seed) for seed in range(arguments.blocks)]
    fp8 = [converted(matrix, FP8, convert) for matrix in bf16]
    int4 = [converted(matrix, INT4[32], convert) for matrix in bf16]
    copies = [converted(matrix, BF16, convert) for matrix in int4]

    # Between any two kernels the machine may change its pace: the memcpy beside which a kernel stands is its own.
    print(f"{arguments.level or kernels.backend()}, {arguments.rows} x {arguments.cols}")
    print(f"{'kernel':36}{'GB/s':>8}{'memcpy':>8}{'share':>7}")
    room = bytearray(2 * arguments.rows * arguments.cols)

    def copy(matrix: Matrix) -> None:
        room[:] = matrix.codes

    def show(name: str, matrices: list[Matrix], work: Callable[[Matrix], object], rounds: int) -> None:
        memcpy = best_rate(copy, bf16, arguments.rounds)
        rate = best_rate(work, matrices, rounds)
        print(f"{name:36}{rate:8.2f}{memcpy:8.1f}{rate / memcpy:7.2f}")

    conversions = [
        ("BF16 -> FP8 128x128", bf16, FP8),
        ("BF16 -> FP8 128x128, float scales", bf16, FP8._replace(power_of_two=False)),
        ("BF16 -> FP8 channel", bf16, FP8._replace(block=(1, 0))),
        ("BF16 -> INT4 g128", bf16, INT4[128]),
        ("BF16 -> INT4 g32", bf16, INT4[32]),
        ("BF16 -> INT4 g128 search", bf16, SEARCH[128]),
        ("BF16 -> INT4 g32 search", bf16, SEARCH[32]),
        ("BF16 -> INT4 g128 search, mse", bf16, MSE),
        ("BF16 -> INT4 g32 exact inverse", copies, INVERSE),
        ("FP8 block -> INT4 g128", fp8, INT4[128]),
        ("FP8 block -> INT4 g128 search", fp8, SEARCH[128]),
        ("FP8 block -> BF16", fp8, BF16),
        ("INT4 g32 -> FP8 128x128", int4, FP8),
        ("INT4 g32 -> BF16", int4, BF16),
    ]
    for name, matrices, target in conversions:
        show(name, matrices, into_one_buffer(convert, matrices[0], target), arguments.rounds)
    for name, matrices in (("BF16", bf16), ("FP8", fp8), ("INT4 g32", int4)):
        show(f"check {name}", matrices, lambda m: native.check(m, level=level), arguments.rounds)
    show("compare BF16 with FP8", bf16, lambda m: native.compare(m, fp8[0], level=level), arguments.rounds)
    show("compare BF16 with INT4 g32", bf16, lambda m: native.compare(m, int4[0], level=level), arguments.rounds)

    if arguments.twin:
        import torch

        from phasefold.quantize.kernels import twin

        torch.set_num_threads(1)
        for name, matrices, target in conversions:
            show(f"twin: {name}", matrices[:1], into_one_buffer(twin.convert, matrices[0], target), 2)


if __name__ == "__main__":
    main()
