"""What the command line draws: tables, progress, one-line sentences. Beside cli.py the only file that knows rich."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .quantize.convert import Result
    from .quantize.plan import Plan


def size(nbytes: float) -> str:
    """Bytes with a decimal unit."""
    for unit, width in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= width:
            return f"{nbytes / width:.2f} {unit}"
    return f"{nbytes:.0f} B"


def plan(made: Plan) -> None:
    """What a conversion would write."""
    from .quantize.summary import transitions

    before, after = made.checkpoint.total_size, made.output_bytes
    say(f"{made.checkpoint.folder}: {made.family} ({made.architecture})")
    share = f"{after / before:.0%} of {before:,}"
    print(f"{made.recipe.name}: {after:,} bytes ({after / 2**30:,.2f} GiB), {share}")
    print(f"{len(made.weight_map):,} tensors in {len(made.shards):,} shards")
    for note in made.notes:
        say(f"note: {note}")
    rows = [
        [t.role, f"{t.units:,}", t.source, size(t.source_bytes), t.action, t.target, size(t.bytes)]
        for t in transitions(made)
    ]
    table(["role", "units", "from", "size", "", "to", "size"], rows, "lrlrllr")


def result(done: Result, out: str) -> None:
    """What a conversion has written, and how exact it is."""
    from .quantize.summary import transitions

    made = done.plan
    rows = []
    for t in transitions(made, done.manifest.units):
        error = f"{t.error:.2%}" if t.error else "exact"
        rows.append([t.role, f"{t.units:,}", t.source, t.action, t.target, size(t.bytes), error])
    table(["role", "units", "from", "", "to", "size", "mean error"], rows, "lrlllrr")
    if tiny := done.manifest.scales["tiny_scales"]:
        print(f"note: {tiny:,} tiny scales were met; they are exact here, kernels that flush denormals read zero")
    if done.resumed_shards == len(made.shards):
        say(f"{out}: was complete already, nothing to do")
        return
    before = f", {done.resumed_shards} of {len(made.shards)} shards were done before" if done.resumed_shards else ""
    took = f"{done.wall_seconds:.1f} s, codec {done.backend}, peak memory {size(done.peak_rss_bytes)}"
    say(f"{out}: {size(made.output_bytes)} in {took}{before}")


def table(header: list[str], rows: list[list[str]], align: str) -> None:
    """Draw a table, a column aligned to "l"eft or "r"ight. Nothing is cut where the terminal is narrow."""
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for number, (name, side) in enumerate(zip(header, align, strict=True)):
        width = max(len(row[number]) for row in [header, *rows])
        drawn.add_column(name, justify="right" if side == "r" else "left", no_wrap=True, min_width=width)
    for row in rows:
        drawn.add_row(*row)
    Console(highlight=False, markup=False, width=200).print(drawn, soft_wrap=True)


@contextmanager
def progress(what: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None] | None]:
    """A bar with bytes, rate and time left on stderr; where that is no terminal, a line a minute. `quiet`: nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if quiet:
        yield None
    elif not console.is_terminal:
        yield _minute_lines(what, total)
    else:
        columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda nbytes: bar.advance(task, nbytes)


def _minute_lines(what: str, total: int) -> Callable[[int], None]:
    begun = last = time.monotonic()
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done, last
        done, now = done + nbytes, time.monotonic()
        if now - last >= 60:
            last, rate = now, done / (now - begun)
            left = (total - done) / rate / 60
            print(f"{what}: {size(done)} of {size(total)}, {size(rate)}/s, {left:.0f} min left", file=sys.stderr)

    return advance


def say(text: str) -> None:
    """Print one line that may hold names of files and tensors."""
    print(clean(text))


def clean(text: str) -> str:
    """One printable line, whatever names a damaged file holds."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(text.split()))
