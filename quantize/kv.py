"""KV scales in an artifact: the tensors that a runtime reads them from, why it may read none, the units that add them.

Only vLLM reads any, and only for grouped-query attention: the families give such tensors the role "attention.kv_scale".
Everywhere else a scale is dropped, refused, or, worse, applied when the cache is read and not when it is written. There
the scale belongs into the weights (`convert --fold`), and the cache is right at scale 1.0.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import PlanError
from ..families import CacheLayer, CachePart, Model
from ..formats import Part
from ..formats.checkpoint import Checkpoint
from ..formats.kv_scales import KVScales
from .account import Account
from .choose import Choice
from .extras import Extras
from .fold import exponents, held, settled
from .origin import origins
from .units import Output, Unit

ROLE = "attention.kv_scale"
#: source format of a unit that has no source
NO_SOURCE = "none"

FOLD = "fold the scales into the weights (convert --fold), then the cache is right at scale 1.0 on every runtime"
_VLLM_GQA = (
    "vLLM reads them, with --kv-cache-dtype fp8, from tensors that `convert --kv` adds; give both pools the same"
)
_VLLM_MLA = (
    "vLLM 0.32.0 has no scale for latent attention: it drops what a checkpoint holds and stores the latent at scale "
    f"1.0; {FOLD}"
)
_SGLANG_GQA = (
    "SGLang 0.5.23's class for {name} reads no scale from a checkpoint and refuses --quantization-param-path: it "
    f"stores at scale 1.0; {FOLD}"
)
_SGLANG_MLA = (
    "SGLang 0.5.23 stores the latent unscaled and reads it with the scale that a checkpoint holds, which is wrong "
    f"attention for any but 1.0, and its class for {{name}} refuses --quantization-param-path; {FOLD}"
)
_DSA = "; fp8_ds_mla rows (both runtimes with DSA on Hopper) need none: each token carries a scale for every 128 values"


def main_parts(layer: CacheLayer) -> tuple[CachePart, ...]:
    """What attention reads of a layer, without the indexer's keys; none with linear attention."""
    return tuple(part for part in layer.parts if part.name != "index_k")


def why(model: Model, runtime: str) -> str:
    """What a runtime does with KV scales of this model, and what to do about it."""
    names = {part.name for layer in model.cache() for part in layer.parts}
    mla, name = "kv_c" in names, model.architecture.name
    if runtime == "vllm":
        text = _VLLM_MLA if mla else _VLLM_GQA
    else:
        text = (_SGLANG_MLA if mla else _SGLANG_GQA).format(name=name)
    return text + (_DSA if "index_k" in names else "")


def scale_tensors(model: Model, scales: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Name -> value of the tensors that vLLM reads these scales (layer -> part -> scale) from; {} if it reads none."""
    return {
        spec.name: scales[spec.layer][spec.name.rpartition(".")[2].removesuffix("_scale")]
        for spec in model.tensors()
        if spec.role == ROLE and not spec.mtp and spec.layer is not None
    }


def misfit(kv: KVScales, model: Model) -> str | None:
    """Why a manifest is not of this model, in words; None where its layers are this model's."""
    if kv.architecture != model.architecture.name:
        return f"it is of {kv.architecture}, the model is {model.architecture.name}"
    ours = [layer for layer in model.cache() if not layer.mtp]
    if kv.num_layers != len(ours):
        return f"it is of {kv.num_layers} layers, the model has {len(ours)}"
    wanted = {layer.layer: main_parts(layer) for layer in ours if main_parts(layer)}
    held = {
        layer.layer: tuple(CachePart(name, part.heads, part.width) for name, part in layer.parts.items())
        for layer in kv.layers
    }
    for number in sorted(wanted.keys() | held.keys()):
        have, parts = held.get(number, ()), wanted.get(number, ())
        if sorted(have) != sorted(parts):
            return f"layer {number}: it is of {_words(have)}, the model keeps {_words(parts)}"
    return None


def _words(parts: tuple[CachePart, ...]) -> str:
    return " and ".join(f"{part.name} {part.heads} x {part.width}" for part in parts) or "no cache"


def with_kv_scales(extras: Extras, path: Path, kv: KVScales, checkpoint: Checkpoint, model: Model) -> Extras:
    """A job's extras and what a manifest of KV scales adds to them. PlanError where it is of another model.

    Scales of another release of the same model (other digest, same layers) are taken, and the plan's notes say so.
    """
    _refuse_misfit(path, kv, checkpoint, model)
    if reason := other_folding(kv, checkpoint):
        raise PlanError(f"{path}: {reason}; calibrate {checkpoint.label} itself")
    return replace(extras, kv=_about(kv, checkpoint), kv_scales=kv.tensors("vllm"))


def other_folding(kv: KVScales, checkpoint: Checkpoint) -> str | None:
    """Why a manifest's cache is by powers of two another than this checkpoint's; None where it is not."""
    ours, theirs = held(checkpoint), kv.source["folding"]
    folder, name = checkpoint.folder, kv.source["name"]
    if ours == theirs:
        return None
    if not theirs:
        return f"{folder} is folded, and the scales were calibrated on {name}, which is not"
    if not ours:
        return f"the scales were calibrated on {name}, which is folded, and {folder} is not"
    return f"{folder} is folded otherwise than {name}, which the scales were calibrated on"


def with_folding(extras: Extras, path: Path, kv: KVScales, checkpoint: Checkpoint, model: Model) -> Extras:
    """A job's extras and the folding that makes scale 1.0 right, of each part for itself. Reads weights: `fold.settle`.

    PlanError where the manifest is of another model, or where the source is folded already.
    """
    _refuse_misfit(path, kv, checkpoint, model)
    if kv.source["folding"] and (reason := other_folding(kv, checkpoint)):
        raise PlanError(f"{path}: {reason}; calibrate {checkpoint.label} itself")
    scales = {layer.layer: {name: part.scale for name, part in layer.parts.items()} for layer in kv.layers}
    found = settled(checkpoint, exponents(scales))
    return replace(extras, folding=found.folding, lowered=found.lowered, folded_by=_about(kv, checkpoint))


def _refuse_misfit(path: Path, kv: KVScales, checkpoint: Checkpoint, model: Model) -> None:
    if reason := misfit(kv, model):
        raise PlanError(f"{path}: not of the model in {checkpoint.label}: {reason}; calibrate that one")


def _about(kv: KVScales, checkpoint: Checkpoint) -> dict[str, Any]:
    same = kv.source["digest"] in (checkpoint.digest, *origins(checkpoint))
    return kv.identity() | {"same_source": same}


def replaced(choices: list[Choice], extras: Extras) -> tuple[list[Choice], dict[str, str]]:
    """Choices without those for KV scales that the job brings anew, and the reason by tensor.

    PlanError where the job folds: the cache is then another one, and no scale of before is right for it.
    """
    if extras.folding != extras.held:
        if extras.kv:
            raise PlanError("KV scales are folded into the weights or added as tensors, not both; give one of the two")
        if old := next((choice.item.module for choice in choices if choice.item.spec.role == ROLE), None):
            way, made = ("fold", "folded") if extras.folding else ("unfold", "unfolded")
            raise PlanError(f"{old}: the source has KV scales, which are wrong once it is {made}; {way} its own source")
    gone = {choice.item.module: "KV scale of the source, another takes its place"
            for choice in choices if choice.item.module in extras.kv_scales}  # fmt: skip
    return [choice for choice in choices if choice.item.module not in gone], gone


def added(found: Account, extras: Extras, *, declared: bool) -> list[Unit]:
    """The units that add KV scales, in the order of the layers.

    declared: the artifact has a quantization_config. PlanError where the scales are not those of the model's layers,
    all of them, or where no runtime would read them.
    """
    if not extras.kv_scales:
        return []
    names = [spec.name for spec in found.model.tensors() if spec.role == ROLE and not spec.mtp]
    if not declared:
        raise PlanError(
            f"KV scales: vLLM reads them beside a quantization_config only, and this artifact has none; {FOLD}"
        )
    if wrong := sorted(set(names) ^ extras.kv_scales.keys()):
        raise PlanError(f"KV scales: {wrong[0]}: the model's layers need one for k and v each, and nothing else")
    for name, value in extras.kv_scales.items():
        if not (0 < value < math.inf and math.frexp(value)[0] == 0.5 and -126 <= math.log2(value) <= 127):
            raise PlanError(f"KV scales: {name} is {value}, expected a power of two from 2^-126 to 2^127")
    part = Part("", "F32", (1,))
    return [
        Unit(name, ROLE, (1,), "added", (), NO_SOURCE, "f32", (Output(name, part, 0),), value=extras.kv_scales[name])
        for name in names
    ]


def added_bytes(unit: Unit) -> bytes:
    """The data of a unit that is added."""
    assert unit.value is not None
    return struct.pack("<f", unit.value)


def notes(model: Model, extras: Extras) -> list[str]:
    """What whoever serves the artifact must know of its KV scales."""
    if not extras.kv:
        return []
    said = []
    if not extras.kv["same_source"]:
        name = extras.kv["source"]["name"]
        said.append(f"KV scales: calibrated on {name}, another checkpoint of this shape; they must be of one model")
    if extras.kv_scales:
        said.append(f"KV scales: {why(model, 'vllm')}")
        said.append(f"KV scales: {why(model, 'sglang')}")
        if any(layer.mtp for layer in model.cache()):
            said.append("KV scales: the MTP layer has none, calibration does not run it: its cache stays at scale 1.0")
        return said
    return [*said, *(f"KV scales: none added: {why(model, runtime)}" for runtime in ("vllm", "sglang"))]
