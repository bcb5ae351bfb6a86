"""Artifacts with KV scales, and folded ones, given to this environment's runtime."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from phasefold.families import identify
from phasefold.formats.checkpoint import open_checkpoint
from phasefold.quantize.convert import convert
from phasefold.quantize.extras import Extras
from phasefold.quantize.fold import settled
from phasefold.quantize.plan import make_plan
from phasefold.recipes import load
from phasefold.serving.runtimes.dry import Dry

VLLM = find_spec("vllm") is not None
LAUNCH = {} if VLLM else {"disable_shared_experts_fusion": True}


@pytest.mark.parametrize("recipe", ["glm-prefill-fp8", "glm-decode-int4", "glm-decode-int4-fp8"])
def test_scales_of_grouped_query_attention_are_taken_or_told(
    ask: Callable[..., Dry], source: Callable[[str, str], Path], tmp_path: Path, recipe: str
) -> None:
    checkpoint = open_checkpoint(source("tiny-glm4", "bf16"))
    layers = [layer.layer for layer in identify(checkpoint.config).cache() if not layer.mtp]
    scales = {f"model.layers.{layer}.self_attn.{part}_scale": 2.0**-layer for layer in layers for part in "kv"}
    convert(make_plan(checkpoint, load(recipe), extras=Extras(kv_scales=scales)), tmp_path / "out")
    dry = ask(tmp_path / "out", **(LAUNCH if "int4" in recipe else {}))
    assert (dry.refused, dry.not_taken, dry.unwritten) == ("", [], [])
    assert dry.tensors == len(open_checkpoint(tmp_path / "out").tensors)
    skipped = {name for name in scales if name in str(dry)}
    assert skipped == (set() if VLLM else set(scales)), "vLLM reads each of them, SGLang none"


@pytest.mark.parametrize("base", ["tiny-kimi", "tiny-glm4", "tiny-glm5"])
def test_folded_artifacts_land_as_others_do(
    ask: Callable[..., Dry], source: Callable[[str, str], Path], tmp_path: Path, base: str
) -> None:
    checkpoint = open_checkpoint(source(base, "bf16"))
    layers = [layer for layer in identify(checkpoint.config).cache() if not layer.mtp]
    wanted = {layer.layer: {part.name: 3 for part in layer.parts if part.name != "index_k"} for layer in layers}
    recipe = "kimi-decode-int4" if base == "tiny-kimi" else "glm-decode-int4"
    convert(make_plan(checkpoint, load(recipe), extras=settled(checkpoint, wanted)), tmp_path / "out")
    dry = ask(tmp_path / "out", **(LAUNCH if base == "tiny-glm4" else {}))
    assert (dry.refused, dry.not_taken, dry.unwritten) == ("", [], [])
