"""Routed experts of one layer: how many tokens each gets, and how a layer runs when they do not fit together.

Routing and the experts' arithmetic are transformers' own. Where experts come one by one, the layer first runs with a
stand-in that notes what they would get; then each expert's weights are read once and its tokens go through
transformers' experts module, in the order in which its own loop would take them. So sums are rounded as they would be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .forward import Forward
from .model import Experts, Matrix
from .observe import Observer
from .rows import Rows
from .store import LayerWriter


def watch_routing(module: Any, observer: Observer, counts: torch.Tensor, *, all_experts: bool) -> None:
    """Count the training tokens of each expert, I64 [experts], while a layer with all of its experts runs.

    all_experts: each expert's statistics get every token, in a pass of its own whose result nobody takes.
    """

    def before(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        if not observer.heldout:
            counts.add_(torch.bincount(args[1].flatten(), minlength=len(counts)).cpu())
        observer.paused = all_experts

    def after(experts: Any, args: tuple[torch.Tensor, ...], _: Any) -> None:
        observer.paused = False
        for expert in range(len(counts)) if all_experts else ():
            _through(experts, args[0], expert)

    module.mlp.experts.register_forward_pre_hook(before)
    module.mlp.experts.register_forward_hook(after)


def _through(experts: Any, rows: torch.Tensor, expert: int, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Rows [n, hidden] through one expert, times their weights [n]: by transformers' module, told to route so."""
    index = torch.full((len(rows), 1), expert, device=rows.device)
    given = rows.new_ones(len(rows), 1) if weights is None else weights[:, None]
    found: torch.Tensor = experts.forward(rows, index, given)  # not through its hooks
    return found


class _StandIn(torch.nn.Module):
    """In the place of the experts: notes tokens [n, hidden], choice [n, k] and weights [n, k], and adds nothing."""

    def forward(self, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What transformers calls its experts with."""
        self.seen = (rows, index, weights)
        return torch.zeros_like(rows)


class _One:
    """What stands for all experts' weights while one expert's are there."""

    def __init__(self, expert: int, weight: torch.Tensor) -> None:
        self.expert, self.weight = expert, weight

    def __getitem__(self, expert: torch.Tensor | int) -> torch.Tensor:
        assert int(expert) == self.expert, "an expert was asked for that is not there"
        return self.weight


@dataclass(slots=True)
class Gathered:
    """What the experts of a layer need of each token.

    rows: their inputs. shared: what the layer's MLP gives without them. sums: what they give. index, weights: [n, k].
    """

    rows: Rows
    shared: Rows
    sums: Rows
    index: torch.Tensor
    weights: torch.Tensor

    def close(self) -> None:
        """Let go of the rows and their files."""
        for rows in (self.rows, self.shared, self.sums):
            rows.close(delete=True)


class Apart:
    """A layer without its routed experts: `call` it for every batch, then `run` the experts, then `total` a batch."""

    def __init__(self, forward: Forward, module: Any, gathered: Gathered) -> None:
        self.forward, self.gathered = forward, gathered
        self.experts = module.mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            del self.experts._parameters[name]
        self._stand_in = _StandIn()
        module.mlp.experts = self._stand_in
        module.mlp.register_forward_hook(self._without_mlp)
        self._shared = torch.empty(0)

    def _without_mlp(self, _: Any, args: Any, found: torch.Tensor) -> torch.Tensor:
        self._shared = found
        return torch.zeros_like(found)

    def note(self, rows: range) -> None:
        """After the layer was called for these tokens: keep what the experts need of them."""
        inputs, index, weights = self._stand_in.seen
        self.gathered.rows.put(rows, inputs)
        self.gathered.shared.put(rows, self._shared.flatten(0, -2))
        self.gathered.index[rows.start : rows.stop] = index.cpu()
        self.gathered.weights[rows.start : rows.stop] = weights.cpu()

    def run(
        self,
        held: Experts,
        observer: Observer,
        writer: LayerWriter,
        training: int,
        piece: int,
        *,
        all_experts: bool,
        advance: Callable[[], None],
    ) -> torch.Tensor:
        """Every expert on its tokens -> training tokens of each, I64. training: how many of all, the first ones."""
        device = self.forward.device
        counts = torch.zeros(len(held.items), dtype=torch.int64)
        for expert in range(len(held.items)):
            with self._there(held, expert) as matrices:
                observer.watch(matrices[0])
                observer.watch(matrices[1])
                places, tokens = self._routed(expert)
                counts[expert] = int((tokens < training).sum())
                for heldout in (False, True):
                    observer.heldout, observer.paused = heldout, all_experts
                    mine = ((tokens >= training) == heldout).nonzero().flatten()
                    if heldout:  # the first rows are kept: let them be those that a pass of whole batches meets first
                        mine = mine[torch.argsort((tokens[mine] - training) // piece, stable=True)]
                    self._add(expert, tokens[mine], places[mine], piece)
                    observer.paused = False
                    if all_experts:
                        every = range(training, self.gathered.rows.count) if heldout else range(training)
                        for start in range(every.start, every.stop, piece):
                            some = self.gathered.rows.get(range(start, min(start + piece, every.stop)))
                            _through(self.experts, some.to(device), expert)
                for name, value in observer.release():
                    writer.add(name, value)
            advance()
        return counts

    def run_unobserved(self, held: Experts, batches: Sequence[range], advance: Callable[[], None]) -> None:
        """Every expert on its tokens, those of each batch by themselves: then the layer gives the very bits that it
        gives where all experts are there and a batch goes through it.

        batches: consecutive rows, all together all of them.
        """
        stops = torch.tensor([batch.stop for batch in batches])
        for expert in range(len(held.items)):
            with self._there(held, expert):
                places, tokens = self._routed(expert)
                whose, order = torch.bucketize(tokens, stops, right=True).sort(stable=True)
                many = torch.bincount(whose, minlength=len(batches)).tolist()
                for batch, mine in zip(batches, torch.split(order, many), strict=True):
                    self._add(expert, tokens[mine], places[mine], len(batch))
            advance()

    @contextlib.contextmanager
    def _there(self, held: Experts, expert: int) -> Iterator[list[Matrix]]:
        """One expert's weights in their place, which the caller may look at; let go before the next one's come."""
        matrices = list(self.forward.source.load_expert(held, expert, self.forward.dtype, self.forward.device))
        self.experts.gate_up_proj, self.experts.down_proj = (_One(expert, matrix.weight) for matrix in matrices)
        try:
            yield matrices
        finally:
            self.experts.gate_up_proj = self.experts.down_proj = None
            matrices.clear()

    def _routed(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of an expert, and at which of their k places they have it, in the order of transformers' loop."""
        places, tokens = torch.where(self.gathered.index.T == expert)
        return places, tokens

    def _add(self, expert: int, tokens: torch.Tensor, places: torch.Tensor, piece: int) -> None:
        """Add what an expert gives for some tokens, routed to it at these places among their k."""
        device = self.forward.device
        for some, where in zip(torch.split(tokens, piece), torch.split(places, piece), strict=True):
            if len(some):
                rows, weights = self.gathered.rows.get(some), self.gathered.weights[some, where]
                self.gathered.sums.add(some, _through(self.experts, rows.to(device), expert, weights.to(device)))

    def total(self, rows: range, hidden: torch.Tensor) -> torch.Tensor:
        """What the layer gives for these tokens, [n, hidden]; hidden: what `call` gave, the residual."""
        return hidden + (self.gathered.sums.get(rows) + self.gathered.shared.get(rows))
