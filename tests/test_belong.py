"""Pairs that belong together, and every way in which two checkpoints do not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sparse
import torch
import variants
from pairs import RECIPES, folded, planned
from safetensors.torch import load_file, save_file

from phasefold.families import identify
from phasefold.formats.checkpoint import INDEX, MANIFEST, open_checkpoint
from phasefold.formats.manifest import read_manifest
from phasefold.serving.belong import belong
from phasefold.serving.deployment import Deployment, Finding

HOPPER = Deployment("sglang", kv_dtype="bfloat16")
VLLM = Deployment("vllm", kv_dtype="bfloat16")


@pytest.fixture(scope="module")
def artifacts(module_path: Path) -> Callable[..., Path]:
    """An artifact of a variant of an example, made once; its source goes, unless it is asked for itself."""

    def get(base: str, recipe: str, kind: str = "bf16") -> Path:
        source, out = module_path / f"{base}-{kind}", module_path / f"{base}-{kind}-{recipe}"
        if recipe and out.exists():
            return out
        asked = source.exists()
        if not asked:
            variants.variant(kind, base, source)
        if not recipe:
            return source
        folded(source, recipe, out)
        if not asked:
            shutil.rmtree(source)
        return out

    return get


@pytest.fixture
def pair(artifacts: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Copies of an FP8 and an INT4 artifact of one source, to be changed."""

    def get(base: str = "tiny-glm5", kind: str = "bf16") -> tuple[Path, Path]:
        prefill, (decode, *_) = RECIPES[base]
        copies = tmp_path / "prefill", tmp_path / "decode"
        for recipe, copy in zip((prefill, decode), copies, strict=True):
            shutil.copytree(artifacts(base, recipe, kind), copy)
        return copies

    return get


def change(path: Path, **keys: Any) -> None:
    """Set keys of a JSON file; None takes one out."""
    value = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


def add_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "scales.safetensors", {"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(tensors, "scales.safetensors")
    index["metadata"]["total_size"] += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    (folder / INDEX).write_text(json.dumps(index))


def multiply(folder: Path, part: str, factor: float) -> None:
    """Multiply every tensor whose name contains `part`, in place."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        changed = {name: tensor * factor if part in name else tensor for name, tensor in tensors.items()}
        save_file(changed, path, {"format": "pt"})


def rules(findings: list[Finding]) -> set[tuple[str, str]]:
    return {(finding.rule, finding.severity) for finding in findings}


@pytest.mark.parametrize("at", [HOPPER, VLLM], ids=lambda at: at.runtime)
@pytest.mark.parametrize(("base", "decode"), [(base, name) for base, (_, names) in RECIPES.items() for name in names])
@pytest.mark.parametrize("kind", ["bf16", "fp8-block", "mtp"])
def test_sound_pairs_are_clean(artifacts, base: str, decode: str, kind: str, at: Deployment) -> None:
    prefill = RECIPES[base][0]
    at = replace(at, mtp=kind == "mtp")
    assert belong(artifacts(base, prefill, kind), artifacts(base, decode, kind), at, at) == []


def test_sound_pair_of_a_wrapped_model_is_clean(artifacts) -> None:
    kinds = [artifacts("tiny-kimi", recipe, "k25") for recipe in ("kimi-prefill-fp8", "kimi-decode-int4")]
    assert belong(*kinds, HOPPER, HOPPER) == []


def test_the_source_itself_may_serve_prefill(artifacts) -> None:
    source = artifacts("tiny-glm5", "", "fp8-block")
    assert belong(source, artifacts("tiny-glm5", "glm-decode-int4", "fp8-block"), HOPPER, HOPPER) == []


def test_an_artifact_made_from_the_other_belongs_to_it(artifacts, tmp_path: Path) -> None:
    prefill = artifacts("tiny-glm5", "glm-prefill-fp8")
    assert belong(prefill, folded(prefill, "glm-decode-int4", tmp_path / "out"), HOPPER, HOPPER) == []


CONFIG: dict[str, dict[str, Any]] = {
    "rope base": {"rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"}},
    "rope scaling": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0}},
    "tokens that the indexer chooses": {"index_topk": 128},
    "width of the indexer": {"index_head_dim": 128},
    "layers with an indexer": {"indexer_types": ["full", "shared", "full", "full"]},
    "layers that share, spelled otherwise": {"indexer_types": None, "index_topk_pattern": "FSFF"},
    "latent width": {"kv_lora_rank": 64},
    "rope width": {"qk_rope_head_dim": 16},
    "heads": {"num_attention_heads": 8},
    "layers": {"num_hidden_layers": 3, "indexer_types": None, "mlp_layer_types": None},
    "vocabulary": {"vocab_size": 1000},
    "routing": {"routed_scaling_factor": 2.5},
    "epsilon": {"rms_norm_eps": 1e-6},
    "class": {"architectures": ["DeepseekV32ForCausalLM"]},
}


@pytest.mark.parametrize("name", CONFIG)
def test_d1_another_model(pair, name: str) -> None:
    prefill, decode = pair()
    change(decode / "config.json", **CONFIG[name])
    found = belong(prefill, decode, HOPPER, HOPPER)
    assert rules(found) == {("D1", "silent")}
    assert next(iter(CONFIG[name])).split("_")[0] in found[0].message


def test_d1_rope_spelled_in_two_ways_is_one_rope(pair) -> None:
    prefill, decode = pair("tiny-kimi")
    change(decode / "config.json", rope_parameters=None, rope_theta=10000.0, rope_scaling=None)
    assert belong(prefill, decode, HOPPER, HOPPER) == []
    change(decode / "config.json", rope_scaling={"type": "yarn", "factor": 32.0})
    assert rules(belong(prefill, decode, HOPPER, HOPPER)) == {("D1", "silent")}


def test_d1_a_key_of_one_config_only_is_a_warning(pair) -> None:
    prefill, decode = pair()
    change(decode / "config.json", some_new_default=True, eos_token_id=[0, 1])
    assert rules(belong(prefill, decode, HOPPER, HOPPER)) == {("D1", "warning")}


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "tokenizer": (lambda folder: change(folder / "tokenizer.json", version="2.0"), "silent"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "error"),
    "vocabulary of its own": (lambda folder: (folder / "tiktoken.model").write_text("x"), "error"),
    "bos": (lambda folder: change(folder / "tokenizer_config.json", add_bos_token=True), "silent"),
    "template": (lambda folder: change(folder / "tokenizer_config.json", chat_template="{{ x }}"), "warning"),
    "template file": (lambda folder: (folder / "chat_template.jinja").write_text("x"), "warning"),
    "generation": (lambda folder: change(folder / "generation_config.json", eos_token_id=7), "warning"),
}


@pytest.mark.parametrize("name", FILES)
def test_d1_other_files_beside_the_weights(pair, name: str) -> None:
    prefill, decode = pair()
    mutate, severity = FILES[name]
    mutate(decode)
    assert rules(belong(prefill, decode, HOPPER, HOPPER)) == {("D1", severity)}


LAYOUTS: dict[str, tuple[str, Deployment, Deployment, set[tuple[str, str]]]] = {
    "dtypes, sglang": ("tiny-glm5", HOPPER, replace(HOPPER, kv_dtype="fp8_e4m3"), {("D2", "error")}),
    "auto on two cards": (
        "tiny-glm5",
        replace(HOPPER, kv_dtype="auto"),
        replace(HOPPER, kv_dtype="auto", sm=100),
        {("D2", "error")},
    ),
    "auto and what it stands for": ("tiny-kimi", replace(HOPPER, kv_dtype="auto"), HOPPER, {("D2", "error")}),
    "rows of two forms": (
        "tiny-glm5",
        replace(HOPPER, kv_dtype="fp8_e4m3"),
        replace(HOPPER, kv_dtype="fp8_e4m3", sm=100),
        {("D2", "silent")},
    ),
    "pages": ("tiny-kimi", replace(HOPPER, page_size=16), HOPPER, {("D2", "error")}),
    "pages on two cards": ("tiny-kimi", HOPPER, replace(HOPPER, sm=100), {("D2", "error")}),
    "a dtype that is none": ("tiny-kimi", replace(HOPPER, kv_dtype="fp8"), HOPPER, {("D2", "error")}),
    "no such kernel on the card": (
        "tiny-kimi",
        replace(HOPPER, attention_backend="trtllm_mla"),
        HOPPER,
        {("D2", "error")},
    ),
    "pages, vllm": ("tiny-glm4", replace(VLLM, page_size=32), VLLM, {("D2", "warning")}),
    "dtypes, vllm": ("tiny-glm4", replace(VLLM, kv_dtype="fp8"), replace(VLLM, kv_dtype="fp8_e4m3"), {("D2", "error")}),
    "backends, vllm": (
        "tiny-glm4",
        replace(VLLM, attention_backend="TRITON_ATTN"),
        VLLM,
        {("D3", "error")},
    ),
    "cards, vllm": ("tiny-glm4", VLLM, replace(VLLM, sm=100), set()),  # its heads are too small for FlashInfer
    "runtimes": ("tiny-glm4", VLLM, HOPPER, {("D3", "error")}),
    "mtp in one, vllm": ("tiny-glm4", replace(VLLM, mtp=True), VLLM, {("D6", "error")}),
    "mtp in one, sglang": ("tiny-glm4", HOPPER, replace(HOPPER, mtp=True), {("D6", "silent")}),
    "tensor parallel differs": ("tiny-glm4", replace(VLLM, tp=2), VLLM, set()),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_d2_d3_d6_of_the_deployments(pair, name: str) -> None:
    base, prefill_at, decode_at, expected = LAYOUTS[name]
    assert rules(belong(*pair(base, "mtp" if "mtp" in name else "bf16"), prefill_at, decode_at)) == expected


def test_d2_rows_of_glm5_in_bytes(tmp_path: Path) -> None:
    model = identify(sparse.config_of("zai-org/GLM-5.2-FP8"))
    small = [tensor for tensor in sparse.stored("zai-org/GLM-5.2-FP8") if tensor.name.endswith("norm.weight")]
    folder = tmp_path / "glm"  # the rule asks config and headers; the other 59,000 tensors say nothing more
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config))
    sparse.write_header(folder / "model.safetensors", small)
    fp8 = replace(HOPPER, kv_dtype="fp8_e4m3", tp=8)
    (found,) = belong(folder, folder, fp8, replace(fp8, sm=100))
    assert found.rule == "D2" and "656 bytes" in found.message and "576" in found.message
    # vLLM: "fp8" is the 656 of FlashMLA on Hopper and the 576 of FlashInfer on Blackwell
    fp8 = replace(VLLM, kv_dtype="fp8", tp=8)
    assert ("D2", "error") in rules(belong(folder, folder, fp8, replace(fp8, sm=100)))
    explicit = replace(fp8, kv_dtype="fp8_ds_mla")
    assert belong(folder, folder, explicit, replace(explicit, sm=100)) == []
    # and bfloat16 on Blackwell depends on the heads of a rank
    plain = replace(VLLM, sm=100)
    assert ("D3", "error") in rules(belong(folder, folder, replace(plain, tp=8), replace(plain, tp=2)))


def test_d2_a_cache_scheme_in_one_config(pair) -> None:
    prefill, decode = pair("tiny-kimi")
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    config = json.loads((decode / "config.json").read_text())
    change(decode / "config.json", quantization_config=config["quantization_config"] | {"kv_cache_scheme": scheme})
    auto = replace(HOPPER, kv_dtype="auto")
    assert rules(belong(prefill, decode, auto, auto)) == {("D2", "error")}
    assert rules(belong(prefill, decode, HOPPER, HOPPER)) == {("D2", "warning")}


def test_d3_dtype_of_the_models(pair) -> None:
    prefill, decode = pair()
    change(decode / "config.json", dtype="float16")
    assert rules(belong(prefill, decode, VLLM, VLLM)) == {("D3", "error")}


SCALE = {f"model.layers.{layer}.self_attn.{part}_scale": torch.tensor([0.02]) for layer in range(4) for part in "kv"}


def test_d4_scales_of_one_artifact(pair) -> None:
    prefill, decode = pair("tiny-glm4")
    add_tensors(decode, SCALE)
    fp8 = replace(VLLM, kv_dtype="fp8_e4m3")
    assert rules(belong(prefill, decode, fp8, fp8)) == {("D4", "silent")}
    assert rules(belong(prefill, decode, VLLM, VLLM)) == {("D4", "warning")}
    add_tensors(prefill, SCALE | {"model.layers.3.self_attn.v_scale": torch.tensor([0.03])})
    assert rules(belong(prefill, decode, fp8, fp8)) == {("D4", "silent")}


def test_d4_equal_scales_are_vllms_alone(pair) -> None:
    prefill, decode = pair("tiny-glm4")
    add_tensors(decode, SCALE)
    add_tensors(prefill, SCALE)
    fp8 = replace(VLLM, kv_dtype="fp8_e4m3")
    assert belong(prefill, decode, fp8, fp8) == []
    fp8 = replace(HOPPER, kv_dtype="fp8_e4m3")
    assert rules(belong(prefill, decode, fp8, fp8)) == {("D4", "warning")}


@pytest.mark.parametrize("base", ["tiny-kimi", "tiny-glm4"])
def test_d4_one_artifact_is_folded(pair, base: str) -> None:
    prefill, decode = pair(base)
    multiply(decode, "kv_a_layernorm" if base == "tiny-kimi" else "self_attn.k_norm", 4.0)
    assert rules(belong(prefill, decode, HOPPER, HOPPER)) == {("D4", "silent")}
    multiply(prefill, "kv_a_layernorm" if base == "tiny-kimi" else "self_attn.k_norm", 4.0)
    assert belong(prefill, decode, HOPPER, HOPPER) == []


def test_d4_manifests_tell_of_folding(pair) -> None:
    prefill, decode = pair("tiny-kimi")
    manifest = read_manifest(decode)
    (decode / MANIFEST).write_bytes(replace(manifest, extras={"folding": {"1": {"k_pe": 0, "kv_c": 0}}}).to_bytes())
    assert belong(prefill, decode, HOPPER, HOPPER) == []
    (decode / MANIFEST).write_bytes(replace(manifest, extras={"folding": {"1": {"kv_c": 3}}}).to_bytes())
    found = belong(prefill, decode, HOPPER, HOPPER)  # and the weights are not as that manifest has them
    assert [(one.rule, one.subject) for one in found] == [
        ("D4", "layers.1.kv_c"),
        ("D5", "model.layers.1.self_attn.kv_b_proj.weight"),
    ]


def test_d5_other_weights(artifacts, tmp_path: Path) -> None:
    tensors, config = variants.load(variants.EXAMPLES / "tiny-glm5")
    changed = {name: tensor * 1.5 if name.endswith("norm.weight") else tensor for name, tensor in tensors.items()}
    source = variants.save(tmp_path / "source", changed, config)
    decode = folded(source, "glm-decode-int4", tmp_path / "decode")
    assert rules(belong(artifacts("tiny-glm5", "glm-prefill-fp8"), decode, HOPPER, HOPPER)) == {("D5", "silent")}
    for manifest in tmp_path.glob(f"*/{MANIFEST}"):
        manifest.unlink()
    assert rules(belong(artifacts("tiny-glm5", "glm-prefill-fp8"), decode, HOPPER, HOPPER)) == {("D5", "silent")}


def test_d5_follows_artifacts_made_of_artifacts(artifacts, tmp_path: Path) -> None:
    """BF16 -> FP8 -> BF16 -> INT4 beside FP8 of the first, and beside the first itself."""
    prefill = artifacts("tiny-glm5", "glm-prefill-fp8")
    middle = folded(prefill, "bf16", tmp_path / "middle")
    decode = folded(middle, "glm-decode-int4", tmp_path / "decode")
    source = artifacts("tiny-glm5", "")
    told = read_manifest(decode).source
    assert told["origins"] == [open_checkpoint(prefill).digest, open_checkpoint(source).digest]
    assert read_manifest(prefill).source["origins"] == []
    for other in (prefill, source, folded(source, "glm-prefill-fp8", tmp_path / "again")):
        assert belong(other, decode, HOPPER, HOPPER) == []
    (decode / MANIFEST).unlink()
    assert rules(belong(source, decode, HOPPER, HOPPER)) == {("D5", "warning")}
    changed = tmp_path / "changed"  # a manifest counts only beside the files that it lists
    shutil.copytree(prefill, changed)
    (changed / "config.json").write_text(json.dumps(json.loads((changed / "config.json").read_text())))
    assert read_manifest(folded(changed, "glm-decode-int4", tmp_path / "of-changed")).source["origins"] == []


def test_d5_one_release_in_two_formats(artifacts) -> None:
    prefill, decode = artifacts("tiny-glm5", "glm-prefill-fp8", "fp8-block"), artifacts("tiny-glm5", "glm-decode-int4")
    assert rules(belong(prefill, decode, HOPPER, HOPPER)) == {("D5", "warning")}


def test_d5_without_manifests_nothing_is_proven(pair) -> None:
    prefill, decode = pair()
    (decode / MANIFEST).unlink()
    (found,) = belong(prefill, decode, HOPPER, HOPPER)
    assert (found.rule, found.severity) == ("D5", "warning") and "decode" in found.message


@pytest.mark.parametrize("at", [HOPPER, VLLM], ids=lambda at: at.runtime)
def test_d5_pools_that_were_exchanged(pair, artifacts, at: Deployment) -> None:
    prefill, decode = pair()
    found = belong(decode, prefill, at, at)
    assert rules(found) == {("D5", "warning")} and len(found) == 2
    assert "made for decode (recipe glm-decode-int4), but given to the prefill pool" in found[0].message
    assert "made for prefill" in found[1].message
    (found,) = belong(prefill, prefill, at, at)
    assert "given to the decode pool" in found.message
    plain = artifacts("tiny-glm5", "bf16")  # made for any phase
    assert belong(plain, decode, at, at) == [] and rules(belong(plain, prefill, at, at)) == {("D5", "warning")}


def test_d5_an_altered_manifest(pair) -> None:
    prefill, decode = pair()
    change(decode / MANIFEST, phase="prefill")
    assert rules(belong(prefill, decode, HOPPER, HOPPER)) == {("D5", "error")}


def test_d6_mtp_in_one_artifact(pair) -> None:
    prefill, decode = pair("tiny-glm5", "mtp")
    change(decode / "config.json", num_nextn_predict_layers=0)
    assert rules(belong(prefill, decode, HOPPER, HOPPER)) == {("D6", "warning")}
    drafting = replace(HOPPER, mtp=True)
    assert rules(belong(prefill, decode, drafting, drafting)) == {("D6", "error")}


def test_d6_mtp_asked_for_and_in_none(pair) -> None:
    drafting = replace(HOPPER, mtp=True)
    assert rules(belong(*pair(), drafting, drafting)) == {("D6", "error")}


PUBLISHED = [
    ("zai-org/GLM-5.2-FP8", "glm-decode-int4", (Deployment("sglang", tp=8, kv_dtype="fp8_e4m3"),)),
    ("zai-org/GLM-4.5-Air-FP8", "glm-decode-int4", (replace(VLLM, tp=4), Deployment("vllm", kv_dtype="fp8_e4m3"))),
    ("moonshotai/Moonlight-16B-A3B", "kimi-decode-int4", (replace(HOPPER, tp=8), replace(VLLM, tp=2))),
]


@pytest.mark.parametrize(("model", "recipe", "deployments"), PUBLISHED, ids=lambda value: str(value)[:30])
def test_published_releases_serve_prefill_for_what_is_made_of_them(
    tmp_path: Path, model: str, recipe: str, deployments: tuple[Deployment, ...]
) -> None:
    source = tmp_path / "source"
    sparse.write(model, source)
    decode = planned(source, recipe, tmp_path / "decode")
    for at in deployments:
        assert belong(source, decode, at, replace(at, tp=1)) == []
