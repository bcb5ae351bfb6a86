"""The output folder: claimed by one job, filled shard by shard, finished by config.json.

While a job runs, the folder holds `.phasefold/`: the claim, locks, and a record of each finished shard. A shard is
written as `.partial`, flushed, hashed, recorded, renamed, and the folder is flushed: at any moment of a crash a shard
with a record and its final name is whole, and everything else is made again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, PlanError, ResumeError
from ..formats.checkpoint import CARD, MANIFEST, WORK, Checkpoint
from ..formats.manifest import Manifest, read_manifest
from .plan import Plan
from .units import Shard

PARTIAL = ".partial"


def atomic_write(path: Path, data: bytes) -> None:
    """Write a small file so that it is there whole or not at all, with mode 0644, also after a power loss."""
    partial = path.with_name(path.name + PARTIAL)
    with open(partial, "wb") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Make renames within a folder survive a power loss."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turn an OSError of the output side into one line that says what to do."""
    try:
        yield
    except OSError as error:
        where = error.filename or out
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResumeError(
                f"{out}: disk full; free some space and give the same command again, finished shards are kept"
            ) from None
        raise PlanError(f"{where}: cannot be written ({error.strerror})") from None


def is_finished(out: Path, plan: Plan) -> bool:
    """Whether `out` holds this very job, done. Raises ResumeError where it holds anything else that is not ours."""
    with writing(out):
        return _is_finished(out, plan)


def _is_finished(out: Path, plan: Plan) -> bool:
    if out.exists() and not out.is_dir():
        raise ResumeError(f"{out}: is a file; give a folder that is new or empty")
    if not out.is_dir():
        return False
    if (out / "config.json").exists():
        if _plan_in(out / MANIFEST, "plan") == plan.digest:
            return True
        raise ResumeError(f"{out}: holds another checkpoint already (or other settings made it); give a new folder")
    if (out / WORK / "job.json").exists():
        if _plan_in(out / WORK / "job.json", "plan") == plan.digest:
            return False
        began = _plan_in(out / WORK / "job.json", "recipe")
        raise ResumeError(
            f"{out}: belongs to another job, begun with recipe {began}; source, recipe or a setting differ: give "
            "another folder, or delete this one"
        )
    strangers = sorted(entry.name for entry in os.scandir(out) if entry.name != WORK)
    if strangers:
        raise ResumeError(f"{out}: not empty ({strangers[0]}) and not begun by phasefold; give a new or empty folder")
    return False


def _plan_in(path: Path, key: str) -> str | None:
    value = begun(path).get(key)
    return value if isinstance(value, str) else None


def check_place(source: Path, out: Path) -> None:
    """Refuse an output inside the source, or around it."""
    try:
        inner, outer = out.resolve(), source.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links
        raise PlanError(f"{out}: is no place to write to ({getattr(error, 'strerror', None) or error})") from None
    if inner == outer or inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise PlanError(f"{out}: lies inside the source {source} or around it; give a folder apart from it")


def check_space(out: Path, nbytes: int) -> None:
    """Refuse a job for which the disk is too small, before it starts."""
    with writing(out):
        place = out.absolute()
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
    if free < nbytes:
        raise PlanError(f"{out}: needs {nbytes / 1e6:,.0f} MB more, the disk has {free / 1e6:,.0f} MB free")


@contextlib.contextmanager
def locked(out: Path, work: Path, name: str = "lock", *, shared: bool = False, what: str = "it") -> Iterator[None]:
    """Make a job's folder and, in it, the one for its work; hold a lock file in that against other processes.

    shared: beside others who share it, and against those who do not. what: is held by it, for the error's sentence.
    Raises ResumeError where another process holds it, PlanError where it cannot be made or locked.
    """
    with writing(out):
        work.mkdir(parents=True, exist_ok=True)
        flush_folder(out)
        flush_folder(out.resolve().parent)
    lock = _lock(out, work / name, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, what)
    try:
        yield
    finally:
        os.close(lock)


def _lock(out: Path, path: Path, how: int, what: str) -> int:
    while True:
        with writing(out):
            path.parent.mkdir(exist_ok=True)  # whoever has finished the job takes it away
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if take(lock, how):
                if is_at(lock, path):
                    return lock
            elif how == fcntl.LOCK_EX and take(lock, fcntl.LOCK_SH):
                raise ResumeError(f"{out}: other processes are working on parts of it; wait until they have ended")
            else:
                raise ResumeError(f"{out}: another process is working on {what}")
        except OSError as error:
            os.close(lock)
            raise PlanError(
                f"{out}: cannot be locked ({error.strerror}); give a folder on another file system"
            ) from None
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def take(handle: int, how: int) -> bool:
    """Lock an open file, or tell that another process holds it. Raises OSError where its file system has no locks."""
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at(handle: int, path: Path) -> bool:
    """Whether an open file still has its name: between opening and locking, its holder may have taken it away."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False


def stamps(checkpoint: Checkpoint) -> dict[str, list[int | str]]:
    """What tells each of a source's shards from another of its name: size and time of change, or hash."""
    return {file: checkpoint.shards.stamp(file) for file in checkpoint.heads}


def refuse_changed(
    out: Path, before: Any, now: Mapping[str, list[int | str]], checkpoint: Checkpoint, done: str
) -> None:
    """ResumeError where a source's files are not those that a job began with: what is done may be of other weights."""
    if not isinstance(before, dict) or before == now:
        return
    file = next(file for file in (*now, *before) if now.get(file) != before.get(file))
    path, was = checkpoint.folder / file, before.get(file)
    cure = "delete the folder to begin anew"
    if was and was[0] == now.get(file, [None])[0] and isinstance(was[-1], int):
        seconds, rest = divmod(was[1], 10**9)
        cure += f"; if nothing but its time has changed: touch -d @{seconds}.{rest:09d} {path}"
    raise ResumeError(
        f"{out}: {path} has changed since this job began (size or time), its {done} may be of other weights; {cure}"
    )


def begun(path: Path) -> dict[str, Any]:
    """What a claim says; {} where it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(path.read_bytes())
        return value if isinstance(value, dict) else {}
    return {}


def record_path(out: Path, file: str) -> Path:
    """Where the record of a finished shard lies."""
    return out / WORK / f"{file}.json"


def record_of(out: Path, shard: Shard, sent: str | None = None) -> Mapping[str, Any] | None:
    """The record of a shard that is done: recorded, renamed, of the planned size and of this job; None where it is not.

    sent: a place to which shards go and are let go here; one that its record says to be there is done, too.
    """
    with contextlib.suppress(OSError, ValueError):
        record = json.loads(record_path(out, shard.file).read_bytes())
        right = (
            isinstance(record, dict) and record.get("bytes") == shard.size and _is_of(record, begun(claim_path(out)))
        )
        if right and ((sent and record.get("sent") == sent) or (out / shard.file).stat().st_size == shard.size):
            found: Mapping[str, Any] = record
            return found
    return None


def sent_shards(out: Path, plan: Plan) -> list[str]:
    """Where the shards lie that are done and were let go here, one entry each."""
    found = []
    for shard in plan.shards:
        place = begun(record_path(out, shard.file)).get("sent")
        if place and not (out / shard.file).exists():
            found.append(str(place))
    return found


def _is_of(record: Mapping[str, Any], claim: Mapping[str, Any]) -> bool:
    """Whether a record is of the job as it is claimed now: this version's, and of the very files of the source.

    A process that outlived its job may have landed a shard of what the source was before.
    """
    made, source = record.get("source"), claim.get("source")
    if not isinstance(made, dict) or not isinstance(source, dict) or record.get("tool") != claim.get("tool"):
        return False
    return record.keys() >= {"sha256", "units", "scales"} and all(source.get(f) == stamp for f, stamp in made.items())


def claim_path(out: Path) -> Path:
    """Where the claim of a job lies: see `claim`."""
    return out / WORK / "job.json"


def finished_shards(out: Path, plan: Plan, sent: str | None = None) -> dict[str, Mapping[str, Any]]:
    """Records of the shards that are done: see `record_of`."""
    return {shard.file: found for shard in plan.shards if (found := record_of(out, shard, sent)) is not None}


def hash_file(handle: int, size: int) -> str:
    """sha256 of the first `size` bytes of an open file."""
    digest, buffer, done = hashlib.sha256(), bytearray(1 << 20), 0
    while done < size:
        got = os.preadv(handle, [memoryview(buffer)[: size - done]], done)
        if got == 0:
            raise OSError(errno.EIO, "file ends early")
        digest.update(memoryview(buffer)[:got])
        done += got
    return digest.hexdigest()


def remove_work(out: Path) -> None:
    """Clear what only the running job needed. Killed in the middle of it, the next run clears the rest."""
    claim_path(out).unlink(missing_ok=True)  # first, and the lock last: nobody is to work by what is going
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(out / WORK):
            if entry.name != "lock":
                shutil.rmtree(entry) if entry.is_dir(follow_symlinks=False) else os.unlink(entry)
    shutil.rmtree(out / WORK, ignore_errors=True)
    flush_folder(out)


def to_json(value: Any, indent: int | None = None) -> bytes:
    """JSON as this project writes it: UTF-8, a newline at the end."""
    return (json.dumps(value, indent=indent, ensure_ascii=False) + "\n").encode()


def file_entry(data: bytes) -> dict[str, Any]:
    """The manifest's entry for a small file."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def copy_side_file(source: Path, target: Path) -> dict[str, Any]:
    """Copy a side file as bytes, piece by piece; -> its entry in the manifest."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    try:
        opened = open(source, "rb")
    except OSError as error:
        raise CheckpointError(f"{source}: cannot be read ({error.strerror})") from None
    with opened as theirs, open(target.with_name(target.name + PARTIAL), "wb") as ours:
        os.fchmod(ours.fileno(), 0o644)
        while piece := theirs.read(1 << 20):
            ours.write(piece)
            digest.update(piece)
            size += len(piece)
        ours.flush()
        os.fsync(ours.fileno())
    os.replace(target.with_name(target.name + PARTIAL), target)
    flush_folder(target.parent)
    return {"bytes": size, "sha256": digest.hexdigest()}


def check_finished(out: Path, plan: Plan) -> Manifest:
    """The manifest of a finished artifact. Raises ResumeError where one of its files is missing or has another size.

    Also where a side file is no longer the source's.
    """
    manifest = read_manifest(out)
    for name, entry in manifest.files.items():
        if not (out / name).is_file() or (out / name).stat().st_size != entry["bytes"]:
            raise ResumeError(f"{out}: was finished, but {name} is missing or has another size; give a new folder")
    for name in set(plan.checkpoint.side_files()) - {CARD}:
        with open(plan.checkpoint.folder / name, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != manifest.files.get(name, {}).get("sha256"):
                raise ResumeError(f"{out}: was finished, but the source's {name} has changed since; give a new folder")
    return manifest
