"""Does it load? The static rules of vLLM and SGLang, from headers and config alone; no runtime is needed.

Neither runtime checks that a quantized checkpoint is complete or that a cut of it makes sense, so a rule is often the
only gate. Each rule is a function that yields facts; one fault breaks one rule. `docs/rules.md` lists them.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..deployment import SEVERITIES, Deployment, Finding
from ..survey import Survey
from . import complete, fp8, int4, kv, layers, tensor_parallel
from .rule import Fact, Rule, findings

__all__ = ["CUT", "RULES", "Fact", "Rule", "check", "largest_tp"]

RULES: tuple[Rule, ...] = (
    *complete.RULES,
    *int4.RULES,
    *tensor_parallel.RULES,
    *fp8.RULES,
    *layers.RULES,
    *kv.RULES,
)
_RANKS = (64, 32, 16, 8, 4, 2, 1)
_CUT = tuple(rule for rule in RULES if rule.number.startswith("T") or rule.number in ("C5", "P4"))
#: numbers of the rules that depend on the cut: what the others find, no number of ranks mends
CUT = tuple(rule.number for rule in _CUT)


def check(survey: Survey, deployments: Iterable[Deployment]) -> list[Finding]:
    """What is wrong with a checkpoint for these deployments: worst first, then in the order of the rules.

    What both runtimes say in the same words is one finding, of runtime "both".
    """
    runtimes: dict[tuple[str, str, str, str], set[str]] = {}
    for deployment in deployments:
        for rule in RULES:
            for number, severity, runtime, subject, message in findings(rule, survey, deployment):
                runtimes.setdefault((number, severity, subject, message), set()).add(runtime)
    order = {rule.number: position for position, rule in enumerate(RULES)}
    found = [
        Finding(number, severity, "both" if len(names) > 1 else next(iter(names)), subject, message)
        for (number, severity, subject, message), names in runtimes.items()
    ]
    return sorted(found, key=lambda finding: (SEVERITIES.index(finding.severity), order[finding.rule]))


def largest_tp(survey: Survey, runtime: str, sm: int = 90, *, ep: int = 1, ep_whole: bool = False) -> int:
    """The largest of 1, 2, 4 ... 64 ranks over which a runtime can cut the checkpoint; 0 where not even 1 works.

    Works: none of the rules that depend on the cut finds an error or silent garbage. ep: expert-parallel size; fewer
    ranks than that hold whole experts. ep_whole: experts stay whole on any number of ranks (EP = TP).
    """
    for tp in _RANKS:
        wanted = tp if ep_whole else min(ep, tp)
        if tp % wanted:
            continue
        deployment = Deployment(runtime, tp=tp, ep=wanted, sm=sm)
        found = (finding for rule in _CUT for finding in findings(rule, survey, deployment))
        if all(finding.severity == "warning" for finding in found):
            return tp
    return 0
