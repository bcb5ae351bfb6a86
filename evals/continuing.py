"""Prompts continued by a checkpoint or by a pair, greedily or sampled, over the pages of the reference runtime.

What a prompt gets depends on its own random numbers and logits. Of its neighbours nothing comes in but the order of
sums: a batch of another size has products of other shapes, and in BF16 their last bit may differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ..errors import EvalError, UsageError
from ..serving.paged.engine import Choose, Ends, Engine, Request
from ..serving.paged.rows import Scales
from ..serving.paged.weights import Loaded
from ..serving.pair import Pair
from .runner import Advance, Finished, Sampling


def continue_prompts(
    prefill: Loaded,
    decode: Loaded,
    prompts: Sequence[Sequence[int]],
    limit: int,
    sampling: Sampling,
    finished: Finished,
    *,
    kv: str = "bf16",
    scales: Scales | None = None,
    batch: int,
    advance: Advance,
    page_size: int = 64,
) -> list[list[int]]:
    """At most `limit` tokens behind each prompt, up to and with the one at which `finished` said so.

    prefill and decode may be one: a single checkpoint. kv, scales: the rows of both pools.

    Raises UsageError for settings that make no sense, EvalError for a prompt that the model cannot take, for logits
    that are no numbers, and where a prompt's pages were found wrong.
    """
    check_sampling(sampling)
    if limit < 1 or batch < 1:
        raise UsageError(f"{limit} tokens behind each prompt, {batch} prompts at once: give at least 1 of both")
    for number, prompt in enumerate(prompts):
        check_tokens((prefill, decode), f"prompt {number + 1} of {len(prompts)}", prompt, limit)
    if not prompts:
        return []
    requests = {
        number: Request(list(prompt), limit, choose=_choose(number, sampling), ends=_ends(number, finished), keep=False)
        for number, prompt in enumerate(prompts)
    }
    numbers = {id(request): number for number, request in requests.items()}
    # neighbours have long beginnings in common, which are then computed once
    order = sorted(requests.values(), key=lambda request: request.prompt)
    pair = make_pair(prefill, decode, order, kv=kv, scales=scales, batch=batch, page_size=page_size)
    for request in pair.stream(order):
        if request.error is not None:
            raise EvalError(f"prompt {numbers[id(request)] + 1} of {len(prompts)}: {request.error}")
        advance(1)
    return [requests[number].output for number in range(len(prompts))]


def make_pair(
    prefill: Loaded,
    decode: Loaded,
    requests: Sequence[Request],
    *,
    kv: str,
    scales: Scales | None,
    batch: int,
    page_size: int,
) -> Pair:
    """Engines with pages for `batch` of these requests, whichever. One engine where the two models are one.

    Of a pair, the decode engine takes no pages over that its own steps have written: what a request gets would depend
    on whether another one happened to have made the same tokens.
    """
    batch = min(batch, len(requests))
    prompt = -(-max(len(request.prompt) for request in requests) // page_size)
    whole = -(-max(len(request.prompt) + request.budget for request in requests) // page_size)
    # 1 is never given out. Of prompts there is one, and the last ones stay to be found by those that begin alike
    sizes = {"prefill": 1 + 2 * prompt, "decode": 1 + batch * whole}
    if prefill is decode:
        pages = sum(sizes.values())
        engine = Engine(prefill, kv=kv, scales=scales, num_pages=pages, page_size=page_size)
        return Pair(engine, engine, max_batch=batch)
    first = Engine(prefill, kv=kv, scales=scales, num_pages=sizes["prefill"], page_size=page_size)
    second = Engine(decode, kv=kv, scales=scales, num_pages=sizes["decode"], page_size=page_size)
    return Pair(first, second, max_batch=batch, share=False)


def check_tokens(models: Sequence[Loaded], name: str, tokens: Sequence[int], more: int = 0) -> None:
    """EvalError where the models cannot take these tokens and `more` behind them. name: which text or prompt it is."""
    vocabulary, positions = bounds(models)
    if not tokens:
        raise EvalError(f"{name}: no tokens in it; give it at least one to start from")
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        wrong = max(tokens) if max(tokens) >= vocabulary else min(tokens)
        raise EvalError(f"{name}: token {wrong}, but the model has {vocabulary:,}: another model's tokenizer")
    if len(tokens) + more > positions:
        behind = f" and {more:,} behind them" if more else ""
        raise EvalError(
            f"{name}: {len(tokens):,} tokens{behind}, but the model has {positions:,} positions; shorten the text, or "
            "ask for fewer tokens"
        )


def bounds(models: Sequence[Loaded]) -> tuple[int, int]:
    """Tokens of the vocabulary, and tokens that a text may have: what all of the models take."""
    configs = [loaded.model.config for loaded in models]
    vocabulary = min(int(config.vocab_size) for config in configs)
    return vocabulary, min(int(config.max_position_embeddings) for config in configs)


# ----------------------------------------------------------------------------------------------- the choice of a token


def check_sampling(sampling: Sampling) -> None:
    """UsageError for values that mean nothing."""
    wrong = {
        "temperature": (sampling.temperature, "at least 0", 0 <= sampling.temperature < math.inf),
        "top_p": (sampling.top_p, "greater than 0 and at most 1", 0 < sampling.top_p <= 1),
        "top_k": (sampling.top_k, "at least 0", sampling.top_k >= 0),
        "seed": (sampling.seed, "at least 0", sampling.seed >= 0),
    }
    for name, (value, expected, right) in wrong.items():
        if not right:
            raise UsageError(f"{name} is {value}; expected {expected}")


def candidates(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """[vocabulary] -> the tokens that are left, int64 [n], and their probabilities, float64 [n]; temperature not 0.

    In the order of vLLM and transformers: temperature, top_k, top_p. As in both, tokens as likely as the k-th stay, and
    top_p leaves the smallest set whose sum reaches p (of the probabilities that top_k left); one is always left.
    """
    values = logits.double()
    values = (values - values.max()) / sampling.temperature
    tokens = torch.arange(len(values), device=values.device)
    if 0 < sampling.top_k < len(values):
        tokens = (values >= values.topk(sampling.top_k).values[-1]).nonzero()[:, 0]
    if sampling.top_p < 1:
        likely, order = values[tokens].softmax(-1).sort(descending=True, stable=True)
        before = likely.cumsum(-1).roll(1)
        before[0] = 0.0
        tokens = tokens[order[before < sampling.top_p]]
    return tokens, values[tokens].softmax(-1)


def draw(logits: torch.Tensor, sampling: Sampling, number: float) -> int:
    """The token that a random number of [0, 1) falls on."""
    tokens, likely = candidates(logits, sampling)
    reached = likely.cumsum(-1)
    place = int((reached <= number * reached[-1]).sum())
    return int(tokens[min(place, len(tokens) - 1)])


def _choose(prompt: int, sampling: Sampling) -> Choose:
    drawn: list[float] = []
    generator: np.random.Generator | None = None

    def choose(logits: torch.Tensor, place: int) -> int:
        nonlocal generator
        if not bool(torch.isfinite(logits).all()):
            raise EvalError(
                f"prompt {prompt + 1}: the logits of token {place + 1} behind it are not all finite: "
                "`phasefold verify` the artifact, or calibrate its KV scales anew"
            )
        if sampling.temperature == 0:
            return int(logits.argmax())
        if generator is None:
            # SeedSequence makes streams of (seed, prompt) that have nothing to do with each other
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((sampling.seed, prompt))))
        while len(drawn) <= place:  # what is drawn again after a restart is the same
            drawn.append(float(generator.random()))
        # on the CPU: sums there do not depend on the device's scheduling
        return draw(logits.cpu(), sampling, drawn[place])

    return choose


def _ends(prompt: int, finished: Finished) -> Ends:
    return lambda output: finished(prompt, output)
