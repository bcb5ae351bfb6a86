"""quantization_config resolves to what is quantized, under the matching of vLLM, SGLang and compressed-tensors."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest

from phasefold.errors import PlanError
from phasefold.families import TensorSpec, identify
from phasefold.formats import formats
from phasefold.quantize.declare import Module, check, quantization_config, resolve
from phasefold.quantize.naming import build

MLA = {
    "hidden_size": 256,
    "vocab_size": 512,
    "num_hidden_layers": 5,
    "first_k_dense_replace": 2,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "n_routed_experts": 12,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
}
INDEXER = {"index_n_heads": 8, "index_head_dim": 32, "index_topk_freq": 2}
VISION = {
    "vt_hidden_size": 64,
    "vt_intermediate_size": 128,
    "vt_num_hidden_layers": 2,
    "patch_size": 14,
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
    "merge_kernel_size": [2, 2],
    "mm_hidden_size": 64,
    "text_hidden_size": 256,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "kimi_k2": {"model_type": "kimi_k2", **MLA},
    "deepseek_v3": {"model_type": "deepseek_v3", **MLA, "q_lora_rank": None},
    "kimi_k25": {"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2", **MLA}, "vision_config": VISION},
    "glm4_moe": {"model_type": "glm4_moe", **MLA, "num_key_value_heads": 2, "head_dim": 64},
    "glm4_moe_lite": {"model_type": "glm4_moe_lite", **MLA},
    "glm_moe_dsa": {"model_type": "glm_moe_dsa", **MLA, **INDEXER},
}
WITH_MTP = ("glm4_moe", "glm4_moe_lite", "glm_moe_dsa")


def _int4(spec: TensorSpec) -> str | None:
    return "int4-g32" if spec.role == "routed_expert" else None


def _exceptions(spec: TensorSpec) -> str | None:
    """Layers 2 and 4 partly in floats: one with its attention, one with its experts."""
    if (spec.layer == 2 and spec.role != "routed_expert") or (spec.layer == 4 and spec.role == "routed_expert"):
        return None
    return _int4(spec) or "fp8-block-ct"


RECIPES = {
    "int4": _int4,
    "int4+block": lambda spec: _int4(spec) or "fp8-block-ct",
    "int4+channel": lambda spec: _int4(spec) or "fp8-channel",
    "fp8": lambda spec: "fp8-block",
    "fp8-ct": lambda spec: "fp8-block-ct",
    "fp8-channel": lambda spec: "fp8-channel",
    "fp8, experts only": lambda spec: "fp8-block" if spec.role == "routed_expert" else None,
    "fp8, layer 3 not": lambda spec: None if spec.layer == 3 else "fp8-block",
    "int4, layer 3 not": lambda spec: None if spec.layer == 3 else _int4(spec),
    "attention in part": lambda spec: _int4(spec) or ("fp8-block-ct" if spec.role == "attention.o" else None),
    "exceptions": _exceptions,
}


def _modules(name: str, recipe: str, mtp: str = "quantized") -> list[Module]:
    """mtp: "quantized", "kept" in floats, or "absent"."""
    config = copy.deepcopy(CONFIGS[name])
    if name in WITH_MTP and mtp != "absent":
        config["num_nextn_predict_layers"] = 1
    return [
        Module(
            spec.name.removesuffix(".weight"),
            spec.role,
            spec.layer,
            spec.mtp,
            spec.linear,
            RECIPES[recipe](spec) if spec.linear and not (spec.mtp and mtp == "kept") else None,
        )
        for spec in identify(config).tensors()
        if len(spec.shape) == 2 and spec.name.endswith(".weight")
    ]


def _declared(name: str, recipe: str, mtp: str = "quantized") -> tuple[dict[str, Any], list[Module], Any]:
    modules, architecture = _modules(name, recipe, mtp), identify(CONFIGS[name]).architecture
    config = quantization_config(modules, architecture, scale_fmt="ue8m0")
    assert config is not None
    return json.loads(json.dumps(config)), modules, architecture


CASES = [
    (name, recipe, mtp)
    for name in CONFIGS
    for recipe in RECIPES
    for mtp in (("quantized", "kept", "absent") if name in WITH_MTP else ("absent",))
]


@pytest.mark.parametrize(("name", "recipe", "mtp"), CASES)
def test_what_is_written_resolves_to_what_is_quantized(name: str, recipe: str, mtp: str) -> None:
    config, modules, architecture = _declared(name, recipe, mtp)
    assert check(config, modules, architecture) == []
    for runtime in ("vllm", "sglang"):
        resolved = resolve(config, modules, architecture, runtime)
        assert resolved == {module.name: module.format for module in modules}
    if config["quant_method"] == "compressed-tensors":
        assert len(config["ignore"]) <= 20
        assert all(entry.startswith("re:.*") for entry in config["ignore"])


@pytest.mark.parametrize(("name", "recipe", "mtp"), [case for case in CASES if not case[1].startswith("fp8,")])
def test_the_library_matches_the_same_modules(name: str, recipe: str, mtp: str) -> None:
    """compressed-tensors' own matching, on the checkpoint's names, as for a model of plain `Linear` modules."""
    torch = pytest.importorskip("torch")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    match = pytest.importorskip("compressed_tensors.utils.match")
    config, modules, _ = _declared(name, recipe, mtp)
    if config["quant_method"] == "fp8":
        return
    parsed = quantization.QuantizationConfig.model_validate(config)  # refuses keys that it does not know
    schemes = {target: scheme for scheme in parsed.config_groups.values() for target in scheme.targets}
    linear, embedding = torch.nn.Linear(1, 1, device="meta"), torch.nn.Embedding(1, 1, device="meta")
    for module in modules:
        kind = embedding if module.role.endswith("embed") else linear
        ignored = match.match_targets(module.name, kind, parsed.ignore)
        targets = [] if ignored else match.match_targets(module.name, kind, schemes)
        if module.format is None:
            assert not targets, module.name
            continue
        expected = formats()[module.format].scheme
        assert expected is not None
        assert targets, module.name
        found = schemes[targets[0]]
        assert found.format == expected["format"]
        assert found.weights == quantization.QuantizationArgs.model_validate(expected["weights"])
        assert (found.input_activations is None) == (expected["input_activations"] is None)


def test_nothing_quantized_is_not_declared() -> None:
    modules = [module._replace(format=None) for module in _modules("kimi_k2", "int4")]
    architecture = identify(CONFIGS["kimi_k2"]).architecture
    assert quantization_config(modules, architecture, scale_fmt=None) is None
    assert check(None, modules, architecture) == []
    assert check(None, _modules("kimi_k2", "int4"), architecture) == [
        "vllm and sglang: routed_expert model.layers.2.mlp.experts.0.gate_proj and 107 more is int4-g32 on disk, "
        "but the config makes it unquantized"
    ]


def test_formats_that_no_config_declares_together() -> None:
    modules = _modules("kimi_k2", "int4+block")
    modules = [module._replace(format="fp8-block") if module.role == "dense_mlp" else module for module in modules]
    with pytest.raises(PlanError, match="fp8-block cannot be declared for fp8-block-ct, int4-g32"):
        quantization_config(modules, identify(CONFIGS["kimi_k2"]).architecture, scale_fmt=None)


def test_groups_of_a_mixed_artifact() -> None:
    """SGLang: top-level pack-quantized for INT4 experts, INT4 in group_0, and "Linear" on the group with blocks."""
    config, _, _ = _declared("glm_moe_dsa", "int4+block")
    assert config["format"] == "pack-quantized"
    assert config["config_groups"]["group_0"]["targets"] == [r"re:.*mlp\.experts\..*"]
    assert config["config_groups"]["group_0"]["format"] == "pack-quantized"
    assert config["config_groups"]["group_1"]["targets"] == ["Linear"]
    assert config["config_groups"]["group_1"]["format"] == "float-quantized"
    config, _, _ = _declared("glm_moe_dsa", "int4+channel")
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]


def test_names_of_the_deepseek_spelling() -> None:
    config, modules, _ = _declared("glm_moe_dsa", "fp8", "kept")
    listed = config["modules_to_not_convert"]
    assert config["scale_fmt"] == "ue8m0"
    assert not any(entry.startswith("re:") for entry in listed)
    for prefix in ("model.layers.5", "model.decoder"):
        tails = ("mlp.experts", "mlp.shared_experts.gate_up_proj", "self_attn.kv_b_proj", "self_attn.q_a_proj")
        assert {f"{prefix}.{tail}" for tail in tails} <= set(listed)
    assert {"model.layers.5.self_attn.fused_qkv_a_proj", "model.decoder.self_attn.fused_qkv_a_proj_with_mqa"} <= {
        *listed
    }
    assert listed.index("model.layers.2.mlp.gate") < listed.index("model.layers.3.mlp.gate")
    assert (
        quantization_config(modules[::-1], identify(CONFIGS["glm_moe_dsa"]).architecture, scale_fmt="ue8m0") == config
    )


def test_vision_under_the_deepseek_spelling() -> None:
    """vLLM would quantize the vision tower of kimi_k25; its language model has two names."""
    config, modules, architecture = _declared("kimi_k25", "fp8, layer 3 not")
    listed = set(config["modules_to_not_convert"])
    for name in ("vision_tower.encoder.blocks.1.mlp.fc0", "mm_projector.linear_1", "model.layers.3.self_attn.o_proj"):
        assert name in listed
    assert "language_model.model.layers.3.self_attn.o_proj" in listed
    config["modules_to_not_convert"].remove("vision_tower.encoder.blocks.1.wo")
    (problem,) = check(config, modules, architecture)
    assert problem.startswith("vllm: vision vision_tower.encoder.blocks.1.wo is unquantized on disk")


def _lose(entry: str) -> Any:
    return lambda config: config["ignore"].remove(entry)


def _set(key: str, value: Any) -> Any:
    return lambda config: config.__setitem__(key, value)


@pytest.mark.parametrize(
    ("name", "recipe", "mistake", "message"),
    [
        ("glm_moe_dsa", "int4", _lose(r"re:.*self_attn\..*"), "vllm and sglang: attention.q_b model.layers.0"),
        ("glm_moe_dsa", "int4", _set("ignore", ["re:.*self_attn.*", "re:.*gate.*"]), "is part of"),
        ("glm_moe_dsa", "int4", _set("format", "mixed-precision"), 'needs the top-level format "pack-quantized"'),
        ("kimi_k25", "int4", _set("ignore", ["language_model.model.layers.0.mlp.gate_proj"]), "sglang: dense_mlp"),
        (
            "kimi_k25",
            "int4",
            lambda c: c["ignore"].append("language_model.model.layers.3.mlp.experts.0.up_proj"),
            "vllm: routed_expert language_model.model.layers.3.mlp.experts.0.gate_proj and 35 more is part of",
        ),
        ("glm4_moe", "int4", _lose(r"re:.*mlp\.shared_experts\..*"), "vllm and sglang: shared_expert"),
        ("glm4_moe", "int4", _set("ignore", [r"re:.*self_attn\.[qkvo]_proj$"]), "sglang: attention.q model.layers.0"),
        ("glm4_moe", "int4", lambda c: c["config_groups"]["group_0"].update(targets=["re:.*o_proj$"]), "no target"),
    ],
)
def test_planted_mistakes(name: str, recipe: str, mistake: Any, message: str) -> None:
    config, modules, architecture = _declared(name, recipe)
    mistake(config)
    problems = check(config, modules, architecture)
    assert any(message in problem for problem in problems), problems


@pytest.mark.parametrize("runtime", ["vllm", "sglang"])
def test_one_name_missing_from_the_list(runtime: str) -> None:
    """Every entry that a runtime needs is missed, whichever it is."""
    config, modules, architecture = _declared("glm_moe_dsa", "fp8, layer 3 not", "kept")
    needed = {built.name for built in build(modules, architecture, runtime, "fp8") if built.kind == "linear"}
    needed = {name for name in needed if name.startswith(("model.layers.3.", "model.layers.5.", "model.decoder."))}
    entries = config["modules_to_not_convert"]
    for name in sorted(needed & {module.name for module in modules}):
        damaged = {**config, "modules_to_not_convert": [entry for entry in entries if entry != name]}
        assert check(damaged, modules, architecture), name


def test_disagreements_on_disk() -> None:
    """Parts of a fused module, and experts of one layer."""
    config, modules, architecture = _declared("glm_moe_dsa", "fp8-ct")
    for name in ("model.layers.1.self_attn.q_a_proj", "model.layers.3.mlp.experts.7.up_proj"):
        changed = [module._replace(format=None) if module.name == name else module for module in modules]
        (problem,) = check(config, changed, architecture)
        assert name in problem
    changed = [m._replace(format=None) if m.name.endswith("layers.1.self_attn.q_a_proj") else m for m in modules]
    config = quantization_config(changed, architecture, scale_fmt=None) or {}
    assert "the config treats the parts of that module differently" in check(config, changed, architecture)[0]


def test_blocks_beside_an_int4_linear_group_do_not_load_on_sglang() -> None:
    config, modules, architecture = _declared("glm_moe_dsa", "int4+block")
    groups = config["config_groups"]
    groups["group_0"]["targets"] = ["Linear"]
    groups["group_1"]["targets"] = [r"re:.*self_attn\..*", r"re:.*mlp\.(shared_experts\.)?(gate|up|gate_up|down)_proj$"]
    problems = check(config, modules, architecture)
    assert {problem.split()[1] for problem in problems} == {"attention.kv_b", "dense_mlp", "shared_expert"}
    assert all(problem.startswith("sglang: ") and '"Linear"' in problem for problem in problems)


def test_configs_in_the_hub_s_spellings() -> None:
    """As Kimi-K2.x (INT4), K2-Instruct (no list at all) and GLM-4.5-Air-FP8 (plain names, observers) have them."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    weights |= {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    config: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized", "kv_cache_scheme": None}
    config["config_groups"] = {"group_0": group}
    config["ignore"] = [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ]
    modules, architecture = _modules("kimi_k25", "int4"), identify(CONFIGS["kimi_k25"]).architecture
    assert check(config, modules, architecture) == []
    plain = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    modules, architecture = _modules("kimi_k2", "fp8"), identify(CONFIGS["kimi_k2"]).architecture
    assert check(plain, modules, architecture) == []
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "group_size": None}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    config["config_groups"] = {"group_0": {**group, "weights": weights, "input_activations": inputs}}
    config |= {"format": "float-quantized", "ignore": ["lm_head", "model.embed_tokens", "model.layers.2.mlp.gate"]}
    modules, architecture = _modules("glm4_moe", "fp8-channel"), identify(CONFIGS["glm4_moe"]).architecture
    assert check(config, modules, architecture) == []


@pytest.mark.parametrize(
    "config",
    [
        {},
        [],
        {"quant_method": "modelopt"},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["re:("], "weights": None}}},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": []}},
        {"quant_method": "fp8", "modules_to_not_convert": [1]},
    ],
)
def test_what_cannot_be_read_is_said(config: Any) -> None:
    modules, architecture = _modules("kimi_k2", "fp8"), identify(CONFIGS["kimi_k2"]).architecture
    assert any("is declared by a quantization_config" in problem for problem in check(config, modules, architecture))


def test_a_large_model_is_declared() -> None:
    config = {**CONFIGS["glm_moe_dsa"], "num_hidden_layers": 78, "n_routed_experts": 512, "num_nextn_predict_layers": 1}
    model = identify(config)
    modules = [
        Module(s.name.removesuffix(".weight"), s.role, s.layer, s.mtp, s.linear, _int4(s))
        for s in model.tensors()
        if len(s.shape) == 2
    ]
    assert len(modules) > 118_000
    declared = quantization_config(modules, model.architecture, scale_fmt=None)
    assert check(declared, modules, model.architecture) == []


def test_where_the_runtimes_read_one_entry_differently() -> None:
    """Last components in a plain entry match on SGLang; the parts of a fused module come after its class there."""
    config, modules, architecture = _declared("glm_moe_dsa", "int4+channel")
    config["ignore"].append("self_attn.o_proj")
    parts = [r"re:.*self_attn\.(q_a_proj|kv_a_proj_with_mqa)$", r"re:.*mlp\..*gate_up_proj$"]
    config["config_groups"]["group_1"]["targets"] = parts
    vllm, sglang = (resolve(config, modules, architecture, runtime) for runtime in ("vllm", "sglang"))
    q_a, o_proj = "model.layers.1.self_attn.q_a_proj", "model.layers.1.self_attn.o_proj"
    assert (vllm[q_a], sglang[q_a]) == ("fp8-channel", "int4-g32")
    assert (vllm[o_proj], sglang[o_proj]) == ("int4-g32", None)


def test_targets_name_no_whole_layer() -> None:
    """The head of an MTP layer is `model.layers.{L}.head` to vLLM, which quantizes a head that a target names."""
    modules, architecture = _modules("glm4_moe", "int4"), identify(CONFIGS["glm4_moe"]).architecture
    modules = [m._replace(format="fp8-channel") if m.mtp and m.linear else m for m in modules]
    config = quantization_config(modules, architecture, scale_fmt=None) or {}
    assert check(config, modules, architecture) == []
    targets = config["config_groups"]["group_1"]["targets"]
    assert targets
    assert not any(
        re.match(target[3:], f"model.layers.5.{tail}") for target in targets for tail in ("head", "embed_tokens")
    )
