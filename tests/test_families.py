"""Families against the published totals, against transformers' own models, and against configs that make no sense."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sparse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phasefold.errors import CheckpointError
from phasefold.families import families, identify
from phasefold.families._layers import LINEAR

K2, K25, K3 = "moonshotai/Kimi-K2-Instruct", "moonshotai/Kimi-K2.5", "moonshotai/Kimi-K3"
AIR, FLASH, GLM52 = "zai-org/GLM-4.5-Air", "zai-org/GLM-4.7-Flash", "zai-org/GLM-5.2"
KINDS = {  # one release for each architecture
    "kimi_k2": K2,
    "deepseek_v3": "moonshotai/Moonlight-16B-A3B",
    "kimi_k25": K25,
    "kimi_k3": K3,
    "kimi_linear": "moonshotai/Kimi-Linear-48B-A3B-Instruct",
    "glm4_moe": AIR,
    "glm4_moe_lite": FLASH,
    "glm_moe_dsa": GLM52,
}


def small(model: str) -> dict[str, Any]:
    """A release's config with few layers and experts, so that deriving its tensors takes no time."""
    config = sparse.config_of(model)
    text = config.get("text_config", config)
    text.update(num_hidden_layers=4)
    text.update({key: 4 for key in ("n_routed_experts", "num_experts") if key in text})
    text.update({key: text[key][:4] for key in ("indexer_types", "mlp_layer_types") if key in text})
    if "linear_attn_config" in text:
        text["linear_attn_config"].update(kda_layers=[1, 2, 3], full_attn_layers=[4])
    if "vision_config" in config:
        config["vision_config"]["vt_num_hidden_layers"] = 2
    return config


# ------------------------------------------------------------------------------------------ published releases


def test_every_architecture_has_a_release() -> None:
    known = {name: item for family in families().values() for name, item in family.architectures.items()}
    assert known.keys() == KINDS.keys()
    assert all(item.name == name for name, item in known.items())
    assert {identify(sparse.config_of(model)).architecture.name for model in sparse.MODELS} == known.keys()


@pytest.mark.parametrize("model", sparse.MODELS)
def test_totals_are_the_published_ones(model: str) -> None:
    about, tensors = sparse.MODELS[model], sparse.stored(model)
    assert len(tensors) == about["tensors"]
    assert sum(math.prod(tensor.shape) for tensor in tensors) == about["elements"]
    assert sum(tensor.nbytes for tensor in tensors) == about["total_size"]
    specs = {tensor.spec.name: tensor.spec for tensor in tensors}
    assert about.get("parameters") in (None, sum(math.prod(s.shape) for s in specs.values() if s.role != "buffer"))


@pytest.mark.parametrize("model", KINDS.values())
def test_specs_hold_together(model: str) -> None:
    config = sparse.config_of(model)
    found = identify(config)
    specs = found.tensors()
    assert found.text is config.get("text_config", config)
    assert len({spec.name for spec in specs}) == len(specs)
    assert all(spec.linear == (spec.role in LINEAR) for spec in specs)
    assert all(len(spec.shape) == 2 and spec.name.endswith(".weight") for spec in specs if spec.linear)
    assert all(spec.layer is None or f".layers.{spec.layer}." in spec.name for spec in specs)
    assert all(spec.mtp == (spec.layer is not None and spec.layer >= found.text["num_hidden_layers"]) for spec in specs)
    layers = [spec.layer for spec in specs if spec.layer is not None]
    assert layers == sorted(layers)
    modules = {spec.name.removesuffix(".weight") for spec in specs}
    roles = {spec.role for spec in specs}
    assert set(found.architecture.no_int4 or {}) - {"attention.q_a"} <= roles
    for _, fused, parts in found.architecture.fused:
        ends = [{name.removesuffix(part) for name in modules if name.endswith(f".{part}")} for part in parts]
        # where queries have no low rank there is nothing to fuse with kv_a
        assert "qkv_a" in fused or all(end == ends[0] for end in ends)


def test_what_glm_5_releases_leave_unquantized() -> None:
    for model, count in {"zai-org/GLM-5-FP8": 712, "zai-org/GLM-5.2-FP8": 541}.items():
        assert len(sparse.config_of(model)["quantization_config"]["modules_to_not_convert"]) == count


# ------------------------------------------------------------------------------------------ what a config can say


def names(config: dict[str, Any], part: str = "") -> list[str]:
    return [spec.name for spec in identify(config).tensors() if part in spec.name]


def test_indexers_follow_the_list_the_pattern_or_the_rule() -> None:
    config = sparse.config_of(GLM52)
    listed = names(config)
    types = config.pop("indexer_types")
    assert names(config) == listed  # freq 4, offset 3
    config["index_topk_freq"] = 1
    assert len(names(config, "indexer.wk.")) == 79
    config["index_topk_pattern"] = "".join("F" if kind == "full" else "S" for kind in types)
    assert names(config) == listed
    config["index_topk_pattern"] = types
    assert names(config) == listed
    assert "model.layers.78.self_attn.indexer.wk.weight" in listed


def test_dense_layers_from_either_key_but_not_from_two_that_disagree() -> None:
    config = small(FLASH)
    expected = names(config)
    config["mlp_layer_types"] = ["dense", "sparse", "sparse", "sparse"]
    assert names(config) == expected
    del config["first_k_dense_replace"]
    assert names(config) == expected
    config["first_k_dense_replace"] = 2
    with pytest.raises(CheckpointError, match="first_k_dense_replace is 2, expected 1"):
        names(config)
    config["mlp_layer_types"] = ["dense", "sparse", "dense", "sparse"]
    with pytest.raises(CheckpointError, match="mlp_layer_types"):
        names(config)


def test_mtp_layer_of_deepseek_v3_and_its_roles() -> None:
    config = small(K2) | {"num_nextn_predict_layers": 1, "tie_word_embeddings": True}
    specs = identify(config).tensors()
    assert "lm_head" not in {spec.role for spec in specs}
    mtp = [spec for spec in specs if spec.mtp]
    assert {spec.layer for spec in mtp} == {4}
    assert Counter(spec.role for spec in mtp if spec.role.startswith("mtp.")) == {
        "mtp.norm": 3, "mtp.eh_proj": 1, "mtp.embed": 1, "mtp.head": 1,
    }  # fmt: skip
    assert {"routed_expert", "attention.o", "router"} <= {spec.role for spec in mtp}
    assert {spec.role for spec in mtp if spec.optional} == {"mtp.embed", "mtp.head", "buffer"}


# ------------------------------------------------------------------------------------------ configs that make no sense


@pytest.mark.parametrize("config", [[], {}, {"model_type": None}, {"model_type": ["kimi_k2"]}, {"model_type": "llama"}])
def test_unknown_models_are_refused_with_what_is_supported(config: Any) -> None:
    with pytest.raises(CheckpointError, match=r"supported are deepseek_v3, .*kimi_linear|expected an object"):
        identify(config)


@pytest.mark.parametrize("text", [None, 3, {}, {"model_type": "llama"}])
def test_wrappers_without_their_language_model_are_refused(text: Any) -> None:
    with pytest.raises(CheckpointError, match="text_config"):
        identify({"model_type": "kimi_k25", "text_config": text})


HUGE = pytest.param(10**5000, id="huge")  # too long to be printed
NEEDED = ["hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
          "moe_intermediate_size"]  # fmt: skip


@pytest.mark.parametrize("value", [None, -1, 0, True, "7168", 7168.0, 1.1e9, 2**30 + 1, HUGE, [], {}])
@pytest.mark.parametrize("key", NEEDED)
@pytest.mark.parametrize("model", [K2, K25, K3, AIR, FLASH, GLM52])
def test_bad_sizes_are_refused_by_name(model: str, key: str, value: Any) -> None:
    config = small(model)
    text = config.get("text_config", config)
    text[key] = value
    path = "text_config." if text is not config else ""
    with pytest.raises(CheckpointError, match=rf"config\.json: {path}{key} is .*, expected an integer from 1 to"):
        identify(config).tensors()


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_routed_experts", "num_nextn_predict_layers"])
def test_absurd_counts_end_at_once(key: str) -> None:
    for value in (10**4, 10**9):
        with pytest.raises(CheckpointError, match=key):
            identify(sparse.config_of(GLM52) | {key: value}).tensors()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-2, 3) | st.floats() | st.text(max_size=5)
    | st.sampled_from(["dense", "sparse", "full", "shared", 10**9]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


@settings(max_examples=400, deadline=5000, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_config_gives_tensors_or_a_checkpoint_error(data: st.DataObject) -> None:
    config = copy.deepcopy(data.draw(st.sampled_from(SMALL)))
    for _ in range(data.draw(st.integers(1, 3))):
        part = config
        while True:
            key = data.draw(st.sampled_from(sorted(part)))
            if not isinstance(part[key], dict) or not part[key] or data.draw(st.booleans()):
                break
            part = part[key]
        if data.draw(st.booleans()):
            part[key] = data.draw(VALUES)
        elif len(part) > 1:
            del part[key]
    try:
        specs = identify(config).tensors()
    except CheckpointError as error:
        assert str(error).startswith("config.json: ")
    else:
        assert all(type(size) is int and (size > 0 or size == -1) for spec in specs for size in spec.shape)


SMALL = [small(model) for model in KINDS.values()]

# ------------------------------------------------------------------------------------------ transformers as the oracle

TINY = dict(
    hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=4, vocab_size=64, n_routed_experts=4, n_shared_experts=2, num_experts_per_tok=2,
    max_position_embeddings=64, tie_word_embeddings=False, first_k_dense_replace=1, pad_token_id=0,
)  # fmt: skip
MLA = dict(q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
FLASH_TYPES = ["dense", "sparse", "sparse"]
ORACLES = [
    ("DeepseekV3", MLA | {"n_group": 1, "topk_group": 1}),
    ("DeepseekV3", MLA | {"n_group": 1, "topk_group": 1, "q_lora_rank": None, "attention_bias": True}),
    ("DeepseekV3", MLA | {"n_group": 1, "topk_group": 1, "tie_word_embeddings": True, "attention_bias": True}),
    ("Glm4Moe", {"head_dim": 6, "num_key_value_heads": 2, "attention_bias": True, "use_qk_norm": True}),
    ("Glm4Moe", {"head_dim": 6, "num_key_value_heads": 2, "attention_bias": False, "use_qk_norm": False}),
    ("Glm4MoeLite", MLA | {"mlp_layer_types": FLASH_TYPES}),
    ("GlmMoeDsa", MLA | {"index_n_heads": 2, "index_head_dim": 12, "index_topk": 8}),
    ("GlmMoeDsa", MLA | {"index_n_heads": 2, "index_head_dim": 12, "indexer_types": ["full", "shared", "full"]}),
    ("KimiLinear", MLA | {"q_lora_rank": None, "num_experts": 4, "num_shared_experts": 2, "num_experts_per_token": 2,
                          "linear_attn_config": {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4,
                                                 "kda_layers": [1, 2], "full_attn_layers": [3]}}),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "changes"), ORACLES)
def test_same_tensors_as_transformers_saves(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from safetensors import safe_open

    values = TINY | changes
    if name == "KimiLinear":
        values = {key: value for key, value in values.items() if not key.startswith("n_")}
    config = getattr(transformers, f"{name}Config")(**values)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        saved = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
    # transformers calls its dense MLPs block_sparse_moe as well when it saves; the release has them under mlp
    saved = {key.replace("layers.0.block_sparse_moe.", "layers.0.mlp."): shape for key, shape in saved.items()}
    written = json.loads((tmp_path / "config.json").read_text())
    specs = [spec for spec in identify(written).tensors() if not spec.mtp and not spec.optional]
    assert {spec.name: spec.shape for spec in specs} == saved


# ------------------------------------------------------------------------------------------ header-only checkpoints


def test_sparse_checkpoints_are_whole(tmp_path: Path) -> None:
    from safetensors import safe_open

    written = sparse.write("zai-org/GLM-4.5-Air-FP8", tmp_path / "whole", mtp_file=True)
    index = json.loads((tmp_path / "whole" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == written["total_size"] == 112_558_098_944
    assert written["files"][-1] == "mtp.safetensors" and len(written["files"]) == 48
    found: dict[str, str] = {}
    for name in written["files"]:
        with safe_open(tmp_path / "whole" / name, "np") as file:
            found |= dict.fromkeys(file.keys(), name)
    assert found == index["weight_map"] and len(found) == 36_323
    assert {name for name, file in found.items() if file == "mtp.safetensors"} == {
        name for name in found if ".layers.46." in name
    }


@pytest.mark.parametrize("shards", [1, 3, 500])
def test_sparse_checkpoints_have_as_many_shards_as_asked_for(shards: int, tmp_path: Path) -> None:
    written = sparse.write(FLASH, tmp_path / "cut", shards)
    assert written["files"][-1] == f"model-{shards:05d}-of-{shards:05d}.safetensors"
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) == shards
