"""A repo as the place of a checkpoint: its small files in huggingface_hub's cache, its shards read where they are.

The commit is settled once, when the repo is opened, and everything is read at that commit.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from ..errors import HubError
from ..formats.checkpoint import INDEX, MANIFEST, NO_SIDE_FILE, WORK, Place, Range, Repo, header_length, natural
from .api import Address, client
from .fanout import mapped
from .patience import Notice, patient, telling
from .pieces import items_of
from .ranges import fetch
from .tree import Entry, holds, of_file, read_tree
from .window import Window, check_disk, limit_for

#: read at first of each shard: most headers are shorter
_FIRST = 1 << 17
_LARGE = 64 << 20
_THREADS = 8  # requests at a time: small ones, which wait more than they carry


@dataclass(frozen=True)
class RepoShards:
    """The shards of a repo at a commit. It can be sent to other processes, which then ask the Hub themselves.

    files: shard -> what the Hub says of it, in natural order. window: the folder in which shards wait that are read
    whole, or None for a temporary one, and the bytes that may lie there (None: see `Window`). notice: told of delays.
    """

    repo: str
    revision: str
    files: Mapping[str, Entry]
    window: Path | None = None
    window_bytes: int | None = None
    notice: Notice | None = None

    def names(self) -> Sequence[str]:
        """See `Shards`."""
        return list(self.files)

    def heads(self, files: Sequence[str]) -> Iterator[tuple[int, bytes]]:
        """See `Shards`."""
        return iter(mapped(partial(self._head, notice=self.notice), files, _THREADS))

    def _head(self, file: str, notice: Notice | None) -> tuple[int, bytes]:
        return _head(self.repo, self.revision, file, self.files[file].nbytes, notice)

    def samples(self, places: Mapping[str, Sequence[int]], nbytes: int) -> list[bytes]:
        """See `Shards`."""
        wanted = [(file, at, min(at + nbytes, self.files[file].nbytes)) for file in places for at in places[file]]
        found = mapped(lambda one: bytes(self._fetch(*one)), wanted, 2 * _THREADS)
        parts: dict[str, list[bytes]] = {file: [] for file in places}
        for (file, _, _), part in zip(wanted, found, strict=True):
            parts[file].append(part)
        return [b"".join(part) for part in parts.values()]

    def _fetch(self, file: str, start: int, stop: int) -> bytearray:
        return fetch(self.repo, self.revision, file, start, stop, notice=self.notice) if stop > start else bytearray()

    def stamp(self, file: str) -> list[int | str]:
        """Its size and its hash."""
        entry = self.files[file]
        return [entry.nbytes, entry.sha256 or entry.oid]

    def sha256(self, file: str) -> str | None:
        """As the Hub has it, where it stores the shard as LFS."""
        return self.files[file].sha256

    def scratch(self, order: Sequence[tuple[str, Sequence[Range]]], out: Path) -> int:
        """See `Shards`. Raises HubError where the window, or another disk that it is on, is too small for this."""
        items = items_of(order, self.files, Path())
        if not items:
            return 0
        need = min(limit_for(self.repo, items, order, self.window_bytes), sum(item.size for item in items))
        if self.window is None:
            return 0
        need -= sum(path.stat().st_blocks * 512 for path in self.window.rglob("*") if path.is_file())
        if _disk(self.window) == _disk(out):
            return max(need, 0)
        check_disk(self.window, need)
        return 0

    def absolute(self) -> RepoShards:
        """See `Shards`."""
        return self if self.window is None else replace(self, window=self.window.absolute())

    def open(self) -> Window:
        """See `Shards`."""
        return Window(self.repo, self.revision, self.files, self.window, self.window_bytes, self.notice)


def _disk(place: Path) -> int:
    place = place.absolute()
    while not place.exists():
        place = place.parent
    return place.stat().st_dev


@lru_cache(maxsize=4096)  # of a commit they do not change, and some verbs open a checkpoint more than once
def _head(repo: str, revision: str, file: str, size: int, notice: Notice | None) -> tuple[int, bytes]:
    begun = bytes(fetch(repo, revision, file, 0, min(size, _FIRST), notice=notice)) if size else b""
    end = 8 + header_length(begun[:8], size, f"{repo}/{file}")
    if end > len(begun):
        begun += fetch(repo, revision, file, len(begun), end, notice=notice)
    return size, begun[8:end]


def open_repo(
    address: Address,
    *,
    sides: bool = True,
    revision: str | None = None,
    window: Path | None = None,
    window_bytes: int | None = None,
    notice: Notice | None = None,
) -> Place:
    """A repo at the commit that its revision is now, its small files fetched and held against the Hub's hashes.

    sides: all side files are needed; else large ones (films, archives) stay where they are.
    revision: the commit, where that is known already: see `pinned`. window, window_bytes, notice: see `RepoShards`.
    Raises HubError where it cannot be had.
    """
    api = client()
    what = f"{address.repo}@{revision[:12]} (with which this was begun, or made)" if revision else str(address)
    revision = revision or commit_of(address, notice)
    tree = patient(what, lambda: read_tree(api, address.repo, revision), notice)
    names = [path for path in tree if path.endswith(".safetensors") and "/" not in path]
    shards = {file: tree[file] for file in sorted(names, key=natural)}
    small = [path for path in tree if path not in shards and _is_small(path, tree[path].nbytes, sides)]
    if "config.json" not in tree:
        raise HubError(f"{address}: no config.json in it; give the repo of a checkpoint that is whole")
    with telling(notice) if notice else contextlib.nullcontext():
        got = mapped(lambda path: _cached(address.repo, revision, path, tree[path], notice), small, _THREADS)
    folder = got[small.index("config.json")].parent
    found = RepoShards(address.repo, revision, shards, window, window_bytes, notice)
    return Place(
        folder,
        found,
        f"{address.repo}@{revision[:12]}",
        Repo(address.repo, revision, address.revision),
        frozenset(small),
    )


def pinned(out: Path, address: Address) -> str | None:
    """The commit with which an unfinished job in an output folder was begun; None: there is none.

    A branch may move on while a job takes its hours: it goes on with what it began with.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        name, revision, asked = json.loads((out / WORK / "job.json").read_bytes())["repo"]
        return str(revision) if (name, asked) == tuple(address) else None
    return None


def made_from(artifact: Path, address: Address) -> str | None:
    """The commit of a repo that an artifact was made from; None: of no such repo, or a revision is asked for."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        source = json.loads((artifact / MANIFEST).read_bytes())["source"]
        return str(source["revision"]) if (source["repo"], None) == tuple(address) else None
    return None


def commit_of(address: Address, notice: Notice | None = None) -> str:
    """The commit that a branch or tag is now. Raises HubError where there is none."""
    ask = partial(client().repo_info, address.repo, revision=address.revision)
    sha = patient(str(address), lambda: ask().sha, notice, first=True)
    if not sha:
        raise HubError(f"{address}: the Hub does not say which commit that is")
    return sha


def _is_small(path: str, nbytes: int, sides: bool) -> bool:
    """Whether a file is one of those that lie beside weights (see `side_files`), and is needed."""
    if path in ("config.json", INDEX, MANIFEST):
        return True
    hidden = any(part.startswith(".") for part in path.split("/"))
    return not (hidden or path.endswith(NO_SIDE_FILE)) and (sides or nbytes <= _LARGE)


def _cached(repo: str, revision: str, path: str, entry: Entry, notice: Notice | None) -> Path:
    """A small file in huggingface_hub's cache, held against its hash: the library looks at sizes only."""
    from huggingface_hub import hf_hub_download

    what = f"{repo}@{revision[:12]}: {path}"
    for again in (False, True):
        get = partial(hf_hub_download, repo, path, revision=revision, force_download=again)
        found = Path(patient(what, get, notice))
        if holds(entry, of_file(found)):
            return found
    raise HubError(f"{what}: what the Hub sends does not have the hash that it names")
