"""lm-eval's clients against a server of ours: equal to lm-eval's own model, and one line for all that goes wrong."""

import gc
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai_server
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models import api_models
from lm_eval.models.huggingface import HFLM
from openai_server import NAME, Model, Ways
from tenacity import wait_none

from phasefold.errors import EvalError, PhasefoldError, UsageError
from phasefold.evals.server import server_identity, server_lm

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-glm4"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
PAIRS = [
    ("Return the number of bytes that were", " written"),
    ("Return the number of bytes that were", " purple"),
    ("Raise an", " exception"),
    ("", "The default is None"),
    ("A file object opened for", " reading or writing, in binary mode"),
    ("Umlauts and sums: naïve café", " Σ ∑ 日本"),
    ("A context that ends with a space ", "and goes on"),
]
PROMPTS = ["Return the number of bytes", "Raise an exception if the file", "The default is"]


def asked(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=0, metadata=("some_task", n, 1))
        for n, each in enumerate(arguments)
    ]


def generate(*prompts: str, **given: Any) -> list[Any]:
    given = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False} | given
    return asked("generate_until", [(prompt, dict(given)) for prompt in prompts])


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval waits a second before it tries again."""
    monkeypatch.setattr(api_models, "wait_exponential", lambda **_: wait_none())
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture(scope="module")
def folder(module_path: Path) -> Path:
    """The example with a chat template."""
    made = module_path / "with-template"
    shutil.copytree(EXAMPLE, made)
    config = json.loads((made / "tokenizer_config.json").read_text())
    (made / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return Model(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> HFLM:
    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1)


@pytest.fixture
def ways() -> Ways:
    return Ways()


@pytest.fixture
def url(model: Model, ways: Ways) -> Iterator[str]:
    with openai_server.serving(model, ways) as address:
        yield address


def one_line(error: Exception) -> str:
    assert isinstance(error, PhasefoldError) and "\n" not in str(error) and "Traceback" not in str(error)
    return str(error)


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("owner", ["vllm", "sglang"])
def test_log_likelihoods_equal_lm_evals_own_model(
    url: str, ways: Ways, folder: Path, reference: HFLM, concurrency: int, owner: str
) -> None:
    ways.owner = owner
    lm = server_lm(url, tokenizer=folder, concurrency=concurrency)
    told, greedily = list[int](), reference.generate_until(generate(PROMPTS[0], max_gen_toks=4))[0]
    lm.advance, pairs = told.append, [*PAIRS, (PROMPTS[0], greedily)]
    for _ in range(2):  # a probe goes out once
        found, expected = (each.loglikelihood(asked("loglikelihood", pairs)) for each in (lm, reference))
        for (ours, greedy), (theirs, their_greedy) in zip(found, expected, strict=True):
            assert abs(ours - theirs) < 1e-4 and greedy == their_greedy
    assert {greedy for _, greedy in expected} == {True, False}
    assert sum(told) == 2 * len(pairs) and len(ways.seen) == 2 * len(pairs) + 1
    assert {"return_tokens_as_token_ids" in each["body"] for each in ways.seen} == {owner == "vllm"}
    assert not lm.truncated
    long = asked("loglikelihood_rolling", [(" ".join(context + rest for context, rest in PAIRS),)])
    assert abs(lm.loglikelihood_rolling(long)[0] - reference.loglikelihood_rolling(long)[0]) < 1e-3


@pytest.mark.parametrize("concurrency", [1, 3])
def test_generation_equals_lm_evals_own_model(
    url: str, ways: Ways, folder: Path, reference: HFLM, concurrency: int
) -> None:
    lm = server_lm(url, tokenizer=folder, concurrency=concurrency)
    for given in ({}, {"until": ["the", "\n"]}, {"temperature": 0.7}):  # do_sample is false: greedy all the same
        assert lm.generate_until(generate(*PROMPTS, **given)) == reference.generate_until(generate(*PROMPTS, **given))
    assert {each["body"]["temperature"] for each in ways.seen} == {0.0}
    sampled = [
        lm.generate_until(generate(*PROMPTS, do_sample=True, temperature=1.0, max_gen_toks=20)) for _ in range(2)
    ]
    assert sampled[0] == sampled[1]
    lm._seed = 5  # as our harness does for each repeat
    assert lm.generate_until(generate(*PROMPTS, do_sample=True, temperature=1.0, max_gen_toks=20)) != sampled[0]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_chat_uses_the_servers_template(url: str, ways: Ways, reference: HFLM, concurrency: int) -> None:
    lm = server_lm(url, chat=True, concurrency=concurrency)
    messages = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}] for prompt in PROMPTS]
    until = ["\n", "a very", "b very", "c very", "the"]
    ours = lm.generate_until(generate(*(lm.apply_chat_template(each) for each in messages), until=until))
    theirs = reference.generate_until(
        generate(*(reference.apply_chat_template(each) for each in messages), until=until)
    )
    assert ours == theirs
    assert [set(each["body"]["stop"]) for each in ways.seen] == [set(until)] * 3, "all five, lm-eval sends four"
    ways.seen.clear()
    lm.generate_until(generate(PROMPTS[0]))
    assert ways.seen[0]["body"]["messages"] == [{"role": "user", "content": PROMPTS[0]}]
    for ask, kind, arguments in (
        (lm.loglikelihood, "loglikelihood", PAIRS),
        (lm.loglikelihood_rolling, "loglikelihood_rolling", [("some text",)]),
    ):
        with pytest.raises(
            EvalError, match="task some_task: needs log-likelihoods, which a chat endpoint does not give"
        ):
            ask(asked(kind, arguments))


def test_answers_without_text_are_counted(url: str, ways: Ways) -> None:
    lm = server_lm(url, chat=True)
    nothing = {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": None}}
    ways.odd = json.dumps({"choices": [nothing]}).encode()
    assert not any(lm.generate_until(generate(*PROMPTS))) and lm.empty == len(PROMPTS)


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("trouble", [{"fail": 2}, {"fail": 2, "status": 429}, {"drop": 2}])
def test_what_is_over_soon_is_tried_again(
    url: str, ways: Ways, folder: Path, reference: HFLM, concurrency: int, trouble: dict[str, int]
) -> None:
    lm = server_lm(url, tokenizer=folder, concurrency=concurrency)
    vars(ways).update(trouble)
    found = lm.loglikelihood(asked("loglikelihood", PAIRS))
    assert [round(value, 3) for value, _ in found] == [
        round(value, 3) for value, _ in reference.loglikelihood(asked("loglikelihood", PAIRS))
    ]
    assert len(ways.seen) == len(PAIRS) + 1 + 2
    vars(ways).update(trouble)
    assert lm.generate_until(generate(*PROMPTS)) == reference.generate_until(generate(*PROMPTS))


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ({"fail": 99}, r"/v1: HTTP 500 \(out of luck\); see the log of the server"),
        ({"fail": 99, "status": 429}, r"/v1: HTTP 429 \(out of luck\); lower --concurrency"),
        ({"drop": 99}, r"/v1: gives no answer that can be read \(.+\); is an OpenAI-compatible server up\?"),
        ({"slow": 0.6}, r"/v1: no answer within 0\.2 s; give a longer --timeout"),
        ({"key": "other"}, r"/v1: HTTP 401 \(.*Unauthorized.*\); set OPENAI_API_KEY"),
        ({"odd": b"<html>"}, r"/v1: gives no answer that can be read"),
        ({"odd": b'{"error": "overloaded"}'}, r'/v1: an answer without choices \(\{"error": "overloaded"\}\)'),
        ({"odd": b'{"choices": []}'}, r'/v1: an answer without choices \(\{"choices": \[\]\}\)'),
        ({"models": ("another",)}, r"/v1: HTTP 404 \(The model `tiny` does not exist\.\)"),
        ({"logprobs": "none"}, r"/v1: 0 log-probabilities and 0 alternatives for \d+ tokens .*vLLM's and SGLang's"),
        ({"logprobs": "generated"}, r"/v1: 0 log-probabilities and 0 alternatives for \d+ tokens"),
        ({"logprobs": "short"}, r"/v1: (\d+) log-probabilities and \1 alternatives for \d+ tokens"),
        ({"logprobs": "null"}, r"/v1: 1 log-probabilities and \d+ alternatives for \d+ tokens"),
        ({"strange": True}, r"/v1: reads the tokens of 'The quick .*\.' as '\?The .*': give --tokenizer"),
    ],
)
def test_trouble_is_one_line(
    url: str, ways: Ways, folder: Path, concurrency: int, trouble: dict[str, Any], message: str, caplog: Any
) -> None:
    lm = server_lm(url, tokenizer=folder, concurrency=concurrency, timeout=0.2 if "slow" in trouble else 60)
    vars(ways).update(trouble)
    with pytest.raises(EvalError, match=message) as raised:
        lm.loglikelihood(asked("loglikelihood", PAIRS[:4]))
    one_line(raised.value)
    # several fail at once, where the probe has been passed
    vars(ways).update(vars(Ways(seen=ways.seen)))
    lm.timeout = 60
    lm.loglikelihood(asked("loglikelihood", PAIRS[:1]))
    vars(ways).update(trouble)
    lm.timeout = 0.2 if "slow" in trouble else 60
    if "strange" not in trouble:  # what is echoed is no part of a score
        with pytest.raises(EvalError, match=message) as raised:
            lm.loglikelihood(asked("loglikelihood", PAIRS[:4]))
        one_line(raised.value)
    del raised
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ({"fail": 99, "status": 503}, r"/v1: HTTP 503 \(out of luck\)"),
        ({"odd": b'{"choices": []}'}, r"/v1: an answer without text"),
        ({"odd": b'{"choices": [{"index": 0}]}'}, r"/v1: an answer without text"),
        ({"odd": b'{"error": {"message": "no"}}'}, r"/v1: an answer without text"),
        ({"odd": b"[]"}, r"/v1: "),
    ],
)
def test_trouble_with_generation_is_one_line(
    url: str, ways: Ways, folder: Path, chat: bool, trouble: dict[str, Any], message: str
) -> None:
    for concurrency in (1, 3):
        vars(ways).update({"fail": 0, "odd": None})
        lm = server_lm(url, tokenizer=folder, chat=chat, concurrency=concurrency)
        vars(ways).update(trouble)
        with pytest.raises(EvalError, match=message) as raised:
            lm.generate_until(generate(*PROMPTS))
        one_line(raised.value)


def test_a_template_that_the_server_lacks_is_told(ways: Ways, model: Model) -> None:
    bare = Model(EXAMPLE)
    with openai_server.serving(bare, ways) as url:
        lm = server_lm(url, chat=True)
        with pytest.raises(EvalError, match=r"HTTP 400 \(no chat template was given, and the tokenizer has none\)"):
            lm.generate_until(generate(PROMPTS[0]))


def test_what_is_too_long_loses_its_beginning_and_is_counted(url: str, ways: Ways, folder: Path) -> None:
    ways.length = 40
    lm = server_lm(url, tokenizer=folder, concurrency=2)
    text = " ".join(PROMPTS * 9)
    (long, _), (short, _) = lm.loglikelihood(asked("loglikelihood", [(text, " file"), ("Raise an", " exception")]))
    assert long < 0 and short < 0 and dict(lm.truncated) == {"some_task": 1}
    lm.generate_until(generate(text, "Raise"))
    assert lm.truncated["some_task"] == 2
    with pytest.raises(EvalError, match=r"task some_task: a continuation has \d+ tokens, too many"):
        lm.loglikelihood(asked("loglikelihood", [("Raise", " " + text)]))
    with pytest.raises(EvalError, match="task some_task: an answer may be longer"):
        lm.generate_until(generate("Raise", max_gen_toks=64))
    ways.length = None  # a server that says nothing of it refuses by itself
    silent = server_lm(url, tokenizer=folder)
    ways.length = 40
    with pytest.raises(EvalError, match=r"HTTP 400 \(This model's maximum context length is 40 tokens\."):
        silent.loglikelihood(asked("loglikelihood", [(text, " file")]))


def test_a_server_that_is_not_there(folder: Path) -> None:
    for ask in (server_lm, server_identity):
        with pytest.raises(EvalError, match=r"http://127\.0\.0\.1:9/v1: gives no answer that can be read") as raised:
            ask("http://127.0.0.1:9/v1")
        one_line(raised.value)


def test_the_models_name(url: str, ways: Ways, folder: Path) -> None:
    assert server_lm(url, tokenizer=folder).model == NAME
    ways.models = ("one", "two")
    with pytest.raises(UsageError, match="serves one, two; say which with --served-model"):
        server_lm(url, tokenizer=folder)
    with pytest.raises(UsageError, match="serves one, two, not three"):
        server_lm(url, model="three", tokenizer=folder)
    assert server_lm(url, model="two", tokenizer=folder).model == "two"
    ways.models = ()
    with pytest.raises(EvalError, match="serves no model"):
        server_lm(url, tokenizer=folder)
    with pytest.raises(EvalError, match=r"HTTP 404 \(.*Not Found.*\); see that the address ends where the API begins"):
        server_lm(url.removesuffix("/v1"), tokenizer=folder)


def test_the_tokenizer(url: str, ways: Ways, folder: Path) -> None:
    with pytest.raises(
        UsageError, match=r"prompts are sent as tokens: give --tokenizer, a folder with tiny's tokenizer"
    ):
        server_lm(url)
    ways.root = str(folder)
    assert server_lm(url).tokenizer.name_or_path == str(folder)


def test_what_a_record_holds_of_a_server(url: str, ways: Ways, folder: Path, tmp_path: Path) -> None:
    ways.root, ways.key = str(folder), "sk-very-secret"
    key = tmp_path / "key"
    key.write_text("sk-very-secret\n")
    found = server_identity(url, key_file=key)
    assert found == {
        "runtime": "vllm",
        "model": NAME,
        "root": "with-template",
        "max_length": 2048,
        "version": "0.32.0",
    }
    assert "secret" not in json.dumps(found)
    ways.version, ways.root = False, "org/name"
    assert server_identity(url, NAME, key_file=key) | {"version": None, "root": "org/name"} == server_identity(
        url, key_file=key
    )


def test_keys(url: str, ways: Ways, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = server_lm(url, tokenizer=folder)
    lm.loglikelihood(asked("loglikelihood", PAIRS[:1]))
    assert not [each for each in ways.seen if "Authorization" in each["headers"]]
    ways.key = "one"
    with pytest.raises(EvalError, match=r"HTTP 401 \(.*Unauthorized.*\); set OPENAI_API_KEY"):
        server_lm(url, tokenizer=folder)
    monkeypatch.setenv("OPENAI_API_KEY", "one")
    assert server_lm(url, tokenizer=folder).loglikelihood(asked("loglikelihood", PAIRS[:1]))
    ways.key = "two"
    key = tmp_path / "key"
    key.write_text("two\n")
    assert server_lm(url, tokenizer=folder, key_file=key, concurrency=1).generate_until(generate(PROMPTS[0]))
    for text, message in (("", "holds 0 words"), ("two words", "holds 2 words")):
        key.write_text(text)
        with pytest.raises(UsageError, match=message):
            server_lm(url, tokenizer=folder, key_file=key)
    with pytest.raises(UsageError, match="the API key cannot be read"):
        server_lm(url, tokenizer=folder, key_file=tmp_path / "none")


def test_a_task_through_a_server_equals_lm_evals_own_model(url: str, folder: Path, reference: HFLM) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    from phasefold.evals.tasks import FOLDER

    manager = TaskManager(include_path=str(FOLDER), include_defaults=False)
    ours, theirs = (
        lm_eval.simple_evaluate(
            lm, tasks=["docstring_cloze", "docstring_choice"], task_manager=manager, limit=12, bootstrap_iters=0
        )["results"]
        for lm in (server_lm(url, tokenizer=folder), reference)
    )
    for task, metrics in theirs.items():
        for metric in metrics.keys() & {"acc,none", "acc_norm,none", "perplexity,none"}:
            assert ours[task][metric] == pytest.approx(metrics[metric], rel=1e-4)
