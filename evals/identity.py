"""What was evaluated, by digests: a result is of one artifact, and not of another one of the same name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..formats.checkpoint import MANIFEST, open_checkpoint
from ..formats.manifest import read_manifest
from ..quantize.origin import origins
from ..quantize.summary import inspect
from .target import Target


def identity(target: Target, about: Mapping[str, Any]) -> dict[str, Any]:
    """As the record holds it. about: what the runner, or the server, says of itself. Reads headers, not weights.

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
        "runtime": dict(about),
    }


def _part(folder: Path) -> dict[str, Any]:
    checkpoint = open_checkpoint(folder)
    told = inspect(checkpoint)
    manifest = folder / MANIFEST
    return {
        "name": folder.resolve().name,
        "digest": checkpoint.digest,
        "manifest": hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.exists() else None,
        "architecture": told["architecture"],
        "formats": told["formats"],
        "recipe": read_manifest(folder).recipe.get("name") if manifest.exists() else None,
        "source": next(iter(origins(checkpoint)), None),
        "bytes": told["total_size"],
    }
