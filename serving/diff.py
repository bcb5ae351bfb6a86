"""What changed between two checkpoints, for review: tensors, storage, config.json, side files, manifests, weights.

From headers and small files alone, unless weights are asked for. Tensors that changed alike are one value, by role, so
that a hundred thousand experts are a line. Of a family that nobody here knows the roles are the tensors' names, with
a star for each number. What is not known to be equal is said to be not compared.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError, VerifyError
from ..families import identify
from ..formats import PLAIN, Part, Shape, recognise
from ..formats.checkpoint import CARD, INDEX, MANIFEST, OTHER_WEIGHTS, STRAY_CONFIG, Checkpoint, Stored
from ..formats.manifest import Manifest, read_manifest
from .diff_weights import Weights, alike, compare_bytes, compare_sha256, sha256_of_shards
from .survey import PARTS

#: keys of a manifest that say what an artifact is; the rest follows from them, or is compared by itself
FACTS = ("tool", "phase", "architecture", "source", "recipe", "shard_bytes", "notes", "extras")


class TensorChange(NamedTuple):
    """Stored tensors of one role that changed alike.

    change: "added", "removed" or "changed" (dtype or shape).
    suffix: the last component of the names, e.g. ".weight_scale". before, after: dtypes; "" where there is none.
    reshaped: whether shapes changed. first: a name, and its shapes before and after (None where it is not there).
    """

    role: str
    change: str
    suffix: str
    before: str
    after: str
    reshaped: bool
    tensors: int
    before_bytes: int
    after_bytes: int
    first: str
    shapes: tuple[Shape | None, Shape | None]


class Storage(NamedTuple):
    """How the modules of one role are stored on both sides: names of formats, of dtypes where no format is known.

    before, after: "" where the module is not there. modules: how many. Sizes with scales and all other parts.
    """

    role: str
    before: str
    after: str
    modules: int
    before_bytes: int
    after_bytes: int


class KeyChange(NamedTuple):
    """A key of a JSON document that changed; `path` has a dot between levels. Lists are compared as a whole.

    change: "added", "removed" or "changed"; the value that is not there is None.
    """

    path: str
    change: str
    before: Any
    after: Any


class FileChange(NamedTuple):
    """A side file that was "added", "removed" or "changed" (other bytes); sizes, None where it is not there."""

    file: str
    change: str
    before_bytes: int | None
    after_bytes: int | None


class Side(NamedTuple):
    """One of the two. manifest: "" without one, "ok", or what is wrong with it."""

    tensors: int
    nbytes: int
    shards: int
    manifest: str


@dataclass(frozen=True, slots=True)
class Diff:
    """Everything that differs, and what both are in short.

    tensors: groups, those of the most bytes first. storage: all roles, also those that did not change.
    moved: tensors that nothing has happened to but that they lie in a shard of another name.
    notes: differences that nothing else tells of.
    """

    before: Side
    after: Side
    tensors: tuple[TensorChange, ...]
    moved: int
    storage: tuple[Storage, ...]
    config: tuple[KeyChange, ...]
    files: tuple[FileChange, ...]
    manifest: tuple[KeyChange, ...]
    weights: Weights
    notes: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether anything is known to differ, be it where a tensor lies."""
        told = (self.tensors, self.config, self.files, self.manifest, self.notes)
        return any(told) or self.moved > 0 or self.weights.differ > 0


def diff(
    before: Checkpoint, after: Checkpoint, *, weights: bool = False, advance: Callable[[int], None] | None = None
) -> Diff:
    """Compare two checkpoints. weights: read and compare what both store alike; `advance` is told of bytes done.

    Raises PhasefoldError where a file cannot be read.
    """
    manifests = _manifest(before), _manifest(after)
    old, new = _known(before), _known(after)
    states = _sides(before, manifests[0]), _sides(after, manifests[1])
    made, other = manifests[0][0], manifests[1][0]
    config = tuple(changed_keys(before.config, after.config))
    if weights:
        known = compare_bytes(before, after, advance)
    else:
        known = compare_sha256(before, after, sha256_of_shards(before, made), sha256_of_shards(after, other))
    tensors = tuple(_tensors(before.tensors, after.tensors, old, new))
    moved = sum(stored.file != after.tensors[name].file for name, stored in alike(before, after))
    return Diff(
        *states,
        tensors,
        moved,
        tuple(_storage(old, new)),
        config,
        tuple(_files(before, after)),
        tuple(changed_keys(_facts(made), _facts(other))) if made and other else (),
        known,
        tuple(_notes(before, after, states, config, known, changed=bool(tensors), moved=moved > 0)),
    )


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any], path: str = "") -> Iterator[KeyChange]:
    """The keys of two JSON objects that differ, at any depth, in the order of the first and then of the second.

    An object that is not there at all is one without keys. 1, 1.0 and true are three values: what reads a config may
    tell them apart.
    """
    for key in dict.fromkeys((*before, *after)):
        here = path + (key if re.fullmatch(r"[\w-]+", key) else json.dumps(key, ensure_ascii=False))
        old, new = before.get(key), after.get(key)
        change = "added" if key not in before else "removed" if key not in after else "changed"
        inner = [value for value, side in ((old, before), (new, after)) if key in side]
        if all(isinstance(value, Mapping) for value in inner) and any(inner):
            yield from changed_keys(old or {}, new or {}, here + ".")
        elif change != "changed" or json.dumps(old, sort_keys=True) != json.dumps(new, sort_keys=True):
            yield KeyChange(here, change, old, new)


def _manifest(checkpoint: Checkpoint) -> tuple[Manifest | None, str]:
    """The manifest where it speaks of this folder as it is, and its state; see `Side.manifest`."""
    if not (checkpoint.folder / MANIFEST).exists():
        return None, ""
    try:
        made = read_manifest(checkpoint.folder)
    except VerifyError as error:
        return None, str(error).removeprefix(f"{checkpoint.folder / MANIFEST}: ")
    shards = {name: entry["bytes"] for name, entry in made.files.items() if name.endswith(".safetensors")}
    if shards != dict(checkpoint.sizes):
        return None, "of other shards than lie there"
    if hashlib.sha256(checkpoint.config_bytes).hexdigest() != made.files.get("config.json", {}).get("sha256"):
        return None, "of another config.json than lies there"
    return made, "ok"


def _facts(made: Manifest) -> dict[str, Any]:
    return {key: getattr(made, key) for key in FACTS}


def _sides(checkpoint: Checkpoint, manifest: tuple[Manifest | None, str]) -> Side:
    return Side(len(checkpoint.tensors), checkpoint.total_size, len(checkpoint.heads), manifest[1])


class _Module(NamedTuple):
    role: str
    format: str
    nbytes: int


def _known(checkpoint: Checkpoint) -> dict[str, _Module]:
    """Every module, or tensor without a weight's ending: its role and its format."""
    modules: dict[str, list[Part]] = {}
    for name, stored in checkpoint.tensors.items():
        stem, suffix = _split(name)
        modules.setdefault(stem, []).append(Part(suffix, stored.dtype, stored.shape))
    try:
        specs = {_split(spec.name)[0]: spec for spec in identify(checkpoint.config).tensors()}
    except CheckpointError:
        specs = {}
    found = {}
    for module, parts in modules.items():
        spec = specs.get(module)
        if len(parts) > 1:
            parts.sort(key=lambda part: PARTS.index(part.suffix) if part.suffix in PARTS else -1)
        storage = None
        if spec is not None and len(parts) > 1 and len(spec.shape) == 2:
            storage = recognise(tuple(parts), spec.shape)
        dtypes = "+".join(part.dtype for part in parts)
        plain = dtypes.lower() if dtypes in PLAIN else dtypes
        role = spec.role if spec is not None else re.sub(r"\d+", "*", module)
        found[module] = _Module(role, storage.name if storage else plain, sum(part.nbytes for part in parts))
    return found


def _split(name: str) -> tuple[str, str]:
    """A tensor's module and the ending that makes it a part of it, "" where it has none."""
    stem, dot, last = name.rpartition(".")
    return (stem, dot + last) if dot + last in PARTS else (name, "")


def _tensors(
    before: Mapping[str, Stored], after: Mapping[str, Stored], old: Mapping[str, _Module], new: Mapping[str, _Module]
) -> list[TensorChange]:
    groups: dict[tuple[str, str, str, str, str, bool], list[Any]] = {}
    for name in _union(before, after):
        here, there = before.get(name), after.get(name)
        if here is not None and there is not None and here[:2] == there[:2]:
            continue
        module, ending = _split(name)
        role = (new.get(module) or old[module]).role
        reshaped = here is not None and there is not None and here.shape != there.shape
        dtypes = here.dtype if here else "", there.dtype if there else ""
        change = "added" if here is None else "removed" if there is None else "changed"
        suffix = ending or "." + name.rpartition(".")[2]
        shapes = here.shape if here else None, there.shape if there else None
        group = groups.setdefault((role, change, suffix, *dtypes, reshaped), [0, 0, 0, name, shapes])
        group[0] += 1
        group[1] += here.nbytes if here else 0
        group[2] += there.nbytes if there else 0
    return sorted((TensorChange(*key, *group) for key, group in groups.items()), key=lambda g: -max(g[7], g[8]))


def _storage(old: Mapping[str, _Module], new: Mapping[str, _Module]) -> list[Storage]:
    groups: dict[tuple[str, str, str], list[int]] = {}
    for module in _union(old, new):
        here, there = old.get(module), new.get(module)
        role = (there or here or old[module]).role
        key = role, here.format if here else "", there.format if there else ""
        group = groups.setdefault(key, [0, 0, 0])
        for place, value in enumerate((1, here.nbytes if here else 0, there.nbytes if there else 0)):
            group[place] += value
    return sorted((Storage(*key, *group) for key, group in groups.items()), key=lambda s: -max(s[4], s[5]))


def _union(old: Mapping[str, object], new: Mapping[str, object]) -> Iterable[str]:
    return dict.fromkeys((*old, *new))


def _files(before: Checkpoint, after: Checkpoint) -> Iterator[FileChange]:
    old, new = before.side_files() | _misleading(before), after.side_files() | _misleading(after)
    if before.place.repo is None and after.place.repo is None:  # of a repo they are not fetched
        old, new = old | _other_weights(before), new | _other_weights(after)
    if any((side.folder / MANIFEST).exists() for side in (before, after)):  # the card is no part of an artifact
        old.pop(CARD, None), new.pop(CARD, None)
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new:
            yield FileChange(name, "added" if name in new else "removed", old.get(name), new.get(name))
        elif old[name] != new[name] or _sha256(before.folder / name) != _sha256(after.folder / name):
            yield FileChange(name, "changed", old[name], new[name])


def _misleading(checkpoint: Checkpoint) -> dict[str, int]:
    """Modelopt's config, which some runtimes read first."""
    return {STRAY_CONFIG: len(data)} if (data := _bytes(checkpoint, STRAY_CONFIG)) else {}


def _other_weights(checkpoint: Checkpoint) -> dict[str, int]:
    """Weights in other formats, beside the shards."""
    found = sorted(path for path in checkpoint.folder.iterdir() if path.name.endswith(OTHER_WEIGHTS))
    return {path.name: path.stat().st_size for path in found}


def _bytes(checkpoint: Checkpoint, name: str) -> bytes:
    path = checkpoint.folder / name
    return path.read_bytes() if path.is_file() else b""


def _sha256(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None


def _notes(
    before: Checkpoint,
    after: Checkpoint,
    sides: tuple[Side, Side],
    config: tuple[KeyChange, ...],
    known: Weights,
    *,
    changed: bool,
    moved: bool,
) -> Iterator[str]:
    if not config and before.config_bytes != after.config_bytes:
        yield "config.json: the same values, written otherwise"
    if sides[0].manifest != sides[1].manifest:
        yield f"{MANIFEST} before: {sides[0].manifest or 'none'}; after: {sides[1].manifest or 'none'}"
    if before.unindexed != after.unindexed:
        yield f"{INDEX}: names other shards of those that lie there"
    if not moved and before.tensors.keys() == after.tensors.keys():
        if _bytes(before, INDEX) != _bytes(after, INDEX):
            yield f"{INDEX}: differs"
        heads = sum(before.heads[file][2] != after.heads[file][2] for file in before.heads if file in after.heads)
        if heads and not changed:
            yield f"headers of {heads:,} shards differ, their tensors do not (order, or metadata)"
    same = before.config_bytes == after.config_bytes and before.heads == after.heads
    if same and known.state in ("not compared", "partly compared") and before.digest != after.digest:
        yield "samples of the weights differ"
