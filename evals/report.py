"""The page that is sent to a team: what came out, in tables, with everything that it takes to believe or repeat it.

GitHub's Markdown, which the Hub shows as well. Names from outside are escaped: a task's name cannot break a table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from . import side_by_side
from .markup import escape, table
from .outcome import (
    PROXIES,
    TOOL_CALLS,
    Record,
    Result,
    change,
    figure,
    headline,
    interval,
    leaves,
    listed,
    p_value,
    points_of,
    proxy,
    rows,
    sentence,
    short,
    sides,
    standing,
    value,
    visible,
)

_SHOWN = (
    "tasks", "limit", "num_fewshot", "chat_template", "system_instruction", "repeats", "seed", "gen_kwargs", "include",
)  # fmt: skip


def markdown(record: Record, *, plot: str | None, closing: bool = True) -> str:
    """The page. plot: path or address of a picture that belongs on it. closing: how to read it, and how to repeat it,
    which the last of several pages says for all.
    """
    target, baseline = (escape(name) for name in sides(record))
    parts = [f"# {target}{f' against {baseline}' if baseline else ''}", f"**{escape(sentence(record))}**"]
    if plot:
        parts.append(f"![{target}: differences with 95 % intervals](<{quote(plot, safe='/:')}>)")
    if record["tasks"]:
        parts.append("## Tasks\n\n" + _tasks(record))
    if record.get("notes"):
        parts.append("\n".join(f"* {escape(note)}" for note in record["notes"]))
    parts += [section for section in (_other_metrics(record), _proxies(record), _tools(record)) if section]
    if record["required"]:
        parts.append("## What was required\n\n" + _required(record["required"]))
    parts.append("## What was compared\n\n" + _compared(record))
    if closing:
        parts += ["## How to read this\n\n" + _reading(record), "## How to repeat it\n\n" + _command(record)]
    return "\n\n".join(parts) + "\n"


def overview(records: Sequence[Record]) -> str:
    """The tables of several targets against one baseline, to stand before the page of each."""
    scores, text = side_by_side.tasks(records), side_by_side.text(records)
    parts = []
    for columns, body in ((side_by_side.TASKS, scores), (side_by_side.TEXT, text)):
        if body:
            parts.append(table(list(columns), "".join(columns.values()), [[escape(x) for x in row] for row in body]))
    names = [escape(sides(record)[0]) for record in records]
    against = f" against {escape(sides(records[0])[1])}" if records[0].get("baseline") else ""
    said = "\n".join(f"* {escape(headline(record))}." for record in records)
    title = f"# {', '.join(names)}{against}\n\n{escape(records[0]['started'][:10])}\n\n{said}\n\n"
    return title + "\n\n".join(parts) + "\n"


def model_card_table(record: Record) -> str:
    """The short table for a model card: score, difference and interval of each task, and mean KL, with where from."""
    target, baseline = (escape(name) for name in sides(record))
    if not baseline:
        body = [[escape(name), result["metric"], f"{result['n']:,}", value(result, result["value"]),
                 _own(result)] for name, result in rows(record)]  # fmt: skip
        drawn = table(["task", "metric", "n", target, "95 %"], "llrrr", body)
    else:
        body = [
            [
                escape(name),
                escape(result["metric"]),
                f"{result['n']:,}",
                value(result, result["baseline"]),
                value(result, result["value"]),
                f"{change(result, result['difference'])} ({interval(result, result['ci95'])})",
            ]
            for name, result in rows(record)
        ]
        drawn = table(["task", "metric", "n", baseline, target, "difference (95 %)"], "llrrrr", body)
    kl = f" Mean KL {figure(record['mean_kl'])} nats a token." if record.get("mean_kl") is not None else ""
    versions = record["versions"]
    made = f"lm-eval {versions.get('lm_eval', '?')}, phasefold {versions.get('phasefold', '?')}"
    return f"{drawn}\n\nScores in percent, differences in points, paired.{kl} {record['started'][:10]}, {made}.\n"


def _own(result: Result) -> str:
    ends = result.get("ci95_value") or [None, None]
    return f"{value(result, ends[0])} to {value(result, ends[1])}"


def _tasks(record: Record) -> str:
    shown = rows(record)
    if not record.get("baseline"):
        body = [
            [_name(name, result), escape(result["metric"]), f"{result['n']:,}", value(result, result["value"]),
             _own(result)] for name, result in shown
        ]  # fmt: skip
        return table(["task", "metric", "n", "score", "95 %"], "llrrr", body)
    header = [
        "task", "metric", "n", "baseline", "target", "difference", "95 %", "lost / gained", "p", "can be seen",
        "verdict", "baseline against itself",
    ]  # fmt: skip
    drawn = table(header, "llrrrrrrrrlr", [_row(name, result) for name, result in shown])
    noisy = [escape(name) for name, result in shown if _is_noisy(result)]
    if not noisy:
        return drawn
    return (
        f"{drawn}\n\nOn {listed(noisy)} the baseline differs from itself by more than its interval: what is read there "
        "is noise in part. (Of 20 tasks, one does so by chance.)"
    )


def _is_noisy(result: Result) -> bool:
    floor = result.get("floor")
    return floor is not None and None not in floor["ci95"] and not floor["ci95"][0] <= 0 <= floor["ci95"][1]


def _name(name: str, result: Result) -> str:
    return f"**{escape(name)}**" if "tasks" in result or name == "all" else escape(name)


def _row(name: str, result: Result) -> list[str]:
    floor = result.get("floor")
    return [
        _name(name, result),
        escape(result["metric"]) + ("" if result["higher_is_better"] else " (lower is better)"),
        f"{result['n']:,}",
        value(result, result["baseline"]),
        value(result, result["value"]),
        change(result, result["difference"]),
        interval(result, result["ci95"]),
        f"{result['flips']['lost']} / {result['flips']['gained']}" if result["flips"] else "-",
        p_value(result["p_value"]),
        visible(result),
        standing(result),
        f"{change(result, floor['difference'])} ({interval(result, floor['ci95'])})" if floor else "-",
    ]


def _other_metrics(record: Record) -> str:
    body = [
        [
            escape(name),
            escape(metric) + ("" if result["higher_is_better"] else " (lower is better)"),
            value(result, result.get("baseline")),
            value(result, result["value"]),
            *(
                [change(result, result["difference"]), interval(result, result["ci95"])]
                if "difference" in result
                else "--"
            ),
        ]
        for name, task in leaves(record)
        for metric, result in task.get("metrics", {}).items()
    ]
    if not body:
        return ""
    drawn = table(["task", "metric", "baseline", "target", "difference", "95 %"], "llrrrr", body)
    return f"<details><summary>Other metrics of the same answers</summary>\n\n{drawn}\n\n</details>"


def _proxies(record: Record) -> str:
    found, floor = record.get("proxies"), record.get("floor_proxies")
    if not found:
        return ""
    body = [
        [words, proxy(found[key], scale), proxy(floor[key], scale) if floor else "-"] for words, key, scale in PROXIES
    ]
    text = found.get("text") or (record["settings"].get("text") or {}).get("name") or "the tasks' own"
    told = f"On {found['tokens']:,} tokens of {found['documents']:,} documents ({escape(text)}), intervals by document."
    drawn = table(["", "target against baseline", "baseline against itself"], "lrr", body)
    return f"## Next-token distributions\n\n{told}\n\n{drawn}"


def _tools(record: Record) -> str:
    told = record.get("tool_calls")
    if not told:
        return ""
    both = [told["target"], *([told["baseline"]] if told.get("baseline") else [])]
    body = [
        ["answers", *(f"{one['answers']:,}" for one in both)],
        ["without an answer", *(f"{one['unanswered']:,}" for one in both)],
        ["answers with calls", *(f"{one['triggered']:,}" for one in both)],
        *([words, *(_percent(told[key]) for key in keys[: len(both)])] for words, keys in TOOL_CALLS),
        ["calls cut off", *(f"{one['calls_unfinished']:,}" for one in both)],
    ]
    kinds = dict.fromkeys(kind for one in both for kind in one["failures"])
    body += [[escape(kind), *(f"{one['failures'].get(kind, {}).get('count', 0):,}" for one in both)] for kind in kinds]
    drawn = table(["", "target", "baseline"][: len(both) + 1], "lrr"[: len(both) + 1], body)
    said = [f"{told['requests']:,} requests.", drawn]
    if triggers := told["triggers"]:
        lost, gained = triggers["false_negatives"], triggers["false_positives"]
        said.append(
            f"Calls when the baseline calls: F1 {_percent(told['f1'])} % (the baseline against itself "
            f"{_percent(told['floor'])}), precision {_percent(told['precision'])}, recall {_percent(told['recall'])}, "
            f"over {triggers['compared']:,} requests; {lost:,.4g} calls lost, {gained:,.4g} gained."
        )
    return "## Tool calls\n\n" + "\n\n".join(said)


def _percent(found: Mapping[str, Any] | None) -> str:
    return "-" if found is None else proxy(found, 100.0)


def _required(required: Sequence[Mapping[str, Any]]) -> str:
    body = [[escape(one["text"]), "held" if one["held"] else "**MISSED**", escape(one["reason"])] for one in required]
    return table(["required", "", "because"], "lll", body)


def _compared(record: Record) -> str:
    idents = [record["target"], *([record["baseline"]] if record.get("baseline") else [])]
    lines: list[list[str]] = []

    def line(words: str, each: Sequence[str]) -> None:
        if any(text not in ("", "-") for text in each):
            lines.append([words, *each])

    line(
        "what",
        [
            f"{escape(ident['kind'])} " + escape(" + ".join(p["name"] for p in ident["parts"]) or ident["text"])
            for ident in idents
        ],
    )
    line("digest", [f"`{short(ident.get('digest'))}`" if ident.get("digest") else "-" for ident in idents])
    for words, key in (("made by", "recipe"), ("formats", "formats"), ("source", "source"), ("size", "bytes")):
        line(words, ["<br>".join(_part(part, key) for part in ident["parts"]) or "-" for ident in idents])
    line("KV rows", [_kv(ident) for ident in idents])
    names = dict.fromkeys(name for ident in idents for name in ident["runtime"])
    for name in (name for name in names if name != "kv"):
        line(escape(name.replace("_", " ")), [escape(_setting(ident["runtime"].get(name))) for ident in idents])
    drawn = table(["", "target", "baseline"][: len(idents) + 1], "lll"[: len(idents) + 1], lines)
    versions = ", ".join(f"{escape(name)} {escape(number)}" for name, number in record["versions"].items())
    settings = {name: record["settings"].get(name) for name in _SHOWN}
    said = ", ".join(
        f"{name} {escape(_setting(setting))}"
        for name, setting in settings.items()
        if setting not in ([], {}) and setting is not None and setting is not False
    )
    started = f"{escape(record['started'])}, {record.get('seconds', 0):,.0f} s"
    cut = ", ".join(f"{escape(task)} {count:,}" for task, count in record.get("truncated", {}).items() if count)
    told = [drawn, f"Started {started}. {versions}.", f"Settings: {said}."]
    return "\n\n".join(told + ([f"Too long for the model, beginning cut off: {cut} requests."] if cut else []))


def _setting(setting: Any) -> str:
    if setting in (None, [], {}, ""):
        return "-"
    if isinstance(setting, Mapping):
        return ", ".join(f"{name} {one}" for name, one in setting.items())
    return ", ".join(map(str, setting)) if isinstance(setting, list) else str(setting)


def _part(part: Mapping[str, Any], key: str) -> str:
    found = part.get(key)
    if found is None:
        return "-"
    if key == "bytes":
        return f"{found:,} bytes"
    if key == "formats":
        return escape(", ".join(found))
    return f"`{short(found)}`" if key == "source" else escape(found)


def _kv(ident: Mapping[str, Any]) -> str:
    if ident["kind"] != "pair":
        return "-"
    return escape(ident["kv"]) + (f", scales `{short(ident['scales'])}`" if ident.get("scales") else "")


def _reading(record: Record) -> str:
    if not record.get("baseline"):
        return (
            "* A score's interval is of the questions: others of the same kind would give another score.\n"
            "* Without a baseline on the same questions, nothing can be said about what quantization has cost."
        )
    margin = record["settings"].get("margin")
    if margin is None:
        verdicts = (
            '"Surely worse": the whole interval lies on the losing side of zero; of 40 tasks without any loss, one '
            'shows that by chance. "No difference seen" does not prove that there is none.'
        )
    else:
        verdicts = (
            f'"Not worse": the whole interval lies above a loss of {points_of(margin)}; "worse": it lies below; '
            '"cannot tell": both could be, and more questions are needed.'
        )
    return "\n".join(
        (
            "* Differences are target - baseline on the same questions, in points where scores are shares. Where the "
            "interval holds zero, the choice of questions can explain them.",
            f'* {verdicts} "Can be seen": the difference that so many questions show 80 times in 100.',
            "* Lost / gained: questions that only the baseline, or only the target, gets right; p is McNemar's, exact, "
            "and takes questions for independent: where they come by document, rely on the interval. "
            "The baseline against itself (other batches, other seeds) is the noise: what is no larger says nothing.",
        )
    )


def _command(record: Record) -> str:
    said = str(record.get("command") or "")
    command = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in said)
    if not command:
        return "The record does not say how it was called; its settings stand above."
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", command)), default=0))
    return f"{fence}sh\n{command}\n{fence}"
