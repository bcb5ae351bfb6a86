"""What a layer's KV cache holds: a transformers `Cache` that keeps nothing, counts what it gets and gives it back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ..errors import LoadError
from ..families import CacheLayer
from ..formats.statistics import BINS, cache_bins, cache_name
from .model import NEEDED


class _Part:
    """Sums over one part: int64 counts by magnitude, the largest magnitude, float64 sums of squares."""

    def __init__(self) -> None:
        self.tokens = 0
        self.amax = torch.zeros(())
        self.histogram = torch.zeros(BINS, dtype=torch.int64)
        self.squares: torch.Tensor | None = None

    def take(self, values: torch.Tensor) -> None:
        """[B, heads, L, width]."""
        wide = values.float()
        self.tokens += values.shape[0] * values.shape[2]
        self.amax = torch.maximum(self.amax, wide.abs().amax().cpu())
        self.histogram += cache_bins(values).cpu()
        squares = wide.square().sum((0, 2)).flatten().double().cpu()
        self.squares = squares if self.squares is None else self.squares + squares


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer: what the model brings must be what the family said that this layer keeps."""

    def __init__(self, kept: CacheLayer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept
        self.parts = {part.name: _Part() for part in kept.parts}

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is kept."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two parts, k and v or kv_c and k_pe, as [B, heads, L, width] each."""
        self._take(0, [key_states, value_states])
        return key_states, value_states

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """The indexer's keys, [B, L, width]."""
        self._take(2, [indexer_key_states[:, None]])
        return indexer_key_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what `update` returns."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Each sequence begins anew."""
        return 0

    def get_max_length(self) -> int:
        """No maximum of its own."""
        return -1

    def _take(self, first: int, states: list[torch.Tensor]) -> None:
        parts = self.kept.parts[first : first + len(states)]
        found = [(state.shape[1], state.shape[3]) for state in states]
        if found != [(part.heads, part.width) for part in parts]:
            expected = [f"{part.name} {part.heads} x {part.width}" for part in parts]
            raise LoadError(
                f"layer {self.kept.layer}: transformers caches {found} as (heads, width), expected "
                f"{', '.join(expected) or 'nothing'}: pip install '{NEEDED}'"
            )
        for part, state in zip(parts, states, strict=True):
            self.parts[part.name].take(state)


class ObservedCache(Cache):
    """The cache of a whole model, of which one layer after the other is used."""

    def __init__(self, layers: Sequence[CacheLayer]) -> None:
        super().__init__(layers=[_Layer(layer) for layer in layers])

    def release(self, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and values of what one layer's cache held."""
        held: Any = self.layers[layer]
        for name, part in held.parts.items():
            if part.squares is None:
                raise LoadError(f"layer {layer}: transformers cached no {name}: pip install '{NEEDED}'")
            yield cache_name(layer, name, "tokens"), torch.tensor(part.tokens)
            yield cache_name(layer, name, "amax"), part.amax
            yield cache_name(layer, name, "histogram"), part.histogram
            yield cache_name(layer, name, "second_moment"), (part.squares / part.tokens).float()
