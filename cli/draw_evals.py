"""What `eval` draws: a record, a history, and how far a run has come. Tables are at most 100 columns wide."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .draw import clean, say

_WIDTH = 100
#: standings that are too long for a column
_SHORT = {"no difference seen": "none seen", "surely worse": "worse", "surely better": "better"}


def record(found: Mapping[str, Any]) -> None:
    """The outcome in a sentence, then the tables behind it."""
    from ..evals.outcome import rows, sentence

    say(sentence(found))
    shown = rows(found)
    if shown and found["baseline"]:
        _paired(shown)
    elif shown:
        _alone(shown)
    if found["proxies"]:
        _proxies(found["proxies"], found["floor_proxies"])
    if found["tool_calls"]:
        _tool_calls(found["tool_calls"])
    for task, count in found["truncated"].items():
        if count:
            say(f"note: {task}: {count:,} requests are too long for the model and lost their beginning")
    for note in found.get("notes", ()):
        say(f"note: {note}")
    for one in found["required"]:
        say(f"required {one['text']}: {'held' if one['held'] else 'MISSED'}: {one['reason']}")


def overview(records: Sequence[Mapping[str, Any]]) -> None:
    """Several targets against one baseline, side by side."""
    from ..evals import side_by_side
    from ..evals.outcome import wrapped

    scores = [
        [row[0], "\n".join(wrapped(clean(row[1]), 20)), *row[2:-1], _SHORT.get(row[-1], row[-1])]
        for row in side_by_side.tasks(records)
    ]
    if scores:
        _table(list(side_by_side.TASKS), scores, "".join(side_by_side.TASKS.values()))
        print()
    _table(list(side_by_side.TEXT), side_by_side.text(records), "".join(side_by_side.TEXT.values()))


def _paired(shown: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    from ..evals.outcome import change, interval, p_value, standing, value, visible

    body, members = [], {task for _, one in shown for task in one.get("tasks", ())}
    for name, one in shown:
        flips, floor = one["flips"], one["floor"]
        head = "  " * (name in members) + name
        body.append(
            [
                head if one["share"] else f"{head} ({one['metric']})",
                f"{one['n']:,}",
                value(one, one["baseline"]),
                value(one, one["value"]),
                change(one, one["difference"]),
                interval(one, one["ci95"]),
                f"{flips['lost']}/{flips['gained']}" if flips else "-",
                p_value(one["p_value"]),
                visible(one),
                change(one, floor["difference"]) if floor else "-",
                _SHORT.get(standing(one), standing(one)),
            ]
        )
    header = ["task", "n", "base", "target", "diff", "95 %", "flips", "p", "seen", "noise", "verdict"]
    _table(header, body, "lrrrrrrrrrl")
    print("diff in points, shares; flips lost/gained; seen: what so many questions show 80 times in 100;")
    print("noise: the baseline against itself; p takes questions for independent, the interval does not")


def _alone(shown: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    from ..evals.outcome import value

    body = []
    for name, one in shown:
        ends = [value(one, end) for end in one["ci95_value"]]
        body.append([name, one["metric"], f"{one['n']:,}", value(one, one["value"]), f"{ends[0]} to {ends[1]}"])
    _table(["task", "metric", "n", "score", "95 %"], body, "llrrr")


def _proxies(found: Mapping[str, Any], floor: Mapping[str, Any] | None) -> None:
    from ..evals.outcome import PROXIES, proxy

    body = [[words, proxy(found[key], by), proxy(floor[key], by) if floor else "-"] for words, key, by in PROXIES]
    print()
    _table([f"{found['tokens']:,} tokens of text", "target", "baseline against itself"], body, "lrr")


def _tool_calls(found: Mapping[str, Any]) -> None:
    from ..evals.outcome import TOOL_CALLS, proxy

    many = 2 if found["baseline"] else 1
    body = [
        [words, *(proxy(found[key], 100.0) if found[key] else "-" for key in keys[:many])] for words, keys in TOOL_CALLS
    ]
    print()
    _table([f"tool calls, {found['requests']:,} requests", "target", "baseline"][: many + 1], body, "lrr"[: many + 1])
    if found["f1"]:
        print(f"calls when the baseline calls: F1 {proxy(found['f1'], 100.0)} %")
    if found["floor"]:
        print(f"the baseline against itself: F1 {proxy(found['floor'], 100.0)} %")


def history(rows: Sequence[Mapping[str, Any]]) -> None:
    """A block for each run, the oldest first: what had changed, and the figures."""
    from ..evals.outcome import change, figure, interval, standing, value

    if not rows:
        print("no runs yet")
    for number, row in enumerate(rows, 1):
        against = f" against {row['baseline']}" if row["baseline"] else ""
        held = {None: "", True: ", all required held", False: ", required MISSED"}[row["held"]]
        say(f"{number}. {row['started'][:16].replace('T', ' ')} {row['target']}{against}{held}")
        for one in row["changed"]:
            print("   changed: " + clean(f"{one['what']}: {one['before']} -> {one['after']}"))
        body = []
        for name, one in row["tasks"].items():
            compared, step = one["difference"] is not None, one["since"]
            body.append(
                [
                    f"   {name}",
                    f"{one['n']:,}",
                    value(one, one["value"]),
                    change(one, one["difference"]) if compared else "-",
                    interval(one, one["ci95"]) if compared else "-",
                    _SHORT.get(standing(one), standing(one)) if compared else "-",
                    f"{change(one, step['difference'])} ({interval(one, step['ci95'])})" if step else "-",
                ]
            )
        if body:
            _table(["   task", "n", "score", "diff", "95 %", "", "since the run before"], body, "lrrrrlr")
        if row["mean_kl"] is not None:
            floor = f" (baseline against itself {figure(row['floor_kl'])})" if row["floor_kl"] is not None else ""
            print(f"   mean KL {figure(row['mean_kl'])} nats a token{floor}")
        print()


def _table(header: Sequence[str], body: Sequence[Sequence[str]], align: str) -> None:
    """Like `draw.table`, in `_WIDTH` columns: the first column goes on in the next line where it is too long."""
    from rich.console import Console
    from rich.table import Table

    from ..evals.outcome import wrapped

    lines = [[cell.split("\n") for cell in row] for row in (header, *body)]
    widths = [max(len(line) for row in lines for line in row[number]) for number in range(len(header))]
    first = max(12, _WIDTH - sum(widths[1:]) - len(widths) + 1)
    drawn = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name, side in zip(header, align[: len(header)], strict=True):
        drawn.add_column(name, justify="right" if side == "r" else "left", no_wrap=True)
    for name, *cells in body:
        indent, words = name[: len(name) - len(name.lstrip())], clean(name)
        head = f"\n{indent}  ".join(wrapped(words, max(8, first - len(indent) - 2 * (len(words) > first))))
        drawn.add_row(indent + head, *("\n".join(map(clean, cell.split("\n"))) for cell in cells))
    Console(highlight=False, markup=False, width=200).print(drawn, soft_wrap=True)


@contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[[str, int], None]]:
    """Told of a stage and of requests done in it since the last call; shown on stderr. `quiet`: nothing.

    On a terminal one line that moves; else a line for each stage, and one a minute.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if quiet:
        yield lambda stage, done: None
    elif not console.is_terminal:
        yield _Lines().advance
    else:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TextColumn("{task.completed:,.0f} done"),
        )
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
            tasks: dict[str, Any] = {}

            def advance(stage: str, done: int) -> None:
                if stage not in tasks:
                    for before in tasks.values():
                        bar.stop_task(before)
                    tasks[stage] = bar.add_task(clean(stage), total=None)
                bar.advance(tasks[stage], done)

            yield advance


class _Lines:
    """Where stderr is a file."""

    def __init__(self) -> None:
        self.stage, self.done, self.last = "", 0, 0.0

    def advance(self, stage: str, done: int) -> None:
        """A line as a stage begins, and one a minute."""
        now = time.monotonic()
        if stage != self.stage:
            self.stage, self.done, self.last = stage, 0, now
            print(clean(stage), file=sys.stderr)
        self.done += done
        if now - self.last >= 60:
            self.last = now
            print(f"{clean(stage)}: {self.done:,} done", file=sys.stderr)
