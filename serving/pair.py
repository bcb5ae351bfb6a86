"""The pair as it is served: a prefill engine and a decode engine in one process, and the cache that goes between them.

It is a reference, small and exact, and no server: requests are served until each has made as many tokens as it asked
for. Prompts are computed by the one model, their pages are handed over, and the other model goes on in one batch that
requests join and leave. Both pools keep rows of one layout, as the runtimes' do, so that bytes are handed over; BF16
rows may also be encoded on the way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import LoadError, PageError
from .paged.engine import Engine, Request
from .paged.pages import Lease
from .paged.reference import encode
from .paged.rows import Layout, Scales
from .paged.weights import load_model


class Agreement(NamedTuple):
    """How near one set of distributions is to another: mean KL(reference || ours) in nats a token, equal argmaxes.

    None where no tokens were compared.
    """

    top1_agreement: float | None
    mean_kl: float | None
    tokens: int


class Pair:
    """Two engines, or one twice. `max_batch`: how many requests decode at once.

    share: the decode engine takes pages of equal tokens from other requests, its own steps' too, instead of a copy of
    the prefill engine's.
    """

    def __init__(self, prefill: Engine, decode: Engine, *, max_batch: int = 8, share: bool = True) -> None:
        check_handover(prefill, decode)
        if max_batch < 1:
            raise LoadError(f"max_batch is {max_batch}; at least one request must decode at once")
        self.prefill, self.decode, self.max_batch, self.share = prefill, decode, max_batch, share

    def start(self, *requests: Request) -> None:
        """Prefill, first token, handover; for requests of one prompt. A PageError on the way is the requests' own."""
        try:
            lease, logits = self.prefill.prefill(requests[0].prompt, last=True)
        except PageError as error:
            for request in requests:
                request.error = error
            return
        late = None
        try:
            for request in requests:
                request.take(logits[-1])
                if request.done:  # nobody will read its pages
                    continue
                try:
                    tokens = [*request.prompt, *request.output]
                    request.lease = hand_over(self.prefill, self.decode, lease, tokens, share=self.share)
                except PageError as error:
                    request.error = error
        finally:
            late = self.prefill.pool.release(lease)
        for request in requests if late is not None else ():
            if request.lease is not None:
                self.decode.stop(request, late)
            request.error = request.error or late

    def run(self, requests: Sequence[Request], *, retries: int = 0) -> None:
        """Serve all requests. Those that were stopped are run again from their prompts, `retries` times at most."""
        for _ in self.stream(requests):
            pass
        stopped = [request for request in requests if request.error is not None]
        if stopped and retries:
            self.decode.pool.counters.retries += len(stopped)
            for request in stopped:
                request.restart()
            self.run(stopped, retries=retries - 1)

    def stream(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Serve all requests; each is given back as soon as it is done or stopped.

        Neighbours of one prompt join the batch together, and their prompt is computed once.
        """
        waiting, batch = deque(requests), list[Request]()
        try:
            while waiting or batch:
                while joining := self._joining(waiting, batch):
                    for _ in joining:
                        waiting.popleft()
                    self.start(*joining)
                    batch += [request for request in joining if request.lease is not None]
                    yield from [request for request in joining if request.lease is None]
                if going := [request for request in batch if not request.done]:
                    self.decode.decode(going)
                over = [request for request in batch if request.done]
                for request in over:
                    if request.lease is not None:
                        self.decode.stop(request)
                batch = [request for request in batch if not request.done]
                yield from over
        finally:
            for request in batch:  # of whoever stops to listen
                if request.lease is not None:
                    self.decode.stop(request)

    def _joining(self, waiting: Iterable[Request], batch: Sequence[Request]) -> list[Request]:
        """The next requests, all of one prompt, if there is room for all of them; into an empty batch some may go."""
        joining: list[Request] = []
        for request in waiting:
            if joining and request.prompt != joining[0].prompt:
                break
            busy = [*batch, *joining]
            if len(busy) == self.max_batch or (busy and not self._fits(request, busy)):
                return [] if batch else joining
            joining.append(request)
        return joining

    def _fits(self, request: Request, busy: Sequence[Request]) -> bool:
        """Are there pages for all that the busy ones and this request may still write?"""
        size = self.decode.pool.page_size
        needed = sum(-(-(len(one.prompt) + one.budget) // size) for one in (*busy, request) if one.error is None)
        held = sum(len(one.lease.pages) for one in busy if one.lease is not None)
        return needed - held <= len(self.decode.pool.free)


def check_handover(source: Engine, target: Engine) -> None:
    """LoadError where pages of one engine cannot become pages of the other."""
    if source.pool.page_size != target.pool.page_size:
        raise LoadError(f"pages of {source.pool.page_size} and of {target.pool.page_size} tokens: give both one size")
    ours, theirs = source.storage.layout, target.storage.layout
    if [[row.parts for row in rows] for rows in ours.layers] != [[row.parts for row in rows] for rows in theirs.layers]:
        raise LoadError("the two models keep different things of a token; a pair is made of one source")
    for index, (mine, other) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
        if any(row != wanted and row.kind != "bf16" for row, wanted in zip(mine, other, strict=True)):
            raise LoadError(
                f"layer {index}: {ours.name} rows cannot become {theirs.name} rows{_scales(ours, theirs)}: "
                "what is rounded once is not rounded again; hand over bf16, or the very same layout"
            )


def _scales(ours: Layout, theirs: Layout) -> str:
    return " with other scales" if ours.name == theirs.name else ""


def hand_over(source: Engine, target: Engine, lease: Lease, tokens: Sequence[int], *, share: bool = True) -> Lease:
    """Copy or convert the pages of a lease into another engine's. `tokens`: the prompt and the token after it.

    Equal rows are copied as bytes, BF16 rows are encoded once. share: pages that the target has of the same tokens are
    taken instead.
    PageError where the source's pages are not what they should be, or the target has too few.
    """
    if errors := source.pool.check([lease]):
        raise errors[0]
    taken = target.pool.open(tokens if share else [])
    try:
        target.pool.grow(taken, lease.length)
    except PageError:
        target.pool.release(taken)
        raise
    first = taken.shared // target.pool.page_size
    pages = slice(first, len(taken.pages))
    at = lease.table[pages], taken.table[pages]
    layers = zip(source.storage.layout.layers, target.storage.layout.layers, strict=True)
    for index, rows in enumerate(layers):
        for which, (mine, theirs) in enumerate(zip(*rows, strict=True)):
            found = source.storage.tensors[index][which][at[0]].to(target.device)
            if mine != theirs:
                values = mine.decode(found.flatten(0, 1), torch.bfloat16)
                found = theirs.encode(values).reshape(*found.shape[:2], -1)
            target.storage.tensors[index][which][at[1]] = found
    target.pool.commit(taken, tokens[: lease.length])
    return taken


def agreement(requests: Sequence[Request], engine: Engine) -> Agreement:
    """The pair's decode steps against one engine that computes the same tokens as a prompt.

    The first token of each request is left out: the prefill engine made it.
    """
    kl, same = [], []
    for request in requests:
        if request.error is not None or len(request.output) < 2:
            continue
        lease, logits = engine.prefill([*request.prompt, *request.output[:-1]], share=False)
        engine.pool.release(lease)
        reference = logits[len(request.prompt) :].float().log_softmax(-1)
        ours = torch.stack(request.logits[1:]).to(reference.device).log_softmax(-1)
        kl.append(torch.nn.functional.kl_div(ours, reference, log_target=True, reduction="none").sum(-1))
        same.append(ours.argmax(-1) == reference.argmax(-1))
    if not kl:
        return Agreement(None, None, 0)
    every = torch.cat(kl)
    return Agreement(torch.cat(same).float().mean().item(), every.mean().item(), len(every))


def _check_requests(requests: Sequence[Request], engine: Engine) -> None:
    """LoadError for what no runtime would take: tokens that the model has not, texts longer than its positions."""
    config = engine.model.config
    for request in requests:
        if (last := max(request.prompt)) >= config.vocab_size:
            raise LoadError(
                f"the tokenizer gives token {last}, but the model has {config.vocab_size}: another model's tokenizer"
            )
        length = len(request.prompt) + request.budget
        if length > config.max_position_embeddings:
            raise LoadError(
                f"prompt and continuation take {length} tokens, and the model has {config.max_position_embeddings} "
                "positions; give a shorter prompt, or ask for fewer tokens"
            )


def serve(
    prefill: Path,
    decode: Path,
    prompts: Sequence[str],
    *,
    tokens: int = 32,
    kv: str = "bf16",
    prefill_kv: str | None = None,
    scales: Scales | None = None,
    source: Path | None = None,
    page_size: int = 64,
    tracked: bool = True,
    device: str = "cpu",
) -> dict[str, Any]:
    """Serve prompts through a pair of artifacts and say how near it is to prefill alone and to the source.

    kv: the layout of the rows in both pools, with `scales`. prefill_kv: another one for prefill's, "bf16": its rows are
    then encoded when they are handed over, and prompts are computed from rows that nothing was rounded in.
    Returns text (one for each prompt), top1_agreement and mean_kl (against the prefill artifact alone), the same two
    under `source` (None where none is given), tokens (compared), kv (the layout of each pool), kv_bytes_per_token of
    both, counters and errors (of stopped requests). What is compared with keeps BF16 rows, so that what the rows of the
    pair cost is in the numbers.
    """
    if not prompts or tokens < 2 or page_size < 1:
        raise LoadError(
            f"{len(prompts)} prompts, {tokens} tokens, pages of {page_size}: a pair needs a prompt, two tokens to hand "
            "over, and pages of at least one"
        )
    encoded = [encode(prefill, prompt) for prompt in prompts]
    requests = [Request(ids, tokens) for ids, _ in encoded]
    tokenizer = encoded[0][1]
    pages = 1 + sum(-(-(len(request.prompt) + tokens) // page_size) for request in requests)
    sizes: dict[str, Any] = {"num_pages": pages, "page_size": page_size, "tracked": tracked}
    model = load_model(prefill, device=device)
    rows: dict[str, Any] = {"kv": kv, "scales": scales}
    first = Engine(model, **(rows if prefill_kv in (None, kv) else {"kv": prefill_kv}), **sizes)
    _check_requests(requests, first)
    second = Engine(load_model(decode, device=device), **rows, **sizes)
    Pair(first, second).run(requests)
    alone = agreement(requests, Engine(model, **sizes))
    against = None
    if source is not None:
        against = agreement(requests, Engine(load_model(source, device=device), **sizes))
    counters = [engine.pool.counters for engine in (first, second)]
    return {
        "text": [tokenizer.decode(request.output) for request in requests],
        "top1_agreement": alone.top1_agreement,
        "mean_kl": alone.mean_kl,
        "tokens": alone.tokens,
        "source": against and {"top1_agreement": against.top1_agreement, "mean_kl": against.mean_kl},
        "kv": {"prefill": first.storage.layout.name, "decode": second.storage.layout.name},
        "kv_bytes_per_token": {
            "prefill": first.storage.layout.bytes_per_token,
            "decode": second.storage.layout.bytes_per_token,
        },
        "counters": {
            name: sum(getattr(each, name) for each in counters)
            for name in ("checks", "mismatches", "reused", "retries")
        },
        "errors": [str(request.error) for request in requests if request.error is not None],
    }
