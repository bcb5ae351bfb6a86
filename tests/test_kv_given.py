"""KV scales beside a pair: who applies them, who does not, and what the pair loses without them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import folds
import pytest
import torch
import variants
from cache_values import random_values, statistics_of, values_of
from test_kv_artifacts import made

from phasefold.calib.kv import kv_scales
from phasefold.errors import CheckpointError, LoadError
from phasefold.formats.kv_scales import KVScales
from phasefold.serving.deployment import Deployment
from phasefold.serving.kv_given import held_scales, judge_scales, scales_for
from phasefold.serving.pair import serve

torch.set_num_threads(1)
VLLM, SGLANG = Deployment("vllm", kv_dtype="fp8_e4m3"), Deployment("sglang", kv_dtype="fp8_e4m3")
FILE = Path("kv.json")
PROMPTS = ["Return the number of", "Raise an error when"]
RECIPES = {"tiny-kimi": ("kimi-prefill-fp8", "kimi-decode-int4"), "tiny-glm4": ("glm-prefill-fp8", "glm-decode-int4"),
           "tiny-glm5": ("glm-prefill-fp8", "glm-decode-int4")}  # fmt: skip
Folders = tuple[Path, Path]


@pytest.fixture(scope="module")
def manifest(module_path: Path) -> Callable[..., KVScales]:
    root = module_path / "kv"
    found: dict[tuple[str, float], KVScales] = {}

    def get(base: str, headroom: float = 2.0) -> KVScales:
        if (base, headroom) not in found:
            source = variants.EXAMPLES / base
            stats = statistics_of(root / f"{base}-{headroom}", source, random_values(source))
            found[base, headroom] = kv_scales(stats, headroom)
        return found[base, headroom]

    return get


@pytest.fixture(scope="module")
def pair(manifest, module_path: Path) -> Callable[..., Folders]:
    """The artifacts of an example, with the manifest's scales in them where that is asked for."""
    root = module_path / "pairs"

    def get(base: str, scaled: bool = False) -> Folders:
        folders = root / f"{base}-{scaled}-prefill", root / f"{base}-{scaled}-decode"
        for folder, recipe in zip(folders, RECIPES[base], strict=True):
            if not folder.exists():
                made(variants.EXAMPLES / base, folder, recipe, manifest(base) if scaled else None)
        return folders

    return get


def told(folders: Folders, at: Deployment, kv: KVScales) -> list[str]:
    """The messages; all are warnings of D4 about the file."""
    found = judge_scales(folders, (at, at), FILE, kv)
    heads = {(finding.rule, finding.severity, finding.runtime, finding.subject) for finding in found}
    assert heads <= {("D4", "warning", at.runtime, "kv.json")}
    return [finding.message for finding in found]


# -------------------------------------------------------------------------------------- what a runtime does with it


def test_vllm_reads_what_the_artifacts_hold(manifest, pair) -> None:
    assert told(pair("tiny-glm4", True), VLLM, manifest("tiny-glm4")) == []
    lacking = told(pair("tiny-glm4"), VLLM, manifest("tiny-glm4"))
    assert [message.split()[1] for message in lacking] == ["prefill", "decode"]
    assert all("k_scale is not there, which is 1.0" in message and "--kv kv.json" in message for message in lacking)
    eight = manifest("tiny-glm4", 8.0)
    name = "model.layers.0.self_attn.k_scale"
    two, other = manifest("tiny-glm4").tensors("vllm")[name], eight.tensors("vllm")[name]
    assert other == 4 * two
    said = told(pair("tiny-glm4", True), VLLM, eight)
    assert len(said) == 2 and all(f"{name} is {two:g}, the manifest says {other:g}" in message for message in said)


@pytest.mark.parametrize(("base", "at"), [("tiny-glm4", SGLANG), ("tiny-kimi", VLLM), ("tiny-kimi", SGLANG)])
def test_where_nothing_reads_scales_that_is_told(manifest, pair, base: str, at: Deployment) -> None:
    (message,) = told(pair(base), at, manifest(base))
    assert message.startswith("is not applied: ") and "--fold" in message


def test_rows_without_a_static_scale(manifest, pair) -> None:
    for at in (replace(VLLM, kv_dtype="bfloat16"), replace(SGLANG, kv_dtype="auto")):
        (message,) = told(pair("tiny-kimi"), at, manifest("tiny-kimi"))
        assert message.startswith("plays no part: the KV cache is not FP8")
    (message,) = told(pair("tiny-glm5"), SGLANG, manifest("tiny-glm5"))  # Hopper: rows of fp8_ds_mla's form
    assert message.startswith("plays no part: flashmla_kv's rows carry scales of their own")
    (message,) = told(pair("tiny-glm5"), replace(SGLANG, sm=100), manifest("tiny-glm5"))
    assert message.startswith("is not applied: ")


def test_held_scales_are_those_that_were_added(manifest, pair) -> None:
    assert held_scales(pair("tiny-glm4", True)[1]) == manifest("tiny-glm4").row_scales()
    assert held_scales(pair("tiny-glm4")[1]) is None and held_scales(pair("tiny-kimi")[1]) is None


# ------------------------------------------------------------------------------------------------ what is refused


def test_a_file_of_another_model_or_folding_is_refused(manifest, pair, tmp_path: Path) -> None:
    path = tmp_path / "kv.json"
    path.write_bytes(manifest("tiny-glm4").to_bytes())
    kv, scales = scales_for(pair("tiny-glm4"), path)
    assert kv == manifest("tiny-glm4") and scales == kv.row_scales()
    with pytest.raises(LoadError, match=r"kv\.json: not of the model in .*tiny-kimi-False-prefill"):
        scales_for(pair("tiny-kimi"), path)
    folds.folded(variants.EXAMPLES / "tiny-glm4", tmp_path / "folded", {0: {"v": 3}})
    with pytest.raises(LoadError, match="folded is folded, and the scales were calibrated on tiny-glm4, which is not"):
        scales_for((pair("tiny-glm4")[0], tmp_path / "folded"), path)
    path.write_text("{}")
    with pytest.raises(CheckpointError, match="version None"):
        scales_for(pair("tiny-glm4"), path)


# ------------------------------------------------------------------------------------------------ what is gained


@pytest.mark.parametrize("base", ["tiny-kimi", "tiny-glm4"])
def test_a_small_cache_is_saved_by_its_scales(tmp_path: Path, base: str) -> None:
    """The cache scaled down by 2^-8, exactly, by folding: its amax is about 0.02, as in GLM-5.2's first layers."""
    source, parts = variants.EXAMPLES / base, folds.parts_of(base)
    folds.folded(source, tmp_path / "source", {layer: dict.fromkeys(parts, -8) for layer in range(4)})
    small = {place: value * 2.0**-8 for place, value in values_of(base).items()}
    kv = kv_scales(statistics_of(tmp_path / "stats", tmp_path / "source", small))
    folders = tmp_path / "prefill", tmp_path / "decode"
    for folder, recipe in zip(folders, RECIPES[base], strict=True):
        made(tmp_path / "source", folder, recipe, None)
    (tmp_path / "kv.json").write_bytes(kv.to_bytes())
    _, scales = scales_for(folders, tmp_path / "kv.json")
    bf16, scaled, one = (
        serve(*folders, PROMPTS, tokens=6, **rows)["mean_kl"]
        for rows in ({}, {"kv": "fp8_e4m3", "scales": scales}, {"kv": "fp8_e4m3"})
    )
    # ten tokens show the direction; how many times worse it is, benchmarks/quality.py measures on unseen text
    assert one > 2 * scaled and scaled < bf16 + 0.02, (bf16, scaled, one)
