"""Asking a model of ours: the checkpoint's own chat template in front, the family's parser behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ...errors import EvalError, TextError
from ..runner import Runner, Sampling
from .answers import TRIGGERED, Answer
from .parse import Format, format_of, parse
from .requests import Request, shown

LIMIT = 4096  # tokens of an answer, where neither request nor caller say
#: fields of a body that would change the answer and that no runner heeds -> what is as if they were not there
_UNHEARD: Mapping[str, Any] = {
    "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "min_p": 0, "logit_bias": {}, "stop": [],
    "response_format": {"type": "text"},
}  # fmt: skip
_TAIL = 8  # tokens at a prompt's end that show whether it opens <think>


def ask_runner(
    requests: Sequence[Request],
    runner: Runner,
    tokenizer: Any,
    family: str,
    *,
    repeats: int = 1,
    seed: int = 0,
    limit: int | None = None,
    temperature: float | None = None,
    stops: Collection[int] = (),
    advance: Callable[[int], None] = lambda _: None,
) -> list[list[Answer]]:
    """`repeats` samples of each request. family: a `Model`'s.

    limit, temperature: above the requests' own; where nobody says, `LIMIT` tokens at temperature 1, the API's own.
    stops: tokens that end an answer, beside the tokenizer's and the family's. A prompt that fills the model has an
    answer with an error. EvalError, TextError: a format that is not known, a body that a runner cannot do.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        raise TextError("the checkpoint has no chat template, or more than one: tool calls need one that takes tools")
    known = format_of(family, template)
    ends = _ends(tokenizer, known, stops)
    prompts = [_prompt(request, tokenizer) for request in requests]
    groups: dict[tuple[Sampling, int], list[tuple[int, int]]] = {}
    found: list[list[Answer]] = [[Answer(None, error="not asked")] * repeats for _ in requests]
    for number, request in enumerate(requests):
        room = runner.max_length - len(prompts[number])
        if room < 1:
            why = f"a prompt of {len(prompts[number]):,} tokens, the model takes {runner.max_length:,} with the answer"
            found[number] = [Answer(None, error=why)] * repeats
            advance(repeats)
            continue
        sampling, most = _sampling(request, seed, temperature), limit or _limit(request)
        groups.setdefault((sampling, min(most, room)), []).extend((number, repeat) for repeat in range(repeats))
    for (sampling, most), members in groups.items():
        texts = [prompts[number] for number, _ in members]
        made = runner.generate(texts, most, sampling, lambda _, tokens: tokens[-1] in ends, advance)
        for (number, repeat), tokens in zip(members, made, strict=True):
            found[number][repeat] = _answer(requests[number], prompts[number], tokens, ends, tokenizer, known)
    return found


def _ends(tokenizer: Any, known: Format, stops: Collection[int]) -> frozenset[int]:
    vocabulary = tokenizer.get_vocab()
    named = {vocabulary[name] for name in known.stops if name in vocabulary}
    return frozenset(named | set(stops) | ({tokenizer.eos_token_id} - {None}))


def _prompt(request: Request, tokenizer: Any) -> list[int]:
    body = request.body
    where = f"line {request.line}"
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise EvalError(
            f"{where}: a tool_choice of {shown(body['tool_choice'])} needs a server that constrains what is decoded; "
            "runners know auto and none"
        )
    for name, neutral in _UNHEARD.items():
        if body.get(name) not in (None, neutral):
            raise EvalError(f"{where}: {name} is not known to runners; leave it out, or ask a server")
    tools = None if body.get("tool_choice") == "none" else body["tools"]
    settings = body.get("chat_template_kwargs") or {}
    try:
        tokens = tokenizer.apply_chat_template(
            [_message(message) for message in body["messages"]],
            tools=tools,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **settings,
        )
    except Exception as error:  # a template is a program: it can fail in any way
        raise TextError(f"{where}: the chat template does not take these messages ({shown(error)})") from None
    return list(tokens)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """With the arguments of its calls as objects, which is how templates want them; the API has them as text."""
    made = dict(message)
    calls = made.get("tool_calls")
    if isinstance(calls, list):
        made["tool_calls"] = [_opened(call) for call in calls]
    return made


def _opened(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):  # what a model wrote in an earlier turn: the template may take it as text
        return call
    return call | {"function": function | {"arguments": arguments}}


def _sampling(request: Request, seed: int, temperature: float | None) -> Sampling:
    """As the request says, 1.0 being what the API takes where nothing is said."""
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    for name in values:
        given = request.body.get(name)
        if given is not None and (not isinstance(given, int | float) or isinstance(given, bool)):
            raise TextError(f"line {request.line}: a {name} of {shown(given)}; expected a number")
        values[name] = values[name] if given is None else given
    if temperature is not None:
        values["temperature"] = temperature
    top_k = max(int(values["top_k"]), 0)  # vLLM's -1 is all of them
    return Sampling(float(values["temperature"]), float(values["top_p"]), top_k, seed)


def _limit(request: Request) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        given = request.body.get(name)
        if given is None:
            continue
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            raise TextError(f"line {request.line}: {name} of {shown(given)}; expected a whole number from 1 on")
        return given
    return LIMIT


def _answer(
    request: Request, prompt: list[int], tokens: list[int], ends: frozenset[int], tokenizer: Any, known: Format
) -> Answer:
    ended = bool(tokens) and tokens[-1] in ends
    text = _decode(tokenizer, tokens[:-1] if ended else tokens)
    opened = _decode(tokenizer, prompt[-_TAIL:]).rstrip().endswith("<think>")
    content, calls = parse(text, known, request.schemas, reasoning=opened)
    finish = TRIGGERED if calls else "stop" if ended else "length"
    return Answer(finish, tuple(calls), content)


def _decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    text: str = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
