"""What a checkpoint was made from, at any remove, as far as manifests tell."""

from __future__ import annotations

import hashlib

from ..errors import VerifyError
from ..formats.checkpoint import Checkpoint
from ..formats.manifest import read_manifest


def origins(checkpoint: Checkpoint) -> list[str]:
    """Digests of what it was made from, the nearest first; [] where no manifest says so.

    A manifest counts where its config.json lies beside it, and the shards that it lists, by name and size.
    """
    try:
        manifest = read_manifest(checkpoint.folder)
    except VerifyError:
        return []
    shards = {name: entry["bytes"] for name, entry in manifest.files.items() if name.endswith(".safetensors")}
    config = hashlib.sha256(checkpoint.config_bytes).hexdigest()
    if shards != dict(checkpoint.sizes) or config != manifest.files.get("config.json", {}).get("sha256"):
        return []
    return [str(manifest.source["digest"]), *manifest.source.get("origins", [])]
