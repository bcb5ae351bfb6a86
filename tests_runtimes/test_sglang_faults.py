"""What SGLang refuses, and what it takes in silence: rules that the static checks hold it to, asked of itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import variants
from faults import (
    Change,
    cache_scales,
    copied,
    edit,
    experts_only,
    group_of,
    ignored,
    pack,
    plain_modules,
    plain_o_proj,
    quantized,
    renamed,
    unignored,
    weights,
    without,
    without_key,
)  # fmt: skip

from phasefold.serving.runtimes.dry import Dry

Ask = Callable[..., Dry]


def complete(dry: Dry) -> None:
    assert (dry.refused, dry.not_taken, dry.unwritten) == ("", [], [])


@pytest.mark.parametrize(
    ("base", "within", "says"),
    [
        ("tiny-kimi", ["kv_b_proj"], "AttributeError: 'ColumnParallelLinear' object has no attribute 'weight'"),
        ("tiny-kimi", ["q_a_proj", "kv_a_proj"], "AssertionError: param.shape=torch.Size([2])"),
        ("tiny-kimi", ["q_a_proj"], "ValueError: Found different quantization schemes for ['q_a_proj', 'kv_a_proj"),
        ("tiny-glm4", ["shared_experts"], "AttributeError: 'MergedColumnParallelLinear' object has no attribute"),
    ],
)
def test_what_sglang_cannot_have_in_int4_is_refused(
    ask: Ask, artifact: Any, tmp_path: Path, base: str, within: list[str], says: str
) -> None:
    """Rule P12, and GLM-4.x's shared experts."""
    recipe = "kimi-decode-int4" if base == "tiny-kimi" else "glm-decode-int4"
    folder = edit(artifact(base, "bf16", recipe), pack(*within), tmp_path / "packed")
    assert ask(folder, disable_shared_experts_fusion=True).refused.startswith(says)


@pytest.mark.parametrize(
    ("base", "within"), [("tiny-kimi", "shared_experts"), ("tiny-kimi", "o_proj"), ("lite", "shared_experts")]
)
def test_what_it_can_have_in_int4_lands(ask: Ask, artifact: Any, tmp_path: Path, base: str, within: str) -> None:
    recipe = "kimi-decode-int4" if base == "tiny-kimi" else "glm-decode-int4"
    folder = edit(artifact(base, "bf16", recipe), pack(within), tmp_path / "packed")
    dry = ask(folder, disable_shared_experts_fusion=True)
    complete(dry)
    assert "CompressedTensorsLinearMethod CompressedTensorsWNA16" in dry.methods


def test_half_of_a_joined_projection_in_int4_loses_both_where_sglang_does_not_know_that_it_is_joined(
    ask: Ask, artifact: Any, tmp_path: Path
) -> None:
    folder = edit(artifact("lite", "bf16", "glm-decode-int4"), pack("q_a_proj"), tmp_path / "packed")
    dry = ask(folder, disable_shared_experts_fusion=True)
    assert dry.refused == "" and not any("a_proj" in line for line in dry.log)
    assert {name.split("self_attn.")[1] for name in dry.not_taken} == {
        "q_a_proj.weight_packed", "q_a_proj.weight_scale", "q_a_proj.weight_shape", "kv_a_proj_with_mqa.weight",
    }  # fmt: skip


#: what is wrong with a good artifact -> what SGLang says, or what shows in the account of which it says nothing
REFUSED: dict[str, tuple[str, str, Change, str]] = {
    "P7 format": ("tiny-kimi", "kimi-decode-int4", quantized(format="mixed-precision"), "ValueError: ('For Fused MoE"),
    "P8 no target": ("tiny-kimi", "kimi-decode-int4", experts_only, "ValueError: Unable to find matching target"),
    "P10 attention": (
        "tiny-kimi",
        "kimi-decode-int4",
        unignored("self_attn"),
        "AttributeError: 'ColumnParallelLinear'",
    ),
    "P10 dense": ("tiny-kimi", "kimi-decode-int4", unignored("gate_up_proj"), "KeyError: 'model.layers.0.mlp.gate_up"),
    "F2 name": ("tiny-kimi", "kimi-prefill-fp8", renamed("_scale_inv", "_scale"), "KeyError: 'model.layers.0.mlp.gate"),
    "P2 group": ("tiny-kimi", "kimi-decode-int4", group_of(64), "RuntimeError: The size of tensor a (2) must match"),
    "C7 key": ("tiny-kimi", "kimi-decode-int4", weights(group="mine"), "ValidationError"),
    "no moe_layer_freq": ("tiny-kimi", "bf16", without_key("moe_layer_freq"), "AttributeError: 'DeepseekV3Config'"),
}
SILENT: dict[str, tuple[str, str, Change, str, str]] = {
    "C3 extra": ("tiny-kimi", "bf16", copied(".experts.3.", ".experts.16."), "experts.16.", ""),
    "C4 layer": ("tiny-kimi", "bf16", copied(".layers.3.", ".layers.7."), "layers.7.", ""),
    "P3 shape": ("tiny-kimi", "kimi-decode-int4", without("weight_shape"), "", "weight_shape"),
    "P10 experts": ("tiny-kimi", "kimi-decode-int4", ignored("re:.*experts.*"), "weight_packed", "experts.w13_weight"),
    "F2 name": ("tiny-glm4", "glm-prefill-fp8", renamed("weight_scale", "weight_scale_inv"), "_inv", "weight_scale"),
    "F4 unlisted": ("tiny-kimi", "kimi-prefill-fp8", plain_o_proj, "", "o_proj.weight_scale_inv"),
    "K1 name": ("tiny-kimi", "kimi-prefill-fp8", cache_scales("k_scale"), "self_attn.k_scale", ""),
    "K1 GQA": ("tiny-glm4", "glm-prefill-fp8", cache_scales("k_proj.k_scale"), "k_proj.k_scale", ""),
    "actorder": ("tiny-kimi", "kimi-decode-int4", weights(actorder="group"), "", "g_idx"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_refused_by_sglang(ask: Ask, artifact: Any, tmp_path: Path, fault: str) -> None:
    base, recipe, change, says = REFUSED[fault]
    dry = ask(edit(artifact(base, "bf16", recipe), change, tmp_path / "faulty"))
    assert dry.refused.startswith(says)


@pytest.mark.parametrize("fault", SILENT)
def test_not_refused_by_sglang_but_told(ask: Ask, artifact: Any, tmp_path: Path, fault: str) -> None:
    base, recipe, change, lost, empty = SILENT[fault]
    dry = ask(edit(artifact(base, "bf16", recipe), change, tmp_path / "faulty"))
    assert dry.refused == ""
    assert bool(dry.not_taken) == bool(lost) and bool(dry.unwritten) == bool(empty)
    assert any(lost in name for name in dry.not_taken or [""]) and any(empty in text for text in dry.unwritten or [""])


def test_cache_scales_under_the_one_name_that_sglang_reads(ask: Ask, artifact: Any, tmp_path: Path) -> None:
    """Rule K1; a number is read out of its tensor and filled in, so that the account must follow the number."""
    good = artifact("tiny-kimi", "bf16", "kimi-prefill-fp8")
    folder = edit(good, cache_scales("k_proj.k_scale", "v_proj.v_scale"), tmp_path / "all")
    complete(ask(folder))
    complete(ask(folder, data=True))
    one = edit(folder, without("layers.2.self_attn.k_proj.k_scale"), tmp_path / "but-one")
    assert ask(one).unwritten == ["model.layers.2.self_attn.attn_mqa.k_scale (1 of 1 elements)"]


@pytest.mark.parametrize(
    ("prefix", "says"), [("model.", ""), ("language_model.model.", "KeyError: 'model.layers.0.mlp")]
)
def test_sglangs_names_of_kimi_k25_lack_the_prefix(
    ask: Ask, artifact: Any, tmp_path: Path, prefix: str, says: str
) -> None:
    def list_plainly(tensors: variants.Tensors, config: dict[str, Any]) -> None:
        names = [name.removeprefix("language_model.").removeprefix("model.") for name in plain_modules(tensors)]
        config["quantization_config"]["ignore"] = ["lm_head", *(prefix + name for name in names)]

    dry = ask(edit(artifact("tiny-kimi", "k25", "kimi-decode-int4"), list_plainly, tmp_path / "listed"))
    assert dry.refused.startswith(says) if says else not dry.refused
    assert says or dry.not_taken == dry.unwritten == []


@pytest.mark.parametrize("interleave", [True, False])
def test_the_indexers_joined_projection_in_fp8_channels(
    ask: Ask, source: Any, tmp_path: Path, interleave: bool
) -> None:
    """Rule P13: joined, and so of blocks or BF16, where the config says indexer_rope_interleave, as GLM-5's do."""

    def change(_: variants.Tensors, config: dict[str, Any]) -> None:
        config["indexer_rope_interleave"] = interleave

    dry = ask(edit(source("tiny-glm5", "fp8-channel"), change, tmp_path / "changed"))
    assert dry.refused.startswith("RuntimeError: Attempting to broadcast") if interleave else not dry.refused


@pytest.mark.parametrize("recipe", ["glm-decode-int4", "glm-decode-int4-fp8", "glm-prefill-fp8"])
@pytest.mark.parametrize("mtp", ["keep", "drop"])
def test_the_draft_model_loads_as_the_config_says_it(
    ask: Ask, artifact: Any, tmp_path: Path, recipe: str, mtp: str
) -> None:
    """Rule S7: SGLang builds it as model.decoder, whatever its layer's number is."""

    def change(_: variants.Tensors, config: dict[str, Any]) -> None:
        config["indexer_rope_interleave"] = True

    dry = ask(edit(artifact("tiny-glm5", "mtp", recipe, mtp=mtp), change, tmp_path / "interleaved"))
    complete(dry)
    assert ("the draft model" in " ".join(dry.optional)) == (mtp == "keep")
