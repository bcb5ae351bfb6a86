"""GLM of Z.ai: 4.5, 4.6 and 4.7 (grouped-query attention), 4.7-Flash (MLA), 5, 5.1, 5.2 and 5.3 (MLA with DSA)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from . import Architecture, CacheLayer, Config, Family, TensorSpec
from ._layers import (
    FUSED_GQA,
    FUSED_MLA,
    NO_INT4_MLA,
    Fields,
    Row,
    gqa_cache,
    gqa_folds,
    mla,
    mla_cache,
    mla_folds,
    moe_decoder,
    num_layers,
)

Result = TypeVar("Result")


def _gqa(fields: Fields) -> list[Row]:
    hidden, head = fields.size("hidden_size"), fields.size("head_dim")
    queries, keys = head * fields.size("num_attention_heads"), head * fields.size("num_key_value_heads")
    outputs = {"q": queries, "k": keys, "v": keys}
    rows: list[Row] = [
        (f"self_attn.{part}_proj.weight", (size, hidden), f"attention.{part}") for part, size in outputs.items()
    ]
    if fields.flag("attention_bias"):
        rows += [(f"self_attn.{part}_proj.bias", (size,), "attention.bias") for part, size in outputs.items()]
    rows.append(("self_attn.o_proj.weight", (hidden, queries), "attention.o"))
    if fields.flag("use_qk_norm"):
        rows += [(f"self_attn.{part}_norm.weight", (head,), "attention.norm") for part in "qk"]
    # what vLLM reads for an FP8 cache, as compressed-tensors names it
    return rows + [(f"self_attn.{part}_scale", (1,), "attention.kv_scale") for part in "kv"]


def _indexer(fields: Fields) -> list[Row]:
    hidden, heads, head = fields.size("hidden_size"), fields.size("index_n_heads"), fields.size("index_head_dim")
    return [
        ("self_attn.indexer.wq_b.weight", (heads * head, fields.size("q_lora_rank")), "indexer.wq_b"),
        ("self_attn.indexer.wk.weight", (head, hidden), "indexer.wk"),
        ("self_attn.indexer.k_norm.weight", (head,), "indexer.norm"),
        ("self_attn.indexer.k_norm.bias", (head,), "indexer.norm"),
        ("self_attn.indexer.weights_proj.weight", (heads, hidden), "indexer.weights_proj"),
    ]


def _sharing_layers(fields: Fields) -> set[int]:
    """Layers that take over the token choice of an earlier one and so have no indexer. MTP layers always have one."""
    layers = num_layers(fields)
    types = fields.words("indexer_types", ("full", "shared"), layers)
    types = types or fields.words("index_topk_pattern", ("full", "shared", "F", "S"), layers)
    if types:
        return {layer for layer, kind in enumerate(types) if kind in ("shared", "S")}
    every = fields.size("index_topk_freq", default=1)
    offset = fields.size("index_skip_topk_offset", least=0, default=2)
    return {layer for layer in range(layers) if max(layer - offset + 1, 0) % every}


def _glm4_moe(config: Config) -> Iterator[TensorSpec]:
    fields = Fields(config)
    attention = _gqa(fields)
    return moe_decoder(fields, lambda _: attention)


def _glm4_moe_lite(config: Config) -> Iterator[TensorSpec]:
    fields = Fields(config)
    attention = mla(fields)
    return moe_decoder(fields, lambda _: attention)


def _glm_moe_dsa(config: Config) -> Iterator[TensorSpec]:
    fields = Fields(config)
    sharing, shared = _sharing_layers(fields), mla(fields)
    full = shared + _indexer(fields)
    return moe_decoder(fields, lambda index: shared if index in sharing else full)


def _dsa_cache(config: Config) -> list[CacheLayer]:
    sharing = _sharing_layers(Fields(config))
    return mla_cache(Fields(config), indexer=lambda layer: layer not in sharing)


def _on(function: Callable[[Fields], Result]) -> Callable[[Config], Result]:
    """Of a config that is all text."""
    return lambda config: function(Fields(config))


_NO_INT4_DSA = {
    **NO_INT4_MLA,
    "indexer.wk": "vLLM and SGLang join it with indexer.weights_proj into one unquantized module",
}

FAMILY = Family(
    "glm",
    {
        name: Architecture(name, tensors, cache, fp8, folds, fused=fused, no_int4=no_int4, sglang_fuses_shared=True)
        for name, tensors, cache, fp8, folds, fused, no_int4 in (
            ("glm4_moe", _glm4_moe, _on(gqa_cache), "fp8-channel", _on(gqa_folds), FUSED_GQA, {}),
            ("glm4_moe_lite", _glm4_moe_lite, _on(mla_cache), "fp8-block", _on(mla_folds), FUSED_MLA, NO_INT4_MLA),
            ("glm_moe_dsa", _glm_moe_dsa, _dsa_cache, "fp8-block", _on(mla_folds), FUSED_MLA, _NO_INT4_DSA),
        )
    },
)
