"""The gate: what a run must show, as the user says it, and whether it has.

    mmlu>=-0.3,mean_kl<=0.04,gsm8k.exact_match,strict-match>=-1,mmlu.value>=70

Requirements are separated by commas; a comma within a name is told from those by the number that ends each one. Shares
are in points, 0 to 100, as in tables; everything else is in the unit of the record. A difference is a loss where it is
below zero, also of metrics of which lower is better.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import UsageError
from .outcome import upward

#: names that are no task's -> where the record's proxies have them
PROXIES = {
    "mean_kl": "mean_kl", "median_kl": "median_kl", "p99_kl": "p99_kl", "max_kl": "max_kl",
    "top1_agreement": "same_top", "ppl_ratio": "ratio",
}  # fmt: skip
TOOLS = ("tool_calls.f1", "tool_calls.schema_accuracy")
#: these are shares, whatever a record holds
_SHARES = ("top1_agreement", *TOOLS)
_VALUE = ".value"
_ONE = re.compile(
    r"\s*(?P<name>[^<>=,\s](?:[^<>=]*[^<>=,\s])?)\s*(?P<operator>>=|<=|>|<)\s*(?P<number>[^,<>=]*?)\s*(?:,|$)"
)
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_EXAMPLE = 'expected NAME>=NUMBER, as in "mmlu>=-0.3,mean_kl<=0.04"'
_ROUND = 9  # decimals: 7 of 1000 lost is 0.7 points, and not 0.7000000000000001


class Requirement(NamedTuple):
    """text: as given. name: whose figure. operator: >=, <=, > or <. threshold: in points where it is a share."""

    text: str
    name: str
    operator: str
    threshold: float


class _Figure(NamedTuple):
    """What a record says of a name. unit: of all numbers, for sentences. exact: no estimate, and without bounds."""

    value: float
    ends: tuple[float | None, float | None]
    unit: str
    base: str
    smallest: float | None = None
    exact: bool = False


def parse(text: str) -> list[Requirement]:
    """Requirements in their order. UsageError names the place of what is none."""
    found: list[Requirement] = []
    at = 0
    while at < len(text):
        match = _ONE.match(text, at)
        if match is None or not _NUMBER.fullmatch(match["number"]) or math.isinf(float(match["number"])):
            rest = text[at:].strip()
            raise UsageError(f"--require {text!r}: at character {at + 1}, {rest!r} is no requirement; {_EXAMPLE}")
        name, operator, number = match["name"], match["operator"], float(match["number"])
        said = f"{name}{operator}{match['number']}"
        if name in _SHARES and 0 < number <= 1:
            raise UsageError(f"--require: {said}: is in points, 0 to 100; say {name}{operator}{100 * number:g}")
        found.append(Requirement(said, name, operator, number))
        at = match.end()
        if at == len(text) and text[at - 1] == ",":
            raise UsageError(f"--require {text!r}: ends in a comma; {_EXAMPLE}")
    if not found:
        raise UsageError(f"--require: is empty; {_EXAMPLE}")
    return found


def check_names(
    requirements: Sequence[Requirement],
    tasks: Mapping[str, Collection[str]],
    *,
    baseline: bool = True,
    proxies: bool = True,
    tool_calls: bool = True,
) -> None:
    """UsageError for a name that the run will not have, as far as that can be known before it.

    tasks: names of tasks and groups, and the metrics of each. baseline, proxies, tool_calls: whether the run will have
    them.
    """
    for one in requirements:
        if one.name in PROXIES:
            if not (baseline and proxies):
                raise UsageError(f"--require {one.text}: is measured against a --baseline, and not of servers")
        elif one.name in TOOLS:
            if not tool_calls:
                raise UsageError(f"--require {one.text}: needs --tool-calls with a file of requests")
        else:
            known = dict(tasks) | {"all": ()}
            task = _task_of(one.name, known)
            if task is None:
                raise UsageError(f"--require {one.text}: no {one.name!r} in this run; there is {_list(known)}")
            metric = one.name.removesuffix(_VALUE)[len(task) + 1 :]
            if metric and metric not in known[task]:
                raise UsageError(f"--require {one.text}: {task} has no metric {metric!r}; it has {_list(known[task])}")
            if not baseline and not one.name.endswith(_VALUE):
                raise UsageError(
                    f"--require {one.text}: is a difference, and there is no --baseline; for the score itself say "
                    f"{one.name}{_VALUE}{one.operator}..."
                )


def judge(requirements: Sequence[Requirement], record: Mapping[str, Any], *, proof: bool) -> list[dict[str, Any]]:
    """As the record's "required" holds it, one for each requirement.

    value: in the requirement's unit. sure: the whole 95 % interval is on the required side. held: the estimate is, and
    with `proof` (non-inferiority, shown) it is sure too. A maximum is of the tokens that were read, has no interval,
    and is sure as it is. Raises UsageError for a name that the record has not.
    """
    return [_judge_one(one, record, proof) for one in requirements]


def _judge_one(one: Requirement, record: Mapping[str, Any], proof: bool) -> dict[str, Any]:
    figure = _figure(one, record)
    upward = one.operator in (">", ">=")
    worst, best = figure.ends if upward else figure.ends[::-1]
    by_estimate = _holds(one, figure.value)
    sure = by_estimate if figure.exact else worst is not None and _holds(one, worst)
    held = by_estimate and (sure or not proof)
    surely_not = figure.exact or (best is not None and not _holds(one, best))
    if held:
        outcome = "holds" if sure else "holds, but the interval reaches beyond it"
    elif by_estimate:
        outcome = "is not shown: the interval reaches beyond it"
    else:
        outcome = "does not hold" if surely_not else "does not hold, though by the interval it might"
    reason = f"{one.name} is {_words(figure)}: {one.operator} {one.threshold:g} {outcome}"
    if figure.smallest is not None and not (sure or (not by_estimate and surely_not)):
        reason += f"; so many questions see a difference of {figure.smallest:.2g}{figure.unit}"
    return {
        "text": one.text,
        "name": one.name,
        "value": figure.value,
        "held": held,
        "sure": sure,
        "reason": reason,
    }


def _holds(one: Requirement, value: float) -> bool:
    value = round(value, _ROUND)
    if one.operator in (">=", ">"):
        return value > one.threshold or (value == one.threshold and one.operator == ">=")
    return value < one.threshold or (value == one.threshold and one.operator == "<=")


def _words(figure: _Figure) -> str:
    """The estimate, its interval, and on how much it rests."""
    if figure.exact:
        return f"{figure.value:.4g}{figure.unit} ({figure.base}; a maximum has no interval)"
    low, high = figure.ends
    if low is None or high is None:
        return f"{figure.value:.4g}{figure.unit} ({figure.base}; too few for an interval)"
    return f"{figure.value:.4g}{figure.unit} (95 % {low:.4g} to {high:.4g}, {figure.base})"


def _figure(one: Requirement, record: Mapping[str, Any]) -> _Figure:
    """What the record has under a requirement's name. UsageError where it has not."""
    if one.name in PROXIES:
        return _proxy(one, record)
    if one.name in TOOLS:
        return _tool_calls(one, record)
    results = dict(record["tasks"]) | ({"all": record["all"]} if record.get("all") else {})
    task = _task_of(one.name, results)
    if task is None:
        there = _list([*results, *(PROXIES if record.get("proxies") else ())])
        raise UsageError(f"--require {one.text}: no {one.name!r} in this run; there is {there}")
    result, metric = results[task], one.name[len(task) + 1 :]
    own = f".{metric}".endswith(_VALUE)
    metric = f".{metric}".removesuffix(_VALUE)[1:] if own else metric
    if metric and metric != result["metric"]:
        if metric not in result.get("metrics", {}):
            has = _list([result["metric"], *result.get("metrics", {})])
            raise UsageError(f"--require {one.text}: {task} has no metric {metric!r}; it has {has}")
        result = result["metrics"][metric]
    return _score(one, result, own)


def _score(one: Requirement, result: Mapping[str, Any], own: bool) -> _Figure:
    if not own and "difference" not in result:
        raise UsageError(f"--require {one.text}: is a difference, and this run has no baseline; say {one.name}{_VALUE}")
    scale, unit = (100.0, " points") if result["share"] else (1.0, "")
    if own and result["share"] and 0 < one.threshold <= 1:
        raise UsageError(
            f"--require {one.text}: {one.name} is in points, 0 to 100; say {one.name}{one.operator}"
            f"{100 * one.threshold:g}"
        )
    if own:
        value, (low, high) = result["value"], result.get("ci95_value") or [None, None]
    else:
        value, low, high = (end if math.isfinite(end) else None for end in upward(result))
    base = f"{result['n']:,} questions"
    if result["clusters"] != result["n"]:
        base += f" in {result['clusters']:,} clusters"
    smallest = None if own else result.get("smallest")
    return _Figure(scale * value, (_scaled(low, scale), _scaled(high, scale)), unit, base, _scaled(smallest, scale))


def _proxy(one: Requirement, record: Mapping[str, Any]) -> _Figure:
    proxies = record.get("proxies")
    if not proxies:
        raise UsageError(
            f"--require {one.text}: this run compared no distributions; that needs a --baseline, no server"
        )
    found = proxies[PROXIES[one.name]]
    base = f"{proxies['tokens']:,} tokens of {proxies['documents']:,} documents"
    if not isinstance(found, Mapping):
        return _Figure(float(found), (None, None), "", base, exact=True)
    scale, unit = (100.0, " points") if one.name in _SHARES else (1.0, "")
    if found["mean"] is None:
        raise UsageError(f"--require {one.text}: {one.name} is not finite in this run")
    return _Figure(scale * found["mean"], (_scaled(found["low"], scale), _scaled(found["high"], scale)), unit, base)


def _tool_calls(one: Requirement, record: Mapping[str, Any]) -> _Figure:
    told = record.get("tool_calls")
    if not told:
        raise UsageError(f"--require {one.text}: this run asked for no tool calls; give --tool-calls FILE")
    if one.name == "tool_calls.f1":
        found, count = told["f1"], (told["triggers"] or {}).get("compared", 0)
        lacks = "is against a baseline's calls, and there are none to compare with"
    else:
        found, count = told["schema_accuracy"], told["target"]["triggered"]
        lacks = "has no call to be told from"
    if not found or found["mean"] is None:
        raise UsageError(f"--require {one.text}: {lacks}")
    base = f"{count:,} {'requests' if one.name == 'tool_calls.f1' else 'answers with calls'}"
    return _Figure(100 * found["mean"], (_scaled(found["low"], 100), _scaled(found["high"], 100)), " points", base)


def _task_of(name: str, tasks: Collection[str]) -> str | None:
    """The task or group that a name begins with: the longest, as names may hold dots."""
    return max((task for task in tasks if name == task or name.startswith(f"{task}.")), key=len, default=None)


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else scale * value


def _list(names: Collection[str]) -> str:
    return ", ".join(names) or "none"
