"""The statistics against known answers: scipy's tests, published formulas, and how often intervals hold the truth."""

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from phasefold.errors import UsageError
from phasefold.evals.compare import compare
from phasefold.evals.flips import flips, mcnemar, questions_needed, smallest_by_error, smallest_difference
from phasefold.evals.proxies import proxies
from phasefold.evals.statistics import (
    Interval,
    mean_interval,
    paired_difference,
    per_question,
    spread,
    student,
    verdict,
)

Z, ZB = stats.norm.ppf(0.975), stats.norm.ppf(0.8)


def flipped(questions: int, lost: int, gained: int) -> np.ndarray:
    """Differences: some lost, some gained, the others as before."""
    values = np.zeros(questions)
    values[:lost], values[lost : lost + gained] = -1.0, 1.0
    return values


def coverage(draw: Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]], truth: float, times: int) -> float:
    """In percent; draw: values and cluster ids."""
    held = 0
    for seed in range(times):
        values, clusters = draw(np.random.default_rng([seed, 9]))
        found = mean_interval(values, clusters, seed=seed, resamples=1000)
        held += found.low <= truth <= found.high
    return 100 * held / times


# --- quantiles and right and wrong


def test_student_is_scipys() -> None:
    for freedom in [*range(1, 120), 1000, 100_000]:
        assert student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=1e-3)


def test_mcnemar_is_the_binomial_test() -> None:
    for lost in range(14):
        for gained in range(14):
            p, mid = mcnemar(lost, gained)
            if lost + gained:
                assert p == pytest.approx(stats.binomtest(lost, lost + gained).pvalue, rel=1e-12)
                half = stats.binom.pmf(lost, lost + gained, 0.5) * (0.5 if lost == gained else 1)
                assert mid == pytest.approx(p - half, rel=1e-9)
    for lost, gained in ((530, 470), (3000, 2800), (1, 4000)):
        p, mid = mcnemar(lost, gained)
        assert p == pytest.approx(stats.binomtest(lost, lost + gained).pvalue, rel=1e-9, abs=1e-300)
        assert mid == pytest.approx(p - stats.binom.pmf(lost, lost + gained, 0.5), rel=1e-9, abs=1e-300)
    assert mcnemar(0, 0) == (1.0, 1.0)


def test_mcnemar_is_the_published_example() -> None:
    """Fagerland et al. 2013, children before and after a transplantation: 1 and 7."""
    assert [round(p, 4) for p in mcnemar(1, 7)] == [0.0703, 0.0391]


def test_mid_p_keeps_its_level_and_the_exact_test_is_below_it() -> None:
    n, each = 300, 0.04  # no difference in truth; all outcomes with their probabilities
    wrong = np.zeros(2)
    for total in range(80):
        weight = stats.binom.pmf(total, n, 2 * each)
        for lost in range(total + 1):
            wrong += weight * stats.binom.pmf(lost, total, 0.5) * (np.array(mcnemar(lost, total - lost)) <= 0.05)
    assert 0.02 < wrong[0] < wrong[1] <= 0.05


def test_flips_count_both_ways() -> None:
    found = flips([1, 1, 1, 0, 0, 1], [0, 0, 1, 1, 0, 0])
    assert found is not None and (found.questions, found.lost, found.gained) == (6, 3, 1)
    assert found.discordant == 4 / 6 and (found.p, found.mid_p) == mcnemar(3, 1)
    assert flips([1, 0.5], [1, 1]) is None and flips([1, 1], [1, 0.5]) is None
    with pytest.raises(ValueError, match="3 questions, the target 2"):
        flips([1, 1, 1], [1, 1])


# --- power


def test_questions_needed_is_connors_formula() -> None:
    assert questions_needed(0.4, 0.5) == 23  # the example that goes with the formula in published calculators
    for difference, discordant in ((0.01, 0.05), (0.02, 0.1), (0.005, 0.02), (0.03, 0.03), (0.1, 0.4)):
        root = Z * math.sqrt(discordant) + ZB * math.sqrt(discordant - difference**2)
        assert questions_needed(difference, discordant) == math.ceil(root**2 / difference**2)
        if discordant < 2 * difference:
            continue  # all one way: his second approximation, of 1968, is somewhat bolder and there far too bold
        miettinen = Z * discordant + ZB * math.sqrt(discordant**2 - difference**2 * (3 + discordant) / 4)
        wanted = miettinen**2 / (discordant * difference**2)
        assert 0.85 * questions_needed(difference, discordant) < wanted <= questions_needed(difference, discordant)


@pytest.mark.parametrize("discordant", [0.02, 0.05, 0.2])
@pytest.mark.parametrize("questions", [400, 1319, 14042])
def test_the_smallest_difference_needs_these_questions(questions: int, discordant: float) -> None:
    found = smallest_difference(questions, discordant)
    assert found is not None and found < discordant
    assert questions_needed(found, discordant) in (questions, questions + 1)
    assert found == pytest.approx(smallest_by_error(math.sqrt(discordant / questions)), rel=0.06)


@pytest.mark.parametrize(("questions", "discordant"), [(2000, 0.04), (1319, 0.06), (300, 0.3)])
def test_the_smallest_difference_is_seen_eighty_times_in_a_hundred(questions: int, discordant: float) -> None:
    """Simulated, with the test that the formula is of (asymptotic), and with mid-p, which is all but as strong."""
    difference = smallest_difference(questions, discordant)
    assert difference is not None
    lost, gained = (discordant + difference) / 2, (discordant - difference) / 2
    drawn = np.random.default_rng(5).multinomial(questions, [lost, gained, 1 - discordant], size=20_000)
    b, c = drawn[:, 0], drawn[:, 1]
    assert np.mean((b - c) ** 2 > Z**2 * np.maximum(b + c, 1)) == pytest.approx(0.80, abs=0.02)
    pairs, times = np.unique(drawn[:, :2], axis=0, return_counts=True)
    seen = np.array([mcnemar(int(one), int(two))[1] <= 0.05 for one, two in pairs])
    assert times[seen].sum() / times.sum() == pytest.approx(0.80, abs=0.03)


def test_where_few_flip_the_difference_brings_its_own_flips() -> None:
    for questions in (50, 500, 5000):
        found = smallest_difference(questions, 0.0)
        assert found is not None
        assert questions * found == pytest.approx((Z + ZB * math.sqrt(1 - found)) ** 2)  # discordant = difference
        assert smallest_difference(questions, found / 2) == pytest.approx(found)
    assert smallest_difference(3, 0.5) is None and smallest_difference(1, 1.0) is None
    assert smallest_difference(4, 0.0) is not None


@pytest.mark.parametrize(("difference", "discordant"), [(0.0, 0.1), (-0.1, 0.2), (0.2, 0.1), (0.5, 1.5)])
def test_impossible_plans_are_refused(difference: float, discordant: float) -> None:
    with pytest.raises(UsageError, match="cannot be"):
        questions_needed(difference, discordant)


@pytest.mark.parametrize(("questions", "discordant"), [(0, 0.1), (10, -0.1), (10, 1.1)])
def test_impossible_runs_are_refused(questions: int, discordant: float) -> None:
    with pytest.raises(UsageError, match="expected one or more"):
        smallest_difference(questions, discordant)


# --- the interval


@pytest.mark.parametrize(
    ("questions", "lost", "gained"),
    [(50, 0.3, 0.3), (200, 0.1, 0.06), (500, 0.04, 0.03), (2000, 0.01, 0.006), (2000, 0.016, 0.012)],
)
def test_flips_are_covered_as_promised(questions: int, lost: float, gained: float) -> None:
    """All that can come, with its probability: nothing is drawn but the resamples.

    Counts come in steps, and at 50 questions a step is two points of coverage: hence the mean over rates near by.
    """
    ends = [stats.binom.ppf([1e-5, 1 - 1e-5], questions, [0.85 * each, 1.15 * each]) for each in (lost, gained)]
    b, c = np.meshgrid(*(np.arange(int(low), int(high) + 1) for low, high in ends), indexing="ij")
    rates = [(scale * lost, gained * other) for scale in (0.9, 0.95, 1.0, 1.05, 1.1) for other in (0.95, 1.0, 1.05)]
    counts = np.stack([b, c, questions - b - c], -1)
    weights = np.stack([stats.multinomial.pmf(counts, questions, [p, q, 1 - p - q]) for p, q in rates])
    held = np.zeros(len(rates))
    for one, two in zip(*np.nonzero(weights.max(0) > 1e-6), strict=True):
        found = mean_interval(flipped(questions, b[one, two], c[one, two]), resamples=1000)
        held += weights[:, one, two] * [found.low <= q - p <= found.high for p, q in rates]
    assert 100 * held.mean() == pytest.approx(95, abs=1)
    assert 0.935 < held.min() and held.max() < 0.97


@pytest.mark.parametrize("part", [0.0, 0.25, 1.0])
def test_no_rate_of_rare_flips_is_covered_too_seldom(part: float) -> None:
    """From 0.25 to 15 flips in the mean: few counts can come, so coverage cannot be 95 everywhere. Never below 93.8."""
    n, found = 400, {}
    for step in range(1, 61):
        p = 0.25 * step / n
        held = 0.0
        b, c = np.meshgrid(np.arange(40), np.arange(40 if part else 1), indexing="ij")
        weights = stats.multinomial.pmf(np.stack([b, c, n - b - c], -1), n, [p, p * part, 1 - p - p * part])
        for one, two in zip(*np.nonzero(weights > 1e-5), strict=True):
            if (one, two) not in found:
                found[one, two] = mean_interval(flipped(n, one, two), resamples=1000)
            held += weights[one, two] * (found[one, two].low <= p * part - p <= found[one, two].high)
        assert held >= 0.938, p


def test_flips_that_come_by_document_are_covered() -> None:
    def draw(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        at = np.repeat(np.arange(150), rng.integers(1, 8, 150))
        rate = rng.beta(0.2, 1.8, 150)[at]  # 10 %, correlation 1/3
        return (rng.random(len(at)) < rate) * np.where(rng.random(len(at)) < 0.4, 1.0, -1.0), at

    assert coverage(draw, -0.02, 3000) == pytest.approx(95, abs=1)


def test_subjects_with_losses_of_their_own_are_covered_only_as_clusters() -> None:
    def draw(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        at = np.repeat(np.arange(57), rng.integers(20, 180, 57))
        own, u = np.clip(rng.normal(-0.02, 0.03, 57), -0.1, 0.06)[at], rng.random(len(at))
        return np.where(u < 0.05 - own / 2, -1.0, np.where(u < 0.1, 1.0, 0.0)), at

    assert coverage(draw, -0.02, 3000) == pytest.approx(95, abs=1)

    def apart(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        values = draw(rng)[0]
        return values, np.arange(len(values))

    assert coverage(apart, -0.02, 300) < 88


def test_skewed_scores_are_covered() -> None:
    def draw(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return rng.exponential(0.1, 60), np.arange(60)

    assert coverage(draw, 0.1, 2500) == pytest.approx(95, abs=1)


def test_noise_of_repeated_answers_is_not_counted_as_questions() -> None:
    """60 questions asked 8 times: 60 are covered as promised; 480 would be, hardly two times in three."""

    def draw(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        p = rng.random(60)
        after = np.clip(p + rng.normal(0, 0.25, 60) * np.minimum(p, 1 - p) * 2, 0, 1)
        right = [(rng.random((60, 8)) < each[:, None]).astype(float) for each in (p, after)]
        return per_question(right[1]) - per_question(right[0]), np.arange(60)

    assert coverage(draw, 0.0, 2500) == pytest.approx(95, abs=1.0)


@pytest.mark.parametrize("questions", [50, 500, 14_000])
def test_no_flip_seen_is_the_rule_of_three(questions: int) -> None:
    same = np.ones(questions)
    found = paired_difference(same, same)
    assert found.mean == 0 and found.high == -found.low
    assert found.high == pytest.approx(3 / questions, rel=0.03)
    in_fives = paired_difference(same, same, np.arange(questions) // 5)
    assert in_fives.high == pytest.approx(3 / questions, rel=0.2)
    assert in_fives.high > found.high  # Student's, of fewer clusters


def test_few_questions_say_little() -> None:
    assert paired_difference([1.0], [1.0])[:3] == (0.0, -1.0, 1.0)
    assert paired_difference([0.0] * 7, [1.0] * 7, ["one"] * 7)[:3] == (1.0, -1.0, 1.0)  # one document
    assert paired_difference([1.0, 0.0], [1.0, 0.0])[:3] == (0.0, -1.0, 1.0)
    found = paired_difference(np.zeros(5), np.zeros(5))
    assert -1 < found.low < -0.6 and 0.6 < found.high < 1
    all_lost = paired_difference(np.ones(100), np.zeros(100), np.arange(100))
    assert all_lost.low == all_lost.mean == -1 and -0.98 < all_lost.high < -0.96
    uneven = paired_difference(np.ones(10), np.zeros(10), [0, 1, 1, 2, 2, 2, 3, 3, 3, 3])
    assert uneven.high > -0.5  # alike, though no two documents are of one size
    for count in (3, 6, 9):  # too few for a bootstrap: Student's, whatever the shape
        few = np.arange(count) ** 2.0
        half = stats.t.ppf(0.975, count - 1) * stats.sem(few)
        assert mean_interval(few)[1:3] == pytest.approx([few.mean() - half, few.mean() + half], rel=1e-4)


def test_a_hair_is_no_difference() -> None:
    """Scores that differ by rounding alone tell of no flip, and so of none that was not seen."""
    hair = np.zeros(100)
    hair[3] = 1e-12
    assert mean_interval(hair).high == pytest.approx(mean_interval(np.zeros(100)).high, rel=1e-6)


def test_where_all_differ_nothing_is_added() -> None:
    values = np.random.default_rng(3).normal(size=80)
    found = mean_interval(values, resamples=20_000)
    assert found.mean == pytest.approx(values.mean())
    assert found.error == pytest.approx(stats.sem(values))
    assert (found.high - found.low) / 2 == pytest.approx(stats.t.ppf(0.975, 79) * stats.sem(values), rel=0.03)
    small = stats.bootstrap((values,), np.mean, method="BCa", rng=1).confidence_interval
    assert found[1:3] == pytest.approx([small.low, small.high], abs=0.02)


def test_errors_of_clusters_are_those_of_a_ratio() -> None:
    """Against statsmodels' formula by hand: residuals summed by cluster, K / (K - 1)."""
    rng = np.random.default_rng(4)
    at = np.repeat(np.arange(12), rng.integers(1, 9, 12))
    values = rng.normal(size=12)[at] + rng.normal(size=len(at))
    sums = np.array([(values[at == one] - values.mean()).sum() for one in range(12)])
    assert mean_interval(values, at).error == pytest.approx(math.sqrt(12 / 11 * (sums**2).sum()) / len(at))
    assert mean_interval(values, at).mean == pytest.approx(values.mean())
    names = np.array([f"document {one}" for one in at])
    assert mean_interval(values, names) == pytest.approx(mean_interval(values, at))


def test_percentile_t_is_that_of_the_textbook() -> None:
    """Resample documents, take the mean of their questions and its error, as if each resample were the data."""

    rng = np.random.default_rng(13)
    sizes = rng.integers(2, 9, 12)
    sums = rng.exponential(1.0, 12) * sizes

    def of(drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        questions = sizes[drawn].sum(-1)
        means = sums[drawn].sum(-1) / questions
        rest = sums[drawn] - means[..., None] * sizes[drawn]
        return means, np.sqrt(12 / 11 * (rest**2).sum(-1)) / questions

    mean, error = of(np.arange(12))
    means, errors = of(rng.integers(0, 12, (200_000, 12)))
    low, high = np.quantile((means - mean) / errors, [0.025, 0.975])
    found = mean_interval(np.repeat(sums / sizes, sizes), np.repeat(np.arange(12), sizes), resamples=200_000)
    assert found.mean - found.low == pytest.approx(high * error, rel=0.02)
    assert found.high - found.mean == pytest.approx(-low * error, rel=0.02)


def test_an_interval_leans_the_way_of_the_tail() -> None:
    found = mean_interval(np.random.default_rng(6).exponential(size=50))
    assert found.high - found.mean > 1.1 * (found.mean - found.low)


@pytest.mark.parametrize(("lost", "gained"), [(1, 0), (3, 3), (12, 0), (20, 9)])
def test_rare_flips_have_students_interval_and_what_was_not_seen(lost: int, gained: int) -> None:
    """Nearly: (b - c) / n +- t sqrt(b + c - (b - c)^2 / n + 2.34) / n, with 3^2 / 1.96^2 = 2.34 more flips."""
    n = 3000
    found = mean_interval(flipped(n, lost, gained))
    error = math.sqrt(lost + gained - (gained - lost) ** 2 / n + 9 / Z**2) / n
    assert found.error == pytest.approx(error, rel=0.005)
    half = stats.t.ppf(0.975, n - 1) * error
    assert found[1:3] == pytest.approx([found.mean - half, found.mean + half], rel=0.01, abs=0.01 * half)


def test_flips_that_came_together_may_come_together_again() -> None:
    """Two documents of five questions flipped whole: what was not seen is reckoned in fives."""
    n, values = 1000, np.zeros(1000)
    values[:5], values[500:505] = -1.0, 1.0
    error = math.sqrt((2 + 9 / Z**2) * 25) / n
    assert mean_interval(values, np.arange(n) // 5).error == pytest.approx(error, rel=0.02)


def test_seeds_and_orders() -> None:
    rng = np.random.default_rng(7)
    dense, rare = rng.normal(size=100), flipped(1000, 9, 4)
    assert mean_interval(dense) == mean_interval(dense)
    assert mean_interval(dense, seed=1)[1:3] != mean_interval(dense)[1:3]
    assert mean_interval(dense, seed=1)[1:3] == pytest.approx(mean_interval(dense)[1:3], abs=0.03)
    assert mean_interval(rng.permutation(rare)) == mean_interval(rare)
    assert mean_interval(rng.permutation(dense)) == pytest.approx(mean_interval(dense))
    assert mean_interval(dense, np.arange(100)) == mean_interval(dense)


def test_chunks_of_resamples_are_all_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much is drawn when it does not fit at once; the numbers are others' seeds' only in order."""
    values = np.random.default_rng(8).normal(size=64)
    whole = mean_interval(values, resamples=999)
    monkeypatch.setattr("phasefold.evals.statistics._CHUNK", 64 * 10)
    assert mean_interval(values, resamples=999) == whole


def test_percent_are_a_hundred_times_shares() -> None:
    rng = np.random.default_rng(9)
    before, after = (rng.random(300) < 0.8).astype(float), (rng.random(300) < 0.78).astype(float)
    after[:250] = before[:250]
    shares, percent = paired_difference(before, after), paired_difference(100 * before, 100 * after, span=100.0)
    assert percent == pytest.approx([100 * each for each in shares])
    nothing = paired_difference(100 * before, 100 * before, span=100.0)
    assert nothing.high == pytest.approx(1, rel=0.03)


def test_repeats_are_averaged() -> None:
    rng = np.random.default_rng(10)
    before, after = (rng.random((80, 4)) < 0.6).astype(float), (rng.random((80, 6)) < 0.6).astype(float)
    assert paired_difference(before, after) == paired_difference(before.mean(1), after.mean(1))
    assert compare(before[:, :1], after[:, :1]).flips is not None and compare(before, after).flips is None


def test_spread_is_the_analysis_of_variance() -> None:
    rng = np.random.default_rng(11)
    scores = rng.normal(size=(4000, 1)) * 0.3 + rng.normal(size=(4000, 5)) * 0.4
    found = spread(scores)
    assert found.between == pytest.approx(0.09, rel=0.06) and found.within == pytest.approx(0.16, rel=0.03)
    assert found.noise == pytest.approx(0.16 / 5 / (0.09 + 0.16 / 5), rel=0.06)
    assert found.error == pytest.approx(stats.sem(scores.mean(1)))
    f = stats.f_oneway(*scores).statistic  # between's mean square over within's
    assert f == pytest.approx((found.between * 5 + found.within) / found.within)
    assert spread(np.ones((3, 2)))[2:] == (1.0, 0.0, 0.0, 0.0, 0.0)
    only_noise = spread(np.tile([0.0, 1.0], (50, 1)))
    assert (only_noise.between, only_noise.within, only_noise.noise) == (0.0, 0.5, 1.0)
    by_chance = spread([[0.0, 1.0], [0.1, 1.0], [1.0, 0.0]])  # means are closer than the noise within would have them
    assert (by_chance.between, by_chance.noise) == (0.0, 1.0)
    for shape in ((5,), (5, 1), (1, 5)):
        with pytest.raises(ValueError, match="a spread needs"):
            spread(np.ones(shape))


def test_what_is_no_score_is_refused() -> None:
    for bad, message in (([], "at least one"), (np.ones((2, 2, 2)), r"\[2, 2, 2\]"), ([1.0, math.nan], "not finite")):
        with pytest.raises(ValueError, match=message):
            paired_difference(bad, bad)
    with pytest.raises(ValueError, match="2 questions, the target 3"):
        paired_difference([1, 1], [1, 1, 1])
    with pytest.raises(ValueError, match="more than the span"):
        paired_difference([0, 0], [100, 0])
    with pytest.raises(ValueError, match="1 ids of clusters for 2"):
        mean_interval([1, 1], [1])
    for span in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="above zero and finite"):
            mean_interval([0.0, 0.0], span=span)


# --- verdicts and results


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.2, 0.1, "not worse"),
        (-0.2, -0.1, "not worse"),  # below zero, but by less than the margin
        (0.1, 0.2, "not worse"),
        (-0.3, 0.1, "cannot tell"),  # the bound itself is not within
        (-0.5, -0.1, "cannot tell"),
        (-0.5, -0.3, "cannot tell"),
        (-0.5, -0.31, "worse"),
        (-math.inf, math.inf, "cannot tell"),
    ],
)
def test_verdicts(low: float, high: float, expected: str) -> None:
    assert verdict(Interval((low + high) / 2, low, high, 0.1), 0.3) == expected


def test_a_margin_is_above_zero() -> None:
    for margin in (0.0, -0.3, math.nan, math.inf):
        with pytest.raises(UsageError, match="margin"):
            verdict(Interval(0, -1, 1, 1), margin)


def test_a_worse_model_passes_one_time_in_forty() -> None:
    """Non-inferiority at alpha 2.5 %: the truth is exactly the margin."""
    n, margin, passed = 500, 0.03, 0.0
    for b in range(60):
        for c in range(45):
            weight = float(stats.multinomial.pmf([b, c, n - b - c], n, [0.05, 0.02, 0.93]))
            if weight > 1e-6:
                found = mean_interval(flipped(n, b, c), resamples=1000)
                passed += weight * (verdict(found, margin) == "not worse")
    assert 0.015 < passed < 0.03


def test_a_comparison_holds_what_a_report_needs() -> None:
    rng = np.random.default_rng(12)
    before = (rng.random(400) < 0.7).astype(float)
    after = np.where(rng.random(400) < 0.05, 1 - before, before)
    found = compare(before, after)
    assert found.difference == paired_difference(before, after) and found.flips == flips(before, after)
    assert found.flips is not None and found.smallest == smallest_difference(400, found.flips.discordant)
    assert (found.questions, found.clusters, found.spreads) == (400, 400, (None, None))
    assert found.target - found.baseline == pytest.approx(found.difference.mean)
    by_subject = compare(before, after, np.arange(400) // 20)
    assert by_subject.clusters == 20 and by_subject.smallest == smallest_by_error(by_subject.difference.error)
    repeated = compare(np.stack([before, after], 1), after)
    assert repeated.spreads[0] == spread(np.stack([before, after], 1)) and repeated.spreads[1] is None
    for one in (found, by_subject, repeated, compare([1.0], [1.0]), compare([1.0, 1.0], [1.0, 0.0], ["a", "a"])):
        value = json.loads(json.dumps(one.to_json(), allow_nan=False))
        assert value["difference"]["low"] == one.difference.low and set(value) == set(one._fields)
    assert compare([1.0, 1.0], [1.0, 0.0], ["a", "a"]).smallest is None
    assert compare(np.zeros(3), np.ones(3), [0, 0, 1]).smallest is None  # it would be more than there can be
    assert compare([[1.0, 0.0]], [[1.0, 1.0]]).spreads == (None, None)  # one question


# --- proxies


def tokens(documents: int, size: int, seed: int) -> tuple[np.ndarray, ...]:
    """kl, both log-probabilities, same_top and document ids, with documents that are alike within."""
    rng = np.random.default_rng(seed)
    at = np.repeat(np.arange(documents), size)
    level = rng.gamma(4.0, 0.25, documents)[at]
    base = -rng.exponential(2.0, len(at)) * level
    target = base + rng.normal(-0.01, 0.1, len(at)) * level
    return rng.exponential(0.02, len(at)) * level, base, target, rng.random(len(at)) > 0.05 * level, at


def test_proxies_are_those_of_llama_perplexity() -> None:
    """Its sums over tokens, with each token a document of its own: mean, sqrt((E x^2 - (E x)^2) / (n - 1))."""
    kl, base, target, same, _ = tokens(600, 5, 1)
    n = len(kl)
    found = proxies(kl, base, target, same, np.arange(n), resamples=200)

    def llama(x: np.ndarray) -> tuple[float, float]:
        return float(x.mean()), math.sqrt(((x**2).mean() - x.mean() ** 2) / (n - 1))

    def pair(one: Interval) -> tuple[float, float]:
        return one.mean, one.error

    assert pair(found.mean_kl) == pytest.approx(llama(kl))
    q, p = llama(-target), llama(-base)
    assert pair(found.target_perplexity) == pytest.approx((math.exp(q[0]), math.exp(q[0]) * q[1]))
    assert pair(found.baseline_perplexity) == pytest.approx((math.exp(p[0]), math.exp(p[0]) * p[1]))
    covariance = ((target * base).mean() - target.mean() * base.mean()) / (n - 1)
    ratio = q[0] - p[0], math.sqrt(q[1] ** 2 + p[1] ** 2 - 2 * covariance)
    assert pair(found.log_ratio) == pytest.approx(ratio)
    assert pair(found.ratio) == pytest.approx((math.exp(ratio[0]), math.exp(ratio[0]) * ratio[1]))
    assert found.ratio.low == pytest.approx(math.exp(found.log_ratio.low))
    share = same.mean()
    assert found.same_top.mean == pytest.approx(share)
    assert found.same_top.error == pytest.approx(math.sqrt(share * (1 - share) / (n - 1)), rel=0.02)
    assert (found.median_kl.mean, found.p99_kl.mean) == pytest.approx((np.median(kl), np.quantile(kl, 0.99)))
    assert found.max_kl == kl.max() and (found.tokens, found.documents) == (n, n)


def test_proxies_know_that_tokens_of_a_document_go_together() -> None:
    kl, base, target, same, at = tokens(60, 100, 2)
    apart = proxies(kl, base, target, same, np.arange(len(kl)), resamples=100)
    found = proxies(kl, base, target, same, at)
    assert found.documents == 60
    for name in ("mean_kl", "median_kl", "p99_kl", "same_top", "target_perplexity"):
        ours, theirs = getattr(found, name), getattr(apart, name)
        assert ours.mean == pytest.approx(theirs.mean), name
        assert ours.low < ours.mean < ours.high and ours.error > 1.3 * theirs.error, name
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["p99_kl"]["low"] == found.p99_kl.low


def test_quantiles_have_the_error_of_order_statistics() -> None:
    """Independent tokens of known density f: sqrt(q (1 - q) / n) / f."""
    n = 20_000
    kl = np.random.default_rng(14).exponential(0.02, n)
    found = proxies(kl, -kl, -kl, kl > 0, np.arange(n) // 10, resamples=1000)
    assert found.median_kl.error == pytest.approx(math.sqrt(0.25 / n) / (0.5 / 0.02), rel=0.1)
    assert found.p99_kl.error == pytest.approx(math.sqrt(0.01 * 0.99 / n) / (0.01 / 0.02), rel=0.2)


def test_proxies_cover_the_truth() -> None:
    """A long text is the truth; means, the median and the share of same tokens of short ones are covered."""
    kl, base, target, same, _ = tokens(200_000, 10, 3)
    median = np.median(kl)
    truth = {"mean_kl": kl.mean(), "median_kl": median, "same_top": same.mean(), "p99_kl": np.quantile(kl, 0.99)}
    truth["log_ratio"] = (base - target).mean()
    held = dict.fromkeys(truth, 0)
    for seed in range(800):
        found = proxies(*tokens(80, 25, 100 + seed), seed=seed, resamples=500)
        for name, value in truth.items():
            held[name] += getattr(found, name).low <= value <= getattr(found, name).high
    assert all(93 <= 100 * each / 800 <= 97 for each in held.values()), held


def test_a_model_against_itself() -> None:
    _, base, _, _, at = tokens(20, 50, 4)
    found = proxies(np.zeros(1000), base, base, np.ones(1000, bool), at)
    assert (found.mean_kl.mean, found.mean_kl.low, found.log_ratio.mean, found.ratio.mean) == (0, 0, 0, 1)
    assert found.same_top.mean == found.same_top.high == 1
    assert 1 - found.same_top.low == pytest.approx(3 / 1000, rel=0.1)
    assert 0 < found.mean_kl.high < 0.004 and found.ratio.low < 1 < found.ratio.high


def test_one_document_has_no_bounds() -> None:
    kl, base, target, same, at = tokens(1, 200, 5)
    found = proxies(kl, base, target, same, at)
    value = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert value["log_ratio"]["low"] is None and value["mean_kl"]["high"] is None and value["mean_kl"]["low"] == 0
    assert value["ratio"]["mean"] == pytest.approx(math.exp((base - target).mean())) and value["ratio"]["high"] is None


def test_bounds_too_large_for_a_float_are_none() -> None:
    base = np.repeat([-10.0, -200.0], 5)
    found = proxies(np.ones(10), base, base, np.ones(10, bool), np.arange(10) // 5)
    assert found.target_perplexity.mean == pytest.approx(math.exp(105)) and found.target_perplexity.high == math.inf
    json.dumps(found.to_json(), allow_nan=False)


def test_token_arrays_that_do_not_fit_are_refused() -> None:
    kl, base, target, same, at = tokens(4, 5, 6)
    with pytest.raises(ValueError, match="logprob_target is of shape"):
        proxies(kl, base, target[:-1], same, at)
    with pytest.raises(ValueError, match="kl are not finite"):
        proxies(np.full(20, np.inf), base, target, same, at)
