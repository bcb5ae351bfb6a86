"""Numbers of tool calls, against a baseline request by request, with intervals. Their names: see the package.

F1 of triggers is a mean in disguise: of each trigger of either model, did the other one trigger too. So its interval is
the mean's, with requests as the clusters, and holds for rare flips as that does. Several samples of a request are
averaged: each of the target's meets each of the baseline's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import EvalError
from ..compare import compare
from ..statistics import RESAMPLES, Interval, mean_interval
from .answers import Answer
from .check import KINDS, Failure, failures
from .requests import Request

Floats = NDArray[np.float64]
Samples = Sequence[Sequence[float | None]]

SHOWN = 5  # failures of a kind, and errors, that are kept word by word


def judge(
    requests: Sequence[Request],
    answers: Sequence[Sequence[Answer]],
    baseline: Sequence[Sequence[Answer]] | None = None,
    *,
    most_unanswered: float = 0.05,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> dict[str, Any]:
    """The record's "tool_calls". answers, baseline: of each request its samples, all of them or fewer.

    EvalError where more than the share `most_unanswered` of requests has no answer on a side, or none has one on both.
    """
    sides = {"target": answers} | ({} if baseline is None else {"baseline": baseline})
    found: dict[str, Any] = {
        "requests": len(requests),
        "repeats": max(len(some) for some in answers),
        "clusters": len({request.digest for request in requests}),
        "baseline": None,
    }
    scores: dict[str, Any] = {
        "questions": [request.id for request in requests],
        "clusters": [request.digest for request in requests],
        "baseline": None,
    }
    for name, some in sides.items():
        found[name], scores[name] = _side(name, requests, some, most_unanswered)
    return found | rejudge(scores, seed=seed, resamples=resamples) | {"scores": scores}


def _side(
    name: str, requests: Sequence[Request], answers: Sequence[Sequence[Answer]], most: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is counted of one model's answers, and its scores."""
    if len(answers) != len(requests):
        raise EvalError(f"the {name} has answers to {len(answers)} requests of {len(requests)}: it is another file's")
    bad: dict[str, list[tuple[Request, Failure]]] = {kind: [] for kind in KINDS}
    triggered, valid, errors = list[list[float | None]](), list[list[float | None]](), list[str]()
    finishes, unfinished, without = Counter[str](), 0, 0
    for request, some in zip(requests, answers, strict=True):
        triggered.append([])
        valid.append([])
        for answer in some:
            if answer.error is not None:
                errors.append(f"line {request.line}: {answer.error}")
                triggered[-1].append(None)
                valid[-1].append(None)
                continue
            wrong = failures(request, answer) if answer.triggered else []
            for failure in wrong:
                bad[failure.kind].append((request, failure))
            triggered[-1].append(float(answer.triggered))
            valid[-1].append(float(not wrong) if answer.triggered else None)
            finishes[str(answer.finish)] += 1
            unfinished += bool(answer.calls) and not answer.triggered
        if all(answer.error is not None for answer in some):
            without += 1
            errors += [] if some else [f"line {request.line}: nothing came back"]
    if without > most * len(requests):
        raise EvalError(
            f"the {name}: {without} of {len(requests)} requests have no answer, more than the share of {most:g} that "
            f"may; the first: {errors[0]}"
        )
    counted = {
        "answers": sum(finishes.values()),
        "unanswered": len(errors),
        "errors": errors[:SHOWN],
        "finish_reasons": dict(sorted(finishes.items())),
        "triggered": sum(value == 1 for some in triggered for value in some),
        "valid": sum(value == 1 for some in valid for value in some),
        "calls_unfinished": unfinished,
        "failures": {
            kind: {"count": len(some), "first": [_told(request, failure) for request, failure in some[:SHOWN]]}
            for kind, some in bad.items()
        },
    }
    return counted, {"triggered": triggered, "valid": valid}


def _told(request: Request, failure: Failure) -> dict[str, Any]:
    return {"line": request.line, "name": failure.name, "why": failure.why}


def rejudge(scores: Mapping[str, Any], *, seed: int = 0, resamples: int = RESAMPLES) -> dict[str, Any]:
    """What follows from kept scores alone: every interval, and the comparison with the baseline."""
    clusters = np.asarray(scores["clusters"])
    found = dict.fromkeys(("precision", "recall", "f1", "floor", "triggers", "schema"))
    rates = dict[str, Any]()
    for side, before in (("target", ""), ("baseline", "baseline_")):
        for name, of in (("trigger_rate", "triggered"), ("schema_accuracy", "valid")):
            there = scores[side] is not None
            rates[before + name] = _interval(*_flat(scores[side][of], clusters), seed, resamples) if there else None
    if scores["baseline"] is not None:
        found |= _against(scores["baseline"], scores["target"], clusters, seed, resamples)
    return rates | found


def _against(
    baseline: Mapping[str, Samples], target: Mapping[str, Samples], clusters: NDArray[Any], seed: int, resamples: int
) -> dict[str, Any]:
    before, after = _means(baseline["triggered"]), _means(target["triggered"])
    both = np.isfinite(before) & np.isfinite(after)
    if not both.any():
        raise EvalError("no request has an answer of both target and baseline: nothing can be compared")
    b, t, mine = before[both], after[both], clusters[both]
    times = [np.array([sum(v is not None for v in some) for some in side["triggered"]]) for side in (baseline, target)]
    many = math.lcm(*(int(each) for side in times for each in np.unique(side[both])))
    # so many triggers of each in `many` samples of every request
    of_b, of_t = (np.rint(each * many).astype(np.int64) for each in (b, t))

    def share(values: Sequence[Floats], counts: Sequence[NDArray[np.int64]]) -> dict[str, float | None] | None:
        """The mean of the values, each counted so often."""
        all_values = np.concatenate([np.repeat(each, n) for each, n in zip(values, counts, strict=True)])
        all_clusters = np.concatenate([np.repeat(mine, n) for n in counts])
        return _interval(all_values, all_clusters, seed, resamples)

    triggers = {
        "compared": int(both.sum()),
        "left_out": int((~both).sum()),
        "true_positives": float((t * b).sum()),
        "false_positives": float((t * (1 - b)).sum()),
        "false_negatives": float(((1 - t) * b).sum()),
        "true_negatives": float(((1 - t) * (1 - b)).sum()),
        "comparison": compare(b, t, mine, seed=seed, resamples=resamples).to_json(),
    }
    before, after = _means(baseline["valid"]), _means(target["valid"])
    both = np.isfinite(before) & np.isfinite(after)
    compared = None
    if both.any():
        compared = compare(before[both], after[both], clusters[both], seed=seed, resamples=resamples).to_json()
    return {
        "precision": share([b], [of_t]),
        "recall": share([t], [of_b]),
        "f1": share([b, t], [of_t, of_b]),
        "floor": _floor(baseline["triggered"], clusters, seed, resamples),
        "triggers": triggers,
        "schema": {"both_triggered": int(both.sum()), "comparison": compared},
    }


def _floor(triggered: Samples, clusters: NDArray[Any], seed: int, resamples: int) -> dict[str, float | None] | None:
    """F1 among samples of one model: of each trigger, how many of the request's other samples triggered too."""
    values, owners = list[float](), list[Any]()
    for some, owner in zip(triggered, clusters, strict=True):
        there = [value for value in some if value is not None]
        count = int(sum(there))
        if len(there) > 1:
            values += [(count - 1) / (len(there) - 1)] * count
            owners += [owner] * count
    return _interval(np.array(values), np.array(owners), seed, resamples)


def _means(samples: Samples) -> Floats:
    """float64 [requests]: NaN where there is no sample."""
    there = [[value for value in some if value is not None] for some in samples]
    return np.array([sum(some) / len(some) if some else math.nan for some in there])


def _flat(samples: Samples, clusters: NDArray[Any]) -> tuple[Floats, NDArray[Any]]:
    """Every sample that is there, and whose it is."""
    there = [[value for value in some if value is not None] for some in samples]
    return np.array([value for some in there for value in some]), np.repeat(clusters, [len(some) for some in there])


def _interval(values: Floats, clusters: NDArray[Any], seed: int, resamples: int) -> dict[str, float | None] | None:
    """Of a share: of what is off it, for that is zero mostly. None: there is nothing to take the mean of."""
    if not len(values):
        return None
    off = mean_interval(1 - values, clusters, bounds=(0.0, 1.0), seed=seed, resamples=resamples)
    return Interval(1 - off.mean, 1 - off.high, 1 - off.low, off.error).to_json()
