"""Run lm-eval's tasks on a model so that one number a question comes out.

lm-eval makes the prompts, asks the model and scores the answers; nothing of what it prints reaches the screen, and its
warnings are kept. Few-shot examples are drawn with lm-eval's own seeds whatever the seed of sampling is, so that every
run is asked the same.
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import EvalError, LoadError, PhasefoldError, UsageError
from .answers import way_of
from .asked import Asked, check_safe, find_tasks
from .harvest import number_of, passages_of, task_scores
from .runner import Advance
from .scores import Harvest

_LOUD = ("lm_eval", "lm-eval", "datasets")  # loggers whose warnings are kept
#: warnings that tell what everybody knows who asked for it, or what a task's author left to lm-eval's defaults
_IDLE = (
    "generation_kwargs: ", "aggregation is not. using default", "higher_is_better is not. using default",
    "Custom kwargs can be passed to",
)  # fmt: skip
_LONGEST = 300  # characters of a warning


def run_tasks(
    lm: Any,
    tasks: Sequence[str],
    *,
    include: Sequence[Path] = (),
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat_template: bool = False,
    system_instruction: str | None = None,
    repeats: int = 1,
    seed: int = 0,
    gen_kwargs: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    advance: Advance = lambda _: None,
) -> Harvest:
    """Ask a model all questions of some tasks.

    lm: lm-eval's, ours or another. tasks: names, groups, tags and patterns of lm-eval and of ours, YAML files, folders
    of them. limit: questions of a task. repeats: how often tasks that generate are run, with seeds from `seed` on, and
    they must sample then; the others, of which every run is the same, are run once.
    Raises UsageError for what makes no sense, EvalError naming the task where one, or its data, cannot be used.
    """
    evaluate = _evaluate()
    with _quietly(advance) as (told, notes), _naming(", ".join(tasks)):
        asked = find_tasks(tasks, include, metadata or {})
        notes += _override(asked, num_fewshot, gen_kwargs or {}, repeats)
        runs: dict[str, list[Any]] = {name: [] for name in asked.tasks}
        truncated: dict[str, int] = {}
        for number in range(repeats):
            now = {n: t for n, t in asked.tasks.items() if number == 0 or t.OUTPUT_TYPE == "generate_until"}
            if not now:
                break
            _seed()
            for task in now.values():
                task.set_fewshot_seed(seed=_defaults()[1])
            with _asking(lm, seed + number, told):
                found = evaluate(
                    lm,
                    {"tasks": now, "groups": {}},
                    limit=limit,
                    bootstrap_iters=0,
                    log_samples=True,
                    system_instruction=system_instruction,
                    apply_chat_template=chat_template,
                    fewshot_as_multiturn=chat_template,
                )
            if number == 0:
                truncated = dict(getattr(lm, "truncated", {}))
            if empty := getattr(lm, "empty", 0):
                notes.append(
                    f"{empty:,} answers of the server had no text and count as they are: cut within their reasoning, "
                    "most likely: --gen-kwargs max_gen_toks=..."
                )
            if not hasattr(lm, "advance"):
                told(sum(len(task.instances) for task in now.values()))
            for name in now:
                runs[name].append(found["samples"][name])
        scores, passages = {}, []
        for name, task in asked.tasks.items():
            metrics, left = task_scores(name, task, runs[name])
            scores[name] = tuple(metrics)
            notes += [f"task {name}: {metric} is left out: it has no number for each question" for metric in left]
            if hasattr(lm, "passage"):
                passages += passages_of(name, task, runs[name][0], metrics[0], lm.passage)
        versions = {name: str(task.VERSION) for name, task in asked.tasks.items()}
        return Harvest(scores, asked.groups, tuple(passages), truncated, versions, tuple(dict.fromkeys(notes)))


def check_tasks(
    tasks: Sequence[str],
    *,
    include: Sequence[Path] = (),
    num_fewshot: int | None = None,
    repeats: int = 1,
    gen_kwargs: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Asked:
    """What `run_tasks` would run. Raises what it would raise before it asks a model, and prints as little."""
    _evaluate()
    with _quietly(lambda _: None), _naming(", ".join(tasks)):
        asked = find_tasks(tasks, include, metadata or {})
        _override(asked, num_fewshot, gen_kwargs or {}, repeats)
        return asked


def _evaluate() -> Any:
    """lm-eval's, with its seeds: tasks may shuffle their documents by the global generators as they are loaded."""
    try:
        from lm_eval.evaluator import evaluate
    except ImportError as error:
        raise LoadError(f"lm-eval cannot be imported ({error}): pip install 'phasefold[evals]'") from None
    _seed()
    return evaluate


def _override(asked: Asked, num_fewshot: int | None, gen_kwargs: Mapping[str, Any], repeats: int) -> list[str]:
    """What lm-eval's simple_evaluate does to tasks before it runs them -> what is to be said of it.

    UsageError for a task that does more, or needs more, than a language model that answers.
    """
    notes = []
    for name, task in asked.tasks.items():
        check_safe(name, getattr(task, "UNSAFE_CODE", False))
        if getattr(task, "MULTIMODAL", False):
            raise UsageError(f"task {name}: asks about images or sound, and phasefold evaluates text")
        generates = task.OUTPUT_TYPE == "generate_until"
        if gen_kwargs and generates:
            task.set_config(key="generation_kwargs", value=_sampling(gen_kwargs), update=True)
        if generates:
            notes += _without_seed(name, task, gen_kwargs)
            if repeats > 1:
                _check_samples(name, task)
            way_of(task.get_config("generation_kwargs") or {}, name, 0)
        own = task.get_config("num_fewshot")
        if num_fewshot is not None and own != 0:
            task.set_config(key="num_fewshot", value=num_fewshot)
            if own not in (None, num_fewshot):
                notes.append(f"task {name}: {num_fewshot} few-shot examples instead of its own {own}")
        elif own is None:
            task.set_config(key="num_fewshot", value=0)
        elif num_fewshot:
            notes.append(f"task {name}: has no few-shot examples, whatever is asked for")
    return notes


def _sampling(gen_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Who asks for a temperature wants samples: lm-eval takes 0 where the task itself says do_sample: false."""
    given = dict(gen_kwargs)
    if given.get("temperature") and "do_sample" not in given:
        given["do_sample"] = True
    return given


def _without_seed(name: str, task: Any, gen_kwargs: Mapping[str, Any]) -> list[str]:
    """A seed of a task's own would make all repeats the same answers, and the baseline's second run its first."""
    own = dict(task.get_config("generation_kwargs") or {})
    if "seed" in gen_kwargs:
        raise UsageError(f"--gen-kwargs seed={gen_kwargs['seed']}: give --seed; repeats take the ones after it")
    if "seed" not in own:
        return []
    seed = own.pop("seed")
    task.set_config(key="generation_kwargs", value=own)
    return [f"task {name}: its own seed {seed} is left out, --seed counts"]


def metrics_of(task: Any) -> list[str]:
    """Names of the metrics that a run of this task may leave, as `task_scores` calls them."""
    filters = [str(each.name) for each in task._filters]
    names = [number_of(metric, task)[0] for metric in task.aggregation()]
    return names if len(filters) == 1 else [f"{name},{each}" for name in names for each in filters]


def _check_samples(name: str, task: Any) -> None:
    """UsageError for answers that would be the same every time."""
    from lm_eval.models.utils import normalize_gen_kwargs

    made = dict(normalize_gen_kwargs(dict(task.get_config("generation_kwargs") or {})))
    if not made["do_sample"] or not made.get("temperature"):
        raise UsageError(
            f"task {name}: its answers are greedy, the same every time, so repeats tell nothing: give "
            "--gen-kwargs temperature=0.6 (and the model's own top_p), or no --repeats"
        )


def _defaults() -> tuple[int, int]:
    """lm-eval's seeds: of Python's random numbers, and of all others."""
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

    return DEFAULT_RANDOM_SEED, DEFAULT_OTHER_SEED


def _seed() -> None:
    """Python's and numpy's global generators, as lm-eval does."""
    random.seed(_defaults()[0])
    np.random.seed(_defaults()[1])


@contextlib.contextmanager
def _asking(lm: Any, seed: int, advance: Advance) -> Iterator[None]:
    """A model that samples with this seed, and says how far it is."""
    if hasattr(lm, "truncated"):
        lm.truncated.clear()
    if hasattr(lm, "empty"):
        lm.empty = 0
    if hasattr(lm, "seed"):
        lm.seed = seed
    elif hasattr(lm, "_seed"):  # lm-eval's clients of servers
        lm._seed = seed
    if not hasattr(lm, "advance"):
        yield
        return
    before, lm.advance = lm.advance, advance
    try:
        yield
    finally:
        lm.advance = before


class _Collected(logging.Handler):
    """Warnings, a line each."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it, if it is of the harness, and says something."""
        line = " ".join(record.getMessage().split())
        if record.name.split(".")[0] in _LOUD and not any(idle in line for idle in _IDLE):
            self.lines.append(line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ...")


@contextlib.contextmanager
def _quietly(advance: Advance) -> Iterator[tuple[Advance, list[str]]]:
    """Nothing but `advance` prints; warnings are kept in the list.

    lm-eval and tasks print, draw bars and log as they like, some of it to stdout, where our JSON goes.
    """
    kept, out, err = _Collected(), sys.stdout, sys.stderr

    def told(done: int) -> None:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            advance(done)

    with contextlib.ExitStack() as held:
        for logger in (logging.getLogger(), logging.getLogger("lm_eval")):
            logger.addHandler(kept)
            held.callback(logger.removeHandler, kept)
        held.enter_context(contextlib.redirect_stdout(io.StringIO()))
        held.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield told, kept.lines


@contextlib.contextmanager
def _naming(asked: str) -> Iterator[None]:
    """EvalError of one line for whatever the code of a task, or of what fetches its data, raises."""
    try:
        yield
    except PhasefoldError:
        raise
    except Exception as error:  # a task is others' code
        name, fetching, inside = _where(error)
        if not inside:
            raise
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        what = f"{type(cause).__name__}: {' '.join(str(cause).split())[:_LONGEST]}"
        if fetching:
            raise EvalError(
                f"task {name or asked}: its data set cannot be had ({what}); mend its files, or fetch it where there "
                "is a network and let HF_HOME point to it"
            ) from None
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        raise EvalError(f"task {name or asked}: fails ({what}, at {place}); mend it, or leave it out") from None


def _where(error: BaseException) -> tuple[str | None, bool, bool]:
    """The innermost task or group on the way to an error, whether it was fetching data, and whether it was a task's."""
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

    name, fetching, inside = None, False, False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        values = frame.f_locals
        owner = values.get("self", values.get("task") if frame.f_code.co_name == "_compute_task_aggregations" else None)
        inside |= isinstance(owner, Task | Group | TaskManager)
        if isinstance(owner, Task):
            config = getattr(owner, "_config", None)
            name = getattr(config, "task", None) or name
            fetching |= frame.f_code.co_name == "download"
        elif isinstance(owner, Group):
            name = owner.name
    return name, fetching, inside
