"""One engine: a model, its pages, and the two things that it does with requests, prefill and decode steps.

Attention never sees a page whose tag was not compared in the same step. A request whose pages are wrong stops with the
error; in the running batch its place stays, empty, until the batch is over, so that the arithmetic of the others has
the same shapes and their results the same bits as if nothing had happened.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import LoadError, PageError
from .cache import PagedCache, PageStorage, Places
from .pages import Lease, PagePool
from .rows import Scales, make_layout
from .weights import Loaded

#: logits [vocabulary] and the place of the token among those that are made -> the token
Choose = Callable[[torch.Tensor, int], int]
#: asked after each token: do all tokens made so far end here?
Ends = Callable[[Sequence[int]], bool]


@dataclass(slots=True)
class Request:
    """One request.

    prompt: its tokens, at least one. budget: how many tokens to make, fewer where `ends` says so. forced: the tokens
    that it is made to continue with, for scoring; else `choose` chooses, and without it the likeliest one is taken.
    output: tokens made so far. logits: float32 [vocabulary] for each of them, if they are to be kept.
    error: why it was stopped.
    """

    prompt: list[int]
    budget: int
    forced: list[int] | None = None
    choose: Choose | None = None
    ends: Ends | None = None
    keep: bool = True
    output: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    lease: Lease | None = None
    error: PageError | None = None
    steps: int = 0  # decode steps since it joined, those after an error included
    ended: bool = False

    def __post_init__(self) -> None:
        if not self.prompt or self.budget < 1 or (self.forced and len(self.forced) < self.budget):
            forced = f" and {len(self.forced)} forced tokens" if self.forced else ""
            raise LoadError(
                f"a request of {len(self.prompt)} tokens with a budget of {self.budget}{forced}: it needs a token to "
                "start from, a budget of at least 1, and as many forced tokens as that, or none"
            )

    @property
    def done(self) -> bool:
        """It has ended, or its budget is used up; for a stopped one: would be, had it gone on."""
        return self.ended or 1 + self.steps >= self.budget

    def take(self, logits: torch.Tensor) -> None:
        """The next token, forced or chosen, from logits [vocabulary]."""
        if self.keep:
            self.logits.append(logits.float())
        place = len(self.output)
        if self.forced:
            token = self.forced[place]
        else:
            token = int(logits.argmax()) if self.choose is None else self.choose(logits, place)
        self.output.append(token)
        self.ended = self.ends is not None and self.ends(self.output)

    def restart(self) -> None:
        """Forget what was made, so that it can be run again from its prompt."""
        self.output, self.logits, self.error, self.steps, self.ended = [], [], None, 0, False


class Engine:
    """A loaded model with pages in one KV layout."""

    def __init__(
        self,
        loaded: Loaded,
        *,
        kv: str = "bf16",
        scales: Scales | None = None,
        num_pages: int = 256,
        page_size: int = 64,
        tracked: bool = True,
    ) -> None:
        self.model, self.device = loaded.model, str(loaded.model.device)
        self.storage = PageStorage(make_layout(kv, loaded.cache, scales), num_pages, page_size, self.device)
        self.pool = PagePool(num_pages, page_size, tracked=tracked, device=self.device)
        names = inspect.signature(self.model.forward).parameters
        self._keyword = "cache" if "cache" in names else "past_key_values"  # renamed in transformers 5.2x

    def prefill(
        self, tokens: Sequence[int], *, chunk: int = 512, share: bool = True, last: bool = False
    ) -> tuple[Lease, torch.Tensor]:
        """Compute a prompt in chunks. Returns its lease and logits [n, vocabulary] of the n tokens that it computed.

        share: take pages of the same tokens over from other requests instead. last: logits of the last token alone,
        n = 1. PageError where the pages are wrong or too few; nothing is held then.
        """
        lease = self.pool.open(tokens if share else [])
        logits: list[torch.Tensor] = []
        try:
            while lease.length < len(tokens):
                piece = tokens[lease.length : lease.length + chunk]
                self.pool.grow(lease, lease.length + len(piece))
                if errors := self.pool.check([lease]):
                    raise errors[0]
                found = self._forward([lease], [lease.length], torch.tensor([piece]), last=last)[0]
                logits = [found] if last else [*logits, found]
                self.pool.commit(lease, tokens[: lease.length + len(piece)])
        except PageError:
            self.pool.release(lease)
            raise
        return lease, torch.cat(logits)

    def decode(self, requests: Sequence[Request]) -> None:
        """One step: every request takes one more token, those excepted whose pages are found wrong before."""
        for request in requests:
            try:
                if request.lease is not None:
                    self.pool.grow(request.lease, request.lease.length + 1)
            except PageError as error:
                self.stop(request, error)
        running = [request for request in requests if request.lease is not None]
        for place, wrong in self.pool.check([request.lease for request in running if request.lease]).items():
            self.stop(running[place], wrong)
        tokens = torch.tensor([[request.output[-1]] for request in requests])
        lengths = [len(request.prompt) + request.steps for request in requests]
        logits = self._forward([request.lease for request in requests], lengths, tokens)[:, -1]
        for request, row in zip(requests, logits, strict=True):
            request.steps += 1
            if request.lease is not None:
                self.pool.commit(request.lease, request.prompt + request.output)
                request.take(row)

    def stop(self, request: Request, error: PageError | None = None) -> None:
        """End a request and give its pages back. What was wrong, now or in giving back, stays with it as its error."""
        assert request.lease is not None
        late = self.pool.release(request.lease)
        request.error, request.lease = error or late, None

    @torch.inference_mode()
    def _forward(
        self, leases: Sequence[Lease | None], lengths: Sequence[int], tokens: torch.Tensor, *, last: bool = False
    ) -> torch.Tensor:
        """int64 [B, new] behind what each has -> logits [B, new, vocabulary], or [B, 1, vocabulary] of the last."""
        # In a step each pair of token and expert has a product of its own, so that what a request gets depends
        # on no neighbour's routing. For prompts that would be slow, and nobody else is there.
        experts = "batched_mm" if tokens.shape[1] == 1 else "eager"
        if self.model.get_experts_implementation()[""] != experts:
            self.model.set_experts_implementation(experts)
        places = Places(self.pool, leases, lengths, tokens.shape[1])
        mask: Any = places.mask
        logits: torch.Tensor = self.model(
            input_ids=tokens.to(self.device),
            attention_mask=mask,
            position_ids=places.positions,
            use_cache=True,
            logits_to_keep=int(last),  # 0: all
            **{self._keyword: PagedCache(self.storage, places)},
        ).logits
        return logits
