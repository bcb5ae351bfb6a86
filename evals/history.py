"""Runs over time: what each said, what had changed since the run before, and what that did, like with like.

Two runs are compared question by question where they asked the same: the scores are in the records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .outcome import name_of, short
from .results import since

Record = Mapping[str, Any]
#: of `Interval` and RESULT what a row keeps
_KEPT = ("metric", "share", "higher_is_better", "value", "n", "difference", "ci95", "verdict")
#: settings that do not change a question's meaning
_ASIDE = ("tasks", "margin", "text", "tool_calls")


def history(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A row for each run, in the order given (`read_records`: of their time).

    Keys: "started", "target", "baseline" (None without), "tasks" {name: RESULT's main keys, and "since": how the target
    scores against the last run's target that was put the same questions, {"started", "difference", "ci95"}, None where
    there is none}, "mean_kl", "floor_kl", "held" (None: nothing was required), "changed" [{"what", "before", "after"}]
    since the run before.
    """
    return [_row(record, records[:place]) for place, record in enumerate(records)]


def _row(record: Record, earlier: Sequence[Record]) -> dict[str, Any]:
    baseline, floor = record.get("baseline"), record.get("floor_proxies")
    results = dict(record["tasks"]) | ({"all": record["all"]} if record.get("all") else {})
    return {
        "started": record["started"],
        "target": name_of(record["target"]),
        "baseline": name_of(baseline) if baseline else None,
        "tasks": {
            name: {key: result.get(key) for key in _KEPT} | {"since": _since(name, record, earlier)}
            for name, result in results.items()
        },
        "mean_kl": record.get("mean_kl"),
        "floor_kl": floor["mean_kl"]["mean"] if floor else None,
        "held": all(one["held"] for one in record["required"]) if record["required"] else None,
        "changed": changed(earlier[-1], record) if earlier else [],
    }


def _since(name: str, record: Record, earlier: Sequence[Record]) -> dict[str, Any] | None:
    """Against the last run that was put the same questions in the same way."""
    result = record["tasks"].get(name)
    scores = record["scores"].get(name, {}).get(result["metric"]) if result else None
    if scores is None:
        return None  # groups: their tasks say it
    for before in reversed(earlier):
        theirs = before["scores"].get(name, {}).get(result["metric"])
        if theirs is None or before["prompts"].get(name) != record["prompts"].get(name):
            continue
        if _asked(before) != _asked(record):
            continue
        found = since(theirs, scores, result["share"] and before["tasks"][name]["share"])
        if found is not None:
            interval = found.to_json()
            ends = [interval["low"], interval["high"]]
            return {"started": before["started"], "difference": found.mean, "ci95": ends}
    return None


def _asked(record: Record) -> dict[str, Any]:
    """Settings that shape answers; which other tasks ran beside does not."""
    return {name: setting for name, setting in record["settings"].items() if name not in (*_ASIDE, "seed", "include")}


def like(before: Record, after: Record, task: str | None) -> bool:
    """Whether two runs' figures may be joined: same baseline and settings, same questions (None: all, and the text)."""
    if _asked(before) != _asked(after):
        return False
    baselines = [(record.get("baseline") or {}).get("digest") for record in (before, after)]
    texts = [(record["settings"].get("text") or {}).get("digest") for record in (before, after)]
    if baselines[0] != baselines[1] or (task is None and texts[0] != texts[1]):
        return False
    if task is not None and task in after["prompts"]:
        return bool(before["prompts"].get(task) == after["prompts"][task])
    members = {name: record["tasks"].get(task, {}).get("tasks") for name, record in (("b", before), ("a", after))}
    if members["b"] != members["a"]:
        return False
    asked = members["a"] or list(after["prompts"])
    return all(before["prompts"].get(name) == after["prompts"].get(name) for name in asked)


def changed(before: Record, after: Record) -> list[dict[str, str]]:
    """What is different in how two runs came about: artifact, baseline, runtime, versions, prompts, settings."""
    found = []

    def note(what: str, one: Any, two: Any) -> None:
        if one != two:
            found.append({"what": what, "before": _said(one), "after": _said(two)})

    for side in ("target", "baseline"):
        one, two = before.get(side), after.get(side)
        if one is None or two is None:
            note(side, one and name_of(one), two and name_of(two))
            continue
        what = "artifact" if side == "target" else "baseline"
        if one.get("digest") != two.get("digest") or one["kind"] != two["kind"]:
            names = [f"{name_of(ident)} {short(ident.get('digest'))}" for ident in (one, two)]
            note(what, *names)
        elif not one["parts"]:
            note(what, one["text"], two["text"])
        for key in dict.fromkeys((*one["runtime"], *two["runtime"])):
            note(f"{what}'s {key}", one["runtime"].get(key), two["runtime"].get(key))
    for key in dict.fromkeys((*before["versions"], *after["versions"])):
        note(key, before["versions"].get(key), after["versions"].get(key))
    for task in (task for task in after["prompts"] if task in before["prompts"]):
        versions = [record.get("task_versions", {}).get(task) for record in (before, after)]
        note(f"version of {task}", *versions)
        note(f"prompts of {task}", *(short(record["prompts"][task]) for record in (before, after)))
    for key in dict.fromkeys((*before["settings"], *after["settings"])):
        note(key.replace("_", " "), before["settings"].get(key), after["settings"].get(key))
    return found


def _said(setting: Any) -> str:
    if isinstance(setting, Mapping):
        return ", ".join(f"{name}={_said(one)}" for name, one in setting.items()) or "none"
    if isinstance(setting, list | tuple):
        return ", ".join(map(str, setting)) or "none"
    return "none" if setting is None else str(setting)
