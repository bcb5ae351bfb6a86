"""A file of requests that offer tools: JSON Lines, each line a body of OpenAI's chat completions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from ...errors import EvalError, TextError

#: a function without parameters takes an object, whatever is in it
ANYTHING: Mapping[str, Any] = {"type": "object"}
#: which model is asked, how it is sampled and how the answer is sent: not part of what is asked
ASIDE = frozenset(
    "model stream stream_options user seed n temperature top_p top_k min_p max_tokens max_completion_tokens "
    "frequency_penalty presence_penalty repetition_penalty logprobs top_logprobs logit_bias stop".split()
)
_LONG = 160  # characters of others' words in a message


@dataclass(frozen=True, slots=True)
class Request:
    """line: in the file, from 1. digest: sha256 of what is asked, `ASIDE` left out. id: the digest, with #2 and so on
    for the same asked again. body: as it is sent. schemas: of each function's arguments, by the function's name.
    """

    id: str
    digest: str
    line: int
    body: Mapping[str, Any]
    schemas: Mapping[str, Mapping[str, Any]]


def read_requests(path: Path, limit: int | None = None) -> list[Request]:
    """The first `limit` requests, or all. TextError with the line where one cannot be asked or its calls be judged."""
    found, seen = list[Request](), dict[str, int]()
    for line, row in rows(path):
        if limit is not None and len(found) == limit:
            break
        where = f"{path}: line {line}"
        body = asked(row)
        digest = digest_of(body, where)
        seen[digest] = seen.get(digest, 0) + 1
        name = digest if seen[digest] == 1 else f"{digest}#{seen[digest]}"
        found.append(Request(name, digest, line, body, _checked(body, where)))
    if not found:
        raise TextError(f"{path}: holds no request; expected a line of JSON for each, with messages and tools")
    return found


def rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON Lines file, each with its line. Empty lines are passed over. TextError."""
    try:
        with open(path, "rb") as file:
            for line, content in enumerate(file, 1):
                if content.strip():
                    yield line, _object(content, f"{path}: line {line}", line == 1)
    except OSError as error:
        raise TextError(f"{path}: cannot be read ({error.strerror})") from None


def strict_json(text: str) -> Any:
    """As RFC 8259 has it: no NaN, no Infinity. ValueError, also for what is nested too deeply."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def _object(content: bytes, where: str, first: bool) -> dict[str, Any]:
    try:
        row = strict_json(content.decode("utf-8-sig" if first else "utf-8"))
    except UnicodeDecodeError as error:
        raise TextError(f"{where}: not UTF-8 (byte {error.start}); convert it first") from None
    except ValueError as error:
        raise TextError(f"{where}: not valid JSON ({error}); expected an object in one line") from None
    if not isinstance(row, dict):
        raise TextError(f"{where}: expected an object, found {type(row).__name__}")
    return row


def asked(row: Mapping[str, Any]) -> dict[str, Any]:
    """A body as it is sent: the role `_input`, which Moonshot's samples have, is the system's."""
    messages = row.get("messages")
    if not isinstance(messages, list):
        return dict(row)
    system = {"role": "system"}
    return dict(row) | {
        "messages": [one | system if isinstance(one, dict) and one.get("role") == "_input" else one for one in messages]
    }


def digest_of(body: Mapping[str, Any], where: str) -> str:
    """Sha256 of what is asked, the order of keys without meaning."""
    kept = {name: value for name, value in body.items() if name not in ASIDE and value is not None}
    text = json.dumps(kept, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    try:
        return hashlib.sha256(text.encode()).hexdigest()
    except UnicodeEncodeError:
        raise TextError(f"{where}: holds half a surrogate pair, which is no text; mend it") from None


def _checked(body: Mapping[str, Any], where: str) -> dict[str, Mapping[str, Any]]:
    """The schemas. TextError where messages or tools are not what the API takes."""
    messages, tools = body.get("messages"), body.get("tools")
    if not isinstance(messages, list) or not messages:
        raise TextError(f"{where}: has no messages; expected a list of them, as OpenAI's chat API takes it")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TextError(f"{where}: message {number} has no role; expected an object with role and content")
    if body.get("n") not in (None, 1):
        raise TextError(f"{where}: asks for n = {body['n']} answers in one; leave n out and use --repeats")
    if not isinstance(tools, list) or not tools:
        raise TextError(f"{where}: offers no tools; leave the line out, there is no call to judge")
    schemas = dict[str, Mapping[str, Any]]()
    for number, tool in enumerate(tools, 1):
        which = f"{where}: tool {number}"
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise TextError(f'{which}: expected {{"type": "function", "function": {{"name": ...}}}}')
        name = function.get("name")
        if not isinstance(name, str) or not name.strip():
            raise TextError(f"{which}: has no name")
        if name in schemas:
            raise TextError(f"{which}: is named {name!r}, as another one is: a call cannot be told apart; rename one")
        schemas[name] = _schema(function.get("parameters"), f"{which} ({name})")
    return schemas


def _schema(given: Any, which: str) -> Mapping[str, Any]:
    if given is None or given == {}:
        return ANYTHING
    if not isinstance(given, dict):
        raise TextError(f"{which}: parameters are {type(given).__name__}; expected a JSON Schema, an object")
    try:
        validator(given)
    except EvalError:
        raise
    except ValueError as error:
        raise TextError(f"{which}: parameters are no valid JSON Schema: {shown(error)}") from None
    return given


def validator(schema: Mapping[str, Any]) -> Any:
    """jsonschema's, of the draft that the schema names, 2020-12 where it names none that is known. Nothing is fetched.

    ValueError where the schema is none, or refers to what is not in it. EvalError where jsonschema is not installed.
    """
    return _validator(json.dumps(schema))  # requests share tools, and to check a schema takes milliseconds


@lru_cache(1 << 12)
def _validator(text: str) -> Any:
    schema = json.loads(text)
    try:
        import jsonschema
        import referencing.jsonschema
        from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise EvalError(
            f"tool calls need {error.name}, which is not installed: pip install 'phasefold[evals]'"
        ) from None
    try:
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        kind.check_schema(schema)
        dialect = referencing.jsonschema.specification_with(kind.META_SCHEMA.get("$schema", ""))
        resource = dialect.create_resource(schema)
        base = resource.id() or ""
        resolver = REGISTRY.with_resource(base, resource).crawl().resolver(base)
        _resolve(resource, resolver)
        made = kind(schema, registry=REGISTRY)
        made.is_valid({})  # a reference that leads to itself shows here
    except RecursionError:
        raise ValueError("it is nested too deeply, or a $ref leads back to itself") from None
    except jsonschema.SchemaError as error:
        raise ValueError(f"{error.json_path}: {error.message}") from None
    except referencing.exceptions.Unresolvable as error:
        raise ValueError(
            f"$ref {error.ref!r} leads to nothing in it, and nothing is fetched: put it into $defs"
        ) from None
    except Exception as error:  # a broken $schema or $id can fail anywhere in jsonschema and in re
        raise ValueError(f"{type(error).__name__}: {error}") from None
    return made


def _resolve(resource: Any, resolver: Any) -> None:
    """Look up every reference, wherever a schema can be."""
    from referencing.exceptions import Unresolvable

    contents = resource.contents
    for name in ("$ref", "$dynamicRef", "$recursiveRef"):
        if isinstance(contents, dict) and isinstance(contents.get(name), str):
            try:
                resolver.lookup(contents[name])
            except Unresolvable:
                raise ValueError(
                    f"{name} {shown(contents[name])!r} leads to nothing in it, and nothing is fetched: fill $defs"
                ) from None
    for part in resource.subresources():
        _resolve(part, resolver.in_subresource(part))


def shown(error: object) -> str:
    """Others' words in one line, not too long."""
    words = " ".join(str(error).split())
    return words if len(words) <= _LONG else words[: _LONG - 3] + "..."
