"""kv_scales.json, the KV-scale manifest: for each layer and cached part what it holds, and the scale to store it at.

Stored is e4m3(x / scale). A scale is a power of two, so that it can be folded into the weights without a rounding, and
so that a value is as exact at any scale as long as it neither clips nor underflows. The file holds nothing that depends
on the machine or the time: the same statistics give the same bytes. `kv_scales.schema.json` beside this file describes
it for others, docs/kv-scales.md for people.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError
from .checkpoint import parse_json, read_file
from .manifest import is_folding

VERSION = 1
KV_DTYPE = "fp8_e4m3"
RUNTIMES = ("vllm", "sglang")
#: largest finite e4m3
E4M3_MAX = 448.0
#: largest float32, which all numbers in the file stay below
_MOST = (2 - 2**-23) * 2.0**127

_AGAIN = "make it again with `phasefold kv`"
_TENSOR = re.compile(r"(?:.*\.)?layers\.(\d{1,6})\.self_attn\.([kv])_scale")


class Loss(NamedTuple):
    """What e4m3 makes of a part's values at one scale, as shares of all its values.

    zero: not zero, and stored as zero. subnormal: stored below the smallest normal number, with fewer than three bits
    of mantissa. clipped: beyond the largest number. relative_error: ||x - x'|| / ||x|| over all values (Frobenius).
    """

    zero: float
    subnormal: float
    clipped: float
    relative_error: float


class PartScale(NamedTuple):
    """One part of one layer's cache: "kv_c" and "k_pe", or "k" and "v".

    heads, width: its shape for a token. amax, p999, p9999, rms: of the magnitudes of tokens * heads * width values.
    scale: the power of two to store it at. at_row: the loss at its layer's row scale, None where there is none.
    """

    heads: int
    width: int
    tokens: int
    amax: float
    p999: float
    p9999: float
    rms: float
    scale: float
    at_scale: Loss
    at_one: Loss
    at_row: Loss | None

    @property
    def exponent(self) -> int:
        """e of the folding that makes scale 1.0 right: values times 2^e."""
        return 1 - math.frexp(self.scale)[1]


class LayerScales(NamedTuple):
    """One decoder layer. row_scale: of latent attention, whose plain FP8 row has one scale for kv_c and k_pe."""

    layer: int
    row_scale: float | None
    parts: Mapping[str, PartScale]


@dataclass(frozen=True, slots=True)
class KVScales:
    """The content of kv_scales.json.

    tool: version of phasefold. source: name and digest of the checkpoint that was calibrated, and the folding that it
    has (layer -> part -> exponent): the cache is by so much off that of the model as trained. architecture: its
    model_type. statistics, text: digests of the statistics and of their text. tokens: of that text, held-out ones
    included; each part says how many are behind its own numbers.
    headroom: how many times amax a scale has room for, at least.
    num_layers: decoder layers; layers_without_cache: those with linear attention; mtp_layers: behind them, never
    calibrated. bytes_per_token: layout -> bytes of all decoder layers; indexer_bytes_per_token: of the keys of sparse
    attention, which have scales of their own whatever the layout.
    runtimes: "vllm" and "sglang" -> {"reads", "why", "tensors"}: what may be given to each, and why.
    """

    tool: str
    source: Mapping[str, Any]
    architecture: str
    statistics: str
    text: str
    tokens: int
    headroom: float
    num_layers: int
    layers_without_cache: tuple[int, ...]
    mtp_layers: int
    kv_dtype: str
    bytes_per_token: Mapping[str, int]
    indexer_bytes_per_token: int
    notes: tuple[str, ...]
    runtimes: Mapping[str, Mapping[str, Any]]
    layers: tuple[LayerScales, ...]

    def to_json(self) -> dict[str, Any]:
        """As the file holds it; the last key is a digest of all the others."""
        value: dict[str, Any] = {"version": VERSION}
        value |= {name: getattr(self, name) for name in self.__slots__}
        value["layers_without_cache"], value["notes"] = list(self.layers_without_cache), list(self.notes)
        value["layers"] = [_layer_json(layer) for layer in self.layers]
        return value | {"digest": _digest(value)}

    @property
    def digest(self) -> str:
        """Identifies the manifest: equal digests mean equal scales of one model."""
        return str(self.to_json()["digest"])

    def to_bytes(self) -> bytes:
        """The file's bytes; a line for each key, and for each layer."""
        lines = [f"  {json.dumps(key)}: {_lines(item)}" for key, item in self.to_json().items()]
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()

    def identity(self) -> dict[str, Any]:
        """What an artifact's manifest says of the scales that it was made with."""
        source = {key: self.source[key] for key in ("name", "digest")}
        return {"digest": self.digest, "source": source, "tokens": self.tokens, "headroom": self.headroom}

    def row_scales(self) -> dict[int, dict[str, float]]:
        """Layer -> part -> scale of plain FP8 rows: each part's own, or the row's where there is one."""
        return {
            layer.layer: {name: layer.row_scale or part.scale for name, part in layer.parts.items()}
            for layer in self.layers
        }

    def tensors(self, runtime: str) -> dict[str, float]:
        """Name -> value of the tensors (F32 [1]) that a runtime reads scales from; empty where it reads none."""
        return {name: float(tensor["value"]) for name, tensor in self.runtimes[runtime]["tensors"].items()}


def read_kv_scales(path: Path) -> KVScales:
    """Read and check kv_scales.json. Raises CheckpointError with the first thing that is wrong."""
    value = parse_json(read_file(path), path)
    digest, version = value.pop("digest", None), value.get("version")
    if version != VERSION:
        raise CheckpointError(f"{path}: KV scales of version {version!r}, this phasefold reads version {VERSION}")
    if digest != _digest(value):
        raise CheckpointError(f"{path}: altered: its content does not match its own digest; {_AGAIN}")
    del value["version"]
    try:
        made = _read(value)
    except _Wrong as wrong:
        raise CheckpointError(f"{path}: {wrong}; {_AGAIN}") from None
    return made


class _Wrong(Exception):
    """What is wrong with a value, in words."""


def _read(value: dict[str, Any]) -> KVScales:
    _keys(value, KVScales.__slots__, "the file")
    for key in ("tool", "architecture", "statistics", "text"):
        if not isinstance(value[key], str):
            raise _Wrong(f"{key} is {_shown(value[key])}, expected text")
    source = value["source"]
    _keys(source, ("name", "digest", "folding"), "source")
    if not isinstance(source["name"], str) or not isinstance(source["digest"], str):
        raise _Wrong("source: name and digest are not text")
    if not is_folding(source["folding"]):
        raise _Wrong("source: folding is no map from layers and parts to exponents")
    for key, least in (("tokens", 1), ("num_layers", 1), ("mtp_layers", 0), ("indexer_bytes_per_token", 0)):
        _count(value[key], key, least)
    if not 1 <= _number(value["headroom"], "headroom"):
        raise _Wrong(f"headroom is {value['headroom']}: below 1 the largest values would clip")
    if value["kv_dtype"] != KV_DTYPE:
        raise _Wrong(f"kv_dtype is {_shown(value['kv_dtype'])}, expected {KV_DTYPE}")
    sizes = value["bytes_per_token"]
    if not isinstance(sizes, dict) or not {"bf16", KV_DTYPE} <= sizes.keys() <= {"bf16", KV_DTYPE, "fp8_ds_mla"}:
        raise _Wrong("bytes_per_token has not the layouts bf16, fp8_e4m3 and, for latent attention, fp8_ds_mla")
    for key, size in sizes.items():
        _count(size, f"bytes_per_token.{key}", 1)
    notes, without = value["notes"], value["layers_without_cache"]
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise _Wrong("notes is no list of sentences")
    if not isinstance(without, list) or not all(type(number) is int for number in without):
        raise _Wrong("layers_without_cache is no list of layers")
    if not isinstance(value["layers"], list):
        raise _Wrong("layers is no list")
    layers = tuple(_layer(item) for item in value["layers"])
    told = {layer.layer for layer in layers} | set(without)
    if (gone := next((number for number in range(value["num_layers"]) if number not in told), None)) is not None:
        raise _Wrong(f"layer {gone} is missing")
    if [layer.layer for layer in layers] != [n for n in range(value["num_layers"]) if n not in without]:
        raise _Wrong("layers are not the model's, each once and in order")
    _runtimes(value["runtimes"], layers)
    lists = {"notes": tuple(notes), "layers_without_cache": tuple(without), "layers": layers}
    return KVScales(**(value | lists))


def _layer(value: Any) -> LayerScales:
    _keys(value, ("layer", "row_scale", "parts"), "a layer")
    number = _count(value["layer"], "layer", 0)
    where, parts = f"layer {number}", value["parts"]
    if not isinstance(parts, dict) or set(parts) not in ({"k", "v"}, {"kv_c", "k_pe"}):
        raise _Wrong(f"{where}: parts are not k and v, nor kv_c and k_pe")
    found = {name: _part(part, f"{where}: {name}") for name, part in parts.items()}
    row = None if value["row_scale"] is None else _power(value["row_scale"], f"{where}: row_scale")
    if row != (max(part.scale for part in found.values()) if "kv_c" in found else None):
        raise _Wrong(f"{where}: row_scale is {row}, expected the larger scale of kv_c and k_pe, and none for k and v")
    if any((part.at_row is None) != (row is None) for part in found.values()):
        raise _Wrong(f"{where}: at_row_scale stands where there is no row_scale, or the other way round")
    return LayerScales(number, row, found)


def _part(value: Any, where: str) -> PartScale:
    counts, losses = ("heads", "width", "tokens"), ("at_scale", "at_one", "at_row_scale")
    _keys(value, (*counts, "amax", "p99.9", "p99.99", "rms", "scale", *losses), where)
    heads, width, tokens = (_count(value[key], f"{where}: {key}", 1) for key in counts)
    amax, p999, p9999, rms = (_number(value[key], f"{where}: {key}") for key in ("amax", "p99.9", "p99.99", "rms"))
    scale = _power(value["scale"], f"{where}: scale")
    if min(p999, p9999, rms) < 0:
        raise _Wrong(f"{where}: a quantile or rms of magnitudes is negative")
    if not 0 < amax <= E4M3_MAX * scale:
        raise _Wrong(f"{where}: amax is {amax}, which scale {scale} does not hold: it would clip")
    row = None if value["at_row_scale"] is None else _loss(value["at_row_scale"], f"{where}: at_row_scale")
    chosen, one = (_loss(value[key], f"{where}: {key}") for key in losses[:2])
    return PartScale(heads, width, tokens, amax, p999, p9999, rms, scale, chosen, one, row)


def _loss(value: Any, where: str) -> Loss:
    _keys(value, Loss._fields, where)
    found = Loss(*(_number(value[key], f"{where}: {key}") for key in Loss._fields))
    if min(found) < 0 or max(found[:3]) > 1:
        raise _Wrong(f"{where}: shares lie between 0 and 1, errors above 0")
    return found


def _runtimes(value: Any, layers: tuple[LayerScales, ...]) -> None:
    """The tensors must have the layers' own scales: a file that contradicts itself is no guide."""
    _keys(value, RUNTIMES, "runtimes")
    scales = {(layer.layer, name): part.scale for layer in layers for name, part in layer.parts.items()}
    for runtime, given in value.items():
        where = f"runtimes.{runtime}"
        _keys(given, ("reads", "why", "tensors"), where)
        if given["reads"] not in ("tensors", "nothing") or not isinstance(given["why"], str):
            raise _Wrong(f"{where}: reads is tensors or nothing, why a sentence")
        if not isinstance(given["tensors"], dict) or bool(given["tensors"]) != (given["reads"] == "tensors"):
            raise _Wrong(f"{where}: reads {given['reads']}, and its tensors do not fit that")
        seen = set()
        for name, tensor in given["tensors"].items():
            _keys(tensor, ("dtype", "shape", "value"), f"{where}: {name}")
            if (tensor["dtype"], tensor["shape"]) != ("F32", [1]):
                raise _Wrong(f"{where}: {name}: a scale is F32 of shape [1]")
            match = _TENSOR.fullmatch(name)
            place = (int(match[1]), match[2]) if match else (-1, "")
            if scales.get(place) != tensor["value"]:
                raise _Wrong(f"{where}: {name} is {tensor['value']}, its layer says {scales.get(place, 'nothing')}")
            seen.add(place)
        if seen and seen != scales.keys():
            raise _Wrong(f"{where}: layer {min(scales.keys() - seen)[0]} has no tensor; all layers or none")


def _keys(value: Any, names: tuple[str, ...], where: str) -> None:
    if not isinstance(value, dict):
        raise _Wrong(f"{where} is {_shown(value)}, expected an object")
    if missing := [name for name in names if name not in value]:
        raise _Wrong(f"{where}: {missing[0]} is missing")
    if unknown := sorted(value.keys() - set(names)):
        raise _Wrong(f"{where}: {unknown[0]!r} is unknown")


def _count(value: Any, where: str, least: int) -> int:
    if type(value) is not int or value < least:
        raise _Wrong(f"{where} is {_shown(value)}, expected an integer of at least {least}")
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Wrong(f"{where} is {_shown(value)}, expected a number")
    if abs(value) > _MOST:
        raise _Wrong(f"{where} is larger than any float32")
    return float(value)


def _power(value: Any, where: str) -> float:
    number = _number(value, where)
    if not (number > 0 and math.frexp(number)[0] == 0.5 and -126 <= math.log2(number) <= 127):
        raise _Wrong(f"{where} is {number}, expected a power of two from 2^-126 to 2^127")
    return number


def _shown(value: object) -> str:
    return repr(value[:40]) if isinstance(value, str) else f"{value}" if isinstance(value, int | float) else "not that"


def _layer_json(layer: LayerScales) -> dict[str, Any]:
    parts = {}
    for name, part in layer.parts.items():
        at = [None if loss is None else loss._asdict() for loss in (part.at_scale, part.at_one, part.at_row)]
        held = part._asdict()
        parts[name] = {key: held[key] for key in ("heads", "width", "tokens", "amax")}
        parts[name] |= {"p99.9": part.p999, "p99.99": part.p9999, "rms": part.rms, "scale": part.scale}
        parts[name] |= dict(zip(("at_scale", "at_one", "at_row_scale"), at, strict=True))
    return {"layer": layer.layer, "row_scale": layer.row_scale, "parts": parts}


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _lines(item: Any) -> str:
    if isinstance(item, list) and item:
        return "[\n" + ",\n".join(f"    {json.dumps(entry)}" for entry in item) + "\n  ]"
    if isinstance(item, Mapping) and any(isinstance(entry, Mapping) for entry in item.values()):
        return (
            "{\n" + ",\n".join(f"    {json.dumps(key)}: {json.dumps(entry)}" for key, entry in item.items()) + "\n  }"
        )
    return json.dumps(item)
