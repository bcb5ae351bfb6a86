"""What lies in a repo at a revision: sizes and hashes as the Hub knows them, held against what is meant to be there."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..formats.checkpoint import INDEX, MANIFEST, OTHER_WEIGHTS, STRAY_CONFIG
from ..quantize.output import hash_file

if TYPE_CHECKING:
    from huggingface_hub import HfApi

#: what makes a folder look like a whole checkpoint; it comes last, and goes first
MARKS = ("config.json", INDEX, MANIFEST)
ATTRIBUTES = ".gitattributes"  # git's own: which files are stored as LFS


SMALL = 10_000_000  # no file above that is stored by git itself


class Entry(NamedTuple):
    """A file in a repo. sha256: of its content where it is stored as LFS (or Xet), else None; oid: git's hash."""

    nbytes: int
    sha256: str | None
    oid: str


class Meant(NamedTuple):
    """A file as it has to be. sha256 and git's oid (for files that are not LFS): None where not known yet."""

    nbytes: int
    sha256: str | None
    oid: str | None = None


def git_oid(data: bytes) -> str:
    """git's name for a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def meant(data: bytes) -> Meant:
    """A small file as it has to be."""
    return Meant(len(data), hashlib.sha256(data).hexdigest(), git_oid(data))


def holds(found: Entry | None, wanted: Meant) -> bool | None:
    """Whether a file in a repo is what it has to be; None: sizes agree and there is no hash that both sides know."""
    if found is None or found.nbytes != wanted.nbytes:
        return False
    pair = (found.sha256, wanted.sha256) if found.sha256 is not None else (found.oid, wanted.oid)
    return None if None in pair else pair[0] == pair[1]


def differing(tree: Mapping[str, Entry], wanted: Mapping[str, Meant]) -> list[str]:
    """Files that are missing, or are certainly something else."""
    return [path for path, one in wanted.items() if holds(tree.get(path), one) is False]


#: files that runtimes read, whoever put them beside the weights
_READ = re.compile(r".*\.(py|jinja|model|tiktoken)|.*(token|vocab|merges|chat_template|processor|generation_config).*")


def disturbing(paths: Iterable[str]) -> list[str]:
    """The files among them that runtimes would read with an artifact that has no such file."""
    return [path for path in paths if _READ.fullmatch(path)]


def weights(paths: Iterable[str]) -> list[str]:
    """The files among them that are weights, indexes of weights, or make a folder look like a checkpoint."""
    ends = (".safetensors", ".safetensors.index.json", *OTHER_WEIGHTS)
    return [path for path in paths if path in (*MARKS, STRAY_CONFIG) or path.endswith(ends)]


def others(tree: Mapping[str, Entry], wanted: Mapping[str, Meant], there: set[str]) -> list[str]:
    """Files of something else: weights, what makes it look whole, what runtimes would read, what has another content.

    there: those that are as wanted. An artifact's own config, index and manifest come last: with one of them there, all
    of it is, or it is not this artifact.
    """
    wrong = [path for path, one in wanted.items() if path in tree and holds(tree[path], one) is False]
    strays = [path for path in (*weights(tree), *disturbing(tree)) if path not in wanted]
    found = sorted({*wrong, *strays}, key=lambda path: (path in MARKS, path))
    return found + [mark for mark in MARKS if mark in tree and mark not in found and len(there) < len(wanted)]


def read_tree(api: HfApi, repo: str, revision: str) -> dict[str, Entry]:
    """Every file at a revision, by path. What the library raises is not caught here."""
    from huggingface_hub import RepoFile
    from huggingface_hub.errors import EntryNotFoundError

    found: dict[str, Entry] = {}
    try:
        for item in api.list_repo_tree(repo, revision=revision, recursive=True):
            if isinstance(item, RepoFile):
                found[item.path] = Entry(item.size, item.lfs.sha256 if item.lfs else None, item.blob_id)
    except EntryNotFoundError:  # a repo without any file
        return {}
    return found


def of_file(path: Path) -> Meant:
    """A file that no manifest knows, as it lies on disk; git's hash too, if it is small. OSError: cannot be read."""
    if path.stat().st_size <= SMALL:
        return meant(path.read_bytes())
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        return Meant(size, hash_file(file.fileno(), size))


def added(operations: Iterable[Any]) -> list[str]:
    """Paths that a commit adds."""
    from huggingface_hub import CommitOperationAdd

    return [one.path_in_repo for one in operations if isinstance(one, CommitOperationAdd)]


def deleted(operations: Iterable[Any]) -> set[str]:
    """Paths that a commit takes away."""
    from huggingface_hub import CommitOperationDelete

    return {one.path_in_repo for one in operations if isinstance(one, CommitOperationDelete)}
