"""How far one model's next-token distributions are from another's on the same text, token by token.

The figures of `llama-perplexity --kl-divergence` (ggml-org/llama.cpp, tools/perplexity), each with an interval whose
error is clustered by document: tokens of one document are not independent. With each token a document of its own the
errors of KL and of perplexity are those that it prints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .statistics import RESAMPLES, Floats, Interval, Z, mean_interval, per_question


class Proxies(NamedTuple):
    """mean_kl, median_kl, p99_kl: nats a token, KL(baseline || target). same_top: share of tokens whose most likely
    next token is the same. log_ratio: ln(PPL(target) / PPL(baseline)); ratio: PPL(target) / PPL(baseline).
    """

    tokens: int
    documents: int
    mean_kl: Interval
    median_kl: Interval
    p99_kl: Interval
    max_kl: float
    same_top: Interval
    baseline_perplexity: Interval
    target_perplexity: Interval
    log_ratio: Interval
    ratio: Interval

    def to_json(self) -> dict[str, Any]:
        """By name, intervals by name in turn."""
        values = self._asdict().items()
        return {name: value.to_json() if isinstance(value, Interval) else value for name, value in values}


def proxies(
    kl: ArrayLike,
    logprob_baseline: ArrayLike,
    logprob_target: ArrayLike,
    same_top: ArrayLike,
    documents: Sequence[Any] | NDArray[Any],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Proxies:
    """From one value a token, [tokens] each, in one order.

    kl: nats. logprob_*: ln of the probability of the token that came. same_top: bool. documents: ids; windows of one
    long text will do. Raises ValueError: shapes, NaN or Inf.
    """
    names = ("kl", "logprob_baseline", "logprob_target", "same_top")
    given = [np.asarray(each, dtype=np.float64) for each in (kl, logprob_baseline, logprob_target, same_top)]
    for name, values in zip(names, given, strict=True):
        if values.ndim != 1 or len(values) != len(documents):
            raise ValueError(f"{name} is of shape {list(values.shape)} beside {len(documents)} ids: one value a token")
        per_question(values, name)
    divergence, before, after, same = given
    ids = np.unique(np.asarray(documents), return_inverse=True)[1].reshape(-1)

    def interval(values: Floats, bounds: tuple[float, float] = (-math.inf, math.inf)) -> Interval:
        return mean_interval(values, ids, bounds=bounds, seed=seed, resamples=resamples)

    def quantile(share: float) -> Interval:
        """Woodruff 1952: what share of tokens lies above has an interval, and its bounds have quantiles."""
        at = float(np.quantile(divergence, share))
        above = interval((divergence > at).astype(np.float64), (0.0, 1.0))
        if ids.max() == 0:  # one document: nothing is known of others
            return Interval(at, 0.0, math.inf, math.inf)
        low, high = (float(np.quantile(divergence, 1 - each)) for each in (above.high, above.low))
        return Interval(at, low, high, (high - low) / (2 * Z))

    other = interval(1 - same, (0.0, 1.0))  # most tokens agree: what differs is what is rare
    ratio = interval(before - after)
    return Proxies(
        len(divergence),
        int(ids.max()) + 1,
        interval(divergence, (0.0, math.inf)),
        quantile(0.5),
        quantile(0.99),
        float(divergence.max()),
        Interval(1 - other.mean, 1 - other.high, 1 - other.low, other.error),
        _exponential(interval(-before)),
        _exponential(interval(-after)),
        ratio,
        _exponential(ratio),
    )


def _exponential(log: Interval) -> Interval:
    """exp of a mean: bounds with it, the error by the delta method."""
    mean, low, high = (math.exp(each) if each < 700 else math.inf for each in (log.mean, log.low, log.high))
    return Interval(mean, low, high, mean * log.error)
