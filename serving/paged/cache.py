"""A transformers `Cache` over pages: `update` writes the new rows into pages and gathers all rows of the requests.

`PageStorage` holds the bytes, `pages.PagePool` says whose they are, and a `PagedCache` lives for one forward pass of
some requests. Requests of different lengths stand in one batch with their ends aligned: what is missing in front is
page 0 and masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...calib.model import NEEDED
from ...errors import LoadError
from .pages import NULL, Lease, PagePool
from .rows import Layout, Row

try:
    from transformers import __version__ as found
    from transformers.cache_utils import Cache, CacheLayerMixin
except ImportError as error:
    raise LoadError(f"the reference runtime runs transformers' models ({error}): pip install '{NEEDED}'") from None
if tuple(map(int, found.split(".")[:2])) < (5, 19):
    raise LoadError(f"transformers {found} caches whole keys and values of MLA models: pip install '{NEEDED}'")


class PageStorage:
    """The bytes of all pages: for each layer and row of the layout a uint8 [num_pages, page_size, nbytes]."""

    def __init__(self, layout: Layout, num_pages: int, page_size: int, device: str = "cpu") -> None:
        self.layout = layout
        self.tensors = [
            [torch.zeros(num_pages, page_size, row.nbytes, dtype=torch.uint8, device=device) for row in rows]
            for rows in layout.layers
        ]


class Places:
    """Where the tokens of one forward pass lie, for all layers alike.

    slots: int64 [B, T], page * page_size + offset of each token that is read; the last `new` are those written.
    positions: int64 [B, new], of the new tokens. write: bool [B], whose rows are written. mask: bool [B, T], True
    for tokens, None where nothing is padding.
    """

    def __init__(self, pool: PagePool, leases: Sequence[Lease | None], lengths: Sequence[int], new: int) -> None:
        """`lengths`: tokens that each request has before this pass. A lease of None reads page 0 and writes nothing."""
        device, size = pool.device, pool.page_size
        before = torch.tensor(lengths, dtype=torch.int64, device=device)
        self.new, self.total = new, max(lengths) + new
        token = torch.arange(self.total, device=device) - (max(lengths) - before)[:, None]  # [B, T], < 0: padding
        width = -(-self.total // size)
        nothing = torch.full((width,), NULL, dtype=torch.int64, device=device)
        tables = torch.stack([lease.table[:width] if lease else nothing for lease in leases])
        live = torch.tensor([lease is not None for lease in leases], device=device)
        real = token >= 0
        slots = tables.gather(1, token.clamp_min(0) // size) * size + token % size
        self.slots = torch.where(real & live[:, None], slots, NULL)
        self.write = live
        self.mask = None if min(lengths) == max(lengths) else real
        self.positions = token[:, self.total - new :]


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a `PagedCache`. What the model brings must be what the family said that this layer keeps."""

    def __init__(self, rows: Sequence[Row], tensors: Sequence[torch.Tensor], places: Places) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows, self.tensors, self.places = rows, tensors, places

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The storage is there already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, heads, new, width] of two parts (k and v, or kv_c and k_pe) -> all T tokens of both."""
        keys, values = self._turn(0, [key_states, value_states])
        return keys, values

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """[B, new, width] of the indexer's keys -> [B, T, width]."""
        if len(self.rows) < 2:
            raise LoadError(f"transformers keeps indexer keys in a layer that should have none: pip install '{NEEDED}'")
        return self._turn(1, [indexer_key_states[:, None]])[0][:, 0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what `update` returns."""
        return self.places.total, 0

    def get_seq_length(self) -> int:
        """Tokens before this pass, padding included."""
        return self.places.total - self.places.new

    def get_max_length(self) -> int:
        """No maximum of its own."""
        return -1

    def _turn(self, which: int, states: list[torch.Tensor]) -> list[torch.Tensor]:
        row, tensor, places = self.rows[which], self.tensors[which].flatten(0, 1), self.places
        batch, slots = len(places.slots), places.slots[:, places.total - places.new :]
        for part, state in zip(row.parts, states, strict=True):
            if state.shape != (batch, part.heads, places.new, part.width):
                raise LoadError(
                    f"transformers caches {part.name} as {list(state.shape)}, expected "
                    f"{[batch, part.heads, places.new, part.width]}: pip install '{NEEDED}'"
                )
        tokens = [state[places.write].transpose(1, 2).flatten(0, 1) for state in states]  # [N, heads, width]
        tensor[slots[places.write].flatten()] = row.encode(tokens)
        found = row.decode(tensor[places.slots.flatten()], states[0].dtype)
        return [value.reshape(batch, -1, *value.shape[1:]).transpose(1, 2).contiguous() for value in found]


class PagedCache(Cache):
    """The cache of one forward pass."""

    def __init__(self, storage: PageStorage, places: Places) -> None:
        layers = zip(storage.layout.layers, storage.tensors, strict=True)
        super().__init__(layers=[PagedLayer(rows, tensors, places) for rows, tensors in layers])
