"""Name matching against the disk: what each runtime makes of the config, module by module, and which rule that breaks.

A difference between what the config declares and what is stored belongs to exactly one rule, by what the module is and
how the two differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from ...formats import formats
from ...quantize.naming import Built, Module
from ...quantize.resolve import Refusal
from ..deployment import Deployment
from ..survey import Survey
from .rule import RUNTIME_NAMES, Fact
from .states import unjudged

#: kinds of refusal that are told as they are, and the rule that each of them breaks
_REFUSED = {"target": "P8", "blocks": "P8", "layout": "P7"}


#: a tensor whose name no parameter has stops vLLM always, and SGLang where it is stacked into gate_up_proj or qkv_proj
_STACKED = ("dense_mlp", "shared_expert", "attention.k", "attention.v")


#: where quant_method fp8 names what is not FP8
LISTS = ("modules_to_not_convert", "ignored_layers")


class Mismatch(NamedTuple):
    """A module that the runtime would hold otherwise than it is stored; refusal: why it stops there, "" where not."""

    rule: str
    built: Built
    member: Module
    declared: str | None
    refusal: str = ""


def unreadable(survey: Survey, runtime: str) -> str:
    """Why the runtime cannot read the config at all, or ""."""
    answers = survey.answers(runtime)
    refusal = answers[0][1][1] if answers else None
    return refusal.text.removeprefix("is declared by ") if refusal and refusal.kind == "unreadable" else ""


def no_lists(survey: Survey) -> list[str]:
    """The keys of a config of quant_method fp8 that should hold lists of names and do not; rule F4 tells of them."""
    config = survey.quantization if survey.method == "fp8" else {}
    return [key for key in LISTS if config.get(key) and not isinstance(config[key], list)]


def mismatches(survey: Survey, runtime: str, rule: str) -> Iterator[Mismatch]:
    """Those that break one rule."""
    if unjudged(survey) or unreadable(survey, runtime):
        return
    for built, (declared, refusal) in survey.answers(runtime):
        if _clear(built, declared, refusal):
            continue
        yield from (found for found in _of(built, declared, refusal, survey, runtime) if found.rule == rule)


def facts(survey: Survey, at: Deployment, rule: str, cure: str, severity: str | None = None) -> Iterator[Fact]:
    """The mismatches of one rule as facts. cure: what to change."""
    runtime = RUNTIME_NAMES[at.runtime]
    for found in mismatches(survey, at.runtime, rule):
        stored = words(found.member.format)
        message = f"is {stored} on disk, but the config makes it {words(found.declared)} on {runtime}; {cure}"
        level = severity
        if found.refusal:
            message, level = f"{found.refusal}; {cure}", "error"
        elif level is None and (at.runtime == "vllm" or found.member.role in _STACKED):
            level = "silent" if takes(found) else "error"
        yield Fact(found.member.name, message, level, f"{found.member.role} {stored} {found.declared} {found.refusal}")


def takes(found: Mismatch) -> bool:
    """Whether the declared form has a parameter for every tensor that is stored: then it is cast without a word."""
    return _suffixes(found.member.format) <= _suffixes(found.declared)


def words(format_: str | None) -> str:
    """A format, or that there is none."""
    return format_ or "unquantized"


def _suffixes(format_: str | None) -> set[str]:
    """The names of the tensors that a module of a format has."""
    if format_ is None:
        return {".weight"}
    if format_.startswith(("int4", "(asymmetric", "(4-bit")):
        return {".weight_packed", ".weight_scale", ".weight_shape"}
    return {part.suffix for part in formats()[format_].parts((256, 256))} if format_ in formats() else set()


def _clear(built: Built, declared: str | None, refusal: Refusal | None) -> bool:
    """Nothing to look at; most modules, so this must be quick."""
    return refusal is None and all(member.format == declared for member in built.members)


def known(module: Module) -> bool:
    """Whether a module is stored in a form that can be judged."""
    return module.format is None or not module.format.startswith("(")


def _of(
    built: Built, declared: str | None, refusal: Refusal | None, survey: Survey, runtime: str
) -> Iterator[Mismatch]:
    members = [member for member in built.members if known(member)]
    if not members:
        return
    states = Counter(member.format for member in members)
    if built.kind == "experts":
        usual = members[0].format if len(states) == 1 else states.most_common(1)[0][0]
        yield from (Mismatch("P9", built, m, usual) for m in members if m.format != usual)
        members = [member for member in members if member.format == usual]
    elif len(states) > 1 and built.kind == "linear":
        why = refusal.text if refusal else ""
        yield from (Mismatch("P11", built, m, declared, why) for m in members if why or m.format != declared)
        return
    if refusal:
        rule = _REFUSED.get(refusal.kind) or ("P9" if built.kind == "experts" else "P11")
        yield from (Mismatch(rule, built, member, declared, refusal.text) for member in members)
        return
    for member in members:
        if member.format != declared and (rule := _owner(built, member, declared, survey, runtime)):
            yield Mismatch(rule, built, member, declared)


def _owner(built: Built, member: Module, declared: str | None, survey: Survey, runtime: str) -> str:
    """The rule that a difference breaks, "" where it breaks none."""
    stored, role = member.format, member.role
    if role in ("indexer.wk", "indexer.weights_proj") and stored:
        return "P13"
    if role in ("mtp.head", "mtp.embed"):
        return "S8"
    if stored and built.kind in ("plain", "named") and declared is None:
        return "P14"
    if declared and stored and stored.startswith("int4") and declared.startswith(("int4", "(4-bit int")):
        return "" if declared.startswith("(") and _same_group(stored, survey) else "P2"
    if declared and stored and declared.startswith("("):  # a scheme that no format has: P4, P6 and F3 judge the config
        return ""
    if member.mtp:
        return "S7"
    if role in ("vision", "projector") and survey.method == "fp8":
        return "F7"
    if declared and stored and declared.startswith("fp8") and stored.startswith("fp8"):
        if formats()[declared].grid != formats()[stored].grid:
            return "F1"
        # SGLang's loader renames weight_scale, but not where it stacks
        mapped = runtime == "sglang" and declared == "fp8-block" and role not in (*_STACKED, "routed_expert")
        return "" if mapped else "F2"
    return "F4" if survey.method == "fp8" else "P10"


def _same_group(stored: str, survey: Survey) -> bool:
    """Whether the config declares groups of the size on disk, one that is no format of ours, or whole channels."""
    size = int(stored.removeprefix("int4-g"))
    whole = all(kind.shape[1] == size for kind in survey.kinds if kind.state == stored)
    weights = [item for _, group in survey.groups if isinstance(item := group.get("weights"), dict)]
    return any(item.get("group_size") == size or (whole and item.get("strategy") == "channel") for item in weights)
