"""Tool calls: what is asked, what came back, which calls are good, and what the numbers of them are worth."""

import errno
import json
import math
import os
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from sklearn.metrics import precision_recall_fscore_support

from phasefold.errors import EvalError, TextError
from phasefold.evals.flips import mcnemar
from phasefold.evals.statistics import paired_difference
from phasefold.evals.tools.answers import Answer, Call, read_answers, write_answers
from phasefold.evals.tools.check import failures
from phasefold.evals.tools.judge import judge, rejudge
from phasefold.evals.tools.parse import FORMATS, format_of, parse
from phasefold.evals.tools.requests import Request, read_requests

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 2},
        "days": {"type": "integer"},
        "warm": {"type": "boolean"},
        "limit": {"type": ["number", "null"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "at": {"$ref": "#/$defs/place"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "required": ["lat"], "properties": {"lat": {"type": "number"}}}},
}


def tool(name: str = "get_weather", parameters: Any = WEATHER) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def body(text: str = "How warm is it in Oslo?", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "tools": [tool(), tool("stop", None)]} | fields


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def made(path: Path, count: int, same: int = 1) -> list[Request]:
    """So many requests, each `same` times in the file."""
    return read_requests(write(path / "requests.jsonl", *(body(f"{number // same}") for number in range(count))))


def calls(arguments: Any, name: str = "get_weather", finish: str = "tool_calls") -> Answer:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return Answer(finish, (Call(name, text),))


GOOD, BAD, NONE = calls({"city": "Oslo"}), calls({"city": 7}), Answer("stop", content="hello")
LOST = Answer(None, error="HTTP 500")


# --- requests


def test_a_request_is_known_by_what_it_asks(tmp_path: Path) -> None:
    again = {key: body()[key] for key in reversed(body())}
    rows = [
        body(temperature=1.0, max_tokens=5, model="a", stream=True),
        "",
        again,
        body("other"),
        body(seed=3, tool_choice=None),
    ]
    found = read_requests(write(tmp_path / "r.jsonl", *rows))
    first = found[0].digest
    assert [one.id for one in found] == [first, f"{first}#2", found[2].digest, f"{first}#3"]
    assert [one.line for one in found] == [1, 3, 4, 5]
    assert found[2].digest != first
    assert found[0].body["stream"] and found[0].schemas == {"get_weather": WEATHER, "stop": {"type": "object"}}
    assert [one.line for one in read_requests(tmp_path / "r.jsonl", 2)] == [1, 3]
    others = [body(tools=[tool()]), body(tool_choice="required"), body(chat_template_kwargs={"thinking": False})]
    assert len({one.digest for one in read_requests(write(tmp_path / "o.jsonl", body(), *others))}) == 4


def test_moonshots_own_role_is_the_systems(tmp_path: Path) -> None:
    rows = [body(messages=[{"role": role, "content": "be kind"}]) for role in ("_input", "system")]
    one, two = read_requests(write(tmp_path / "r.jsonl", *rows))
    assert one.body == two.body and one.digest == two.digest


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("[1]", "expected an object, found list"),
        ("{", "not valid JSON"),
        ('{"messages": NaN}', "NaN is no number"),
        ("[" * 100_000, "not valid JSON"),
        ({"tools": [tool()]}, "has no messages"),
        (body(messages=[{"content": "x"}]), "message 1 has no role"),
        (body(messages=[{"role": "user", "content": "\ud800"}]), "half a surrogate"),
        (body(n=2), "n = 2 answers in one; leave n out and use --repeats"),
        (body(tools=None), "offers no tools"),
        (body(tools=[]), "offers no tools"),
        (body(tools=[{"type": "builtin_function", "function": {"name": "x"}}]), 'tool 1: expected {"type": "function"'),
        (body(tools=["x"]), "tool 1: expected"),
        (body(tools=[tool(), tool("")]), "tool 2: has no name"),
        (body(tools=[tool(), tool()]), "tool 2: is named 'get_weather', as another one is"),
        (body(tools=[tool(parameters=[])]), "parameters are list; expected a JSON Schema"),
        (body(tools=[tool(parameters={"type": "strin"})]), "no valid JSON Schema: $.type: 'strin' is not valid"),
        (body(tools=[tool(parameters={"properties": {"a": {"pattern": "("}}})]), "no valid JSON Schema"),
        (body(tools=[tool(parameters={"$schema": 5})]), "no valid JSON Schema"),
        (body(tools=[tool(parameters={"$ref": "#"})]), "a $ref leads back to itself"),
        (body(tools=[tool(parameters={"properties": {"a": {"$ref": "#/$defs/no"}}})]), "'#/$defs/no' leads to nothing"),
        (body(tools=[tool(parameters={"items": {"$ref": "http://127.0.0.1:9/x.json"}})]), "nothing is fetched"),
    ],
)
def test_a_line_that_cannot_be_asked_is_refused(tmp_path: Path, row: Any, why: str) -> None:
    path = write(tmp_path / "r.jsonl", body(), row)
    with pytest.raises(TextError) as told:
        read_requests(path)
    assert str(told.value).startswith(f"{path}: line 2: ") and why in str(told.value) and "\n" not in str(told.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"cannot be read \(No such file"):
        read_requests(tmp_path / "none")
    with pytest.raises(TextError, match="holds no request"):
        read_requests(write(tmp_path / "empty.jsonl", "", " "))
    (tmp_path / "latin").write_bytes(b"\xff\xfe{}\n")
    with pytest.raises(TextError, match=r"line 1: not UTF-8 \(byte 0\)"):
        read_requests(tmp_path / "latin")
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbf" + json.dumps(body()).encode())
    assert len(read_requests(tmp_path / "marked")) == 1


# --- answers


def test_answers_are_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    asked = made(tmp_path, 3, same=3)
    odd = Answer("tool_calls", (Call("ü", '{"a": "\u2028'), Call("", "", "no name")), "😀 text\n")
    answers = [[odd, GOOD], [LOST], [NONE, BAD, Answer("length"), Answer(None)]]
    write_answers(tmp_path / "a.jsonl", asked, answers)
    assert read_answers(tmp_path / "a.jsonl", asked) == answers
    assert read_answers(tmp_path / "a.jsonl", asked[1:]) == answers[1:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "requests.jsonl"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(EvalError, match=r"a\.jsonl: cannot be written \(No space"):
            write_answers(tmp_path / "a.jsonl", asked, answers[::-1])
    assert read_answers(tmp_path / "a.jsonl", asked) == answers
    with pytest.raises(EvalError, match="cannot be written"):
        write_answers(tmp_path / "no" / "a.jsonl", asked, answers)
    with pytest.raises(TextError, match="answers none of these requests"):
        read_answers(tmp_path / "a.jsonl", [read_requests(write(tmp_path / "x.jsonl", body("new")))[0]])


def result(text: str, index: int, message: Any, finish: str = "tool_calls", **fields: Any) -> dict[str, Any]:
    """A row as the vendor verifier writes it."""
    request = body(text, model="kimi-k2", temperature=0.6, stream=False)
    response = {"id": "x", "choices": [{"index": 0, "message": message, "finish_reason": finish}]}
    about = {"finish_reason": finish, "tool_calls_valid": True, "duration_ms": 3, "hash": "0" * 32, "status": "success"}
    return {"data_index": index, "request": request, "response": response} | about | fields


def test_the_vendor_verifiers_results_are_a_baseline(tmp_path: Path) -> None:
    asked = made(tmp_path, 6, same=2)  # texts 0 0 1 1 2 2
    call = {"id": "functions.get_weather:0", "type": "function"}
    text = call | {"function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    parsed = call | {"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    said = {"role": "assistant", "content": "hello", "tool_calls": None}
    failed = {"status": "failed", "response": {"error": "Connection\nerror."}, "finish_reason": None}
    rows = [
        result("0", 2, said, "stop"),  # the order of the file is that of the answers' arrival
        result("0", 1, {"content": "", "tool_calls": [text]}),
        result("1", 3, {}, **failed),
        result("1", 4, {}, **failed),
        result("2", 5, said, "stop", status="failed"),
        result("1", 3, {"content": None, "tool_calls": [parsed, {"id": "y"}]}),  # gone on with: the later row stands
        result("9", 7, said, "stop"),
    ]
    found = read_answers(write(tmp_path / "k2vv.jsonl", *rows), asked)
    assert found[0] == [Answer("tool_calls", (Call("get_weather", '{"city": "Oslo"}'),), "")]
    assert found[1] == [Answer("stop", (), "hello")]
    assert found[2][0].calls[0] == Call("get_weather", '{"city": "Oslo"}') and found[2][0].calls[1].fault
    assert found[3] == [Answer(None, error="Connection error.")]
    assert found[4:] == [[Answer(None, error="status failed")], []]


@pytest.mark.parametrize(
    "row",
    [
        {"x": 1},
        {"id": "a"},
        {"id": "a", "repeat": 0, "tool_calls": [], "finish_reason": 5},
        {"id": "a", "repeat": 0, "tool_calls": None, "finish_reason": "stop"},
        {"id": "a", "repeat": 0, "tool_calls": [1], "finish_reason": "stop"},
        {"id": "a", "repeat": 0, "tool_calls": [{"name": "a", "arguments": {}}], "finish_reason": "stop"},
        {"id": "a", "repeat": 0, "error": 5},
        {"response": {}, "request": None},
        {"response": {"choices": [1]}, "request": {}},
        {"response": [], "request": {}},
        {"response": {}, "request": {}, "data_index": "x"},
        {"response": {"choices": [{"message": {"tool_calls": 3}}]}, "request": {}},
    ],
)
def test_a_row_that_is_no_answer_is_refused(tmp_path: Path, row: Any) -> None:
    with pytest.raises(TextError, match=r"a\.jsonl: line 1: .*; expected our own answers, or results of"):
        read_answers(write(tmp_path / "a.jsonl", row), made(tmp_path, 1))


# --- one answer


@pytest.mark.parametrize(
    ("answer", "kinds"),
    [
        (GOOD, []),
        (calls("{}", "stop"), []),
        (calls({"city": "Oslo", "days": 3.0, "limit": None, "tags": ["a"], "at": {"lat": 1.5}}), []),
        (calls("{}"), ["schema"]),
        (BAD, ["schema"]),
        (calls({"city": "O"}), ["schema"]),
        (calls({"city": "Oslo", "days": "3"}), ["schema"]),
        (calls({"city": "Oslo", "day": 3}), ["schema"]),
        (calls({"city": "Oslo", "at": {}}), ["schema"]),
        (calls({"city": "Oslo"}, "get_wether"), ["unknown_tool"]),
        (calls({"city": "Oslo"}, ""), ["unknown_tool"]),
        (calls(""), ["not_json"]),
        (calls('{"city": "Oslo"'), ["not_json"]),
        (calls('{"city": "Oslo"} {}'), ["not_json"]),
        (calls('{"city": "Oslo", "limit": NaN}'), ["not_json"]),
        (calls('{"city": "Oslo", "days": ' + "9" * 5000 + "}"), ["not_json"]),
        (calls("[" * 100_000), ["not_json"]),
        (calls("null", "stop"), ["not_json"]),
        (calls("[]", "stop"), ["not_json"]),
        (Answer("tool_calls"), ["no_call"]),
        (Answer("tool_calls", (Call("get_weather", '{"city": "Oslo"}', "no end"),)), ["format"]),
        (Answer("tool_calls", (*GOOD.calls, *BAD.calls, Call("x", "{}"))), ["schema", "unknown_tool"]),
    ],
    ids=str,
)
def test_what_makes_a_call_invalid(tmp_path: Path, answer: Answer, kinds: list[str]) -> None:
    (request,) = made(tmp_path, 1)
    found = failures(request, answer)
    assert [one.kind for one in found] == kinds
    assert all(one.why and "\n" not in one.why and len(one.why) <= 160 for one in found)


def test_the_draft_is_the_schemas_own(tmp_path: Path) -> None:
    """A boolean exclusiveMinimum is draft 4's; prefixItems is 2020-12's, and means nothing to 2019-09."""
    four = {"$schema": "http://json-schema.org/draft-04/schema#", "properties": {"a": {"minimum": 3}}}
    four["properties"]["a"]["exclusiveMinimum"] = True
    items = {"properties": {"a": {"prefixItems": [{"type": "string"}]}}}
    nineteen = {"$schema": "https://json-schema.org/draft/2019-09/schema", **items}
    tools = [tool("four", four), tool("new", items), tool("old", nineteen)]
    (request,) = read_requests(write(tmp_path / "r.jsonl", body(tools=tools)))
    for name, arguments, kinds in [
        ("four", {"a": 3}, ["schema"]), ("four", {"a": 4}, []), ("new", {"a": [1]}, ["schema"]), ("old", {"a": [1]}, [])
    ]:  # fmt: skip
        assert [one.kind for one in failures(request, calls(arguments, name))] == kinds, name
        schema = request.schemas[name]
        assert jsonschema.validators.validator_for(schema)(schema).is_valid(arguments) is not bool(kinds)
    with pytest.raises(TextError, match="no valid JSON Schema"):
        read_requests(write(tmp_path / "r.jsonl", body(tools=[tool("x", four | {"$schema": "http://other.org/s"})])))


def test_nothing_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("fetched")

    monkeypatch.setattr(urllib.request, "urlopen", opened)
    known = {"properties": {"a": {"$ref": "http://json-schema.org/draft-07/schema#"}, "$ref": {"type": "string"}}}
    own = {"$id": "http://x.org/a", "$ref": "b", "$defs": {"b": {"$id": "b", "required": ["q"]}}}
    inner = {"c": {"$id": "c", "required": ["q"]}}
    own["$defs"]["d"] = {"$id": "http://y.org/z/d", "properties": {"a": {"$ref": "c"}}, "$defs": inner}
    own["properties"] = {"d": {"$ref": "http://y.org/z/d"}}
    tools = [tool("known", known), tool("own", own), tool("value", {"const": {"$ref": "http://x.org/c"}})]
    (request,) = read_requests(write(tmp_path / "r.jsonl", body(tools=tools)))
    assert not failures(request, calls({"a": {"type": "string"}}, "known"))
    assert failures(request, calls({"a": {"type": "strin"}}, "known"))
    assert failures(request, calls({}, "own")) and not failures(request, calls({"q": 1}, "own"))
    assert failures(request, calls({"q": 1, "d": {"a": {}}}, "own"))
    assert not failures(request, calls({"q": 1, "d": {"a": {"q": 1}}}, "own"))
    assert not failures(request, calls({"$ref": "http://x.org/c"}, "value"))


# --- formats


def kimi(*pairs: tuple[str, str]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>{head}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for head, arguments in pairs
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


OSLO = '{"city": "Oslo"}'


@pytest.mark.parametrize(
    ("text", "content", "found"),
    [
        ("just text", "just text", []),
        ("<think>so</think> I look." + kimi(("functions.get_weather:0", OSLO)), "I look.", [("get_weather", OSLO)]),
        (kimi(("functions.a-b:0", "{}"), (" functions.c.d:1 ", f" {OSLO}\n")), None, [("a-b", "{}"), ("c.d", OSLO)]),
        (kimi(("get_weather:3", OSLO)) + " and then", None, [("get_weather", OSLO)]),
        (kimi(("functions.stop:0", "")), None, [("stop", "{}")]),
        ("<think>no end " + kimi(("functions.stop:0", "{}")), None, [("stop", "{}")]),
        (kimi(("functions.stop:0", '{"a": "<think>x</think>"}')), None, [("stop", '{"a": "<think>x</think>"}')]),
    ],
)
def test_kimis_calls(text: str, content: str | None, found: list[tuple[str, str]]) -> None:
    assert parse(text, FORMATS["kimi"], {}) == (content, [Call(*one) for one in found])


@pytest.mark.parametrize(
    ("text", "call"),
    [
        (kimi(("get_weather", OSLO)), ("get_weather", OSLO)),
        (kimi(("functions.stop:0", "{}"))[: -len("<|tool_call_end|><|tool_calls_section_end|>")], ("stop", "{}")),
        (
            kimi(("functions.stop:0", OSLO))[: -len('o"}<|tool_call_end|><|tool_calls_section_end|>')],
            ("stop", OSLO[:-3]),
        ),
        ("<|tool_calls_section_begin|><|tool_call_begin|>functions.stop:0<|tool_call_end|>", ("stop", "{}")),
        ("<|tool_calls_section_begin|><|tool_call_begin|>functions.st", ("functions.st", "{}")),
    ],
)
def test_kimis_broken_calls_are_calls(text: str, call: tuple[str, str]) -> None:
    _, (found,) = parse(text, FORMATS["kimi"], {})
    assert found[:2] == call and found.fault


def glm(name: str, gap: str = "", **values: str) -> str:
    pairs = (f"<arg_key>{key}</arg_key>{gap}<arg_value>{value}</arg_value>" for key, value in values.items())
    return f"<tool_call>{name}{gap}{gap.join(pairs)}{gap}</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "found"),
    [
        ("just text", "just text", []),
        ("so</think>I look." + glm("get_weather", "\n", city="Oslo"), "I look.", [{"city": "Oslo"}]),
        ("so " + glm("get_weather", city="Oslo") + " then", "then", [{"city": "Oslo"}]),
        (glm("get_weather", city="5", days="5", warm="true", limit="null", tags='["a"]'), None,
         [{"city": "5", "days": 5, "warm": True, "limit": None, "tags": ["a"]}]),
        (glm("get_weather", city="", days="five", warm="2", limit="1e999", tags="[NaN]"), None,
         [{"city": "", "days": "five", "warm": 2, "limit": "1e999", "tags": "[NaN]"}]),
        (glm("get_weather", city="a\n<b>", limit="2.50", other="7") + glm("get_weather") + "\n", None,
         [{"city": "a\n<b>", "limit": 2.5, "other": "7"}, {}]),
    ],
)  # fmt: skip
def test_glms_calls(text: str, content: str | None, found: list[Any]) -> None:
    said, made = parse(text, FORMATS["glm"], {"get_weather": WEATHER}, reasoning="so" in text)
    assert said == content and not any(call.fault for call in made)
    assert [(call.name, json.loads(call.arguments)) for call in made] == [("get_weather", one) for one in found]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (glm("get_weather", city="Oslo")[: -len("</tool_call>")], OSLO),
        (glm("get_weather", city="Oslo")[: -len("slo</arg_value></tool_call>")], "{}"),
        ("<tool_call>get_weather<arg_key>city</arg_key>Oslo</tool_call>", "{}"),
        (glm("get_weather", city="Oslo").replace("</tool_call>", "!</tool_call>"), OSLO),
    ],
)
def test_glms_broken_calls_are_calls(text: str, arguments: str) -> None:
    _, (found,) = parse(text, FORMATS["glm"], {})
    assert found[:2] == ("get_weather", arguments) and found.fault


def test_a_family_whose_format_is_not_known_is_refused() -> None:
    with pytest.raises(EvalError, match="family qwen: its format of tool calls is not known; known are kimi, glm"):
        format_of("qwen", "<tool_call>")
    with pytest.raises(EvalError, match=r"does not write tool calls with <\|tool_calls_section_begin\|>"):
        format_of("kimi", "<tool_call>")


# --- the numbers


def drawn(rng: np.random.Generator, count: int, repeats: int = 1) -> list[list[Answer]]:
    return [[[GOOD, BAD, NONE][k] for k in rng.integers(0, 3, repeats)] for _ in range(count)]


def test_triggers_are_sklearns(tmp_path: Path) -> None:
    asked, rng = made(tmp_path, 60), np.random.default_rng(3)
    before, after = drawn(rng, 60), drawn(rng, 60)
    found = judge(asked, after, before)
    truth, said = ([some[0].triggered for some in side] for side in (before, after))
    precision, recall, f1, _ = precision_recall_fscore_support(truth, said, average="binary")
    assert [found[name]["mean"] for name in ("precision", "recall", "f1")] == pytest.approx([precision, recall, f1])
    counts = [found["triggers"][name] for name in ("true_positives", "false_positives", "false_negatives")]
    both = sum(a and b for a, b in zip(truth, said, strict=True))
    assert counts == [both, sum(said) - both, sum(truth) - both]
    assert sum(counts) + found["triggers"]["true_negatives"] == found["triggers"]["compared"] == 60
    for name in ("precision", "recall", "f1", "trigger_rate", "schema_accuracy"):
        assert 0 <= found[name]["low"] < found[name]["mean"] < found[name]["high"] <= 1
    flipped = found["triggers"]["comparison"]["flips"]
    assert (flipped["lost"], flipped["gained"]) == (counts[2], counts[1])
    assert flipped["p"] == mcnemar(sum(truth) - both, sum(said) - both)[0]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert rejudge(json.loads(json.dumps(found["scores"]))) == {key: found[key] for key in rejudge(found["scores"])}


def test_schema_accuracy_is_of_the_triggered(tmp_path: Path) -> None:
    asked = made(tmp_path, 8)
    before = [[one] for one in (GOOD, GOOD, GOOD, BAD, NONE, GOOD, NONE, LOST)]
    after = [[one] for one in (GOOD, BAD, BAD, GOOD, BAD, NONE, NONE, GOOD)]
    found = judge(asked, after, before, most_unanswered=0.2)
    assert found["schema_accuracy"]["mean"] == pytest.approx(3 / 6)
    assert found["baseline_schema_accuracy"]["mean"] == pytest.approx(4 / 5)
    schema = found["schema"]
    assert schema["both_triggered"] == 4
    assert (schema["comparison"]["baseline"], schema["comparison"]["target"]) == (0.75, 0.5)
    assert (schema["comparison"]["flips"]["lost"], schema["comparison"]["flips"]["gained"]) == (2, 1)
    expected = paired_difference([1, 1, 1, 0], [1, 0, 0, 1])
    assert schema["comparison"]["difference"] == expected.to_json()
    assert (found["triggers"]["compared"], found["triggers"]["left_out"]) == (7, 1)
    counted = found["target"]
    assert (counted["answers"], counted["triggered"], counted["valid"], counted["unanswered"]) == (8, 6, 3, 0)
    assert counted["finish_reasons"] == {"stop": 2, "tool_calls": 6}
    assert counted["failures"]["schema"]["count"] == 3 and counted["failures"]["not_json"]["count"] == 0
    assert counted["failures"]["schema"]["first"][0] == {
        "line": 2, "name": "get_weather", "why": "$.city: 7 is not of type 'string'"
    }  # fmt: skip
    assert found["baseline"]["errors"] == ["line 8: HTTP 500"] and found["baseline"]["unanswered"] == 1


def test_the_first_failures_are_shown_and_all_counted(tmp_path: Path) -> None:
    found = judge(made(tmp_path, 9), [[calls({}), calls("{", finish="stop")]] * 9)
    assert found["target"]["failures"]["schema"]["count"] == 9
    assert [one["line"] for one in found["target"]["failures"]["schema"]["first"]] == [1, 2, 3, 4, 5]
    assert found["target"]["calls_unfinished"] == 9 and found["target"]["failures"]["not_json"]["count"] == 0
    assert found["baseline"] is found["f1"] is found["triggers"] is found["baseline_trigger_rate"] is None
    assert found["trigger_rate"]["mean"] == 0.5 and found["repeats"] == 2


def test_repeats_are_averaged_each_against_each(tmp_path: Path) -> None:
    """Against a loop over all pairs of samples, 3 of the target's and 2 of the baseline's, one of them lost."""
    asked, rng = made(tmp_path, 40), np.random.default_rng(5)
    before, after = drawn(rng, 40, 2), drawn(rng, 40, 3)
    after[7][1] = LOST
    found = judge(asked, after, before)
    tp = fp = fn = 0.0
    for mine, theirs in zip(after, before, strict=True):
        pairs = [(a.triggered, b.triggered) for a in mine for b in theirs if a.error is None]
        tp += sum(a and b for a, b in pairs) / len(pairs)
        fp += sum(a and not b for a, b in pairs) / len(pairs)
        fn += sum(b and not a for a, b in pairs) / len(pairs)
    triggers = found["triggers"]
    assert [triggers[f"{name}s"] for name in ("true_positive", "false_positive", "false_negative")] == (
        pytest.approx([tp, fp, fn])
    )
    assert found["f1"]["mean"] == pytest.approx(2 * tp / (2 * tp + fp + fn))
    assert found["precision"]["mean"] == pytest.approx(tp / (tp + fp))
    assert found["recall"]["mean"] == pytest.approx(tp / (tp + fn))
    assert triggers["comparison"]["flips"] is None and found["target"]["unanswered"] == 1
    pairs = [(some[0].triggered, some[1].triggered) for some in before]
    assert found["floor"]["mean"] == pytest.approx(2 * sum(a and b for a, b in pairs) / sum(a + b for a, b in pairs))
    assert judge(asked, after, [some[:1] for some in before])["floor"] is None


def test_one_model_twice_has_its_floor_for_f1(tmp_path: Path) -> None:
    asked, rng = made(tmp_path, 400), np.random.default_rng(2)
    found = judge(asked, drawn(rng, 400, 2), drawn(rng, 400, 2))
    assert found["floor"]["low"] < found["f1"]["mean"] < found["floor"]["high"]
    assert found["floor"]["mean"] == pytest.approx(2 / 3, abs=0.05)


def test_nothing_seen_is_not_nothing_there(tmp_path: Path) -> None:
    """The rule of three: of 100 requests that trigger alike, 3 may not."""
    asked = made(tmp_path, 100)
    found = judge(asked, [[GOOD]] * 100, [[GOOD]] * 100)
    assert found["f1"]["mean"] == found["f1"]["high"] == 1
    assert found["f1"]["low"] == pytest.approx(1 - 3 / 200, rel=0.03)
    assert found["schema_accuracy"]["low"] == pytest.approx(0.97, abs=1e-3)
    none = judge(asked, [[NONE]] * 100, [[NONE]] * 100)
    assert none["f1"] is none["precision"] is none["schema_accuracy"] is none["schema"]["comparison"] is None
    apart = judge(asked, [[NONE]] * 100, [[GOOD]] * 100)
    assert apart["f1"]["mean"] == 0 and apart["recall"]["mean"] == 0 and apart["precision"] is None


def test_the_same_request_many_times_tells_less(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    after, before = ([some for some in drawn(rng, 40) for _ in range(5)] for _ in range(2))
    apart, together = (judge(made(tmp_path, 200, same), after, before) for same in (1, 5))
    assert (apart["clusters"], together["clusters"]) == (200, 40)
    for find in (lambda found: found["f1"], lambda found: found["schema_accuracy"]):
        assert find(together)["error"] == pytest.approx(math.sqrt(5) * find(apart)["error"], rel=0.2)
    assert together["triggers"]["comparison"]["clusters"] == 40 < apart["triggers"]["comparison"]["clusters"]
    assert together["schema"]["comparison"]["clusters"] < together["schema"]["both_triggered"] / 4


@pytest.mark.parametrize(("count", "together", "flips"), [(80, 1, 0.03), (80, 1, 0.25), (200, 1, 0.1), (120, 4, 0.2)])
def test_the_interval_of_f1_holds_the_truth(count: int, together: int, flips: float) -> None:
    """Nineteen times in twenty or more: half of the requests trigger in truth, and `flips` of them flip either way."""
    truth, held, runs = 1 - flips, 0, 300
    for seed in range(runs):
        rng = np.random.default_rng([seed, count])
        before = rng.random(count) < 0.5
        chance = rng.random(count // together).repeat(together)  # all of a cluster flip, or none
        sides = [{"triggered": [[float(v)] for v in side], "valid": [[None]] * count} for side in
                 (before, before ^ (chance < flips))]  # fmt: skip
        clusters = [str(number // together) for number in range(count)]
        scores = {"questions": clusters, "clusters": clusters, "baseline": sides[0], "target": sides[1]}
        found = rejudge(scores, seed=seed, resamples=500)["f1"]
        held += found["low"] <= truth <= found["high"]
    assert 0.925 <= held / runs <= 1, f"{held / runs:.3f}"


def test_missing_answers_end_the_run_where_they_are_many(tmp_path: Path) -> None:
    asked = made(tmp_path, 20)
    some: Callable[[int], list[list[Answer]]] = lambda lost: [[LOST]] * lost + [[GOOD]] * (20 - lost)  # noqa: E731
    assert judge(asked, some(1))["target"]["unanswered"] == 1
    with pytest.raises(EvalError, match=r"the target: 2 of 20 requests have no answer, .* 0\.05 .* line 1: HTTP 500"):
        judge(asked, some(2))
    empty: list[Sequence[Answer]] = [[], [], *some(2)[2:]]
    with pytest.raises(EvalError, match=r"the baseline: 2 of 20 requests have no answer.*line 1: nothing came back"):
        judge(asked, some(0), empty)
    assert judge(asked, some(0), empty, most_unanswered=0.1)["triggers"]["left_out"] == 2
    with pytest.raises(EvalError, match="no request has an answer of both"):
        judge(asked[:2], [[LOST], [GOOD]], [[GOOD], [LOST]], most_unanswered=0.5)
    with pytest.raises(EvalError, match="answers to 19 requests of 20"):
        judge(asked, some(0)[1:])
