"""Texts as batches of one length each, and the logits at the places that are wanted: the same for every runner of a
checkpoint, so that two runners multiply matrices of the same shapes and can be compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import EvalError, UsageError

#: in which a forward pass can run
DTYPES = ("bfloat16", "float32")
#: logits that are computed together, so many at most (one text's are never parted)
PIECE = 1 << 26


class Batch(NamedTuple):
    """Texts that go through a model together.

    numbers: which of all texts they are. tokens: int64 [B, L], each text without its last token, then zeros: a causal
    model needs no mask for them, and nobody reads what it says there. spans: [first, last) of the places whose logits
    are wanted, of each text. rows: where its tokens lie where those of all batches lie in one row.
    """

    numbers: tuple[int, ...]
    tokens: torch.Tensor
    spans: tuple[tuple[int, int], ...]
    rows: range


def check_run(dtype: str, batch: int) -> torch.dtype:
    """The dtype of that name. UsageError for another, and for batches of nothing."""
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r}: a forward pass runs in {' or '.join(DTYPES)}")
    if batch < 1:
        raise UsageError(f"batch is {batch}; at least one text must go through the model at a time")
    found: torch.dtype = getattr(torch, dtype)
    return found


def make_batches(texts: Sequence[Sequence[int]], firsts: Sequence[int], size: int, config: Any) -> list[Batch]:
    """At most `size` texts in each, the longest ones first. EvalError for a text that the model cannot take.

    A text may have one token more than the model has positions: its last one is never read. config: transformers'.

    An indexer gives many tokens a score of exactly zero, and which of them it chooses depends on how long the padded
    text is: texts of which it leaves something out are padded by nothing, so that none depends on its neighbours.
    """
    max_length, vocabulary = config.max_position_embeddings, config.vocab_size
    chosen = getattr(config, "index_topk", max_length)
    for number, (text, first) in enumerate(zip(texts, firsts, strict=True), 1):
        name = f"text {number} of {len(texts)}"
        if not 1 <= first < len(text):
            raise EvalError(
                f"{name}: token {first} of {len(text)} is to be scored first; at least one token must stand before it, "
                "and it must be there"
            )
        if len(text) - 1 > max_length:
            raise EvalError(f"{name}: {len(text):,} tokens, but the model takes {max_length:,}; shorten the text")
        if min(text) < 0 or max(text) >= vocabulary:
            wrong = min(text) if min(text) < 0 else max(text)
            raise EvalError(f"{name}: token {wrong}, but the model has {vocabulary:,}: another model's tokenizer")
    order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
    batches, start = [], 0
    for numbers in _together(order, [len(text) - 1 for text in texts], size, chosen):
        tokens = torch.zeros(len(numbers), len(texts[numbers[0]]) - 1, dtype=torch.int64)
        for line, number in zip(tokens, numbers, strict=True):
            line[: len(texts[number]) - 1] = torch.tensor(texts[number][:-1])
        spans = tuple((firsts[number] - 1, len(texts[number]) - 1) for number in numbers)
        batches.append(Batch(numbers, tokens, spans, range(start, start + tokens.numel())))
        start += tokens.numel()
    return batches


def _together(order: list[int], lengths: list[int], size: int, padded: int) -> Iterator[tuple[int, ...]]:
    """Numbers of texts, in their order, as batches. padded: how long the longest batch is that may have padding."""
    some: list[int] = []
    for number in order:
        if some and (len(some) == size or padded < lengths[some[0]] != lengths[number]):
            yield tuple(some)
            some = []
        some.append(number)
    if some:
        yield tuple(some)


def logits_bytes(batches: Sequence[Batch], vocabulary: int, width: int) -> int:
    """What the largest piece of `wanted_logits` takes: as the model gives them, and in float32."""
    pieces = ([batch.spans[place] for place in piece] for batch in batches for piece in _pieces(batch, vocabulary))
    return max(sum(stop - first for first, stop in spans) for spans in pieces) * vocabulary * (width + 4)


def wanted_logits(
    batch: Batch, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], vocabulary: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Each text's number and float32 [wanted, vocabulary] on the CPU, from [B, L, hidden]; head: [n, hidden] -> logits.

    A vocabulary is large: logits of places that nobody asked for are never computed.
    """
    for places in _pieces(batch, vocabulary):
        spans = [batch.spans[place] for place in places]
        rows = torch.cat([hidden[place, slice(*span)] for place, span in zip(places, spans, strict=True)])
        parts = torch.split(head(rows).float().cpu(), [stop - first for first, stop in spans])
        yield from zip((batch.numbers[place] for place in places), parts, strict=True)


def _pieces(batch: Batch, vocabulary: int) -> Iterator[list[int]]:
    """Places of texts in the batch whose logits are computed together."""
    places: list[int] = []
    held = 0
    for place, (first, stop) in enumerate(batch.spans):
        if places and (held + stop - first) * vocabulary > PIECE:
            yield places
            places, held = [], 0
        places.append(place)
        held += stop - first
    yield places
