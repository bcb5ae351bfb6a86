"""The picture of many records: how an artifact fared over time, and what had changed when it did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import EvalError
from .drawing import (
    BLUE,
    GREEN,
    GREY,
    GRID,
    INK,
    ORANGE,
    PURPLE,
    SOFT,
    Sheet,
    check_format,
    paragraph,
    span,
)
from .history import history, like
from .outcome import Record, figure, headline, listed, rows, scale, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _EDGE = 10.4, 0.35  # inches
_PANEL, _GAP, _AXIS = 1.25, 0.62, 0.75
_TITLE = 80
_MANY = 14  # runs, from which on not each of them has a label
#: what has changed -> its line: colour and dashes
_MARKS: dict[str, tuple[str, Any]] = {
    "artifact": (ORANGE, "solid"),
    "harness": (BLUE, (0, (5, 2))),
    "runtime": (PURPLE, (0, (1, 1.5))),
    "questions": (GREY, (0, (3, 1, 1, 1))),
}


def plot_history(records: Sequence[Record], path: Path) -> None:
    """Draw records in the order of their time. A line joins runs whose figures can be compared.

    Raises EvalError where there is nothing to draw, LoadError without matplotlib, UsageError for another kind of file.
    """
    check_format(path)
    drawn(records).save(path)


def drawn(records: Sequence[Record]) -> Sheet:
    """The picture itself."""
    if not records:
        raise EvalError("no runs to draw; records lie in the artifact's evals/")
    names = list(dict.fromkeys(name for record in records for name, _ in rows(record)))
    kl = any(record.get("mean_kl") is not None for record in records)
    panels = [*names, *([None] if kl else [])]
    if not panels:
        raise EvalError("neither tasks nor distributions in these runs: there is nothing to draw")
    found = history(records)
    columns = 1 if len(panels) <= 4 else 2 if len(panels) <= 10 else 3
    lines = -(-len(panels) // columns)
    notes = _notes(found)
    title = paragraph(_title(records, found), _TITLE)
    subtitle = _subtitle(records)
    under = 0.3 + 0.27 * len(title)
    top = under + 0.17 + 0.19 * len(subtitle)
    below = top + lines * (_PANEL + _GAP) + _AXIS - 0.25
    sheet = Sheet(_WIDTH, below + 0.19 * len(notes) + (0.5 if notes else 0.1))
    sheet.text(_EDGE, 0.28, "\n".join(title), 13, weight="bold", linespacing=1.35)
    sheet.text(_EDGE, under, "\n".join(subtitle), 9, SOFT, linespacing=1.4)
    gap = 0.75
    width = (_WIDTH - 2 * _EDGE - 0.5 - gap * (columns - 1)) / columns
    for number, name in enumerate(panels):
        left = _EDGE + 0.5 + number % columns * (width + gap)
        last = number + columns >= len(panels)
        axes = sheet.axes(left, top + number // columns * (_PANEL + _GAP) + 0.4, width, _PANEL)
        _frame(axes, records, found, last, columns)
        words = _one_task(axes, records, name) if name is not None else _kl(axes, records)
        at = top + number // columns * (_PANEL + _GAP) + 0.34
        head = wrapped(words, int(width * 11))
        head = head if len(head) < 3 else [head[0], head[1] + "..."]
        sheet.text(left - 0.5, at, "\n".join(head), 9.5, va="bottom", weight="bold")
    _key(sheet, below, found, notes)
    return sheet


def _title(records: Sequence[Record], found: Sequence[Mapping[str, Any]]) -> str:
    last = found[-1]
    steps = {name: task["since"] for name, task in last["tasks"].items() if task["since"]}
    if not steps:
        return headline(records[-1])
    ups = {name: 1 if last["tasks"][name]["higher_is_better"] else -1 for name in steps}
    known = {name: step for name, step in steps.items() if None not in step["ci95"]}
    lost = [name for name, step in known.items() if max(ups[name] * end for end in step["ci95"]) < 0]
    won = [name for name, step in known.items() if min(ups[name] * end for end in step["ci95"]) > 0]
    what = f"{last['target']}, {len(records)} runs"
    if lost:
        return f"{what}: the last one is surely worse than the one before on {listed(lost)}"
    if won:
        return f"{what}: the last one is surely better than the one before on {listed(won)}"
    return f"{what}: nothing has surely changed since the one before"


def _subtitle(records: Sequence[Record]) -> list[str]:
    """What the last run says by itself, and what is drawn."""
    words = (
        "Differences from the baseline, 95 % intervals; pale or grey: the baseline against itself; joined if comparable"
    )
    return [*paragraph(f"The last: {headline(records[-1])}", 125), words]


def _kind(what: str) -> str | None:
    """Which mark a change gets; None: it is no reason for another figure."""
    if what in ("artifact", "baseline", "target"):
        return "artifact"
    if what in ("lm_eval", "phasefold") or what.startswith("version of "):
        return "harness"
    if what in ("transformers", "torch", "python") or "'s " in what:
        return "runtime"
    return None if what in ("tasks", "margin") else "questions"


def _notes(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """What has changed before which run, a line each."""
    notes = []
    for number, row in enumerate(found, 1):
        said = [f"{one['what']} {one['before']} \u2192 {one['after']}" for one in row["changed"] if _kind(one["what"])]
        if said:
            text = f"{number}: " + "; ".join(said)
            lines = paragraph(text, 135)
            notes += lines[:3] if len(lines) <= 3 else [*lines[:2], lines[2][:125] + " ..."]
    return notes


def _frame(
    axes: Axes, records: Sequence[Record], found: Sequence[Mapping[str, Any]], labels: bool, columns: int
) -> None:
    """Runs along the axis, changes as upright lines."""
    axes.set_xlim(0.5, len(records) + 0.5)
    every = max(1, -(-len(records) * columns // _MANY))
    places = range(1, len(records) + 1, every)
    axes.set_xticks(list(places))
    dates = [records[place - 1]["started"] for place in places]
    axes.set_xticklabels(
        [f"{place}\n{date[5:10]}\n{date[11:16]}" for place, date in zip(places, dates, strict=True)] if labels else []
    )
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.locator_params(axis="y", nbins=4)
    axes.set_axisbelow(True)
    for place, row in enumerate(found, 1):
        kinds = dict.fromkeys(kind for one in row["changed"] if (kind := _kind(one["what"])))
        for number, kind in enumerate(kinds):
            color, dashes = _MARKS[kind]
            shift = 0.035 * len(records) / 5 * (number - (len(kinds) - 1) / 2)
            axes.axvline(place - 0.5 + shift, color=color, linestyle=dashes, linewidth=1.1, alpha=0.8, zorder=1)


def _one_task(axes: Axes, records: Sequence[Record], name: str) -> str:
    """Differences where there are any, else scores. -> words for its head."""
    results = [dict(rows(record)).get(name) for record in records]
    compared = any(result and "difference" in result for result in results)
    key, ends = ("difference", "ci95") if compared else ("value", "ci95_value")
    first = next(result for result in reversed(results) if result and key in result)
    by, color = scale(first), BLUE
    points = {
        place: (by * result[key], *(None if end is None else by * end for end in result.get(ends) or [None, None]))
        for place, result in enumerate(results, 1)
        if result and key in result and (result["metric"], result["share"]) == (first["metric"], first["share"])
    }
    if compared:
        axes.axhline(0, color=INK, linewidth=1)
        for place, result in enumerate(results, 1):
            if result and result.get("floor") and None not in result["floor"]["ci95"] and place in points:
                low, high = (by * end for end in result["floor"]["ci95"])
                axes.bar(place, high - low, bottom=low, width=0.5, color="#f0e3c4", linewidth=0, zorder=0.5)
    bands = [
        by * end for r in results if compared and r and r.get("floor") for end in r["floor"]["ci95"] if end is not None
    ]
    _series(
        axes,
        points,
        {p: like(records[p - 2], records[p - 1], name) for p in points if p > 1},
        color,
        [*bands, 0.0] if compared else [],
    )
    if first["share"] and first["higher_is_better"]:
        return f"{name}{', points' if compared else ', score in %'}"
    return f"{name}, {first['metric']}{'' if first['higher_is_better'] else ', lower is better'}"


def _series(
    axes: Axes,
    points: Mapping[int, tuple[float, float | None, float | None]],
    joined: Mapping[int, bool],
    color: str,
    also: Sequence[float],
) -> None:
    known = [each for point in points.values() for each in point if each is not None]
    low, high = span([*known, *also], 0.1)
    size = 6.5 if len(points) < 13 else 4.5
    axes.set_ylim(low, high)
    for place, (at, *ends) in points.items():
        before = points.get(place - 1)
        if before is not None and joined.get(place):
            axes.plot([place - 1, place], [before[0], at], color=color, linewidth=1, alpha=0.55, zorder=2)
        bottom, top = (limit if end is None else end for end, limit in zip(ends, (low, high), strict=True))
        axes.plot([place, place], [bottom, top], color=color, linewidth=2, solid_capstyle="butt", zorder=3)
        axes.plot([place], [at], marker="o", markersize=size, color=color, markeredgecolor="white", zorder=4)


def _kl(axes: Axes, records: Sequence[Record]) -> str:
    points = {}
    for place, record in enumerate(records, 1):
        if record.get("mean_kl") is not None:
            found = record["proxies"]["mean_kl"]
            points[place] = (found["mean"], found["low"], found["high"])
    joined = {place: like(records[place - 2], records[place - 1], None) for place in points if place > 1}
    _series(axes, points, joined, GREEN, [0.0])
    axes.set_ylim(0, axes.get_ylim()[1])
    for place, record in enumerate(records, 1):
        if record.get("floor_proxies"):
            floor = record["floor_proxies"]["mean_kl"]["mean"]
            axes.plot([place], [floor], marker="_", markersize=13, color=GREY, mew=2, clip_on=False)
    last = figure(records[max(points) - 1]["mean_kl"])
    return f"mean KL, nats a token: {last}"


def _key(sheet: Sheet, top: float, found: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    kinds = {kind for row in found for one in row["changed"] if (kind := _kind(one["what"]))}
    if not kinds:
        return
    handles = [
        Line2D([], [], color=color, linestyle=dashes, lw=1.4, label=f"{kind} changed")
        for kind, (color, dashes) in _MARKS.items()
        if kind in kinds
    ]
    sheet.figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(_EDGE / sheet.width, 1 - top / sheet.height),
        ncols=len(handles), frameon=False, fontsize=8.5, borderpad=0, borderaxespad=0, labelcolor=SOFT,
        handlelength=2.6,
    )  # fmt: skip
    sheet.text(_EDGE, top + 0.26, "\n".join(notes), 8, SOFT, linespacing=1.5)
