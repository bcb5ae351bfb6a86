"""Several targets against one baseline: the same tasks and the same text, one table of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .outcome import Record, change, interval, p_value, rows, sides, standing, value

#: name -> "l"eft or "r"ight
TASKS = {"task": "l", "target": "l", "n": "r", "score": "r", "diff": "r", "95 %": "r", "flips": "r", "p": "r", "": "l"}
TEXT = {"target": "l", "size": "r", "mean KL": "r", "same top, %": "r", "ppl ratio": "r", "required": "l"}

_FIGURES = (("mean_kl", 1.0, ".3g"), ("same_top", 100.0, ".1f"), ("ratio", 1.0, ".3f"))


def tasks(records: Sequence[Record]) -> list[list[str]]:
    """A row for each task and target, the baseline's score first; see TASKS for the columns."""
    found = [dict(rows(record)) for record in records]
    names = dict.fromkeys(name for each in found for name in each)
    table = []
    for name in names:
        having = [(record, each[name]) for record, each in zip(records, found, strict=True) if name in each]
        first, result = having[0]
        head = name
        if first.get("baseline"):
            score = value(result, result["baseline"])
            table.append([head, sides(first)[1], f"{result['n']:,}", score, *[""] * (len(TASKS) - 4)])
            head = ""
        for record, result in having:
            told = ["-"] * 5
            if "difference" in result:
                flips = result["flips"]
                told = [
                    change(result, result["difference"]),
                    interval(result, result["ci95"]),
                    f"{flips['lost']}/{flips['gained']}" if flips else "-",
                    p_value(result["p_value"]),
                    standing(result),
                ]
            table.append([head, sides(record)[0], f"{result['n']:,}", value(result, result["value"]), *told])
            head = ""
    return table


def text(records: Sequence[Record]) -> list[list[str]]:
    """A row for each target, and one for the baseline against itself; see TEXT for the columns."""
    table, floor = [], None
    for record in records:
        found, required = record.get("proxies"), record["required"]
        floor = floor or record.get("floor_proxies")
        table.append(
            [
                sides(record)[0],
                _size(sum(part["bytes"] for part in record["target"]["parts"])),
                *(_figure(found[key], by, form) if found else "-" for key, by, form in _FIGURES),
                "" if not required else "held" if all(one["held"] for one in required) else "MISSED",
            ]
        )
    if floor:
        told = [_figure({"mean": floor[key]["mean"]}, by, form) for key, by, form in _FIGURES]
        table.append(["baseline against itself", "-", *told, ""])
    return table


def _figure(found: Mapping[str, Any], by: float, form: str) -> str:
    """With its interval, where it has one."""
    mean, low, high = (
        "-" if found.get(end) is None else format(by * found[end], form) for end in ("mean", "low", "high")
    )
    return f"{mean} ({low} to {high})" if "low" in found else mean


def _size(nbytes: int) -> str:
    unit, width = ("GB", 1e9) if nbytes >= 1e9 else ("MB", 1e6)
    return f"{nbytes / width:,.2f} {unit}" if nbytes else "-"
