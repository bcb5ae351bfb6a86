"""What a model is asked in an evaluation: distributions of given tokens, and continuations of prompts.

Three kinds of runner answer: `whole.Whole` (a checkpoint in memory), `layered.Layered` (a checkpoint of any size, layer
by layer) and `served.Served` (a pair, as it is served). What is made of the answers is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

#: told how many of the texts or prompts are done since the last call
Advance = Callable[[int], None]
#: asked after each token of prompt number i: is this, all tokens made so far, where it ends?
Finished = Callable[[int, Sequence[int]], bool]


class Scored(NamedTuple):
    """logprob: of the whole continuation, nats. greedy: whether greedy decoding would have made it."""

    logprob: float
    greedy: bool


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0: greedy, the rest is without meaning. top_k 0: all. Each prompt has random numbers of its own,
    from the seed and its place, so that what it gets depends on no neighbour.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


class Runner(Protocol):
    """A model that is ready. about: what runs, for the record: "runtime", "way", "dtype", "batch", of a pair "kv" too.

    max_length: tokens that a text may have. vocabulary: logits of a token.
    """

    about: Mapping[str, Any]
    max_length: int
    vocabulary: int

    def logits(
        self, texts: Sequence[Sequence[int]], firsts: Sequence[int], advance: Advance
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """For each text its number and float32 [len - first, vocabulary], in any order, on the CPU.

        Row j is the distribution of token first + j, before softmax, given all tokens before it; 1 <= first < len.
        A pair computes the tokens before `first` as a prompt in prefill and the others in decode.
        """
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], limit: int, sampling: Sampling, finished: Finished, advance: Advance
    ) -> list[list[int]]:
        """At most `limit` tokens behind each prompt, without the prompt. LoadError where this way cannot generate."""
        ...

    def close(self) -> None:
        """Let go of memory and files."""
        ...


def score(runner: Runner, requests: Sequence[tuple[Sequence[int], Sequence[int]]], advance: Advance) -> list[Scored]:
    """Contexts and continuations, neither empty, together no longer than the model takes -> one value each.

    What differs in its last token alone is computed once: the distribution of that token is the same. `advance` hears
    of texts as the runner has them, and of what was saved at the end.
    """
    together: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for number, (context, continuation) in enumerate(requests):
        together.setdefault((len(context), (*context, *continuation[:-1])), []).append(number)
    members = list(together.values())
    texts = [[*requests[some[0]][0], *requests[some[0]][1]] for some in members]
    firsts = [len(requests[some[0]][0]) for some in members]
    found: list[Scored | None] = [None] * len(requests)
    for place, logits in runner.logits(texts, firsts, advance):
        logprobs, best = logits.log_softmax(-1), logits.argmax(-1)
        for number in members[place]:
            tokens = torch.tensor(requests[number][1])
            each = logprobs.gather(1, tokens[:, None])
            found[number] = Scored(float(each.sum()), bool((best == tokens).all()))
    advance(len(requests) - len(texts))
    assert None not in found, "a runner left a text out"
    return [one for one in found if one is not None]
