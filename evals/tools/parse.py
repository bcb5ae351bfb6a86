"""The calls in a model's text, as each family writes them. Markers are special tokens: decode with them in.

Kimi K2:   <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{JSON}
           <|tool_call_end|> ... <|tool_calls_section_end|>
GLM 4.5+:  <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value> ... </tool_call>, a call each

What vLLM's parsers give to a client is given here: calls within reasoning count, text behind Kimi's section does not,
values of GLM's get the type that the function's schema allows. What they pass over in silence is a call with a fault
here, for it is the model's: a call of a function that was not offered, without a name, or cut short. And Kimi's JSON
stays as it was written, where vLLM mends its types.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import EvalError
from .answers import Call
from .requests import strict_json

Schemas = Mapping[str, Mapping[str, Any]]

_SECTION = "<|tool_calls_section_begin|>"
_KIMI = re.compile(
    r"<\|tool_call_begin\|>(?P<head>.*?)"
    r"(?:<\|tool_call_argument_begin\|>(?P<arguments>.*?)(?P<end><\|tool_call_end\|>|<\|tool_calls_section_end\|>|\Z)"
    r"|(?=<\|tool_call)|\Z)",
    re.DOTALL,
)
_KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>[^:\n]+):(?:[^\n]*:)?\d")
_GLM = re.compile(
    r"<tool_call>(?P<name>(?:(?!<arg_key>|</tool_call>).)*)(?P<arguments>.*?)(?P<end></tool_call>|\Z)", re.DOTALL
)
_PAIR = re.compile(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.DOTALL)
_CUT = "the call has no end"
_THINK, _THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Format:
    """marker: a chat template that knows the format has it. stops: tokens that end an answer, where they exist."""

    marker: str
    stops: tuple[str, ...]
    split: Callable[[str, Schemas], tuple[str, list[Call]]]


def format_of(family: str, template: str) -> Format:
    """EvalError where the family's format is not known, or the chat template does not write it."""
    found = FORMATS.get(family)
    if found is None:
        raise EvalError(f"family {family}: its format of tool calls is not known; known are {', '.join(FORMATS)}")
    if found.marker not in template:
        raise EvalError(
            f"the chat template does not write tool calls with {found.marker}, as is known of family {family}: ask a "
            "server that has a parser for it"
        )
    return found


def parse(text: str, known: Format, schemas: Schemas, *, reasoning: bool = False) -> tuple[str | None, list[Call]]:
    """What a model wrote -> content without reasoning and calls, and the calls.

    reasoning: the prompt has opened <think>. A call ends it, as the end of the text does.
    """
    outside, calls = known.split(text, schemas)
    content = _without_reasoning(outside, reasoning).strip()
    return content or None, calls


def _without_reasoning(text: str, reasoning: bool) -> str:
    kept = []
    while text:
        before, found, text = text.partition(_THOUGHT if reasoning else _THINK)
        if not reasoning:
            kept.append(before)
        reasoning = not reasoning if found else reasoning
    return "".join(kept).replace(_THOUGHT, "")


def _kimi(text: str, schemas: Schemas) -> tuple[str, list[Call]]:
    outside, _, section = text.partition(_SECTION)
    calls = []
    for found in _KIMI.finditer(section):
        head = found["head"].strip()
        named = _KIMI_ID.match(head)
        fault = None
        if named is None or found["arguments"] is None:
            fault = f"its head is {head[:80]!r}; expected functions.NAME:NUMBER, then <|tool_call_argument_begin|>"
        elif not found["end"]:
            fault = _CUT
        calls.append(Call(named["name"] if named else head, (found["arguments"] or "").strip() or "{}", fault))
    return outside, calls


def _glm(text: str, schemas: Schemas) -> tuple[str, list[Call]]:
    calls = []
    for found in _GLM.finditer(text):
        name = found["name"].strip()
        properties = schemas.get(name, {}).get("properties")
        arguments = dict[str, Any]()
        for pair in _PAIR.finditer(found["arguments"]):
            key = pair["key"].strip()
            of = properties.get(key) if isinstance(properties, Mapping) else None
            arguments[key] = _typed(pair["value"], _types(of))
        fault = None if found["end"] else _CUT
        if not _only_pairs(found["arguments"]):
            fault = fault or "its arguments are not pairs of <arg_key> and <arg_value>"
        calls.append(Call(name, json.dumps(arguments, ensure_ascii=False), fault))
    return _GLM.sub(_THOUGHT, text), calls


def _only_pairs(arguments: str) -> bool:
    return not _PAIR.sub("", arguments).strip()


def _types(schema: Any) -> set[str]:
    """The types that a property may have: what it and its alternatives say; a string, where nothing is said."""
    found = set[str]()
    if isinstance(schema, Mapping):
        said = schema.get("type")
        found.update([said] if isinstance(said, str) else [one for one in said or () if isinstance(one, str)])
        found.update(_TYPES[type(one)] for one in schema.get("enum") or () if type(one) in _TYPES)
        for name in ("anyOf", "oneOf", "allOf"):
            for one in schema.get(name) or ():
                found |= _types(one)
    return found or {"string"}


_TYPES = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"
}  # fmt: skip


def _typed(value: str, types: set[str]) -> Any:
    """The value as the first type it can be read as: null, integer, number, boolean, object or array, then text.

    Where it may be no text, any JSON; text only if it is none.
    """
    low = value.lower().strip()
    if "null" in types and value.lower() == "null":
        return None
    for name, read in (("integer", int), ("number", _number)):
        if name in types:
            try:
                return read(value)
            except ValueError:
                pass
    if "boolean" in types and low in ("true", "1", "false", "0"):
        return low in ("true", "1")
    if types & {"object", "array"} or "string" not in types:
        try:
            return _finite(strict_json(value))
        except ValueError:
            pass
    return value


def _number(value: str) -> int | float:
    found = float(value)
    if not math.isfinite(found):
        raise ValueError("no number in JSON")
    return int(found) if found == int(found) else found


def _finite(value: Any) -> Any:
    json.dumps(value, allow_nan=False)  # 1e999 is read as infinity
    return value


FORMATS = {
    "kimi": Format(_SECTION, ("<|im_end|>", "[EOS]"), _kimi),
    "glm": Format("<tool_call>", ("<|user|>", "<|observation|>", "<|endoftext|>"), _glm),
}
