"""What a record says of tasks, groups and all: against the statistics on plain arrays, and against scipy."""

from __future__ import annotations

from dataclasses import replace

import made_records as made
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from phasefold.errors import EvalError
from phasefold.evals.compare import compare
from phasefold.evals.results import MIXED, since, task_results
from phasefold.evals.statistics import mean_interval

BITS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=40)


def test_a_task_is_what_compare_says() -> None:
    target, baseline, again = made.runs(made.THREE, 1)
    results, _ = task_results(target, baseline, again, 0.02)
    for name, found in results.items():
        after, before, twice = (run.tasks[name][0].scores for run in (target, baseline, again))
        expected = compare(before, after)
        assert expected.flips is not None
        assert found["difference"] == expected.difference.mean
        assert found["difference"] == pytest.approx(found["value"] - found["baseline"])
        assert found["ci95"] == list(expected.difference[1:3]) and found["error"] == expected.difference.error
        assert found["flips"] == {"lost": expected.flips.lost, "gained": expected.flips.gained}
        assert found["smallest"] == expected.smallest and found["n"] == found["clusters"] == len(before)
        b, c = found["flips"].values()
        assert found["p_value"] == pytest.approx(stats.binomtest(b, b + c).pvalue)
        noise = compare(before, twice)
        assert found["floor"]["difference"] == noise.difference.mean
        assert found["floor"]["ci95"] == list(noise.difference[1:3])
        assert found["share"] and found["repeats"] == 1 and found["metrics"] == {}
        below = found["ci95"][0] > -0.02
        assert found["verdict"] == ("not worse" if below else "cannot tell")


def test_without_a_baseline_a_task_has_a_mean_with_its_interval() -> None:
    right = np.array([1.0] * 37 + [0.0] * 3)
    results, whole = task_results(made.harvest(made.task("one", right)), None, None, 0.01)
    found = results["one"]
    assert whole is not None and whole["value"] == found["value"] == 37 / 40
    assert not {"difference", "baseline", "verdict", "floor", "flips"} & found.keys()
    low, high = found["ci95_value"]
    wrong = mean_interval(1 - right, bounds=(0, 1))
    assert (low, high) == pytest.approx((1 - wrong.high, 1 - wrong.low)) and 0 <= low < 37 / 40 < high <= 1


# --- lower is better, other units, repeats


def test_where_lower_is_better_a_rise_is_a_loss() -> None:
    rng = np.random.default_rng(1)
    before = (rng.random(400) < 0.3).astype(float)  # wrong answers
    after = made.flipped(before, 0.01, 0.12, rng)
    runs = [made.harvest(made.task("wer", scores, metric="errors", upward=False)) for scores in (after, before)]
    found = task_results(*runs, None, 0.02)[0]["wer"]
    mirrored = [made.harvest(made.task("wer", 1 - scores)) for scores in (after, before)]
    mirror = task_results(*mirrored, None, 0.02)[0]["wer"]
    assert found["difference"] > 0.05 and found["difference"] == pytest.approx(-mirror["difference"])
    assert found["ci95"] == pytest.approx([-end for end in mirror["ci95"][::-1]], rel=0.05)  # the bootstrap's draws
    assert found["verdict"] == mirror["verdict"] == "worse"
    assert found["flips"] == mirror["flips"] and found["flips"]["lost"] > found["flips"]["gained"]
    assert found["value"] == after.mean()


@pytest.mark.parametrize(("risen", "fallen", "said"), [(0, 60, "not worse"), (9, 5, "cannot tell"), (60, 0, "worse")])
def test_the_verdict_is_of_the_losing_side(risen: int, fallen: int, said: str) -> None:
    before = np.array([0.0] * 200 + [1.0] * 200)
    after = before.copy()
    after[:risen], after[200 : 200 + fallen] = 1, 0
    runs = [made.harvest(made.task("wer", scores, upward=False)) for scores in (after, before)]
    assert task_results(*runs, None, 0.02)[0]["wer"]["verdict"] == said


def test_other_units_get_no_verdict_and_no_bounds() -> None:
    rng = np.random.default_rng(2)
    before = rng.gamma(4, 3, 60)
    runs = [
        made.harvest(made.task("text", scores, metric="ppl", kind="loglikelihood_rolling", upward=False))
        for scores in (before + rng.normal(0.1, 0.2, 60), before, before)
    ]
    found = task_results(*runs, 0.01)[0]["text"]
    assert not found["share"] and found["verdict"] is None and found["flips"] is None and found["p_value"] is None
    difference = runs[0].tasks["text"][0].scores[:, 0] - before
    assert found["error"] == pytest.approx(stats.sem(difference))
    low, high = found["floor"]["ci95"]  # nothing differed: 3 / n of the largest difference that a question showed
    assert (low, high) == pytest.approx((-3 * abs(difference).max() / 60, 3 * abs(difference).max() / 60), rel=0.06)
    assert task_results(*runs, 0.01)[1] is None


def test_one_question_of_another_unit_tells_nothing() -> None:
    runs = [made.harvest(made.task("text", [x], metric="ppl", upward=False)) for x in (7.0, 5.0)]
    found = task_results(*runs, None, None)[0]["text"]
    assert found["difference"] == 2 and found["ci95"] == [None, None] and found["error"] is None
    assert found["smallest"] is None and found["ci95_value"] == [None, None]


def test_two_questions_of_another_unit_are_not_cut_at_what_was_seen() -> None:
    runs = [made.harvest(made.task("text", x, metric="ppl")) for x in ([7.0, 9.0], [5.0, 5.0])]
    found = task_results(*runs, None, None)[0]["text"]
    half = stats.t.ppf(0.975, 1) * 1.0
    assert found["ci95"] == pytest.approx([3 - half, 3 + half], rel=1e-3)


def test_alike_in_another_unit() -> None:
    for size, reach in ((5.0, 5.0), (0.0, 1.0)):
        runs = [made.harvest(made.task("t", np.full(300, size), kind="loglikelihood_rolling"))] * 2
        found = task_results(*runs, None, None)[0]["t"]
        assert found["ci95"][1] == pytest.approx(3 * reach / 300, rel=0.05)


def test_rolling_likelihoods_are_no_shares_though_small() -> None:
    runs = [made.harvest(made.task("bits", np.full(5, 0.7), kind="loglikelihood_rolling"))] * 2
    assert not task_results(*runs, None, 0.1)[0]["bits"]["share"]
    runs = [made.harvest(made.task("bits", x)) for x in (np.full(5, 0.7), np.array([0.7, 0.7, 1.7, 1, 0]))]
    assert not task_results(*runs, None, 0.1)[0]["bits"]["share"]  # the baseline's are not


def test_repeats_are_averaged_and_nothing_flips() -> None:
    rng = np.random.default_rng(3)
    after, before = ((rng.random((50, 4)) < p).astype(float) for p in (0.5, 0.6))
    found = task_results(*(made.harvest(made.task("t", x)) for x in (after, before)), None, None)[0]["t"]
    assert found["repeats"] == 4 and found["n"] == 50 and found["flips"] is None and found["p_value"] is None
    assert found["difference"] == pytest.approx(after.mean() - before.mean())
    assert found["spreads"]["target"]["repeats"] == 4
    greedy = np.repeat(rng.integers(0, 2, (50, 1)), 2, 1).astype(float)  # all repeats alike
    found = task_results(*(made.harvest(made.task("t", x)) for x in (greedy, 1 - greedy)), None, None)[0]["t"]
    assert found["flips"] is None and found["p_value"] is None


def test_clusters_of_a_task_are_used() -> None:
    rng = np.random.default_rng(4)
    ids = tuple(f"doc{number // 5}" for number in range(200))
    after, before = ((rng.random(200) < p).astype(float) for p in (0.5, 0.6))
    found = task_results(*(made.harvest(made.task("t", x, clusters=ids)) for x in (after, before)), None, None)[0]["t"]
    assert found["clusters"] == 40 and found["error"] == compare(before, after, ids).difference.error
    assert (
        found["ci95_value"] != task_results(made.harvest(made.task("t", after)), None, None, None)[0]["t"]["ci95_value"]
    )


def test_other_metrics_stand_under_the_first() -> None:
    rng = np.random.default_rng(5)
    runs = [
        made.harvest(made.task("t", (rng.random(30) < 0.5).astype(float)), made.task("t", rng.random(30), metric="f1"))
        for _ in range(3)
    ]
    found = task_results(*runs, 0.1)[0]["t"]
    other = found["metrics"]["f1"]
    assert found["metric"] == "acc" and found["floor"] and "floor" not in other and "metrics" not in other
    before, after = (run.tasks["t"][1].scores for run in (runs[1], runs[0]))
    assert other["difference"] == compare(before, after).difference.mean and other["verdict"] == "cannot tell"


# --- pools


@given(st.lists(BITS, min_size=1, max_size=4))
@settings(max_examples=25, deadline=None)
def test_a_group_is_compare_on_all_its_questions(tasks: list[list[tuple[bool, bool]]]) -> None:
    names = [f"t{number}" for number in range(len(tasks))]
    both = [
        made.harvest(
            *(made.task(name, np.array(x, float)[:, side]) for name, x in zip(names, tasks, strict=True)),
            groups={"group": tuple(names)},
        )
        for side in (0, 1)
    ]
    results, whole = task_results(*both, None, 0.1)
    after, before = (np.concatenate([run.tasks[name][0].scores for name in names]) for run in both)
    expected = compare(before, after)
    assert whole is not None and expected.flips is not None
    for found in (results["group"], whole):
        assert found["value"] == after.mean() and found["difference"] == pytest.approx(expected.difference.mean)
        assert found["ci95"] == pytest.approx(expected.difference[1:3]) and found["smallest"] == expected.smallest
        assert (found["n"], found["p_value"]) == (len(after), expected.flips.p)
    assert results["group"]["tasks"] == names and "tasks" not in whole


def many(count: int, seed: int) -> list[made.Harvest]:
    rng = np.random.default_rng(seed)
    names = [f"s{number}" for number in range(count)]
    sizes = rng.integers(5, 30, count)
    return [
        made.harvest(
            *(made.task(name, (rng.random(n) < 0.6).astype(float)) for name, n in zip(names, sizes, strict=True)),
            groups={"group": tuple(names)},
        )
        for _ in range(2)
    ]


@pytest.mark.parametrize("count", [9, 10])
def test_ten_subtasks_are_clusters_nine_are_not(count: int) -> None:
    target, baseline = many(count, 6)
    found, whole = task_results(target, baseline, None, None)
    pooled = found["group"]
    assert pooled["clusters"] == (10 if count == 10 else pooled["n"])
    ids = [name for name, (one,) in target.tasks.items() for _ in one.questions]
    before, after = (np.concatenate([one.scores for (one,) in run.tasks.values()]) for run in (baseline, target))
    assert pooled["error"] == compare(before, after, ids if count == 10 else None).difference.error
    assert whole is not None and whole["error"] == pooled["error"]


def test_clusters_of_several_tasks_stay_apart() -> None:
    """Documents are numbered in each task anew; a task without any has a cluster a question."""
    ids = tuple(str(number // 4) for number in range(40))
    runs = [
        made.harvest(
            *(made.task(name, np.random.default_rng([s, len(name)]).integers(0, 2, 40), clusters=at)
              for name, at in (("a", ids), ("bb", ids), ("ccc", None))),
            groups={"g": ("a", "bb")},
        ) for s in (1, 2)
    ]  # fmt: skip
    results, whole = task_results(*runs, None, None)
    assert results["g"]["clusters"] == 20 and whole is not None and whole["clusters"] == 60


def test_a_group_pools_the_metric_that_all_have() -> None:
    def run(seed: int) -> made.Harvest:
        rng = np.random.default_rng(seed)
        return made.harvest(
            made.task("a", rng.integers(0, 2, 20), metric="acc"),
            made.task("a", rng.random(20), metric="f1"),
            made.task("b", rng.random(30), metric="f1"),
            made.task("b", rng.random(30), metric="bleu"),
            made.task("c", rng.integers(0, 2, 10), metric="exact_match"),
            made.task("d", 5 + rng.random(10), metric="ppl", upward=False),
            made.task("e", np.arange(10) < 2, metric="errors", upward=False),
            groups={"ab": ("a", "b"), "ac": ("a", "c"), "ad": ("a", "d"), "ae": ("a", "e")},
        )

    target, baseline = run(1), run(2)
    results, whole = task_results(target, baseline, None, None)
    assert (results["ab"]["metric"], results["ab"]["n"]) == ("f1", 50)
    assert (results["ac"]["metric"], results["ac"]["n"], results["ac"]["share"]) == (MIXED, 30, True)
    assert "ad" not in results
    errors = target.tasks["e"][0].scores
    assert results["ae"]["value"] == pytest.approx((target.tasks["a"][0].scores.sum() + (1 - errors).sum()) / 30)
    assert whole is not None and whole["n"] == 20 + 30 + 10 + 10 and whole["higher_is_better"]


def test_pooled_tasks_may_have_other_numbers_of_repeats() -> None:
    rng = np.random.default_rng(7)
    runs = [
        made.harvest(made.task("a", rng.integers(0, 2, (20, 4))), made.task("b", rng.integers(0, 2, 30))) for _ in "12"
    ]
    whole = task_results(*runs, None, None)[1]
    means = [np.concatenate([one.scores.mean(1) for (one,) in run.tasks.values()]) for run in runs]
    assert whole is not None and whole["difference"] == pytest.approx((means[0] - means[1]).mean())


# --- what cannot be compared


def refused(target: made.Harvest, other: made.Harvest) -> str:
    with pytest.raises(EvalError) as error:
        task_results(target, other, None, None)
    message = str(error.value)
    with pytest.raises(EvalError, match="second run"):
        task_results(target, target, other, None)
    return message


def test_two_runs_must_be_of_the_same_questions() -> None:
    one = made.task("t", np.ones(5))
    run = made.harvest(one)
    other = replace(one, questions=(*one.questions[:2], "other", *one.questions[3:]))
    assert "t: question 3 is 't:2' for the target and 'other'" in refused(run, made.harvest(other))
    shorter = replace(one, questions=one.questions[:4], scores=one.scores[:4])
    assert "t: the target has 5 questions" in (said := refused(run, made.harvest(shorter))) and "'t:4'" in said
    assert "other prompts" in refused(run, made.harvest(replace(one, prompts="else")))
    assert "t: the target has run this task" in refused(run, made.harvest())
    assert "has the metric" in refused(run, made.harvest(replace(one, metric="f1")))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_that_are_no_numbers_are_named(value: float) -> None:
    scores = np.ones(5)
    scores[3] = value
    with pytest.raises(EvalError, match="t: acc of question 't:3' is no finite number"):
        task_results(made.harvest(made.task("t", scores)), None, None, None)
    with pytest.raises(EvalError, match="'t:3'"):
        task_results(made.harvest(made.task("t", np.ones(5))), made.harvest(made.task("t", scores)), None, None)


# --- from one record to the next


def test_targets_of_two_records_are_paired() -> None:
    rng = np.random.default_rng(8)
    one, two = ((rng.random((40, 1)) < p).astype(float) for p in (0.5, 0.7))
    kept = [{"questions": ["q"], "clusters": None, "target": x.tolist()} for x in (one, two)]
    found = since(kept[0], kept[1], True)
    assert found == compare(one, two).difference
    assert since(kept[0], kept[1] | {"questions": ["r"]}, True) is None
    assert since(kept[0], kept[1] | {"clusters": ["r"]}, True) is None
    far = since(kept[0], kept[1] | {"target": (two * 9).tolist()}, False)
    assert far is not None and far.mean == pytest.approx(9 * two.mean() - one.mean())
