"""What a run of tasks leaves: one number a question and metric, and the texts that the questions were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Passage(NamedTuple):
    """A text that a model read in a task: context and right continuation as tokens, and what it belongs to."""

    tokens: tuple[int, ...]
    document: str


@dataclass(frozen=True, slots=True)
class TaskScores:
    """One metric of one task.

    metric: lm-eval's name, with its filter where there is more than one ("exact_match,strict-match").
    kind: lm-eval's output_type. scores: float64 [questions, repeats], as lm-eval gives them. questions: an id each, by
    which two runs are paired. clusters: what each belongs to (document, subject), None where each stands for itself.
    prompts: sha256 of all prompts and targets, in order.
    """

    task: str
    metric: str
    kind: str
    higher_is_better: bool
    scores: NDArray[np.float64]
    questions: tuple[str, ...]
    clusters: tuple[str, ...] | None
    prompts: str


@dataclass(frozen=True, slots=True)
class Harvest:
    """A run of tasks on one model.

    tasks: of each task its metrics, the one that speaks for it first. groups: lm-eval's groups that were asked for, and
    the tasks in them, subgroups resolved. passages: texts of the questions. truncated: requests that were too long for
    the model and lost their beginning, by task. versions: of each task, as its author counts. notes: what lm-eval
    warned of, and what was left out.
    """

    tasks: Mapping[str, tuple[TaskScores, ...]]
    groups: Mapping[str, tuple[str, ...]]
    passages: tuple[Passage, ...]
    truncated: Mapping[str, int]
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()
