"""KV scales in artifacts: what is added is what vLLM reads, to the bit, and nothing else changes; where none, why."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import folds
import pytest
import torch
import variants
from cache_values import random_values, statistics_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from phasefold.calib.kv import kv_scales
from phasefold.errors import CheckpointError, PlanError, RecipeError
from phasefold.families import identify
from phasefold.formats.checkpoint import MANIFEST, open_checkpoint
from phasefold.formats.kv_scales import KVScales
from phasefold.formats.manifest import read_manifest
from phasefold.quantize.convert import Result, convert
from phasefold.quantize.extras import NO_EXTRAS, Extras, from_json
from phasefold.quantize.fold import carried
from phasefold.quantize.kv import with_folding, with_kv_scales
from phasefold.quantize.plan import Plan, make_plan
from phasefold.quantize.summary import inspect
from phasefold.quantize.verify import verify
from phasefold.recipes import Recipe, load, parse
from phasefold.serving.belong import belong
from phasefold.serving.deployment import Deployment
from phasefold.serving.paged.weights import load_model
from phasefold.serving.rules import check
from phasefold.serving.survey import survey, survey_plan

GLM4 = variants.EXAMPLES / "tiny-glm4"
FILE = Path("kv.json")
RECIPES = ("glm-prefill-fp8", "glm-decode-int4", "glm-decode-int4-g128", "glm-decode-int4-fp8")
VLLM, SGLANG = Deployment("vllm", kv_dtype="fp8_e4m3"), Deployment("sglang", kv_dtype="fp8_e4m3", shared_fusion=False)


@pytest.fixture(scope="module")
def manifest(module_path: Path):
    """The manifest of a source's random cache; its scales differ from layer to layer and from k to v."""

    def get(source: Path = GLM4, headroom: float = 2.0) -> KVScales:
        values = {
            (n, part): v * 2.0 ** (2 * n - (part in ("v", "kv_c"))) for (n, part), v in random_values(source).items()
        }
        folder = module_path / f"{len(list(module_path.iterdir()))}"
        return kv_scales(statistics_of(folder, source, values), headroom)

    return get


def planned(source: Path, recipe: str | Recipe, kv: KVScales | None, shard_bytes: int = 2_000_000) -> Plan:
    checkpoint = open_checkpoint(source)
    start = carried(checkpoint)
    extras = with_kv_scales(start, FILE, kv, checkpoint, identify(checkpoint.config)) if kv else start
    return make_plan(checkpoint, load(recipe) if isinstance(recipe, str) else recipe, shard_bytes, extras)


def made(source: Path, out: Path, recipe: str | Recipe, kv: KVScales | None) -> Result:
    return convert(planned(source, recipe, kv), out)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def same_bytes(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape) and torch.equal(
        ours.flatten().view(torch.uint8), theirs.flatten().view(torch.uint8)
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_added_is_what_vllm_reads_and_all_else_stays(manifest, tmp_path: Path, recipe: str) -> None:
    kv = manifest()
    plain, result = made(GLM4, tmp_path / "plain", recipe, None), made(GLM4, tmp_path / "kv", recipe, kv)
    before, after = tensors(tmp_path / "plain"), tensors(tmp_path / "kv")
    scales = {
        f"model.layers.{layer.layer}.self_attn.{name}_scale": part.scale
        for layer in kv.layers
        for name, part in layer.parts.items()
    }
    assert len(set(scales.values())) > 5 and after.keys() - before.keys() == scales.keys()
    for name, value in scales.items():
        assert (after[name].dtype, after[name].shape, after[name].item()) == (torch.float32, (1,), value), name
    for name, tensor in before.items():
        assert same_bytes(tensor, after[name]), name
    assert (tmp_path / "kv" / "config.json").read_bytes() == (tmp_path / "plain" / "config.json").read_bytes()
    assert result.plan.actions()["added"] == 8 and plain.plan.actions()["added"] == 0
    assert result.plan.digest != plain.plan.digest
    said = read_manifest(tmp_path / "kv")
    assert {name: said.units[name] for name in scales} == {name: ["added", "none", "f32", 0.0] for name in scales}
    assert said.extras["kv_scales"] == scales and said.extras["kv"]["digest"] == kv.digest
    assert sum("KV scales" in note for note in said.notes) == 2 and not result.errors.get("attention.kv_scale")
    verdict = verify(tmp_path / "kv", GLM4)
    assert verdict.problems == [] and verdict.errors["attention.kv_scale"] == 0.0
    assert convert(planned(GLM4, recipe, kv), tmp_path / "kv").resumed_shards == len(result.plan.shards)


@pytest.mark.parametrize("workers", [1, 5])
def test_an_artifact_with_scales_is_the_same_however_it_is_cut_and_made(manifest, tmp_path: Path, workers: int) -> None:
    kv, whole = manifest(), 10**9
    for shard_bytes in (whole, 300_000):
        plan = planned(GLM4, "glm-decode-int4", kv, shard_bytes)
        seen: list[int] = []
        convert(plan, tmp_path / str(shard_bytes), workers=workers, progress=seen.append)
        assert sum(seen) == plan.checkpoint.total_size  # what is added has no source to be read
        assert verify(tmp_path / str(shard_bytes), GLM4).problems == []
    one, many = tensors(tmp_path / str(whole)), tensors(tmp_path / "300000")
    assert one.keys() == many.keys() and all(same_bytes(one[name], many[name]) for name in one)


def _rewrite(folder: Path, name: str, value: torch.Tensor) -> None:
    """Change a tensor, and the manifest's hash with it."""
    import hashlib

    file = open_checkpoint(folder).tensors[name].file
    held = load_file(folder / file)
    with safe_open(folder / file, "pt") as shard:
        order, metadata = list(shard.keys()), shard.metadata()
    stored = open_checkpoint(folder).tensors[name]
    with open(folder / file, "r+b") as raw:
        raw.seek(stored.offset)
        raw.write(value.numpy().tobytes())
    assert set(order) == set(held) and metadata
    data = (folder / file).read_bytes()
    said = read_manifest(folder)
    files = dict(said.files) | {file: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
    (folder / MANIFEST).write_bytes(replace(said, files=files).to_bytes())


@pytest.mark.parametrize("what", ["another power of two", "the next float", "the sign"])
def test_verify_compares_added_scales_bit_for_bit(manifest, tmp_path: Path, what: str) -> None:
    kv, name = manifest(), "model.layers.2.self_attn.v_scale"
    made(GLM4, tmp_path / "kv", "glm-decode-int4", kv)
    value = torch.tensor([kv.tensors("vllm")[name]])
    change = {
        "another power of two": 2 * value,
        "the next float": torch.nextafter(value, 2 * value),
        "the sign": -value,
    }
    _rewrite(tmp_path / "kv", name, change[what])
    (problem,) = verify(tmp_path / "kv", GLM4).problems
    assert problem.startswith(f"{name}: added as") and "its bytes say otherwise" in problem


@pytest.mark.parametrize(("base", "recipe"), [("tiny-kimi", "kimi-decode-int4"), ("tiny-glm5", "glm-prefill-fp8")])
def test_latent_attention_gets_none_and_is_told_why(manifest, tmp_path: Path, base: str, recipe: str) -> None:
    source = variants.EXAMPLES / base
    kv = manifest(source)
    made(source, tmp_path / "plain", recipe, None)
    result = made(source, tmp_path / "kv", recipe, kv)
    before, after = tensors(tmp_path / "plain"), tensors(tmp_path / "kv")
    assert before.keys() == after.keys() and all(same_bytes(before[name], after[name]) for name in before)
    assert result.plan.actions()["added"] == 0
    said = read_manifest(tmp_path / "kv")
    notes = [note for note in said.notes if "KV scales: none added" in note]
    assert len(notes) == 2 and all("--fold" in note for note in notes)
    assert all(("fp8_ds_mla" in note) == (base == "tiny-glm5") for note in notes)
    assert said.extras["kv"]["digest"] == kv.digest and "kv_scales" not in said.extras
    assert verify(tmp_path / "kv", source).problems == []


# ------------------------------------------------------------------------------------------------ what is refused


def test_scales_that_nobody_would_read_are_refused(manifest) -> None:
    """Without a quantization_config vLLM makes no parameter for them."""
    with pytest.raises(PlanError, match="beside a quantization_config only"):
        planned(GLM4, "bf16", manifest())


def test_scales_of_another_model_are_refused(manifest, tmp_path: Path) -> None:
    kv = manifest()
    with pytest.raises(PlanError, match=r"kv\.json: not of the model in .*: it is of glm4_moe, the model is deeps"):
        planned(variants.EXAMPLES / "tiny-kimi", "kimi-decode-int4", kv)
    config = json.loads((GLM4 / "config.json").read_text())
    for change, sentence in (
        ({"num_hidden_layers": 3}, "it is of 4 layers, the model has 3"),
        ({"num_key_value_heads": 4}, "layer 0: it is of k 2 x 32 and v 2 x 32, the model keeps k 4 x 32"),
        ({"head_dim": 64}, "the model keeps k 2 x 64"),
    ):
        checkpoint = replace(open_checkpoint(GLM4), config=config | change)
        with pytest.raises(PlanError, match=sentence):
            with_kv_scales(NO_EXTRAS, FILE, kv, checkpoint, identify(checkpoint.config))


def test_scales_of_another_release_are_taken_and_told(manifest, tmp_path: Path) -> None:
    kv, other = manifest(), variants.variant("fp8-channel", "tiny-glm4", tmp_path / "fp8")
    assert not [note for note in planned(GLM4, "glm-decode-int4", kv).notes if "another checkpoint" in note]
    (note,) = [note for note in planned(other, "glm-decode-int4", kv).notes if "another checkpoint" in note]
    assert "calibrated on tiny-glm4" in note
    made(GLM4, tmp_path / "artifact", "glm-prefill-fp8", None)  # its manifest says what it is made of
    assert not [n for n in planned(tmp_path / "artifact", "glm-decode-int4", kv).notes if "another checkpoint" in n]


def test_folding_and_scales_do_not_go_together(manifest, tmp_path: Path) -> None:
    kv, checkpoint = manifest(), open_checkpoint(GLM4)
    folding = Extras(folding={"0": {"k": 3}})
    extras = with_kv_scales(folding, FILE, kv, checkpoint, identify(checkpoint.config))
    with pytest.raises(PlanError, match="not both"):
        make_plan(checkpoint, load("glm-decode-int4"), extras=extras)
    made(GLM4, tmp_path / "scaled", "glm-prefill-fp8", kv)
    with pytest.raises(PlanError, match=r"self_attn\.k_scale: the source has KV scales.*; fold its own source"):
        make_plan(open_checkpoint(tmp_path / "scaled"), load("keep"), extras=folding)
    folds.folded(GLM4, tmp_path / "folded", folds.wanted("tiny-glm4"), "glm-prefill-fp8")
    held = open_checkpoint(tmp_path / "folded")
    model = identify(held.config)
    with pytest.raises(PlanError, match="is folded, and the scales were calibrated on tiny-glm4, which is not"):
        with_kv_scales(NO_EXTRAS, FILE, kv, held, model)
    own = manifest(tmp_path / "folded")  # calibrated as it is, and good for what is made of it
    assert own.source["folding"] and with_kv_scales(NO_EXTRAS, FILE, own, held, model).kv_scales
    made(tmp_path / "folded", tmp_path / "int4", "glm-decode-int4", own)
    assert verify(tmp_path / "int4", tmp_path / "folded").problems == []
    int4 = open_checkpoint(tmp_path / "int4")
    with pytest.raises(PlanError, match="wrong once it is unfolded; unfold its own source"):
        make_plan(int4, load("keep"), extras=Extras(held=own.source["folding"]))
    for take in (with_kv_scales, with_folding):
        with pytest.raises(PlanError, match=r"calibrated on folded, which is folded, and .* is not"):
            take(NO_EXTRAS, FILE, own, checkpoint, model)
    folds.folded(GLM4, tmp_path / "other", {0: {"v": 2}}, "glm-prefill-fp8")
    with pytest.raises(PlanError, match="is folded otherwise than folded"):
        with_kv_scales(NO_EXTRAS, FILE, own, open_checkpoint(tmp_path / "other"), model)


@pytest.mark.parametrize("value", [0.0, -0.5, 0.3, math.inf, 2.0**-130])
def test_a_plan_takes_powers_of_two_only(manifest, value: float) -> None:
    checkpoint = open_checkpoint(GLM4)
    extras = with_kv_scales(NO_EXTRAS, FILE, manifest(), checkpoint, identify(checkpoint.config))
    name = "model.layers.1.self_attn.k_scale"
    for scales, sentence in (
        (extras.kv_scales | {name: value}, f"{name} is .*, expected a power of two"),
        ({n: v for n, v in extras.kv_scales.items() if n != name}, f"{name}: the model's layers need"),
        (extras.kv_scales | {"model.layers.1.mlp.k_scale": 1.0}, "mlp.k_scale: the model's layers need"),
    ):
        with pytest.raises(PlanError, match=sentence):
            make_plan(checkpoint, load("glm-decode-int4"), extras=replace(extras, kv_scales=scales))
    again = from_json(json.loads(json.dumps(extras.to_json())))
    assert again == extras


# ----------------------------------------------------------------------------------- an artifact is a checkpoint


def test_an_artifact_with_scales_is_a_source(manifest, tmp_path: Path) -> None:
    kv = manifest()
    made(GLM4, tmp_path / "fp8", "glm-prefill-fp8", kv)
    found = inspect(open_checkpoint(tmp_path / "fp8"))
    assert found["roles"]["attention.kv_scale"] == {"tensors": 8, "bytes": 32, "format": "f32"}
    everything = parse({"families": ["glm"], "rule": [{"roles": ["*"], "format": "bf16"}]}, "all", "all")
    attention = parse({"families": ["glm"], "rule": [{"roles": ["attention"], "format": "bf16"}]}, "some", "some")
    for name, recipe in (("int4", load("glm-decode-int4")), ("all", everything), ("some", attention)):
        result = made(tmp_path / "fp8", tmp_path / name, recipe, None)
        before, after = tensors(tmp_path / "fp8"), tensors(tmp_path / name)
        scales = [name for name in after if name.endswith(("k_scale", "v_scale"))]
        assert len(scales) == 8 and all(same_bytes(before[scale], after[scale]) for scale in scales)
        assert {u.action for u in result.plan.units() if u.role == "attention.kv_scale"} == {"copied"}
        assert verify(tmp_path / name, tmp_path / "fp8").problems == []
    named = parse({"families": ["glm"], "rule": [{"roles": ["attention.kv_scale"], "format": "int4-g32"}]}, "x", "x")
    with pytest.raises(RecipeError, match=r"attention\.kv_scale unquantized"):
        planned(tmp_path / "fp8", named, None)
    assert load_model(tmp_path / "fp8").tensors == len(before) - 8  # no part of the model that transformers runs


def test_new_scales_take_the_place_of_old_ones(manifest, tmp_path: Path) -> None:
    old, new = manifest(), manifest(headroom=16)
    made(GLM4, tmp_path / "fp8", "glm-prefill-fp8", old)
    result = made(tmp_path / "fp8", tmp_path / "int4", "glm-decode-int4", new)
    after, name = tensors(tmp_path / "int4"), "model.layers.3.self_attn.k_scale"
    assert after[name].item() == new.layers[3].parts["k"].scale == 8 * old.layers[3].parts["k"].scale
    said = read_manifest(tmp_path / "int4")
    assert len(said.dropped) == 8 and "another takes its place" in said.dropped[name]
    assert not [note for note in said.notes if "MTP" in note] and result.plan.actions()["dropped"] == 8
    assert verify(tmp_path / "int4", tmp_path / "fp8").problems == []


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [("model.layers.1.self_attn.k_scale", torch.tensor(0.25), ""),
     ("model.layers.1.self_attn.v_scale", torch.tensor([0.25]), ""),
     ("model.layers.1.self_attn.v_scale", torch.tensor([0.25, 0.5]), "wrong shape or dtype"),
     ("model.layers.1.self_attn.v_scale", torch.tensor([1]), "wrong shape or dtype"),
     ("model.layers.1.self_attn.q_scale", torch.tensor([1.0]), "unknown tensor"),
     ("model.layers.9.self_attn.k_scale", torch.tensor([1.0]), "unknown tensor")],
)  # fmt: skip
def test_scales_of_strangers(tmp_path: Path, name: str, value: torch.Tensor, sentence: str) -> None:
    held, config = variants.load(GLM4)
    source = variants.save(tmp_path / "source", held | {name: value}, config)
    if sentence:
        with pytest.raises(CheckpointError, match=sentence):
            planned(source, "glm-decode-int4", None)
        return
    made(source, tmp_path / "out", "glm-decode-int4", None)
    assert same_bytes(tensors(tmp_path / "out")[name], value)
    assert verify(tmp_path / "out", source).problems == []


def test_scales_of_a_latent_are_no_tensor_of_the_model(tmp_path: Path) -> None:
    held, config = variants.load(variants.EXAMPLES / "tiny-kimi")
    scale = {"model.layers.1.self_attn.k_scale": torch.tensor([0.5])}
    source = variants.save(tmp_path / "source", held | scale, config)
    with pytest.raises(CheckpointError, match="k_scale: unknown tensor"):
        planned(source, "kimi-decode-int4", None)


# -------------------------------------------------------------------------------------------------- load rules


@pytest.mark.parametrize("recipe", RECIPES)
def test_rules_find_nothing_wrong_for_vllm_and_what_is_true_for_sglang(manifest, tmp_path: Path, recipe: str) -> None:
    kv = manifest()
    made(GLM4, tmp_path / "kv", recipe, kv)
    plain, scaled = survey_plan(planned(GLM4, recipe, None)), survey_plan(planned(GLM4, recipe, kv))
    assert scaled.scalars == {name: value for name, value in kv.tensors("vllm").items()}
    for found in (scaled, survey(tmp_path / "kv")):
        assert check(found, [VLLM]) == check(plain, [VLLM])
        assert [finding.rule for finding in check(found, [VLLM])] == ["T3"] * recipe.endswith("g128")  # it is so small
        more = [finding for finding in check(found, [SGLANG]) if finding not in check(plain, [SGLANG])]
        assert [(finding.rule, finding.severity) for finding in more] == [("K2", "warning")]
        assert "convert --fold" in more[0].message


def test_mtp_layers_need_no_scale(manifest, tmp_path: Path) -> None:
    source = variants.variant("mtp+fp8-channel", "tiny-glm4", tmp_path / "source")
    made(source, tmp_path / "kv", "glm-decode-int4", manifest(source))
    found = check(survey(tmp_path / "kv"), [replace(VLLM, mtp=True)])
    assert [finding for finding in found if finding.rule.startswith("K")] == []
    assert any("MTP layer has none" in note for note in read_manifest(tmp_path / "kv").notes)
    assert verify(tmp_path / "kv", source).problems == []


def test_both_pools_must_have_the_same_scales(manifest, tmp_path: Path) -> None:
    """D4, with artifacts as they come: the same file given to both is sound."""
    kv = manifest()
    made(GLM4, tmp_path / "prefill", "glm-prefill-fp8", kv)
    made(GLM4, tmp_path / "decode", "glm-decode-int4", kv)
    assert belong(tmp_path / "prefill", tmp_path / "decode", VLLM, VLLM) == []
    made(GLM4, tmp_path / "other", "glm-decode-int4", manifest(headroom=8))
    made(GLM4, tmp_path / "none", "glm-decode-int4", None)
    for folder in ("other", "none"):
        found = belong(tmp_path / "prefill", tmp_path / folder, VLLM, VLLM)
        assert [(finding.rule, finding.severity) for finding in found] == [("D4", "silent")], folder


def test_a_killed_job_goes_on_with_its_scales(manifest, tmp_path: Path) -> None:
    kv = manifest()
    plan = planned(GLM4, "glm-decode-int4", kv, 500_000)
    convert(plan, tmp_path / "whole")

    def stop(nbytes: int) -> None:
        stop.seen += nbytes  # type: ignore[attr-defined]
        if stop.seen > 9_000_000:  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    stop.seen = 0  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        convert(plan, tmp_path / "cut", workers=1, progress=stop)
    assert convert(plan, tmp_path / "cut").resumed_shards > 0
    for path in sorted((tmp_path / "whole").iterdir()):
        assert (tmp_path / "cut" / path.name).read_bytes() == path.read_bytes(), path.name
    shutil.rmtree(tmp_path / "cut")


def test_scales_can_be_loaded_by_others(manifest, tmp_path: Path) -> None:
    """Written once more by the safetensors library, the artifact is still sound: nothing depends on our writing."""
    made(GLM4, tmp_path / "kv", "glm-decode-int4", manifest())
    for path in sorted((tmp_path / "kv").glob("*.safetensors")):
        save_file(load_file(path), path, {"format": "pt"})
    (tmp_path / "kv" / MANIFEST).unlink()
    assert check(survey(tmp_path / "kv"), [VLLM]) == []
