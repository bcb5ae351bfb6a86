"""What came back for a request, and the files that keep it: ours, and the results of Moonshot's K2 vendor verifier."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import EvalError, TextError
from ...quantize.output import atomic_write
from .requests import Request, digest_of, rows, shown

TRIGGERED = "tool_calls"


class Call(NamedTuple):
    """arguments: as they were written, mostly JSON. fault: what is wrong with how the call itself was written."""

    name: str
    arguments: str
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """finish: "tool_calls", "stop", "length" or what else a server says. error: why there is none, after retries."""

    finish: str | None
    calls: tuple[Call, ...] = ()
    content: str | None = None
    error: str | None = None

    @property
    def triggered(self) -> bool:
        """The model called tools, by its finish reason, as the vendor verifier counts."""
        return self.finish == TRIGGERED


def from_response(response: Mapping[str, Any]) -> Answer:
    """A chat completion -> the answer in its first choice. ValueError where it is no chat completion."""
    choices = response.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, Mapping) or not isinstance(choice.get("message"), Mapping):
        raise ValueError("no chat completion: it has no choices with a message")
    message, finish = choice["message"], choice.get("finish_reason")
    if finish is not None and not isinstance(finish, str):
        raise ValueError(f"no chat completion: a finish_reason of {finish!r}")
    content = message.get("content")
    return Answer(finish, _calls(message.get("tool_calls")), content if isinstance(content, str) else None)


def _calls(given: Any) -> tuple[Call, ...]:
    if given is None:
        return ()
    if not isinstance(given, list):
        raise ValueError(f"no chat completion: tool_calls are {type(given).__name__}")
    found = []
    for one in given:
        function = one.get("function") if isinstance(one, Mapping) else None
        if not isinstance(function, Mapping):
            found.append(Call("", "", "the call names no function"))
            continue
        name, arguments = function.get("name"), function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        found.append(Call(name if isinstance(name, str) else "", "" if arguments is None else text))
    return tuple(found)


def write_answers(path: Path, requests: Sequence[Request], answers: Sequence[Sequence[Answer]]) -> None:
    """JSON Lines, one for each sample of each request; there whole or not at all. EvalError where it cannot be."""
    lines = []
    for request, some in zip(requests, answers, strict=True):
        for repeat, answer in enumerate(some):
            row: dict[str, Any] = {"id": request.id, "line": request.line, "repeat": repeat}
            row |= {"finish_reason": answer.finish, "tool_calls": [call._asdict() for call in answer.calls]}
            lines.append(json.dumps(row | {"content": answer.content, "error": answer.error}))
    try:
        atomic_write(path, ("\n".join(lines) + "\n").encode())
    except OSError as error:
        raise EvalError(f"{path}: cannot be written ({error.strerror}); give another place for the answers") from None


def read_answers(path: Path, requests: Sequence[Request]) -> list[list[Answer]]:
    """The answers to each request, none where the file has none; what it has of other requests is passed over.

    Ours are paired by id, the vendor verifier's by what was asked; where the same is asked several times, in turn by
    data_index. Of one data_index the last row stands, for that is how it goes on after failures. TextError: a row that
    is neither, or not one request in common.
    """
    ours, theirs = dict[str, dict[int, Answer]](), dict[str, dict[int, Answer]]()
    for line, row in rows(path):
        where = f"{path}: line {line}"
        try:
            if "response" in row:
                name = digest_of(_object(row, "request"), where)
                theirs.setdefault(name, {})[_whole(row.get("data_index", line))] = _verified(row)
            else:
                ours.setdefault(_text(row, "id"), {})[_whole(row.get("repeat"))] = _kept(row)
        except ValueError as error:
            raise TextError(f"{where}: {error}; expected our own answers, or results of the vendor verifier") from None
    same, turn = Counter(request.digest for request in requests), Counter[str]()
    found = list[list[Answer]]()
    for request in requests:
        mine, shared = _in_order(ours.get(request.id, {})), _in_order(theirs.get(request.digest, {}))
        found.append(mine + shared[turn[request.digest] :: same[request.digest]])
        turn[request.digest] += 1
    if not any(found):
        raise TextError(f"{path}: answers none of these requests; expected the results of the same file of requests")
    return found


def _in_order(some: Mapping[int, Answer]) -> list[Answer]:
    return [some[place] for place in sorted(some)]


def _verified(row: Mapping[str, Any]) -> Answer:
    """A row of the vendor verifier's results."""
    response = _object(row, "response") if row["response"] is not None else {}
    if row.get("status", "success") == "success" and response.get("choices"):
        return from_response(response)
    return Answer(None, error=shown(response.get("error") or f"status {row.get('status')}"))


def _kept(row: Mapping[str, Any]) -> Answer:
    """A row of ours."""
    if row.get("error") is not None:
        return Answer(None, error=_text(row, "error"))
    calls = row.get("tool_calls")
    if not isinstance(calls, list):
        raise ValueError("has no list of tool_calls")
    found = []
    for call in calls:
        if not isinstance(call, dict):
            raise ValueError("a call is no object")
        fault = _text(call, "fault") if call.get("fault") is not None else None
        found.append(Call(_text(call, "name"), _text(call, "arguments"), fault))
    finish, content = (_text(row, name) if row.get(name) is not None else None for name in ("finish_reason", "content"))
    return Answer(finish, tuple(found), content)


def _object(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = row.get(name)
    if not isinstance(value, dict):
        raise ValueError(f"its {name} is {type(value).__name__}, no object")
    return value


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise ValueError(f"its {name} is {type(value).__name__}, no text")
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError(f"{value!r} is no whole number")
    return value
