"""Matrices that fit no storage format: which rule each of them breaks, and what to say of it. One fault, one rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...formats import PLAIN, Part
from ..survey import BROKEN, PARTS, Entry, Survey

_SCALES = (".weight_scale", ".weight_scale_inv")


class Flaw(NamedTuple):
    """rule: its number. message: for the first tensor of the kind. kind: of flaw. part: the tensor that is wrong."""

    rule: str
    kind: str
    message: str
    part: Part | None = None


def flaws(survey: Survey, rule: str) -> Iterator[tuple[Entry, Flaw]]:
    """The flawed tensors that break one rule; no matrices where the config's formats are not judged (C7 says so)."""
    foreign = bool(unjudged(survey))
    for entry in survey.entries:
        if entry.state != BROKEN or (foreign and len(entry.spec.shape) == 2):
            continue
        if (flaw := flaw_of(entry)).rule == rule:
            yield entry, flaw


def unjudged(survey: Survey) -> list[str]:
    """What of the config is no format that the rules know: quant_method, or schemes of config groups; or nothing."""
    if survey.method not in ("", "?", "fp8", "compressed-tensors"):
        return [f"quant_method {survey.method!r}"]
    found = []
    for name, group in survey.groups:
        weights = group.get("weights")
        if not isinstance(weights, dict):
            continue
        bits, kind, layout = weights.get("num_bits"), weights.get("type"), group.get("format")
        layout = layout or survey.quantization.get("format")
        judged = (kind == "int" and bits != 8 and layout == "pack-quantized") or (kind == "float" and bits == 8)
        if not judged and layout != "mxfp4-pack-quantized":
            found.append(f"config group {name} ({bits}-bit {kind}, {layout})")
    return found


def flaw_of(entry: Entry) -> Flaw:
    """Why a stored tensor fits no format; BROKEN entries only."""
    spec = entry.spec
    found = {part.suffix: part for part in entry.parts if part.suffix in ("", *PARTS)}
    have = ", ".join(f"{p.suffix.removeprefix('.') or 'tensor'} {p.dtype} {list(p.shape)}" for p in entry.parts)
    want = f"the config calls for {list(spec.shape)}"
    scales = [found[suffix] for suffix in _SCALES if suffix in found]
    weight, packed = found.get(".weight"), found.get(".weight_packed")
    if not found:
        return Flaw("C2", "no weight", f"has no weight in it ({have}); {want}")
    if len(spec.shape) != 2 or "" in found:
        part = found.get("", weight)
        if part is None or len(found) > 1:
            return Flaw("C2", "surplus", f"is no matrix, but has parts of a quantized one ({have}); delete them")
        return _plain(part, spec.shape, have, want)
    if weight and packed:
        return Flaw("C2", "surplus", f"has weight and weight_packed ({have}); keep the one that the config declares")
    if len(scales) > 1:
        return Flaw("C2", "surplus", f"has weight_scale and weight_scale_inv ({have}); keep the one of its format")
    scale = scales[0] if scales else None
    if weight is None and packed is None:
        return Flaw("C2", "missing", f"has no weight, only {have}: its parameter stays unset; convert it anew")
    if scale is None and (packed or (weight and weight.dtype not in PLAIN)):
        return Flaw("C2", "missing", f"has no scale ({have}): the parameter of the scale stays unset; convert it anew")
    if packed and scale:
        return _packed(packed, scale, found.get(".weight_shape"), spec.shape, have)
    assert weight is not None
    if weight.dtype in PLAIN and (scale or ".weight_shape" in found):
        return Flaw("C2", "surplus", f"is stored in floats, with parts of a quantized matrix ({have}); delete those")
    if scale is None:
        return _plain(weight, spec.shape, have, want)
    if weight.dtype != "F8_E4M3" or scale.dtype not in (*PLAIN, "F8_E8M0"):
        message = f"has a dtype that FP8 weights have not ({have}): it is cast in silence; F8_E4M3 and F32 are meant"
        return Flaw("P5", "fp8", message)
    if weight.shape != spec.shape:
        return Flaw("F1", "weight", f"is {list(weight.shape)}, {want}", weight)
    sizes = "128x128 blocks, an output channel or the whole tensor"
    return Flaw("F1", "scale", f"has scales of {list(scale.shape)}, which fit neither {sizes} ({have})", scale)


def _plain(part: Part, shape: tuple[int, ...], have: str, want: str) -> Flaw:
    if part.dtype not in PLAIN:
        return Flaw("P5", "plain", f"is {part.dtype} without a scale: it is cast in silence; BF16, F16 or F32 is meant")
    return Flaw("C2", f"shape {shape}", f"is {list(part.shape)}, {want}", part)


def _packed(packed: Part, scale: Part, sizes: Part | None, shape: tuple[int, ...], have: str) -> Flaw:
    rows, columns = shape
    fp4 = packed.dtype == "U8" and scale.dtype in ("U8", "F8_E8M0")
    words = (rows, columns // (2 if fp4 else 8))
    if not fp4 and (packed.dtype != "I32" or scale.dtype not in PLAIN):
        message = f"has a dtype that INT4 has not ({have}): it is cast in silence; I32 words and BF16 scales are meant"
        return Flaw("P5", "int4", message)
    if scale.suffix != ".weight_scale":
        return Flaw("C2", "surplus", f"is packed, but its scale has the name of FP8's ({have}); call it weight_scale")
    if packed.shape != words or columns % 8:
        return Flaw("P1", f"packed {shape}", f"is {list(packed.shape)}, the config calls for {list(words)}", packed)
    if not fp4 and sizes and (sizes.shape != (2,) or sizes.dtype not in ("I32", "I64")):
        what = f"is {sizes.dtype} {list(sizes.shape)}"
        return Flaw("P3", "shape", f"weight_shape {what}; two integers, [out, in], are meant", sizes)
    return Flaw("P2", f"scale {shape}", f"has scales of {list(scale.shape)}, which fit no group size ({have})", scale)
