"""Means with 95 % intervals, and paired differences: what may be said of two methods on the same blocks of text."""

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from phasefold.evals.statistics import student


class Interval(NamedTuple):
    """A mean and the bounds of its 95 % interval."""

    mean: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        """By name."""
        return self._asdict()

    def text(self, digits: int, scale: float = 1.0) -> str:
        """ "1.23 +-0.03", both multiplied by `scale`: our intervals reach equally far to both sides."""
        return f"{scale * self.mean:.{digits}f} +-{scale * (self.high - self.mean):.{digits}f}"

    @property
    def verdict(self) -> str:
        """Of a difference: which sign it has, where the interval tells."""
        return "below" if self.high < 0 else "above" if self.low > 0 else "not told apart"


def interval(values: Sequence[float]) -> Interval:
    """Of the mean of independent values, at least ten of them: mean +- t * s / sqrt(n)."""
    if len(values) < 10:
        raise SystemExit(f"{len(values)} values are too few for an interval: ask for more tokens")
    mean = statistics.fmean(values)
    half = student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Of the mean difference, ours less theirs, value by value."""
    return interval([a - b for a, b in zip(ours, theirs, strict=True)])


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns as wide as their widest cell, numbers to the right, the first two columns to the left."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at < 2 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )
