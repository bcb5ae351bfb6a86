"""What a Hub holds: repos with their branches, tags and commits, and the bytes of files on disk under their hashes."""

from __future__ import annotations

import datetime
import hashlib
import json
import shutil
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

PIECE = 1 << 16
ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
_BEGAN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


class RefusedError(Exception):
    """What the Hub answers with instead: a status, its code of the error (a header) or "", and what it says."""

    def __init__(self, status: int, code: str, message: str, commit: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.commit = status, code, message, commit


class Entry(NamedTuple):
    """A file of a commit. blob: git's SHA-1 (an LFS file's: of its pointer). sha256: of an LFS file, else None."""

    blob: str
    size: int
    sha256: str | None
    pointer: int = 0

    @property
    def oid(self) -> str:
        """What its ETag says, and what its bytes are stored under."""
        return self.sha256 or self.blob

    def told(self, path: str) -> dict[str, Any]:
        """As the tree has it."""
        lfs = {"oid": self.sha256, "size": self.size, "pointerSize": self.pointer}
        return {"type": "file", "oid": self.blob, "size": self.size, "path": path} | (
            {"lfs": lfs} if self.sha256 else {}
        )


class Commit(NamedTuple):
    """files: path in the repo -> oid: the sha256 of an LFS file, git's SHA-1 of another."""

    sha: str
    title: str
    message: str
    parent: str | None
    date: str
    entries: dict[str, Entry]

    @property
    def files(self) -> dict[str, str]:
        return {path: entry.oid for path, entry in self.entries.items()}

    def told(self) -> dict[str, Any]:
        authors = [{"user": "tester"}]
        return {"id": self.sha, "title": self.title, "message": self.message, "authors": authors, "date": self.date}


@dataclass
class Repo:
    """lfs: sha256 -> size of objects that were uploaded to it. announced: of those that may be."""

    name: str
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    lfs: dict[str, int] = field(default_factory=dict)
    announced: dict[str, int] = field(default_factory=dict)


def git_sha(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def lfs_entry(sha256: str, size: int) -> Entry:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
    return Entry(git_sha(pointer), size, sha256, len(pointer))


class Store:
    """Repos by name; one lock, so that commits follow each other.

    tensor_bytes, big_bytes: .safetensors and files of more bytes than that are LFS files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.repos, self.lock = folder, dict[str, Repo](), threading.RLock()
        self.tensor_bytes, self.big_bytes = 1000, 10_000
        for name in ("objects", "coming"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def is_lfs(self, path: str, size: int) -> bool:
        return size > self.big_bytes or (path.endswith(".safetensors") and size > self.tensor_bytes)

    def place(self, oid: str) -> Path:
        return self.folder / "objects" / oid

    def coming(self) -> Path:
        """A place of its own for bytes that are not known yet."""
        return self.folder / "coming" / uuid.uuid4().hex

    def keep(self, data: bytes) -> Entry:
        """A small file, under git's SHA-1."""
        entry = Entry(git_sha(data), len(data), None)
        self.place(entry.blob).write_bytes(data)
        return entry

    def keep_lfs(self, repo: Repo, came: Path, sha256: str, size: int) -> None:
        """What came becomes an LFS object of the repo, if it is what its oid says."""
        digest, count = hashlib.sha256(), came.stat().st_size
        with came.open("rb") as stream:
            while piece := stream.read(PIECE):
                digest.update(piece)
        if (digest.hexdigest(), count) != (sha256, size):
            came.unlink()
            raise RefusedError(422, "", f"{sha256}: {count} bytes came that hash to {digest.hexdigest()}")
        came.replace(self.place(sha256))
        with self.lock:
            repo.lfs[sha256] = size

    def create(self, name: str, private: bool, *, empty: bool = False) -> Repo:
        """A repo, with the commit of a .gitattributes that the Hub begins it with."""
        with self.lock:
            if name in self.repos:
                raise RefusedError(409, "", "You already created this model repo")
            repo = self.repos[name] = Repo(name, private)
            if not empty:
                self.put(repo, "main", {".gitattributes": self.keep(ATTRIBUTES)}, "initial commit", "")
        return repo

    def put(self, repo: Repo, branch: str, entries: Mapping[str, Entry], title: str, message: str) -> Commit:
        """One commit with these files upon a branch; begins the branch where there is none."""
        with self.lock:
            parent, count = repo.branches.get(branch), len(repo.commits)
            told = json.dumps([repo.name, parent, title, message, count, sorted(entries.items())])
            sha = hashlib.sha1(told.encode(), usedforsecurity=False).hexdigest()
            date = (_BEGAN + datetime.timedelta(seconds=count)).strftime("%Y-%m-%dT%H:%M:%S.000Z")
            commit = Commit(sha, title, message, parent, date, dict(sorted(entries.items())))
            repo.commits[sha], repo.branches[branch] = commit, sha
        return commit

    def add(self, name: str, files: Path | Mapping[str, bytes | Path], revision: str, private: bool) -> Commit:
        """Files of a folder, or by their paths, in one commit upon what the branch has."""
        if isinstance(files, Path):
            files = {str(one.relative_to(files)): one for one in sorted(files.rglob("*")) if one.is_file()}
        with self.lock:
            repo = self.repos.get(name) or self.create(name, private, empty=True)
            base = repo.branches.get(revision) or repo.branches.get("main")
            entries = dict(repo.commits[base].entries) if base else {}
            for path, given in files.items():
                size = len(given) if isinstance(given, bytes) else given.stat().st_size
                if not self.is_lfs(path, size):
                    entries[path] = self.keep(given if isinstance(given, bytes) else given.read_bytes())
                    continue
                came = self.coming()
                if isinstance(given, bytes):
                    came.write_bytes(given)
                else:
                    shutil.copyfile(given, came)
                with came.open("rb") as stream:
                    sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
                self.keep_lfs(repo, came, sha256, size)
                entries[path] = lfs_entry(sha256, size)
            if base:
                repo.branches.setdefault(revision, base)
            return self.put(repo, revision, entries, f"Add {len(files)} files", "")

    def at(self, repo: Repo, revision: str) -> Commit:
        """The commit that a branch, a tag, or the first characters of a sha stand for."""
        name = revision.removeprefix("refs/heads/").removeprefix("refs/tags/")
        with self.lock:
            sha = repo.branches.get(name) or repo.tags.get(name)
            if sha is None and len(name) >= 7:
                sha = next((one for one in repo.commits if one.startswith(name)), None)
        if sha is None:
            raise RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo.commits[sha]

    def history(self, repo: Repo, commit: Commit) -> list[Commit]:
        """Newest first."""
        made = [commit]
        while (parent := made[-1].parent) is not None:
            made.append(repo.commits[parent])
        return made

    def entry(self, commit: Commit, path: str) -> Entry:
        if path not in commit.entries:
            raise RefusedError(404, "EntryNotFound", "Entry not found", commit.sha)
        return commit.entries[path]

    def changed(self, repo: Repo, before: Mapping[str, Entry], key: str, value: dict[str, Any], data: bytes) -> Any:
        """The files of a commit after one line of a request for one. data: of a small file."""
        entries, path = dict(before), value["path"]
        if key == "file":
            if self.is_lfs(path, len(data)):
                raise RefusedError(400, "", f"{path}: {len(data)} bytes, which LFS is for")
            entries[path] = self.keep(data)
        elif key == "lfsFile":
            size = repo.lfs.get(value["oid"])
            if size is None or size != value.get("size", size):
                raise RefusedError(422, "", f"{path}: no LFS object {value['oid']} of {value.get('size')} bytes")
            entries[path] = lfs_entry(value["oid"], size)
        elif key in ("deletedFile", "deletedFolder"):
            gone = [one for one in entries if one == path or one.startswith(path.rstrip("/") + "/")]
            if not gone or (key == "deletedFile") != (gone == [path]):
                raise RefusedError(404, "EntryNotFound", "A file with this name doesn't exist")
            entries = {one: entry for one, entry in entries.items() if one not in gone}
        else:
            raise RefusedError(400, "", f"{key}: no operation of a commit")
        return entries


def folders(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Path of each folder -> git would have a tree's SHA-1 here; this has one of what lies in it."""
    within = dict[str, list[tuple[str, str]]]()
    for path, entry in entries.items():
        parts = path.split("/")
        for depth in range(1, len(parts)):
            within.setdefault("/".join(parts[:depth]), []).append((path, entry.blob))
    return {name: git_sha(json.dumps(found).encode()) for name, found in within.items()}
