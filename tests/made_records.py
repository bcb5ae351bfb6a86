"""Runs and records for tests, made from random answers by the functions that make real ones."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from phasefold.evals.proxies import proxies
from phasefold.evals.require import judge, parse
from phasefold.evals.results import task_results
from phasefold.evals.scores import Harvest, TaskScores
from phasefold.evals.tools.answers import Answer, Call
from phasefold.evals.tools.judge import judge as judge_tools
from phasefold.evals.tools.requests import Request


def task(
    name: str,
    scores: Any,
    *,
    metric: str = "acc",
    kind: str = "multiple_choice",
    upward: bool = True,
    clusters: tuple[str, ...] | None = None,
    prompts: str = "prompts",
) -> TaskScores:
    """One metric of a task, its questions numbered. scores: [n] or [n, repeats]."""
    found = np.asarray(scores, dtype=np.float64)
    found = found[:, None] if found.ndim == 1 else found
    ids = tuple(f"{name}:{number}" for number in range(len(found)))
    digest = hashlib.sha256(f"{name} {prompts}".encode()).hexdigest()
    return TaskScores(name, metric, kind, upward, found, ids, clusters, digest)


def harvest(*tasks: TaskScores, groups: dict[str, tuple[str, ...]] | None = None) -> Harvest:
    """A run; the metrics of a task stand together, the first one speaks for it."""
    by: dict[str, tuple[TaskScores, ...]] = {}
    for one in tasks:
        by[one.task] = (*by.get(one.task, ()), one)
    return Harvest(by, groups or {}, (), {name: 0 for name in by}, {name: "1.0" for name in by})


def flipped(scores: np.ndarray, lost: float, gained: float, rng: np.random.Generator) -> np.ndarray:
    """Right and wrong, of which shares flip."""
    drawn = rng.random(len(scores))
    return np.where(scores == 1, drawn >= lost / scores.mean(), drawn < gained / (1 - scores.mean())).astype(float)


def runs(sizes: dict[str, tuple[int, float, float, float]], seed: int) -> tuple[Harvest, Harvest, Harvest]:
    """Target, baseline, baseline again; sizes: task -> questions, share right, shares lost and gained."""
    rng = np.random.default_rng(seed)
    made: tuple[list[TaskScores], ...] = ([], [], [])
    for name, (n, right, lost, gained) in sizes.items():
        before = (np.random.default_rng([n, len(name)]).random(n) < right).astype(float)
        each = flipped(before, lost, gained, rng), before, flipped(before, 0.003, 0.003, rng)
        for some, scores in zip(made, each, strict=True):
            some.append(task(name, scores))
    target, baseline, again = (harvest(*some) for some in made)
    return target, baseline, again


def distributions(mean: float, seed: int, tokens: int = 4000) -> dict[str, Any]:
    """Proxies of a model that is so far off (mean KL, nats)."""
    rng = np.random.default_rng(seed)
    kl = rng.gamma(0.3, mean / 0.3, tokens)
    before = -rng.gamma(1.0, 2.0, tokens)
    after = before - rng.normal(mean, np.sqrt(2 * mean) + 1e-9, tokens)
    return proxies(kl, before, after, rng.random(tokens) > np.sqrt(mean) / 2, np.arange(tokens) // 40).to_json()


def identity(text: str, digest: str, **runtime: Any) -> dict[str, Any]:
    """A checkpoint, or with a + in its name a pair."""
    names = text.split("@")[0].split("+")
    parts = [
        {
            "name": name.rpartition("/")[2], "digest": digest * 16, "manifest": digest * 16, "architecture": "glm4_moe",
            "formats": {"bf16": 62, "f32": 3, "int4-g32": 432}, "recipe": "glm-decode-int4", "source": "5c" * 32,
            "bytes": 6_425_024,
        }
        for name in names
    ]  # fmt: skip
    kind = "pair" if len(names) == 2 else "checkpoint"
    about = {"runtime": "phasefold", "way": "memory", "dtype": "bfloat16", "batch": 8, **runtime}
    return {
        "text": text, "kind": kind, "digest": digest * 16, "parts": parts,
        "kv": "fp8_e4m3" if kind == "pair" else "bf16", "scales": None, "runtime": about,
    }  # fmt: skip


def record(
    target: Harvest,
    baseline: Harvest | None = None,
    again: Harvest | None = None,
    *,
    margin: float | None = None,
    started: str = "2026-11-30T10:40:00+00:00",
    name: str = "artifacts/glm4-g32",
    digest: str = "a1b2",
    kl: float | None = 0.02,
    required: str = "",
    tool_calls: dict[str, Any] | None = None,
    seed: int = 0,
    versions: dict[str, str] | None = None,
) -> dict[str, Any]:
    """As evaluate.py puts it together."""
    tasks, whole = task_results(target, baseline, again, margin)
    compared = distributions(kl, seed) if kl is not None and baseline else None
    made: dict[str, Any] = {
        "version": 1,
        "tool": "0.1.0",
        "started": started,
        "seconds": 123.4,
        "target": identity(name, digest),
        "baseline": identity("models/tiny-glm4", "5c5c") if baseline else None,
        "settings": {
            "tasks": list(target.tasks), "limit": None, "num_fewshot": None, "repeats": 1, "seed": 0,
            "chat_template": False, "system_instruction": None, "gen_kwargs": {}, "margin": margin, "include": [],
            "text": {"name": "the tasks' own", "digest": "77" * 32, "documents": 100, "tokens": 4000},
        },
        "versions": {"phasefold": "0.1.0", "lm_eval": "0.4.13", "transformers": "5.19.0", "torch": "2.9.1",
                     "python": "3.11.9"} | (versions or {}),
        "prompts": {task: metrics[0].prompts for task, metrics in target.tasks.items()},
        "task_versions": dict(target.versions),
        "truncated": dict(target.truncated),
        "tasks": tasks,
        "all": whole,
        "proxies": compared,
        "floor_proxies": distributions(1e-5, seed + 1) if compared and again else None,
        "mean_kl": compared["mean_kl"]["mean"] if compared else None,
        "top1_agreement": compared["same_top"]["mean"] if compared else None,
        "tool_calls": tool_calls,
        "scores": {
            task: {
                one.metric: {
                    "questions": list(one.questions),
                    "clusters": list(one.clusters) if one.clusters else None,
                    "target": one.scores.tolist(),
                    "baseline": next(x.scores.tolist() for x in baseline.tasks[task] if x.metric == one.metric)
                    if baseline
                    else None,
                }
                for one in metrics
            }
            for task, metrics in target.tasks.items()
        },
        "required": [],
        "command": f"phasefold eval {name} --tasks {','.join(target.tasks)} --baseline models/tiny-glm4",
    }  # fmt: skip
    made["required"] = judge(parse(required), made, proof=False) if required else []
    return made


#: what looks like a real run: task -> questions, share right, shares lost and gained
THREE = {
    "docstring_choice": (600, 0.71, 0.035, 0.02),
    "docstring_cloze": (600, 0.46, 0.06, 0.02),
    "needle_recall": (200, 0.83, 0.01, 0.015),
}


def tool_calls(*, baseline: bool = True, calls: float = 0.4, floor: bool = True) -> dict[str, Any]:
    """What `judge` makes of 200 requests: two models that mostly agree, some calls broken, an answer missing."""
    rng = np.random.default_rng(9)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    requests = [Request(f"r{n}", f"r{n}", n + 1, {}, {"f": schema}) for n in range(200)]
    wanted = rng.random(200) < calls

    def answers(flips: float) -> list[list[Answer]]:
        found = []
        for want in wanted != (rng.random(200) < flips):
            arguments = '{"a": "x"}' if rng.random() < 0.1 else '{"a": 1}'
            call = Answer("tool_calls", (Call("f", arguments),))
            found.append([call if want else Answer("stop", content="no")])
        found[3] = [Answer(None, error="timed out")]
        return found

    before = answers(0.0)
    found = judge_tools(requests, answers(0.05), before if baseline else None, resamples=200)
    if baseline and floor:
        found["floor"] = judge_tools(requests, answers(0.02), before, resamples=200)["f1"]
    return found
