"""The picture of a record: each task's difference with its interval, before the band of what is noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import EvalError
from .drawing import BAND, BLUE, GREY, GRID, INK, LOOK, SOFT, Sheet, check_format, paragraph, span
from .outcome import Record, Result, change, figure, headline, points_of, rows, scale, standing, value, wrapped
from .plot_history import plot_history as plot_history

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _EDGE, _NAMES, _NUMBERS = 10.4, 0.35, 2.75, 3.0  # inches
_NAME, _TITLE = 30, 80  # characters in a line
_LINE, _HEAD, _FOOT = 0.165, 0.34, 0.62  # inches
_COLUMNS = ((0.82, "difference"), (1.42, "n"), (2.34, "lost / gained"), (2.98, "p"))


def plot_record(record: Record, path: Path) -> None:
    """Draw a record with a baseline to a .png (or .svg, .pdf).

    Tasks in points share an axis; each other metric has one of its own. Raises EvalError where there is nothing to
    draw, LoadError without matplotlib, UsageError for another kind of file.
    """
    check_format(path)
    drawn(record).save(path)


def drawn(record: Record) -> Sheet:
    """The picture itself."""
    panels = _panels(record)
    proxies = _proxies(record)
    if not panels and not proxies:
        raise EvalError("neither tasks nor distributions in this run: there is nothing to draw")
    title = paragraph(headline(record), _TITLE)
    heights = [_HEAD + sum(_height(name) for name, _ in shown) + _FOOT for shown in panels.values()]
    top = 0.3 + 0.27 * len(title) + 0.3
    sheet = Sheet(_WIDTH, top + sum(heights) + (0.3 if panels else 0) + (1.55 if proxies else 0) + 0.1)
    sheet.text(_EDGE, 0.28, "\n".join(title), 13, weight="bold", linespacing=1.35)
    missed = any(not one["held"] for one in record["required"])
    sheet.text(_EDGE, top - 0.3, _subtitle(record), 9, LOOK["worse"][0] if missed else SOFT)
    for (unit, shown), height in zip(panels.items(), heights, strict=True):
        _forest(sheet, top, unit, shown, record)
        top += height
    if panels:
        _legend(sheet, top, record, [result for shown in panels.values() for _, result in shown])
        top += 0.3
    if proxies:
        _proxy_panels(sheet, top, proxies)
    return sheet


def _panels(record: Record) -> dict[str, list[tuple[str, Result]]]:
    """What is drawn on which axis, by the axis' label."""
    found: dict[str, list[tuple[str, Result]]] = {}
    for name, result in rows(record):
        if "difference" in result:
            unit = "points" if result["share"] else result["metric"]
            unit += "" if result["higher_is_better"] else ", lower is better"
            label = f"difference, target - baseline ({unit})"
        else:
            label = "score, %" if result["share"] else result["metric"]
        found.setdefault(label, []).append((name, result))
    return found


def _height(name: str) -> float:
    return 0.17 + _LINE * max(len(wrapped(name, _NAME)), 1)


def _subtitle(record: Record) -> str:
    said = [record["started"][:10]]
    if record.get("baseline") and record["tasks"]:
        said.append("paired by question, 95 % intervals")
    elif record["tasks"]:
        said.append("95 % intervals of the scores")
    if record["required"]:
        missed = [one["text"] for one in record["required"] if not one["held"]]
        said.append(f"required and missed: {', '.join(missed)}" if missed else "all that was required holds")
    return paragraph(" \u00b7 ".join(said), 125)[0]


def _forest(sheet: Sheet, top: float, unit: str, shown: Sequence[tuple[str, Result]], record: Record) -> None:
    heights = [_height(name) for name, _ in shown]
    right = _WIDTH - _EDGE - _NUMBERS
    axes = sheet.axes(_EDGE + _NAMES, top + _HEAD, right - _EDGE - _NAMES, sum(heights))
    axes.set_ylim(sum(heights), 0)
    axes.set_yticks([])
    compared = "difference" in shown[0][1]
    for at, words in _COLUMNS if compared else ((0.82, "score"), (1.42, "n")):
        sheet.text(right + at, top + _HEAD - 0.1, words, 8.5, SOFT, ha="right", va="bottom")
    low, high = _limits(shown, record)
    axes.set_xlim(low, high)
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    if compared:
        axes.axvline(0, color=INK, linewidth=1)
        if (margin := record["settings"].get("margin")) is not None and shown[0][1]["share"]:
            axes.axvline(-100 * margin, color=LOOK["worse"][0], linewidth=1.2, linestyle=(0, (4, 2)))
    at, members = 0.0, {task for _, result in shown for task in result.get("tasks", ())}
    for (name, result), height in zip(shown, heights, strict=True):
        middle = at + height / 2
        if at:
            axes.axhline(at, color=GRID, linewidth=0.6)
        _one(axes, middle, height, result, (low, high))
        strong = {"weight": "bold"} if "tasks" in result or name == "all" else {}
        y = top + _HEAD + middle
        indent = 0.16 * (name in members)
        sheet.text(_EDGE + indent, y, "\n".join(wrapped(name, _NAME)), 9.5, va="center", linespacing=1.1, **strong)
        for (place, _), words in zip(_COLUMNS, _numbers(result), strict=False):
            sheet.text(right + place, y, words, 9, va="center", ha="right", **strong)
        at += height
    axes.set_xlabel(unit, fontsize=9, color=SOFT, parse_math=False)


def _limits(shown: Sequence[tuple[str, Result]], record: Record) -> tuple[float, float]:
    ends: list[float | None] = []
    for _, result in shown:
        by = scale(result)
        if "difference" in result:
            floor = result.get("floor") or {"ci95": [0.0, 0.0]}
            found = [0.0, result["difference"], *result["ci95"], *floor["ci95"]]
            if (margin := record["settings"].get("margin")) is not None and result["share"]:
                found.append(-margin)
        else:
            found = [result["value"], *(result.get("ci95_value") or [])]
        ends += [by * end for end in found if end is not None]
    return span([end for end in ends if end is not None])


def _one(axes: Axes, y: float, height: float, result: Result, limits: tuple[float, float]) -> None:
    """A row: the noise's band, the interval, the estimate. Where an end is not known, the line runs off the axis."""
    by = scale(result)
    compared = "difference" in result
    if compared and (floor := result.get("floor")):
        low, high = _ends(floor["ci95"], by, limits)
        axes.barh(y, high - low, left=low, height=height * 0.72, color=BAND, linewidth=0, zorder=1)
        axes.plot(
            [by * floor["difference"]] * 2, [y - height * 0.36, y + height * 0.36], color="#c9a94f", lw=1.2, zorder=2
        )
    color, marker = LOOK[standing(result)] if compared else (BLUE, "o")
    at = by * (result["difference"] if compared else result["value"])
    low, high = _ends(result["ci95"] if compared else result.get("ci95_value") or [at / by, at / by], by, limits)
    axes.plot([low, high], [y, y], color=color, linewidth=2, solid_capstyle="butt", zorder=3)
    for end in (low, high):
        axes.plot([end, end], [y - 0.05, y + 0.05], color=color, linewidth=2, zorder=3)
    axes.plot([at], [y], marker=marker, markersize=7.5, color=color, markeredgecolor="white", zorder=4)


def _ends(ends: Sequence[float | None], by: float, limits: tuple[float, float]) -> tuple[float, float]:
    low, high = (limit if end is None else by * end for end, limit in zip(ends, limits, strict=True))
    return low, high


def _numbers(result: Result) -> list[str]:
    if "difference" not in result:
        return [value(result, result["value"]), f"{result['n']:,}"]
    flips, p = result["flips"], result["p_value"]
    return [
        change(result, result["difference"]),
        f"{result['n']:,}",
        f"{flips['lost']:,} / {flips['gained']:,}" if flips else "-",
        "-" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}",
    ]


def _legend(sheet: Sheet, top: float, record: Record, shown: Sequence[Result]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    looks: dict[tuple[str, str], list[str]] = {}
    for words in dict.fromkeys(standing(result) for result in shown if "difference" in result):
        looks.setdefault(LOOK[words], []).append(words)
    for (color, marker), several in looks.items():
        words = " or ".join(several)
        handles.append(
            Line2D([], [], color=color, marker=marker, markeredgecolor="white", markersize=8, lw=2, label=words)
        )
    if any(result.get("floor") for result in shown):
        handles.append(Patch(color=BAND, label="noise: the baseline against itself"))
    if (margin := record["settings"].get("margin")) is not None and handles:
        dashes: dict[str, Any] = {"color": LOOK["worse"][0], "linestyle": (0, (4, 2)), "lw": 1.2}
        handles.append(Line2D([], [], label=f"margin, {points_of(margin)}", **dashes))
    if handles:
        place = (_EDGE / sheet.width, 1 - (top - 0.1) / sheet.height)
        sheet.figure.legend(
            handles=handles, loc="upper left", bbox_to_anchor=place, ncols=len(handles), frameon=False, fontsize=8.5,
            borderpad=0, borderaxespad=0, columnspacing=1.6, labelcolor=SOFT,
        )  # fmt: skip


def _proxies(record: Record) -> list[tuple[str, float, Mapping[str, Any], Mapping[str, Any] | None]]:
    found, floor = record.get("proxies"), record.get("floor_proxies")
    if not found:
        return []
    names = (("mean KL, nats a token", "mean_kl", 1.0), ("same most likely token, %", "same_top", 100.0),
             ("perplexity, target / baseline", "ratio", 1.0))  # fmt: skip
    return [(words, by, found[key], floor[key] if floor else None) for words, key, by in names]


def _proxy_panels(
    sheet: Sheet, top: float, proxies: Sequence[tuple[str, float, Mapping[str, Any], Mapping[str, Any] | None]]
) -> None:
    """Three small ones: the target, and below it the baseline against itself."""
    gap = 0.5
    width = (_WIDTH - 2 * _EDGE - gap * (len(proxies) - 1)) / len(proxies)
    for number, (words, by, found, floor) in enumerate(proxies):
        left = _EDGE + number * (width + gap)
        axes = sheet.axes(left, top + 0.42, width, 0.62)
        shown = [(found, BLUE, "o"), *([(floor, GREY, "s")] if floor else [])]
        known = [by * one[end] for one, _, _ in shown for end in ("mean", "low", "high") if one[end] is not None]
        perfect = (0.0, 100.0, 1.0)[number]
        limits = span([*known, perfect])
        axes.set_xlim(*limits)
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_yticks([])
        axes.axvline(perfect, color=INK, linewidth=1)
        axes.grid(axis="x", color=GRID, linewidth=0.7)
        axes.locator_params(axis="x", nbins=5)
        for y, (one, color, marker) in enumerate(shown):
            low, high = _ends([one["low"], one["high"]], by, limits)
            axes.plot([low, high], [y, y], color=color, linewidth=2, zorder=3)
            if one["mean"] is not None:
                at = by * one["mean"]
                axes.plot(
                    [at],
                    [y],
                    marker=marker,
                    markersize=6.5,
                    color=color,
                    markeredgecolor="white",
                    zorder=4,
                    clip_on=False,
                )
        mean = figure(None if found["mean"] is None else by * found["mean"])
        sheet.text(left, top + 0.1, f"{words}: {mean}", 9)
        if floor:
            sheet.text(
                left,
                top + 0.26,
                f"baseline against itself: {figure(None if floor['mean'] is None else by * floor['mean'])}",
                8,
                SOFT,
            )
