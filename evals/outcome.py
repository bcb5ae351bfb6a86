"""A record in words and in numbers as people read them: what the page, the plots and the command line have in common.

Shares are told in points, x 100; other metrics in their own unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
Result = Mapping[str, Any]

#: what is told of next-token distributions: words, key in a record's proxies, and by what it is multiplied to be shown
PROXIES = (
    ("mean KL, nats a token", "mean_kl", 1.0),
    ("median KL", "median_kl", 1.0),
    ("99 % KL", "p99_kl", 1.0),
    ("largest KL", "max_kl", 1.0),
    ("same most likely token, %", "same_top", 100.0),
    ("perplexity ratio", "ratio", 1.0),
)
#: what is told of tool calls: words, keys in the record of the target's share and of the baseline's
TOOL_CALLS = (
    ("answers with calls, %", ("trigger_rate", "baseline_trigger_rate")),
    ("of those, right by their schemas, %", ("schema_accuracy", "baseline_schema_accuracy")),
)


def name_of(ident: Mapping[str, Any]) -> str:
    """What was evaluated, without the folders above it."""
    if not ident["parts"]:
        return str(ident["text"])
    name = " + ".join(part["name"] for part in ident["parts"])
    return f"{name} ({ident['kv']} KV)" if ident["kind"] == "pair" else name


def sides(record: Record) -> tuple[str, str]:
    """Names of target and baseline ("" where there is none); the same name twice gets the digests."""
    target, baseline = record["target"], record.get("baseline")
    names = [name_of(target), name_of(baseline) if baseline else ""]
    if names[0] == names[1] and baseline and target.get("digest") != baseline.get("digest"):
        names = [f"{name} {short(one.get('digest'))}" for name, one in zip(names, (target, baseline), strict=True)]
    return names[0], names[1]


def short(digest: str | None) -> str:
    """The first digits of a digest."""
    return digest[:12] if digest else "-"


def rows(record: Record) -> list[tuple[str, Result]]:
    """What a table has a line of: groups, each before its tasks, then other tasks; all together last, if not one."""
    tasks = record["tasks"]
    groups = {name: result for name, result in tasks.items() if "tasks" in result}
    placed: dict[str, Result] = {}
    for name, result in groups.items():
        for each in (name, *result["tasks"]):
            placed.setdefault(each, tasks[each])
    placed |= {name: result for name, result in tasks.items() if name not in placed}
    shares = [result for name, result in leaves(record) if result["share"]]
    last = [("all", record["all"])] if record.get("all") and len(shares) > 1 and "all" not in tasks else []
    return [*placed.items(), *last]


def leaves(record: Record) -> Iterator[tuple[str, Result]]:
    """Tasks without groups."""
    return ((name, result) for name, result in record["tasks"].items() if "tasks" not in result)


def scale(result: Result) -> float:
    """Shares are shown x 100."""
    return 100.0 if result["share"] else 1.0


def value(result: Result, number: float | None) -> str:
    """A score."""
    if number is None:
        return "-"
    return f"{100 * number:.2f}" if result["share"] else f"{number:.4g}"


def change(result: Result, number: float | None) -> str:
    """A difference, with its sign."""
    if number is None:
        return "?"
    text = f"{100 * number:+.2f}" if result["share"] else f"{number:+.2g}"
    return text if float(text) else text.replace("-", "+")


def visible(result: Result) -> str:
    """The smallest difference that so many questions show."""
    found = result["smallest"]
    return "-" if found is None else f"{100 * found:.2f}" if result["share"] else f"{found:.2g}"


def interval(result: Result, ends: Sequence[float | None]) -> str:
    """From where to where."""
    return f"{change(result, ends[0])} to {change(result, ends[1])}"


def difference(result: Result) -> str:
    """With its interval, in words."""
    unit = " points" if result["share"] else f" {result['metric']}"
    return f"{change(result, result['difference'])}{unit} (95 % {interval(result, result['ci95'])})"


def points_of(margin: float) -> str:
    """A margin in words."""
    return f"{100 * margin:g} point{'' if margin == 0.01 else 's'}"


def p_value(number: float | None) -> str:
    """Three decimals are enough, unless it is small."""
    return "-" if number is None else "<0.001" if number < 0.001 else f"{number:.3f}"


def figure(number: float | None) -> str:
    """A divergence or a ratio."""
    return "-" if number is None else f"{number:.4g}"


def proxy(found: Any, by: float) -> str:
    """An interval, or a number, as the record has it."""
    if not isinstance(found, Mapping):
        return figure(found)
    mean, low, high = (None if found[end] is None else by * found[end] for end in ("mean", "low", "high"))
    return f"{figure(mean)} ({figure(low)} to {figure(high)})"


def upward(result: Result) -> tuple[float, float, float]:
    """Difference and ends with a loss below zero; -inf and inf where an end is not known."""
    low, high = (math.inf * sign if end is None else end for end, sign in zip(result["ci95"], (-1, 1), strict=True))
    found = result["difference"], low, high
    return found if result["higher_is_better"] else (-found[0], -high, -low)


def standing(result: Result) -> str:
    """The verdict where there is a margin, else what the interval alone says."""
    if result.get("verdict"):
        return str(result["verdict"])
    _, low, high = upward(result)
    return "surely worse" if high < 0 else "surely better" if low > 0 else "no difference seen"


def worst(record: Record) -> tuple[str, Result] | None:
    """The task that lost most, of those in points; without such, by standard errors."""
    found = list(leaves(record))
    shares = [item for item in found if item[1]["share"]]
    if shares:
        return min(shares, key=lambda item: upward(item[1])[0])
    return min(found, key=lambda item: upward(item[1])[0] / (item[1].get("error") or 1.0), default=None)


def headline(record: Record) -> str:
    """The outcome, short: for a title."""
    target, baseline = sides(record)
    if not record["tasks"]:
        return f"{target} against {baseline}" if baseline else target
    if not baseline:
        return f"{target} on {_all(len(list(leaves(record))), '').strip()}, without a baseline"
    if missed := [one["text"] for one in record["required"] if not one["held"]]:
        return f"{target} misses what was required of it against {baseline}: {', '.join(missed)}"
    margin, by = record["settings"].get("margin"), dict[str, list[str]]()
    for name, result in leaves(record):
        by.setdefault(standing(result), []).append(name)
    sure = by.get("surely worse", [])
    if margin is not None:
        points = points_of(margin)
        if by.get("worse"):
            return f"{target} is worse than {baseline} by more than {points} on {listed(by['worse'])}"
        if sure:
            return f"{target} is surely worse than {baseline} on {listed(sure)}"
        if by.get("cannot tell"):
            return f"Whether {target} is within {points} of {baseline} cannot be told on {listed(by['cannot tell'])}"
        if by.get("not worse"):
            return f"{target} is not worse than {baseline} by {points} on {_all(len(by['not worse']))}"
    if sure:
        return f"{target} is surely worse than {baseline} on {listed(sure)}"
    harder = _perplexity(record)
    return f"No loss of {target} against {baseline} is seen on {_all(len(list(leaves(record))))}{harder}"


def _perplexity(record: Record) -> str:
    """What the text tells where the tasks are silent: that it is surely less likely, and by more than the noise."""
    ratio, floor = ((record.get(name) or {}).get("ratio") for name in ("proxies", "floor_proxies"))
    if not ratio or ratio["low"] is None or ratio["low"] <= max(1.0, (floor or {}).get("high") or 1.0):
        return ""
    return f", but its perplexity is {100 * (ratio['mean'] - 1):.2g} % higher"


def sentence(record: Record) -> str:
    """The outcome: what was compared with what, the worst task, what is surely worse, what could not be told."""
    said = [headline(record)]
    found, margin = list(leaves(record)), record["settings"].get("margin")
    last = worst(record) if record.get("baseline") else None
    if last:
        name, result = last
        which = "the one task" if len(found) == 1 else "the worst task"
        said.append(f"{which}, {name}, differs by {difference(result)}")
        losers = [n for n, r in found if upward(r)[2] < 0]
        if margin is not None:
            said.append(f"a loss is sure on {listed(losers)}" if losers else "no task is surely worse at all")
        elif not losers or len(losers) < len(found):
            said.append(_unseen([(n, r) for n, r in found if n not in losers], "on the others" if losers else ""))
    if record.get("mean_kl") is not None:
        floor = (record.get("floor_proxies") or {}).get("mean_kl")
        beside = f", of the baseline against itself {figure(floor['mean'])}" if floor else ""
        said.append(f"mean KL is {figure(record['mean_kl'])} nats a token{beside}")
    for side in ("truncated", "baseline_truncated"):
        if cut := sum(record.get(side, {}).values()):
            whose = "" if side == "truncated" else " of the baseline"
            said.append(f"{cut:,} requests{whose} were too long and lost their beginning")
    missed = [one["text"] for one in record["required"] if not one["held"]]
    if record["required"]:
        said.append(f"required and missed: {', '.join(missed)}" if missed else "all that was required holds")
    return "; ".join(part for part in said if part) + "."


def _unseen(found: Sequence[tuple[str, Result]], where: str) -> str:
    """What the questions of these tasks could not have shown."""
    seen = [r["smallest"] for _, r in found if r["share"] and r["smallest"] is not None]
    if not seen:
        return ""
    low, high = (f"{100 * each:.2g}" for each in (min(seen), max(seen)))
    span = low if low == high else f"{low} to {high}"
    return f"what is smaller than {span} points would mostly not be seen {where}".rstrip()


def listed(names: Sequence[str], most: int = 3) -> str:
    """Some names; of many the first."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more tasks"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else "none"


def _all(count: int, word: str = "any of") -> str:
    return "the one task" if count == 1 else f"{word} {count} tasks"


def wrapped(name: str, width: int) -> list[str]:
    """A name in lines of so many characters, broken behind _ - / or a space where there is one."""
    lines: list[str] = []
    rest = name
    while len(rest) > width:
        cut = max(rest.rfind(mark, width // 2, width) for mark in "_-/ ") + 1 or width
        lines.append(rest[:cut].rstrip())
        rest = rest[cut:]
    return [*lines, rest]
