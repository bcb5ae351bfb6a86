"""NVIDIA cards, by cuda-core: memory that both sides see a copy of, and launches of cuda.cu's kernels.

A thread has a lane: it takes room in the lane's pinned memory, fills it with stored matrices, and `convert` copies all
of them to the card at once, runs the kernels, and copies all results back. Two lanes or more keep the copies of both
directions and the kernels under way together. Nothing is allocated after a lane was made.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

from cuda.bindings import driver
from cuda.core import Buffer, Device, EventOptions, LaunchConfig, ObjectCode, launch
from cuda.core._utils.cuda_utils import CUDAError, handle_return  # cuda-core has no public names for them

from ...errors import LoadError
from . import Buffer as Bytes
from . import Report, check_convertible, check_matrix, code_bytes, convert, scale_bytes
from .build import SUM_PARTIALS, Kernel, architecture, build
from .jobs import MOST_JOBS, Addresses, Job, Partial, Work, aligned, job, kernel_of, report
from .jobs import needs as needs
from .jobs import supports as supports
from .native import _Addresses


@contextmanager
def _failures(card: str, doing: str, memory: str = "") -> Iterator[None]:
    """The driver's errors, in a sentence. memory: what is asked for, where the card or the host may lack it."""
    try:
        yield
    except (CUDAError, RuntimeError) as error:  # the second where cuda-core itself gives up
        what = str(error).partition(":")[0].partition("\n")[0]
        if memory and what == "CUDA_ERROR_OUT_OF_MEMORY":
            raise LoadError(f"{card}: {memory} are not free; give a smaller --device-memory, or --device cpu") from None
        raise LoadError(f"{card}: {doing} failed ({what}); --device cpu works without a card") from None


class Card:
    """A card and the kernels that were loaded for it; for all threads. arch: what kernels are compiled for (sm_90a).

    Raises LoadError where the card cannot be used.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        with _failures(f"cuda:{ordinal}", "starting the card"):
            device = Device(ordinal)
            device.set_current()
            self.name: str = device.name
            self.arch = architecture(self.name, *device.compute_capability)
        self._kernels: dict[str, Any] = {}
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"cuda:{self.ordinal} ({self.name})"

    def enter(self) -> Any:
        """cuda-core's device, as the calling thread's current one."""
        device = Device(self.ordinal)  # cuda-core has one for each thread
        device.set_current()
        return device

    def kernel(self, kernel: Kernel) -> Any:
        """A kernel, loaded; at its first use compiled or read from the cache. LoadError where it cannot be compiled."""
        with self._lock:
            if kernel.name not in self._kernels:
                built = build([kernel.name], self.arch)
                with _failures(str(self), f"loading {kernel.name}"):
                    code = ObjectCode.from_cubin(built.cubin)
                    self._kernels[kernel.name] = code.get_kernel(built.symbols[kernel.name])
            return self._kernels[kernel.name]


def open_card(ordinal: int) -> Card:
    """The card with this number, as the driver counts. Raises LoadError where it cannot be used."""
    return Card(ordinal)


class Arena:
    """Pinned host memory and as much on the card, handed out from its start on.

    Views end with the lane. used, free: bytes handed out, and bytes left.
    """

    def __init__(self, host: int, card: int, nbytes: int) -> None:
        self._host, self._card, self._nbytes = host, card, nbytes
        self._view = memoryview((ctypes.c_ubyte * nbytes).from_address(host)).cast("B")
        self.used = 0

    @property
    def free(self) -> int:
        return self._nbytes - self.used

    def take(self, nbytes: int) -> memoryview:
        """The next `nbytes` at a multiple of 256. ValueError where so many are not free."""
        start, stop = self.used, self.used + aligned(nbytes)
        if stop > self._nbytes:
            raise ValueError(f"{nbytes} bytes of an arena that has {self.free} left")
        self.used = stop
        return self._view[start : start + nbytes]

    def clear(self) -> None:
        """Take all back."""
        self.used = 0

    def on_card(self, buffer: Bytes | None, nbytes: int) -> int:
        """Where a buffer of so many bytes that was taken from here lies on the card; 0 where there are none to have.

        Raises ValueError where it is another size, or is not from here.
        """
        with _Addresses() as addresses:
            address = addresses.of(buffer, nbytes)
        if address is None:
            return 0
        offset = address - self._host
        if offset % 16 or not 0 <= offset <= self.used - nbytes:
            raise ValueError(f"buffer of {nbytes} bytes that is not from this arena, or not at a multiple of 16")
        return self._card + offset

    def copy(self, nbytes: int, stream: Any, *, to_card: bool) -> None:
        """Enqueue a copy of the first bytes, to the card or back."""
        host = Buffer.from_handle(self._host, nbytes, owner=self)
        card = Buffer.from_handle(self._card, nbytes, owner=self)
        source, target = (host, card) if to_card else (card, host)
        target.copy_from(source, stream=stream)


class _Launch(NamedTuple):
    """Works (by place) that share a launch, since they have a kernel and a number of tiles in common."""

    kernel: Kernel
    tiles: int
    works: list[int]


def _launches(works: Sequence[Work]) -> list[_Launch]:
    groups: dict[tuple[Kernel, int], list[int]] = {}
    for place, (matrix, target, _, _) in enumerate(works):
        kernel = kernel_of(matrix, target)
        if kernel is None:
            raise ValueError(f"no kernel makes {target.kind} {target.block} of {matrix.kind} {matrix.block}")
        groups.setdefault((kernel, kernel.tiles(matrix.rows, matrix.cols)), []).append(place)
    return [
        _Launch(kernel, tiles, places[first : first + MOST_JOBS])
        for (kernel, tiles), places in groups.items()
        for first in range(0, len(places), MOST_JOBS)
    ]


def _report(work: Work, total: Partial) -> Report:
    return convert(*work) if total.rare else report(work.matrix, total)


class Lane:
    """One stream, and memory for matrices that go to the card (`source`) and for what comes back (`result`).

    For one thread at a time. source_bytes, result_bytes: of pinned host memory, and again of the card's. redone: how
    many works the CPU has converted once more. Raises LoadError where either has not so much.
    """

    def __init__(self, card: Card, source_bytes: int, result_bytes: int) -> None:
        self.card, self.redone = card, 0
        sizes = aligned(source_bytes), aligned(result_bytes)
        total = sum(sizes)
        with ExitStack() as opened:
            with _failures(str(card), "making a stream"):
                device = card.enter()
                self._stream = device.create_stream()
                opened.callback(self._stream.close)
                self._done = self._stream.record(options=EventOptions(blocking_sync=True))  # to wait without spinning
            with _failures(str(card), "allocating", f"{total / 1e6:,.1f} MB of its memory"):
                memory = device.allocate(total, stream=self._stream)
                opened.callback(memory.close, self._stream)
            with _failures(str(card), "pinning memory", f"{total / 1e6:,.1f} MB of pinned host memory"):
                hosts = int(handle_return(driver.cuMemAllocHost(total)))
                opened.callback(driver.cuMemFreeHost, hosts)  # cuda-core's own would complain after a failure
            cards = int(memory.handle)
            self.source = Arena(hosts, cards, sizes[0])
            self.result = Arena(hosts + sizes[0], cards + sizes[0], sizes[1])
            opened.callback(self._settle)
            self._opened = opened.pop_all()

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the card and give all memory back; also after a failure."""
        self._opened.close()

    def _settle(self) -> None:
        with suppress(CUDAError):  # of work that has failed: that was told
            self.card.enter()
            self._stream.sync()

    def clear(self) -> None:
        """Take all of both arenas back."""
        self.source.clear()
        self.result.clear()

    def convert(self, works: Sequence[Work]) -> list[Report]:
        """Do all works, and wait for them. Reports are in their order, as those of kernels.convert.

        Works with numbers that the card's arithmetic is not made for (near float32's ends) are done again by the CPU.
        Takes room in both arenas beyond the works' own (`needs` counts it) until they are cleared. Raises LoadError
        where the card fails, ValueError where a work's buffers are not of these arenas or an arena is too small.
        """
        if not works:
            return []
        launches = _launches(works)
        with _failures(str(self.card), "starting the card"):
            self.card.enter()  # the lane may have been made by another thread
        loaded = [self.card.kernel(each.kernel) for each in launches]
        adding = self.card.kernel(SUM_PARTIALS)
        order = [place for each in launches for place in each.works]
        count = len(works)
        told, at_jobs = self._table(self.source, Job, count)
        found, at_totals = self._table(self.result, Partial, count)
        back = self.result.used
        at_partials = [self._table(self.result, Partial, each.tiles * len(each.works))[1] for each in launches]
        for i, place in enumerate(order):
            told[i] = self._job(works[place], at_totals + i * ctypes.sizeof(Partial))
        with _failures(str(self.card), "converting"):
            self.source.copy(self.source.used, self._stream, to_card=True)
            for each, kernel, partials in zip(launches, loaded, at_partials, strict=True):
                many = len(each.works)
                arguments = (at_jobs, each.tiles, partials)
                launch(self._stream, LaunchConfig((each.tiles, many), block=each.kernel.threads), kernel, *arguments)
                launch(self._stream, LaunchConfig((1, many), block=SUM_PARTIALS.threads), adding, *arguments)
                at_jobs += many * ctypes.sizeof(Job)
            self.result.copy(back, self._stream, to_card=False)
            self._stream.record(self._done)
            self._done.sync()
        self.redone += sum(total.rare > 0 for total in found)
        reports = {place: _report(works[place], found[i]) for i, place in enumerate(order)}
        return [reports[place] for place in range(count)]

    @staticmethod
    def _table(arena: Arena, kind: type[ctypes.Structure], count: int) -> tuple[Any, int]:
        """Room for so many structures: as a ctypes array, and where it lies on the card."""
        nbytes = count * ctypes.sizeof(kind)
        room = arena.take(nbytes)
        return (kind * count).from_buffer(room), arena.on_card(room, nbytes)

    def _job(self, work: Work, total: int) -> Job:
        matrix, target, codes_out, scales_out = work
        check_matrix(matrix)
        codes_bytes, scales_bytes = check_convertible(matrix, target)
        weights, weight_bytes = target.column_weights, 0
        if weights is not None:
            weight_bytes = 4 * matrix.cols
            held = self.source.take(weight_bytes)
            held[:] = memoryview(weights).cast("B")
            weights = held
        at = Addresses(
            self.source.on_card(matrix.codes, code_bytes(matrix)),
            self.source.on_card(matrix.scales, scale_bytes(matrix)),
            self.result.on_card(codes_out, codes_bytes),
            self.result.on_card(scales_out, scales_bytes),
            self.source.on_card(weights, weight_bytes),
            total,
        )
        return job(work, at)
