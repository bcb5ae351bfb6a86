"""An evaluation from end to end: baseline, baseline again, target; what their answers are worth; the record of it.

One model is in memory at a time. The baseline runs twice, the second time in other batches and with other seeds: what
differs then is noise, and stands beside what the target makes different.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from .. import __version__
from ..calib.text import load_tokenizer, read_text
from ..errors import EvalError, UsageError
from ..families import identify
from ..formats.checkpoint import open_checkpoint
from .asked import Asked
from .harness import check_tasks, metrics_of, run_tasks
from .identity import check_unchanged, identity, kinship
from .results import task_results
from .same_text import Kept, Texts, from_passages, from_text
from .scores import Harvest
from .settings import Settings
from .sides import Side, check_sides, opened
from .target import Target
from .tool_calls import ask_tools, judge_tools
from .tools.answers import read_answers, write_answers
from .tools.requests import read_requests

VERSION = 1
#: tokens of a block of --text
BLOCK = 512
#: of texts that tasks make, where nobody says how long they are to be
LENGTH = 4096
#: told what is going on, and how many requests are done since the last call
Progress = Callable[[str, int], None]
#: given the names of tasks and groups with the metrics of each, before any model is opened
Ready = Callable[[Mapping[str, Sequence[str]]], None]

#: identities of target and baseline
Names = tuple[dict[str, Any], dict[str, Any] | None]


@dataclass(slots=True)
class _Answers:
    """What one model said: to the tasks, to the requests, on the text."""

    about: Mapping[str, Any]
    harvest: Harvest | None = None
    tools: Any = None
    proxies: Any = None


def evaluate(
    targets: Sequence[Target], baseline: Target | None, settings: Settings, progress: Progress, ready: Ready
) -> Iterator[dict[str, Any]]:
    """Carry an evaluation out -> the record of each target, as soon as it is there.

    ready: may raise where something is wrong about the names. Raises whatever PhasefoldError is in the way; what can be
    known before a model is opened is known then.
    """
    _check(targets, baseline, settings)
    every = [*([baseline] if baseline else []), *targets]
    settings = replace(settings, told=_told(every, settings))
    requests = read_requests(settings.requests, settings.limit) if settings.requests else None
    given = read_answers(settings.answers, requests) if settings.answers and requests else None
    theirs = None if given else requests  # what the baseline itself is asked
    asked = _asked(settings)
    _check_asked(settings, asked, baseline)
    generating = [name for name, task in asked.tasks.items() if task.OUTPUT_TYPE == "generate_until"]
    check_sides(every, settings, generating or ["tool calls"] * (requests is not None))
    who = {one.text: identity(one) for one in every}
    own = _own_text(every, settings)
    ready(_metrics(asked))
    first = again = kept = None
    with contextlib.ExitStack() as held:
        if baseline is not None:
            with opened(baseline, settings, settings.batch) as side:
                first = _ask(side, settings, theirs, 0, "baseline", progress)
                if texts := own or _texts(side, first, targets, settings):
                    told = _counter(progress, "baseline: the text")
                    kept = Kept(side.runner, texts, settings.memory // 4, settings.work, told)
                    held.callback(kept.close)
            if settings.floor:
                # other batches, other seeds: whatever the numbers are made of besides the weights; smaller ones, for
                # those that fit are known to
                with opened(baseline, settings, settings.batch // 2 or 1) as side:
                    again = _ask(side, settings, theirs, 1, "baseline again", progress)
                    _compare(side, kept, again, "baseline again: the text", progress)
        for target in targets:
            begun, started = time.monotonic(), datetime.now(UTC)
            with opened(target, settings, settings.batch) as side:
                ours = _ask(side, settings, requests, 2, target.text, progress)
                _compare(side, kept, ours, f"{target.text}: the text", progress)
            for one in (*([baseline] if baseline else []), target):
                check_unchanged(one, who[one.text])
            names = who[target.text], who[baseline.text] if baseline else None
            record = _record(target, names, settings, ours, first, again)
            record["settings"]["text"] = kept.texts.to_json() if kept else None
            if requests is not None:
                before, floor = given or (first.tools if first else None), again.tools if again else None
                record["tool_calls"] = judge_tools(requests, ours.tools, before, floor)
                if settings.answers_out:
                    write_answers(settings.answers_out, requests, ours.tools)
            took = {"started": started.isoformat(timespec="seconds"), "seconds": round(time.monotonic() - begun, 1)}
            yield {"version": VERSION, "tool": __version__} | took | record


def _asked(settings: Settings) -> Asked:
    """The tasks; whatever is wrong about them is told here."""
    if not settings.tasks:
        return Asked({}, {})
    return check_tasks(
        settings.tasks, include=settings.include, num_fewshot=settings.num_fewshot, repeats=settings.repeats,
        gen_kwargs=settings.gen_kwargs, metadata=settings.told,
    )  # fmt: skip


def _check_asked(settings: Settings, asked: Asked, baseline: Target | None) -> None:
    """UsageError for options that nothing would come of."""
    answers = settings.requests is not None or any(t.OUTPUT_TYPE == "generate_until" for t in asked.tasks.values())
    for name, given in (("--repeats", settings.repeats > 1), ("--gen-kwargs", bool(settings.gen_kwargs))):
        if given and not answers:
            raise UsageError(f"{name}: without meaning, as none of the tasks takes answers; leave it out")
    if settings.margin is not None and baseline is None:
        raise UsageError("--margin: without meaning, as there is no --baseline; leave it out")


def _metrics(asked: Asked) -> dict[str, list[str]]:
    """Of each task, and of each group those of its tasks."""
    found = {name: metrics_of(task) for name, task in asked.tasks.items()}
    for group, tasks in asked.groups.items():
        found.setdefault(group, list(dict.fromkeys(metric for task in tasks for metric in found[task])))
    return found


def _told(every: Sequence[Target], settings: Settings) -> dict[str, Any]:
    """What tasks that generate their questions are told: the same for all models, or the questions would differ."""
    folder = settings.tokenizer or next((target.folders[0] for target in every if target.folders), None)
    known: dict[str, Any] = {"max_length": settings.max_length or LENGTH}
    for target in every:
        for one in target.folders:
            most = identify(open_checkpoint(one).config).text["max_position_embeddings"]
            known["max_length"] = min(known["max_length"], int(most))
    return ({"tokenizer": str(folder)} if folder else {}) | known | dict(settings.metadata)


def _check(targets: Sequence[Target], baseline: Target | None, settings: Settings) -> None:
    """UsageError for what makes no sense, before anything is opened."""
    if not (settings.tasks or settings.requests or settings.text):
        raise UsageError("nothing to evaluate on: give --tasks, --tool-calls or --text")
    for name, file in (("--answers", settings.answers), ("--answers-out", settings.answers_out)):
        if file and not settings.requests:
            raise UsageError(f"{name} {file}: holds answers to the requests of --tool-calls; give those as well")
    if settings.answers_out and len(targets) > 1:
        raise UsageError(f"--answers-out {settings.answers_out}: is for one TARGET's answers")
    servers = [one.text for one in (*targets, baseline) if one is not None and one.url]
    if settings.text and (baseline is None or servers):
        why = f"{servers[0]} is a server, which gives no distributions" if servers else "give --baseline as well"
        raise UsageError(f"--text {settings.text}: compares two models' distributions of its tokens; {why}")


def _ask(side: Side, settings: Settings, requests: Any, run: int, who: str, progress: Progress) -> _Answers:
    """Put everything but the text to one model. run: 0 for the baseline, 1 for it again, 2 for a target.

    Sampled answers of tasks have the baseline's seeds in a target's run, so that their difference is less by chance,
    and others when the baseline runs again. Calls of tools are compared one by one, and whether they agree must not
    come from random numbers in common: there each run has its own.
    """
    found = _Answers(side.about)
    if requests is not None:
        seed = settings.seed + run * settings.repeats
        found.tools = ask_tools(side, settings, requests, seed, _counter(progress, f"{who}: tool calls"))
    if settings.tasks:
        seed = settings.seed + (run % 2) * settings.repeats
        found.harvest = run_tasks(
            side.lm, settings.tasks, include=settings.include, limit=settings.limit,
            num_fewshot=settings.num_fewshot, chat_template=settings.chat_template,
            system_instruction=settings.system_instruction, repeats=settings.repeats, seed=seed,
            gen_kwargs=settings.gen_kwargs, metadata=settings.told, advance=_counter(progress, f"{who}: tasks"),
        )  # fmt: skip
    return found


def _counter(progress: Progress, stage: str) -> Callable[[int], None]:
    progress(stage, 0)
    return lambda done: progress(stage, done)


def _own_text(every: Sequence[Target], settings: Settings) -> Texts | None:
    """--text, in tokens of the models."""
    if settings.text is None:
        return None
    folder = every[0].folders[0]
    config = identify(open_checkpoint(folder).config).text
    length = min(BLOCK, int(config["max_position_embeddings"]), 2 * settings.tokens)
    tokenizer = load_tokenizer(folder, trust_remote_code=settings.trust_remote_code)
    text = read_text(settings.text, tokenizer, int(config["vocab_size"]), length, 2 * settings.tokens)
    return from_text(text, settings.text.name)


def _texts(side: Side, first: _Answers, targets: Sequence[Target], settings: Settings) -> Texts | None:
    """The tasks' own; None where only servers are compared, or where the tasks have no text."""
    if side.runner is None or first.harvest is None or all(target.url for target in targets):
        return None
    return from_passages(first.harvest.passages, settings.tokens, side.runner.max_length)


def _compare(side: Side, kept: Kept | None, found: _Answers, stage: str, progress: Progress) -> None:
    if kept is not None and side.runner is not None:
        found.proxies = kept.compare(side.runner, _counter(progress, stage))


def _record(
    target: Target,
    names: Names,
    settings: Settings,
    ours: _Answers,
    first: _Answers | None,
    again: _Answers | None,
) -> dict[str, Any]:
    """Everything that does not depend on the time."""
    tasks: dict[str, Any] = {}
    whole, harvest = None, ours.harvest
    if harvest is not None:
        before, floor = (one.harvest if one else None for one in (first, again))
        if before is not None and before.passages and harvest.passages and before.passages != harvest.passages:
            raise EvalError(
                f"{target.text} and the baseline make other tokens of the same questions: their tokenizers differ, or "
                "their lengths; copy the tokenizer of the source into the artifact"
            )
        tasks, whole = task_results(harvest, before, floor, settings.margin)
    proxies = ours.proxies.to_json() if ours.proxies else None
    return {
        "target": names[0] | {"runtime": dict(ours.about)},
        "baseline": names[1] | {"runtime": dict(first.about)} if names[1] and first else None,
        "settings": settings.to_json(),
        "versions": versions(),
        "prompts": {name: metrics[0].prompts for name, metrics in harvest.tasks.items()} if harvest else {},
        "task_versions": dict(harvest.versions) if harvest else {},
        "truncated": dict(harvest.truncated) if harvest else {},
        "baseline_truncated": dict(first.harvest.truncated) if first and first.harvest else {},
        "notes": _notes(harvest, first.harvest if first else None, names),
        "tasks": tasks,
        "all": whole,
        "proxies": proxies,
        "floor_proxies": again.proxies.to_json() if again and again.proxies else None,
        "mean_kl": proxies["mean_kl"]["mean"] if proxies else None,
        "top1_agreement": proxies["same_top"]["mean"] if proxies else None,
        "tool_calls": None,
        "scores": _scores(harvest, first.harvest if first else None),
        "required": [],
    }


def _notes(ours: Harvest | None, before: Harvest | None, names: Names) -> list[str]:
    """What is odd about the pairing, what the harness warned of on either side, and what makes the two unequal."""
    notes = kinship(names[0], names[1]) if names[1] else []
    notes += ours.notes if ours else ()
    if ours and before:
        notes += [f"baseline: {note}" for note in before.notes if note not in notes]
        for task in ours.tasks:
            cut = before.truncated.get(task, 0), ours.truncated.get(task, 0)
            if cut[0] != cut[1]:
                notes.append(
                    f"task {task}: {cut[0]:,} requests of the baseline lost their beginning and {cut[1]:,} of the "
                    "target, so the two did not read the same: give both one --max-length"
                )
    return notes


def versions() -> dict[str, str]:
    """Of what a result depends on."""
    return {
        "phasefold": __version__,
        **{name: version(name) for name in ("lm_eval", "transformers", "torch")},
        "python": platform.python_version(),
    }


def _scores(ours: Harvest | None, before: Harvest | None) -> dict[str, Any]:
    """Every question's scores, so that a run can be judged again."""
    found: dict[str, Any] = {}
    for name, metrics in ours.tasks.items() if ours else ():
        theirs = {one.metric: one.scores.tolist() for one in before.tasks[name]} if before else {}
        found[name] = {
            one.metric: {
                "questions": list(one.questions),
                "clusters": list(one.clusters) if one.clusters else None,
                "target": one.scores.tolist(),
                "baseline": theirs.get(one.metric),
            }
            for one in metrics
        }
    return found
