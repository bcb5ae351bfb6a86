"""Kimi of Moonshot AI: K2 and Moonlight (DeepSeek-V3), K2.5 to K2.7 (K2 with vision), Kimi-Linear and K3 (KDA, MLA)."""

from __future__ import annotations

from collections.abc import Iterator

from . import Architecture, CacheLayer, Config, Family, Fold, TensorSpec
from ._layers import (
    FUSED_MLA,
    MAX_LAYERS,
    NO_INT4_MLA,
    Fields,
    Row,
    decoder,
    dense_mlp,
    mla,
    mla_cache,
    mla_folds,
    moe,
    moe_decoder,
    num_dense,
    num_layers,
)

_WRAPPER = "language_model."

# K3's latent attention has an output gate, which vLLM joins with the two down-projections
_FUSED_WITH_GATE = (
    ("vllm",),
    "self_attn.fused_qkv_a_g_proj",
    ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.g_proj"),
)


def _deepseek_v3(config: Config) -> Iterator[TensorSpec]:
    fields = Fields(config)
    attention = mla(fields, buffers=True)
    return moe_decoder(fields, lambda _: attention)


def _kimi_k25(config: Config) -> Iterator[TensorSpec]:
    text = Fields(config).section("text_config")
    attention = mla(text)
    yield from moe_decoder(text, lambda _: attention, _WRAPPER)
    vision = Fields(config).section("vision_config")
    hidden = vision.size("vt_hidden_size")
    yield from _vision_tower(vision, hidden, biased=True)
    merged, out = _merged(vision), vision.size("text_hidden_size")
    for name, shape in (("pre_norm", (hidden,)), ("proj.0", (merged, merged)), ("proj.2", (out, merged))):
        yield TensorSpec(f"mm_projector.{name}.weight", shape, "projector")
        yield TensorSpec(f"mm_projector.{name}.bias", shape[:1], "projector")


def _kimi_linear(config: Config) -> Iterator[TensorSpec]:
    fields = Fields(config)
    heads = fields.section("linear_attn_config").size("num_heads")
    return _linear_decoder(fields, (1, 1, heads, 1))


def _kimi_k3(config: Config) -> Iterator[TensorSpec]:
    text = Fields(config).section("text_config")
    # The 96 heads of the only K3 there is are stored padded to 128.
    padded = -(-text.section("linear_attn_config").size("num_heads") // 128) * 128
    yield from _linear_decoder(text, (padded,), _WRAPPER)
    vision = Fields(config).section("vision_config")
    yield from _vision_tower(vision, vision.size("qkv_hidden_size"), biased=False)
    merged, out = _merged(vision), vision.size("text_hidden_size")
    for name, shape in (("proj.0", (merged, merged)), ("proj.2", (out, merged)), ("post_norm", (out,))):
        yield TensorSpec(f"mm_projector.{name}.weight", shape, "projector")


def _linear_decoder(fields: Fields, a_log: tuple[int, ...], prefix: str = "") -> Iterator[TensorSpec]:
    """Kimi-Linear, and K3 with what its config adds: output gates, experts in a latent space, attention residuals."""
    if fields.size("num_nextn_predict_layers", least=0, default=0):
        raise fields.error("num_nextn_predict_layers", "0: no model of this kind with MTP layers is known")
    hidden, dense = fields.size("hidden_size"), num_dense(fields)
    kda_layers, kda, full = _kda_layers(fields), _kda(fields, a_log), mla(fields)
    if fields.flag("mla_use_output_gate"):
        width = fields.size("num_attention_heads") * fields.size("v_head_dim")
        full.append(("self_attn.g_proj.weight", (width, hidden), "attention.gate"))
    names, counts, module = "w1 w3 w2", ("num_experts", "num_shared_experts"), "block_sparse_moe"
    latent = fields.size("routed_expert_hidden_size", default=0)
    width_key = "routed_expert_hidden_size" if latent else "hidden_size"
    sparse_rows, dense_rows = moe(fields, module, names, counts, width_key), dense_mlp(fields)
    if latent:
        sparse_rows.append((f"{module}.routed_expert_down_proj.weight", (latent, hidden), "latent.down"))
        sparse_rows.append((f"{module}.routed_expert_up_proj.weight", (hidden, latent), "latent.up"))
        if fields.flag("latent_moe_use_norm"):
            sparse_rows.append((f"{module}.routed_expert_norm.weight", (latent,), "latent.norm"))
    residuals, end = [], []
    if fields.size("attn_res_block_size", default=0):
        residuals = _residual("self_attention_res", hidden) + _residual("mlp_res", hidden)
        end = _residual("output_attn_res", hidden)

    def layer(index: int) -> list[Row]:
        return residuals + (kda if index in kda_layers else full) + (dense_rows if index < dense else sparse_rows)

    return decoder(fields, layer, prefix, end)


def _cache(config: Config) -> list[CacheLayer]:
    """Of the language model, wrapped or not; layers with linear attention keep a state instead."""
    fields = Fields(config)
    text = fields.section("text_config") if "text_config" in config else fields
    return mla_cache(text, _kda_layers(text) if "linear_attn_config" in text.config else ())


def _folds(text: Config) -> list[Fold]:
    return mla_folds(Fields(text))


def _residual(name: str, hidden: int) -> list[Row]:
    return [(f"{name}_norm.weight", (hidden,), "residual.norm"), (f"{name}_proj.weight", (1, hidden), "residual.proj")]


def _kda_layers(fields: Fields) -> set[int]:
    """Layers with linear attention. The config counts from 1, and names the other layers too."""
    layers, linear = num_layers(fields), fields.section("linear_attn_config")
    kda, full = linear.integers("kda_layers", layers), linear.integers("full_attn_layers", layers)
    if sorted(kda + full) != list(range(1, layers + 1)):
        raise linear.error("full_attn_layers", f"each of 1 to {layers} that is not in kda_layers")
    return {layer - 1 for layer in kda}


def _kda(fields: Fields, a_log: tuple[int, ...]) -> list[Row]:
    """Kimi Delta Attention: linear attention with a decay for each channel."""
    linear, hidden = fields.section("linear_attn_config"), fields.size("hidden_size")
    heads, head, kernel = (linear.size(key) for key in ("num_heads", "head_dim", "short_conv_kernel_size"))
    width = heads * head
    matrices = {f"{part}_proj": (width, hidden) for part in "qkv"} | {"b_proj": (heads, hidden)}
    matrices |= {"f_a_proj": (head, hidden), "f_b_proj": (width, head), "o_proj": (hidden, width)}
    if linear.flag("use_full_rank_gate"):
        matrices["g_proj"] = (width, hidden)
    else:
        matrices |= {"g_a_proj": (head, hidden), "g_b_proj": (width, head)}
    rows: list[Row] = [
        (f"self_attn.{name}.weight", shape, f"linear_attention.{name.removesuffix('_proj')}")
        for name, shape in matrices.items()
    ]
    rows += [(f"self_attn.{part}_conv1d.weight", (width, 1, kernel), "linear_attention.conv") for part in "qkv"]
    return [
        *rows,
        ("self_attn.A_log", a_log, "linear_attention.decay"),
        ("self_attn.dt_bias", (width,), "linear_attention.decay"),
        ("self_attn.o_norm.weight", (head,), "linear_attention.norm"),
    ]


def _vision_tower(fields: Fields, queries: int, *, biased: bool) -> Iterator[TensorSpec]:
    """MoonViT; `queries` is the width of its attention, `biased` whether matrices and norms have biases."""
    hidden, inner, patch = (fields.size(key) for key in ("vt_hidden_size", "vt_intermediate_size", "patch_size"))
    grid = fields.size("init_pos_emb_height"), fields.size("init_pos_emb_width")
    block: dict[str, tuple[int, ...]] = {"wqkv": (3 * queries, hidden), "wo": (hidden, queries)}
    block |= {"mlp.fc0": (inner, hidden), "mlp.fc1": (hidden, inner), "norm0": (hidden,), "norm1": (hidden,)}
    modules: dict[str, tuple[int, ...]] = {"patch_embed.proj": (hidden, 3, patch, patch)}
    for index in range(fields.size("vt_num_hidden_layers", most=MAX_LAYERS)):
        modules |= {f"encoder.blocks.{index}.{name}": shape for name, shape in block.items()}
    modules["encoder.final_layernorm"] = (hidden,)
    yield TensorSpec("vision_tower.patch_embed.pos_emb.weight", (*grid, hidden), "vision")
    for name, shape in modules.items():
        yield TensorSpec(f"vision_tower.{name}.weight", shape, "vision")
        if biased:
            yield TensorSpec(f"vision_tower.{name}.bias", shape[:1], "vision")


def _merged(fields: Fields) -> int:
    """Width of the patches that the projector takes together."""
    height, width = fields.integers("merge_kernel_size", 1024, length=2)
    return fields.size("mm_hidden_size") * height * width


FAMILY = Family(
    "kimi",
    {
        **{
            name: Architecture(name, _deepseek_v3, _cache, "fp8-block", _folds, fused=FUSED_MLA, no_int4=NO_INT4_MLA)
            for name in ("kimi_k2", "deepseek_v3")
        },
        "kimi_k25": Architecture(
            "kimi_k25",
            _kimi_k25,
            _cache,
            fp8="fp8-block-ct",
            folds=_folds,
            text_models=("kimi_k2", "deepseek_v3"),
            fused=FUSED_MLA,
            no_int4=NO_INT4_MLA,
            sglang_prefix=("language_model.model.", "model."),
        ),
        "kimi_k3": Architecture(
            "kimi_k3",
            _kimi_k3,
            _cache,
            fp8="fp8-block-ct",
            text_models=("kimi_linear",),
            fused=(*FUSED_MLA, _FUSED_WITH_GATE),
            no_int4=NO_INT4_MLA | {"attention.gate": "vLLM joins it with q_a_proj and kv_a_proj_with_mqa"},
            sglang_prefix=("language_model.model.", "model."),
        ),
        "kimi_linear": Architecture(
            "kimi_linear", _kimi_linear, _cache, fp8="fp8-block", fused=FUSED_MLA, no_int4=NO_INT4_MLA
        ),
    },
)
