"""What test_cuda_card runs in a process of its own, where hostcard's driver is the one that is found."""

from __future__ import annotations

import random
import struct
import sys
import threading

from phasefold.errors import LoadError
from phasefold.quantize import kernels
from phasefold.quantize.kernels import Matrix, Target, card, jobs

#: conversions whose kernels test_cuda_card builds
CONVERSIONS = (
    ("bf16", Target("bf16")),
    ("bf16", Target("e4m3", (128, 128))),
    ("bf16", Target("e4m3", (1, 0))),
    ("bf16", Target("int4", (1, 32))),
    ("bf16", Target("int4", (1, 32), "search")),
    ("e4m3", Target("bf16")),
    ("e4m3", Target("int4", (1, 32))),
)
BLOCKS = ((128, 128), (1, 0), (0, 0), (2, 8), (1, 1024))
ROOM = 4 << 20


def taken(room: card.Arena, data: bytes) -> memoryview:
    view = room.take(len(data))
    view[:] = data
    return view


def some_work(chance: random.Random, lane: card.Lane, kind: str, target: Target) -> jobs.Work:
    """A small matrix in the lane, now and then with a fault, or with weights that float32 cannot square."""
    rows, cols = chance.randint(1, 150), 32 * chance.randint(1, 9)
    if kind == "bf16":
        codes = bytearray(b"".join(struct.pack("<f", chance.gauss(0, 0.02))[2:] for _ in range(rows * cols)))
        scales, dtype, block = None, None, (0, 0)
        for high in chance.choices([b"", b"\x7f\xc0", b"\x00\x7e"], [6, 1, 1]):
            place = 2 * chance.randrange(rows * cols)
            codes[place : place + len(high)] = high[::-1]
    else:
        codes = bytearray(chance.choices([c for c in range(256) if c & 127 != 127], k=rows * cols))
        block, dtype = chance.choice(BLOCKS), "F32"
        values = [chance.uniform(0.001, 0.01) for _ in range(kernels.num_scales(rows, cols, block))]
        values[chance.randrange(len(values))] *= chance.choice([1, 1, 1, -1])
        scales = taken(lane.source, struct.pack(f"<{len(values)}f", *values))
    if target.method == "search" and chance.random() < 0.5:
        target = target._replace(column_weights=struct.pack(f"<{cols}f", *(chance.random() for _ in range(cols))))
    matrix = Matrix(kind, taken(lane.source, codes), scales, dtype, rows, cols, block)
    codes_bytes, scales_bytes = kernels.check_convertible(matrix, target)
    poisoned = taken(lane.result, b"\xa5" * codes_bytes)
    return jobs.Work(matrix, target, poisoned, taken(lane.result, b"\xa5" * scales_bytes) if scales_bytes else None)


def check(work: jobs.Work, report: kernels.Report) -> None:
    """AssertionError unless the CPU says and leaves the same."""
    matrix, target, codes_out, scales_out = work
    codes = bytearray(len(codes_out))
    scales = None if scales_out is None else bytearray(len(scales_out))
    expected = kernels.convert(matrix, target, codes, scales)
    told = f"{matrix._replace(codes=b'', scales=b'')} {target._replace(column_weights=None)}: {report}, not {expected}"
    for name in ("error2", "norm2"):
        mine, other = getattr(report, name), getattr(expected, name)
        assert abs(mine - other) <= 2e-6 * other, told
    assert report._replace(error2=0, norm2=0) == expected._replace(error2=0, norm2=0), told
    assert expected.fault is not None or (codes_out == codes and scales_out == scales), told


def equal(seed: int, ordinal: int = 0) -> int:
    """Convert some fifty matrices in one go, twice in one lane. How many faults there were among them."""
    chance, faults = random.Random(seed), 0
    with card.Lane(card.open_card(ordinal), ROOM, ROOM) as lane:
        for _ in range(2):
            works = [some_work(chance, lane, *chance.choice(CONVERSIONS)) for _ in range(25)]
            needed = [jobs.needs(work.matrix, work.target) for work in works]
            reports = lane.convert(works)
            assert lane.source.used <= sum(source for source, _ in needed)
            assert lane.result.used <= sum(result for _, result in needed)
            for work, report in zip(works, reports, strict=True):
                check(work, report)
            faults += sum(report.fault is not None for report in reports)
            lane.clear()
            assert (lane.source.free, lane.result.free) == (ROOM, ROOM)
    return faults


def rare() -> None:
    """Weights whose squares float32 does not hold: where the card's sums would be wrong, the CPU is asked."""
    with card.Lane(card.open_card(0), ROOM, ROOM) as lane:
        works = []
        for kind, target in CONVERSIONS:
            if kind != "bf16":
                continue
            for weight in (2.0**120, 2.0**-75, 2.0**-130):
                codes = struct.pack("<32f", *(weight * (1 + i / 16) for i in range(32)))
                codes = b"".join(codes[i + 2 : i + 4] for i in range(0, len(codes), 4))
                matrix = Matrix(kind, taken(lane.source, codes * 4), None, None, 4, 32)
                codes_bytes, scales_bytes = kernels.check_convertible(matrix, target)
                scales = lane.result.take(scales_bytes) if scales_bytes else None
                works.append(jobs.Work(matrix, target, lane.result.take(codes_bytes), scales))
        for work, report in zip(works, lane.convert(works), strict=True):
            check(work, report)
            assert report.fault is None and 0 < report.norm2 < float("inf")


def threads() -> None:
    """Two lanes on each of two cards at once."""
    failed: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            equal(seed, seed % 2)
        except BaseException as error:
            failed.append(error)

    running = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if failed:
        raise failed[0]


def split() -> None:
    """More works of a kind than a launch may have."""
    card.MOST_JOBS = 3
    with card.Lane(card.open_card(0), ROOM, ROOM) as lane:
        works = []
        for i in range(8):
            codes = taken(lane.source, struct.pack("<f", i + 1)[2:] * 64)
            out = taken(lane.result, bytes(128))
            works.append(jobs.Work(Matrix("bf16", codes, None, None, 2, 32), Target("bf16"), out, None))
        reports = lane.convert(works)
        for i, (work, report) in enumerate(zip(works, reports, strict=True)):
            check(work, report)
            assert report.norm2 == 64 * (i + 1) ** 2


def refused() -> None:
    """Buffers that are no lane's, sizes that are wrong, a conversion that has no kernel, room that there is not."""
    with card.Lane(card.open_card(0), 4096, 4096) as lane:
        codes, out = lane.source.take(128), lane.result.take(128)
        good = jobs.Work(Matrix("bf16", codes, None, None, 2, 32), Target("bf16"), out, None)
        wrong = (
            good._replace(matrix=good.matrix._replace(codes=bytes(128))),
            good._replace(codes_out=memoryview(bytearray(128))),
            good._replace(codes_out=codes),
            good._replace(codes_out=out[:-1]),
            good._replace(matrix=good.matrix._replace(codes=codes[8:], rows=1, cols=60)),
            good._replace(matrix=good.matrix._replace(rows=1, cols=12)),
        )
        for work in wrong:
            try:
                lane.convert([work])
            except ValueError:
                continue
            raise AssertionError(f"{work} was taken")
        lane.clear()
        assert lane.convert([]) == []
        lane.source.take(lane.source.free)
        for nbytes in (1, 256):
            try:
                lane.source.take(nbytes)
            except ValueError:
                continue
            raise AssertionError("there was room")


def sentence() -> str:
    """What a card that fails at some time is told of."""
    try:
        equal(1)
    except LoadError as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    if sys.argv[1] == "equal":
        print(equal(int(sys.argv[2])))
    elif sys.argv[1] == "sentence":
        print(sentence())
    else:
        {"rare": rare, "threads": threads, "split": split, "refused": refused}[sys.argv[1]]()
