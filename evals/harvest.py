"""From what lm-eval logs of a task to one number a question: metrics, question ids, clusters, prompts, passages.

lm-eval's own means are left aside: a paired comparison needs each question's score. A metric whose share of a question
is no number (F1's pairs of answers, BLEU's of texts) has none; two kinds are given one here, which is said in `number`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import EvalError
from .scores import Passage, TaskScores

#: fields of a question that say what it shares with others, the first that does: named so, or a text
DOCUMENTS = (
    "cluster", "document", "document_id", "doc_id", "passage", "flores_passage", "article", "story", "paragraph",
    "context",
)  # fmt: skip
#: and others, which may be the same of a whole task without saying anything
SUBJECTS = ("source_id", "title", "document_title", "subject")
#: metrics that speak for a task before others
FIRST = ("acc", "exact_match")
_SHORT = 40  # characters of a cluster's name; a longer one is a text, and a digest stands for it
_DIGITS = 16  # of a digest that is an id among a task's

Sample = Mapping[str, Any]
Tokens = Callable[[str, str | None], Sequence[int]]


def task_scores(name: str, task: Any, runs: Sequence[Sequence[Sample]]) -> tuple[list[TaskScores], list[str]]:
    """A task's metrics, the one that speaks first, and the names of those that have no number a question.

    runs: what lm-eval logged each time that the task was run, a sample a question and filter. Raises EvalError where no
    metric is left.
    """
    filters = list(dict.fromkeys(sample["filter"] for sample in runs[0]))
    parts = [{each: [one for one in run if one["filter"] == each] for each in filters} for run in runs]
    samples = parts[0][filters[0]]
    questions, clusters, prompts = questions_of(samples), clusters_of(samples), prompts_of(samples)
    found: dict[str, TaskScores] = {}
    left: list[str] = []
    for each in filters:
        for metric in dict.fromkeys(key for sample in parts[0][each] for key in sample["metrics"]):
            named, higher, number = number_of(metric, task)
            label = named if len(filters) == 1 else f"{named},{each}"
            columns = [[number(sample.get(metric)) for sample in part[each]] for part in parts]
            values = np.array(columns, dtype=np.float64).T  # what is no number has become NaN
            if higher is None or not np.isfinite(values).all():
                left.append(metric if len(filters) == 1 else f"{metric},{each}")
            elif label not in found:  # bits a byte stand in for two of lm-eval's metrics
                found[label] = TaskScores(
                    name, label, task.OUTPUT_TYPE, higher, values, questions, clusters, prompts
                )  # fmt: skip
    if not found:
        raise EvalError(
            f"task {name}: none of its metrics ({', '.join(left) or 'it has none'}) gives a finite number for each "
            "question, and one is needed to compare two runs: use another metric_list"
        )
    order = sorted(found, key=lambda label: (*FIRST, label.split(",")[0]).index(label.split(",")[0]))
    return [found[label] for label in order], left


def number_of(metric: str, task: Any) -> tuple[str, bool | None, Callable[[Any], float]]:
    """A metric's name, whether higher is better (None: nobody says), and how a question's share of it is a number.

    Where lm-eval makes a perplexity of log-likelihoods, a question's number is its log-likelihood, in nats, so higher
    is better. Where it divides sums of them by sums of words or bytes, it is the document's own bits a word or byte.
    """
    from lm_eval.api import metrics
    from lm_eval.api.registry import is_higher_better

    aggregation = task.aggregation().get(metric)
    if aggregation is metrics.perplexity:
        return "loglikelihood", True, _number
    if aggregation in (metrics.weighted_perplexity, metrics.bits_per_byte):
        return f"document_bits_per_{'word' if 'word' in metric else 'byte'}", False, _bits
    higher = task.higher_is_better().get(metric)
    return metric, is_higher_better(metric) if higher is None else bool(higher), _number


def questions_of(samples: Sequence[Sample]) -> tuple[str, ...]:
    """An id a question: the beginning of lm-eval's digest of it, numbered where the same one is asked again."""
    seen: Counter[str] = Counter()
    found = []
    for sample in samples:
        digest = sample["doc_hash"][:_DIGITS]
        seen[digest] += 1
        found.append(digest if seen[digest] == 1 else f"{digest}-{seen[digest]}")
    return tuple(found)


def clusters_of(samples: Sequence[Sample]) -> tuple[str, ...] | None:
    """By the first field that all questions have, and that some of them share but not all; else by the first of
    DOCUMENTS that all share: questions of one document are one cluster, those of one subject are a task.
    """
    documents = [sample["doc"] for sample in samples]
    if not all(isinstance(document, dict) for document in documents):
        return None
    whole = None
    for field in (*DOCUMENTS, *SUBJECTS):
        values = [document.get(field) for document in documents]
        if any(value is None or value == "" for value in values):
            continue
        names = tuple(_name(value) for value in values)
        if 1 < len(set(names)) < len(names):
            return names
        if len(set(names)) == 1 < len(names) and field in DOCUMENTS:
            whole = whole or names
    return whole


def prompts_of(samples: Sequence[Sample]) -> str:
    """sha256 of everything that was asked, and of what was right."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps([sample["arguments"], sample["target"]], default=str).encode() + b"\n")
    return digest.hexdigest()


def passages_of(name: str, task: Any, samples: Sequence[Sample], scores: TaskScores, tokens: Tokens) -> list[Passage]:
    """The texts of the questions: with the right continuation where there is one, else the prompts."""
    found = []
    documents = scores.clusters or scores.questions
    every = [sample for sample in samples if sample["filter"] == samples[0]["filter"]]
    for sample, document in zip(every, documents, strict=True):
        arguments = sample["arguments"]
        right = _right(task, sample) if task.OUTPUT_TYPE == "multiple_choice" else 0
        if right is None or not 0 <= right < len(arguments):
            continue  # nothing says which choice is right
        context, *others = arguments[right]
        continuation = others[0] if others and isinstance(others[0], str) else None
        found.append(Passage(tuple(tokens(context, continuation)), f"{name}/{document}"))
    return found


def _right(task: Any, sample: Sample) -> int | None:
    """Which request of a multiple choice is the right one."""
    gold = task.doc_to_text(sample["doc"]) if getattr(task, "multiple_input", 0) else sample["target"]
    if isinstance(gold, list):
        gold = gold[0] if gold else None
    if isinstance(gold, str):
        choices = task.doc_to_choice(sample["doc"])
        gold = choices.index(gold) if gold in choices else None
    return int(gold) if isinstance(gold, int | np.integer) else None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, bool | int | float | np.number | np.bool_) else math.nan


def _bits(value: Any) -> float:
    """(nats, words or bytes) -> bits each."""
    if not isinstance(value, tuple | list) or len(value) != 2 or not value[1]:
        return math.nan
    return -_number(value[0]) / (float(value[1]) * math.log(2))


def _name(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True)
    if len(text) <= _SHORT and text.isprintable():
        return text
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_DIGITS]
