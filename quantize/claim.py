"""Who may work in an output folder: one job, as a whole by one process, or in parts by many on any number of hosts.

The claim, `.phasefold/job.json`, says which job it is and of which source files. A whole conversion holds the folder's
lock alone. Parts share it, and each holds one of its own: a part that is started twice is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .. import __version__
from ..errors import ResumeError
from ..formats.checkpoint import WORK
from .output import (
    atomic_write,
    begun,
    finished_shards,
    flush_folder,
    locked,
    record_path,
    refuse_changed,
    stamps,
    take,
    to_json,
    writing,
)
from .plan import Plan

JOB = "job.json"
_PATIENCE = 60.0  # seconds for a claim to be written by another part


class Claim(NamedTuple):
    """What was found when a job took hold of its folder.

    given_up: finished shards that are made anew. algebra: where GPTQ of this job has run, this run included, as torch
    names devices; empty for a job without GPTQ.
    """

    given_up: int
    algebra: list[str]


@contextlib.contextmanager
def claim(out: Path, plan: Plan, algebra: Iterable[str] = ("cpu",)) -> Iterator[Claim]:
    """Hold the folder for this job, with the claim written: see `_note_job`."""
    with locked(out, out / WORK):
        with writing(out):
            found = _note_job(out, plan, algebra)
        yield found


@contextlib.contextmanager
def share(out: Path, plan: Plan, part: str, algebra: Iterable[str] = ("cpu",)) -> Iterator[Claim]:
    """Hold the folder for one part of this job, beside other parts; the first one writes the claim.

    Raises ResumeError where the claim says otherwise than this process would: see `agree`.
    """
    name = f"lock-part-{part.replace('/', '-of-')}"
    whole = "it as a whole; without --part, or to finish it"
    with locked(out, out / WORK, shared=True, what=whole), locked(out, out / WORK, name, what=f"part {part} of it"):
        with writing(out), _alone(out):
            found = _join(out, plan, algebra)
        yield found


@contextlib.contextmanager
def claim_done(out: Path, plan: Plan) -> Iterator[Claim]:
    """Hold the folder in order to finish what parts have done; no claim is written, and none is given up."""
    path = out / WORK / JOB
    if not path.exists():
        raise ResumeError(f"{out}: nothing is begun in it; give the same command with --part 1/1, or without --finish")
    with locked(out, out / WORK):
        yield Claim(0, agree(out, plan).get("algebra", []))


def agree(out: Path, plan: Plan) -> dict[str, Any]:
    """The claim that lies in a folder; {} where there is none.

    Raises ResumeError where it is of another plan, of another version of phasefold, or of other files of the source.
    """
    job = begun(out / WORK / JOB)
    if not job:
        return {}
    if not isinstance(job.get("source"), dict):
        raise ResumeError(f"{out}: its claim is damaged ({WORK}/{JOB}); delete the folder to begin anew")
    if job.get("plan") != plan.digest:
        raise ResumeError(f"{out}: belongs to another job, begun with recipe {job.get('recipe')}; give another folder")
    if job.get("tool") != __version__:
        raise ResumeError(
            f"{out}: begun by phasefold {job.get('tool')}, this is {__version__}; parts of a job need the same version "
            "on all hosts (without --part, the job would be made anew)"
        )
    refuse_changed(out, job.get("source"), stamps(plan.checkpoint), plan.checkpoint, "finished shards")
    return job


def _join(out: Path, plan: Plan, algebra: Iterable[str]) -> Claim:
    """Write the claim, or find that it is this job's."""
    path, before = out / WORK / JOB, agree(out, plan)
    job = before or _job(plan)
    if _has_gptq(plan):
        job = job | {"algebra": sorted({*algebra, *before.get("algebra", ())})}
    if job != before:
        atomic_write(path, to_json(job))
    return Claim(0, job.get("algebra", []))


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Among parts, one at a time. Raises ResumeError where another one does not let go of it."""
    deadline = time.monotonic() + _PATIENCE
    lock = os.open(out / WORK / "lock-claim", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while not take(lock, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise ResumeError(f"{out}: another part has been writing the claim for {_PATIENCE:.0f} s; is it alive?")
            time.sleep(0.02)
        yield
    finally:
        os.close(lock)


def settled(plan: Plan, out: Path, sent: str | None = None) -> dict[str, Mapping[str, Any]]:
    """The records of all shards, once a job is done. sent: see `record_of`.

    Raises ResumeError where one is missing, and where a file of the source is no longer what the claim says: it has
    changed while it was read, and nobody knows which shards are of the one and which of the other.
    """
    job, now, total = begun(out / WORK / JOB), stamps(plan.checkpoint), len(plan.shards)
    if changed := [file for file, stamp in now.items() if job.get("source", {}).get(file) != stamp]:
        raise ResumeError(
            f"{plan.checkpoint.label}: {changed[0]} has changed while it was read; once it is as it should be, give "
            "the same command again (without --part or --finish): what was made of it is made anew"
        )
    probe = out / WORK / f"looked-{os.getpid()}"
    for _ in range(2):
        records = finished_shards(out, plan, sent)
        if len(records) == total:
            return records
        probe.touch()  # a network's cache may say of a file that another host has made that it is not there
        probe.unlink()
        flush_folder(out / WORK)
    missing = next(shard.file for shard in plan.shards if shard.file not in records)
    raise ResumeError(
        f"{out}: {total - len(records):,} of {total:,} shards are missing, the first is {missing}; give the command of "
        "each part again, or the whole one without --part"
    )


def _job(plan: Plan) -> dict[str, Any]:
    source, repo = stamps(plan.checkpoint), plan.checkpoint.place.repo
    job = {"plan": plan.digest, "tool": __version__, "recipe": plan.recipe.name, "source": source}
    return job | ({"repo": list(repo)} if repo else {})


def _has_gptq(plan: Plan) -> bool:
    return any(unit.method == "gptq" for unit in plan.units())


def _note_job(out: Path, plan: Plan, algebra: Iterable[str]) -> Claim:
    """Write the claim, and give up the finished shards that come from a file that has changed.

    The digest of a plan knows the source's headers and some of its weights: a shard that was made from other weights,
    or by another version (then all are), must not end up beside the new ones.
    """
    checkpoint, job = plan.checkpoint, _job(plan)
    path, gone, now = out / WORK / JOB, 0, job["source"]
    found = begun(path)
    if _has_gptq(plan):
        begun_any = any(record_path(out, shard.file).exists() for shard in plan.shards)  # they may lie elsewhere by now
        earlier = found.get("algebra") if begun_any else None
        job["algebra"] = sorted({*algebra, *(earlier if isinstance(earlier, list) else ())})
    places: list[str] = job.get("algebra", [])
    if {key: value for key, value in found.items() if key != "pushed"} == job:
        return Claim(0, places)
    before = found.get("source") if found.get("tool") == __version__ else None
    changed = {file for file in now if not isinstance(before, dict) or before.get(file) != now[file]}
    for shard in plan.shards:
        names = (unit.module + part.suffix for unit in shard.units for part in unit.source)
        if any(checkpoint.tensors[name].file in changed for name in names) and record_path(out, shard.file).exists():
            # first the shard: a record without one is not done, but another's shard under a new record would be
            (out / shard.file).unlink(missing_ok=True)
            flush_folder(out)
            record_path(out, shard.file).unlink()
            gone += 1
    atomic_write(path, to_json(job))
    return Claim(gone, places)
