"""S: shared experts that SGLang fuses with the routed ones, and the MTP layer as a draft model."""

from __future__ import annotations

from collections.abc import Iterator

from ...quantize.declare import differ_unseen, packed_shared
from ..deployment import Deployment
from ..survey import BROKEN, Survey
from . import matching
from .rule import RUNTIME_NAMES, Fact, Rule, both


def _shared(survey: Survey, at: Deployment) -> Iterator[Fact]:
    if matching.unreadable(survey, at.runtime):
        return
    architecture = survey.model.architecture
    matrices = [module for module in survey.matrices if matching.known(module)]
    fused = _fuses(survey, at)
    name = next((module.name for module in matrices if module.role == "shared_expert"), "shared experts")
    if fused and differ_unseen(survey.quantization, matrices, architecture):
        message = "has another format than the routed experts, among which SGLang serves it: garbage;"
        yield Fact(name, f"{message} start SGLang with --disable-shared-experts-fusion (here: --no-shared-fusion)")
    elif not fused and packed_shared(matrices, architecture):
        yield Fact(name, "is packed INT4, and SGLang reads its `weight`: it stops; store it in BF16 or FP8", "error")


def _fuses(survey: Survey, at: Deployment) -> bool:
    """Whether SGLang serves shared experts as routed ones: `shared_experts_fusion_disable_reason` of its classes."""
    text, name = survey.model.text, survey.model.architecture.name
    if not survey.model.architecture.sglang_fuses_shared or not at.shared_fusion or at.ep > 1:
        return False
    if name == "glm4_moe":
        return bool(text.get("n_shared_experts"))
    return text.get("n_shared_experts") == 1 and (name != "glm_moe_dsa" or text.get("n_routed_experts") == 256)


def _draft(survey: Survey, at: Deployment) -> Iterator[Fact]:
    cure = "list or ignore it as model.layers.{L}.* for vLLM and as model.decoder.* for SGLang, or quantize it alike"
    level = None if at.mtp and at.runtime == "vllm" else "warning"
    for fact in matching.facts(survey, at, "S7", cure):
        yield fact._replace(severity=level or fact.severity, message=f"is of the MTP layer and {fact.message}")


def _copies(survey: Survey, at: Deployment) -> Iterator[Fact]:
    runtime = RUNTIME_NAMES[at.runtime]
    broken = [entry.module for entry in survey.entries if entry.state == BROKEN and entry.spec.role in _COPIES]
    for name in (*broken, *(found.member.name for found in matching.mismatches(survey, at.runtime, "S8"))):
        stops = at.runtime == "vllm" and at.mtp
        message = f"is a copy that {runtime} replaces by the model's own, and is stored in a form that it"
        what = "stops at" if stops else "does not read"
        yield Fact(name, f"{message} {what}; leave it out", "error" if stops else None, "copy")


_COPIES = ("mtp.head", "mtp.embed")

RULES = (
    Rule("S6", "shared experts have the routed experts' format where SGLang fuses them", {"sglang": "silent"}, _shared),
    Rule("S7", "the MTP layer is declared as it is stored, under the names of the draft model",
         {"vllm": "error", "sglang": "warning"}, _draft),
    Rule("S8", "the MTP layer's copies of head and embedding are absent, plain or FP8", both("warning"), _copies),
)  # fmt: skip
