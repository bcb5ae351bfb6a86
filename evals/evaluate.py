"""An evaluation from end to end: baseline, baseline again, target; what their answers are worth; the record of it.

One model is in memory at a time. The baseline runs twice, the second time in other batches and with other seeds: what
differs then is noise, and stands beside what the target makes different.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from .. import __version__
from ..calib.text import read_text
from ..errors import EvalError, UsageError
from ..families import identify
from ..formats.checkpoint import open_checkpoint
from .answers import end_tokens
from .harness import check_tasks, run_tasks
from .identity import identity
from .model import PhasefoldLM
from .opening import open_target
from .results import task_results
from .same_text import Kept, Texts, from_passages, from_text
from .scores import Harvest
from .settings import Settings
from .target import Target
from .tools.answers import Answer
from .tools.judge import judge as judge_tools
from .tools.local import ask_runner
from .tools.requests import Request, read_requests
from .tools.server import Server, ask_server

VERSION = 1
#: tokens of a block of --text
BLOCK = 512
#: told what is going on, and how many requests are done since the last call
Progress = Callable[[str, int], None]
#: given the names of tasks and groups, before any model is opened
Ready = Callable[[Sequence[str]], None]


@dataclass(frozen=True, slots=True)
class _Side:
    """A model that is ready: lm-eval's side of it, and ours, which is None of a server."""

    target: Target
    lm: Any
    runner: Any
    tokenizer: Any
    about: Mapping[str, Any]


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
    settings = replace(settings, metadata=_metadata([*([baseline] if baseline else []), *targets], settings))
    requests = read_requests(settings.requests) if settings.requests else None
    ready(_names(settings))
    first = again = kept = None
    with contextlib.ExitStack() as held:
        if baseline is not None:
            with _opened(baseline, settings, settings.batch) as side:
                first = _ask(side, settings, requests, settings.seed, "baseline", progress)
                if texts := _texts(side, first, targets, settings):
                    told = _counter(progress, "baseline: the text")
                    kept = Kept(side.runner, texts, settings.memory // 4, settings.work, told)
                    held.callback(kept.close)
            if settings.floor:
                # other batches, other seeds: whatever the numbers are made of besides the weights
                with _opened(baseline, settings, settings.batch // 2 or 2) as side:
                    seed = settings.seed + settings.repeats
                    again = _ask(side, settings, requests, seed, "baseline again", progress)
                    _compare(side, kept, again, "baseline again: the text", progress)
        for target in targets:
            begun, started = time.monotonic(), datetime.now(UTC)
            with _opened(target, settings, settings.batch) as side:
                ours = _ask(side, settings, requests, settings.seed, target.text, progress)
                _compare(side, kept, ours, f"{target.text}: the text", progress)
            record = _record(target, baseline, settings, ours, first, again)
            record["settings"]["text"] = kept.texts.to_json() if kept else None
            if requests is not None:
                record["tool_calls"] = judge_tools(requests, ours.tools, first.tools if first else None)
            took = {"started": started.isoformat(timespec="seconds"), "seconds": round(time.monotonic() - begun, 1)}
            yield {"version": VERSION, "tool": __version__} | took | record


def _names(settings: Settings) -> list[str]:
    """Of tasks and groups; whatever is wrong about them is told here."""
    if not settings.tasks:
        return []
    asked = check_tasks(
        settings.tasks, include=settings.include, num_fewshot=settings.num_fewshot, repeats=settings.repeats,
        gen_kwargs=settings.gen_kwargs, metadata=settings.metadata,
    )  # fmt: skip
    return [*asked.tasks, *asked.groups]


def _metadata(every: Sequence[Target], settings: Settings) -> dict[str, Any]:
    """What tasks that generate their questions are told: the same for all models, or the questions would differ."""
    folder = settings.tokenizer or next((target.folders[0] for target in every if target.folders), None)
    return ({"tokenizer": str(folder)} if folder else {}) | dict(settings.metadata)


def _check(targets: Sequence[Target], baseline: Target | None, settings: Settings) -> None:
    """UsageError for what makes no sense, before anything is opened."""
    if not (settings.tasks or settings.requests or settings.text):
        raise UsageError("nothing to evaluate on: give --tasks, --tool-calls or --text")
    servers = [one.text for one in (*targets, baseline) if one is not None and one.url]
    if settings.text and (baseline is None or servers):
        why = f"{servers[0]} is a server, which gives no distributions" if servers else "give --baseline as well"
        raise UsageError(f"--text {settings.text}: compares two models' distributions of its tokens; {why}")


@contextlib.contextmanager
def _opened(target: Target, settings: Settings, batch: int) -> Iterator[_Side]:
    if target.url is not None:
        from .server import server_identity, server_lm

        about = server_identity(target.url, settings.served_model)
        lm = server_lm(
            target.url, model=settings.served_model, tokenizer=settings.tokenizer, chat=settings.chat,
            concurrency=settings.concurrency, timeout=settings.timeout, seed=settings.seed,
        )  # fmt: skip
        yield _Side(target, lm, None, None, about)
        return
    runner, tokenizer = open_target(
        target.text, dtype=settings.dtype, batch_size=batch, memory=settings.memory, device=settings.device,
        way=settings.way, work=settings.work, trust_remote_code=settings.trust_remote_code,
    )  # fmt: skip
    try:
        yield _Side(target, PhasefoldLM(runner=runner, tokenizer=tokenizer), runner, tokenizer, runner.about)
    finally:
        runner.close()


def _ask(side: _Side, settings: Settings, requests: Any, seed: int, who: str, progress: Progress) -> _Answers:
    """Put everything but the text to one model."""
    found = _Answers(side.about)
    if requests is not None:
        found.tools = _ask_tools(side, settings, requests, seed, _counter(progress, f"{who}: tool calls"))
    if settings.tasks:
        found.harvest = run_tasks(
            side.lm, settings.tasks, include=settings.include, limit=settings.limit,
            num_fewshot=settings.num_fewshot, chat_template=settings.chat_template,
            system_instruction=settings.system_instruction, repeats=settings.repeats, seed=seed,
            gen_kwargs=settings.gen_kwargs, metadata=settings.metadata, advance=_counter(progress, f"{who}: tasks"),
        )  # fmt: skip
    return found


def _ask_tools(
    side: _Side, settings: Settings, requests: Sequence[Request], seed: int, advance: Callable[[int], None]
) -> list[list[Answer]]:
    if side.runner is None:
        assert side.target.url is not None
        own = {name: settings.gen_kwargs[name] for name in ("temperature", "top_p") if name in settings.gen_kwargs}
        key = os.environ.get("OPENAI_API_KEY")  # as lm-eval's client has it
        server = Server(side.target.url, str(side.about["model"]), key, settings.timeout, extra=own)
        return ask_server(
            requests, server, repeats=settings.repeats, seed=seed, concurrency=settings.concurrency, advance=advance
        )
    family = identify(open_checkpoint(side.target.folders[0]).config).family
    return ask_runner(
        requests, side.runner, side.tokenizer, family, repeats=settings.repeats, seed=seed,
        temperature=settings.gen_kwargs.get("temperature"), stops=end_tokens(side.tokenizer), advance=advance,
    )  # fmt: skip


def _counter(progress: Progress, stage: str) -> Callable[[int], None]:
    progress(stage, 0)
    return lambda done: progress(stage, done)


def _texts(side: _Side, first: _Answers, targets: Sequence[Target], settings: Settings) -> Texts | None:
    """What KL is measured on; None where only servers are compared, or where the tasks have no text."""
    if side.runner is None or all(target.url for target in targets):
        return None
    longest = side.runner.max_length
    if settings.text is None:
        return from_passages(first.harvest.passages, settings.tokens, longest) if first.harvest else None
    length = min(BLOCK, longest)
    text = read_text(settings.text, side.tokenizer, side.runner.vocabulary, length, 2 * settings.tokens)
    return from_text(text, settings.text.name)


def _compare(side: _Side, kept: Kept | None, found: _Answers, stage: str, progress: Progress) -> None:
    if kept is not None and side.runner is not None:
        found.proxies = kept.compare(side.runner, _counter(progress, stage))


def _record(
    target: Target,
    baseline: Target | None,
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
        "target": identity(target, ours.about),
        "baseline": identity(baseline, first.about) if baseline and first else None,
        "settings": settings.to_json(),
        "versions": versions(),
        "prompts": {name: metrics[0].prompts for name, metrics in harvest.tasks.items()} if harvest else {},
        "task_versions": dict(harvest.versions) if harvest else {},
        "truncated": dict(harvest.truncated) if harvest else {},
        "notes": list(harvest.notes) if harvest else [],
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
