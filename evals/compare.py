"""Two runs on the same questions, put together: the difference, what flipped, and what so many questions can tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .flips import Flips, flips, smallest_by_error, smallest_difference
from .statistics import RESAMPLES, Interval, Spread, paired_difference, per_question, spread


class Comparison(NamedTuple):
    """questions, clusters: what was sampled. baseline, target: mean scores. difference: target - baseline.

    flips: None where scores are not 0 or 1. smallest: the difference that is seen 80 times in 100; None: none is.
    spreads: of the baseline and of the target, each None where its questions were asked once.
    """

    questions: int
    clusters: int
    baseline: float
    target: float
    difference: Interval
    flips: Flips | None
    smallest: float | None
    spreads: tuple[Spread | None, Spread | None]

    def to_json(self) -> dict[str, Any]:
        """By name."""
        return {
            "questions": self.questions,
            "clusters": self.clusters,
            "baseline": self.baseline,
            "target": self.target,
            "difference": self.difference.to_json(),
            "flips": self.flips.to_json() if self.flips else None,
            "smallest": self.smallest,
            "spreads": {
                name: each.to_json() if each else None
                for name, each in zip(("baseline", "target"), self.spreads, strict=True)
            },
        }


def compare(
    baseline: ArrayLike,
    target: ArrayLike,
    clusters: Sequence[Any] | NDArray[Any] | None = None,
    *,
    span: float = 1.0,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Comparison:
    """Scores float64 [n] or [n, repeats] of the same questions in the same order; see `paired_difference`."""
    difference = paired_difference(baseline, target, clusters, span=span, seed=seed, resamples=resamples)
    before, after = per_question(baseline), per_question(target)
    flipped = flips(before, after)
    grouped = len(before) if clusters is None else len(np.unique(np.asarray(clusters)))
    if flipped and grouped == len(before):
        smallest = smallest_difference(len(before), flipped.discordant)
    else:
        smallest = smallest_by_error(difference.error)
        smallest = smallest if math.isfinite(smallest) and smallest <= span else None
    spreads = _spread(baseline, len(before)), _spread(target, len(before))
    return Comparison(
        len(before), grouped, float(before.mean()), float(after.mean()), difference, flipped, smallest, spreads
    )


def _spread(scores: ArrayLike, questions: int) -> Spread | None:
    repeated = np.asarray(scores)
    return spread(repeated) if repeated.ndim == 2 and repeated.shape[1] > 1 and questions > 1 else None
