"""How often 95 % intervals hold the truth: ours beside Student's, the percentile bootstrap, BCa and percentile-t.

    python benchmarks/coverage.py [--simulations 5000] [--resamples 2000] [--only WORD] [--out FILE.json]

Right and wrong on independent questions is no simulation: every number of flips both ways has its interval, and its
probability (all but one in 10^9). The rest is simulated, each with seeds of its own. "width" is ours over the plain
Student interval's, in the mean.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from intervals import table

from phasefold.evals.statistics import mean_interval, student

METHODS = ("ours", "percentile-t", "Student", "percentile", "BCa")
Sample = tuple[np.ndarray, np.ndarray]  # values [n], ids of their clusters [n]
Bounds = tuple[float, float]


class Situation(NamedTuple):
    """flips: shares lost and gained, of n independent questions; else draw makes a sample, whose true mean is known."""

    name: str
    truth: float
    questions: int = 0
    flips: tuple[float, float] | None = None
    draw: Callable[[np.random.Generator], Sample] | None = None


def flipping(questions: int, lost: float, gained: float) -> Situation:
    """Right and wrong, independent."""
    name = f"{questions} questions, {lost:.1%} lost, {gained:.1%} gained"
    return Situation(name, gained - lost, questions, (lost, gained))


def documents(number: int, sizes: tuple[int, int], rate: float, correlation: float, gained: float) -> Situation:
    """Right and wrong; a document's questions flip together (beta-binomial), each flip a gain with some probability."""

    def draw(rng: np.random.Generator) -> Sample:
        size = rng.integers(sizes[0], sizes[1] + 1, number)
        both = (1 - correlation) / correlation
        at = np.repeat(np.arange(number), size)
        flipped = rng.random(len(at)) < rng.beta(rate * both, (1 - rate) * both, number)[at]
        return flipped * np.where(rng.random(len(at)) < gained, 1.0, -1.0), at

    size = f"{sizes[0]}" if sizes[0] == sizes[1] else f"{sizes[0]} to {sizes[1]}"
    name = f"{number} documents of {size}, {rate:.0%} flip, correlation {correlation}"
    return Situation(name, rate * (2 * gained - 1), draw=draw)


def subjects(number: int, size: int, rate: float, loss: float, deviation: float) -> Situation:
    """Right and wrong; subjects of very different sizes, each with a loss of its own."""

    def draw(rng: np.random.Generator) -> Sample:
        own = np.clip(rng.normal(-loss, deviation, number), -rate, rate - 2 * loss)  # cut alike on both sides
        at = np.repeat(np.arange(number), np.maximum(1, (size * rng.lognormal(0, 0.6, number)).astype(int)))
        u = rng.random(len(at))
        lost, gained = (rate - own[at]) / 2, (rate + own[at]) / 2
        return np.where(u < lost, -1.0, np.where(u < lost + gained, 1.0, 0.0)), at

    return Situation(f"{number} subjects of about {size}, {rate:.0%} flip, losses of their own", -loss, draw=draw)


def graded(questions: int, shape: str) -> Situation:
    """Scores without a grid: differences that are normal, or skewed."""
    draws: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
        "normal": lambda rng: rng.normal(0.01, 0.1, questions),
        "exponential": lambda rng: rng.exponential(0.1, questions),
        "lognormal": lambda rng: rng.lognormal(0, 0.8, questions) / 10,
    }
    truth = {"normal": 0.01, "exponential": 0.1, "lognormal": math.exp(0.32) / 10}[shape]
    name = f"{questions} graded scores, {shape}"
    return Situation(name, truth, draw=lambda rng: (draws[shape](rng), np.arange(questions)))


def repeated(questions: int, repeats: int, rate: float, loss: float) -> Situation:
    """Right and wrong in several samples: a few questions are shaky, and lose a little more often than they gain."""

    def draw(rng: np.random.Generator) -> Sample:
        shaky = rng.random(questions) < rate
        p = np.where(shaky, rng.random(questions), rng.random(questions) < 0.6)
        after = np.where(shaky, p * (1 - loss), p)
        right = [rng.binomial(repeats, np.clip(each, 0, 1)) / repeats for each in (p, after)]
        return right[1] - right[0], np.arange(questions)

    truth = -rate * loss / 2
    return Situation(f"{questions} questions, {repeats} samples each, {rate:.0%} shaky", truth, draw=draw)


SITUATIONS = (
    flipping(50, 0.02, 0.02), flipping(50, 0.1, 0.02), flipping(50, 0.2, 0.2), flipping(200, 0.02, 0.0),
    flipping(200, 0.06, 0.04), flipping(500, 0.01, 0.0), flipping(500, 0.03, 0.02), flipping(1000, 0.1, 0.08),
    flipping(2000, 0.002, 0.001), flipping(2000, 0.008, 0.004), flipping(2000, 0.04, 0.03),
    documents(100, (5, 5), 0.1, 0.3, 0.4), documents(100, (1, 9), 0.05, 0.5, 0.4),
    documents(300, (4, 4), 0.02, 0.5, 0.3), documents(30, (20, 20), 0.1, 0.1, 0.4),
    subjects(57, 100, 0.1, 0.02, 0.03), subjects(20, 50, 0.1, 0.0, 0.03),
    repeated(200, 4, 0.3, 0.2), repeated(500, 8, 0.1, 0.2),
    graded(50, "normal"), graded(50, "exponential"), graded(200, "exponential"), graded(50, "lognormal"),
    graded(500, "lognormal"),
)  # fmt: skip


def intervals(values: np.ndarray, clusters: np.ndarray, seed: int, resamples: int) -> dict[str, Bounds]:
    """Every method's, of one sample."""
    found = mean_interval(values, clusters, seed=seed, resamples=resamples)
    at = np.unique(clusters, return_inverse=True)[1]
    sums, sizes = np.bincount(at, weights=values), np.bincount(at)
    number, mean = len(sums), sums.sum() / sizes.sum()
    kinds, counts = np.unique(np.stack([sums, sizes]), axis=1, return_counts=True)
    rng = np.random.default_rng([seed, 1])
    s, m = kinds if (few := 8 * len(counts) < number) else (sums, sizes.astype(float))
    if few:
        drawn = rng.multinomial(number, counts / number, size=resamples)
    else:
        picked = rng.integers(0, number, (resamples, number)) + number * np.arange(resamples)[:, None]
        drawn = np.bincount(picked.reshape(-1), minlength=resamples * number).reshape(resamples, number)
    e = s - mean * m
    sum_e, sum_m, sum_ee, sum_em, sum_mm = (drawn.astype(float) @ np.stack([e, m, e * e, e * m, m * m], 1)).T
    off, scale = sum_e / sum_m, math.sqrt(number / (number - 1))
    errors = scale * np.sqrt(np.maximum(sum_ee - 2 * off * sum_em + off**2 * sum_mm, 0)) / sum_m
    error = scale * math.sqrt(((sums - mean * sizes) ** 2).sum()) / sizes.sum()
    ratios = np.divide(off, errors, out=np.zeros_like(off), where=errors > 0)
    low, high = np.quantile(ratios, [0.025, 0.975])
    half = student(number - 1) * error
    return {
        "ours": (found.low, found.high),
        "percentile-t": (mean - high * error, mean - low * error),
        "Student": (mean - half, mean + half),
        "percentile": tuple(np.quantile(mean + off, [0.025, 0.975])),
        "BCa": bca(mean + off, mean, sums, sizes),
    }


def bca(means: np.ndarray, mean: float, sums: np.ndarray, sizes: np.ndarray) -> Bounds:
    """Efron 1987: percentiles, corrected for bias and, by the jackknife, for skewness."""
    normal = NormalDist()
    share = (means < mean - 1e-12).mean() + 0.5 * (np.abs(means - mean) <= 1e-12).mean()
    left = (sums.sum() - sums) / (sizes.sum() - sizes)
    away = left.mean() - left
    if not 0 < share < 1 or not away.any():
        return float(means.min()), float(means.max())
    bias, skew = normal.inv_cdf(share), (away**3).sum() / (6 * (away**2).sum() ** 1.5)
    z = [bias + normal.inv_cdf(level) for level in (0.025, 0.975)]
    levels = [normal.cdf(bias + each / (1 - skew * each)) for each in z]
    low, high = np.quantile(means, levels)
    return float(low), float(high)


def samples(situation: Situation, simulations: int) -> Iterator[tuple[float, Sample]]:
    """Samples and how much each counts: all that can come, or as many as are simulated."""
    if situation.flips is None:
        assert situation.draw is not None
        for number in range(simulations):
            yield 1 / simulations, situation.draw(np.random.default_rng([number, 2]))
        return
    n, (p, q) = situation.questions, situation.flips
    for lost in range(n + 1):
        for gained in range(n + 1 - lost):
            weight = probability(n, lost, gained, p, q)
            if weight > 1e-9:
                values = np.zeros(n)
                values[:lost], values[lost : lost + gained] = -1.0, 1.0
                yield weight, (values, np.arange(n))
            elif gained > n * q:
                break
        if lost > n * p and probability(n, lost, int(n * q), p, q) < 1e-12:
            break


def probability(n: int, lost: int, gained: int, p: float, q: float) -> float:
    """Of so many flips each way."""
    kept = n - lost - gained
    if kept < 0 or p + q > 1:
        return 0.0
    log = math.lgamma(n + 1) - sum(math.lgamma(each + 1) for each in (lost, gained, kept))
    for count, share in ((lost, p), (gained, q), (kept, 1 - p - q)):
        if count:
            log += count * math.log(share) if share else -math.inf
    return math.exp(log)


def measure(situation: Situation, simulations: int, resamples: int) -> dict[str, Any]:
    """Coverage of each method, in percent, and ours by side, with the widths."""
    weights, below, above, widths = 0.0, *(dict.fromkeys(METHODS, 0.0) for _ in range(3))
    for number, (weight, (values, clusters)) in enumerate(samples(situation, simulations)):
        weights += weight
        for name, (low, high) in intervals(values, clusters, number, resamples).items():
            below[name] += weight * bool(situation.truth < low - 1e-12)
            above[name] += weight * bool(situation.truth > high + 1e-12)
            widths[name] += weight * (high - low)
    return {
        "coverage": {name: 100 * (1 - (below[name] + above[name]) / weights) for name in METHODS},
        "below": 100 * below["ours"] / weights,
        "above": 100 * above["ours"] / weights,
        "width": widths["ours"] / weights,
        "width_ratio": widths["ours"] / widths["Student"],
    }


def rare(questions: int, resamples: int) -> dict[str, dict[str, float]]:
    """The least and the mean coverage over true rates that lose 0.2 to 30 questions in the mean, at most a quarter of
    all, and gain nothing, a fourth of that, or as many.
    """
    found: dict[tuple[int, int], dict[str, Bounds]] = {}
    missed: list[float] = []  # how often ours lies above the truth: "not worse" at a margin that is the truth
    coverage: dict[str, list[float]] = {name: [] for name in METHODS}
    for part in (0.0, 0.25, 1.0):
        for step in range(1, 151):
            p = 0.2 * step / questions
            if p > 0.25:
                break
            held, above = dict.fromkeys(METHODS, 0.0), 0.0
            for lost in range(70):
                for gained in range(70 if part else 1):
                    weight = probability(questions, lost, gained, p, p * part)
                    if weight < 1e-7:
                        continue
                    if (lost, gained) not in found:
                        values = np.zeros(questions)
                        values[:lost], values[lost : lost + gained] = -1.0, 1.0
                        found[lost, gained] = intervals(values, np.arange(questions), 0, resamples)
                    above += weight * (p * part - p < found[lost, gained]["ours"][0] - 1e-12)
                    for name, (low, high) in found[lost, gained].items():
                        held[name] += weight * (low - 1e-12 <= p * part - p <= high + 1e-12)
            missed.append(100 * above)
            for name in METHODS:
                coverage[name].append(100 * held[name])
    sides = {"ours above the truth": {"most": max(missed), "mean": sum(missed) / len(missed)}}
    return sides | {name: {"least": min(each), "mean": sum(each) / len(each)} for name, each in coverage.items()}


def main() -> None:
    """Print the table; write all numbers to --out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--simulations", type=int, default=5000)
    parser.add_argument("--resamples", type=int, default=2000)
    parser.add_argument("--only", default="", help="situations with this in their name")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    value: dict[str, Any] = {}
    rows = []
    for situation in SITUATIONS:
        if options.only in situation.name:
            found = value[situation.name] = measure(situation, options.simulations, options.resamples)
            covered = [f"{found['coverage'][name]:.1f}" for name in METHODS]
            sides = f"{found['below']:.1f} + {found['above']:.1f}"
            rows.append([situation.name, "", *covered, sides, f"{found['width_ratio']:.2f}"])
            print(" | ".join(rows[-1]), flush=True)
    for questions in (50, 200, 1000):
        name = f"{questions} questions, rare flips, all rates"
        if options.only in name:
            value[name] = rare(questions, options.resamples)
            for which in ("least", "mean"):
                rows.append([name, which, *(f"{value[name][method][which]:.1f}" for method in METHODS), "", ""])
            rows[-1][-2] = "truth below: {mean:.1f}, most {most:.1f}".format(**value[name]["ours above the truth"])
    print(table(("95 % intervals hold the truth, %", "", *METHODS, "ours: truth below + above", "width"), rows))
    if options.out:
        options.out.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    main()
