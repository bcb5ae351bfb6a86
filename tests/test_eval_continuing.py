"""Generation: against generate() and the logits warpers of transformers, and its random numbers against their due."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import variants
from engines import (
    BASES,
    by_transformers,
    loaded,
    one_thread,  # noqa: F401  (autouse)
    tokens,
)
from generating import GREEDY, WARM, never, nothing, unrounded, wide_model  # noqa: F401  (fixture)
from scipy import stats
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import phasefold.evals.continuing as continuing
from phasefold.evals.continuing import candidates, continue_prompts, draw, make_pair
from phasefold.evals.runner import Sampling
from phasefold.serving.paged.engine import Engine, Request
from phasefold.serving.paged.weights import load_model

# --------------------------------------------------------------------------------------------------------- generation


@pytest.mark.parametrize("base", BASES)
@pytest.mark.usefixtures("unrounded")
def test_greedy_is_what_transformers_generates(base: str) -> None:
    """In one batch and one after the other, by one checkpoint and by a pair of two copies of it."""
    prompts = [tokens(base, 40 * n, length) for n, length in enumerate((80, 33, 129, 5))] + [tokens(base, 0, 80)]
    theirs = by_transformers(variants.EXAMPLES / base, torch.float32)
    theirs.generation_config.eos_token_id = None
    expected = []
    for prompt in prompts:
        given = torch.tensor([prompt])
        made = theirs.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=24, do_sample=False, pad_token_id=0
        )
        expected.append(made[0, len(prompt) :].tolist())
    first, second = wide_model(base), load_model(variants.EXAMPLES / base, dtype=torch.float32)
    for decode, batch in ((first, 8), (first, 1), (second, 3)):
        assert continue_prompts(first, decode, prompts, 24, GREEDY, never, batch=batch, advance=nothing) == expected


def test_what_is_sampled_depends_on_seed_and_place_alone() -> None:
    base = "tiny-kimi"
    model = wide_model(base)
    prompts = [tokens(base, 25 * n, 20 + 13 * n) for n in range(6)]

    def sampled(prompts: list[list[int]], sampling: Sampling = WARM, batch: int = 4) -> list[list[int]]:
        return continue_prompts(model, model, prompts, 12, sampling, never, batch=batch, advance=nothing)

    found = sampled(prompts)
    assert found == sampled(prompts, batch=1) == sampled(prompts, batch=6)
    others = [tokens(base, 300, 15), prompts[1], tokens(base, 320, 90), *prompts[3:5]]  # other neighbours, other order
    again = sampled(others)
    assert [again[place] for place in (1, 3, 4)] == [found[place] for place in (1, 3, 4)]
    assert all(a != b for a, b in zip(found, sampled(prompts, replace(WARM, seed=8)), strict=True))
    alike = sampled([prompts[2]] * 5)  # one prompt, computed once, and five continuations
    assert alike[2] == found[2] and len({tuple(output) for output in alike}) == 5
    few = prompts[:3]
    cold = sampled(few, replace(WARM, temperature=1e-4))
    assert cold == sampled(few, replace(WARM, top_k=1)) == sampled(few, replace(WARM, top_p=1e-9))
    assert cold == sampled(few, GREEDY) != found[:3]


@pytest.mark.usefixtures("unrounded")
def test_a_prompt_ends_where_it_is_told_to() -> None:
    base, model = "tiny-glm4", wide_model("tiny-glm4")
    prompts = [tokens(base, 31 * n, 30 + 11 * n) for n in range(5)]
    whole = continue_prompts(model, model, prompts, 25, GREEDY, never, batch=3, advance=nothing)
    asked: list[tuple[int, tuple[int, ...]]] = []
    lengths = [1, 25, 9, 2, 30]

    def finished(number: int, output: Sequence[int]) -> bool:
        asked.append((number, tuple(output)))
        return len(output) >= lengths[number]

    done: list[int] = []
    found = continue_prompts(model, model, prompts, 25, GREEDY, finished, batch=3, advance=done.append)
    assert found == [output[:length] for output, length in zip(whole, lengths, strict=True)]
    assert sorted(asked) == [(n, tuple(o[:size])) for n, o in enumerate(found) for size in range(1, len(o) + 1)]
    assert sum(done) == 5
    assert continue_prompts(model, model, [], 25, GREEDY, never, batch=3, advance=nothing) == []


@pytest.mark.parametrize("two", [False, True])
def test_pools_hold_whatever_comes(two: bool) -> None:
    """Their size is computed: no request may want for a page, and none is left held."""
    base, random = "tiny-kimi", np.random.default_rng(3)
    model = loaded(base)
    other = replace(model) if two else model
    for size, batch in ((1, 2), (4, 3), (7, 5)):
        prompts = [tokens(base, int(random.integers(3)), int(random.integers(1, 40))) for _ in range(14)]
        prompts += [prompts[3]] * 4
        budgets = random.integers(1, 12, len(prompts)).tolist()
        requests = [Request(prompt, budget, keep=False) for prompt, budget in zip(prompts, budgets, strict=True)]
        pair = make_pair(model, other, requests, kv="bf16", scales=None, batch=batch, page_size=size)
        assert (pair.prefill is pair.decode) is not two
        requests.sort(key=lambda request: request.prompt)
        assert len(list(pair.stream(requests))) == len(requests)
        assert [(request.error, len(request.output)) for request in requests] == [(None, r.budget) for r in requests]
        assert all(not request.logits and request.lease is None for request in requests)
        for engine in (pair.prefill, pair.decode):
            assert len(engine.pool.free) == engine.pool.num_pages - 1 and not any(engine.pool.references)


def test_as_many_decode_at_once_as_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[int] = []
    plain = Engine.decode

    def counted(self: Engine, requests: Sequence[Request]) -> None:
        at_once.append(len(requests))
        plain(self, requests)

    monkeypatch.setattr(Engine, "decode", counted)
    model, prompts = loaded("tiny-glm4"), [tokens("tiny-glm4", 20 * n, 10) for n in range(6)]
    for decode in (model, replace(model)):
        at_once.clear()
        continue_prompts(model, decode, prompts, 6, GREEDY, never, batch=3, advance=nothing, page_size=1)
        assert at_once == [3] * 10


# -------------------------------------------------------------------------------------------------- choosing of tokens

SAMPLINGS = [
    Sampling(0.7), Sampling(1.0, top_p=0.9), Sampling(1.3, top_k=25), Sampling(0.8, top_p=0.6, top_k=50),
    Sampling(2.0, top_p=0.99, top_k=1), Sampling(0.5, top_p=1e-6), Sampling(1.0, top_k=5000),
]  # fmt: skip


def warped(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Probabilities [vocabulary], float64, by transformers' own warpers, in the order in which generate() has them."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits[None].double())
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores[0].softmax(-1)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_what_is_left_is_what_transformers_leaves(sampling: Sampling) -> None:
    generator = torch.Generator().manual_seed(1)
    for spread in (0.5, 3.0, 12.0):
        logits = torch.randn(1000, generator=generator) * spread
        left, likely = candidates(logits, sampling)
        expected = warped(logits, sampling)
        assert sorted(left.tolist()) == expected.nonzero()[:, 0].tolist()
        assert torch.allclose(likely, expected[left], rtol=1e-9, atol=0) and float(likely.sum()) == pytest.approx(1)


def test_a_sum_that_is_reached_exactly_ends_the_set() -> None:
    alike = torch.zeros(4)  # a quarter each, exactly
    for top_p, left in ((0.25, [0]), (0.26, [0, 1]), (0.5, [0, 1]), (0.75, [0, 1, 2]), (0.8, [0, 1, 2, 3])):
        found, likely = candidates(alike, Sampling(1.0, top_p=top_p))
        assert found.tolist() == left and likely.tolist() == [1 / len(left)] * len(left)
    assert set(candidates(torch.tensor([3.0, 1.0, 1.0, 0.0]), Sampling(1.0, top_k=2))[0].tolist()) == {0, 1, 2}


def fit(logits: torch.Tensor, drawn: Sampling, due: Sampling) -> float:
    """p-value of 4,000 prompts' first tokens against transformers' probabilities; what is rare stands together."""
    draws = [continuing._choose(number, drawn)(logits, 0) for number in range(4000)]
    found = np.bincount(draws, minlength=len(logits))
    expected = warped(logits, due).numpy()
    assert not found[expected == 0].any()
    expected = expected / expected.sum() * len(draws)
    rare = expected < 20
    both = [np.append(values[~rare], values[rare].sum()) for values in (found, expected)]
    kept = both[1] > 0  # nothing is rare where top_p left a few
    return float(stats.chisquare(both[0][kept], both[1][kept]).pvalue)


@pytest.mark.parametrize("sampling", SAMPLINGS[:4], ids=str)
def test_first_tokens_are_drawn_as_often_as_is_their_due(sampling: Sampling) -> None:
    logits = torch.randn(200, generator=torch.Generator().manual_seed(2)) * 2
    assert 0.001 < fit(logits, replace(sampling, seed=11), sampling) < 0.999
    assert fit(logits, replace(sampling, seed=11, temperature=0.85 * sampling.temperature), sampling) < 1e-6


def test_each_number_of_the_unit_interval_falls_on_a_token_that_can_be() -> None:
    last = float(np.nextafter(1, 0))
    logits = torch.tensor([-2000.0, 0.0, -200.0, 1.0, -2000.0])  # the outer ones have a probability of 0
    assert draw(logits, Sampling(1.0), 0.0) == 1 and draw(logits, Sampling(1.0), last) == 3
    numbers = (0.0, 0.2499, 0.25, 0.4999, 0.5, 0.75, last)
    assert [draw(torch.zeros(4), Sampling(1.0), number) for number in numbers] == [0, 0, 1, 1, 2, 3, 3]
