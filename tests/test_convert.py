"""Conversions of the trained examples in every published source form, by every recipe, checked by others' code."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import variants
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors import safe_open

from phasefold.errors import CheckpointError
from phasefold.formats.checkpoint import INDEX, MANIFEST, open_checkpoint
from phasefold.quantize.account import account
from phasefold.quantize.convert import Result, convert
from phasefold.quantize.plan import make_plan
from phasefold.quantize.verify import verify
from phasefold.recipes import Recipe, load, names, parse

KIMI = ["bf16", "f16", "f32", "fp8-block", "fp8-channel", "int4", "int4-as-bf16", "mtp", "mtp+fp8-block", "mtp+int4",
        "k25", "k25+int4+nested", "k25+fp8-channel"]  # fmt: skip
GLM = ["bf16", "fp8-block", "fp8-channel", "int4", "mtp", "mtp+fp8-block", "mtp-file+fp8-block", "mtp+fp8-channel"]
KINDS = [("tiny-kimi", kind) for kind in KIMI] + [(base, kind) for base in ("tiny-glm4", "tiny-glm5") for kind in GLM]


def run(source: Path, out: Path, recipe: str | Recipe, *, shard_bytes: int = 2_000_000, **changes: str) -> Result:
    found = load(recipe) if isinstance(recipe, str) else recipe
    return convert(make_plan(open_checkpoint(source), replace(found, **changes), shard_bytes), out)


def recipes_for(base: str) -> list[str]:
    family = "kimi" if base == "tiny-kimi" else "glm"
    found = [name for name in names() if family in load(name).families and not load(name).guided]
    return [name for name in found if name != "kimi-restore-int4"]


def custom(*rules: dict) -> Recipe:
    return parse({"families": ["glm", "kimi"], "rule": list(rules)}, "mine", "mine")


@pytest.fixture
def source(tmp_path: Path):
    """A variant of an example. Made anew for each test, in some 50 ms: all of them are 300 MB."""

    def get(base: str, kind: str) -> Path:
        folder = tmp_path / "sources" / f"{base}-{kind}"
        return folder if folder.exists() else variants.variant(kind, base, folder)

    return get


def same(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Bit equality; the message has the first coordinate that differs and both values."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (name, actual.dtype, expected.dtype)
    a, b = actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    if not torch.equal(a, b):
        at = (actual.double() != expected.double()).nonzero()[:1].tolist()
        raise AssertionError(f"{name} differs first at {at}: {actual[tuple(at[0])]} and {expected[tuple(at[0])]}")


@pytest.mark.parametrize(("base", "kind"), KINDS)
def test_every_source_by_every_recipe_verifies(source, tmp_path: Path, base: str, kind: str) -> None:
    folder = source(base, kind)
    for recipe in recipes_for(base):
        out = tmp_path / recipe
        result = run(folder, out, recipe)
        written = {path: os.stat(path).st_mode & 0o777 for path in out.iterdir()}
        assert set(written.values()) == {0o644}
        assert sum(o.part.nbytes for u in result.plan.units() for o in u.outputs) == open_checkpoint(out).total_size
        verdict = verify(out, folder)
        assert verdict.problems == []
        for unit in result.plan.units():  # what the safetensors library reads is what was planned
            for output in unit.outputs:
                assert result.plan.weight_map[output.name]
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            assert (out / name).read_bytes() == (folder / name).read_bytes()


def decode_ours(out: Path, module: str) -> torch.Tensor:
    """A module's weight as compressed-tensors and torch decode it, float32."""
    tensors = {}
    for path in out.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors.update({n: file.get_tensor(n) for n in file.keys() if n.startswith(module + ".")})
    if f"{module}.weight_packed" in tensors:
        shape = torch.Size(tensors[f"{module}.weight_shape"].tolist())
        codes = unpack_from_int32(tensors[f"{module}.weight_packed"], 4, shape).float()
        scale = tensors[f"{module}.weight_scale"].float()
        return codes * scale.repeat_interleave(shape[1] // scale.shape[1], 1)
    weight = tensors[f"{module}.weight"]
    scale = tensors.get(f"{module}.weight_scale_inv", tensors.get(f"{module}.weight_scale"))
    if scale is None:
        return weight.float()
    rows, columns = weight.shape
    wide = (
        scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        if scale.shape[1] > 1 or scale.shape[0] < rows
        else scale
    )
    return weight.float() * wide


@pytest.mark.parametrize("base", ["tiny-kimi", "tiny-glm4", "tiny-glm5"])
def test_artifacts_hold_what_others_decode(source, tmp_path: Path, base: str) -> None:
    tensors, _ = variants.load(source(base, "bf16"))
    for recipe, limit in [(r, 0.03) for r in recipes_for(base) if "prefill" in r] + [
        (r, 0.12) for r in recipes_for(base) if "decode" in r
    ]:
        out = tmp_path / recipe
        run(source(base, "bf16"), out, recipe)
        stored, _ = variants.load(out)
        for item in account(open_checkpoint(out)).items:
            name, source_tensor = item.spec.name, tensors[item.spec.name]
            if name.endswith(".weight") and source_tensor.dim() == 2:
                got = decode_ours(out, item.module)
                parts = {part.suffix: stored[item.module + part.suffix] for part in item.parts}
                same(item.format.decode(parts, item.shape), got, name)
                error = (got - source_tensor.float()).norm() / source_tensor.float().norm()
                assert error < limit, (recipe, name, error)


def test_copies_are_byte_equal(source, tmp_path: Path) -> None:
    for base, kind, recipe in [
        ("tiny-kimi", "k25+int4+nested", "kimi-decode-int4"), ("tiny-kimi", "int4", "kimi-decode-int4"),
        ("tiny-glm5", "mtp+fp8-block", "glm-prefill-fp8"), ("tiny-glm4", "mtp+fp8-channel", "glm-prefill-fp8"),
    ]:  # fmt: skip
        folder, out = source(base, kind), tmp_path / f"{base}-{kind}"
        run(folder, out, recipe)
        theirs, ours = variants.load(folder)[0], variants.load(out)[0]
        assert theirs.keys() == ours.keys()
        for name, tensor in theirs.items():
            same(ours[name], tensor, name)
        assert (out / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_f32_stays_f32_and_mtp_stays_what_it_was(source, tmp_path: Path) -> None:
    folder = source("tiny-glm5", "mtp")
    run(folder, tmp_path / "kept", "glm-decode-int4", mtp="keep")
    theirs, ours = variants.load(folder)[0], variants.load(tmp_path / "kept")[0]
    for name in theirs:
        if "e_score_correction_bias" in name or ".layers.4." in name:
            same(ours[name], theirs[name], name)
    assert verify(tmp_path / "kept", folder).problems == []


def test_fp8_blocks_beside_int4_keep_their_bytes_under_the_other_name(source, tmp_path: Path) -> None:
    folder = source("tiny-glm5", "fp8-block")
    run(folder, tmp_path / "out", "glm-decode-int4-fp8")
    theirs, ours = variants.load(folder)[0], variants.load(tmp_path / "out")[0]
    checked = 0
    for name, tensor in theirs.items():
        if "o_proj" in name:
            same(ours[name.replace("weight_scale_inv", "weight_scale")], tensor, name)
            checked += 1
    assert checked == 8


def test_the_exact_inverse_is_found(source, tmp_path: Path) -> None:
    run(source("tiny-kimi", "int4-as-bf16"), tmp_path / "out", "kimi-restore-int4")
    assert verify(tmp_path / "out", source("tiny-kimi", "int4-as-bf16")).problems == []
    native, ours = variants.load(source("tiny-kimi", "int4"))[0], variants.load(tmp_path / "out")[0]
    for name, tensor in native.items():
        if name.endswith(("weight_packed", "weight_scale")):
            same(ours[name], tensor, name)
    with pytest.raises(CheckpointError, match=r"\.weight\[\d+, \d+\]: no exact INT4 inverse"):
        run(source("tiny-kimi", "bf16"), tmp_path / "refused", "kimi-restore-int4")
    assert not (tmp_path / "refused" / "config.json").exists()


def k3_config() -> dict:
    """A small Kimi-K3."""
    text = {
        "model_type": "kimi_linear", "hidden_size": 256, "num_hidden_layers": 4, "first_k_dense_replace": 1,
        "intermediate_size": 256, "moe_intermediate_size": 128, "num_experts": 4, "num_shared_experts": 1,
        "routed_expert_hidden_size": 128, "num_attention_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "vocab_size": 512, "attn_res_block_size": 2,
        "latent_moe_use_norm": True, "mla_use_output_gate": True, "tie_word_embeddings": False,
        "linear_attn_config": {"num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4, "use_full_rank_gate": True,
                               "kda_layers": [1, 2, 3], "full_attn_layers": [4]},
    }  # fmt: skip
    vision = {"vt_hidden_size": 64, "vt_intermediate_size": 96, "vt_num_hidden_layers": 1, "qkv_hidden_size": 64,
              "mm_hidden_size": 64, "text_hidden_size": 256, "patch_size": 14, "init_pos_emb_height": 8,
              "init_pos_emb_width": 8, "merge_kernel_size": [2, 2]}  # fmt: skip
    return {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision,
    }


def test_mxfp4_is_cast_to_fp8_without_loss_or_refused(tmp_path: Path) -> None:
    config = k3_config()
    tensors, _ = variants.mxfp4(variants.random_from(config), config)
    folder = variants.save(tmp_path / "source", tensors, config)
    result = run(folder, tmp_path / "out", "kimi-prefill-fp8")
    assert result.errors["routed_expert"] == 0.0
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    for name, packed in tensors.items():
        if name.endswith("weight_packed"):
            codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
            scale = torch.exp2(tensors[name.replace("packed", "scale")].float() - 127)
            same(decode_ours(tmp_path / "out", name.removesuffix(".weight_packed")),
                 values[codes] * scale.repeat_interleave(32, 1), name)  # fmt: skip
    victim = "language_model.model.layers.2.block_sparse_moe.experts.1.w1.weight_scale"
    before = int(tensors[victim][0, 0])
    for steps in (20, 80, before - 1):  # one group lies so many powers of two below the others of its block
        tensors[victim][0, 0] = before - steps
        folder = variants.save(tmp_path / f"wide-{steps}", tensors, config)
        with pytest.raises(CheckpointError, match=r"experts\.1\.w1: mxfp4 cannot be cast to fp8-block-ct without loss"):
            run(folder, tmp_path / "wide-out", "kimi-prefill-fp8")


@pytest.mark.parametrize("model_type", ["kimi_linear", "glm4_moe_lite"])
def test_architectures_without_a_trained_example(tmp_path: Path, model_type: str) -> None:
    if model_type == "kimi_linear":
        config = k3_config()["text_config"]
        config = {
            k: v
            for k, v in config.items()
            if k not in ("attn_res_block_size", "routed_expert_hidden_size", "mla_use_output_gate")
        }
        config["linear_attn_config"] = config["linear_attn_config"] | {"use_full_rank_gate": False}
        recipes = ["kimi-prefill-fp8", "kimi-decode-int4", "bf16"]
    else:
        config = json.loads((variants.EXAMPLES / "tiny-kimi" / "config.json").read_text()) | {
            "model_type": "glm4_moe_lite"
        }
        config["architectures"] = ["Glm4MoeLiteForCausalLM"]
        recipes = ["glm-prefill-fp8", "glm-decode-int4", "glm-decode-int4-fp8", "bf16"]
    folder = variants.save(tmp_path / "source", variants.random_from(config), config)
    for recipe in recipes:
        run(folder, tmp_path / recipe, recipe)
        assert verify(tmp_path / recipe, folder).problems == []


def test_a_scale_in_another_shard_and_any_scale_dtype(source, tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e8m0fnu):
        tensors, config = variants.load(variants.EXAMPLES / "tiny-glm5")
        if dtype == torch.float8_e8m0fnu:  # E8M0 holds powers of two: round the scales up to one
            tensors, config = variants.fp8_block(tensors, config)
            tensors = {
                n: torch.exp2(torch.ceil(torch.log2(t))).to(dtype) if n.endswith("_inv") else t
                for n, t in tensors.items()
            }
        else:
            tensors, config = variants.fp8_block(tensors, config, dtype)
        folder = variants.save(tmp_path / str(dtype), tensors, config, own_file=("weight_scale_inv",))
        files = {stored.file for name, stored in open_checkpoint(folder).tensors.items() if name.endswith("_inv")}
        assert files == {"mtp.safetensors"}
        out = tmp_path / f"{dtype}-out"
        run(folder, out, "bf16")
        name = "model.layers.1.self_attn.kv_a_proj_with_mqa"
        codes, scale = tensors[name + ".weight"].float(), tensors[name + ".weight_scale_inv"].float()
        expected = codes * scale.repeat_interleave(128, 0)[:160].repeat_interleave(128, 1)
        same(variants.load(out)[0][name + ".weight"], expected.bfloat16(), name)


EXPERT = "model.layers.1.mlp.experts.3.gate_proj"


def poison(tensors: dict, name: str, place: tuple[int, ...], value: float) -> None:
    tensors[name] = tensors[name].clone()
    if tensors[name].dtype == torch.float8_e4m3fn:
        tensors[name].view(torch.uint8)[place] = int(value)
    else:
        tensors[name][place] = value


BAD_VALUES = [
    ("bf16", "model.norm.weight", (7,), float("nan"), r"model\.norm\.weight\[7\]: weight is not finite"),
    ("bf16", EXPERT + ".weight", (100, 9), float("inf"), r"weight\[100, 9\]: weight is not finite"),
    ("bf16", "model.embed_tokens.weight", (900, 9), float("-inf"), r"tokens\.weight\[900, 9\]: weight is not finite"),
    ("fp8-block", EXPERT + ".weight", (127, 255), 0x7F, r"weight\[127, 255\]: weight is not finite"),
    ("fp8-block", EXPERT + ".weight_scale_inv", (0, 1), float("nan"), r"weight_scale_inv\[0, 1\]: scale is not finite"),
    ("fp8-block", EXPERT + ".weight_scale_inv", (0, 1), -1.0, r"weight_scale_inv\[0, 1\]: scale is negative"),
    ("fp8-block", EXPERT + ".weight_scale_inv", (0, 1), 0.0, r"scale_inv\[0, 1\]: scale is zero where codes are not"),
    ("fp8-channel", EXPERT + ".weight_scale", (5, 0), float("inf"), r"weight_scale\[5, 0\]: scale is not finite"),
    ("int4", EXPERT + ".weight_scale", (5, 3), -1.0, r"weight_scale\[5, 3\]: scale is negative"),
    ("int4", EXPERT + ".weight_shape", (1,), 255, r"says \[128, 255\], the config calls for \[128, 256\]"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "place", "value", "words"), BAD_VALUES)
@pytest.mark.parametrize("recipe", ["glm-prefill-fp8", "glm-decode-int4", "bf16"])
def test_bad_values_are_refused_with_their_place(source, tmp_path, kind, name, place, value, words, recipe) -> None:
    tensors, config = variants.load(source("tiny-glm4", kind))
    poison(tensors, name, place, value)
    folder = variants.save(tmp_path / "source", tensors, config)
    with pytest.raises(CheckpointError, match=words):
        run(folder, tmp_path / "out", recipe)
    assert not (tmp_path / "out" / "config.json").exists()
    assert not list((tmp_path / "out").glob("*.partial"))


def test_weights_that_would_round_to_infinity_are_refused(source, tmp_path: Path) -> None:
    tensors, config = variants.load(source("tiny-glm4", "bf16"))
    poison(tensors, EXPERT + ".weight", (5, 5), -3.38e38)
    folder = variants.save(tmp_path / "source", tensors, config)
    with pytest.raises(CheckpointError, match=r"experts\.3\.gate_proj: weights near the largest float32"):
        run(folder, tmp_path / "out", "glm-decode-int4")


def test_tiny_scales_are_exact_and_counted(source, tmp_path: Path) -> None:
    tensors, config = variants.load(source("tiny-glm4", "fp8-block"))
    poison(tensors, EXPERT + ".weight_scale_inv", (0, 0), 1e-41)
    folder = variants.save(tmp_path / "source", tensors, config)
    result = run(folder, tmp_path / "out", "bf16")
    assert result.manifest.scales["tiny_scales"] >= 1
    got = variants.load(tmp_path / "out")[0][EXPERT + ".weight"]
    same(got[:, :128], (tensors[EXPERT + ".weight"].float()[:, :128] * torch.tensor(1e-41)).bfloat16(), EXPERT)


@pytest.mark.parametrize("recipe", ["glm-prefill-fp8", "glm-decode-int4"])
def test_a_flipped_bit_anywhere_is_found(source, tmp_path: Path, recipe: str) -> None:
    folder, out = source("tiny-glm4", "bf16"), tmp_path / "out"
    run(folder, out, recipe)
    generator = torch.Generator().manual_seed(1)
    for path in [*out.glob("*.safetensors"), out / INDEX, out / "config.json", out / MANIFEST, out / "tokenizer.json"]:
        raw = path.read_bytes()
        for place in [0, 9, len(raw) - 1, *torch.randint(len(raw), (4,), generator=generator).tolist()]:
            flipped = bytearray(raw)
            flipped[place] ^= 1 << (place % 7)
            path.write_bytes(flipped)
            assert verify(out).problems, (path.name, place)
        path.write_bytes(raw)
    assert verify(out, folder).problems == []
    shutil.copyfile(next(out.glob("*.safetensors")), out / "more.safetensors")
    assert any("more.safetensors" in problem for problem in verify(out).problems)


def test_verify_finds_a_wrong_source_and_a_lying_manifest(source, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(source("tiny-glm4", "bf16"), out, "glm-decode-int4")
    assert any("not the source" in p for p in verify(out, source("tiny-glm4", "fp8-block")).problems)
    assert any("made from tiny-glm4-bf16" in p for p in verify(out, source("tiny-kimi", "bf16")).problems)
    tensors, config = variants.load(source("tiny-glm4", "bf16"))
    poison(tensors, EXPERT + ".weight", (3, 3), 5.0)  # same headers, other values
    twin = Path(shutil.copytree(source("tiny-glm4", "bf16"), tmp_path / "twin"))
    variants.save(twin, tensors, config)
    assert any(EXPERT in problem for problem in verify(out, twin).problems)
    (out / MANIFEST).unlink()
    assert any("no phasefold.json" in problem for problem in verify(out).problems)


def test_verify_sees_zeros_where_weights_were(source, tmp_path: Path) -> None:
    run(source("tiny-glm4", "fp8-block"), tmp_path / "out", "bf16")
    tensors, config = variants.load(source("tiny-glm4", "fp8-block"))
    tensors[EXPERT + ".weight"] = torch.zeros_like(tensors[EXPERT + ".weight"])
    other = variants.save(tmp_path / "other", tensors, config)
    assert any(EXPERT in problem for problem in verify(tmp_path / "out", other).problems)


@pytest.mark.parametrize("value", ["constant", "outlier"])
def test_verify_accepts_the_worst_that_rounding_can_do(tmp_path: Path, value: str) -> None:
    tensors, config = variants.load(variants.EXAMPLES / "tiny-glm4")
    weight = torch.full((128, 256), 1.0625)  # e4m3 has 1.0 and 1.125: the largest relative error there is
    if value == "outlier":
        weight = torch.ones(128, 256)
        weight[:, ::128] = 15.5
    tensors[EXPERT + ".weight"] = weight.bfloat16()
    folder = variants.save(tmp_path / "source", tensors, config)
    for number, rule in enumerate([{"format": "fp8-channel"}, {"format": "int4-g128"}]):
        run(folder, tmp_path / str(number), custom({"roles": ["routed_expert"], **rule}))
        assert verify(tmp_path / str(number), folder).problems == []


def test_scale_fmt_survives_where_fp8_is_kept(source, tmp_path: Path) -> None:
    run(source("tiny-glm5", "mtp"), tmp_path / "fp8", "glm-prefill-fp8")
    run(tmp_path / "fp8", tmp_path / "dropped", "glm-prefill-fp8", mtp="drop")
    config = json.loads((tmp_path / "dropped" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0 and config["quantization_config"]["scale_fmt"] == "ue8m0"
    run(source("tiny-glm5", "mtp+fp8-block"), tmp_path / "float", "glm-prefill-fp8", mtp="drop")
    config = json.loads((tmp_path / "float" / "config.json").read_text())
    assert "scale_fmt" not in config["quantization_config"]


def test_bf16_means_bf16(source, tmp_path: Path) -> None:
    run(source("tiny-kimi", "f16"), tmp_path / "out", "bf16")
    tensors, config = variants.load(tmp_path / "out")
    assert config["dtype"] == "bfloat16"
    assert {t.dtype for n, t in tensors.items() if "e_score" not in n} == {torch.bfloat16}


def test_side_files_of_any_name_and_size(source, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(source("tiny-glm4", "bf16"), tmp_path / "source"))
    (folder / "docs").mkdir()
    (folder / "docs" / "größe.txt").write_text("x")
    (folder / "config.json.partial").write_text("aborted")
    (folder / "big.model").write_bytes(os.urandom(3_000_000))
    (folder / "linked.txt").symlink_to(folder / "docs" / "größe.txt")
    run(folder, tmp_path / "out", "bf16")
    assert verify(tmp_path / "out", folder).problems == []
    for name in ("docs/größe.txt", "big.model", "linked.txt"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    for stray in ("hf_quant_config.json", "pytorch_model.bin", "model-1.safetensors.partial"):
        (tmp_path / "out" / stray).write_text("{}")
        assert any(stray in problem for problem in verify(tmp_path / "out").problems)
        (tmp_path / "out" / stray).unlink()


def test_layers_and_formats_of_ones_own(source, tmp_path: Path) -> None:
    recipe = custom(
        {"roles": ["routed_expert"], "format": "keep", "layers": "1"},
        {"roles": ["routed_expert"], "format": "int4-g64", "method": "search", "objective": "mse"},
        {"roles": ["attention.o", "dense_mlp"], "format": "fp8-channel"},
    )
    run(source("tiny-glm4", "bf16"), tmp_path / "out", recipe)
    assert verify(tmp_path / "out", source("tiny-glm4", "bf16")).problems == []
    formats = {unit[2] for unit in json.loads((tmp_path / "out" / MANIFEST).read_text())["units"].values()}
    assert formats == {"bf16", "f32", "int4-g64", "fp8-channel"}


def test_an_artifact_is_a_source(source, tmp_path: Path) -> None:
    run(source("tiny-glm5", "mtp"), tmp_path / "fp8", "glm-prefill-fp8")
    run(tmp_path / "fp8", tmp_path / "int4", "glm-decode-int4")
    assert verify(tmp_path / "int4", tmp_path / "fp8").problems == []
