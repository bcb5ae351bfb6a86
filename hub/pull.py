"""A repo into a folder: at one commit, every file checked, config.json last.

huggingface_hub downloads, into a folder of work within the target; a file moves to its place when its bytes have been
held against the Hub's hash and the manifest's. So what lies in the target under its own name is right, a killed pull
goes on with the rest, and the target does not look whole before it is.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ..errors import HubError, ResumeError, VerifyError
from ..formats.checkpoint import CARD, MANIFEST, natural
from ..formats.manifest import read_manifest
from ..quantize.output import atomic_write, check_space, flush_folder, hash_file, locked, to_json, writing
from .api import Address, asking, client
from .patience import Notice, patient
from .tree import ATTRIBUTES, MARKS, Entry, git_oid, read_tree, weights

WORK = ".phasefold-pull"
_RESERVE = 100_000_000  # bytes of the disk that a pull leaves free


class Pulled(NamedTuple):
    """revision: the commit. files, bytes: what the folder holds of it; downloaded of them, the rest was there."""

    repo: str
    revision: str
    files: int
    bytes: int
    downloaded: int
    downloaded_bytes: int
    skipped: int


def prepare(address: Address, out: Path, notice: Notice | None = None) -> Job:
    """Look at the repo and at the folder; nothing is written. A pull that was begun keeps the commit it was pinned to.

    Raises ResumeError where the folder holds something else, HubError.
    """
    revision = _begun(out, address)
    whole = revision is None and (out / "config.json").exists()
    api = client()
    if revision is None:
        with asking(str(address)):
            revision = str(api.repo_info(address.repo, revision=address.revision).sha)
    tree = patient(str(address), partial(read_tree, api, address.repo, revision), notice)
    return Job(address, revision, out, _files(address, tree), whole, notice)


def _asked(address: Address) -> dict[str, str | None]:
    return {"repo": address.repo, "revision": address.revision}


def _begun(out: Path, address: Address) -> str | None:
    """The commit at which a pull into the folder was begun; None: none was. ResumeError: it holds anything else."""
    if out.exists() and not out.is_dir():
        raise ResumeError(f"{out}: is a file; give a folder that is new or empty")
    path = out / WORK / "pull.json"
    try:
        told = json.loads(path.read_bytes())
        commit = told.pop("commit")
        if told == _asked(address) and isinstance(commit, str):
            return commit
        named = Address(str(told.get("repo")), told.get("revision"))
        raise ResumeError(f"{out}: a pull of {named} was begun there; go on with that, or give another folder")
    except FileNotFoundError:
        strangers = sorted(name for name in os.listdir(out) if name != WORK) if out.is_dir() else []
        if strangers and "config.json" not in strangers:
            raise ResumeError(f"{out}: not empty ({strangers[0]}), not begun by `pull`; give a new folder") from None
        return None
    except (ValueError, KeyError, AttributeError, OSError):
        raise ResumeError(f"{path}: cannot be read; delete {out} to begin anew") from None


def _files(address: Address, tree: Mapping[str, Entry]) -> dict[str, Entry]:
    """What is pulled: all but git's own file. HubError for a path that leads out of a folder, or for nothing."""
    found = {path: entry for path, entry in tree.items() if path != ATTRIBUTES}
    for path in found:
        parts = PurePosixPath(path).parts
        if path.startswith("/") or ".." in parts or "\\" in path or parts[0] == WORK:
            raise HubError(f"{address}: holds a file named {path!r}, which has no place in a folder; not pulled")
    if not found:
        raise HubError(f"{address}: holds no file; nothing to pull")
    return found


def _order(path: str) -> tuple[bool, bool, list[tuple[str, int]] | list[tuple[int, str]]]:
    """Weights first, then side files, then what makes a folder look whole, config.json at the end."""
    return path in MARKS, not path.endswith(".safetensors"), natural(path)


class Job:
    """One pull into one folder. whole: that holds a checkpoint already, which can only be this one."""

    def __init__(
        self,
        address: Address,
        revision: str,
        out: Path,
        files: Mapping[str, Entry],
        whole: bool,
        notice: Notice | None,
    ) -> None:
        self.address, self.revision, self.out, self.files = address, revision, out, files
        self.whole, self.notice = whole, notice
        self.api = client()
        self.stage = out / WORK / "files"
        self.listed: Mapping[str, Mapping[str, object]] = {}
        self._right: set[str] = set()

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return sum(entry.nbytes for entry in self.files.values())

    def carry_out(self, progress: Callable[[int], None] | None = None) -> Pulled:
        """Download what is missing. progress: told of bytes that are in place.

        Raises ResumeError where the folder holds something else, PlanError where there is no room, HubError.
        """
        if self.whole:
            if left := self._compare():
                with locked(self.out, self.out / WORK), writing(self.out):
                    for path in left:
                        self._fetch(path)
                        self._place(path)
            shutil.rmtree(self.out / WORK, ignore_errors=True)  # also of a pull that was killed as it ended
        else:
            with locked(self.out, self.out / WORK), writing(self.out):
                left = self._fill(progress)
                shutil.rmtree(self.out / WORK)
                flush_folder(self.out)
        nbytes = sum(self.files[path].nbytes for path in left)
        there = len(self.files) - len(left)
        return Pulled(self.address.repo, self.revision, len(self.files), self.total, len(left), nbytes, there)

    def _fill(self, progress: Callable[[int], None] | None) -> list[str]:
        """-> the files that were missing."""
        atomic_write(self.out / WORK / "pull.json", to_json({**_asked(self.address), "commit": self.revision}))
        self._clear()
        left = [path for path in sorted(self.files, key=_order) if not self._is_done(path)]
        missing = sum(self.files[path].nbytes for path in left)
        check_space(self.out, missing - self._held() + (_RESERVE if left else 0))
        if MANIFEST in left:
            self._fetch(MANIFEST)
        self._read_manifest()
        if progress:
            progress(self.total - missing)
        for path in left:
            self._fetch(path)
            if path not in MARKS:
                self._place(path)
            if progress:
                progress(self.files[path].nbytes)
        for mark in reversed(MARKS):  # config.json last
            if mark in left:
                self._place(mark)
        return left

    def _compare(self) -> list[str]:
        """A folder with a checkpoint in it: all of it is hashed. ResumeError where it is another one.

        -> the card and results of `eval`, which are about it and no part of it, where the repo has others.
        """
        about = []
        known = {path.relative_to(self.out).as_posix() for path in self.out.rglob("*") if path.is_file()}
        odd = [path for path in weights(sorted(known)) if path not in self.files]
        for path in (*odd, *sorted(self.files, key=lambda path: self.files[path].nbytes)):
            if path not in odd and path in known and self._is_done(path) and not self._fault(path, self.out / path):
                continue
            if path != CARD and not path.startswith("evals/"):
                raise ResumeError(
                    f"{self.out}: holds another checkpoint than {self.address} at {self.revision[:12]} "
                    f"({path} differs); give a new folder"
                )
            about.append(path)
        return about

    def _clear(self) -> None:
        """Take away what a killed download left: the library begins such a file anew, under another name."""
        for path in self.stage.glob(".cache/huggingface/download/**/*.incomplete"):
            path.unlink()

    def _held(self) -> int:
        """Bytes of files that were downloaded and not yet moved to their place."""
        found = [self.stage / path for path in self.files if (self.stage / path).is_file()]
        return sum(path.stat().st_size for path in found)

    def _is_done(self, path: str) -> bool:
        """Whether a file is in its place; it was checked before it came there."""
        target = self.out / path
        return target.is_file() and target.stat().st_size == self.files[path].nbytes

    def _read_manifest(self) -> None:
        """Take the manifest for what the files must be. HubError where the repo holds something else."""
        folder = self.out if self._is_done(MANIFEST) else self.stage
        if MANIFEST not in self.files:
            return
        try:
            self.listed = read_manifest(folder).files
        except VerifyError as error:
            raise HubError(f"{self.address}: {error}; the repo is not what was pushed") from None
        for path, entry in self.listed.items():
            if path == CARD:
                continue
            found = self.files.get(path)
            if found is None or found.nbytes != entry["bytes"] or found.sha256 not in (None, entry.get("sha256")):
                what = "is missing" if found is None else "is another file"
                raise HubError(f"{self.address}: {path} {what}, by its own {MANIFEST}; it has to be pushed again")

    def _fetch(self, path: str) -> None:
        """Download a file into the folder of work and check it; a wrong one is fetched once more."""
        if path in self._right:
            return
        what = f"{self.address.repo}/{path}"
        for again in (False, True):
            patient(what, partial(self._download, path, again), self.notice)
            if (fault := self._fault(path, self.stage / path)) is None:
                self._right.add(path)
                return
            (self.stage / path).unlink(missing_ok=True)
            if self.notice and not again:
                self.notice(f"{what}: {fault}; fetching it again")
        raise HubError(f"{what}: {fault}, twice; the Hub or the line to it changes bytes: try again later")

    def _download(self, path: str, again: bool) -> None:
        self.api.hf_hub_download(
            self.address.repo, path, revision=self.revision, local_dir=self.stage, force_download=again
        )

    def _fault(self, path: str, file: Path) -> str | None:
        """What is wrong with a downloaded file; the one pass over its bytes."""
        found, listed = self.files[path], self.listed.get(path) if path != CARD else None
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != found.nbytes:
                return f"{size:,} bytes came, the Hub has {found.nbytes:,}"
            sha256 = hash_file(stream.fileno(), size)
            if found.sha256 is not None and sha256 != found.sha256:
                return "other bytes came than the Hub's sha256 says"
            if found.sha256 is None and git_oid(stream.read()) != found.oid:
                return "other bytes came than git's hash says"
        if listed is not None and sha256 != listed.get("sha256"):
            return f"its sha256 is not the one in {MANIFEST}"
        return None

    def _place(self, path: str) -> None:
        """Move a checked file to its place."""
        target = self.out / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(self.stage / path, "rb") as stream:
            os.fsync(stream.fileno())
        os.replace(self.stage / path, target)
        flush_folder(target.parent)
