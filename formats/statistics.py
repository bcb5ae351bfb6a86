"""Calibration statistics on disk: what `calibrate` leaves, and `kv` and `convert --stats` read.

A folder with one safetensors file a decoder layer and, written last, statistics.json: a folder that has it is finished.
statistics.json says of the source its name, digest and config.json (`config`), so that its cache's shape is known.
Tensors are named by the module that they belong to (its name on the hub without ".weight") and a suffix:

    MODULE.second_moment   F32 [in]      mean of x^2 of each input channel, over the tokens that reached the module
    MODULE.tokens          I64 []        how many those were; 0: no second moment is kept
    MODULE.hessian         F32 [in, in]  mean of x x^T over the same tokens, where `--hessians` asks for it
    MODULE.heldout         F32 [m, in]   inputs of tokens that are in none of the above, for judging a result
    POOL.hessian, .heldout, .tokens      the same of all routed experts of a layer together (`pool_of`)
    MODULES.expert_tokens  I64 [experts] tokens routed to each expert (MODULES: "model.layers.3.mlp.experts")
    LAYER.cache.PART.histogram           I64 [32768] values by magnitude (`cache_bins`)
    LAYER.cache.PART.amax, .tokens       F32 [], I64 []
    LAYER.cache.PART.second_moment       F32 [heads * width]

Hessians and held-out inputs of matrices that read the same input (gate and up) are kept once, under `input_of`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CheckpointError
from .checkpoint import Stored, parse_header, parse_json, read_file, read_header
from .manifest import is_folding

if TYPE_CHECKING:
    from torch import Tensor

STATISTICS = "statistics.json"
VERSION = 1
#: magnitudes of BF16: exponent and mantissa without the sign
BINS = 1 << 15
#: what a tensor is, by the last component of its name: dtype and number of dimensions
_KINDS = {
    "tokens": ("I64", 0), "amax": ("F32", 0), "histogram": ("I64", 1), "second_moment": ("F32", 1),
    "hessian": ("F32", 2), "heldout": ("F32", 2), "expert_tokens": ("I64", 1),
}  # fmt: skip
#: matrices that read what another one reads, by the last component of their names
_SAME_INPUT = {"up_proj": "gate_proj", "w3": "w1"}


def input_of(module: str) -> str:
    """The module under whose name Hessian and held-out inputs of `module` are kept: up_proj's under gate_proj."""
    stem, dot, last = module.rpartition(".")
    return stem + dot + _SAME_INPUT.get(last, last)


def pool_of(module: str) -> str | None:
    """Name of the pool of a routed expert's matrix, "....mlp.experts.pool.gate_proj"; None for any other module."""
    parts = input_of(module).split(".")
    return ".".join([*parts[:-2], "pool", parts[-1]]) if len(parts) > 2 and parts[-3] == "experts" else None


def cache_name(layer: int, part: str, suffix: str) -> str:
    """Name of a cache statistic: "layers.3.cache.kv_c.amax"."""
    return f"layers.{layer}.cache.{part}.{suffix}"


def cache_bins(values: Tensor) -> Tensor:
    """Counts of |x|, rounded to BF16, by its 15 bits -> I64 [BINS]. The bin's number is the magnitude's bit pattern.

    A cache row holds BF16 values, so this is all that is to be known of them but for order and sign: quantiles,
    shares that underflow and rounding errors at any scale follow exactly.
    """
    import torch

    bits = values.detach().bfloat16().flatten().view(torch.int16).int() & (BINS - 1)
    return torch.bincount(bits, minlength=BINS)


def bin_values() -> Tensor:
    """The magnitude that each bin stands for, F32 [BINS]; those from 0x7F80 on are Inf and NaN."""
    import torch

    return torch.arange(BINS, dtype=torch.int16).view(torch.bfloat16).float()


class CacheStatistics(NamedTuple):
    """What one layer's cache held of one part. amax: largest |x|. histogram: I64 [BINS]. second_moment: F32."""

    tokens: int
    amax: float
    histogram: Tensor
    second_moment: Tensor


@dataclass(frozen=True, slots=True)
class Statistics:
    """A finished statistics folder. `about` is statistics.json: source, text, tokens, options, layers; see `calib`.

    files: tensor name -> file.
    """

    folder: Path
    about: Mapping[str, Any]
    files: Mapping[str, str]

    @property
    def digest(self) -> str:
        """Identifies the statistics: equal digests mean equal numbers."""
        return str(self.about["digest"])

    def identity(self) -> dict[str, Any]:
        """What an artifact's manifest says of the statistics that it was made with."""
        text = self.about["text"]
        return {"digest": self.digest, "tokens": self.about["tokens"], "text": text["digest"],
                "source": self.about["source"]["digest"]}  # fmt: skip

    def read(self, name: str) -> Tensor | None:
        """One tensor, or None where it is not kept. Raises CheckpointError where its file cannot be read."""
        from safetensors import SafetensorError, safe_open

        if (file := self.files.get(name)) is None:
            return None
        try:
            with safe_open(self.folder / file, framework="pt") as held:
                found: Tensor = held.get_tensor(name)
                return found
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.folder / file}: cannot be read ({error}), at {name}") from None

    def tokens(self, module: str) -> int:
        """Tokens behind a module's (or a pool's) statistics; 0 where none reached it or none are kept."""
        found = self.read(f"{module}.tokens")
        count = 0 if found is None else int(found)
        if count < 0:
            raise CheckpointError(f"{self.folder}: {module}.tokens is {count}; calibrate again")
        return count

    def second_moment(self, module: str) -> Tensor | None:
        """F32 [in], mean of x^2 of each input channel; None where no token reached the module."""
        return self.read(f"{module}.second_moment")

    def hessian(self, module: str) -> Tensor | None:
        """F32 [in, in], mean of x x^T of a module's inputs; None where it is not kept."""
        return self.read(f"{input_of(module)}.hessian")

    def heldout(self, module: str) -> Tensor | None:
        """F32 [m, in], inputs that no other statistic of the module has seen; None where there are none."""
        return self.read(f"{input_of(module)}.heldout")

    def cache(self, layer: int, part: str) -> CacheStatistics | None:
        """What is known of one part of a layer's cache; None where it is not kept."""
        names = ("tokens", "amax", "histogram", "second_moment")
        found = [self.read(cache_name(layer, part, suffix)) for suffix in names]
        if found[0] is None or found[1] is None or found[2] is None or found[3] is None:
            return None
        return CacheStatistics(int(found[0]), float(found[1]), found[2], found[3])

    def check_file(self, file: str) -> None:
        """CheckpointError unless a file's bytes are those that `calibrate` left. Reads all of it."""
        wanted = next(layer["sha256"] for layer in self.about["layers"] if layer["file"] == file)
        try:
            with open(self.folder / file, "rb") as opened:
                found = hashlib.file_digest(opened, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{self.folder / file}: cannot be read ({error.strerror})") from None
        if found != wanted:
            raise CheckpointError(f"{self.folder / file}: altered, its sha256 is not {STATISTICS}'s; calibrate again")


def about_digest(about: Mapping[str, Any]) -> str:
    """sha256 of statistics.json's content but for the digest itself."""
    value = {key: item for key, item in about.items() if key != "digest"}
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def open_statistics(folder: Path) -> Statistics:
    """Read statistics.json and the headers of its files. Raises CheckpointError on anything that is not right.

    The files' bytes are not hashed here, see `check_file`: Hessians may be terabytes.
    """
    path = folder / STATISTICS
    if not path.exists():
        raise CheckpointError(f"{folder}: no {STATISTICS} in it; give the folder that `calibrate` has finished")
    about = parse_json(read_file(path), path)
    if about.get("version") != VERSION:
        raise CheckpointError(f"{path}: version {about.get('version')!r}, this phasefold reads version {VERSION}")
    if about.get("digest") != about_digest(about):
        raise CheckpointError(f"{path}: altered: its content does not match its own digest; calibrate again")
    if wrong := _wrong(about):
        raise CheckpointError(f"{path}: {wrong}; calibrate again")
    files: dict[str, str] = {}
    for layer in about["layers"]:
        file = layer["file"]
        size, raw = read_header(folder / file)
        if size != layer["bytes"]:
            raise CheckpointError(f"{folder / file}: has {size:,} bytes, {STATISTICS} says {layer['bytes']:,}")
        for name, stored in parse_header(raw, size, file, folder / file):
            if name in files or not _is_kind(name, stored):
                what = f"stands in {files[name]}, too" if name in files else f"is {stored.dtype} {list(stored.shape)}"
                raise CheckpointError(f"{folder / file}: {name} {what}, which no statistic is; calibrate again")
            files[name] = file
    return Statistics(folder, about, files)


def _is_kind(name: str, stored: Stored) -> bool:
    return _KINDS.get(name.rpartition(".")[2]) == (stored.dtype, len(stored.shape))


def _wrong(about: Mapping[str, Any]) -> str | None:
    """What is wrong with statistics.json, in words: a matching digest says only that nothing changed since."""
    source, text, layers = about.get("source"), about.get("text"), about.get("layers")
    if not isinstance(source, dict) or not all(isinstance(source.get(key), str) for key in ("name", "digest")):
        return "source has no name and digest"
    if not is_folding(source.get("folding", {})):
        return "source.folding is no map from layers and parts to exponents"
    if not isinstance(text, dict) or not isinstance(text.get("digest"), str):
        return "text has no digest"
    if type(about.get("tokens")) is not int or about["tokens"] < 1:
        return "tokens is no number of tokens"
    if not isinstance(layers, list) or not layers:
        return "layers is no list of layers"
    for number, layer in enumerate(layers):
        file = layer.get("file") if isinstance(layer, dict) else None
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file):
            return f"layers[{number}] names no safetensors file in this folder"
        if type(layer.get("bytes")) is not int or not isinstance(layer.get("sha256"), str):
            return f"layers[{number}] has no bytes and sha256"
    return None
