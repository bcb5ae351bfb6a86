"""phasefold.json: what an artifact is made of, so that anyone can check it and make it again.

It holds nothing that depends on the machine, the time or the number of workers: the same job gives the same file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, VerifyError
from .checkpoint import MANIFEST, parse_json, read_file

VERSION = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of phasefold.json.

    tool: version of phasefold. phase: "prefill", "decode" or "any".
    source: name, digest (of headers and config), tensors, total_size, origins (digests of what it was made from).
    recipe: as `Recipe.to_json`.
    plan: digest of the job; shard_bytes: the limit that the shards were cut by; output_bytes: sum of all tensors.
    files: every file beside this one -> {"bytes", "sha256"}.
    units: every module -> [action, source format, target format, relative error]; the error is ||w - w'|| / ||w||
        (Frobenius) with four digits, 0.0 where nothing changed. Where statistics guide a unit, a fifth entry says what
        its codes come from (`quantize.guide.METHODS`).
    dropped: source tensor -> reason. scales: counts of denormal scales and of all-zero blocks that were met.
    notes: what whoever serves the artifact must know.
    extras: what the job took besides source and recipe: statistics, folding, KV scales.
    """

    tool: str
    phase: str
    architecture: str
    source: Mapping[str, Any]
    recipe: Mapping[str, Any]
    plan: str
    shard_bytes: int
    output_bytes: int
    files: Mapping[str, Mapping[str, Any]]
    units: Mapping[str, list[Any]]
    dropped: Mapping[str, str]
    scales: Mapping[str, int]
    notes: list[str]
    extras: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The file's bytes; the last key is a digest of all the others."""
        value = {"version": VERSION, **asdict(self)}
        value["digest"] = _digest(value)
        lines = [f"  {json.dumps(key)}: {_lines(item)}" for key, item in value.items()]
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """Read and check phasefold.json. Raises VerifyError where it is missing, altered or of an unknown version."""
    path = folder / MANIFEST
    if not path.exists():
        raise VerifyError(f"{folder}: no {MANIFEST} in it; only artifacts made by phasefold can be verified")
    try:
        value = parse_json(read_file(path), path)
    except CheckpointError as error:
        raise VerifyError(str(error)) from None
    digest, version = value.pop("digest", None), value.get("version")
    if version != VERSION:
        raise VerifyError(f"{path}: version {version!r}, this phasefold reads version {VERSION}")
    if digest != _digest(value):
        raise VerifyError(f"{path}: altered: its content does not match its own digest")
    del value["version"]
    try:
        made = Manifest(**value)
    except TypeError as error:
        raise VerifyError(f"{path}: {error}") from None
    if wrong := _wrong(made):
        raise VerifyError(f"{path}: {wrong}")
    return made


def _wrong(made: Manifest) -> str | None:
    """What readers rely on besides the keys: a matching digest says only that nothing changed since."""
    for key in ("source", "recipe", "files", "units", "dropped", "scales", "extras"):
        if not isinstance(getattr(made, key), dict):
            return f"{key} is no object"
    if not isinstance(made.source.get("digest"), str) or not isinstance(made.source.get("origins", []), list):
        return "source has no digest, or origins are no list"
    if not all(isinstance(e, dict) and type(e.get("bytes")) is int for e in made.files.values()):
        return "a file has no size"
    if not all(isinstance(unit, list) and len(unit) >= 4 for unit in made.units.values()):
        return "a unit does not say what became of it"
    if not is_folding(made.extras.get("folding", {})) or not is_folding(made.extras.get("held", {})):
        return "extras: folding is no map from layers and parts to exponents"
    return None


def is_folding(value: object) -> bool:
    """Whether a value is a folding: decoder layer, in decimal digits -> cached part -> exponent, from -64 to 64."""
    return isinstance(value, dict) and all(
        re.fullmatch(r"0|[1-9][0-9]{0,5}", layer)
        and isinstance(parts, dict)
        and all(type(exponent) is int and abs(exponent) <= 64 for exponent in parts.values())
        for layer, parts in value.items()
    )


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _lines(item: Any) -> str:
    """JSON with one entry a line for long maps, so that two manifests can be compared with diff."""
    if not isinstance(item, Mapping) or not item:
        return json.dumps(item)
    inner = ",\n".join(f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in item.items())
    return "{\n" + inner + "\n  }"
