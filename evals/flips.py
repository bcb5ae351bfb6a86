"""Right and wrong, question by question: what flipped, whether that is chance, and what so many questions can tell.

Exact arithmetic on counts. All of it takes each question for independent of the others: where they come in clusters
(several questions on one document), the interval of `statistics.paired_difference` is to be relied on instead.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..errors import UsageError
from .statistics import POWER, SEEN, Z, per_question

_POWER_Z = NormalDist().inv_cdf(POWER)


class Flips(NamedTuple):
    """lost: the baseline was right and the target is wrong; gained: the other way. p, mid_p: McNemar's, two-sided."""

    questions: int
    lost: int
    gained: int
    p: float
    mid_p: float

    @property
    def discordant(self) -> float:
        """The share of questions that flipped either way."""
        return (self.lost + self.gained) / self.questions

    def to_json(self) -> dict[str, float]:
        """By name."""
        return self._asdict()


def flips(baseline: ArrayLike, target: ArrayLike) -> Flips | None:
    """Scores [n], or [n, 1], all of them 0 or 1 -> flips; None where a score is something else. Raises ValueError."""
    before, after = per_question(baseline, "the baseline's scores"), per_question(target, "the target's scores")
    if len(before) != len(after):
        raise ValueError(f"the baseline has {len(before)} questions, the target {len(after)}: they must be the same")
    if not (np.isin(before, (0.0, 1.0)).all() and np.isin(after, (0.0, 1.0)).all()):
        return None
    lost, gained = int((before > after).sum()), int((before < after).sum())
    return Flips(len(before), lost, gained, *mcnemar(lost, gained))


def mcnemar(lost: int, gained: int) -> tuple[float, float]:
    """The exact p-value and the mid-p, two-sided: how often a fair coin splits so many flips so unevenly.

    The exact test errs on the safe side; mid-p takes half of what was seen off, and is close to 5 % where it says so
    (Fagerland et al. 2013, equal flips included). Integers throughout: no rounding before the last division. Without
    any flip both are 1.
    """
    if not lost + gained:
        return 1.0, 1.0
    flipped, fewer = lost + gained, min(lost, gained)
    term = at_most = 1  # C(flipped, k), and its sum
    for k in range(1, fewer + 1):
        term = term * (flipped - k + 1) // k
        at_most += term
    whole = 1 << flipped
    if lost == gained:
        return 1.0, (2 * whole - term) / (2 * whole)
    return 2 * at_most / whole, (2 * at_most - term) / whole


def questions_needed(difference: float, discordant: float) -> int:
    """How many questions see a difference 80 times in 100, at 5 % two-sided (Connor 1987, equation 3).

    difference: of the shares right, above 0. discordant: the planned share that flips either way, at least that.
    Raises UsageError.
    """
    if not 0 < difference <= discordant <= 1:
        raise UsageError(
            f"a difference of {difference:g} with {discordant:g} of the questions flipping cannot be: expected a "
            "difference above 0 and not above that share, and a share of at most 1"
        )
    root = Z * math.sqrt(discordant) + _POWER_Z * math.sqrt(discordant - difference**2)
    return math.ceil((root / difference) ** 2)


def smallest_difference(questions: int, discordant: float) -> float | None:
    """The difference of shares right that so many questions see 80 times in 100, at 5 % two-sided: Connor, solved.

    discordant: the share that flips, observed or planned, 0 to 1. Where fewer flip than the difference would need, the
    difference itself is all that flips, one way. None: not even all flipping would be seen. Raises UsageError.
    """
    if questions < 1 or not 0 <= discordant <= 1:
        raise UsageError(f"{questions} questions of which {discordant:g} flip: expected one or more, and 0 to 1")
    if questions < Z**2:
        return None
    level, divisor = Z * math.sqrt(discordant * questions), questions + _POWER_Z**2
    # (d sqrt(n) - Z sqrt(D))^2 = z^2 (D - d^2), a quadratic in d
    found = (level + math.sqrt(level**2 - divisor * discordant * (Z**2 - _POWER_Z**2))) / divisor
    if 0 < found <= discordant:
        return found
    low, high = discordant, 1.0  # all flips one way: n d = (Z + z sqrt(1 - d))^2
    for _ in range(60):
        middle = (low + high) / 2
        seen = questions * middle >= (Z + _POWER_Z * math.sqrt(1 - middle)) ** 2
        low, high = (low, middle) if seen else (middle, high)
    return high


def smallest_by_error(error: float) -> float:
    """The same for scores that are graded, repeated or clustered: 2.80 standard errors of the difference."""
    return SEEN * error
