"""A statistics folder out of tensors, for tests of what reads one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from phasefold import __version__
from phasefold.calib.store import finish, write_layer
from phasefold.formats.checkpoint import open_checkpoint
from phasefold.formats.statistics import VERSION, Statistics, open_statistics
from phasefold.quantize.fold import held


def make_statistics(folder: Path, source: Path, layers: Mapping[int, Mapping[str, Tensor]], **about: Any) -> Statistics:
    """Layer -> name -> tensor becomes a finished folder that says it is of `source`. about: what else it shall say."""
    entries = [write_layer(folder, layer, tensors) for layer, tensors in layers.items()]
    checkpoint = open_checkpoint(source)
    value: dict[str, Any] = {
        "version": VERSION,
        "tool": __version__,
        "source": {"name": source.name, "digest": checkpoint.digest, "folding": held(checkpoint)},
        "architecture": checkpoint.config["model_type"],
        "config": dict(checkpoint.config),
        "text": {"digest": "0" * 64, "files": 1, "documents": 1},
        "tokens": 1024,
        "heldout_tokens": 128,
        "sequences": 8,
        "length": 128,
        "options": {},
        "layers": entries,
    }
    finish(folder, value | about)
    return open_statistics(folder)
