"""K: scales of the KV cache, and whether the runtime can keep the cache in the dtype that is asked for."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ...formats import Part
from ..deployment import Deployment
from ..kv_layout import PHASES, is_mla, kv_layout, kv_scheme
from ..survey import KV_SCALE, Survey
from .rule import RUNTIME_NAMES, Fact, Rule, both

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")
#: names that SGLang's loader maps to the attention's own scale
_READ_BY_SGLANG = re.compile(r".*(k_proj\.k_scale|v_proj\.v_scale|attn_mqa\.[kv]_scale)$")


def _scales(survey: Survey) -> Iterator[tuple[str, Part]]:
    return ((name, part) for name, part in survey.extra.items() if KV_SCALE.match(name))


def _latent(survey: Survey, at: Deployment) -> Iterator[Fact]:
    if not is_mla(survey.model):
        return
    for name, _ in _scales(survey):
        if name.endswith("output_scale") and at.runtime == "vllm" and survey.method != "fp8":
            yield Fact(name, "is no parameter of latent attention: vLLM stops at it; delete it", "error", "output")
        elif survey.scalars.get(name) == 1.0:
            continue
        elif at.runtime == "sglang" and _READ_BY_SGLANG.match(name):
            message = "is not 1.0: SGLang writes the latent unscaled and reads it with this scale: wrong attention;"
            yield Fact(name, f"{message} fold it into the weights or delete it", None, "read")
        else:
            message = f"is dropped by {RUNTIME_NAMES[at.runtime]}, which keeps the latent at scale 1.0; delete it"
            yield Fact(name, message, "warning", "dropped")


def _heads(survey: Survey, at: Deployment) -> Iterator[Fact]:
    if is_mla(survey.model):
        return
    found = dict(_scales(survey))
    if found and at.runtime == "sglang":
        yield Fact(
            next(iter(found)),
            "is not read by SGLang, whose scale stays 1.0; fold it into the weights (convert --fold) or delete it",
        )
        return
    layers = {int(layer[1]) for name in found if (layer := _LAYER.match(name))}
    for name, part in found.items():
        value = survey.scalars.get(name, 1.0)
        if part.shape not in ((), (1,)) and not (len(part.shape) == 3 and part.shape[1:] == (1, 1)):
            yield Fact(name, f"has shape {list(part.shape)}: vLLM stops; one number is meant", "error", "shape")
        elif part.dtype not in ("F32", "BF16", "F16"):
            yield Fact(name, f"is {part.dtype}: it is cast in silence; F32 is meant", None, "dtype")
        elif not (math.isfinite(value) and value > 0):
            yield Fact(name, f"is {value}, which counts as missing: the scale stays 1.0; calibrate anew", None, "value")
    missing = [cache.layer for cache in survey.model.cache() if not cache.mtp and cache.layer not in layers]
    if found and missing:
        message = f"has no KV scale although {len(layers)} other layers have: it stays 1.0 there; calibrate all or none"
        yield Fact(f"layer {missing[0]}", message, None, "layers")


def _scheme(survey: Survey, at: Deployment) -> Iterator[Fact]:
    scheme = kv_scheme(survey.model)
    if scheme is None or at.kv_dtype != "auto":
        return
    eight, latent = scheme.get("type") == "float" and scheme.get("num_bits") == 8, is_mla(survey.model)
    if at.runtime == "vllm" and not eight and not latent:
        message = f"is {scheme.get('num_bits')}-bit {scheme.get('type')}, which vLLM refuses; set it to null"
        yield Fact("kv_cache_scheme", message, "error")
        return
    what = "SGLang keeps FP8 where it can read the scheme"
    if at.runtime == "vllm":
        what = "vLLM does not read it for latent attention" if latent else "vLLM keeps FP8"
    message = f"decides the KV dtype, and not alike on both runtimes: {what}; set it to null and give --kv-cache-dtype"
    yield Fact("kv_cache_scheme", message)


def _file(survey: Survey, at: Deployment) -> Iterator[Fact]:
    scheme = kv_scheme(survey.model)
    if at.kv_scales and (at.kv_dtype == "fp8_e4m3" or (at.kv_dtype == "auto" and isinstance(scheme, Mapping))):
        name = survey.model.architecture.name
        message = f"is given as --quantization-param-path, which SGLang refuses for {name}; leave it out"
        yield Fact(at.kv_scales, message)


def _dtype(survey: Survey, at: Deployment) -> Iterator[Fact]:
    if at.sm // 10 not in (9, 10):  # kv_layout knows Hopper and Blackwell
        message = (
            "is a card that no rule knows: kernels, KV dtype, page and backend are not judged; 90 and 100 to 103 are"
        )
        yield Fact(f"--sm {at.sm}", message, "warning")
        return
    runtime, name = RUNTIME_NAMES[at.runtime], f"--kv-cache-dtype {at.kv_dtype}"
    layouts = [kv_layout(survey.model, at, phase) for phase in PHASES[::-1]]
    layout = next((each for each in layouts if not each.refusal), layouts[0])  # some backends serve one phase only
    if layout.refusal:
        blamed = name
        if at.attention_backend and not _refused(survey, replace(at, attention_backend=None)):
            blamed = f"--attention-backend {at.attention_backend}"
        yield Fact(blamed, f"{layout.refusal}; change the command line")
    elif at.page_size is not None and layout.page not in (None, at.page_size):
        message = f"is changed to {layout.page} by {runtime}'s {layout.backend}; give that to both pools"
        yield Fact(f"--page-size {at.page_size}", message, "warning")
    scheme = kv_scheme(survey.model)
    if at.runtime == "vllm" and at.kv_dtype == "fp8_e5m2" and not is_mla(survey.model):
        if survey.method == "fp8" or (survey.method and scheme):
            yield Fact(name, "is refused by vLLM beside FP8 weights; give fp8_e4m3")


def _refused(survey: Survey, at: Deployment) -> bool:
    """Whether neither phase can be served so."""
    return all(kv_layout(survey.model, at, phase).refusal for phase in PHASES)


RULES = (
    Rule("K1", "no KV scales for latent attention but 1.0", {"vllm": "warning", "sglang": "silent"}, _latent),
    Rule("K2", "KV scales of grouped-query attention for all layers or none, one positive number each",
         {"vllm": "silent", "sglang": "warning"}, _heads),
    Rule("K3", "no kv_cache_scheme, so that the command line decides", both("warning"), _scheme),
    Rule("K4", "no file of KV scales where SGLang's model class takes none", {"sglang": "error"}, _file),
    Rule("K5", "the KV dtype, page and attention backend go together", both("error"), _dtype),
)  # fmt: skip
