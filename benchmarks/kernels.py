"""Speed of the kernels: of the CPU's, one thread, and of a card's where one can be used.

    python benchmarks/kernels.py [--device auto|cpu|cuda:N] [--gigabytes 4] [--twin]

CPU: GB of source per CPU-second, beside a memcpy of the same BF16 rows. Row blocks of 128 x 7168 (or --cols) as a
conversion hands them out: sources rotate through --blocks of them, results go to one buffer. Of several rounds the best
counts. --twin also times the torch twin.

Card: GB read and written per second by the kernel alone, beside a copy of as many bytes within the card's memory, and
how many cores' work that is. A matrix is all --blocks together, 2048 x 7168 as an expert of Kimi-K2; a launch converts
as many of them as --gigabytes hold. Then lanes, as a conversion has them: GB of source per second of wall time, the
copies to the card and back included, beside these copies alone. What was timed is compared with the CPU's bytes.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from collections.abc import Callable
from functools import partial

from phasefold.errors import PhasefoldError
from phasefold.quantize import kernels
from phasefold.quantize.device import choose
from phasefold.quantize.kernels import Matrix, Report, Target, native
from phasefold.quantize.kernels.build import nvrtc_version

Convert = Callable[[Matrix, Target, bytearray, bytearray], Report]

FP8 = Target("e4m3", (128, 128))
INT4 = {group: Target("int4", (1, group)) for group in (32, 128)}
SEARCH = {group: Target("int4", (1, group), "search") for group in (32, 128)}
MSE = Target("int4", (1, 128), "search", "mse")
BF16 = Target("bf16")
INVERSE = Target("int4", (1, 32), "inverse")
LANES = (1, 2, 4)
WITH_COPIES = ("BF16 -> INT4 g32", "BF16 -> FP8 128x128", "FP8 block -> INT4 g32", "INT4 g32 -> FP8 128x128")


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


def stacked(matrices: list[Matrix]) -> Matrix:
    """Plain matrices as one, below each other."""
    rows = sum(matrix.rows for matrix in matrices)
    return matrices[0]._replace(codes=b"".join(matrix.codes for matrix in matrices), rows=rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--cols", type=int, default=7168)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--level", choices=native.LEVELS, help="instruction set; default: the best that runs here")
    parser.add_argument("--twin", action="store_true", help="time the torch twin too")
    parser.add_argument("--device", default="auto", help="auto, cpu, or one card: cuda:0")
    parser.add_argument("--gigabytes", type=float, default=4, help="what a launch on the card reads and writes")
    parser.add_argument("--launches", type=int, default=10, help="in a row, timed together")
    parser.add_argument("--turns", type=int, default=50, help="how often each lane converts what it holds")
    arguments = parser.parse_args()

    try:
        device = choose(arguments.device)
        if len(device.cards) > 1:
            parser.error("--device: give one card")
        measure(arguments, device.name, device.cards)
    except PhasefoldError as error:
        parser.exit(1, f"{error}\n")


def measure(arguments: argparse.Namespace, device: str, cards: tuple[int, ...]) -> None:
    level = native.LEVELS.index(arguments.level) if arguments.level else None

    def convert(matrix: Matrix, target: Target, codes: bytearray, scales: bytearray) -> Report:
        return native.convert(matrix, target, codes, scales, level=level)

    bf16 = [gaussian_bf16(arguments.rows, arguments.cols, seed) for seed in range(arguments.blocks)]
    fp8 = [converted(matrix, FP8, convert) for matrix in bf16]
    int4 = [converted(matrix, INT4[32], convert) for matrix in bf16]
    copies = [converted(matrix, BF16, convert) for matrix in int4]

    # Between any two kernels the machine may change its pace: the copy beside which a kernel stands is its own.
    print(f"{arguments.level or kernels.backend()}, {arguments.rows} x {arguments.cols}; device: {device}")
    columns = "".join(f"{name:>9}" for name in ("GB/s", "memcpy", "share"))
    if cards:
        from on_card import Sizes, kernel_rates, lane_rates

        from phasefold.quantize.kernels.card import open_card

        card = open_card(cards[0])
        sizes = Sizes(int(arguments.gigabytes * 1e9), arguments.launches, arguments.rounds)
        columns += "".join(f"{name:>9}" for name in ("card", "copy", "share", "cores"))
        version = ".".join(map(str, nvrtc_version()))
        print(f"card: {card.arch}, NVRTC {version}; {arguments.gigabytes:g} GB a launch, {arguments.launches} in a row")
    print(f"{'kernel':36}{columns}")
    room = bytearray(2 * arguments.rows * arguments.cols)

    def copy(matrix: Matrix) -> None:
        room[:] = matrix.codes

    def show(name: str, matrices: list[Matrix], work: Callable[[Matrix], object], rounds: int) -> float:
        memcpy = best_rate(copy, bf16, arguments.rounds)
        rate = best_rate(work, matrices, rounds)
        print(f"{name:36}{rate:9.2f}{memcpy:9.1f}{rate / memcpy:9.2f}", end="", flush=True)
        return rate

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
        ("FP8 block -> INT4 g32", fp8, INT4[32]),
        ("FP8 block -> INT4 g128 search", fp8, SEARCH[128]),
        ("FP8 block -> BF16", fp8, BF16),
        ("INT4 g32 -> FP8 128x128", int4, FP8),
        ("INT4 g32 -> BF16", int4, BF16),
    ]
    whole = {}
    if cards:  # an expert of each kind, so that scales of blocks that rows cut are the expert's own
        whole["bf16"], whole["copies"] = stacked(bf16), stacked(copies)
        whole["e4m3"], whole["int4"] = (converted(whole["bf16"], target, convert) for target in (FP8, INT4[32]))
    for name, matrices, target in conversions:
        rate = show(name, matrices, into_one_buffer(convert, matrices[0], target), arguments.rounds)
        if cards:
            found = kernel_rates(card, whole["copies" if matrices is copies else matrices[0].kind], target, sizes)
            cells = f"{found.moved:9.0f}{found.copied:9.0f}{found.moved / found.copied:9.2f}{found.source / rate:9.0f}"
            print(cells, end="")
        print()
    for name, matrices in (("BF16", bf16), ("FP8", fp8), ("INT4 g32", int4)):
        show(f"check {name}", matrices, lambda m: native.check(m, level=level), arguments.rounds)
        print()
    for name, other in (("FP8", fp8[0]), ("INT4 g32", int4[0])):
        compare = partial(native.compare, b=other, level=level)
        show(f"compare BF16 with {name}", bf16, compare, arguments.rounds)
        print()

    if arguments.twin:
        import torch

        from phasefold.quantize.kernels import twin

        torch.set_num_threads(1)
        for name, matrices, target in conversions:
            show(f"twin: {name}", matrices[:1], into_one_buffer(twin.convert, matrices[0], target), 2)
            print()
    if cards:
        print(f"\n{'with the copies, GB of source/s':36}" + "".join(f"{f'lanes: {n}':>18}" for n in LANES))
        print(f"{'':36}" + f"{'convert':>10}{'copy':>8}" * len(LANES))
        for name, matrices, target in conversions:
            if name in WITH_COPIES:
                rates = [lane_rates(card, matrices[0], target, lanes, arguments.turns) for lanes in LANES]
                print(f"{name:36}" + "".join(f"{made:10.1f}{copied:8.1f}" for made, copied in rates))


if __name__ == "__main__":
    main()
