"""What a load rule is, and how what it finds is told: one finding for each kind of fault, never one for each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from ...formats import Shape
from ..deployment import Deployment, Finding
from ..survey import Survey

#: the runtime versions whose source the rules were read from
VERSIONS = {"vllm": "0.32.0", "sglang": "0.5.23"}
RUNTIME_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


class Fact(NamedTuple):
    """One fault that a rule found.

    severity: where it is not the rule's own. kind: facts of one kind are told together, as the first one's message;
    facts without a kind where their messages are equal. many: how many subjects it stands for; the first is named.
    """

    subject: str
    message: str
    severity: str | None = None
    kind: str = ""
    many: int = 1


class Rule(NamedTuple):
    """One load rule.

    severity: what comes of breaking it, by runtime; a runtime that does not care is left out.
    check: yields the facts of a checkpoint under a deployment of one of these runtimes.
    versions: of the runtimes whose source it was read from.
    """

    number: str
    summary: str
    severity: Mapping[str, str]
    check: Callable[[Survey, Deployment], Iterable[Fact]]
    versions: Mapping[str, str] = VERSIONS


def both(severity: str) -> dict[str, str]:
    """The same severity on vLLM and on SGLang."""
    return {"vllm": severity, "sglang": severity}


def findings(rule: Rule, survey: Survey, deployment: Deployment) -> Iterator[Finding]:
    """What a rule finds, told together by kind and severity; nothing where the runtime does not care."""
    if (default := rule.severity.get(deployment.runtime)) is None:
        return
    told: dict[tuple[str, str], list[Fact]] = {}
    for fact in rule.check(survey, deployment):
        told.setdefault((fact.severity or default, fact.kind or fact.message), []).append(fact)
    for (severity, _), facts in told.items():
        total = sum({fact.subject: fact.many for fact in facts}.values())
        more = f" and {total - 1:,} more" if total > 1 else ""
        yield Finding(rule.number, severity, deployment.runtime, facts[0].subject + more, facts[0].message)


def shape_severity(role: str, name: str, found: Shape, expected: Shape, runtime: str) -> str:
    """What comes of a matrix of a wrong shape.

    Linear modules compare shapes. Loaders of fused experts do not: vLLM fills as much as there is, SGLang does so along
    the dimension that tensor parallelism cuts (rows of gate and up, columns of down) and stops at the other.
    """
    if (
        role != "routed_expert"
        or len(found) != len(expected)
        or any(a > b for a, b in zip(found, expected, strict=True))
    ):
        return "error"
    if runtime == "vllm":
        return "silent"
    cut = 1 if is_down(name) else 0
    return "silent" if found[1 - cut] == expected[1 - cut] else "error"


def is_down(name: str) -> bool:
    """Whether an expert's or MLP's matrix is the one that is cut along its columns."""
    return name.rpartition(".")[2] in ("down_proj", "w2")
