"""Means and paired differences of per-question scores, with 95 % intervals that hold for rare flips and for clusters.

A quantized model answers most questions as its source does: most differences are exactly zero, and a few questions
flip. Resampling cannot show what was not seen, so the usual intervals are too sure of such data: where 5 in 500 flip
in truth, all one way, they hold the truth 85 times in 100 (percentile-t) or 87 (Student).

Ours is the percentile-t bootstrap over clusters (Efron & Tibshirani 1993, 12.5; the error linearized as for a ratio,
Cochran 1977, 6.3) as far as clusters differ. As far as they are alike, measured by the share that are, its quantiles
give way to Student's, and the error gets that of as much unseen as the rule of three allows (Hanley & Lippman-Hand
1983; one more flip each way is Bonett & Price's interval of 2012). Where no two are alike, nothing is added.
`benchmarks/coverage.py` shows what it covers beside Student, percentile and BCa.

Scores are float64, higher is better unless said otherwise. Everything is a function of the numbers and the seed, and
the order of questions makes no difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import UsageError

Floats = NDArray[np.float64]

Z = NormalDist().inv_cdf(0.975)
POWER = 0.8
#: what difference, in standard errors, is seen 80 times in 100: 2.80
SEEN = Z + NormalDist().inv_cdf(POWER)
RESAMPLES = 4000  # the bounds move by 1 to 2 % of the interval with another seed
#: squared flips that were not seen: with none seen at all the bounds are 3 / n, the rule of three
UNSEEN = (3 / Z) ** 2
FEW = 10  # clusters, below which the bootstrap's quantiles are worth nothing: Student's alone
ALIKE = 9  # decimals of the span: what differs by less does not differ
_CHUNK = 1 << 22  # counts of resamples held at a time
_STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060)


class Interval(NamedTuple):
    """A mean, the bounds of its 95 % interval (they need not be equally far), and its standard error."""

    mean: float
    low: float
    high: float
    error: float

    def to_json(self) -> dict[str, float | None]:
        """By name; null where no bound can be told."""
        return {name: value if math.isfinite(value) else None for name, value in self._asdict().items()}


class Spread(NamedTuple):
    """One model's scores of questions that were asked several times.

    between: variance of the questions' true means; within: of one question's answers (temperature); noise: the share
    of the variance of measured means that is the latter. error: of the mean over questions, which are what n counts.
    """

    questions: int
    repeats: int
    mean: float
    error: float
    between: float
    within: float
    noise: float

    def to_json(self) -> dict[str, float]:
        """By name."""
        return self._asdict()


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, from 1 degree on: a table, then Cornish & Fisher's expansion, to 0.001."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    terms = (
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
    )
    return Z + sum(term / float(freedom) ** power for power, term in enumerate(terms, 1))


def per_question(scores: ArrayLike, name: str = "scores") -> Floats:
    """[n], or [n, repeats] -> float64 [n], repeats averaged. Raises ValueError: empty, more axes, NaN or Inf."""
    found = np.asarray(scores, dtype=np.float64)
    if found.ndim not in (1, 2) or not found.size:
        raise ValueError(f"{name} are of shape {list(found.shape)}; expected [n] or [n, repeats], and at least one")
    if not np.isfinite(found).all():
        raise ValueError(f"{name} are not finite somewhere: leave out the question in both runs, or score it 0")
    return found if found.ndim == 1 else found.mean(1)


def spread(scores: ArrayLike) -> Spread:
    """[n, repeats] -> variance between questions and within them (one-way analysis of variance, Searle 1971).

    Raises ValueError with fewer than two questions or two repeats.
    """
    found = np.asarray(scores, dtype=np.float64)
    if found.ndim != 2 or min(found.shape) < 2:
        raise ValueError(f"scores are of shape {list(found.shape)}; a spread needs [n, repeats], two of each or more")
    means = per_question(found)
    questions, repeats = found.shape
    within, measured = float(found.var(1, ddof=1).mean()), float(means.var(ddof=1))
    noise = min(within / repeats / measured, 1.0) if measured else float(within > 0)
    between = max(measured - within / repeats, 0.0)
    return Spread(questions, repeats, float(means.mean()), math.sqrt(measured / questions), between, within, noise)


def mean_interval(
    values: ArrayLike,
    clusters: Sequence[Any] | NDArray[Any] | None = None,
    *,
    span: float = 1.0,
    bounds: tuple[float, float] = (-math.inf, math.inf),
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """Of the mean of values, float64 [n], each weighing the same; those of one cluster may go together as they like.

    clusters: an id for each value (document, subject); None: each is its own. span: what a value may be off zero by, in
    the values' unit, if none is seen to be; where most are alike, zero must be what they are. bounds: of the mean. One
    cluster alone tells nothing: its interval is `bounds`. Raises ValueError: shapes, NaN or Inf, a span not above zero.
    """
    found = per_question(values, "values")
    if not 0 < span < math.inf:
        raise ValueError(f"a span of {span}: it must be above zero and finite")
    sums, sizes = _clustered(found, clusters)
    count, total = len(sums), float(sizes.sum())
    mean = float(sums.sum()) / total
    if count == 1:
        return Interval(mean, *bounds, math.inf)
    sums = np.round(sums / span, ALIKE) * span
    alike = (int(np.unique(np.round(sums / sizes / span, ALIKE), return_counts=True)[1].max()) - 1) / (count - 1)
    one = float((sums**2).sum() / np.abs(sums).sum()) if sums.any() else span
    allowance = UNSEEN * alike * one**2
    residuals = sums - sums.sum() / total * sizes
    correction = count / (count - 1)
    error = math.sqrt(correction * float((residuals**2).sum()) + allowance) / total
    below, above = _quantiles(residuals, sizes, allowance, seed, resamples)
    share = 1.0 if count < FEW else alike
    reach = [share * student(count - 1) + (1 - share) * each for each in (below, above)]
    low, high = mean - reach[0] * error, mean + reach[1] * error
    return Interval(mean, max(low, bounds[0]), min(high, bounds[1]), error)


def _clustered(values: Floats, clusters: Sequence[Any] | NDArray[Any] | None) -> tuple[Floats, Floats]:
    """Sum and number of each cluster's values."""
    if clusters is None:
        return values, np.ones(len(values))
    if len(clusters) != len(values):
        raise ValueError(f"{len(clusters)} ids of clusters for {len(values)} values: one is needed for each")
    at = np.unique(np.asarray(clusters), return_inverse=True)[1].reshape(-1)
    return np.bincount(at, weights=values).astype(np.float64), np.bincount(at).astype(np.float64)


def _quantiles(residuals: Floats, sizes: Floats, allowance: float, seed: int, resamples: int) -> tuple[float, float]:
    """How many standard errors the interval reaches down and up: quantiles of (mean* - mean) / error*, crossed over."""
    kinds, counts = np.unique(np.stack([residuals, sizes], 1), axis=0, return_counts=True)
    e, m = kinds.T
    powers = np.stack([e, m, e * e, e * m, m * m], 1)
    correction = len(residuals) / (len(residuals) - 1)
    ratios = []
    for drawn in _resamples(counts, seed, resamples):
        sum_e, sum_m, sum_ee, sum_em, sum_mm = (drawn @ powers).T
        off = sum_e / sum_m
        squares = np.maximum(sum_ee - 2 * off * sum_em + off**2 * sum_mm, 0.0)
        error = np.sqrt(correction * squares + allowance) / sum_m
        # a resample of one cluster many times over has no error of its own, and no say
        ratios.append(np.divide(off, error, out=np.zeros_like(off), where=error > 1e-9 * np.abs(off)))
    low, high = np.quantile(np.concatenate(ratios), [0.025, 0.975])
    return float(high), float(-low)


def _resamples(counts: NDArray[np.intp], seed: int, resamples: int) -> Iterator[Floats]:
    """How often each kind of cluster is drawn: float64 [chunk, kinds], as many rows in all as there are resamples.

    counts: clusters of each kind, kinds in the order of their numbers: the order of questions cannot matter. Few kinds
    (right and wrong) are drawn as kinds, which is some hundred times as fast.
    """
    rng, clusters, kinds = np.random.default_rng(seed), int(counts.sum()), len(counts)
    few = kinds * 8 < clusters
    step = max(1, _CHUNK // (kinds if few else clusters))
    kind = np.repeat(np.arange(kinds), counts)
    for start in range(0, resamples, step):
        rows = min(step, resamples - start)
        if few:
            yield rng.multinomial(clusters, counts / clusters, size=rows).astype(np.float64)
        else:
            drawn = kind[rng.integers(0, clusters, (rows, clusters))] + kinds * np.arange(rows)[:, None]
            yield np.bincount(drawn.reshape(-1), minlength=rows * kinds).reshape(rows, kinds).astype(np.float64)


def paired_difference(
    baseline: ArrayLike,
    target: ArrayLike,
    clusters: Sequence[Any] | NDArray[Any] | None = None,
    *,
    span: float = 1.0,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """The mean of target - baseline, question by question; scores [n] or [n, repeats] (repeats may differ).

    span: the largest difference that a question can have, 1 for scores from 0 to 1. With no difference seen the
    interval is that of the rule of three: +-3 span / n. Raises ValueError: see `mean_interval`; more than the span.
    """
    before, after = per_question(baseline, "the baseline's scores"), per_question(target, "the target's scores")
    if len(before) != len(after):
        raise ValueError(f"the baseline has {len(before)} questions, the target {len(after)}: they must be the same")
    found = after - before
    if np.abs(found).max() > span * (1 + 1e-9):
        raise ValueError(
            f"a difference of {np.abs(found).max():g} is more than the span, {span:g}: give the right span"
        )
    return mean_interval(found, clusters, span=span, bounds=(-span, span), seed=seed, resamples=resamples)


def verdict(difference: Interval, margin: float) -> str:
    """Non-inferiority: "not worse" than by the margin, "worse" than by it, or "cannot tell", by the interval's bounds.

    margin: what may be lost, above zero, in the unit of the scores; set before the run. Each of the first two is a
    one-sided test at alpha = 2.5 % (CONSORT, Piaggio et al. 2012). "not worse" can be said of a difference that is
    surely below zero, by less than the margin. Raises UsageError.
    """
    if not 0 < margin < math.inf:
        raise UsageError(f"a margin of {margin:g}: it says how much may be lost, and must be above zero")
    return "not worse" if difference.low > -margin else "worse" if difference.high < -margin else "cannot tell"
