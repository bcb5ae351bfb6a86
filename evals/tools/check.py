"""Is an answer's every call one of the functions that were offered, with arguments that its schema allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .answers import Answer, Call
from .requests import Request, shown, strict_json, validator

#: no call where there should be one; not written as calls are; not offered; arguments no JSON object; not the schema's
KINDS = ("no_call", "format", "unknown_tool", "not_json", "schema")


class Failure(NamedTuple):
    """kind: of `KINDS`. name: of the function, as the model wrote it."""

    kind: str
    name: str
    why: str


def failures(request: Request, answer: Answer) -> list[Failure]:
    """What is wrong with an answer that triggered: nothing makes it valid. At most one for each call."""
    if not answer.calls:
        return [Failure("no_call", "", "ended for tool calls, and holds none")]
    return [failure for call in answer.calls for failure in _call(request, call)]


def _call(request: Request, call: Call) -> Iterator[Failure]:
    name = shown(call.name)
    if call.fault is not None:
        yield Failure("format", name, shown(call.fault))
        return
    schema = request.schemas.get(call.name)
    if schema is None:
        yield Failure("unknown_tool", name, shown(f"offered were {', '.join(request.schemas)}"))
        return
    try:
        arguments = strict_json(call.arguments)
    except ValueError as error:
        yield Failure("not_json", name, shown(f"{error}: {call.arguments[:80]}"))
        return
    if not isinstance(arguments, dict):
        yield Failure("not_json", name, shown(f"no object: {call.arguments[:80]}"))
        return
    from jsonschema.exceptions import best_match

    try:
        worst = best_match(validator(schema).iter_errors(arguments))
    except RecursionError:
        yield Failure("schema", name, "nested too deeply to be checked")
        return
    if worst is not None:
        yield Failure("schema", name, shown(f"{worst.json_path}: {worst.message}"))
