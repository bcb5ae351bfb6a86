"""phasefold as a model of lm-eval, held against lm-eval's own HFLM: tokens, log-likelihoods, answers."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from plain import Plain
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from phasefold.calib.text import load_tokenizer
from phasefold.errors import EvalError, UsageError
from phasefold.evals.answers import end_tokens, ends, way_of
from phasefold.evals.model import PhasefoldLM
from phasefold.evals.runner import Sampling

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = ("kimi", "glm4", "glm5")
END = "<|endoftext|>"
CONTEXTS = ("", "Return the ", "Open the file and return\n\n", "  The module defines", END + "Raise an error")
CONTINUATIONS = (" value", " values of", "a list of strings.", "x", " value of the ")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def asked(kind: str, arguments: Sequence[tuple[Any, ...]], task: str = "toy") -> list[Instance]:
    return [Instance(kind, {}, one, number, (task, number, 1)) for number, one in enumerate(arguments)]


def pairs() -> list[tuple[str, str]]:
    long = "The function takes a sequence and returns the first of its items that is not empty. " * 6
    every = [(context, continuation) for context in CONTEXTS for continuation in CONTINUATIONS]
    return [*every, (long, "It is an error"), (long, "It is")]


def hf(name: str, dtype: str = "float32", **more: Any) -> HFLM:
    return HFLM(pretrained=str(EXAMPLES / f"tiny-{name}"), dtype=dtype, device="cpu", **{"batch_size": 4} | more)


@pytest.mark.parametrize("name", NAMES)
def test_loglikelihoods_equal_those_of_lm_eval(name: str) -> None:
    ours = PhasefoldLM.create_from_arg_string(f"target={EXAMPLES / f'tiny-{name}'},dtype=float32,max_length=64")
    theirs = hf(name, max_length=64)
    given = pairs()
    for context, continuation in given:
        if context:
            assert ours._encode_pair(context, continuation) == theirs._encode_pair(context, continuation)
    found, expected = (lm.loglikelihood(asked("loglikelihood", given), disable_tqdm=True) for lm in (ours, theirs))
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-5, rel=0)
    assert ours.truncated == {"toy": 2}

    texts = [(text,) for text in ("Return the value.", "", "Set the name of the thread. " * 40)]
    rolling, expected = (lm.loglikelihood_rolling(asked("loglikelihood_rolling", texts)) for lm in (ours, theirs))
    assert rolling == pytest.approx(expected, rel=1e-6)
    assert rolling[1] == 0


def test_bfloat16_is_as_near_as_rounding_allows() -> None:
    """lm-eval's takes other batches and another kernel of attention: a token's error is one of bfloat16's 8 bits."""
    ours = PhasefoldLM(str(EXAMPLES / "tiny-glm4"), dtype="bfloat16", batch_size=1)
    theirs = hf("glm4", "bfloat16", batch_size=1, softmax_dtype="float32")
    given = asked("loglikelihood", pairs())
    found, expected = (lm.loglikelihood(given, disable_tqdm=True) for lm in (ours, theirs))
    counts = [len(ours.tok_encode(continuation, add_special_tokens=False)) for _, continuation in pairs()]
    errors = [abs(a - b) / count for (a, _), (b, _), count in zip(found, expected, counts, strict=True)]
    assert sum(errors) / len(errors) < 0.02
    assert max(errors) < 0.1


@pytest.mark.parametrize("name", NAMES)
def test_answers_equal_those_of_lm_eval(name: str) -> None:
    folder = EXAMPLES / f"tiny-{name}"
    ours = PhasefoldLM(runner=Plain(folder), tokenizer=load_tokenizer(folder), max_length=72)
    theirs = hf(name, batch_size=1, max_length=72)
    prompts = ("Return the ", "Open the file and", "The function takes a sequence and returns it. " * 10)
    ways: list[dict[str, Any]] = [
        {"max_gen_toks": 12},
        {"until": ["\n\n", "."], "max_gen_toks": 24},
        {"until": "the", "max_new_tokens": 24, "do_sample": False, "temperature": 0.0},
        {"until": [" of", "a li", "ü"], "max_tokens": 24, "temperature": 0},
    ]
    given = asked("generate_until", [(prompt, way) for way in ways for prompt in prompts])
    found, expected = (lm.generate_until(given, disable_tqdm=True) for lm in (ours, theirs))
    assert found == expected
    assert len(set(found)) > len(ways)
    assert ours.truncated == {"toy": len(ways)}


def test_tokens_are_those_of_lm_eval_where_the_tokenizer_puts_something_before() -> None:
    folder = EXAMPLES / "tiny-glm4"
    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.post_processor = TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    strings = ["Return", END, f"{END}Return the value", " a b", f"x{END}"]
    for bos in (END, None):
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, bos_token=bos)
        tokenizer.name_or_path = str(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        ours = PhasefoldLM(runner=Plain(folder), tokenizer=tokenizer)
        theirs = HFLM(pretrained=model, tokenizer=tokenizer, device="cpu")
        assert ours.prefix_token_id == theirs.prefix_token_id == 0
        assert ours.tokenizer_name == theirs.tokenizer_name
        for string in strings:
            assert ours.tok_encode(string) == theirs.tok_encode(string)
            bare = ours.tok_encode(string, add_special_tokens=False)
            assert bare == theirs.tok_encode(string, add_special_tokens=False)
        assert ours.tok_encode("Return")[0] == 0
        assert ours.passage("", "Return") == [0, *ours.tok_encode("Return", add_special_tokens=False)]

    # two tokens before, none of them a bos token: lm-eval's would put them before a chat template's own once more
    inner.post_processor = TemplateProcessing(single=f"{END} {END} $A", special_tokens=[(END, 0)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END)
    ours = PhasefoldLM(runner=Plain(folder), tokenizer=tokenizer)
    assert ours.tok_encode(f"{END}{END}Return") == ours.tok_encode("Return")


def test_chat_template_is_the_tokenizers_own() -> None:
    folder = EXAMPLES / "tiny-glm4"
    tokenizer = load_tokenizer(folder)
    ours = PhasefoldLM(runner=Plain(folder), tokenizer=tokenizer)
    messages = [{"role": "user", "content": "Return"}, {"role": "assistant", "content": "the"}]
    with pytest.raises(EvalError, match="has no chat template"):
        ours.apply_chat_template(messages)
    tokenizer.chat_template = TEMPLATE
    theirs = hf("glm4", tokenizer=tokenizer)
    assert ours.chat_template(True) == theirs.chat_template(True) == TEMPLATE
    for add in (True, False):
        assert ours.apply_chat_template(messages, add) == theirs.apply_chat_template(messages, add)
    tokenizer.chat_template = "{{ raise_exception('no system here') }}"
    with pytest.raises(EvalError, match=r"does not take messages of user, assistant .*no system here"):
        ours.apply_chat_template(messages)


def test_what_was_answered_is_cached(tmp_path: Path) -> None:
    folder = EXAMPLES / "tiny-glm5"
    lm = PhasefoldLM(runner=Plain(folder), tokenizer=load_tokenizer(folder))
    requests = {
        "loglikelihood": asked("loglikelihood", [("Return", " the")]),
        "loglikelihood_rolling": asked("loglikelihood_rolling", [("Return the value.",)]),
        "generate_until": asked("generate_until", [("Return", {"until": ["."], "max_gen_toks": 3})]),
    }
    first = {kind: getattr(lm, kind)(some) for kind, some in requests.items()}
    through = CachingLM(lm, str(tmp_path / "cache.db"))
    for kind, some in requests.items():
        getattr(lm, kind)(some)  # the model itself puts it there, so that a run that is broken off has it
    asked_again = []
    lm.runner.logits = lm.runner.generate = lambda *args: asked_again.append(args)  # type: ignore[method-assign]
    assert {kind: getattr(through, kind)(some) for kind, some in requests.items()} == first
    assert not asked_again
    through.dbdict.close()


def test_answers_end_where_the_model_says(tmp_path: Path) -> None:
    folder = EXAMPLES / "tiny-glm4"
    tokenizer = load_tokenizer(folder)
    assert end_tokens(tokenizer) == {0}
    copied = shutil.copytree(folder, tmp_path / "copied", ignore=shutil.ignore_patterns("*.safetensors"))
    period = tokenizer.encode(".")[0]
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, period]}))
    assert end_tokens(load_tokenizer(copied)) == {0, 5, period}
    (copied / "generation_config.json").unlink()
    (copied / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 7}}))
    assert end_tokens(load_tokenizer(copied)) == {0, 7}

    runner = Plain(folder)
    given = asked("generate_until", [("Return the ", {"max_gen_toks": 24})])
    (whole,) = PhasefoldLM(runner=runner, tokenizer=tokenizer).generate_until(given, disable_tqdm=True)
    assert "." in whole
    (short,) = PhasefoldLM(runner=runner, tokenizer=tokenizer, eos=[0, period]).generate_until(given, disable_tqdm=True)
    assert short == whole.split(".")[0]


def test_a_stop_string_is_seen_as_soon_as_it_is_there() -> None:
    tokenizer = load_tokenizer(EXAMPLES / "tiny-glm4")
    text = "one two\u20ac three"
    tokens = tokenizer.encode(text)
    finished = ends(["o\u20ac t", "never"], frozenset({999}), tokenizer.decode)
    first = next(n for n in range(1, len(tokens) + 1) if finished(0, tokens[:n]))
    assert "o\u20ac t" in tokenizer.decode(tokens[:first])
    assert "o\u20ac t" not in tokenizer.decode(tokens[: first - 1])
    assert finished(0, [3, 999])
    assert not ends([], frozenset(), tokenizer.decode)(0, tokens)


def test_samples_follow_the_seed() -> None:
    lm = PhasefoldLM(str(EXAMPLES / "tiny-glm4"), dtype="float32", seed=3)
    way = {"max_gen_toks": 12, "do_sample": True, "temperature": 1.0, "top_p": 0.9}
    given = asked("generate_until", [("Return the ", way), ("Return the ", way), ("Open the ", way)])
    first = lm.generate_until(given, disable_tqdm=True)
    assert lm.generate_until(given, disable_tqdm=True) == first
    assert first[0] != first[1]
    lm.seed = 4
    assert lm.generate_until(given, disable_tqdm=True) != first
    assert way_of(way | {"seed": 9, "top_k": 5}, "toy", 3).sampling == Sampling(1.0, 0.9, 5, 9)


@pytest.mark.parametrize(
    "gen_kwargs, why",
    [
        ({"min_p": 0.1}, "min_p=0.1 is not known; expected do_sample, temperature"),
        ({"do_sample": True}, "needs a temperature above 0, found None"),
        ({"temperature": 1, "top_p": 0}, "top_p=0: expected above 0"),
        ({"max_gen_toks": 0}, "max_gen_toks=0"),
    ],
)
def test_ways_that_make_no_sense_are_refused(gen_kwargs: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        way_of(gen_kwargs, "toy", 0)
    assert way_of({"num_beams": 1, "do_sample": False, "temperature": 1, "until": ["", "."]}, "toy", 0).until == (".",)


def test_what_cannot_be_scored_is_refused() -> None:
    folder = EXAMPLES / "tiny-kimi"
    lm = PhasefoldLM(runner=Plain(folder), tokenizer=load_tokenizer(folder), max_length=16)
    with pytest.raises(EvalError, match="task toy: asks how likely it is that nothing comes"):
        lm.loglikelihood(asked("loglikelihood", [("", "")]))
    with pytest.raises(EvalError, match="task toy: a continuation has no tokens of its own"):
        lm.loglikelihood(asked("loglikelihood", [("", END)]))
    with pytest.raises(EvalError, match=r"task toy: a continuation has \d+ tokens, the model takes 17 with"):
        lm.loglikelihood(asked("loglikelihood", [("Return", " the value" * 20)]))
    with pytest.raises(EvalError, match="up to 16 tokens leave no place for the question: the model takes 16"):
        lm.generate_until(asked("generate_until", [("Return", {"max_gen_toks": 16})]))
    # white space alone goes into the continuation, and the beginning of a text is before it
    (alone,) = lm.loglikelihood(asked("loglikelihood", [(" ", "value")]))
    assert alone == lm.loglikelihood(asked("loglikelihood", [("", " value")]))[0]


def test_model_args() -> None:
    assert get_model("phasefold") is PhasefoldLM
    assert get_model("hf") is HFLM  # lm-eval's own are still known
    target = EXAMPLES / "tiny-glm4"
    more = {"batch_size": 1, "device": "cuda:0", "max_batch_size": None}
    made = PhasefoldLM.create_from_arg_string(f"target={target},batch_size=3,dtype=float32,memory=8GiB", more)
    assert made.batch_size == 3
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert dict(made.runner.about) | {"dtype": "float32", "device": device} == made.runner.about
    layered = PhasefoldLM.create_from_arg_obj({"target": str(target), "way": "layers"})
    assert layered.runner.about["way"] != made.runner.about["way"]
    for wrong, why in (
        ({"batch_size": "auto"}, "batch_size=auto: expected 1 or more"),
        ({"memory": "much"}, "memory=much: is no size"),
        ({"parallelize": True}, "parallelize: expected dtype, batch_size"),
        ({"max_batch_size": 4}, "max_batch_size: a phasefold model tries"),
        ({"target": "http://127.0.0.1:1/v1"}, "lm-eval asks it as local-completions"),
        ({"target": str(target / "none")}, "no such folder"),
    ):
        added = {"max_batch_size": wrong.pop("max_batch_size", None)}
        with pytest.raises(UsageError, match=why):
            PhasefoldLM.create_from_arg_obj({"target": str(target)} | wrong, added)
    with pytest.raises(UsageError, match="or of a runner and its tokenizer"):
        PhasefoldLM()


def test_a_pair_is_a_model_too() -> None:
    folder = EXAMPLES / "tiny-glm4"
    pair = PhasefoldLM.create_from_arg_string(f"target={folder}+{folder}@bf16")
    whole = PhasefoldLM.create_from_arg_string(f"target={folder}")
    given = asked("loglikelihood", pairs()[:8])
    served, once = (lm.loglikelihood(given, disable_tqdm=True) for lm in (pair, whole))
    assert [value for value, _ in served] == pytest.approx([value for value, _ in once], abs=0.3)
    assert pair.runner.about["way"] == "pair"
