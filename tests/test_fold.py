"""Folding is exact: transformers computes the same bits before and after, from every form that a source may have."""

import json
from dataclasses import replace
from pathlib import Path

import folds
import pytest
import sparse
import torch
import variants
from folds import folded, parts_of, run, unfolded, wanted
from test_convert import KINDS, same

from phasefold.errors import CheckpointError, PlanError
from phasefold.families import identify
from phasefold.formats.checkpoint import MANIFEST, open_checkpoint
from phasefold.formats.manifest import read_manifest
from phasefold.quantize import fold
from phasefold.quantize.extras import NO_EXTRAS, Extras
from phasefold.quantize.plan import make_plan
from phasefold.quantize.verify import verify
from phasefold.recipes import load, parse
from phasefold.serving.belong import belong
from phasefold.serving.deployment import Deployment
from phasefold.serving.paged.engine import Engine, Request
from phasefold.serving.paged.weights import load_model

torch.set_num_threads(1)
HOPPER = Deployment("sglang", kv_dtype="bfloat16")
BASES = ("tiny-kimi", "tiny-glm4", "tiny-glm5")
RECIPES = {"tiny-kimi": ("kimi-prefill-fp8", "kimi-decode-int4"), "tiny-glm4": ("glm-prefill-fp8", "glm-decode-int4"),
           "tiny-glm5": ("glm-prefill-fp8", "glm-decode-int4-fp8")}  # fmt: skip


@pytest.fixture
def source(tmp_path: Path):
    """A variant of an example. Made anew for each test, in some 50 ms: all of them are 300 MB."""

    def get(base: str, kind: str = "bf16") -> Path:
        folder = tmp_path / "sources" / f"{base}-{kind}"
        return folder if folder.exists() else variants.variant(kind, base, folder)

    return get


def logits(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of a fixed prompt, [40, 1024], by transformers' own forward pass."""
    tokens = torch.randint(5, 1024, (1, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found: torch.Tensor = load_model(folder, dtype=dtype).model(tokens).logits[0]
    return found


@pytest.mark.parametrize(("base", "kind"), KINDS)
def test_logits_are_the_same_to_the_bit_for_every_source_form(source, tmp_path: Path, base: str, kind: str) -> None:
    """Exponents of both signs; what the form cannot take is lowered, never rounded. Unfolded, all bytes are back."""
    folder, out, back = source(base, kind), tmp_path / "folded", tmp_path / "unfolded"
    extras = folded(folder, out, wanted(base))
    kept = {part for parts in extras.folding.values() for part in parts}
    # FP8 blocks hold rope rows beside others, whose codes cannot all move; F16 cannot halve its denormals
    lost = {"k_pe"} if "fp8-block" in kind and base != "tiny-glm4" else set()
    assert kind == "f16" or kept == set(parts_of(base)) - lost
    assert len(kept) > 0 and verify(out, folder).problems == []
    same(logits(out), logits(folder), f"{base} {kind}")
    theirs, ours = variants.load(folder)[0], variants.load(out)[0]
    changed = {name for name in theirs if not torch.equal(bytes_of(theirs[name]), bytes_of(ours[name]))}
    touched = {m for m, unit in read_manifest(out).units.items() if unit[0] == "folded"}
    assert {name.rpartition(".")[0] if ".weight" in name else name for name in changed} == touched
    unfolded(out, back)
    run(folder, tmp_path / "plain")
    alike(back, tmp_path / "plain")
    assert fold.held(open_checkpoint(back)) == {}


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def alike(ours: Path, theirs: Path) -> None:
    """The same tensors with the same bytes; where they lie in the shards depends on where they lay in the source."""
    found, expected = variants.load(ours)[0], variants.load(theirs)[0]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        same(found[name], tensor, name)


@pytest.mark.parametrize("base", BASES)
def test_quantized_artifacts_round_what_is_folded(source, tmp_path: Path, base: str) -> None:
    """Blocks whose rows are all folded: the same codes, other scales. verify compares with the folded source."""
    folder = source(base)
    for recipe in RECIPES[base]:
        plain, out = tmp_path / f"{recipe}-plain", tmp_path / recipe
        run(folder, plain, recipe)
        extras = folded(folder, out, wanted(base), recipe)
        assert verify(out, folder).problems == []
        theirs, ours = variants.load(plain)[0], variants.load(out)[0]
        for layer, parts in enumerate(folds.MIXED):
            name, exponent = ("v_proj", parts[1]) if base == "tiny-glm4" else ("kv_b_proj", -parts[0])
            stem = f"model.layers.{layer}.self_attn.{name}."
            scale = next((s for s in ("weight_scale", "weight_scale_inv") if stem + s in theirs), None)
            factor = torch.tensor(2.0**exponent)
            if scale is None:
                same(ours[stem + "weight"], theirs[stem + "weight"] * factor.to(torch.bfloat16), stem)
            else:
                codes = "weight_packed" if stem + "weight_packed" in theirs else "weight"
                same(ours[stem + codes], theirs[stem + codes], stem)
                same(ours[stem + scale], theirs[stem + scale] * factor.to(theirs[stem + scale].dtype), stem)
        manifest = read_manifest(out)
        assert manifest.extras == {"folding": extras.folding}
        assert any(note.startswith("folded: ") for note in manifest.notes)
        # another source's weights behind the same headers do not pass
        other = variants.variant("bf16", base, tmp_path / f"{recipe}-other")
        tensors, config = variants.load(other)
        name = "model.layers.1.self_attn." + ("q_norm.weight" if base == "tiny-glm4" else "kv_a_layernorm.weight")
        tensors[name] = tensors[name] * 2
        variants.save(other, tensors, config)
        module = name.removesuffix(".weight")
        assert any(f"{module}: folded, but its bytes differ" in problem for problem in verify(out, other).problems)


@pytest.mark.parametrize("base", BASES)
def test_fp8_rows_at_scale_one_are_rows_at_the_manifests_scales(source, tmp_path: Path, base: str) -> None:
    """Prefill and decode steps through paged FP8 rows: folded by e at 1.0, and plain at scales of 2^-e."""
    exponents = ((3, 3), (-2, -2), (5, 5), (1, 1)) if base != "tiny-glm4" else folds.MIXED
    folded(source(base), tmp_path / "folded", wanted(base, exponents))
    scales = {layer: {part: 2.0**-e for part, e in parts.items()} for layer, parts in wanted(base, exponents).items()}
    tokens = torch.randint(5, 1024, (48,), generator=torch.Generator().manual_seed(5)).tolist()
    for dtype in (torch.float32, torch.bfloat16):
        ours = scored(Engine(load_model(tmp_path / "folded", dtype=dtype), kv="fp8_e4m3"), tokens)
        theirs = scored(Engine(load_model(source(base), dtype=dtype), kv="fp8_e4m3", scales=scales), tokens)
        same(ours, theirs, f"{base} {dtype}")
        unscaled = scored(Engine(load_model(source(base), dtype=dtype), kv="fp8_e4m3"), tokens)
        assert not torch.equal(unscaled, theirs)


def scored(engine: Engine, tokens: list[int], steps: int = 4) -> torch.Tensor:
    """Logits of the prefill and of some decode steps, float32 [tokens, vocabulary]."""
    request = Request(tokens[:-steps], steps + 1, forced=[*tokens[-steps:], 0])
    request.lease, first = engine.prefill(request.prompt)
    request.take(first[-1])
    while not request.done:
        engine.decode([request])
    return torch.cat([first.float(), torch.stack(request.logits[1:])])


def test_small_latents_need_a_fold(source, tmp_path: Path) -> None:
    """Latents of 0.02, as GLM-5.2 has them: made by folding downwards, so that the model is the same to the bit."""
    down = {layer: {"kv_c": -8, "k_pe": -8} for layer in range(4)}
    folded(source("tiny-kimi"), tmp_path / "small", down)
    tokens = torch.randint(5, 1024, (96,), generator=torch.Generator().manual_seed(6)).tolist()
    exact = scored(Engine(load_model(source("tiny-kimi")), kv="bf16"), tokens)
    same(scored(Engine(load_model(tmp_path / "small"), kv="bf16"), tokens), exact, "BF16 rows")
    losses = {}
    for name in ("small", "plain"):
        folder = tmp_path / "small" if name == "small" else source("tiny-kimi")
        found = scored(Engine(load_model(folder), kv="fp8_e4m3"), tokens)
        losses[name] = torch.nn.functional.kl_div(
            found.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="batchmean"
        ).item()
    assert losses["small"] > 5 * losses["plain"], losses
    # and the artifact can be folded no further, only back
    with pytest.raises(PlanError, match="is folded already"):
        fold.settle(open_checkpoint(tmp_path / "small"), wanted("tiny-kimi"))


@pytest.mark.parametrize("model", sparse.MODELS)
def test_every_published_release_has_its_folds_or_none(model: str) -> None:
    """In each decoder layer each part of the cache is made by some tensors and read by others, all there, all alike."""
    found = identify(sparse.config_of(model))
    if found.architecture.name in ("kimi_k3", "kimi_linear"):
        with pytest.raises(CheckpointError, match="folding is not known to be exact"):
            found.folds()
        return
    table, specs = found.folds(), {spec.name: spec for spec in found.tensors() if not spec.mtp}
    stem = "language_model.model.layers." if "text_config" in found.config else "model.layers."
    for layer in (layer for layer in found.cache() if not layer.mtp):
        parts = {part.name for part in layer.parts} - {"index_k"}
        assert {one.part for one in table} == parts
        for part in layer.parts:
            signs, share = set(), {}
            for one in (one for one in table if one.part == part.name):
                spec = specs[f"{stem}{layer.layer}.{one.tail}"]
                assert spec.layer == layer.layer and spec.shape[0] % one.period == 0, spec
                signs.add(one.sign)
                share[one.tail] = spec.shape[0] // one.period * (one.last - one.first)
            assert part.name == "index_k" or signs == {1, -1}
            made = {"kv_c": "kv_a_layernorm.weight", "k_pe": "kv_a_proj_with_mqa.weight", "v": "v_proj.weight"}
            if part.name in made:
                assert share[f"self_attn.{made[part.name]}"] == part.heads * part.width
            if part.name == "k_pe":  # as many rows as each head has of the rope
                query = next(tail for tail in share if ".q_" in tail)
                assert share[query] == part.width * found.text["num_attention_heads"]


def broken(source: Path, out: Path, **changes: torch.Tensor) -> Path:
    """A copy with changed values. changes: name of a tensor in layer 1, dots as "__" -> its first values."""
    tensors, config = variants.load(source)
    for tail, values in changes.items():
        name = f"model.layers.1.self_attn.{tail.replace('__', '.')}"
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[: len(values)] = values.to(tensors[name].dtype)
    return variants.save(out, tensors, config)


def test_what_would_lose_bits_is_lowered_and_named(source, tmp_path: Path) -> None:
    denormal = broken(source("tiny-kimi"), tmp_path / "denormal", kv_b_proj__weight=torch.tensor([3 * 2.0**-132]))
    folding, lowered = fold.settle(open_checkpoint(denormal), {1: {"kv_c": 4}, 2: {"kv_c": 4}})
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    assert folding == {"1": {"kv_c": 1}, "2": {"kv_c": 4}} and lowered == [fold.Lowered(1, "kv_c", 4, 1, name)]
    none = broken(source("tiny-kimi"), tmp_path / "none", kv_b_proj__weight=torch.tensor([2.0**-133]))
    folding, lowered = fold.settle(open_checkpoint(none), {1: {"kv_c": 4}})
    assert folding == {} and lowered == [fold.Lowered(1, "kv_c", 4, 0, name)]
    large = broken(source("tiny-kimi"), tmp_path / "large", kv_a_layernorm__weight=torch.tensor([2.0**124]))
    assert fold.settle(open_checkpoint(large), {1: {"kv_c": 4}})[0] == {"1": {"kv_c": 2}}
    assert fold.settle(open_checkpoint(large), {1: {"kv_c": -4}})[0] == {"1": {"kv_c": -4}}
    scale = broken(
        source("tiny-kimi", "fp8-block"), tmp_path / "scale", kv_b_proj__weight_scale_inv=torch.tensor([2.0**-99])
    )
    folding, lowered = fold.settle(open_checkpoint(scale), {1: {"kv_c": 4}})
    assert folding == {"1": {"kv_c": 1}} and lowered[0].tensor == name
    # what came of it stands in the manifest, of a conversion from either
    for source_folder, out in ((denormal, tmp_path / "a"), (none, tmp_path / "b")):
        extras = folded(source_folder, out, {1: {"kv_c": 4}, 2: {"kv_c": 4}})
        manifest = read_manifest(out)
        assert manifest.extras == {"folding": extras.folding, "lowered": {"1": {"kv_c": [4, name]}}}
        assert verify(out, source_folder).problems == []
        less = "2^1 for 2^4" if out.name == "a" else "2^4 not at all"
        (note,) = (note for note in manifest.notes if "less than asked" in note)
        assert f"in 1 layer, not at all in {int(out.name == 'b')} of them" in note
        assert f"(the first: layer 1, {less}, of {name})" in note
    # a fold that was never settled is refused while it is carried out, and nothing looks whole
    with pytest.raises(CheckpointError, match=r"kv_b_proj.weight: cannot be folded .* without loss: .* times 2\^-4"):
        run(denormal, tmp_path / "out", extras=Extras(folding={"1": {"kv_c": 4}}))
    assert not (tmp_path / "out" / "config.json").exists()


def test_mixed_blocks_move_their_codes_or_are_left(source, tmp_path: Path) -> None:
    """FP8 blocks of q_b_proj hold rope rows and others. Where no code over- or underflows, the rope's codes move."""
    tensors, config = variants.load(source("tiny-kimi", "fp8-block"))
    for layer in range(4):
        name = f"model.layers.{layer}.self_attn.q_b_proj.weight"
        values = tensors[name].float()
        step = 2.0 ** (torch.floor(torch.log2(values.abs().clamp_min(1))) - 3)
        tensors[name] = torch.where(values.abs() < 1, 0, (values / step).round() * step).to(torch.float8_e4m3fn)
    config = variants.save(tmp_path / "coarse", tensors, config)
    asked = {layer: {"k_pe": e} for layer, e in enumerate((3, 6, 9, -1))}
    folding, lowered = fold.settle(open_checkpoint(config), asked)
    # 1.0 to 448 with four bits each: down to 2^-6 times 2^-3 nothing is lost, and not one doubling is left
    assert folding == {"0": {"k_pe": 3}, "1": {"k_pe": 6}, "2": {"k_pe": 6}}
    assert {(one.layer, one.settled) for one in lowered} == {(2, 6), (3, 0)}
    extras = folded(config, tmp_path / "folded", asked)
    assert extras.folding == folding
    same(logits(tmp_path / "folded"), logits(config), "mixed blocks")
    before, after = tensors, variants.load(tmp_path / "folded")[0]
    stem = "model.layers.1.self_attn.q_b_proj.weight"
    same(after[f"{stem}_scale_inv"], before[f"{stem}_scale_inv"], "the scales stay")
    rope = torch.arange(256) % 64 >= 32
    same(after[stem].float()[~rope], before[stem].float()[~rope], "rows of another kind")
    same(after[stem].float()[rope], before[stem].float()[rope] / 64, "rope rows")
    unfolded(tmp_path / "folded", tmp_path / "back")
    run(config, tmp_path / "plain")
    alike(tmp_path / "back", tmp_path / "plain")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_fp8_scales_of_any_dtype_are_multiplied(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors, config = variants.load(variants.EXAMPLES / "tiny-glm5")
    source = variants.save(tmp_path / "source", *variants.fp8_block(tensors, config, dtype))
    extras = folded(source, tmp_path / "folded", {layer: {"kv_c": e} for layer, e in enumerate((3, -2, 1, -5))})
    few = dtype == torch.float16  # its denormals begin at 2^-14, not far below these scales
    assert few or extras.folding == {"0": {"kv_c": 3}, "1": {"kv_c": -2}, "2": {"kv_c": 1}, "3": {"kv_c": -5}}
    assert verify(tmp_path / "folded", source).problems == []
    same(logits(tmp_path / "folded"), logits(source), str(dtype))
    unfolded(tmp_path / "folded", tmp_path / "back")
    run(source, tmp_path / "plain")
    alike(tmp_path / "back", tmp_path / "plain")


def test_a_folding_is_carried_on_and_never_doubled(source, tmp_path: Path) -> None:
    folder, out = source("tiny-glm4"), tmp_path / "folded"
    extras = folded(folder, out, wanted("tiny-glm4"))
    checkpoint = open_checkpoint(out)
    with pytest.raises(PlanError, match=r"is folded \(see its phasefold.json\), which this job was not told"):
        make_plan(checkpoint, load("glm-decode-int4"))
    with pytest.raises(PlanError, match="is folded already"):
        fold.settle(checkpoint, {0: {"k": 1}})
    carried = fold.carried(checkpoint)
    assert carried.folding == carried.held == extras.folding
    result = run(out, tmp_path / "decode", "glm-decode-int4", carried)
    assert result.plan.actions()["folded"] == 0
    assert fold.held(open_checkpoint(tmp_path / "decode")) == extras.folding
    assert verify(tmp_path / "decode", out).problems == []
    folded(folder, tmp_path / "direct", wanted("tiny-glm4"), "glm-decode-int4")
    alike(tmp_path / "decode", tmp_path / "direct")
    # unfolded while it is quantized: the same as if it had never been folded
    unfolded(out, tmp_path / "back", "glm-decode-int4")
    run(folder, tmp_path / "plain", "glm-decode-int4")
    alike(tmp_path / "back", tmp_path / "plain")
    assert read_manifest(tmp_path / "back").extras == {"held": extras.folding}
    assert verify(tmp_path / "back", out).problems == []
    with pytest.raises(PlanError, match="nothing to unfold"):
        fold.check_unfold(open_checkpoint(tmp_path / "back"))
    with pytest.raises(PlanError, match="nothing to unfold"):
        fold.check_unfold(open_checkpoint(folder))
    path = out / MANIFEST
    path.write_text(path.read_text().replace('"folding"', '"bolding"'))
    with pytest.raises(PlanError, match=r"altered: .* whether the source is folded cannot be told"):
        make_plan(open_checkpoint(out), load("keep"))


def test_unfolding_what_was_quantized_after_the_fold(source, tmp_path: Path) -> None:
    """Where whole blocks were folded the codes are those of the unfolded source: all bytes come back."""
    for base, parts, recipe in (
        ("tiny-glm4", ("k", "v"), "glm-prefill-fp8"),
        ("tiny-kimi", ("kv_c",), "kimi-prefill-fp8"),
        ("tiny-glm5", ("kv_c",), "glm-decode-int4-fp8"),
    ):
        asked = {layer: {part: e[part] for part in parts} for layer, e in wanted(base).items()}
        folded(source(base), tmp_path / f"{base}-folded", asked, recipe)
        unfolded(tmp_path / f"{base}-folded", tmp_path / f"{base}-back")
        run(source(base), tmp_path / f"{base}-plain", recipe)
        alike(tmp_path / f"{base}-back", tmp_path / f"{base}-plain")


def test_unfolding_what_was_rounded_after_the_fold_is_refused(source, tmp_path: Path) -> None:
    """q_b_proj in FP8 blocks made from folded BF16: rope rows share scales with others, their low bits are gone."""
    folded(source("tiny-kimi"), tmp_path / "fp8", {layer: {"k_pe": -9} for layer in range(4)}, "kimi-prefill-fp8")
    with pytest.raises(CheckpointError, match=r"q_b_proj.weight: cannot be folded or unfolded .*convert from the"):
        fold.check_unfold(open_checkpoint(tmp_path / "fp8"))


@pytest.mark.parametrize("kind", ["mtp+fp8-block", "mtp-file+fp8-block"])
def test_the_mtp_layer_is_not_folded(source, tmp_path: Path, kind: str) -> None:
    folder = source("tiny-glm5", kind)
    with pytest.raises(PlanError, match="layer 4 is no decoder layer of this glm_moe_dsa"):
        fold.settle(open_checkpoint(folder), {4: {"kv_c": 1}})
    folding, _ = fold.settle(open_checkpoint(folder), wanted("tiny-glm5"))
    for mtp in ("quantize", "keep", "drop"):
        out = tmp_path / mtp
        run(folder, out, replace(load("glm-decode-int4"), mtp=mtp), Extras(folding=folding))
        assert verify(out, folder).problems == []
        units = read_manifest(out).units
        assert not [module for module, unit in units.items() if unit[0] == "folded" and ".layers.4." in module]
    plain = tmp_path / "plain"
    run(folder, plain, replace(load("glm-decode-int4"), mtp="keep"))
    theirs, ours = variants.load(plain)[0], variants.load(tmp_path / "keep")[0]
    for name in (name for name in theirs if ".layers.4." in name):
        same(ours[name], theirs[name], name)


def test_attention_without_norms_or_with_biases(tmp_path: Path) -> None:
    """glm4_moe as GLM-4.5-Air (no qk norm, biases), MLA with attention_bias and without q_lora_rank, glm4_moe_lite."""
    for base, changes, touched in (
        ("tiny-glm4", {"use_qk_norm": False}, 7),
        ("tiny-glm4", {"use_qk_norm": False, "attention_bias": False}, 4),
        ("tiny-glm4", {"attention_bias": False}, 4),
        ("tiny-kimi", {"attention_bias": True}, 5),
        ("tiny-kimi", {"q_lora_rank": None}, 4),
        ("tiny-kimi", {"model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"]}, 4),
    ):
        _, config = variants.load(variants.EXAMPLES / base)
        config |= changes
        name = f"{base}-{'-'.join(changes)}"
        source = variants.save(tmp_path / name, variants.random_from(config), config)
        folded(source, tmp_path / f"{name}-folded", wanted(base))
        assert sum(unit[0] == "folded" for unit in read_manifest(tmp_path / f"{name}-folded").units.values()) == (
            touched * config["num_hidden_layers"]
        ), name
        same(logits(tmp_path / f"{name}-folded"), logits(source), name)


def test_what_cannot_be_folded_is_refused_by_name(source, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(source("tiny-kimi"))
    for asked, text in (
        ({9: {"kv_c": 1}}, "layer 9 is no decoder layer of this deepseek_v3"),
        ({0: {"k": 1}}, "layer 0 of this deepseek_v3 has no part 'k'; those that can be folded are k_pe, kv_c"),
        ({0: {"kv_c": 65}}, "kv_c would be multiplied by 2\\^65"),
    ):
        with pytest.raises(PlanError, match=text):
            fold.settle(checkpoint, asked)
    with pytest.raises(PlanError, match="layer 7 is no decoder layer"):
        make_plan(checkpoint, load("keep"), extras=Extras(folding={"7": {"kv_c": 1}}))
    for scale in (0.3, 0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(PlanError, match=r"KV scale of layer 2, kv_c is .*: only a power of two can be folded"):
            fold.exponents({2: {"kv_c": scale}})
    assert fold.exponents({0: {"kv_c": 0.25, "k_pe": 1.0}, 1: {"v": 8.0}}) == {0: {"kv_c": 2}, 1: {"v": -3}}
    assert fold.settle(checkpoint, {0: {"kv_c": 0}}) == ({}, [])
    random = json.loads((variants.EXAMPLES / "tiny-kimi" / "config.json").read_text())
    linear = random | {"model_type": "kimi_linear", "q_lora_rank": None, "num_experts": 8, "num_shared_experts": 1,
                       "linear_attn_config": {"num_heads": 4, "head_dim": 64, "short_conv_kernel_size": 4,
                                              "kda_layers": [1, 2, 3], "full_attn_layers": [4]}}  # fmt: skip
    folder = variants.save(tmp_path / "linear", variants.random_from(linear), linear)
    with pytest.raises(CheckpointError, match="kimi_linear: folding is not known to be exact for this model"):
        fold.settle(open_checkpoint(folder), {3: {"kv_c": 1}})
    assert make_plan(checkpoint, load("keep"), extras=NO_EXTRAS).actions()["folded"] == 0
    custom = parse({"families": ["kimi"], "rule": [{"roles": ["*"], "format": "keep"}]}, "mine", "mine")
    assert make_plan(checkpoint, custom, extras=Extras(folding={"0": {"kv_c": 1}})).actions()["folded"] == 2


@pytest.mark.parametrize("base", BASES)
def test_pools_that_are_folded_alike_belong_together(source, tmp_path: Path, base: str) -> None:
    """FP8 and INT4 of one source, folded by one file: clean. One of them without a fold, or with another: D4."""
    folder, recipes = source(base), RECIPES[base]
    for recipe in recipes:
        extras = folded(folder, tmp_path / recipe, wanted(base), recipe)
        run(folder, tmp_path / f"{recipe}-plain", recipe)
    prefill, decode = (tmp_path / recipe for recipe in recipes)
    assert belong(prefill, decode, HOPPER, HOPPER) == []
    one = folded(folder, tmp_path / "other", {2: {parts_of(base)[1]: 2}}, recipes[1])
    assert one.folding != extras.folding
    for first, second in (
        (prefill, tmp_path / f"{recipes[1]}-plain"),
        (tmp_path / f"{recipes[0]}-plain", decode),
        (prefill, tmp_path / "other"),
        (prefill, folder),
    ):
        found = belong(first, second, HOPPER, HOPPER)
        assert {(one.rule, one.severity) for one in found} == {("D4", "silent")}, (first.name, second.name, found)
    # values alone are folded: no norm differs, and without its manifest the weights tell
    part = "v" if base == "tiny-glm4" else "k_pe"
    folded(folder, tmp_path / "silent", {layer: {part: 6} for layer in range(4)}, recipes[1])
    (tmp_path / "silent" / MANIFEST).unlink()
    (found,) = belong(tmp_path / f"{recipes[0]}-plain", tmp_path / "silent", HOPPER, HOPPER)
    assert found.rule == "D5" and "differ by more than rounding" in found.message


def test_two_releases_settle_apart_and_d4_tells(source, tmp_path: Path) -> None:
    """The FP8 release of a model cannot take the fold of k_pe that its BF16 release can: fold both from one of them."""
    asked = {layer: {"kv_c": 3, "k_pe": 3} for layer in range(4)}
    ours = folded(source("tiny-kimi", "fp8-block"), tmp_path / "prefill", asked, "kimi-prefill-fp8")
    theirs = folded(source("tiny-kimi"), tmp_path / "decode", asked, "kimi-decode-int4")
    assert ours.folding == {str(layer): {"kv_c": 3} for layer in range(4)} != theirs.folding
    (found, *_) = belong(tmp_path / "prefill", tmp_path / "decode", HOPPER, HOPPER)
    assert (found.rule, found.severity, found.subject) == ("D4", "silent", "layers.0.k_pe")
    assert "in 4 places, here by not at all for prefill and 2^3 for decode" in found.message
