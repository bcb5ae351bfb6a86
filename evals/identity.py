"""What was evaluated, by digests: a result is of one artifact, and not of another one of the same name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import EvalError
from ..formats.checkpoint import MANIFEST, open_checkpoint
from ..formats.manifest import read_manifest
from ..quantize.origin import origins
from ..quantize.summary import inspect
from .target import Target


def identity(target: Target) -> dict[str, Any]:
    """As the record holds it, but for what ran ("runtime"). Reads headers, and samples of the weights.

    digest: of headers, config, some weights, manifests and KV scales, of all parts; None for a server, whose weights
    nobody sees.
    """
    parts = [_part(folder) for folder in target.folders]
    scales = hashlib.sha256(target.scales.read_bytes()).hexdigest() if target.scales else None
    whole = hashlib.sha256(repr([[p["digest"], p["manifest"]] for p in parts] + [target.kv, scales]).encode())
    return {
        "text": target.text,
        "kind": "server" if target.url else "pair" if target.is_pair else "checkpoint",
        "digest": whole.hexdigest() if parts else None,
        "parts": parts,
        "kv": target.kv,
        "scales": scales,
    }


def kinship(target: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[str]:
    """What is odd about comparing the two, in sentences: nothing, where the one was made from the other."""
    mine, theirs = target["parts"], baseline["parts"]
    if not mine or not theirs:
        return []
    roots = {digest for part in theirs for digest in (part["digest"], *part["origins"])}
    return [
        f"{part['name']} was not made from the baseline, nor from what that was made from, as its manifest tells"
        for part in mine
        if part["source"] is not None and not roots.intersection((part["digest"], *part["origins"]))
    ]


def check_unchanged(target: Target, before: Mapping[str, Any]) -> None:
    """EvalError where it is no longer what it was before it ran: nobody knows which of the two was evaluated."""
    if identity(target) != before:
        raise EvalError(f"{target.text}: has changed while it was evaluated; evaluate it again")


def _part(folder: Path) -> dict[str, Any]:
    checkpoint = open_checkpoint(folder)
    told, made_from = inspect(checkpoint), origins(checkpoint)
    manifest = folder / MANIFEST
    return {
        "name": folder.resolve().name,
        "digest": checkpoint.digest,
        "manifest": hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.exists() else None,
        "architecture": told["architecture"],
        "formats": told["formats"],
        "recipe": read_manifest(folder).recipe.get("name") if manifest.exists() else None,
        "source": made_from[0] if made_from else None,
        "origins": made_from,
        "bytes": told["total_size"],
    }
