"""The statistics folder while a job runs: claimed by one job, locked, filled layer by layer, gone on with after a kill.

`.work/` holds the claim, a lock, the hidden states behind the last finished layer and, while a layer runs, what it
needs of every token. `state.json` is replaced when a layer is finished: at any moment it names files that are whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ResumeError
from ..formats.checkpoint import Checkpoint
from ..formats.statistics import STATISTICS, open_statistics
from ..quantize.output import atomic_write, flush_folder, locked, refuse_changed, stamps, to_json, writing

WORK = ".work"
_JOB, _STATE = "job.json", "state.json"


class Work:
    """One job's folder. job: what identifies it, the first part of statistics.json."""

    def __init__(self, out: Path, job: Mapping[str, Any], checkpoint: Checkpoint) -> None:
        self.out, self.job = out, dict(job)
        self.folder = out / WORK
        self._source = checkpoint

    def finished(self) -> dict[str, Any] | None:
        """statistics.json where this very job is done, None where it is not. ResumeError for another's folder."""
        if self.out.exists() and not self.out.is_dir():
            raise ResumeError(f"{self.out}: is a file; give a folder that is new or empty")
        if not self.out.is_dir():
            return None
        if (self.out / STATISTICS).exists():
            about = dict(open_statistics(self.out).about)
            if changed := self._changed(about):
                raise ResumeError(f"{self.out}: holds statistics of another job ({changed} differs); give a new folder")
            shutil.rmtree(self.folder, ignore_errors=True)
            return about
        if (self.folder / _JOB).exists():
            if changed := self._changed(_read(self.folder / _JOB).get("job", {})):
                raise ResumeError(
                    f"{self.out}: belongs to another job ({changed} differs); give another folder, or delete this one"
                )
            return None
        strangers = sorted(entry.name for entry in os.scandir(self.out) if entry.name != WORK)
        if strangers:
            raise ResumeError(f"{self.out}: not empty ({strangers[0]}) and not begun by phasefold; give a new folder")
        return None

    def _changed(self, other: Mapping[str, Any]) -> str | None:
        """What differs first between this job and another one."""
        for key, value in self.job.items():
            if other.get(key) != value:
                inner = value if isinstance(value, dict) else {}
                theirs = other.get(key) if isinstance(other.get(key), dict) else {}
                names = [name for name in inner if isinstance(theirs, dict) and theirs.get(name) != inner[name]]
                return f"{key}.{names[0]}" if names and theirs else key
        return None

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold the folder for this job, with the claim written."""
        with locked(self.out, self.folder):
            if self.finished() is not None:  # asked anew: another process may have had the folder since
                raise ResumeError(f"{self.out}: another process has just finished it; give the same command again")
            self._note()
            yield

    def _note(self) -> None:
        """Write the claim. ResumeError where layers are done and a file of the source has changed since."""
        files = stamps(self._source)
        claim = to_json({"job": self.job, "files": files})
        path = self.folder / _JOB
        with writing(self.out):
            if path.exists() and path.read_bytes() == claim:
                return
            if done := len(self.done()):
                before = _read(path).get("files")
                refuse_changed(self.out, before, files, self._source, f"{done} finished layer{'s' if done > 1 else ''}")
            (self.folder / _STATE).unlink(missing_ok=True)
            atomic_write(path, claim)

    def done(self) -> list[dict[str, Any]]:
        """Entries of the layers that are finished; none where a file of theirs has gone or has another size."""
        if not (self.folder / _STATE).exists():
            return []
        entries: list[dict[str, Any]] = _read(self.folder / _STATE).get("layers", [])
        for entry in entries:
            path = self.out / entry["file"]
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                return []
        return entries

    def note_done(self, entries: list[dict[str, Any]]) -> None:
        """A layer is finished, its file and the hidden states behind it are on the disk."""
        with writing(self.out):
            atomic_write(self.folder / _STATE, to_json({"layers": entries}))

    def tidy(self, keep: set[str]) -> None:
        """Delete whatever an interrupted run has left in the work folder."""
        with writing(self.out):
            for path in self.folder.iterdir():
                if path.name not in keep | {_JOB, _STATE, "lock"}:
                    path.unlink()
            for path in self.out.glob("*.partial"):
                path.unlink()

    def remove(self) -> None:
        """The job is done, or given up with nothing to go on with: nothing but finished statistics is left."""
        if not (self.out / STATISTICS).exists():
            for path in self.out.glob("layer-*"):
                path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        flush_folder(self.out)

    def held_bytes(self) -> int:
        """What the folder has on the disk already."""
        if not self.out.is_dir():
            return 0
        return sum(path.stat().st_blocks * 512 for path in self.out.rglob("*") if path.is_file())


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(path.read_bytes())
        if isinstance(value, dict):
            return value
    return {}
