"""Whether weights that two checkpoints store alike are equal: by their bytes, or by the sha256 of shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ..formats import DTYPES, Shape
from ..formats.checkpoint import Checkpoint, Reader, Stored
from ..formats.manifest import Manifest

_BLOCK = 8 << 20  # bytes, of each side


class Weights(NamedTuple):
    """What is known of the tensors that both sides store alike: by one name, in one dtype and shape.

    how: "bytes" where they were read; "sha256" where the Hub tells that of shards on both sides, "manifests" where a
    folder's manifest does, whose word is held against samples of its shards; else "".
    alike: how many there are. equal: how many of them are known to be equal.
    differ: how many differ; by sha256, which knows no tensors, in how many shards of equal headers at least one does.
    first: the first that differs, a tensor's name or a shard's. at: index of its first differing element, by bytes.
    """

    how: str
    alike: int
    equal: int
    differ: int
    first: str = ""
    at: Shape | None = None

    @property
    def state(self) -> str:
        """ "none alike", "equal" (all of them), "differ" (some do), "partly compared" or "not compared"."""
        if not self.alike or self.differ:
            return "differ" if self.differ else "none alike"
        if self.how and self.equal == self.alike:
            return "equal"
        return "partly compared" if self.equal else "not compared"


def alike(before: Checkpoint, after: Checkpoint) -> Iterator[tuple[str, Stored]]:
    """The tensors that both store by one name, in one dtype and shape, as the first has them."""
    for name, stored in before.tensors.items():
        other = after.tensors.get(name)
        if other is not None and (stored.dtype, stored.shape) == (other.dtype, other.shape):
            yield name, stored


def compare_bytes(before: Checkpoint, after: Checkpoint, advance: Callable[[int], None] | None = None) -> Weights:
    """Read all tensors that both store alike, a block of each side at a time. Raises PhasefoldError on what is gone.

    A tensor is left at its first difference, so that `advance` is told of its whole size at once then.
    """
    readers = Reader(before), Reader(after)
    steps: dict[str, list[str]] = {}  # by shards, in which those that lie on the Hub are fetched
    for name, stored in alike(before, after):
        steps.setdefault(stored.file, []).append(name)
    found = Weights("bytes", 0, 0, 0)
    try:
        for reader in readers:
            reader.expect(list(steps.items()))
        for step, names in steps.items():
            for name in names:
                stored = before.tensors[name]
                place = _first_difference(readers, name, stored)
                found = found._replace(alike=found.alike + 1, equal=found.equal + (place is None))
                if place is not None and not found.differ:
                    at = _index(place // DTYPES[stored.dtype], stored.shape)
                    found = found._replace(first=name, at=at)
                found = found._replace(differ=found.alike - found.equal)
                if advance is not None:
                    advance(stored.nbytes)
            for reader in readers:
                reader.let_go(step)
    finally:
        for reader in readers:
            reader.close()
    return found


def _first_difference(readers: tuple[Reader, Reader], name: str, stored: Stored) -> int | None:
    """The first byte of a tensor in which both sides differ."""
    for start in range(0, stored.nbytes, _BLOCK):
        blocks = [bytearray(min(_BLOCK, stored.nbytes - start)) for _ in readers]
        for reader, block in zip(readers, blocks, strict=True):
            reader.read(name, start, memoryview(block))
        if blocks[0] != blocks[1]:
            return start + next(n for n, (a, b) in enumerate(zip(*blocks, strict=True)) if a != b)
    return None


def _index(element: int, shape: Shape) -> Shape:
    index = []
    for extent in reversed(shape):
        element, here = divmod(element, extent)
        index.append(here)
    return tuple(reversed(index))


class Told(NamedTuple):
    """The sha256 of a shard as somebody tells it. fact: the Hub, which has hashed it; else a manifest beside it."""

    sha256: str
    fact: bool


def sha256_of_shards(checkpoint: Checkpoint, manifest: Manifest | None) -> dict[str, Told]:
    """The sha256 of each shard that somebody vouches for: the Hub, or a manifest."""
    found = {}
    for file in checkpoint.heads:
        if (known := checkpoint.shards.sha256(file)) is not None:
            found[file] = Told(known, fact=True)
        elif manifest is not None and isinstance(told := manifest.files[file].get("sha256"), str):
            found[file] = Told(told, fact=False)
    return found


def compare_sha256(before: Checkpoint, after: Checkpoint, old: Mapping[str, Told], new: Mapping[str, Told]) -> Weights:
    """What the sha256 of shards tell; nothing where those of one side are not known.

    A manifest's is a claim about a file that may have changed since: shards that are equal by it are sampled.
    """
    tensors = [name for name, _ in alike(before, after)]
    pairs = {(before.tensors[name].file, after.tensors[name].file) for name in tensors}
    same = {(a, b) for a, b in pairs if a in old and b in new and old[a].sha256 == new[b].sha256}
    claimed = {(a, b) for a, b in same if not (old[a].fact and new[b].fact)}
    broken = _unlike_samples(before, after, claimed)
    equal, suspects = 0, {a for a, _ in broken}
    for name in tensors:
        here, there = before.tensors[name], after.tensors[name]
        if (here.file, there.file) in same:
            equal += (here.file, there.file) not in broken
        elif here.file in old and there.file in new and here == there:
            suspects.add(here.file)
    # the hash is of the whole file: where headers are equal too, it is the data that differs
    differ = [file for file in before.heads if file in suspects and before.heads[file] == after.heads.get(file)]
    how = "manifests" if claimed else "sha256" if old and new else ""
    return Weights(how, len(tensors), equal, len(differ), differ[0] if differ else "")


def _unlike_samples(before: Checkpoint, after: Checkpoint, pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Pairs of shards that should be the same file, and of which samples, or the headers, differ."""
    ones, others = (
        checkpoint.samples({pair[side] for pair in pairs}) for side, checkpoint in enumerate((before, after))
    )
    return {(a, b) for a, b in pairs if before.heads[a] != after.heads[b] or ones[a] != others[b]}
