"""What a task of Ray does: one shard, written into the shared folder as a thread of a plain job would write it.

A task is sent no more than its own share of the plan. Nothing is taken on trust: the host must have this phasefold,
see the driver's folder and its locks, and see the very files of the source.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from .. import __version__
from ..errors import PhasefoldError, PlanError
from ..formats.checkpoint import WORK, Checkpoint
from ..formats.statistics import open_statistics
from . import kernels, output
from .claim import JOB
from .convert import peak_rss
from .guide import Guide
from .shard import Busy
from .units import Shard
from .workers import write_shards

#: seconds that the writer of a shard, thought dead by Ray, has to let go of it
PATIENCE = 120.0


class Task(NamedTuple):
    """One shard to be written.

    checkpoint: the source, with no other tensors than those that are read. stamps: of its files, as the driver sees
    them. job: the plan's digest. made_by: `here()` of the driver. threads: of this task.
    statistics: folder and digest of those that guide the choice of numbers.
    stop: name of a file in the work folder, this driver's alone, with which it asks its tasks to end. `ray.cancel`
    would do, but it races with tasks that end by themselves, and then Ray aborts the driver (seen with 2.60).
    """

    checkpoint: Checkpoint
    stamps: Mapping[str, list[int | str]]
    shard: Shard
    out: Path
    job: str
    made_by: Mapping[str, str]
    threads: int
    statistics: tuple[Path, str] | None
    stop: str


class Done(NamedTuple):
    """A shard is there: what it took in the process that wrote it."""

    cpu_seconds: float
    peak_rss_bytes: int


class Refused(NamedTuple):
    """What stopped a task knowingly: the error's name in `errors`, and its sentence."""

    error: str
    message: str


def here(*, gptq: bool) -> dict[str, str]:
    """What must be alike on all hosts, so that shards are written bit-equal, and none of them much more slowly.

    All levels of the compiled kernels give the same bits, so that CPUs may differ; torch's algebra, for GPTQ, does not.
    """
    found = {"phasefold": __version__, "codec": kernels.backend().partition("-")[0]}
    if gptq:
        import torch

        found |= {"torch": str(torch.__version__), "CPU capability": torch.backends.cpu.get_cpu_capability()}
    return found


def write(task: Task) -> Done | Refused | None:
    """Write the shard of a task, unless it is there; None where the driver has stopped it."""
    started = time.process_time()
    try:
        if (task.out / WORK / task.stop).exists():
            return None
        _check_host(task)
        guide = _guide(*task.statistics, task.threads) if task.statistics else None
        _write(task, guide)
        if output.record_of(task.out, task.shard) is None:
            return None
    except PhasefoldError as error:
        known = next(kind for kind in type(error).__mro__ if kind.__module__ == PhasefoldError.__module__)
        return Refused(known.__name__, str(error))
    return Done(time.process_time() - started, peak_rss())


def _write(task: Task, guide: Guide | None) -> None:
    """A task that Ray gives to another worker may find its first one alive still, with the shard in its hands."""
    deadline, asked = time.monotonic() + PATIENCE, task.out / WORK / task.stop
    while True:
        with _listening(asked) as stop:
            spent = write_shards(task.checkpoint, task.out, [task.shard], task.threads, None, guide, stop=stop)
        if not spent.busy or asked.exists():
            return
        if time.monotonic() > deadline:
            raise Busy(
                f"{task.out / task.shard.file}: another process has been writing it for {PATIENCE:.0f} s, and Ray has "
                "given it up; end it, then give the same command again"
            )
        time.sleep(0.5)


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[threading.Event]:
    """Set once there is such a file."""
    stop, ended = threading.Event(), threading.Event()

    def listen() -> None:
        while not ended.wait(0.5):
            if path.exists():
                stop.set()
                return

    thread = threading.Thread(target=listen, name="phasefold-stop", daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        ended.set()
        thread.join()


def _check_host(task: Task) -> None:
    """PlanError where this host is not like the driver's, or does not see what that sees."""
    host, ours = socket.gethostname(), here(gptq="torch" in task.made_by)
    for what, theirs in task.made_by.items():
        if ours[what] != theirs:
            raise PlanError(f"{host}: has {what} {ours[what]}, the driver {theirs}; install the same on all hosts")
    work = task.out / WORK
    if output.begun(work / JOB).get("plan") != task.job:
        raise PlanError(f"{task.out}: is not shared with {host}, which sees no such job in it; give a shared folder")
    with output.writing(task.out):
        lock = os.open(work / "lock", os.O_RDWR)
        try:
            if output.take(lock, fcntl.LOCK_SH):  # the driver's, while this task is wanted
                raise PlanError(
                    f"{task.out}: {host} does not see its locks, or the driver has ended; mount its file system "
                    "with locks that reach all hosts"
                )
        finally:
            os.close(lock)
    for file, stamp in task.stamps.items():
        if (found := task.checkpoint.shards.stamp(file)) != stamp:
            raise PlanError(
                f"{task.checkpoint.label}/{file}: on {host} it is another file than the driver's (size or time: "
                f"{found}, {stamp}); give a source that all hosts share"
            )


@lru_cache(1)
def _guide(folder: Path, digest: str, threads: int) -> Guide:
    """Kept from task to task: factors of a Hessian serve many matrices."""
    statistics = open_statistics(folder)
    if statistics.digest != digest:
        raise PlanError(f"{folder}: on {socket.gethostname()} these are other statistics than the driver's")
    return Guide(statistics, threads)
