"""A job by Ray: each shard is a task, on whatever host of the cluster has the CPUs for it.

The driver holds the claim, hands out the shards that are missing, and finishes the job. Ray gives the task of a worker
that has died to another one; what phasefold refuses is not tried again, and ends the job with that one line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import errors
from ..errors import PhasefoldError, PlanError, UsageError
from ..formats.checkpoint import WORK, Checkpoint
from ..formats.statistics import Statistics
from . import output
from .plan import Plan
from .ray_worker import Done, Refused, Task, here, write
from .units import Shard
from .workers import Progress, Spent, scratch, source_tensors

#: CPUs that a task takes if nothing is said: its shard is hashed by one thread at a time, which keeps up with so many
TASK_CPUS = 4
RETRIES = 3
_STOP_PATIENCE = 30.0  # seconds; a matrix that GPTQ is at must be done with first
_LOCAL_STORE = 100_000_000  # bytes: tasks are small, and weights never pass through Ray


@dataclass(frozen=True)
class RayTasks:
    """Writes shards by the tasks of a Ray cluster. An `Executor`.

    address: HOST:PORT, or "local"; None: the cluster that Ray finds, else one of this machine with `cores` CPUs, for
    this job alone. threads: CPUs of a task; None: TASK_CPUS, or what the smallest host has.
    notice: told in a sentence on which cluster the job runs.
    """

    address: str | None
    threads: int | None
    cores: int
    statistics: Statistics | None
    notice: Callable[[str], None]

    def __call__(self, plan: Plan, out: Path, shards: list[Shard], progress: Progress | None) -> Spent:
        """Write the shards. Raises PhasefoldError with the first thing that is wrong; all tasks have ended then."""
        if not shards:
            return Spent()
        stop = f"stop-{secrets.token_hex(8)}"
        with connected(self.address, self.cores) as ray:
            threads = self._threads(ray)
            remote = ray.remote(write).options(
                num_cpus=threads, max_retries=RETRIES, retry_exceptions=False, scheduling_strategy="SPREAD"
            )
            self._check_space(ray, plan, out, shards, threads)
            refs: dict[Any, Shard] = {}
            try:
                for task in self._tasks(plan, out, shards, threads, stop):
                    refs[remote.remote(task)] = task.shard
                return self._gather(ray, refs, progress)
            except BaseException:
                _stop(ray, list(refs), out / WORK / stop)
                raise

    def _check_space(self, ray: ModuleType, plan: Plan, out: Path, shards: list[Shard], threads: int) -> None:
        """PlanError where the disk is too small for what all tasks at a time fetch of a source on the Hub."""
        each = max(scratch(needed(plan.checkpoint, shard), out, [shard]) for shard in shards)
        count = max(1, int(ray.cluster_resources().get("CPU", 1)) // threads)
        if each:
            output.check_space(out, each * min(count, len(shards)) + sum(shard.size for shard in shards))

    def _tasks(self, plan: Plan, out: Path, shards: list[Shard], threads: int, stop: str) -> Iterator[Task]:
        made_by = here(gptq=any(unit.method == "gptq" for unit in plan.units()))
        statistics = (self.statistics.folder.absolute(), self.statistics.digest) if self.statistics else None
        for shard in shards:
            checkpoint = needed(plan.checkpoint, shard)
            yield Task(
                checkpoint,
                output.stamps(checkpoint),
                shard,
                out.absolute(),
                plan.digest,
                made_by,
                threads,
                statistics,
                stop,
            )

    def _threads(self, ray: ModuleType) -> int:
        """CPUs of a task. PlanError where no host has as many; one that is yet to come may."""
        found = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        sizes = [cpus for cpus in found if cpus]
        threads = self.threads or min([TASK_CPUS, *sizes])
        if sizes and threads > max(sizes):
            raise PlanError(f"--workers {threads}: no host of the Ray cluster has more than {max(sizes)} CPUs for it")
        hosts = f"{len(sizes):,} host{'' if len(sizes) == 1 else 's'}"
        self.notice(f"Ray: {sum(found):,} CPUs on {hosts}, {threads} for each shard")
        return threads

    def _gather(self, ray: ModuleType, refs: dict[Any, Shard], progress: Progress | None) -> Spent:
        """Wait for all. The first that is refused ends the wait."""
        left, seconds, peak = list(refs), 0.0, 0
        while left:
            ready, left = ray.wait(left, num_returns=1, timeout=1.0)  # soon awake for a signal
            for ref in ready:
                done = _result(ray, ref, refs[ref])
                seconds, peak = seconds + done.cpu_seconds, max(peak, done.peak_rss_bytes)
                if progress:
                    progress(refs[ref].source_bytes)
        return Spent(seconds, peak)


def needed(checkpoint: Checkpoint, shard: Shard) -> Checkpoint:
    """A checkpoint with no other tensors than those that a shard is made of, and with absolute paths: to be sent."""
    tensors = {name: checkpoint.tensors[name] for name in source_tensors(shard)}
    heads = {stored.file: checkpoint.heads[stored.file] for stored in tensors.values()}
    place = checkpoint.place
    place = place._replace(folder=place.folder.absolute(), shards=place.shards.absolute())
    return replace(checkpoint, place=place, tensors=tensors, heads=heads)


@contextlib.contextmanager
def connected(address: str | None, cores: int) -> Iterator[ModuleType]:
    """Ray, connected to a cluster; what it started here goes with it. Its words go to its own log files.

    Raises UsageError where Ray is not installed or the address is none, PlanError where no cluster answers.
    """
    if address is not None and address != "local":
        _check_answers(address, UsageError(f"--address {address}: expected HOST:PORT of the head of a Ray cluster"))
    try:
        import ray
    except ImportError:
        raise UsageError("--executor ray: Ray is not installed; pip install 'phasefold[ray]'") from None
    with contextlib.ExitStack() as stack:
        # without it a worker that Ray's memory monitor has killed is begun again for ever
        stack.enter_context(_settings(RAY_task_oom_retries=str(RETRIES)))
        stack.callback(ray.shutdown)
        if address == "local" or not _found(ray, address):
            folder = stack.enter_context(_folder())
            stack.enter_context(_settings(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_TOKEN=secrets.token_hex(32)))
            stack.callback(ray.shutdown)  # before the folder goes
            more: dict[str, Any] = {"num_cpus": cores, "object_store_memory": _LOCAL_STORE, "include_dashboard": False}
            try:
                _init(ray, address="local", _temp_dir=folder, **more)
            except Exception as error:  # of many kinds: sockets, memory, a process that does not start
                raise PlanError(f"Ray cannot be started on this machine ({_first_line(error)})") from None
        yield ray


def _check_answers(address: str, malformed: PhasefoldError) -> None:
    """Refuse an address at which nobody listens: Ray itself would try for minutes."""
    match = re.fullmatch(r"\[?([\w.:-]+?)\]?:([0-9]{1,5})", address, re.ASCII)
    if not match or not 0 < int(match[2]) < 1 << 16:
        raise malformed
    try:
        socket.create_connection((match[1], int(match[2])), timeout=10).close()
    except OSError as error:
        raise PlanError(f"no Ray cluster answers at {address} ({error.strerror or error})") from None


def _found(ray: ModuleType, address: str | None) -> bool:
    """Connect to a cluster that is there; False where there is none, and none was asked for."""
    asked = os.environ.get("RAY_ADDRESS")
    if address is None and asked and asked not in ("auto", "local"):
        _check_answers(asked, PlanError(f"RAY_ADDRESS is {asked}: expected HOST:PORT of the head of a Ray cluster"))
    if address is None and asked == "local":
        return False
    try:
        _init(ray, address=address or "auto")
    except (ConnectionError, RuntimeError, ValueError) as error:
        if address is None and asked in (None, "", "auto") and isinstance(error, ConnectionError):
            return False
        raise PlanError(f"no Ray cluster can be used at {address or asked} ({_first_line(error)})") from None
    return True


def _init(ray: ModuleType, **how: Any) -> None:
    """Connect. Ray's advice on settings is not for our users, and our handler of SIGTERM stays."""
    handler = signal.getsignal(signal.SIGTERM)
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(log_to_driver=False, logging_level="ERROR", **how)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _settings(**values: str) -> Iterator[None]:
    """Of a cluster of ours, where the user has set nothing else: it reports to nobody, and obeys this job alone."""
    before = dict(os.environ)
    for name, value in values.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():  # Ray sets some, too
            del os.environ[name]


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """For the sockets and logs of a cluster of ours; the path of a socket may have 107 bytes."""
    name = tempfile.mkdtemp(prefix="phasefold-")  # ours alone; Ray opens the one in it to everybody
    try:
        os.mkdir(os.path.join(name, "r"))
        yield os.path.join(name, "r")
    finally:
        shutil.rmtree(name, ignore_errors=True)


def _result(ray: ModuleType, ref: Any, shard: Shard) -> Done:
    """What a task has left. Raises what stopped it."""
    try:
        found: Done | Refused | None = ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        if "import" in str(error.cause) and not isinstance(error.cause, PhasefoldError):
            why = _first_line(error.cause)
            raise PlanError(f"a worker of Ray lacks this phasefold ({why}); install it on all hosts") from None
        raise error.cause if isinstance(error.cause, Exception) else error from None
    except ray.exceptions.RayError as error:
        raise PlanError(f"{shard.file}: no worker of Ray could write it ({_first_line(error)})") from None
    if isinstance(found, Refused):
        raise getattr(errors, found.error)(found.message)
    if found is None:
        raise PlanError(f"{shard.file}: was not written, its task was stopped; give the same command again")
    return found


def _stop(ray: ModuleType, refs: list[Any], stop: Path) -> None:
    """End all tasks, and wait until they have cleared what is half written; Ray kills those that take too long."""
    with contextlib.suppress(OSError):
        stop.touch()
    with contextlib.suppress(ray.exceptions.RayError):
        ray.wait(refs, num_returns=len(refs), timeout=_STOP_PATIENCE)
    with contextlib.suppress(OSError):
        stop.unlink(missing_ok=True)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
