"""P: packed INT4 of compressed-tensors, from its tensors to the names in the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..deployment import Deployment
from ..survey import Survey
from . import matching
from .rule import RUNTIME_NAMES, Fact, Rule, both, is_down, shape_severity
from .states import flaws

GROUPS = (32, 64, 128)
_CONFIG = "quantization_config"
#: roles whose modules SGLang joins or splits by `weight`
_JOINED = {
    "attention.q_a": "joins it with kv_a_proj_with_mqa tensor by tensor and stops at the joined weight_shape",
    "attention.kv_a": "joins it with q_a_proj tensor by tensor and stops at the joined weight_shape",
    "attention.kv_b": "splits it for latent attention and finds no `weight` in it",
}


def int4_groups(survey: Survey) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The config groups of packed integers, as (where, its `weights`)."""
    for name, group in survey.groups:
        weights = group.get("weights")
        if isinstance(weights, Mapping) and weights.get("type") == "int":
            yield f"{_CONFIG}.config_groups.{name}.weights", weights


def _words(survey: Survey, at: Deployment) -> Iterator[Fact]:
    for entry, flaw in flaws(survey, "P1"):
        spec, level = entry.spec, None
        if flaw.part:
            words = (spec.shape[0], spec.shape[1] // (8 if flaw.part.dtype == "I32" else 2))
            level = shape_severity(spec.role, entry.module, flaw.part.shape, words, at.runtime)
        yield Fact(f"{entry.module}.weight_packed", flaw.message, level, flaw.kind)


def _scales(survey: Survey, at: Deployment) -> Iterator[Fact]:
    runtime = RUNTIME_NAMES[at.runtime]
    for entry, flaw in flaws(survey, "P2"):
        spec = entry.spec
        level = "error"
        if spec.role == "routed_expert" and flaw.part:
            level = _too_few(flaw.part.shape, spec.shape, survey, at)
        yield Fact(f"{entry.module}.weight_scale", flaw.message, level, flaw.kind)
    for found in matching.mismatches(survey, at.runtime, "P2"):
        member = found.member
        level = "error"
        if member.role == "routed_expert":
            declared = _group_size(found.declared, survey)
            stored = int((member.format or "").removeprefix("int4-g"))
            level = "silent" if at.runtime == "vllm" and stored > declared else "error"
        message = f"has groups of {(member.format or '').removeprefix('int4-g')}, but the config says {found.declared}"
        what = f"{runtime} fills a part of the scales and serves 1.0 for the rest" if level == "silent" else "it stops"
        yield Fact(f"{member.name}.weight_scale", f"{message}: {what}; mend group_size", level)
    for kind, (name, _) in survey.kinds.items():
        if (kind.state or "").startswith("int4") and kind.scale_dtype == "F32":
            message = "is F32 and is rounded to the model's dtype while it is loaded; store it in BF16"
            yield Fact(f"{name}.weight_scale", message, "warning")


def _group_size(declared: str | None, survey: Survey) -> int:
    if declared and declared.startswith("int4-g"):
        return int(declared.removeprefix("int4-g"))
    sizes = [weights.get("group_size") for _, weights in int4_groups(survey)]
    return next((size for size in sizes if isinstance(size, int)), 0)


def _too_few(found: tuple[int, ...], shape: tuple[int, ...], survey: Survey, at: Deployment) -> str:
    """What comes of an expert's scales that fit no group: those that are missing stay 1.0 on vLLM."""
    size = _group_size(None, survey)
    expected = (shape[0], shape[1] // size) if size else shape
    smaller = len(found) == 2 and all(a <= b for a, b in zip(found, expected, strict=True))
    if at.runtime == "vllm":
        return "silent" if smaller else "error"
    return "silent" if len(found) == 2 and found[0] == 1 else "error"  # one row is repeated


def _sizes(survey: Survey, at: Deployment) -> Iterator[Fact]:
    for entry in survey.entries:
        if (entry.state or "").startswith("int4") and all(part.suffix != ".weight_shape" for part in entry.parts):
            message = "is missing; two integers, [out, in], are meant; transformers cannot unpack it"
            yield Fact(f"{entry.module}.weight_shape", message)
    for entry, flaw in flaws(survey, "P3"):
        numbers = flaw.part and flaw.part.shape != (2,)
        message = f"{flaw.message}; transformers cannot unpack it"
        level = "error" if numbers else None
        yield Fact(f"{entry.module}.weight_shape", message, level, flaw.kind)


def _zero_points(survey: Survey, at: Deployment) -> Iterator[Fact]:
    asymmetric = any(weights.get("symmetric") is False for _, weights in int4_groups(survey))
    for entry in survey.entries:
        if not (entry.state or "").startswith("int4"):
            continue
        name = f"{entry.module}.weight_zero_point"
        points = next((part for part in entry.companions if part.suffix == ".weight_zero_point"), None)
        if points and not asymmetric:
            what = "stops at it" if at.runtime == "vllm" else "drops it and serves shifted weights"
            yield Fact(
                name, f"is stored, but the config says symmetric: {at_name(at)} {what}; mend the config", kind="has"
            )
        elif asymmetric:
            rows, columns = entry.spec.shape
            size = int((entry.state or "").removeprefix("int4-g"))
            expected = (-(-rows // 8), columns // size)
            if points is None:
                yield Fact(name, "is missing, but the config says symmetric: false; convert it anew", "silent", "none")
            elif points.dtype != "I32" or points.shape != expected:
                found = f"{points.dtype} {list(points.shape)}"
                yield Fact(name, f"is {found}, I32 {list(expected)} is meant; convert it anew", "error", "shape")
    if asymmetric:
        yield from _packed_rows(survey, at)


def _packed_rows(survey: Survey, at: Deployment) -> Iterator[Fact]:
    """Zero points are packed along the rows, eight in a word, and are cut with them."""
    for kind, (name, _) in survey.kinds.items():
        if not (kind.state or "").startswith("int4"):
            continue
        ranks = at.expert_tp if kind.role == "routed_expert" else at.tp
        rows = kind.shape[0] if is_down(name) or kind.leaf == "o_proj" else kind.shape[0] // ranks
        if rows % 8:
            message = f"has {rows} rows on a rank, and zero points are packed by 8; lower TP or use symmetric INT4"
            yield Fact(name, message)
    if at.runtime == "sglang" and at.sm >= 100 and any(group == 32 for group in _sizes_of(survey)):
        yield Fact(
            _CONFIG, "is asymmetric, which SGLang's kernels for Blackwell do not take; it uses Marlin", "warning"
        )


def _sizes_of(survey: Survey) -> list[Any]:
    return [weights.get("group_size") for _, weights in int4_groups(survey)]


def at_name(at: Deployment) -> str:
    """The runtime's name in a sentence."""
    return RUNTIME_NAMES[at.runtime]


def _dtypes(survey: Survey, at: Deployment) -> Iterator[Fact]:
    for entry, flaw in flaws(survey, "P5"):
        name = entry.module if len(entry.spec.shape) == 2 else entry.spec.name
        yield Fact(name, flaw.message, None, flaw.kind)


def _schemes(survey: Survey, at: Deployment) -> Iterator[Fact]:
    for where, weights in int4_groups(survey):
        bits, strategy, size = (weights.get(key) for key in ("num_bits", "strategy", "group_size"))
        if bits not in (4, 8):
            yield Fact(f"{where}.num_bits", f"is {bits!r}; {at_name(at)} has no kernel for it; 4 is meant")
        if strategy == "channel":
            continue
        if strategy not in ("group", None) or size not in (*GROUPS, -1):
            found = f"has strategy {strategy!r} with group_size {size!r}, and Marlin takes groups of 32, 64 and 128"
            linear = any(
                (kind.state or "").startswith("int4") and kind.role != "routed_expert" for kind in survey.kinds
            )
            if at.runtime == "vllm" and not linear and type(size) is int and size > 0 and size % 4 == 0:
                yield Fact(where, f"{found}: vLLM falls back to Triton; take one of those", "warning")
            else:
                yield Fact(where, f"{found}: {at_name(at)} stops; take one of those")
        if weights.get("dynamic"):
            yield Fact(f"{where}.dynamic", "is true, but packed weights are static; set it to false")


def _layout(survey: Survey, at: Deployment) -> Iterator[Fact]:
    yield from matching.facts(survey, at, "P7", 'set the top-level format to "pack-quantized"')


def _linear(survey: Survey, at: Deployment) -> Iterator[Fact]:
    yield from matching.facts(survey, at, "P8", 'give the right group the target "Linear", or ignore the module')


def _one_scheme(survey: Survey, at: Deployment) -> Iterator[Fact]:
    for found in matching.mismatches(survey, at.runtime, "P9"):
        name, stored = found.member.name, matching.words(found.member.format)
        if found.refusal:
            message = f"{found.refusal}; make targets and ignore list match all of a layer's experts or none"
            yield Fact(name, message, "error", "config")
            continue
        stops = at.runtime == "vllm" and not matching.takes(found)
        message = f"is {stored}, other experts of the layer are {matching.words(found.declared)}: {at_name(at)}"
        what = "stops" if stops else "leaves it unset"
        yield Fact(
            name, f"{message} holds all of them in one form and {what}; convert it anew", "error" if stops else None
        )


def _names(survey: Survey, at: Deployment) -> Iterator[Fact]:
    cure = "mend targets or the ignore list" if survey.method else "declare it in a quantization_config"
    yield from matching.facts(survey, at, "P10", cure)


def _fused(survey: Survey, at: Deployment) -> Iterator[Fact]:
    for found in matching.mismatches(survey, at.runtime, "P11"):
        name = found.member.name
        if found.refusal:
            yield Fact(name, f"{found.refusal}; match all parts or none", "error", found.built.name.rpartition(".")[2])
            continue
        stored, leaf = matching.words(found.member.format), found.built.name.rpartition(".")[2]
        stops = at.runtime == "vllm" and not matching.takes(found)
        what = "stops" if stops else "loads neither of the two" if "qkv_a" in leaf else "serves it as that"
        message = f"is {stored}, a part of {leaf}, which the config makes {matching.words(found.declared)} as a whole:"
        yield Fact(name, f"{message} {at_name(at)} {what}; store both alike", "error" if stops else "silent")


def _joined(survey: Survey, at: Deployment) -> Iterator[Fact]:
    for kind, (name, count) in survey.kinds.items():
        if kind.role in _JOINED and (kind.state or "").startswith("int4"):
            message = f"is packed INT4, and SGLang {_JOINED[kind.role]}; store it in BF16 or FP8"
            yield Fact(name, message, many=count)


def _indexer(survey: Survey, at: Deployment) -> Iterator[Fact]:
    for found in matching.mismatches(survey, at.runtime, "P13"):
        message = f"is {found.member.format}, but {at_name(at)} makes one BF16 module of indexer.wk and weights_proj"
        packed = at.runtime == "sglang" and (found.member.format or "").startswith(
            "int4"
        )  # drops the parts that it lacks
        level = "silent" if packed else None
        yield Fact(found.member.name, f"{message}; store it in BF16, or wk in FP8 blocks", level, found.member.role)
    for kind, (name, _) in survey.kinds.items():
        blocks = kind.state in (None, "fp8-block", "fp8-block-ct") or not (kind.state or "").startswith("fp8")
        if at.runtime == "sglang" and kind.role == "indexer.wk" and not blocks:
            message = f"is {kind.state}, and SGLang decodes only 128x128 blocks of it: it stops; store it in BF16"
            yield Fact(name, message)


def _never(survey: Survey, at: Deployment) -> Iterator[Fact]:
    for found in matching.mismatches(survey, at.runtime, "P14"):
        role, stored = found.member.role, found.member.format
        message = f"is {stored}, but {at_name(at)} never holds {role} quantized; store it in BF16"
        yield Fact(found.member.name, message, kind=f"{role} {stored}")
    for kind, (name, _) in survey.kinds.items():
        if kind.role == "lm_head" and kind.state in ("fp8-block", "fp8-block-ct") and at.runtime == "sglang":
            answer = next(a for built, a in survey.answers("sglang") if built.members[0].role == "lm_head")
            if answer[0] is not None:
                yield Fact(name, "is FP8 in blocks, which SGLang's lm_head does not take; store it in BF16", "error")


RULES = (
    Rule("P1", "weight_packed has the shape [N, K/8] (MXFP4: [N, K/2])", both("error"), _words),
    Rule("P2", "weight_scale has the shape [N, K/G] with the config's G, in BF16 or F16", both("error"), _scales),
    Rule("P3", "weight_shape is there, two integers", both("warning"), _sizes),
    Rule("P4", "zero points if and only if the config is asymmetric, whole words on each rank",
         {"vllm": "error", "sglang": "silent"}, _zero_points),
    Rule("P5", "codes and scales have the dtypes of their format", both("silent"), _dtypes),
    Rule("P6", "4 bits, groups of 32, 64 or 128 or whole channels", both("error"), _schemes),
    Rule("P7", "the top-level format is pack-quantized where experts are INT4", {"sglang": "error"}, _layout),
    Rule("P8", 'every module matches a target, and "Linear" is that of the right group', {"sglang": "error"}, _linear),
    Rule("P9", "all routed experts of a layer have one format, on disk and in the config", both("silent"), _one_scheme),
    Rule("P10", "what the config ignores is plain on disk, and what it targets is stored so", both("silent"), _names),
    Rule("P11", "the parts of a fused module have one format, on disk and in the config", both("error"), _fused),
    Rule("P12", "q_a_proj, kv_a_proj_with_mqa and kv_b_proj are not packed", {"sglang": "error"}, _joined),
    Rule("P13", "indexer.weights_proj is BF16, indexer.wk BF16 or FP8 in blocks", both("error"), _indexer),
    Rule("P14", "router, norms, embedding, head, eh_proj and vision are not quantized",
         {"vllm": "error", "sglang": "silent"}, _never),
)  # fmt: skip
