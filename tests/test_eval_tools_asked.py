"""Asking for tool calls: a server on this machine that behaves and misbehaves, and runners with chat templates."""

import json
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import variants
from transformers import PreTrainedTokenizerFast

from phasefold.errors import EvalError, TextError
from phasefold.evals.runner import Sampling
from phasefold.evals.tools.answers import Answer, Call
from phasefold.evals.tools.judge import judge
from phasefold.evals.tools.local import ask_runner
from phasefold.evals.tools.requests import Request, read_requests
from phasefold.evals.tools.server import Server, ask_server

CITY = {"type": "object", "properties": {"city": {"type": "string", "default": None}, "days": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
OSLO = Call("get_weather", '{"city": "Oslo"}')


def asked(path: Path, *texts: str, **fields: Any) -> list[Request]:
    rows = [{"messages": [{"role": "user", "content": text}], "tools": [TOOL]} | fields for text in texts]
    (path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_requests(path / "r.jsonl")


# --- a server


class Behaviour:
    """What the server got, and how it answers: by the first word of the request's text."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.paths: set[str] = set()
        self.tried: dict[str, int] = {}
        self.at_once = self.most_at_once = 0
        self.after = "0.01"  # seconds until it wants to be asked again
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    behaviour: Behaviour

    def log_message(self, *_: Any) -> None:
        """Be silent."""

    def do_POST(self) -> None:
        seen = self.behaviour
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"]
        with seen.lock:
            seen.got.append(body)
            seen.keys.append(self.headers["Authorization"])
            seen.paths.add(self.path)
            tried = seen.tried[text] = seen.tried.get(text, 0) + 1
            seen.at_once += 1
            seen.most_at_once = max(seen.most_at_once, seen.at_once)
        try:
            self.answer(text, tried)
        finally:
            with seen.lock:
                seen.at_once -= 1

    def answer(self, text: str, tried: int) -> None:
        kind, _, status = text.partition(" ")
        if kind == "call":
            calls = [{"id": "functions.get_weather:0", "type": "function", "function": {"name": OSLO.name}}]
            calls[0]["function"] |= {"arguments": OSLO.arguments}
            self.say(200, completion("tool_calls", calls))
        elif kind == "text":
            self.say(200, completion("stop", None, "hello"))
        elif kind == "always" or (kind == "once" and tried == 1):
            self.say(int(status.split()[0]), {"error": {"message": "over\nloaded"}})
        elif kind == "drop" and (tried == 1 or status):
            self.connection.close()
        elif kind == "short" and tried == 1:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
        elif kind == "garbage" and (tried == 1 or status):
            self.say(200, b"<html>\xff")
        elif kind == "empty":
            self.say(200, {"choices": []})
        elif kind == "slow" and (tried == 1 or status):
            time.sleep(1.0)
            self.say(200, completion("stop", None, "late"))
        else:
            self.say(200, completion("stop", None, f"{kind} at last"))

    def say(self, status: int, content: Any) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Retry-After", self.behaviour.after)
            self.end_headers()
            self.wfile.write(data)
        except (BrokenPipeError, ConnectionResetError):  # it did not want to wait
            pass


def completion(finish: str, calls: Any, content: str | None = None) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, "tool_calls": calls, "reasoning_content": "so"}
    return {
        "id": "x", "object": "chat.completion", "created": 1, "model": "m", "usage": {"total_tokens": 3},
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
    }  # fmt: skip


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Behaviour]]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    behaviour = Behaviour()
    handler = type("Mine", (Handler,), {"behaviour": behaviour})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # what is dropped on purpose
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", behaviour
    server.shutdown()
    server.server_close()
    thread.join()


def at(url: str, **fields: Any) -> Server:
    return Server(url, "kimi", pause=0.01, **fields)


def test_what_is_asked_arrives_as_it_stands(tmp_path: Path, serving: tuple[str, Behaviour]) -> None:
    """Nulls in schemas too, which the client would leave out; and no token of this machine's user."""
    url, seen = serving
    fields = {"temperature": 0.6, "max_tokens": 9, "tool_choice": "auto", "stream": True, "stream_options": {}}
    fields |= {"model": "other", "chat_template_kwargs": {"thinking": True}, "top_p": 0.5}
    requests = asked(tmp_path, "call", "text", **fields)
    told: list[int] = []
    server = at(url, extra={"temperature": 0.25, "min_p": 0.1})
    found = ask_server(requests, server, repeats=2, seed=7, advance=told.append)
    assert found == [[Answer("tool_calls", (OSLO,))] * 2, [Answer("stop", (), "hello")] * 2]
    assert sum(told) == 4 and seen.paths == {"/v1/chat/completions"} and set(seen.keys) == {"Bearer none"}
    sent = {"model": "kimi", "temperature": 0.25, "min_p": 0.1, "max_tokens": 9, "tool_choice": "auto", "top_p": 0.5}
    sent |= {"chat_template_kwargs": {"thinking": True}, "tools": [TOOL], "stream": False}
    for request in requests:
        mine = [got for got in seen.got if got["messages"] == request.body["messages"]]
        assert sorted(got.pop("seed") for got in mine) == [7, 8]
        assert [{key: got[key] for key in got if key != "messages"} for got in mine] == [sent] * 2
    ask_server(requests[:1], at(url, key="secret"))
    assert seen.keys[-1] == "Bearer secret" and "seed" not in seen.got[-1]


def test_what_is_over_in_a_moment_is_tried_again(tmp_path: Path, serving: tuple[str, Behaviour]) -> None:
    url, seen = serving
    texts = ["once 429", "once 500", "once 503", "drop", "short", "garbage", "slow", "once 408"]
    found = ask_server(asked(tmp_path, *texts), at(url, timeout=0.7), most_unanswered=0)
    assert [some[0].content for some in found] == [f"{text.split()[0]} at last" for text in texts]
    assert set(seen.tried.values()) == {2}


def test_it_waits_as_long_as_it_is_told_and_not_behind_the_last_try(
    tmp_path: Path, serving: tuple[str, Behaviour]
) -> None:
    url, seen = serving
    for after, pause, tries, text, least in [("0.4", 0.01, 2, "once 429", 0.4), ("0", 0.4, 3, "always 500", 1.2)]:
        seen.after, began = after, time.monotonic()
        ask_server(asked(tmp_path, text), Server(url, "m", pause=pause, tries=tries), most_unanswered=1)
        assert least <= time.monotonic() - began < least + 1.5
    seen.after = "Mon, 30 Nov 2026 10:00:00 GMT"
    assert ask_server(asked(tmp_path, "once 503"), at(url))[0][0].content == "once at last"


def test_what_is_not_over_is_an_answer_with_an_error(tmp_path: Path, serving: tuple[str, Behaviour]) -> None:
    url, seen = serving
    texts = ["always 500", "drop always", "garbage always", "empty", "slow always", "always 400", "always 422", "call"]
    requests = asked(tmp_path, *texts)
    found = ask_server(requests, at(url, timeout=0.7, tries=2), most_unanswered=0.9)
    errors = [some[0].error for some in found]
    assert errors[0] == 'HTTP 500: {"error": {"message": "over\\nloaded"}} (2 tries)'
    assert all(error and error.endswith("(2 tries)") for error in errors[:5])
    assert "no chat completion" in errors[3] and errors[4] == "no answer in 0.7 seconds (2 tries)"
    assert errors[5:7] == [f'HTTP {status}: {{"error": {{"message": "over\\nloaded"}}}}' for status in (400, 422)]
    assert errors[7] is None and [seen.tried[text] for text in texts] == [2, 2, 2, 2, 2, 1, 1, 1]
    kept = judge(requests, found, most_unanswered=0.9)
    assert (kept["target"]["unanswered"], kept["target"]["answers"]) == (7, 1)


def test_too_many_without_an_answer_end_it(tmp_path: Path, serving: tuple[str, Behaviour]) -> None:
    url, seen = serving
    requests = asked(tmp_path, *(f"always 500 {number}" for number in range(40)))
    with pytest.raises(EvalError, match=r"2 of 40 requests got no answer, more than the share of 0\.04 .* HTTP 500"):
        ask_server(requests, at(url, tries=1), concurrency=1, most_unanswered=0.04)
    assert len(seen.got) <= 4  # the others are not asked any more


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_every_request_would_meet_ends_it(tmp_path: Path, serving: tuple[str, Behaviour], status: int) -> None:
    url, seen = serving
    requests = asked(tmp_path, *(f"always {status} {number}" for number in range(40)))
    with pytest.raises(
        EvalError, match=f"model kimi: HTTP {status}: .*; see the address, the model's name and the key"
    ):
        ask_server(requests, at(url), concurrency=2, most_unanswered=1)
    assert len(seen.got) <= 6


def test_so_many_at_a_time(tmp_path: Path, serving: tuple[str, Behaviour]) -> None:
    url, seen = serving
    found = ask_server(asked(tmp_path, *(f"slow {n}" for n in range(6))), at(url, timeout=9), concurrency=3)
    assert [some[0].content for some in found] == ["late"] * 6
    assert seen.most_at_once == 3


def test_a_server_that_is_not_there(tmp_path: Path, serving: tuple[str, Behaviour]) -> None:
    with pytest.raises(EvalError, match=r"127\.0\.0\.1:9/v1: 1 of 1 requests got no answer.*ConnectError"):
        ask_server(asked(tmp_path, "call"), at("http://127.0.0.1:9/v1", tries=2))


def test_what_the_client_would_change_or_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(EvalError, match="is set offline; unset HF_HUB_OFFLINE"):
        ask_server(asked(tmp_path, "call"), at("http://127.0.0.1:9/v1"))
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    with pytest.raises(TextError, match="line 1: a response_format of json_schema"):
        ask_server(asked(tmp_path, "call", response_format=form), at("http://127.0.0.1:9/v1"))


# --- runners

KIMI = """
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for m in messages %}<|im_{{ m.role }}|>{{ m.content or "" }}
{%- for call in m.tool_calls or [] %}
{%- if loop.first %}<|tool_calls_section_begin|>{% endif %}
{%- set arguments = call.function.arguments %}
{#- as objects: Kimi's own takes both #}
{{- "<|tool_call_begin|>" + call.id + "<|tool_call_argument_begin|>" }}
{%- for name, value in arguments.items() %}{{ name }}={{ value }}{% endfor %}{{ "<|tool_call_end|>" }}
{%- if loop.last %}<|tool_calls_section_end|>{% endif %}
{%- endfor %}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_assistant|>{% if thinking %}<think>{% endif %}{% endif %}"""
GLM = """[gMASK]<sop>
{%- if tools %}<|system|>{{ tools | tojson }} Answer with <tool_call>{% endif %}
{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
MARKS = ["<|im_end|>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"]
MARKS += ["<|tool_call_end|>", "<|tool_calls_section_end|>", "<|observation|>", "<tool_call>", "</tool_call>"]
SECTION = "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
CALL = SECTION + '{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>'


class Scripted:
    """A runner that says what it is given: texts in turn, token by token, until it is told that it is finished."""

    vocabulary = 2048

    def __init__(self, tokenizer: Any, texts: Sequence[str], max_length: int = 10_000) -> None:
        self.tokenizer, self.texts, self.max_length = tokenizer, list(texts), max_length
        self.about = {"runtime": "scripted"}
        self.asked: list[tuple[int, Sampling, list[str]]] = []

    def generate(self, prompts: Any, limit: int, sampling: Sampling, finished: Any, advance: Any) -> list[list[int]]:
        self.asked.append((limit, sampling, [self.tokenizer.decode(prompt) for prompt in prompts]))
        found = []
        for number, prompt in enumerate(prompts):
            assert len(prompt) + limit <= self.max_length
            found.append([])
            for token in self.tokenizer(self.texts.pop(0))["input_ids"][:limit]:
                found[-1].append(token)
                if finished(number, found[-1]):
                    break
            advance(1)
        return found

    def logits(self, *_: Any) -> Any:
        raise AssertionError("only to generate")

    def close(self) -> None:
        """Nothing to let go of."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = PreTrainedTokenizerFast.from_pretrained(variants.EXAMPLES / "tiny-kimi")
    made.add_special_tokens({"additional_special_tokens": MARKS})
    return made


def test_a_runner_is_asked_by_the_chat_template(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = KIMI
    (first, second) = asked(tmp_path, "Oslo?", "Rome?", temperature=0.5, top_p=0.9, top_k=-1, max_tokens=90)
    texts = [
        "I look. " + CALL + "<|im_end|>no more",
        "hello<|im_end|>",
        "words without end " * 40,
        CALL.partition("<|tool_call_end|>")[0],
    ]
    runner = Scripted(tokenizer, texts)
    told: list[int] = []
    found = ask_runner([first, second], runner, tokenizer, "kimi", repeats=2, seed=4, advance=told.append)
    assert found[0] == [Answer("tool_calls", (OSLO,), "I look."), Answer("stop", (), "hello")]
    assert found[1][0].finish == "length" and found[1][0].content and not found[1][0].calls
    assert found[1][1] == Answer("tool_calls", (Call(OSLO.name, OSLO.arguments, "the call has no end"),))
    ((limit, sampling, prompts),) = runner.asked
    assert (limit, sampling, sum(told)) == (90, Sampling(0.5, 0.9, 0, 4), 4)
    assert prompts[0] == prompts[1] and "Oslo?" in prompts[0] and "Rome?" in prompts[2]
    assert '"default": null' in prompts[0] and prompts[0].endswith("<|im_assistant|>")
    assert judge([first, second], found)["target"]["finish_reasons"] == {"length": 1, "stop": 1, "tool_calls": 2}


def test_a_prompt_that_opens_reasoning(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = KIMI
    requests = asked(tmp_path, "Oslo?", chat_template_kwargs={"thinking": True})
    runner = Scripted(tokenizer, ["secret</think>open" + CALL + "<|im_end|>"])
    assert ask_runner(requests, runner, tokenizer, "kimi") == [[Answer("tool_calls", (OSLO,), "open")]]
    assert runner.asked[0][:2] == (4096, Sampling(1.0, 1.0, 0, 0))


def test_glms_end_and_format(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = GLM
    text = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>5</arg_value>\n<arg_key>days</arg_key>"
    text += "\n<arg_value>5</arg_value>\n</tool_call><|observation|>and more"
    runner = Scripted(tokenizer, [text])
    call = Call("get_weather", '{"city": "5", "days": 5}')
    assert ask_runner(asked(tmp_path, "a"), runner, tokenizer, "glm") == [[Answer("tool_calls", (call,))]]
    ends = tokenizer("hello Oslo")["input_ids"]
    runner = Scripted(tokenizer, ["hello Oslo"])
    (found,) = ask_runner(asked(tmp_path, "a"), runner, tokenizer, "glm", stops=ends[1:2])
    assert found == [Answer("stop", (), tokenizer.decode(ends[:1]))]


def test_earlier_calls_are_given_as_objects(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = KIMI
    call = {"id": "functions.get_weather:0", "type": "function", "function": {"name": "x", "arguments": '{"a": [1]}'}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    requests = asked(tmp_path, "", messages=messages)
    runner = Scripted(tokenizer, ["<|im_end|>"])
    assert ask_runner(requests, runner, tokenizer, "kimi") == [[Answer("stop")]]
    assert "functions.get_weather:0<|tool_call_argument_begin|>a=[1]<|tool_call_end|>" in runner.asked[0][2][0]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": [1]}'
    call["function"]["arguments"] = "{no"
    with pytest.raises(TextError, match="line 1: the chat template does not take these messages"):
        ask_runner(asked(tmp_path, "", messages=messages), runner, tokenizer, "kimi")


def test_no_tools_are_shown_where_none_may_be_called(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = KIMI
    runner = Scripted(tokenizer, ["no<|im_end|>"])
    ask_runner(asked(tmp_path, "q", tool_choice="none"), runner, tokenizer, "kimi")
    assert "get_weather" not in runner.asked[0][2][0]


def test_what_fits_no_more(tmp_path: Path, tokenizer: Any) -> None:
    """A long prompt has a shorter answer, one that fills the model has none; both are told."""
    tokenizer.chat_template = KIMI
    requests = asked(tmp_path, "q", "q " * 30, "q " * 3000)
    lengths = [len(tokenizer.apply_chat_template(list(r.body["messages"]), tools=r.body["tools"], return_dict=False,
                                                 add_generation_prompt=True)) for r in requests]  # fmt: skip
    runner = Scripted(tokenizer, ["x<|im_end|>"] * 4, max_length=lengths[1] + 5)
    told: list[int] = []
    found = ask_runner(requests, runner, tokenizer, "kimi", repeats=2, limit=20, temperature=0.0, advance=told.append)
    assert [limit for limit, *_ in runner.asked] == [20, 5] and sum(told) == 6
    assert {sampling.temperature for _, sampling, _ in runner.asked} == {0.0}
    assert [some[0].finish for some in found] == ["stop", "stop", None]
    why = f"a prompt of {lengths[2]:,} tokens, the model takes {lengths[1] + 5:,} with the answer"
    assert found[2] == [Answer(None, error=why)] * 2


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tool_choice": "required"}, "line 1: a tool_choice of required needs a server"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "line 1: a tool_choice of"),
        ({"stop": ["\n"]}, "line 1: stop is not known to runners"),
        ({"repetition_penalty": 1.1}, "line 1: repetition_penalty is not known to runners"),
        ({"temperature": "1"}, "line 1: a temperature of 1; expected a number"),
        ({"max_tokens": 0}, "line 1: max_tokens of 0; expected a whole number"),
    ],
)
def test_what_no_runner_can_do(tmp_path: Path, tokenizer: Any, fields: Any, why: str) -> None:
    tokenizer.chat_template = KIMI
    with pytest.raises((EvalError, TextError), match=why):
        ask_runner(asked(tmp_path, "q", **fields), Scripted(tokenizer, []), tokenizer, "kimi")
    neutral = {"stop": None, "repetition_penalty": 1.0, "presence_penalty": 0.0, "min_p": 0, "logit_bias": {}}
    runner = Scripted(tokenizer, ["x<|im_end|>"])
    assert ask_runner(asked(tmp_path, "q", **neutral), runner, tokenizer, "kimi")[0][0].finish == "stop"


def test_templates_that_do_not_do(tmp_path: Path, tokenizer: Any) -> None:
    requests, runner = asked(tmp_path, "q"), Scripted(tokenizer, [])
    for template in (None, {"default": KIMI}):
        tokenizer.chat_template = template
        with pytest.raises(TextError, match="no chat template, or more than one"):
            ask_runner(requests, runner, tokenizer, "kimi")
    tokenizer.chat_template = GLM
    with pytest.raises(EvalError, match="does not write tool calls"):
        ask_runner(requests, runner, tokenizer, "kimi")


def test_a_checkpoint_answers(tmp_path: Path) -> None:
    """A fixture with a template, through the runner that evaluates it: it has not learned to call, but it says more."""
    from phasefold.calib.text import load_tokenizer
    from phasefold.evals.whole import open_runner

    shutil.copytree(variants.EXAMPLES / "tiny-glm4", tmp_path / "glm")
    (tmp_path / "glm" / "chat_template.jinja").write_text(GLM)
    tokenizer = load_tokenizer(tmp_path / "glm")
    requests = asked(tmp_path, "Return a new array of", max_tokens=6, temperature=0)
    runner = open_runner(tmp_path / "glm", dtype="float32", batch=2, memory=1 << 30, device="cpu")
    try:
        ((one, two),) = ask_runner(requests, runner, tokenizer, "glm", repeats=2)
    finally:
        runner.close()
    assert one == two and one.finish in ("length", "stop") and one.content
