"""The output folder: claimed by one job, filled shard by shard, finished by config.json.

While a job runs, the folder holds `.phasefold/`: the claim, a lock, and a record of each finished shard. A shard is
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

from ..errors import PlanError, ResumeError
from ..formats.checkpoint import MANIFEST, read_file
from ..formats.manifest import Manifest, read_manifest
from .plan import Plan

WORK = ".phasefold"
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
    if out.exists() and not out.is_dir():
        raise ResumeError(f"{out}: is a file; give a folder that is new or empty")
    if not out.is_dir():
        return False
    if (out / "config.json").exists():
        if _plan_in(out / MANIFEST, "plan") == plan.digest:
            return True
        raise ResumeError(f"{out}: holds another checkpoint already; give a folder that is new or empty")
    if (out / WORK / "job.json").exists():
        if _plan_in(out / WORK / "job.json", "plan") == plan.digest:
            return False
        raise ResumeError(f"{out}: belongs to another job (other source, recipe or settings); give another folder")
    strangers = sorted(entry.name for entry in os.scandir(out) if entry.name != WORK)
    if strangers:
        raise ResumeError(f"{out}: not empty ({strangers[0]}) and not begun by phasefold; give a new or empty folder")
    return False


def _plan_in(path: Path, key: str) -> str | None:
    try:
        value = json.loads(path.read_bytes())
        return value.get(key) if isinstance(value, dict) else None
    except (OSError, ValueError):
        return None


def check_place(source: Path, out: Path) -> None:
    """Refuse an output inside the source, or around it."""
    inner, outer = out.resolve(), source.resolve()
    if inner == outer or inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise PlanError(f"{out}: lies inside the source {source} or around it; give a folder apart from it")


def check_space(out: Path, nbytes: int) -> None:
    """Refuse a job for which the disk is too small, before it starts."""
    place = out
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < nbytes:
        raise PlanError(f"{out}: needs {nbytes / 1e9:,.1f} GB more, the disk has {free / 1e9:,.1f} GB free")


@contextlib.contextmanager
def claim(out: Path, plan: Plan) -> Iterator[None]:
    """Hold the folder for this job: make it, write the claim, lock it against a second process."""
    with writing(out):
        (out / WORK).mkdir(parents=True, exist_ok=True)
        flush_folder(out)
        flush_folder(out.resolve().parent)
        lock = os.open(out / WORK / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ResumeError(f"{out}: another process is working on it") from None
        with writing(out):
            if not (out / WORK / "job.json").exists():
                job = {"plan": plan.digest, "recipe": plan.recipe.name, "source": plan.checkpoint.folder.name}
                atomic_write(out / WORK / "job.json", json.dumps(job).encode())
        yield
    finally:
        os.close(lock)


def record_path(out: Path, file: str) -> Path:
    """Where the record of a finished shard lies."""
    return out / WORK / f"{file}.json"


def finished_shards(out: Path, plan: Plan) -> dict[str, Mapping[str, Any]]:
    """Records of the shards that are done: recorded, renamed and of the planned size."""
    done = {}
    for shard in plan.shards:
        path = out / shard.file
        with contextlib.suppress(OSError, ValueError):
            record = json.loads(record_path(out, shard.file).read_bytes())
            if path.stat().st_size == shard.size and record["bytes"] == shard.size:
                done[shard.file] = record
    return done


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
    shutil.rmtree(out / WORK, ignore_errors=True)
    flush_folder(out)


def to_json(value: Any, indent: int | None = None) -> bytes:
    """JSON as this project writes it: UTF-8, a newline at the end."""
    return (json.dumps(value, indent=indent, ensure_ascii=False) + "\n").encode()


def file_entry(data: bytes) -> dict[str, Any]:
    """The manifest's entry for a small file."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def copy_side_file(source: Path, target: Path) -> dict[str, Any]:
    """Copy a side file as bytes; -> its entry in the manifest."""
    data = read_file(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(target, data)
    return file_entry(data)


def check_finished(out: Path) -> Manifest:
    """The manifest of a finished artifact whose files are all there in their sizes. Raises ResumeError otherwise."""
    manifest = read_manifest(out)
    for name, entry in manifest.files.items():
        if not (out / name).is_file() or (out / name).stat().st_size != entry["bytes"]:
            raise ResumeError(f"{out}: was finished, but {name} is missing or has another size; give a new folder")
    return manifest
