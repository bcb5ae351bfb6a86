"""transformers' own forward pass, taken apart at the decoder layers so that one layer at a time can be given weights.

The model stands on the meta device. Its own `forward` is run for each shape of batch with a recorder in the place of
the layers: so mask, positions and whatever else a layer is called with are what transformers makes of them.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..errors import LoadError
from .model import DtypePlan, Source, no_errors_of_config, version

ATTENTION = "sdpa"  # transformers' own choice where nothing is said
EXPERTS = "eager"  # one expert after the other, each on its own tokens: so they can be given weights one by one


class _Captured(Exception):
    """Ends a forward pass at its first layer."""


class _Recorder(torch.nn.Module):
    """Stands where the layers were and notes what the first of them is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: dict[str, Any] = {}

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Note the call. Positional arguments behind the hidden states would be an unknown transformers."""
        if len(args) != 1:
            raise LoadError(f"{version()} calls its layers with {len(args)} positional arguments, expected one")
        self.arguments = kwargs
        raise _Captured


class Forward:
    """The model of a source, layer by layer. Hidden states are [B, L, hidden] of the dtype that is asked for.

    layers: transformers' decoder layers, without weights. dtypes: which parameter has which dtype.
    """

    def __init__(self, source: Source, dtype: torch.dtype, device: str) -> None:
        from transformers.models.auto import modeling_auto

        classes: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
        self.source, self.dtype, self.device = source, dtype, device
        with torch.device("meta"), no_errors_of_config():
            self.model = classes[type(source.config)]._from_config(
                source.config, dtype=dtype, attn_implementation=ATTENTION, experts_implementation=EXPERTS
            )
        self.model.eval()
        self.dtypes = DtypePlan(self.model, dtype)
        core = self.model.model
        self.layers: list[Any] = list(core.layers)
        self._recorder = _Recorder()
        core.layers = torch.nn.ModuleList([self._recorder])
        core.rotary_emb = type(core.rotary_emb)(config=source.config).to(device)  # its buffers are computed, not stored
        names = inspect.signature(core.forward).parameters
        self.cache_keyword = "cache" if "cache" in names else "past_key_values"  # renamed in transformers 5.2x
        self._arguments: dict[tuple[int, int], dict[str, Any]] = {}

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [B, L] -> [B, L, hidden]."""
        return self.source.rows(tokens, self.dtype).to(self.device)

    def call(
        self, layer: Any, hidden: torch.Tensor, carried: torch.Tensor | None, cache: Any | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One layer's output, and what it hands to the next one besides: indices of an indexer, or nothing.

        cache: None where nothing is to be cached.
        """
        arguments = dict(self._call_arguments(hidden, cache))
        arguments[self.cache_keyword] = cache
        if "prev_topk_indices" in arguments:
            arguments["prev_topk_indices"] = carried
        found = layer(hidden, **arguments)
        return found if isinstance(found, tuple) else (found, None)

    def _call_arguments(self, hidden: torch.Tensor, cache: Any | None) -> dict[str, Any]:
        """What transformers calls a layer with, for this shape of batch."""
        shape = (hidden.shape[0], hidden.shape[1])
        if shape not in self._arguments:
            self._arguments = {}  # masks are large: one shape at a time
            try:
                self.model.model(inputs_embeds=hidden, use_cache=cache is not None, **{self.cache_keyword: cache})
            except _Captured:
                self._arguments[shape] = self._recorder.arguments
        return self._arguments[shape]

    def load_head(self) -> None:
        """Decode what stands behind the layers: the norm and the matrix that makes logits."""
        core = self.model.model
        for module, name in ((core.norm, "model.norm.weight"), (self.model.lm_head, "lm_head.weight")):
            value = self.source.outer(name).to(self.device, self.dtypes.of(name))
            module.load_state_dict({"weight": value}, assign=True)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] behind the last layer -> [..., vocabulary]. `load_head` comes first."""
        found: torch.Tensor = self.model.lm_head(self.model.model.norm(hidden))
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, L, hidden] behind the last layer -> [B, L, vocabulary], weights and all."""
        self.load_head()
        return self.head(hidden)
