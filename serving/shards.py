"""Reading shards and index without stopping at the first fault: what is there, and a list of what is wrong."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError
from ..formats.checkpoint import (
    INDEX,
    STRAY_CONFIG,
    Place,
    Shards,
    Stored,
    natural,
    parse_header,
    parse_json,
    read_file,
    read_index,
)

_NUMBERS = {"F64": "<d", "F32": "<f", "F16": "<e"}


class Fault(NamedTuple):
    """Something wrong with files or index. subject: file or tensor. severity: as in a finding."""

    subject: str
    message: str
    severity: str
    kind: str


def stray_config(folder: Path) -> tuple[tuple[str, Any], ...]:
    """Modelopt's own config file, as an entry of `Survey.declared`; its text where it is no JSON object."""
    try:
        value: Any = parse_json(read_file(folder / STRAY_CONFIG), folder / STRAY_CONFIG)
    except CheckpointError as error:
        value = str(error)
    return ((STRAY_CONFIG, value.get("quantization", value) if isinstance(value, dict) else value),)


def read_shards(place: Place) -> tuple[dict[str, Stored], list[Fault], set[str]]:
    """Every tensor of every shard that can be read, what is wrong with the others, and their names."""
    tensors: dict[str, Stored] = {}
    faults, broken = [], set()
    shards = place.shards.names()
    if not shards:
        faults.append(Fault(place.label, "no *.safetensors file in it; no runtime finds weights", "error", "none"))
    for shard in shards:
        try:
            size, raw = next(place.shards.heads([shard]))
            found = list(parse_header(raw, size, shard, f"{place.label}/{shard}"))
        except CheckpointError as error:
            broken.add(shard)
            why = str(error).removeprefix(f"{place.label}/{shard}: ")
            faults.append(Fault(shard, f"cannot be read ({why}); fetch it again", "error", "unreadable"))
            continue
        for name, stored in found:
            if name in tensors:
                where = f"lies in {tensors[name].file} and in {shard}; the runtime takes either; delete one"
                faults.append(Fault(name, where, "silent", "twice"))
            tensors.setdefault(name, stored)
    return tensors, faults, broken


def compare_with_index(
    place: Place, tensors: Mapping[str, Stored], broken: set[str], mtp: set[str], twice: set[str]
) -> tuple[frozenset[str] | None, list[Fault]]:
    """What the index says that the headers do not; -> modules that it promises in vain, and the faults.

    broken: shards that cannot be read. twice: tensors that lie in two shards, which has been said.
    mtp: modules of MTP layers, which may lie in a file that the index does not name.
    """
    try:
        index, total = read_index(place.folder)
    except CheckpointError as error:
        why = str(error).removeprefix(f"{place.folder / INDEX}: ")
        return None if broken else frozenset(), [Fault(INDEX, f"cannot be used ({why})", "error", "index")]
    if not index:
        return None if broken else frozenset(), []
    faults = list(_index_faults(place, index, tensors, broken, mtp, twice))
    indexed = set(index.values())
    held = sum(stored.nbytes for stored in tensors.values() if stored.file in indexed)
    if total is not None and total != held and not faults and not broken:
        message = f"total_size is {total:,}, but the headers hold {held:,} bytes: runtimes do not read it, but"
        message = f"{message} phasefold's other verbs refuse the folder; write {held} there"
        faults.append(Fault(INDEX, message, "warning", "total"))
    names = {name for name in index if name not in tensors}
    stems = {name.rpartition(".")[0] for name in names}
    return frozenset(names | stems), faults


def _index_faults(
    place: Place,
    index: Mapping[str, str],
    tensors: Mapping[str, Stored],
    broken: set[str],
    mtp: set[str],
    twice: set[str],
) -> Iterator[Fault]:
    indexed = set(index.values())
    absent = indexed - set(place.shards.names())
    for shard in sorted(absent, key=natural):
        yield Fault(shard, f"is missing, although {INDEX} names it; the runtime stops; fetch it", "error", "shard")
    for name, shard in index.items():
        if name not in tensors and shard not in absent | broken:
            message = f"stands in {INDEX} as part of {shard}, but no shard holds it: its parameter stays unset"
            yield Fault(name, message, "silent", "ghost")
        elif name in tensors and tensors[name].file != shard and tensors[name].file in indexed and name not in twice:
            message = f"lies in {tensors[name].file}, but {INDEX} says {shard}; write the index anew"
            yield Fault(name, message, "warning", "elsewhere")
    for name, stored in tensors.items():
        if stored.file not in indexed:
            draft = name.rpartition(".")[0] in mtp or name in mtp
            message = f"lies in {stored.file}, which {INDEX} does not name: vLLM and SGLang do not open that file"
            yield Fault(name, message, "warning" if draft else "silent", "unindexed mtp" if draft else "unindexed")
        elif name not in index:
            message = f"lies in {stored.file}, but {INDEX} does not list it; write the index anew"
            yield Fault(name, message, "warning", "unlisted")


def read_number(shards: Shards, stored: Stored) -> float | None:
    """The value of a tensor with one element; None where it is of an integer or an unusual dtype, or not there."""
    code = "<f" if stored.dtype == "BF16" else _NUMBERS.get(stored.dtype, "")
    if not code or math.prod(stored.shape) != 1:
        return None
    raw, reader = bytearray(stored.nbytes), shards.open()
    try:
        reader.read(stored.file, stored.offset, memoryview(raw), "a number")
    except CheckpointError:
        return None
    finally:
        reader.close()
    return float(struct.unpack(code, b"\0\0" + raw if stored.dtype == "BF16" else raw)[0])
