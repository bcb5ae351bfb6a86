"""What the matrices of a layer see: one observer for all of them, below the model's own code.

It catches every `torch.nn.functional.linear` and knows a matrix by where its weight lies in memory. So it does not
matter how transformers names, stacks or fuses modules, and a matrix whose inputs were not seen is found out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..errors import CheckpointError, LoadError
from ..formats.statistics import input_of, pool_of
from .model import NEEDED, Matrix, version

#: how many inputs of each matrix are kept for judging a result
HELDOUT_ROWS = 256
ROUTED = "routed_expert"


class Inputs:
    """Sums over the inputs of a matrix. Tokens of held-out sequences are kept as they are, and are in no sum."""

    def __init__(self, *, hessian: bool) -> None:
        self.tokens, self.held = 0, 0
        self.squares: torch.Tensor | None = None  # float64 [in]
        self.products: torch.Tensor | None = None  # float32 [in, in]
        self.heldout: list[torch.Tensor] = []
        self._hessian = hessian

    def take(self, rows: torch.Tensor, *, heldout: bool) -> None:
        """Count inputs [n, in]. Sums of one call are float32, those of all calls float64 (squares)."""
        if heldout:
            if self._hessian and self.held < HELDOUT_ROWS:
                self.heldout.append(rows[: HELDOUT_ROWS - self.held].float())
                self.held += len(self.heldout[-1])
            return
        self.tokens += len(rows)
        wide = rows.float()
        squares = wide.square().sum(0).double()
        self.squares = squares if self.squares is None else self.squares.add_(squares)
        if self._hessian:
            if self.products is None:
                self.products = wide.new_zeros(wide.shape[1], wide.shape[1])
            self.products.addmm_(wide.T, wide)


class Pool:
    """All routed experts of a layer together, for one input: what is kept where a single one has too few tokens."""

    def __init__(self, experts: int) -> None:
        self.tokens = 0
        self.products: torch.Tensor | None = None
        self.heldout: list[torch.Tensor] = []
        self._share = max(1, HELDOUT_ROWS // experts)  # of each expert, so that no expert speaks for all

    def take(self, inputs: Inputs) -> None:
        """Add one expert's sums."""
        if inputs.products is not None:
            self.tokens += inputs.tokens
            if self.products is None:
                self.products = torch.zeros_like(inputs.products)
            self.products.add_(inputs.products)
        if inputs.heldout and sum(map(len, self.heldout)) < HELDOUT_ROWS:
            self.heldout.append(torch.cat(inputs.heldout)[: self._share])

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Suffix and value of what is kept."""
        yield "tokens", torch.tensor(self.tokens)
        if self.products is not None:
            yield "hessian", self.products / self.tokens
        if self.heldout:
            yield "heldout", torch.cat(self.heldout)[:HELDOUT_ROWS]


class Observer(TorchFunctionMode):
    """Watches one layer's matrices while it is entered.

    heldout: the tokens that now run are held out. paused: routed experts are not watched for now.
    """

    def __init__(self, hessians: frozenset[str], experts: int) -> None:
        """hessians: roles whose Hessians are kept. experts: routed ones of the layer, 0 where it is dense."""
        super().__init__()
        self.heldout = self.paused = False
        self._hessians, self._experts = hessians, experts
        self._watched: dict[int, tuple[Matrix, Inputs]] = {}
        self._pools: dict[str, Pool] = {}

    def watch(self, matrix: Matrix) -> None:
        """Take what is multiplied with this weight for the matrix's input. The weight must stay where it is."""
        self._watched[matrix.weight.data_ptr()] = (matrix, Inputs(hessian=matrix.role in self._hessians))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear:
            rows, weight = args[0], args[1] if len(args) > 1 else (kwargs or {})["weight"]
            matrix, inputs = self._watched.get(weight.data_ptr(), (None, None))
            if matrix is not None and inputs is not None and not (self.paused and matrix.role == ROUTED):
                inputs.take(rows.reshape(-1, rows.shape[-1]), heldout=self.heldout)
        return found

    def check(self, tokens: int) -> None:
        """LoadError unless every matrix that is no expert's has seen all tokens: else its inputs went by unseen."""
        for matrix, inputs in self._watched.values():
            if matrix.role != ROUTED and inputs.tokens != tokens:
                raise LoadError(
                    f"{matrix.modules[0]}: {inputs.tokens:,} of {tokens:,} tokens were seen; {version()} multiplies "
                    f"with it in a way that is not known here: pip install '{NEEDED}'"
                )

    def release(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and values of what is known of the watched matrices; they are watched no longer.

        Own Hessians of routed experts are left out where they have fewer tokens than a quarter of their channels.
        """
        for matrix, inputs in self._watched.values():
            yield from self._kept(matrix, inputs)
        self._watched = {}

    def _kept(self, matrix: Matrix, inputs: Inputs) -> Iterator[tuple[str, torch.Tensor]]:
        mean = None if inputs.squares is None else (inputs.squares / inputs.tokens).float()
        if mean is not None and not bool(torch.isfinite(mean).all()):
            raise CheckpointError(f"{matrix.modules[0]}: an input of it is not finite, or too large to be squared")
        for module in matrix.modules:
            yield f"{module}.tokens", torch.tensor(inputs.tokens)
            if mean is not None:
                yield f"{module}.second_moment", mean
        first = matrix.modules[0]
        if input_of(first) != first:
            return
        if matrix.role == ROUTED and matrix.role in self._hessians:
            name = pool_of(first)
            assert name is not None, first
            self._pools.setdefault(name, Pool(self._experts)).take(inputs)
        if inputs.products is not None and (matrix.role != ROUTED or 4 * inputs.tokens >= len(inputs.products)):
            yield f"{first}.hessian", inputs.products / inputs.tokens
        if inputs.heldout:
            yield f"{first}.heldout", torch.cat(inputs.heldout)

    def release_pools(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and values of the pools, when all experts were released."""
        for name, pool in self._pools.items():
            for suffix, value in pool.tensors():
                yield f"{name}.{suffix}", value
        self._pools = {}


def expert_summary(tokens: torch.Tensor) -> dict[str, Any]:
    """Of the tokens that each expert got, I64 [experts]: what statistics.json says."""
    ordered = tokens.sort().values
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1].double().mean()
    least, most, unseen = int(ordered[0]), int(ordered[-1]), int((ordered == 0).sum())
    return {"min": least, "median": float(middle), "max": most, "unseen": unseen}
