"""SGLang's own config, model and loader take what we write; what it drops or leaves in silence shows in the account."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import variants
from faults import drop, edit

from phasefold.formats.checkpoint import open_checkpoint
from phasefold.quantize.convert import convert
from phasefold.quantize.plan import make_plan
from phasefold.recipes import load
from phasefold.serving.runtimes.dry import Dry

Ask = Callable[..., Dry]


def complete(dry: Dry) -> None:
    assert (dry.refused, dry.not_taken, dry.unwritten) == ("", [], [])


@pytest.mark.parametrize(
    ("base", "recipe"),
    [("tiny-kimi", "kimi-decode-int4"), ("tiny-glm4", "glm-prefill-fp8"), ("tiny-glm5", "glm-decode-int4")],
)
def test_all_ranks_together_take_everything(ask: Ask, artifact: Any, base: str, recipe: str) -> None:
    complete(ask(artifact(base, "mtp", recipe), tp=2))
    complete(ask(artifact(base, "mtp", recipe), tp=2, ep_size=2))


@pytest.mark.parametrize(
    ("base", "recipe"),
    [
        ("tiny-kimi", "kimi-decode-int4"),
        ("tiny-kimi", "kimi-prefill-fp8"),
        ("tiny-glm4", "glm-prefill-fp8"),
        ("tiny-glm5", "glm-decode-int4-fp8"),
    ],
)
def test_real_values_over_sentinels_say_the_same_as_headers(
    ask: Ask, artifact: Any, tmp_path: Path, base: str, recipe: str
) -> None:
    whole = artifact(base, "mtp", recipe)
    assert ask(whole, data=True) == ask(whole)
    part = edit(whole, lambda tensors, _: drop(tensors, ".layers.2.mlp.experts.3."), tmp_path / "part")
    assert ask(part).unwritten
    assert sorted(ask(part, data=True).unwritten) == sorted(ask(part).unwritten)


@pytest.mark.parametrize(
    ("base", "recipe", "suffix"),
    [
        ("tiny-kimi", "bf16", "weight"),
        ("tiny-kimi", "kimi-decode-int4", "weight_packed"),
        ("tiny-kimi", "kimi-prefill-fp8", "weight_scale_inv"),
        ("tiny-glm4", "glm-prefill-fp8", "weight_scale"),
        ("tiny-glm5", "glm-decode-int4", "weight_scale"),
    ],
)
def test_a_missing_expert_is_no_matter_to_sglang_but_is_told(
    ask: Ask, artifact: Any, tmp_path: Path, base: str, recipe: str, suffix: str
) -> None:
    lost = f"model.layers.2.mlp.experts.3.up_proj.{suffix}"
    size = variants.load(artifact(base, "bf16", recipe))[0][lost].numel()
    dry = ask(edit(artifact(base, "bf16", recipe), lambda tensors, _: drop(tensors, lost), tmp_path / "part"))
    assert (dry.refused, dry.not_taken, dry.log) == ("", [], [])
    (left,) = dry.unwritten
    assert left.startswith(f"model.layers.2.mlp.experts.w13_{suffix} ({size:,} of ")


def test_a_group_that_does_not_divide_what_a_rank_holds_loads_in_silence(ask: Ask, tmp_path: Path) -> None:
    """Rule T1: of three groups of 128 each of two ranks holds 192 columns, and takes one scale."""
    _, config = variants.load(variants.EXAMPLES / "tiny-glm4")
    config["moe_intermediate_size"] = 384
    source = variants.save(tmp_path / "source", variants.random_from(config), config)
    folder = tmp_path / "g128"
    convert(make_plan(open_checkpoint(source), load("glm-decode-int4-g128")), folder)
    unfused = {"disable_shared_experts_fusion": True}
    complete(ask(folder, **unfused))
    dry = ask(folder, tp=2, **unfused)
    assert (dry.refused, dry.unwritten, dry.log) == ("", [], [])
    assert dry.not_taken and all(".down_proj.weight_scale (256 of 768 elements)" in name for name in dry.not_taken)
    assert len(dry.not_taken) == 3 * config["n_routed_experts"]


def test_a_shared_expert_of_another_format_is_lost_unless_fusion_is_off(ask: Ask, artifact: Any) -> None:
    """Rule S6: it is looked for among the packed experts, as one more of them."""
    folder = artifact("tiny-glm4", "bf16", "glm-decode-int4")
    dry = ask(folder)
    assert (dry.refused, dry.log) == ("", [])
    assert {name.split(".mlp.")[1].split(".")[0] for name in dry.not_taken} == {"shared_experts"}
    assert len(dry.not_taken) == 9 and any("w13_weight_packed (8,192 of 139,264" in text for text in dry.unwritten)
    complete(ask(folder, disable_shared_experts_fusion=True))
