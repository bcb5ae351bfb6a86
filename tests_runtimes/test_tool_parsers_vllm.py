"""Our parsers of tool calls against vLLM's own, on generated answers: whole ones, broken ones, cut ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import variants
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.glm47_moe import Glm47MoeParser
from vllm.parser.kimi_k2 import KimiK2Parser
from vllm.tool_parsers import ToolParserManager

from phasefold.evals.tools.answers import Call
from phasefold.evals.tools.parse import FORMATS, parse

#: the formats' markers, which are special tokens in real tokenizers
MARKERS = {
    "kimi": ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"],
    "glm": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
}
MARKERS["kimi"].append("<|tool_call_argument_begin|>")
TYPED = {
    "text": {"type": "string"},
    "free": {"description": "no type"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "flag": {"type": "boolean"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "either": {"type": ["string", "null"]},
    "several": {"type": ["boolean", "integer", "string"]},
    "choice": {"enum": [1, "one", None]},
    "mixed": {"oneOf": [{"type": "array"}, {"type": "number"}]},
    "list": {"type": "array", "items": {"type": "integer"}},
    "object": {"type": "object", "properties": {"n": {"type": "integer"}}},
    "all": {"allOf": [{"type": "string"}, {"minLength": 1}]},
}
SCHEMA = {"type": "object", "properties": TYPED}
NAMES = ("get_weather", "a", "list-files", "ns.search_2")
KINDS = {"kimi": KimiK2Parser, "glm": Glm47MoeParser}


@pytest.fixture(scope="module", params=["kimi", "glm"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(family: str) -> Any:
    made = PreTrainedTokenizerFast.from_pretrained(variants.EXAMPLES / "tiny-kimi")
    made.add_tokens([*MARKERS[family], "<think>", "</think>"], special_tokens=False)
    return made


def asked(parameters: Any = SCHEMA) -> ChatCompletionRequest:
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in NAMES]
    return ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "q"}], tools=tools)


Theirs = Callable[..., tuple[str | None, list[tuple[str, str]]]]


@pytest.fixture(scope="module")
def theirs(family: str, tokenizer: Any) -> Theirs:
    """What vLLM's server gives to a client: content, and names and arguments of the calls."""

    def give(text: str, *, reasoning: bool = False, parameters: Any = SCHEMA) -> Any:
        request = asked(parameters)
        if reasoning:
            _, content, calls = KINDS[family](tokenizer, request.tools).parse(text, request)
        else:
            kind = ToolParserManager.get_tool_parser({"kimi": "kimi_k2", "glm": "glm47"}[family])
            found = kind(tokenizer, request.tools).extract_tool_calls(text, request)
            content, calls = found.content, [one.function for one in found.tool_calls]
        return (content or "").strip() or None, [(one.name, one.arguments) for one in calls or []]

    return give


def ours(text: str, family: str, *, reasoning: bool = False) -> tuple[str | None, list[Call]]:
    return parse(text, FORMATS[family], dict.fromkeys(NAMES, SCHEMA), reasoning=reasoning)


LETTERS = 'abc XYZ012 .,:;<>|/{}[]"\\\n\t_-é漢😀\u2028'


def words(rng: random.Random, most: int = 12) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randrange(most)))


def value(rng: random.Random, depth: int = 0) -> Any:
    kinds: list[Callable[[], Any]] = [
        lambda: words(rng), lambda: rng.randrange(-9, 99), lambda: rng.random() * 10 ** rng.randrange(-5, 20),
        lambda: rng.random() < 0.5, lambda: None, lambda: rng.choice(["5", "true", "null", "1e3", "[1]", '{"n": "2"}']),
    ]  # fmt: skip
    if depth < 3:
        kinds += [lambda: [value(rng, depth + 1) for _ in range(rng.randrange(3))]]
        kinds += [lambda: {words(rng, 5): value(rng, depth + 1) for _ in range(rng.randrange(3))}]
    return rng.choice(kinds)()


def kimi_call(rng: random.Random, number: int) -> str:
    """Closed or not; arguments that are JSON, broken, none, or hold what looks like markers."""
    arguments = json.dumps(
        {words(rng, 6): value(rng) for _ in range(rng.randrange(4))}, ensure_ascii=rng.random() < 0.5
    )
    broken = [
        arguments[: rng.randrange(len(arguments))],
        "",
        " \n",
        "<think>x</think>",
        "}" + arguments,
        "[1, 2]",
        "<|",
    ]
    broken.append(json.dumps({"a": rng.choice(MARKERS["kimi"][0::2]) + "<|im_end|>"}))
    arguments = rng.choice(["", " ", "\n"]) + (arguments if rng.random() < 0.7 else rng.choice(broken))
    head = rng.choice(["functions.", ""]) + rng.choice([*NAMES, "unknown"]) + f":{number}"
    head = rng.choice(["", " ", "\n"]) + head + rng.choice(["", " ", "\n"])
    end = "<|tool_call_end|>" if rng.random() < 0.93 else ""
    return f"<|tool_call_begin|>{head}<|tool_call_argument_begin|>{arguments}{end}"


def glm_call(rng: random.Random, number: int) -> str:
    gap, pairs = rng.choice(["", "\n", " "]), []
    for _ in range(rng.randrange(4)):
        made = value(rng)
        text = made if isinstance(made, str) else json.dumps(made, ensure_ascii=False)
        text = rng.choice(
            [text, text, text, f" {text}\n", text + "</think>", "<tool_call>", "1_000", "inf", "Null", "TRUE"]
        )
        key = rng.choice([*TYPED, "other", " text "])
        pairs.append(f"<arg_key>{key}</arg_key>{gap}<arg_value>{text}</arg_value>")
    end = "</tool_call>" if rng.random() < 0.93 else ""
    return f"<tool_call>{gap}{rng.choice(NAMES)}{gap}{gap.join(pairs)}{gap}{end}"


def plain(rng: random.Random) -> str:
    """Text that is none of the markers', and not white space alone."""
    return words(rng) + rng.choice(["x", "é", "<|im", "</tool", "<arg_", "tool_call"])


def answer(rng: random.Random, family: str, reasoning: bool) -> str:
    calls = [number for number in range(rng.choice([0, 1, 1, 2, 3]))]
    before = plain(rng) + rng.choice(["</think>", ""]) if reasoning else ""
    before += plain(rng) if rng.random() < 0.6 else ""
    if family == "kimi":
        inner = "".join(kimi_call(rng, number) + rng.choice(["", "\n", plain(rng)]) for number in calls)
        end = rng.choice(["<|tool_calls_section_end|>", "<|tool_calls_section_end|>" + plain(rng), ""])
        return before + (f"<|tool_calls_section_begin|>{inner}{end}" if calls else "")
    return before + "".join(glm_call(rng, number) + rng.choice(["", "\n", plain(rng)]) for number in calls)


@pytest.mark.parametrize("reasoning", [False, True])
def test_generated_answers_are_parsed_alike(family: str, theirs: Theirs, reasoning: bool) -> None:
    parameters = SCHEMA if family == "glm" else {"type": "object"}
    some = 0
    for seed in range(400):
        text = answer(random.Random(seed), family, reasoning)
        content, calls = ours(text, family, reasoning=reasoning)
        expected = theirs(text, reasoning=reasoning, parameters=parameters)
        known = [call[:2] for call in calls if family == "kimi" or call.name in NAMES]
        assert known == expected[1], f"{seed}: {text!r}"
        if family == "glm" and calls:  # what is said behind a call is not passed on by vLLM; it is said all the same
            assert (content or "").startswith(expected[0] or ""), f"{seed}: {text!r}"
        else:
            assert content == expected[0], f"{seed}: {text!r}"
        some += len(calls)
    assert some > 300


def test_answers_cut_short_are_parsed_alike(family: str, theirs: Theirs) -> None:
    """At every character: what vLLM calls a call has the same name and arguments here; and it has no end, which it had
    to have. Only where the head of Kimi's call has no arguments yet is it vLLM's alone to leave it out."""
    parameters = SCHEMA if family == "glm" else {"type": "object"}
    for seed in (3, 4, 6, 11):
        whole = answer(random.Random(seed), family, False)
        for length in range(len(whole)):
            text = whole[:length]
            _, calls = ours(text, family)
            _, expected = theirs(text, parameters=parameters)
            given = [call[:2] for call in calls]
            if given != expected:
                assert given[:-1] == expected[: len(given) - 1] and calls[-1].fault, repr(text)
                if family == "glm":  # a name that is not whole yet is not one of the tools'
                    assert calls[-1].name not in NAMES and len(expected) == len(given) - 1
                else:
                    assert "<|tool_call_argument_begin|>" not in text.rpartition("<|tool_call_begin|>")[2]


# --- where we differ, and why


def test_unknown_functions_are_told_and_vllm_drops_glms(family: str, theirs: Theirs) -> None:
    """A call of what was not offered is the model's mistake: it is to be counted."""
    if family == "glm":
        text = "<tool_call>get_wether<arg_key>text</arg_key><arg_value>x</arg_value></tool_call>"
        assert theirs(text)[1] == []
        assert ours(text, family)[1] == [Call("get_wether", '{"text": "x"}')]
    else:
        text = "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_wether:0<|tool_call_argument_begin|>{}"
        assert theirs(text + "<|tool_call_end|>")[1] == [("get_wether", "{}")]
        assert ours(text + "<|tool_call_end|>", family)[1] == [Call("get_wether", "{}")]


def test_types_of_kimis_json_are_left_alone_and_vllm_mends_them(family: str, theirs: Theirs) -> None:
    """GLM writes no types, so the schema has to say them; Kimi writes JSON, and a text for a number is its mistake."""
    if family == "glm":
        text = "<tool_call>a<arg_key>count</arg_key><arg_value>5</arg_value></tool_call>"
        assert ours(text, family)[1][0].arguments == theirs(text)[1][0][1] == '{"count": 5}'
    else:
        text = '<|tool_calls_section_begin|><|tool_call_begin|>a:0<|tool_call_argument_begin|>{"count": "5"}'
        assert theirs(text)[1] == [("a", '{"count": 5}')]
        assert ours(text, family)[1][0][:2] == ("a", '{"count": "5"}')


def test_heads_that_are_none_are_told_and_vllm_drops_them(family: str, theirs: Theirs) -> None:
    if family == "glm":
        texts = ["<tool_call></tool_call>", "<tool_call>\n<arg_key>text</arg_key><arg_value>x</arg_value></tool_call>"]
    else:
        begin = "<|tool_calls_section_begin|><|tool_call_begin|>"
        texts = [begin + head + "<|tool_call_argument_begin|>{}<|tool_call_end|>" for head in ("a", "functions.a", "")]
    for text in texts:
        assert theirs(text)[1] == []
        (call,) = ours(text, family)[1]
        assert call.fault or call.name == ""


def test_kimis_call_without_arguments_is_a_fault(family: str, theirs: Theirs) -> None:
    """vLLM gives the client {}; GLM's has none where there are none to give."""
    if family == "kimi":
        text = "<|tool_calls_section_begin|><|tool_call_begin|>functions.a:0"
        assert theirs(text)[1] == [("a", "{}")]
        assert ours(text, family)[1][0].fault
    else:
        assert theirs("<tool_call>a</tool_call>")[1] == [("a", "{}")]
        assert ours("<tool_call>a</tool_call>", family)[1] == [Call("a", "{}")]
