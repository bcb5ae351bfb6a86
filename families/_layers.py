"""What the families share: reading a config with every value checked, and the layers that several models are built of.

A layer is a list of rows `(tail, shape, role)`, made once from the config and written out under each layer's prefix by
`decoder`. So a model is a handful of tables, and the 249,924 tensors of Kimi-K3 cost little more than their names.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError
from . import CacheLayer, CachePart, Config, Fold, TensorSpec

Shape = tuple[int, ...]
Row = tuple[str, Shape, str]

#: roles whose matrices the runtimes can hold quantized
LINEAR = frozenset(
    ["routed_expert", "shared_expert", "dense_mlp", "indexer.wq_b", "indexer.wk"]
    + [f"attention.{part}" for part in ("q", "q_a", "q_b", "kv_a", "kv_b", "k", "v", "o", "gate")]
)
#: roles that a checkpoint may leave out: runtimes compute the buffers, share the embedding with the MTP layer, and take
#: a missing KV scale for 1.0
OPTIONAL = frozenset({"buffer", "mtp.embed", "mtp.head", "attention.kv_scale"})

# Sizes beyond these are a damaged or hostile config; without a limit, deriving its tensors would not end.
MAX_SIZE = 1 << 30
MAX_LAYERS = 1000
MAX_EXPERTS = 10_000
MAX_MODULES = 500_000

# Modules that runtimes build out of several of the checkpoint's, as `Architecture.fused` wants them. Both also fuse
# indexer.wk with indexer.weights_proj, but hold the result unquantized whatever the checkpoint has: no entry for it.
_ALL = ("vllm", "sglang")
FUSED_MLP = (
    (_ALL, "mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
    (_ALL, "shared_experts.gate_up_proj", ("shared_experts.gate_proj", "shared_experts.up_proj")),
)
_QKV_A = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")
FUSED_MLA = (
    (("vllm",), "self_attn.fused_qkv_a_proj", _QKV_A),
    (("sglang",), "self_attn.fused_qkv_a_proj_with_mqa", _QKV_A),
    *FUSED_MLP,
)
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
FUSED_GQA = ((_ALL, "self_attn.qkv_proj", _QKV), *FUSED_MLP)

_CONCATENATES = "SGLang joins q_a_proj and kv_a_proj_with_mqa tensor by tensor, and joined packed tensors do not load"
NO_INT4_MLA = {
    "attention.q_a": _CONCATENATES,
    "attention.kv_a": _CONCATENATES,
    "attention.kv_b": "SGLang splits kv_b_proj for MLA and reads its `weight`, which a packed module has not",
}


@dataclass(frozen=True, slots=True)
class Fields:
    """A part of config.json whose values are checked as they are read. `path` leads to it, e.g. "text_config."."""

    config: Config
    path: str = ""

    def error(self, key: str, expected: str) -> CheckpointError:
        """What is wrong with a key, in words; big values are not repeated."""
        value = self.config.get(key)
        if value is None:
            found = "missing"
        elif isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 64):
            found = repr(value)
        else:
            found = repr(value[:40]) if isinstance(value, str) else f"a {type(value).__name__} that does not fit"
        return CheckpointError(f"config.json: {self.path}{key} is {found}, expected {expected}")

    def size(self, key: str, *, least: int = 1, most: int = MAX_SIZE, default: int | None = None) -> int:
        """An integer; `default` takes the place of a missing one or null."""
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value <= most:
            raise self.error(key, f"an integer from {least} to {most}")
        return value

    def flag(self, key: str) -> bool:
        """True or false; false where it is missing or null."""
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, "true or false")
        return bool(value)

    def words(self, key: str, allowed: tuple[str, ...], length: int) -> list[str] | None:
        """A list with one word a layer (or a string with one letter a layer); None where it is missing or null."""
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, list | str) or len(value) != length or any(word not in allowed for word in value):
            raise self.error(key, f"a list of {length}, one a layer, each {' or '.join(allowed)}")
        return list(value)

    def integers(self, key: str, most: int, length: int | None = None) -> list[int]:
        """A list of integers from 1 to `most`, of a given length where there is one."""
        value = self.config.get(key)
        if isinstance(value, list) and (length is None or len(value) == length):
            if all(type(item) is int and 1 <= item <= most for item in value):
                return value
        raise self.error(key, f"a list of {'' if length is None else f'{length} '}integers from 1 to {most}")

    def section(self, key: str) -> Fields:
        """A part within this part."""
        value: Any = self.config.get(key)
        if not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return Fields(value, f"{self.path}{key}.")


def decoder(
    fields: Fields, layer: Callable[[int], Iterable[Row]], prefix: str = "", end: Iterable[Row] = ()
) -> Iterator[TensorSpec]:
    """A whole language model. `layer(index)` gives a layer's rows but for its two norms; `end` follows the last one.

    MTP layers stand behind the decoder layers, as layers of their own with a few tensors more.
    """
    hidden, vocab = fields.size("hidden_size"), fields.size("vocab_size")
    layers, mtp_layers = num_layers(fields), fields.size("num_nextn_predict_layers", least=0, most=16, default=0)
    norms: list[Row] = [(f"{name}_layernorm.weight", (hidden,), "norm") for name in ("input", "post_attention")]
    extras = _mtp(hidden, vocab)
    tied = fields.flag("tie_word_embeddings")
    yield TensorSpec(f"{prefix}model.embed_tokens.weight", (vocab, hidden), "embed")
    for index in range(layers + mtp_layers):
        start, mtp = f"{prefix}model.layers.{index}.", index >= layers
        for rows in (norms, layer(index), extras if mtp else ()):
            for tail, shape, role in rows:
                yield TensorSpec(start + tail, shape, role, index, mtp, role in LINEAR, role in OPTIONAL)
    yield TensorSpec(f"{prefix}model.norm.weight", (hidden,), "norm")
    for tail, shape, role in end:
        yield TensorSpec(f"{prefix}model.{tail}", shape, role)
    if not tied:
        yield TensorSpec(f"{prefix}lm_head.weight", (vocab, hidden), "lm_head")


def moe_decoder(fields: Fields, attention: Callable[[int], list[Row]], prefix: str = "") -> Iterator[TensorSpec]:
    """A language model of dense layers first and layers with experts behind them, as most are."""
    dense, dense_rows, sparse_rows = num_dense(fields), dense_mlp(fields), moe(fields)
    return decoder(fields, lambda index: attention(index) + (dense_rows if index < dense else sparse_rows), prefix)


def num_layers(fields: Fields) -> int:
    """Decoder layers without the MTP ones."""
    return fields.size("num_hidden_layers", most=MAX_LAYERS)


def num_dense(fields: Fields) -> int:
    """How many layers have a dense MLP: all of the others, MTP layers too, have experts."""
    layers = num_layers(fields)
    types = fields.words("mlp_layer_types", ("dense", "sparse"), layers)
    count = None if types is None else types.index("sparse") if "sparse" in types else layers
    if types is not None and "dense" in types[count:]:
        raise fields.error("mlp_layer_types", "the dense layers before all sparse ones")
    dense = fields.size("first_k_dense_replace", least=0, default=count)
    if count is not None and count != min(dense, layers):
        raise fields.error("first_k_dense_replace", f"{count}, as mlp_layer_types has it")
    if fields.size("moe_layer_freq", default=1) != 1:
        raise fields.error("moe_layer_freq", "1: experts in every layer behind the dense ones")
    return min(dense, layers)


def mla(fields: Fields, *, buffers: bool = False) -> list[Row]:
    """Multi-head latent attention; without `q_lora_rank` the queries come from one matrix. `buffers`: rotary ones."""
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    nope, rope, value = (fields.size(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rank, latent = fields.size("q_lora_rank", default=0), fields.size("kv_lora_rank")
    queries = heads * (nope + rope)
    rows: list[Row] = [("self_attn.q_proj.weight", (queries, hidden), "attention.q")]
    if rank:
        rows = [
            ("self_attn.q_a_proj.weight", (rank, hidden), "attention.q_a"),
            ("self_attn.q_a_layernorm.weight", (rank,), "attention.norm"),
            ("self_attn.q_b_proj.weight", (queries, rank), "attention.q_b"),
        ]
    rows += [
        ("self_attn.kv_a_proj_with_mqa.weight", (latent + rope, hidden), "attention.kv_a"),
        ("self_attn.kv_a_layernorm.weight", (latent,), "attention.norm"),
        ("self_attn.kv_b_proj.weight", (heads * (nope + value), latent), "attention.kv_b"),
        ("self_attn.o_proj.weight", (hidden, heads * value), "attention.o"),
    ]
    if fields.flag("attention_bias"):
        biased = [("kv_a_proj_with_mqa", latent + rope), ("o_proj", hidden)] + [("q_a_proj", rank)] * bool(rank)
        rows += [(f"self_attn.{name}.bias", (size,), "attention.bias") for name, size in biased]
    if buffers:
        rows.append(("self_attn.rotary_emb.inv_freq", (-1,), "buffer"))
    return rows


def mla_cache(
    fields: Fields, state: Container[int] = (), indexer: Callable[[int], bool] | None = None
) -> list[CacheLayer]:
    """One latent row a token and layer. `state`: layers with linear attention; `indexer`: does a layer have one?"""
    row = (
        CachePart("kv_c", 1, fields.size("kv_lora_rank")),
        CachePart("k_pe", 1, fields.size("qk_rope_head_dim")),
    )

    def parts(layer: int) -> tuple[CachePart, ...]:
        if layer in state:
            return ()
        keys = (CachePart("index_k", 1, fields.size("index_head_dim")),) if indexer and indexer(layer) else ()
        return row + keys

    return cache_layers(fields, parts)


def mla_folds(fields: Fields) -> list[Fold]:
    """The latent against what is made of it; the rope part of the keys against that of each head's queries.

    An indexer reads the hidden states and the queries before `q_b_proj`: neither is touched.
    """
    nope, rope, latent = (fields.size(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank"))
    keys, queries = (latent, latent + rope, latent + rope), (nope, nope + rope, nope + rope)
    query = "q_b_proj" if fields.size("q_lora_rank", default=0) else "q_proj"
    folds = [
        Fold("kv_c", "self_attn.kv_a_layernorm.weight", 1),
        Fold("kv_c", "self_attn.kv_b_proj.weight", -1),
        Fold("k_pe", "self_attn.kv_a_proj_with_mqa.weight", 1, *keys),
        Fold("k_pe", f"self_attn.{query}.weight", -1, *queries),
    ]
    if fields.flag("attention_bias"):  # the latent's share of the bias stands before the norm
        folds.append(Fold("k_pe", "self_attn.kv_a_proj_with_mqa.bias", 1, *keys))
    return folds


def gqa_folds(fields: Fields) -> list[Fold]:
    """Values against the output matrix, which has no bias; keys against queries.

    RoPE is linear, and whole heads are multiplied, so that it does not matter what part of them is rotated.
    """
    folds = [Fold("v", "self_attn.v_proj.weight", 1), Fold("v", "self_attn.o_proj.weight", -1)]
    biased = fields.flag("attention_bias")
    if biased:
        folds.append(Fold("v", "self_attn.v_proj.bias", 1))
    for part, sign in (("k", 1), ("q", -1)):
        if fields.flag("use_qk_norm"):  # the projections stand before the norm, which would undo it
            folds.append(Fold("k", f"self_attn.{part}_norm.weight", sign))
        else:
            folds.append(Fold("k", f"self_attn.{part}_proj.weight", sign))
            folds += [Fold("k", f"self_attn.{part}_proj.bias", sign)] * biased
    return folds


def gqa_cache(fields: Fields) -> list[CacheLayer]:
    """Keys and values of each key-value head."""
    heads, width = fields.size("num_key_value_heads"), fields.size("head_dim")
    parts = CachePart("k", heads, width), CachePart("v", heads, width)
    return cache_layers(fields, lambda _: parts)


def cache_layers(fields: Fields, parts: Callable[[int], tuple[CachePart, ...]]) -> list[CacheLayer]:
    """The layers of a model, MTP ones last, with what `parts(layer)` says that each keeps."""
    layers = num_layers(fields)
    mtp_layers = fields.size("num_nextn_predict_layers", least=0, most=16, default=0)
    return [CacheLayer(layer, layer >= layers, parts(layer)) for layer in range(layers + mtp_layers)]


def mlp(module: str, hidden: int, inner: int, role: str, names: str = "gate_proj up_proj down_proj") -> list[Row]:
    """A gated MLP; `names` are those of its gate, up and down matrices."""
    gate, up, down = names.split()
    return [
        (f"{module}.{gate}.weight", (inner, hidden), role),
        (f"{module}.{up}.weight", (inner, hidden), role),
        (f"{module}.{down}.weight", (hidden, inner), role),
    ]


def dense_mlp(fields: Fields) -> list[Row]:
    """The MLP of a layer without experts."""
    return mlp("mlp", fields.size("hidden_size"), fields.size("intermediate_size"), "dense_mlp")


def moe(
    fields: Fields,
    module: str = "mlp",
    names: str = "gate_proj up_proj down_proj",
    counts: tuple[str, str] = ("n_routed_experts", "n_shared_experts"),
    width: str = "hidden_size",
) -> list[Row]:
    """Router, shared experts (one MLP for all of them) and routed experts. `width`: key of the routed ones' input."""
    hidden, inner = fields.size("hidden_size"), fields.size("moe_intermediate_size")
    experts, shared = fields.size(counts[0], most=MAX_EXPERTS), fields.size(counts[1], least=0, default=0)
    if experts * num_layers(fields) > MAX_MODULES:
        raise fields.error(counts[0], f"at most {MAX_MODULES} experts in all layers together")
    rows: list[Row] = [
        (f"{module}.gate.weight", (experts, hidden), "router"),
        (f"{module}.gate.e_score_correction_bias", (experts,), "router.bias"),
    ]
    if shared:
        rows += mlp(f"{module}.shared_experts", hidden, inner * shared, "shared_expert")
    size = fields.size(width)
    for expert in range(experts):
        rows += mlp(f"{module}.experts.{expert}", size, inner, "routed_expert", names)
    return rows


def _mtp(hidden: int, vocab: int) -> list[Row]:
    return [
        ("eh_proj.weight", (hidden, 2 * hidden), "mtp.eh_proj"),
        *((f"{name}.weight", (hidden,), "mtp.norm") for name in ("enorm", "hnorm", "shared_head.norm")),
        ("embed_tokens.weight", (vocab, hidden), "mtp.embed"),
        ("shared_head.head.weight", (vocab, hidden), "mtp.head"),
    ]
