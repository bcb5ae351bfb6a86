"""Reading and writing checkpoints in the hub's layout: config.json, safetensors shards, an index, side files.

The index must say exactly what the headers say. Weights are read with `pread` into buffers of the caller, so memory
stays bounded and a source that vanishes is an error rather than a signal.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ._headers import (
    Range,
    Stored,
    header_length,
    natural,
    parse_header,
    parse_json,
    read_file,
    read_header,
)
from ._shards import Place, Repo, ShardReader, Shards, in_folder

__all__ = [
    "Checkpoint",
    "Place",
    "Range",
    "Reader",
    "Repo",
    "ShardReader",
    "Shards",
    "Stored",
    "header_length",
    "in_folder",
    "natural",
    "open_checkpoint",
    "parse_header",
    "parse_json",
    "read_file",
    "read_header",
    "read_index",
    "side_files",
    "unfinished",
]

INDEX = "model.safetensors.index.json"
MANIFEST = "phasefold.json"
WORK = ".phasefold"  # of a job that has not ended
WINDOW = f"{WORK}/window"  # what waits there of a source on the Hub
RESULT = re.compile(r"evals/\d{8}T\d{6}Z-[0-9a-f]{8}\.json")  # of `eval`: about a checkpoint, and no part of it
CARD = "README.md"  # about the repo that a checkpoint lies in: copied, and extended by `push`, but no part of it
STRAY_CONFIG = "hf_quant_config.json"  # modelopt's; beside a config.json that says otherwise it would mislead
_SAMPLES, _SAMPLE_BYTES = 8, 4096  # of each shard, for the digest
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".ckpt", ".onnx", ".h5", ".msgpack", ".npz")
NO_SIDE_FILE = (".safetensors", ".safetensors.index.json", ".partial", *OTHER_WEIGHTS)


@dataclass(frozen=True)
class Checkpoint:
    """A read-only view of a checkpoint, made from config.json, the index and the headers alone.

    place: where it is. config: config.json as parsed; config_bytes: as it lies there.
    tensors: name -> Stored, in natural order of the files (2 before 10) and of the offsets within them.
    heads: of each shard, in this order, its size, the place where its data begins, and the sha256 of its header.
    unindexed: shards that lie there but that the index does not name.
    """

    place: Place
    config: Mapping[str, Any]
    config_bytes: bytes
    tensors: Mapping[str, Stored]
    heads: Mapping[str, tuple[int, int, bytes]]
    unindexed: frozenset[str]

    @property
    def folder(self) -> Path:
        """Where its small files are; its shards need not be there."""
        return self.place.folder

    @property
    def label(self) -> str:
        """What people call it: a folder, or a repo."""
        return self.place.label

    @property
    def shards(self) -> Shards:
        """Where its weights are."""
        return self.place.shards

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each shard."""
        return {file: size for file, (size, _, _) in self.heads.items()}

    @property
    def total_size(self) -> int:
        """Bytes of all tensors, as an index counts them."""
        return sum(stored.nbytes for stored in self.tensors.values())

    def side_files(self) -> dict[str, int]:
        """See the function of this name."""
        return side_files(self.folder, self.place.small)

    @cached_property
    def digest(self) -> str:
        """Sha256 over config.json and over the name, the size, the header and some bytes of the data of each shard.

        Raises PhasefoldError where these cannot be read.
        """
        digest = hashlib.sha256(hashlib.sha256(self.config_bytes).digest())
        samples = self.samples(self.heads)
        for file, (size, _, header) in self.heads.items():
            digest.update(json.dumps([file, size]).encode() + header)
            digest.update(samples[file])
        return digest.hexdigest()

    def samples(self, files: Collection[str]) -> dict[str, bytes]:
        """Some of each shard's data: a fine-tuned model has the headers of its base, and other weights."""
        steps = range(_SAMPLES)
        places = {
            file: sorted({start + (size - start) * step // _SAMPLES for step in steps}) if size > start else ()
            for file, (size, start, _) in self.heads.items()
            if file in files
        }
        return dict(zip(places, self.shards.samples(places, _SAMPLE_BYTES), strict=True))


def open_checkpoint(where: Path | Place) -> Checkpoint:
    """Read config.json, the index and all headers. Raises CheckpointError on anything that is not right."""
    place = in_folder(where)
    folder, label = place.folder, place.label
    try:
        listed = os.listdir(folder)
        names = place.shards.names()
    except (FileNotFoundError, NotADirectoryError):
        cure = "give that of a checkpoint, with config.json (of a repo: `phasefold pull` it)"
        raise CheckpointError(f"{folder}: no such folder; {cure}") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror})") from None
    if WORK in listed and "config.json" not in listed:
        raise CheckpointError(f"{folder}: {unfinished(folder)}")
    config_bytes = read_file(folder / "config.json")
    config = parse_json(config_bytes, folder / "config.json")
    weight_map, total = read_index(folder)
    for name in sorted(set(weight_map.values()) - set(names)):
        raise CheckpointError(f"{label}: shard {name}, which {INDEX} names, is missing")
    if not names:
        raise CheckpointError(f"{label}: no *.safetensors file in it")
    tensors: dict[str, Stored] = {}
    heads: dict[str, tuple[int, int, bytes]] = {}
    for name, (size, raw) in zip(names, place.shards.heads(names), strict=True):
        heads[name] = size, 8 + len(raw), hashlib.sha256(raw).digest()
        for key, stored in parse_header(raw, size, name, f"{label}/{name}"):
            if key in tensors:
                raise CheckpointError(f"{label}: tensor {key} lies in two shards, {tensors[key].file} and {name}")
            tensors[key] = stored
    indexed = set(weight_map.values()) if weight_map else set(names)
    if weight_map:
        _agree(label, weight_map, total, {k: s for k, s in tensors.items() if s.file in indexed})
    return Checkpoint(place, config, config_bytes, tensors, heads, frozenset(set(names) - indexed))


def unfinished(folder: Path) -> str:
    """What to say of a folder that a job works in, or has left without its weights."""
    try:
        repo = json.loads((folder / WORK / "job.json").read_bytes())["pushed"]
    except (OSError, ValueError, KeyError, TypeError):
        return "unfinished; give the same convert command again to go on"
    return f"its weights are in {repo}, to which they were pushed while they were made; `phasefold pull` them"


def read_index(folder: Path) -> tuple[dict[str, str], float | None]:
    """The index's map from tensors to shards, and its total_size; an empty map where there is no index."""
    path = folder / INDEX
    if not path.exists():
        return {}, None
    index = parse_json(read_file(path), path)
    weight_map, metadata = index.get("weight_map"), index.get("metadata", {})
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: needs a `weight_map` from tensor names to shards")
    for name, file in weight_map.items():
        if not isinstance(file, str) or "/" in file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path}: {name} maps to {file!r}, which is no shard's name")
    total = metadata.get("total_size")
    if total is not None and (isinstance(total, bool) or not isinstance(total, int | float)):
        raise CheckpointError(f"{path}: total_size is {total!r}, expected a number of bytes")
    return weight_map, total


def _agree(label: str, weight_map: Mapping[str, str], total: float | None, tensors: Mapping[str, Stored]) -> None:
    for name, file in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"{label}: {INDEX} lists {name} in {file}, but no shard holds it")
        if tensors[name].file != file:
            raise CheckpointError(f"{label}: {INDEX} lists {name} in {file}, but it lies in {tensors[name].file}")
    for name, stored in tensors.items():
        if name not in weight_map:
            raise CheckpointError(f"{label}: {name} lies in {stored.file}, but {INDEX} does not list it")
    held = sum(stored.nbytes for stored in tensors.values())
    if total is not None and total != held:
        raise CheckpointError(f"{label}: {INDEX} says total_size {total:,}, but the headers hold {held:,} bytes")


def side_files(folder: Path, only: Collection[str] | None = None) -> dict[str, int]:
    """Everything beside weights, index, config and manifest (tokenizer, templates, licence): relative path -> bytes.

    Left out: hidden files, aborted downloads (*.partial), results of `eval`, weights in other formats, and
    hf_quant_config.json, which would contradict config.json. only: what else may count, None for all.
    CheckpointError where one cannot be read or is no file.
    """
    found = {}

    def refuse(error: OSError) -> None:
        raise error

    try:
        for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(files):
                relative = (path := Path(parent, name)).relative_to(folder).as_posix()
                ours = relative in ("config.json", MANIFEST) or RESULT.fullmatch(relative)
                if (
                    ours
                    or (only is not None and relative not in only)
                    or name.startswith(".")
                    or name == STRAY_CONFIG
                    or name.endswith(NO_SIDE_FILE)
                ):
                    continue
                with open(path, "rb") as file:
                    found[relative] = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read ({error.strerror})") from None
    return dict(sorted(found.items()))


class Reader:
    """Positioned reads from the tensors of a checkpoint, from any number of threads."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._shards = checkpoint.shards.open()

    def read(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of tensor `name` from byte `start` on. Raises PhasefoldError if they are gone."""
        stored = self.checkpoint.tensors[name]
        self._shards.read(stored.file, stored.offset + start, out, name)

    def expect(self, order: Sequence[tuple[str, Sequence[str]]]) -> None:
        """Which tensors will be read, step by step: so that they can be fetched ahead. Steps have names."""
        tensors = self.checkpoint.tensors
        self._shards.expect([(step, [tensors[name].range for name in names]) for step, names in order])

    def let_go(self, step: str) -> None:
        """A step is done."""
        self._shards.let_go(step)

    def give_up(self) -> None:
        """Whoever waits for bytes that are being fetched is to wait no longer; from any thread."""
        self._shards.give_up()

    def close(self) -> None:
        """Close all files; no other thread may be reading."""
        self._shards.close()
