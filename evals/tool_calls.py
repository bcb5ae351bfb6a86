"""Requests with tools put to a model of an evaluation, and what is made of its answers beside the baseline's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..families import identify
from ..formats.checkpoint import open_checkpoint
from .answers import end_tokens
from .settings import Settings
from .sides import Side
from .tools.answers import Answer
from .tools.judge import judge
from .tools.local import ask_runner
from .tools.requests import Request
from .tools.server import Server, ask_server

Answers = Sequence[Sequence[Answer]]


def ask_tools(
    side: Side, settings: Settings, requests: Sequence[Request], seed: int, advance: Callable[[int], None]
) -> list[list[Answer]]:
    """`repeats` answers to each request, by the server's chat endpoint or by the checkpoint's own template."""
    own = _fields(settings.gen_kwargs)
    if side.runner is None:
        from .server import api_key

        assert side.target.url is not None
        key = api_key(settings.key_file)
        server = Server(side.target.url, str(side.about["model"]), key, settings.timeout, extra=own)
        return ask_server(
            requests, server, repeats=settings.repeats, seed=seed, concurrency=settings.concurrency, advance=advance
        )
    family = identify(open_checkpoint(side.target.folders[0]).config).family
    asked = [replace(request, body={**request.body, **own}) for request in requests]
    ends = end_tokens(side.tokenizer)
    return ask_runner(
        asked, side.runner, side.tokenizer, family, repeats=settings.repeats, seed=seed, stops=ends, advance=advance
    )


def _fields(gen_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """--gen-kwargs in the words of OpenAI's API, above what the requests say."""
    given = dict(gen_kwargs)
    if given.pop("do_sample", True) is False:
        given["temperature"] = 0.0
    if "max_gen_toks" in given:
        given["max_tokens"] = given.pop("max_gen_toks")
    return {name: value for name, value in given.items() if name in ("temperature", "top_p", "top_k", "max_tokens")}


def judge_tools(
    requests: Sequence[Request], ours: Answers, first: Answers | None, again: Answers | None
) -> dict[str, Any]:
    """The record's "tool_calls"; floor: how far the baseline agrees with itself, where it ran again."""
    found = judge(requests, ours, first)
    if first is not None and again is not None:
        found["floor"] = judge(requests, again, first)["f1"]
    return found
