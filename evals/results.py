"""From the answers of two runs to what a record says of each task, of each group, and of all tasks together.

`difference` is target - baseline in the metric's own direction, as lm-eval gives it, so that where lower is better a
positive one is a loss. `verdict` and `flips` speak of better and worse, whatever the direction: "lost" is a question
that the target makes worse, and "not worse" is said of the interval's bound on the losing side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import EvalError
from .compare import Comparison, compare
from .scores import Harvest, TaskScores
from .statistics import Interval, mean_interval, paired_difference, per_question, verdict

#: subtasks of a group, from which on each of them is a cluster where they have none of their own
MANY_TASKS = 10
#: what is said to be the metric where those of several tasks are pooled
MIXED = "each task's own"

Scores = NDArray[np.float64]
Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Trial:
    """One metric of one task, or of several pooled: the same questions put to up to three runs, [n, repeats] each."""

    metric: str
    kind: str
    higher_is_better: bool
    share: bool
    target: Scores
    baseline: Scores | None
    again: Scores | None
    clusters: tuple[str, ...] | None


def task_results(
    target: Harvest, baseline: Harvest | None, again: Harvest | None, margin: float | None
) -> tuple[dict[str, Result], Result | None]:
    """RESULTs of tasks and groups by name, and that of all tasks. again: the baseline's second run, the noise floor.

    A group's mean is that of its questions, each counting once (lm-eval's weight_by_size), in the first metric that all
    its tasks have; where they have none in common and all are shares, each in its own; else it has no mean and is left
    out. "All" pools the tasks whose first metric is a share, each task once, those where lower is better as 1 - share;
    None where there is no such task. margin: what a share may lose, a fraction; other metrics get no verdict, having
    another unit. Raises EvalError: the runs are not of the same questions, or a score is not finite.
    """
    for other, name in ((baseline, "baseline"), (again, "baseline's second run")):
        if other is not None:
            _check_same(target, other, name)
    trials = {task: [_trial(one, baseline, again) for one in metrics] for task, metrics in target.tasks.items()}
    results = {task: _told(metrics, margin) for task, metrics in trials.items()}
    for group, tasks in target.groups.items():
        pooled = _common({task: trials[task] for task in tasks})
        if pooled:
            results[group] = _told(pooled, margin) | {"tasks": list(tasks)}
    shares = {task: _upward(metrics[0]) for task, metrics in trials.items() if metrics[0].share}
    return results, _result(_pool(shares), margin) if shares else None


def _check_same(target: Harvest, other: Harvest, name: str) -> None:
    """EvalError where two runs have not answered the same questions, metric by metric."""
    if target.tasks.keys() != other.tasks.keys():
        odd = sorted(target.tasks.keys() ^ other.tasks.keys())[0]
        has, lacks = ("target", name) if odd in target.tasks else (name, "target")
        raise EvalError(f"{odd}: the {has} has run this task and the {lacks} has not; run both with the same --tasks")
    for task, metrics in target.tasks.items():
        theirs = {one.metric: one for one in other.tasks[task]}
        if {one.metric for one in metrics} != theirs.keys():
            odd = sorted({one.metric for one in metrics} ^ theirs.keys())[0]
            raise EvalError(f"{task}: only one of target and {name} has the metric {odd}; run both with one lm-eval")
        for mine in metrics:
            found = theirs[mine.metric]
            for place, (one, two) in enumerate(zip(mine.questions, found.questions, strict=False)):
                if one != two:
                    raise EvalError(
                        f"{task}: question {place + 1} is {one!r} for the target and {two!r} for the {name}; run both "
                        "with the same data and --limit"
                    )
            if len(mine.questions) != len(found.questions):
                longer = max(mine.questions, found.questions, key=len)
                odd = longer[min(len(mine.questions), len(found.questions))]
                raise EvalError(
                    f"{task}: the target has {len(mine.questions):,} questions, the {name} {len(found.questions):,}; "
                    f"{odd!r} is the first that only one has; run both with the same --limit"
                )
            if mine.prompts != found.prompts:
                raise EvalError(
                    f"{task}: the same questions have other prompts for the {name} ({found.prompts[:12]}) than for the "
                    f"target ({mine.prompts[:12]}); run both with the same examples, template and version of the task"
                )


def _trial(mine: TaskScores, baseline: Harvest | None, again: Harvest | None) -> _Trial:
    runs = [mine.scores]
    for other in (baseline, again):
        if other is not None:
            runs.append(next(one.scores for one in other.tasks[mine.task] if one.metric == mine.metric))
    for scores in runs:
        if len(scores) != len(mine.questions) or not scores.size:
            raise EvalError(f"{mine.task}: {len(scores)} scores of {mine.metric} for {len(mine.questions)} questions")
        if not np.isfinite(scores).all():
            odd = mine.questions[int(np.nonzero(~np.isfinite(scores).all(-1))[0][0])]
            raise EvalError(
                f"{mine.task}: {mine.metric} of question {odd!r} is no finite number, so that there is no mean; leave "
                "the task out, or the question in its doc filter"
            )
    share = mine.kind != "loglikelihood_rolling" and all(bool(((0 <= s) & (s <= 1)).all()) for s in runs)
    first = runs[1] if baseline is not None else None
    second = runs[-1] if again is not None else None
    return _Trial(mine.metric, mine.kind, mine.higher_is_better, share, mine.scores, first, second, mine.clusters)


def _told(metrics: Sequence[_Trial], margin: float | None) -> Result:
    """The first metric's RESULT, the others' in it."""
    first, *others = metrics
    return _result(first, margin) | {"metrics": {x.metric: _drop_floor(_result(x, margin)) for x in others}}


def _drop_floor(result: Result) -> Result:
    return {name: value for name, value in result.items() if name != "floor"}


def _common(tasks: Mapping[str, Sequence[_Trial]]) -> list[_Trial]:
    """A group's tasks, pooled in each metric that all have."""
    named = [{(one.metric, one.higher_is_better): one for one in metrics} for metrics in tasks.values()]
    pooled = [
        _pool({task: has[key] for task, has in zip(tasks, named, strict=True)})
        for key in named[0]
        if all(key in has for has in named)
    ]
    firsts = {task: metrics[0] for task, metrics in tasks.items()}
    if not pooled and all(one.share for one in firsts.values()):
        pooled = [_pool({task: _upward(one) for task, one in firsts.items()})]
    return pooled


def _upward(one: _Trial) -> _Trial:
    """A share where higher is better: 1 - share where it is not."""
    if one.higher_is_better:
        return one
    target, baseline, again = (None if s is None else 1 - s for s in (one.target, one.baseline, one.again))
    assert target is not None
    return replace(
        one, metric=f"1 - {one.metric}", higher_is_better=True, target=target, baseline=baseline, again=again
    )


def _pool(tasks: Mapping[str, _Trial]) -> _Trial:
    """All questions of several tasks. Clusters are the tasks' own; many tasks without any are clusters themselves."""
    trials = list(tasks.values())
    if any(one.clusters is not None for one in trials):
        clusters = [
            f"{task}\n{each}"
            for task, one in tasks.items()
            for each in (one.clusters if one.clusters is not None else range(len(one.target)))
        ]
    elif len(tasks) >= MANY_TASKS:
        clusters = [task for task, one in tasks.items() for _ in range(len(one.target))]
    else:
        clusters = []
    metrics, kinds = {one.metric for one in trials}, {one.kind for one in trials}
    return _Trial(
        metrics.pop() if len(metrics) == 1 else MIXED,
        kinds.pop() if len(kinds) == 1 else "mixed",
        trials[0].higher_is_better,
        all(one.share for one in trials),
        _stacked([one.target for one in trials]),
        _stacked([one.baseline for one in trials if one.baseline is not None])
        if trials[0].baseline is not None
        else None,
        _stacked([one.again for one in trials if one.again is not None]) if trials[0].again is not None else None,
        tuple(clusters) or None,
    )


def _stacked(runs: Sequence[Scores]) -> Scores:
    """Repeats are averaged where the tasks have not equally many."""
    same = len({scores.shape[1] for scores in runs}) == 1
    return np.concatenate(runs) if same else np.concatenate([per_question(scores)[:, None] for scores in runs])


def _result(one: _Trial, margin: float | None) -> Result:
    questions, repeats = one.target.shape
    values = per_question(one.target)
    found: Result = {
        "metric": one.metric,
        "kind": one.kind,
        "higher_is_better": one.higher_is_better,
        "share": one.share,
        "value": float(values.mean()),
        "ci95_value": _own(one, values),
        "n": questions,
        "clusters": questions if one.clusters is None else len(set(one.clusters)),
        "repeats": repeats,
    }
    if one.baseline is None:
        return found
    compared = _compared(one, one.baseline, one.target)
    difference = compared.difference
    found |= {
        "baseline": compared.baseline,
        "difference": difference.mean,
        "ci95": _ends(difference),
        "error": _number(difference.error),
        "p_value": compared.flips.p if compared.flips else None,
        "mid_p": compared.flips.mid_p if compared.flips else None,
        "flips": _flips(one, compared),
        "smallest": compared.smallest,
        "verdict": verdict(_losing_down(one, difference), margin) if margin is not None and one.share else None,
        "spreads": compared.to_json()["spreads"],
        "floor": None,
    }
    if one.again is not None:
        noise = _compared(one, one.baseline, one.again)
        flipped = _flips(one, noise)
        found["floor"] = {"difference": noise.difference.mean, "ci95": _ends(noise.difference), "flips": flipped}
    return found


def _own(one: _Trial, values: Scores) -> list[float | None]:
    """The interval of the mean itself, not of a difference."""
    if not one.share:
        return _ends(mean_interval(values, one.clusters, span=_seen(values, values)))
    wrong = mean_interval(1 - values, one.clusters, bounds=(0.0, 1.0))
    return [1 - wrong.high, 1 - wrong.low]


def _compared(one: _Trial, before: Scores, after: Scores) -> Comparison:
    """`compare`, where no score flips that is a mean of several answers, and no interval is cut at what was seen."""
    span = _span(one)
    found = compare(before, after, one.clusters, span=span)
    if not one.share:
        difference = per_question(after) - per_question(before)
        found = found._replace(difference=mean_interval(difference, one.clusters, span=span))
    return found._replace(flips=None) if max(before.shape[1], after.shape[1]) > 1 else found


def _span(one: _Trial) -> float:
    """The largest difference that a question can have: 1 of shares. Nothing is known of other metrics: see `_seen`."""
    if one.share or one.baseline is None:
        return 1.0
    return _seen(*(scores for scores in (one.baseline, one.target, one.again) if scores is not None))


def _seen(first: Scores, *others: Scores) -> float:
    """The largest difference of a question from one run to the next, which is what one that was not seen may be of.

    With none at all, from question to question; where all are alike, their size, or 1.
    """
    base = per_question(first)
    largest = max(float(np.abs(per_question(scores) - base).max()) for scores in others)
    return largest or float(base.max() - base.min()) or abs(float(base[0])) or 1.0


def _losing_down(one: _Trial, difference: Interval) -> Interval:
    """With a loss below zero."""
    if one.higher_is_better:
        return difference
    return Interval(-difference.mean, -difference.high, -difference.low, difference.error)


def _flips(one: _Trial, found: Comparison) -> dict[str, int] | None:
    if found.flips is None:
        return None
    down, up = found.flips.lost, found.flips.gained
    return {"lost": down, "gained": up} if one.higher_is_better else {"lost": up, "gained": down}


def _ends(interval: Interval) -> list[float | None]:
    return [_number(interval.low), _number(interval.high)]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def since(before: Mapping[str, Any], after: Mapping[str, Any], share: bool) -> Interval | None:
    """What a later run's target gained on an earlier one's, from the "scores" that two records keep of one metric.

    None where they are not of the same questions and clusters.
    """
    if any(before[key] != after[key] for key in ("questions", "clusters")):
        return None
    one, two = (np.asarray(each["target"], dtype=np.float64) for each in (before, after))
    if share:
        return paired_difference(one, two, after["clusters"])
    return mean_interval(per_question(two) - per_question(one), after["clusters"], span=_seen(one, two))
