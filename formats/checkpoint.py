"""Reading and writing checkpoints in the hub's layout: config.json, safetensors shards, an index, side files.

Reading is strict, because what is accepted here is trusted everywhere: every header field is checked before it sizes
anything, and the index must say exactly what the headers say. Weights are read with `pread` into buffers of the caller,
so memory stays bounded and a source that vanishes is an error rather than a signal.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError
from . import DTYPES, Shape

INDEX = "model.safetensors.index.json"
MANIFEST = "phasefold.json"
WORK = ".phasefold"  # of a job that has not ended
RESULT = re.compile(r"evals/\d{8}T\d{6}Z-[0-9a-f]{8}\.json")  # of `eval`: about a checkpoint, and no part of it
STRAY_CONFIG = "hf_quant_config.json"  # modelopt's; beside a config.json that says otherwise it would mislead
_OPEN_FILES = 4  # a thread's: codes and scales, of the source, may lie in different shards
_SAMPLES, _SAMPLE_BYTES = 8, 4096  # of each shard, for the digest
MAX_HEADER = 100_000_000  # the safetensors library refuses longer ones
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".ckpt", ".onnx", ".h5", ".msgpack", ".npz")
_NO_SIDE_FILE = (".safetensors", ".safetensors.index.json", ".partial", *OTHER_WEIGHTS)


class Stored(NamedTuple):
    """One tensor on disk: safetensors dtype, shape, file name, absolute offset and bytes of its data."""

    dtype: str
    shape: Shape
    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A read-only view of a folder, made from config.json, the index and the headers alone.

    config: config.json as parsed; config_bytes: as it lies there.
    tensors: name -> Stored, in natural order of the files (2 before 10) and of the offsets within them.
    sizes: bytes of each shard.
    unindexed: shards that lie there but that the index does not name.
    digest: sha256 over config.json and over the name, the size, the header and some bytes of the data of each shard.
    """

    folder: Path
    config: Mapping[str, Any]
    config_bytes: bytes
    tensors: Mapping[str, Stored]
    sizes: Mapping[str, int]
    unindexed: frozenset[str]
    digest: str

    @property
    def total_size(self) -> int:
        """Bytes of all tensors, as an index counts them."""
        return sum(stored.nbytes for stored in self.tensors.values())


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key under which `model-2` comes before `model-10`."""
    return [(int(digits or 0), text) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read config.json, the index and all headers of a folder. Raises CheckpointError on anything that is not right."""
    try:
        listed = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder}: no such folder; give the folder of a checkpoint, with config.json") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror})") from None
    if WORK in listed and "config.json" not in listed:
        raise CheckpointError(f"{folder}: unfinished; give the same convert command again to go on")
    config_bytes = read_file(folder / "config.json")
    config = parse_json(config_bytes, folder / "config.json")
    names = sorted((name for name in listed if name.endswith(".safetensors")), key=natural)
    weight_map, total = read_index(folder)
    for name in sorted(set(weight_map.values()) - set(names)):
        raise CheckpointError(f"{folder}: shard {name}, which {INDEX} names, is missing")
    if not names:
        raise CheckpointError(f"{folder}: no *.safetensors file in it")
    digest = hashlib.sha256(hashlib.sha256(config_bytes).digest())
    tensors: dict[str, Stored] = {}
    sizes: dict[str, int] = {}
    for name in names:
        size, raw = read_header(folder / name)
        sizes[name] = size
        digest.update(json.dumps([name, size]).encode() + hashlib.sha256(raw).digest())
        digest.update(_sample(folder / name, 8 + len(raw), size))
        for key, stored in parse_header(raw, size, name, folder / name):
            if key in tensors:
                raise CheckpointError(f"{folder}: tensor {key} lies in two shards, {tensors[key].file} and {name}")
            tensors[key] = stored
    indexed = set(weight_map.values()) if weight_map else set(names)
    if weight_map:
        _agree(folder, weight_map, total, {k: s for k, s in tensors.items() if s.file in indexed})
    unindexed = frozenset(set(names) - indexed)
    return Checkpoint(folder, config, config_bytes, tensors, sizes, unindexed, digest.hexdigest())


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


def _agree(folder: Path, weight_map: Mapping[str, str], total: float | None, tensors: Mapping[str, Stored]) -> None:
    for name, file in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"{folder}: {INDEX} lists {name} in {file}, but no shard holds it")
        if tensors[name].file != file:
            raise CheckpointError(f"{folder}: {INDEX} lists {name} in {file}, but it lies in {tensors[name].file}")
    for name, stored in tensors.items():
        if name not in weight_map:
            raise CheckpointError(f"{folder}: {name} lies in {stored.file}, but {INDEX} does not list it")
    held = sum(stored.nbytes for stored in tensors.values())
    if total is not None and total != held:
        raise CheckpointError(f"{folder}: {INDEX} says total_size {total:,}, but the headers hold {held:,} bytes")


def read_file(path: Path) -> bytes:
    """All bytes of a small file. Raises CheckpointError where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None


def parse_json(raw: bytes, where: Path) -> dict[str, Any]:
    """A JSON object without duplicate keys. Raises CheckpointError on anything else."""
    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {twice!r} stands in it twice")
    return value


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


def read_header(path: Path) -> tuple[int, bytes]:
    """File size and the raw JSON header of a shard. Raises CheckpointError where there is none."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError(f"{path}: is no file")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(size - 8, MAX_HEADER):
                raise CheckpointError(
                    f"{path}: not a safetensors file: a header of {length:,} bytes in a file of {size:,}"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    if len(raw) != length:
        raise CheckpointError(f"{path}: ends within its header")
    return size, raw


def _sample(path: Path, start: int, size: int) -> bytes:
    """Some of a shard's data, evenly over it: a fine-tuned model has the headers of its base, and other weights."""
    places = {start + (size - start) * step // _SAMPLES for step in range(_SAMPLES)} if size > start else set()
    try:
        with open(path, "rb", buffering=0) as file:
            return b"".join(os.pread(file.fileno(), _SAMPLE_BYTES, place) for place in sorted(places))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None


def parse_header(raw: bytes, size: int, file: str, where: Path) -> Iterator[tuple[str, Stored]]:
    """The tensors of one shard, by offset. `size` is the file's; the data must fill it without overlap or hole."""
    header = parse_json(raw, where)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{where}: __metadata__ is not a map from text to text")
    start = 8 + len(raw)
    found = [(name, _stored(name, entry, file, start, where)) for name, entry in header.items()]
    found.sort(key=lambda item: (item[1].offset, item[1].nbytes))
    end = start
    for name, stored in found:
        if stored.offset != end:
            what = "overlaps the tensor before it" if stored.offset < end else "leaves a hole before it"
            raise CheckpointError(
                f"{where}: {name} {what} (offset {stored.offset - start:,}, expected {end - start:,})"
            )
        end += stored.nbytes
    if end != size:
        what = f"truncated: the header needs {end:,} bytes" if end > size else f"longer than its header's {end:,} bytes"
        raise CheckpointError(f"{where}: {what}, the file has {size:,}")
    yield from found


def _stored(name: str, entry: Any, file: str, start: int, where: Path) -> Stored:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: {name}: expected dtype, shape and data_offsets, found {str(entry)[:80]}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where}: {name}: unknown dtype {str(dtype)[:40]!r}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{where}: {name}: shape {str(shape)[:60]} or data_offsets {str(offsets)[:60]} are no sizes"
        )
    nbytes = math.prod(shape) * DTYPES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(
            f"{where}: {name}: {dtype} {shape} takes {nbytes:,} bytes, but its offsets span {offsets[1] - offsets[0]:,}"
        )
    return Stored(dtype, tuple(shape), file, start + offsets[0], nbytes)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def side_files(folder: Path) -> dict[str, int]:
    """Everything beside weights, index, config and manifest (tokenizer, templates, licence): relative path -> bytes.

    Left out: hidden files, aborted downloads (*.partial), results of `eval`, weights in other formats, and
    hf_quant_config.json, which would contradict config.json. CheckpointError where one cannot be read or is no file.
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
                if ours or name.startswith(".") or name == STRAY_CONFIG or name.endswith(_NO_SIDE_FILE):
                    continue
                with open(path, "rb") as file:
                    found[relative] = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read ({error.strerror})") from None
    return dict(sorted(found.items()))


class Reader:
    """Positioned reads from the shards of a checkpoint, from any number of threads.

    Each thread holds a few files open, so that a checkpoint of any number of shards can be read.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._local = threading.local()
        self._all: list[dict[str, int]] = []  # what each thread holds open

    def read(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of tensor `name` from byte `start` on. Raises CheckpointError if they are gone."""
        stored = self.checkpoint.tensors[name]
        path = self.checkpoint.folder / stored.file
        try:
            handle, done = self._open(stored.file, path), 0
            while done < len(out):
                got = os.preadv(handle, [out[done:]], stored.offset + start + done)
                if got == 0:
                    raise CheckpointError(f"{path}: truncated while it was read (at {name})")
                done += got
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror}), at {name}") from None

    def _open(self, file: str, path: Path) -> int:
        held: dict[str, int] | None = getattr(self._local, "held", None)
        if held is None:
            held = self._local.held = {}
            self._all.append(held)
        if file not in held:
            if len(held) == _OPEN_FILES:
                os.close(held.pop(next(iter(held))))
            held[file] = os.open(path, os.O_RDONLY)
        return held[file]

    def close(self) -> None:
        """Close all files; no other thread may be reading."""
        for held in self._all:
            while held:
                os.close(held.popitem()[1])
