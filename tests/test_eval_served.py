"""A pair as a runner: against transformers' own models and caches, and against a pair that is run by hand."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import variants
from cache_values import random_values, statistics_of
from engines import (
    BASES,
    artifact,
    by_transformers,
    divergence,
    forward,
    loaded,
    one_thread,  # noqa: F401  (autouse)
    tokens,
)
from generating import GREEDY, WARM, folders, never, nothing, unrounded  # noqa: F401  (fixture)
from test_kv_artifacts import made
from transformers import DynamicCache

import phasefold.evals.continuing as continuing
from phasefold.calib.kv import kv_scales
from phasefold.errors import EvalError, LoadError, UsageError
from phasefold.evals.continuing import continue_prompts, make_pair
from phasefold.evals.runner import Sampling, Scored, score
from phasefold.evals.served import Served, suitable
from phasefold.serving.kv_given import scales_for
from phasefold.serving.paged.engine import Engine, Request
from phasefold.serving.paged.weights import load_model
from phasefold.serving.pair import Pair


def texts_of(base: str) -> tuple[list[list[int]], list[int]]:
    """Six texts of different lengths and where they are to be scored from; two have one prompt."""
    places = [(0, 60, 10), (40, 130, 1), (90, 1, 30), (200, 75, 12), (0, 60, 25), (300, 40, 7)]
    texts = [tokens(base, start, first + more) for start, first, more in places]
    texts[4] = [*tokens(base, 0, 60), *tokens(base, 150, 25)]
    return texts, [first for _, first, _ in places]


def collected(runner: Served, texts: list[list[int]], firsts: list[int]) -> list[torch.Tensor]:
    done: list[int] = []
    found = dict(runner.logits(texts, firsts, done.append))
    assert sorted(found) == list(range(len(texts))) and sum(done) == len(texts)
    for number, logits in found.items():
        assert logits.shape == (len(texts[number]) - firsts[number], runner.vocabulary)
        assert logits.dtype == torch.float32 and logits.device.type == "cpu"
    return [found[number] for number in range(len(texts))]


# ------------------------------------------------------------------------------------------------------ distributions


@pytest.mark.parametrize("base", BASES)
def test_a_pair_is_two_models_of_transformers_with_one_cache_to_the_bit(base: str) -> None:
    """The prompt by the prefill artifact into transformers' own cache, and the decode artifact goes on with that."""
    texts, firsts = texts_of(base)
    texts, firsts = texts[:4], firsts[:4]  # without the second one of a prompt
    runner = Served(*folders(base), batch=1)
    prefill, decode = (loaded(base, phase).model for phase in ("prefill", "decode"))
    for text, first, ours in zip(texts, firsts, collected(runner, texts, firsts), strict=True):
        held = DynamicCache(config=prefill.config)
        prefill.set_experts_implementation("batched_mm" if first == 1 else "eager")
        with torch.inference_mode():
            prompt = torch.tensor([text[:first]])
            rows = [prefill(input_ids=prompt, cache=held, use_cache=True, logits_to_keep=1).logits[0, -1]]
        rows += [forward(decode, [[token]], held)[0, -1] for token in text[first:-1]]
        assert torch.equal(ours, torch.stack(rows).float())
    assert runner.about["way"] == "pair" and runner.about["runtime"].startswith("transformers 5.")
    assert runner.about["kv"] == {"prefill": "bf16", "decode": "bf16"} and runner.about["kv_scales"] is None
    assert runner.max_length == prefill.config.max_position_embeddings and runner.vocabulary == 1024


@pytest.mark.parametrize(
    ("base", "kv"), [("tiny-glm4", "bf16"), ("tiny-glm4", "fp8_e4m3"), ("tiny-glm5", "fp8_ds_mla")]
)
def test_batches_are_those_of_a_pair_to_the_bit(base: str, kv: str) -> None:
    texts, firsts = texts_of(base)
    found = collected(Served(*folders(base), kv=kv, batch=4), texts, firsts)
    order = sorted(range(6), key=lambda number: (texts[number][: firsts[number]], len(texts[number])))
    requests = {}
    for number in order:
        text, first = texts[number], firsts[number]
        requests[number] = Request(text[:first], len(text) - first, text[first:])
    engines = [Engine(loaded(base, phase), kv=kv, num_pages=100) for phase in ("prefill", "decode")]
    Pair(*engines, max_batch=4).run(list(requests.values()))
    for number, request in requests.items():
        assert torch.equal(found[number], torch.stack(request.logits))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.usefixtures("unrounded")
def test_a_checkpoint_with_itself_is_its_plain_forward_pass(base: str) -> None:
    """Float32 and rows that round nothing: 0.00001 was measured at most, of logits up to 17."""
    texts, firsts = texts_of(base)
    source = variants.EXAMPLES / base
    for batch in (1, 4):
        runner = Served(source, source, batch=batch, dtype=torch.float32)
        found = collected(runner, texts, firsts)
        theirs = by_transformers(source, torch.float32)
        for text, first, ours in zip(texts, firsts, found, strict=True):
            with torch.inference_mode():
                expected = theirs(torch.tensor([text[:-1]]), use_cache=False).logits[0, first - 1 :]
            assert (ours - expected).abs().max() < 1e-4


@pytest.mark.parametrize("base", BASES)
def test_in_bf16_it_is_near(base: str) -> None:
    """What order of sums and rounding of rows cost in BF16: 0.00014 nats a token were measured at most."""
    texts, firsts = texts_of(base)
    source = variants.EXAMPLES / base
    theirs = by_transformers(source)
    found = collected(Served(source, source), texts, firsts)
    for text, first, ours in zip(texts, firsts, found, strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([text[:-1]]), use_cache=False).logits[0, first - 1 :].float()
        assert divergence(ours, expected) < 1e-3


def test_what_decode_steps_wrote_is_nobody_elses() -> None:
    """The first text's steps write a page of the very tokens that the second one's prompt begins with."""
    text = tokens("tiny-glm4", 100, 90)
    runner = Served(*folders("tiny-glm4"), batch=1, page_size=16)
    alone = collected(runner, [text], [60])[0]
    assert torch.equal(collected(runner, [text[:70], text], [10, 60])[1], alone)


@pytest.mark.usefixtures("unrounded")
def test_choices_of_one_question_are_prefilled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    base, runs = "tiny-glm4", list[int]()
    question = tokens(base, 0, 50)
    runner = Served(*folders(base), batch=4, dtype=torch.float32)
    (likeliest,) = runner.generate([question], 6, GREEDY, never, nothing)
    requests = [(question, tokens(base, 60 + 9 * n, 3 + n)) for n in range(3)]
    requests += [(question, likeliest), (question, [*likeliest[:-1], 5]), (tokens(base, 20, 30), [9])]
    plain = Engine.prefill

    def counted(self: Engine, prompt: Sequence[int], **more: Any) -> Any:
        runs.append(len(prompt))
        return plain(self, prompt, **more)

    monkeypatch.setattr(Engine, "prefill", counted)
    done: list[int] = []
    found = score(runner, requests, done.append)
    assert sorted(runs) == [30, 50] and sum(done) == 6
    assert [one.greedy for one in found[:5]] == [False, False, False, True, False]
    for (context, continuation), one in zip(requests, found, strict=True):
        (logits,) = collected(runner, [[*context, *continuation]], [len(context)])
        each = logits.double().log_softmax(-1)[range(len(continuation)), continuation]
        assert isinstance(one, Scored) and one.logprob == pytest.approx(float(each.sum()), abs=1e-4)


# ------------------------------------------------------------------------------------------------------------ KV rows


@pytest.fixture(scope="module")
def scaled(module_path: Path) -> Iterator[dict[str, Path]]:
    """tiny-glm4: a KV-scale manifest, and a pair that holds its scales."""
    source = variants.EXAMPLES / "tiny-glm4"
    manifest = kv_scales(statistics_of(module_path / "stats", source, random_values(source)), 2.0)
    (module_path / "kv.json").write_bytes(manifest.to_bytes())
    made(source, module_path / "prefill", "glm-prefill-fp8", manifest)
    made(source, module_path / "decode", "glm-decode-int4", manifest)
    yield {name: module_path / name for name in ("kv.json", "prefill", "decode")}


def test_fp8_rows_and_their_scales_are_in_the_distributions(scaled: dict[str, Path]) -> None:
    texts, firsts = texts_of("tiny-glm4")
    plain = folders("tiny-glm4")
    runners = {
        "bf16": Served(*plain),
        "one": Served(*plain, kv="fp8_e4m3"),
        "file": Served(*plain, kv="fp8_e4m3", scales=scaled["kv.json"]),
        "artifact": Served(scaled["prefill"], scaled["decode"], kv="fp8_e4m3"),
    }
    assert [runner.about["kv_scales"] for runner in runners.values()] == [None, None, "file", "artifact"]
    sizes = [runner.about["kv_bytes_per_token"]["decode"] for runner in runners.values()]
    assert sizes[0] == 2 * sizes[1] == 2 * sizes[2] == 2 * sizes[3]
    assert any("k_scale is not there" in told for told in runners["file"].about["warnings"])
    found = {name: collected(runner, texts, firsts) for name, runner in runners.items()}
    for first, one, other in (("bf16", "one", "file"), ("one", "file", "bf16")):
        assert not any(torch.equal(a, b) for a, b in zip(found[first], found[one], strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(found[first], found[other], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found["file"], found["artifact"], strict=True))
    # prefill reads what it has written: the first row of a text is not that of BF16 rows either
    assert not torch.equal(found["bf16"][0][0], found["one"][0][0])
    _, scales = scales_for(plain, scaled["kv.json"])
    request = Request(texts[1][:130], 1, texts[1][130:])
    pair = make_pair(
        loaded("tiny-glm4", "prefill"), loaded("tiny-glm4", "decode"), [request],
        kv="fp8_e4m3", scales=scales, batch=1, page_size=64,
    )  # fmt: skip
    (done,) = pair.stream([request])
    assert done is request and torch.equal(request.logits[0], found["file"][1][0])


def test_generation_reads_the_rows(scaled: dict[str, Path]) -> None:
    """The same random numbers over other rows: sooner or later another token."""
    prompts = [tokens("tiny-glm4", 30 * n, 50) for n in range(6)]
    settings = ({}, {"kv": "fp8_e4m3"}, {"kv": "fp8_e4m3", "scales": scaled["kv.json"]})
    found = [Served(*folders("tiny-glm4"), **more).generate(prompts, 40, WARM, never, nothing) for more in settings]
    assert all([len(output) for output in outputs] == [40] * 6 for outputs in found)
    assert found[0] != found[1] != found[2] != found[0]


# ------------------------------------------------------------------------------------------------------ what is refused


def test_pairs_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    prefill, decode = folders("tiny-glm4")
    with pytest.raises(LoadError, match=r"not evaluated: D1 config\.json: architectures"):
        Served(prefill, artifact("tiny-kimi", "decode"))
    tensors, config = variants.load(variants.EXAMPLES / "tiny-glm4")
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name] = -tensors[name]
    other = variants.save(tmp_path / "other", tensors, config)
    with pytest.raises(LoadError, match=r"not evaluated: D5 .*come from different weights"):
        Served(variants.EXAMPLES / "tiny-glm4", other)
    with pytest.raises(LoadError, match="neither vLLM nor SGLang keeps fp8_ds_mla rows of this model"):
        Served(prefill, decode, kv="fp8_ds_mla")
    with pytest.raises(LoadError, match="KV layout 'int8' is unknown"):
        Served(prefill, decode, kv="int8")
    with pytest.raises(UsageError, match=r"kv\.json: bf16 rows are stored at no such scale"):
        Served(prefill, decode, scales=tmp_path / "kv.json")
    with pytest.raises(UsageError, match="a batch of 0"):
        Served(prefill, decode, batch=0)
    with pytest.raises(LoadError, match="device 'nonsense'"):
        Served(prefill, decode, device="nonsense")


def test_who_serves_it_is_said() -> None:
    assert str(suitable(folders("tiny-glm4"), "fp8_e4m3")) == "vllm, sm 90, KV dtype fp8_e4m3"
    assert str(suitable(folders("tiny-glm5"), "fp8_ds_mla")) == "sglang, sm 90, KV dtype fp8_e4m3"


TEXTS = {
    "longer than the model's positions": ([1] * 3000, 5, "text 2 of 2: 3,000 tokens, but the model has 2,048"),
    "a token too many": ([5, 1024, 7], 1, "text 2 of 2: token 1024, but the model has 1,024"),
    "a negative one": ([5, -1, 7], 1, "text 2 of 2: token -1"),
    "no tokens": ([], 0, "text 2 of 2: no tokens"),
    "nothing before": ([5, 6], 0, "token 0 of 2 is to be scored first"),
    "nothing behind": ([5, 6], 2, "token 2 of 2 is to be scored first"),
}


def test_texts_and_settings_that_make_no_sense_are_refused() -> None:
    runner = Served(*folders("tiny-glm4"))
    for text, first, said in TEXTS.values():
        with pytest.raises(EvalError, match=said):
            list(runner.logits([[1, 2], text], [1, first], nothing))
    with pytest.raises(EvalError, match="prompt 1 of 1: 2,040 tokens and 9 behind them"):
        runner.generate([[1] * 2040], 9, GREEDY, never, nothing)
    for wrong in ({"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_k": -1}, {"seed": -1}):
        with pytest.raises(UsageError, match=f"{next(iter(wrong))} is "):
            runner.generate([[1]], 9, Sampling(**wrong), never, nothing)
    with pytest.raises(UsageError, match="0 tokens behind each prompt"):
        runner.generate([[1]], 0, GREEDY, never, nothing)


def test_logits_that_are_no_numbers_are_refused() -> None:
    model = load_model(variants.EXAMPLES / "tiny-glm4")
    model.model.model.norm.weight.data[3] = float("nan")
    for sampling in (GREEDY, WARM):
        with pytest.raises(EvalError, match="prompt 1: the logits of token 1 behind it are not all finite"):
            continue_prompts(model, model, [[1, 2]], 3, sampling, never, batch=2, advance=nothing)
    runner = Served(*folders("tiny-glm4"))
    runner._models = (loaded("tiny-glm4", "prefill"), model)
    with pytest.raises(EvalError, match="text 1 of 1: its logits are not all finite"):
        list(runner.logits([[1, 2, 3]], [1], nothing))


class Faulty(Engine):
    """An engine whose page table goes wrong at a step."""

    def decode(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.lease is not None and len(request.prompt) == 33 and request.steps == 3:
                request.lease.table[0] = 0
        super().decode(requests)


def test_a_stopped_request_is_an_error_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuing, "Engine", Faulty)
    runner = Served(*folders("tiny-glm4"))
    prompts = [tokens("tiny-glm4", 50 * n, length) for n, length in enumerate((20, 33, 40))]
    with pytest.raises(EvalError, match="prompt 2 of 3: entry 0 of the page table leads to page 0"):
        runner.generate(prompts, 9, GREEDY, never, nothing)
    with pytest.raises(EvalError, match="text 2 of 3: entry 0 of the page table leads to page 0"):
        list(runner.logits([[*prompt, *prompt[:9]] for prompt in prompts], [20, 33, 40], nothing))
