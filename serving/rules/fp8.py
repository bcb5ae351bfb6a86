"""F: FP8 in blocks, by channel and by tensor, under DeepSeek's names and under compressed-tensors'."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..deployment import Deployment
from ..survey import Survey
from . import matching
from .rule import RUNTIME_NAMES, Fact, Rule, both, shape_severity
from .states import flaws

_WHERE = "quantization_config"


def _config(survey: Survey) -> Mapping[str, Any]:
    """The config where it is of quant_method fp8, else nothing."""
    config = survey.quantization
    return config if survey.method == "fp8" and isinstance(config, Mapping) else {}


def _shapes(survey: Survey, at: Deployment) -> Iterator[Fact]:
    for entry, flaw in flaws(survey, "F1"):
        spec, level, name = entry.spec, None, entry.module + (flaw.part.suffix if flaw.part else "")
        if flaw.part:
            expected = spec.shape if flaw.kind == "weight" else tuple(-(-size // 128) for size in spec.shape)
            level = shape_severity(spec.role, entry.module, flaw.part.shape, expected, at.runtime)
            one_wide = len(flaw.part.shape) == 2 and flaw.part.shape[1] == 1
            if spec.role == "routed_expert" and flaw.kind == "scale" and one_wide:
                level = "silent"  # SGLang copies a column into as many as there are
        yield Fact(name, flaw.message, level, flaw.kind)
    yield from matching.facts(survey, at, "F1", "mend weight_block_size or the strategy", "error")


def _names(survey: Survey, at: Deployment) -> Iterator[Fact]:
    facts = list(matching.facts(survey, at, "F2", "rename the scales, or declare the other quant_method"))
    stops = any(fact.severity == "error" for fact in facts)  # then nothing of the others is served either
    for fact in facts:
        message = f"has its scale under the other spelling's name: {fact.message}"
        yield fact._replace(message=message, severity="error" if stops else fact.severity)


def _scheme(survey: Survey, at: Deployment) -> Iterator[Fact]:
    config, runtime = _config(survey), RUNTIME_NAMES[at.runtime]
    block, activations = config.get("weight_block_size"), config.get("activation_scheme")
    if block is not None and block != [128, 128]:
        yield Fact(f"{_WHERE}.weight_block_size", f"is {block}; the kernels have blocks of [128, 128]")
    if config and activations not in ("dynamic", "static"):
        yield Fact(f"{_WHERE}.activation_scheme", f'is {activations!r}: {runtime} stops; "dynamic" is meant')
    if block and activations == "static":
        yield Fact(f"{_WHERE}.activation_scheme", f'is "static" beside blocks: {runtime} stops; set it to "dynamic"')
    static = activations == "static" and not block
    for name, group in survey.groups:
        weights, inputs = group.get("weights"), group.get("input_activations")
        if not isinstance(weights, Mapping) or (weights.get("type"), weights.get("num_bits")) != ("float", 8):
            continue
        where, strategy = f"{_WHERE}.config_groups.{name}", weights.get("strategy")
        if strategy not in ("block", "channel", "tensor"):
            yield Fact(f"{where}.weights.strategy", f"is {strategy!r}, expected block, channel or tensor")
        elif strategy == "block" and weights.get("block_structure") != [128, 128]:
            yield Fact(f"{where}.weights.block_structure", f"is {weights.get('block_structure')}, expected [128, 128]")
        if not isinstance(inputs, Mapping):
            yield Fact(f"{where}.input_activations", "are not given: FP8 of weights alone is not judged", "warning")
        elif not inputs.get("dynamic"):
            static = True
            if strategy == "block":
                yield Fact(f"{where}.input_activations.dynamic", f"is not true beside blocks: {runtime} stops; set it")
    yield from _input_scales(survey, at, static=static)


def _input_scales(survey: Survey, at: Deployment, *, static: bool) -> Iterator[Fact]:
    runtime = RUNTIME_NAMES[at.runtime]
    for entry in survey.entries:
        if not entry.known or (not static and len(entry.parts) == 1):
            continue
        has = any(part.suffix == ".input_scale" for part in entry.companions)
        if has and not static:
            what = "stops at it" if at.runtime == "vllm" else "skips it"
            message = f"is stored, but activations are dynamic: {runtime} {what}; delete it"
            yield Fact(f"{entry.module}.input_scale", message, None if at.runtime == "vllm" else "warning")
        elif static and not has and (entry.state or "").startswith("fp8"):
            message = "is missing, but activations are static: its parameter stays unset; set them to dynamic"
            yield Fact(f"{entry.module}.input_scale", message, "silent")


def _unconverted(survey: Survey, at: Deployment) -> Iterator[Fact]:
    config = _config(survey)
    for key in matching.no_lists(survey):
        kind = type(config[key]).__name__
        message = f"is a {kind}, in whose text the runtime looks for names" if kind == "str" else f"is a {kind}"
        yield Fact(f"{_WHERE}.{key}", f"{message}; write a list of names", None if kind == "str" else "error")
    lists = [listed for key in matching.LISTS if isinstance(listed := config.get(key), list)]
    listed = [name for names in lists for name in names if isinstance(name, str)]
    regex = next((name for name in listed if name.startswith("re:") or "*" in name), "")
    hint = f"; {regex!r} is taken as a name, not as a pattern" if regex else ""
    yield from matching.facts(
        survey, at, "F4", f"list the module's full name in modules_to_not_convert, or take it out{hint}"
    )


def _powers(survey: Survey, at: Deployment) -> Iterator[Fact]:
    config = _config(survey)
    if config.get("weight_block_size") and config.get("scale_fmt") != "ue8m0" and at.sm >= 100:
        message = "is not ue8m0: on Blackwell scales are rounded to powers of two while they are loaded, which loses"
        yield Fact(f"{_WHERE}.scale_fmt", f"{message} precision unless they are; convert with power-of-two scales")


def _one_scale(survey: Survey, at: Deployment) -> Iterator[Fact]:
    for entry in survey.entries:
        if entry.state != "fp8-tensor" or entry.spec.role != "attention.q_a":
            continue
        stem = entry.module.removesuffix("q_a_proj")
        ours, other = f"{entry.module}.weight_scale", f"{stem}kv_a_proj_with_mqa.weight_scale"
        first, second = survey.scalars.get(ours), survey.scalars.get(other)
        if first is not None and second is not None and first != second:
            message = f"is {first:.6g}, that of kv_a_proj_with_mqa {second:.6g}: SGLang takes the first one for both"
            yield Fact(ours, f"{message}; quantize both with one scale, or by blocks", kind="differ")


def _vision(survey: Survey, at: Deployment) -> Iterator[Fact]:
    yield from matching.facts(survey, at, "F7", "list it in modules_to_not_convert, or declare compressed-tensors")


RULES = (
    Rule("F1", "FP8 weights and scales have the shapes of declared blocks, channels or tensor", both("error"), _shapes),
    Rule("F2", "scales are weight_scale_inv under quant_method fp8, weight_scale under compressed-tensors",
         {"vllm": "error", "sglang": "silent"}, _names),
    Rule("F3", "blocks of 128x128 with dynamic activations, and activation scales as declared", both("error"), _scheme),
    Rule("F4", "modules_to_not_convert lists exactly what is not FP8, by the runtime's full names",
         both("silent"), _unconverted),
    Rule("F5", "scales are declared powers of two for Blackwell", both("warning"), _powers),
    Rule("F6", "q_a_proj and kv_a_proj_with_mqa in FP8 by tensor have one scale", {"sglang": "silent"}, _one_scale),
    Rule("F7", "vision tower and projector are left alone under quant_method fp8", {"vllm": "silent"}, _vision),
)  # fmt: skip
