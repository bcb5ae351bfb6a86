"""The calibration runner against transformers: its logits bit for bit, its statistics by hooks and a DynamicCache."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import sparse
import torch
import variants
from calibrated import (
    batches_of,
    by_transformers,
    calibrated,
    differing,
    job_of,
    last_hidden,
    logits_of,
    made_text,
    random_variant,
)
from engines import one_thread  # noqa: F401  (autouse)
from transformers import DynamicCache

from phasefold.calib.forward import Forward
from phasefold.calib.model import Source
from phasefold.calib.rows import Rows
from phasefold.calib.run import Job, Options, calibrate
from phasefold.calib.summary import quantile, summary
from phasefold.errors import CheckpointError, LoadError, PlanError
from phasefold.families import identify
from phasefold.formats.checkpoint import open_checkpoint
from phasefold.formats.statistics import cache_bins, open_statistics

BASES = ("tiny-kimi", "tiny-glm4", "tiny-glm5")
SHARED = {"indexer_types": ["full", "shared", "full", "shared"], "index_topk": 8}


def source_of(kind: str, folder: Path) -> tuple[Path, Path]:
    """A checkpoint, and one of the same model that transformers loads."""
    if kind in BASES:
        return variants.EXAMPLES / kind, variants.EXAMPLES / kind
    if kind == "k25":
        return variants.variant("k25", "tiny-kimi", folder), variants.EXAMPLES / "tiny-kimi"
    if kind == "lite":
        made = random_variant(folder, "tiny-kimi", model_type="glm4_moe_lite", architectures=["Glm4MoeLiteForCausalLM"])
        return made, made
    assert kind == "shared"
    made = random_variant(folder, "tiny-glm5", **SHARED)
    return made, made


# the runner


@pytest.mark.parametrize("kind", [*BASES, "k25", "lite", "shared"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_those_of_transformers_bit_for_bit(tmp_path: Path, monkeypatch: Any, kind: str, dtype: str) -> None:
    folder, theirs = source_of(kind, tmp_path / "source")
    job = job_of(folder, dtype=dtype)
    result, hidden = last_hidden(job, tmp_path / "out", monkeypatch)
    assert result.one_by_one == 0
    model = by_transformers(theirs, getattr(torch, dtype))
    for number, (ours, batch) in enumerate(zip(logits_of(job, hidden), batches_of(job), strict=True)):
        with torch.inference_mode():
            expected = model(input_ids=batch).logits
        where = (ours != expected).nonzero()
        assert torch.equal(ours, expected), f"batch {number}, first at {where[0].tolist()}"


@pytest.mark.parametrize("kind", [*BASES, "shared"])
def test_experts_one_by_one_give_the_same_bits_where_one_batch_is_all(
    tmp_path: Path, monkeypatch: Any, kind: str
) -> None:
    folder, theirs = source_of(kind, tmp_path / "source")
    job = job_of(folder, sequences=5, batch=5, dtype="bfloat16", experts="apart", hessians=("routed_expert",))
    result, hidden = last_hidden(job, tmp_path / "out", monkeypatch)
    assert result.one_by_one == 3
    (batch,), (ours,) = batches_of(job), logits_of(job, hidden)
    with torch.inference_mode():
        assert torch.equal(ours, by_transformers(theirs, torch.bfloat16)(input_ids=batch).logits)
    monkeypatch.undo()
    whole = calibrated(folder, tmp_path / "whole", sequences=5, batch=5, dtype="bfloat16", hessians=("routed_expert",))
    assert not differing(open_statistics(tmp_path / "out"), whole)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("all_experts", [False, True])
def test_experts_one_by_one_agree_with_those_together(tmp_path: Path, base: str, all_experts: bool) -> None:
    options = {"sequences": 65, "length": 48, "hessians": ("routed_expert", "attention.o"), "all_experts": all_experts}
    together = calibrated(variants.EXAMPLES / base, tmp_path / "a", **options)
    apart = calibrated(variants.EXAMPLES / base, tmp_path / "b", experts="apart", **options)
    assert together.files.keys() == apart.files.keys()
    for name in together.files:
        ours, theirs = apart.read(name), together.read(name)
        assert ours is not None and theirs is not None
        if ours.dtype == torch.int64 and "histogram" not in name:
            assert torch.equal(ours, theirs), name
        elif not name.endswith("histogram"):  # a value at the edge of a bin may be in either
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=name)


def test_what_experts_need_of_each_token_goes_to_disk_past_the_limit(tmp_path: Path, monkeypatch: Any) -> None:
    large = job_of(variants.EXAMPLES / "tiny-kimi", sequences=900, experts="apart")
    small = job_of(variants.EXAMPLES / "tiny-kimi", experts="apart")
    assert not large.in_memory(1) and small.in_memory(1)
    opened: list[Path | None] = []
    begin = Rows.__init__

    def noted(self: Rows, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        opened.append(self.path)

    monkeypatch.setattr(Rows, "__init__", noted)
    calibrate(small, tmp_path / "memory")
    assert opened.count(None) == 9
    monkeypatch.setattr(Job, "in_memory", lambda self, layer: False)
    opened.clear()
    calibrate(small, tmp_path / "disk")
    assert opened.count(None) == 0 and {"inputs", "shared", "sums"} <= {path.name for path in opened if path}
    assert not differing(open_statistics(tmp_path / "disk"), open_statistics(tmp_path / "memory"))


def test_weights_are_let_go_before_the_next_ones_come(tmp_path: Path, monkeypatch: Any) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    load, most = Source.load_layer, 0

    def watched(self: Source, *args: Any, **kwargs: Any) -> Any:
        nonlocal most
        most = max(most, sum(one() is not None for one in held))
        found = load(self, *args, **kwargs)
        held.extend(weakref.ref(matrix.weight.untyped_storage()) for matrix in found)
        return found

    monkeypatch.setattr(Source, "load_layer", watched)
    calibrate(job_of(variants.EXAMPLES / "tiny-kimi"), tmp_path / "out")
    assert len(held) > 100 and most == 0


# what is in memory at a time, and in how many layers it fits 16 GB with 128 x 2,048 tokens
PUBLISHED = {
    "zai-org/GLM-5.2-FP8": (24.4, 5.2, 3), "zai-org/GLM-4.5-Air": (10.5, 6.1, 46),
    "zai-org/GLM-4.7-Flash": (2.8, 1.7, 47), "moonshotai/Moonlight-16B-A3B": (2.6, 1.5, 27),
}  # fmt: skip


@pytest.mark.parametrize("release", PUBLISHED)
def test_published_releases_find_their_places_in_transformers(tmp_path: Path, release: str) -> None:
    sparse.write(release, tmp_path / "source")
    source = Source(open_checkpoint(tmp_path / "source"))
    job = Job(source, made_text(128, 2048), Options())
    whole, single, layers = PUBLISHED[release]
    need = job.needs[-1]
    assert need.single is not None and (round(need.whole / 1e9, 1), round(need.single / 1e9, 1)) == (whole, single)
    assert job.whole.count(True) == layers
    for layer, module in enumerate(Forward(source, torch.bfloat16, "cpu").layers):
        expected = {name for name in module.state_dict() if ".experts." not in name}
        local = {source._local(item, layer) for item in source.layers[layer]}
        assert expected == {name for name in local if ".experts." not in name}, layer
        experts = source.experts(layer)
        assert (experts is None) == (not hasattr(module.mlp, "experts"))
        if experts:
            gate, _, down = experts.items[0]
            shape = module.mlp.experts.gate_up_proj.shape
            assert shape == (len(experts.items), 2 * gate.shape[0], gate.shape[1])
            assert module.mlp.experts.down_proj.shape == (len(experts.items), *down.shape)


# the statistics


def expected_inputs(folder: Path, batches: list[torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[list[Any]]]:
    """By hooks on transformers' model: every matrix's inputs [n, in], and per layer the (index, inputs) of experts.

    Inputs of an expert's down_proj are computed here.
    """
    model, found, routed = by_transformers(folder), {}, [[] for _ in range(4)]
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, args, name=name: found.setdefault(name, []).append(args[0].flatten(0, -2))
            )
        if name.endswith("mlp.experts"):
            layer = int(name.split(".")[2])
            module.register_forward_pre_hook(lambda _, args, layer=layer: routed[layer].append((args[1], args[0])))
    with torch.inference_mode():
        for batch in batches:
            model(input_ids=batch)
        inputs = {name: torch.cat(values) for name, values in found.items()}
        for layer, seen in enumerate(routed):
            for expert in range(16 if seen else 0):
                rows = torch.cat([given[torch.where((index == expert).T)[1]] for index, given in seen])
                stem, experts = f"model.layers.{layer}.mlp.experts", model.model.layers[layer].mlp.experts
                gate, up = (rows @ experts.gate_up_proj[expert].T).chunk(2, -1)
                inputs[f"{stem}.{expert}.gate_proj"] = inputs[f"{stem}.{expert}.up_proj"] = rows
                inputs[f"{stem}.{expert}.down_proj"] = torch.nn.functional.silu(gate) * up
    return inputs, routed


@pytest.mark.parametrize("base", BASES)
def test_inputs_of_every_matrix_against_hooks(tmp_path: Path, base: str) -> None:
    folder = variants.EXAMPLES / base
    roles = ("routed_expert", "shared_expert", "attention.o", "attention.q_b" if base != "tiny-glm4" else "attention.q")
    job = job_of(folder, sequences=9, length=64, hessians=roles)
    calibrate(job, tmp_path / "out")
    found = open_statistics(tmp_path / "out")
    assert found.about["tokens"] == 576 and found.about["heldout_tokens"] == 64
    *training, heldout = batches_of(job)
    inputs, routed = expected_inputs(folder, training)
    kept, _ = expected_inputs(folder, [heldout])
    specs = [spec for spec in identify(found.about["config"]).tensors() if spec.linear]
    pools: dict[str, list[torch.Tensor]] = {}
    for spec in specs:
        module = spec.name.removesuffix(".weight")
        rows = inputs[module].double()
        assert found.tokens(module) == len(rows), module
        moment, hessian, held = found.second_moment(module), found.hessian(module), found.heldout(module)
        if not len(rows):
            assert moment is None and hessian is None
            continue
        torch.testing.assert_close(moment, rows.square().mean(0).float(), rtol=1e-4, atol=1e-6, msg=module)
        enough = spec.role != "routed_expert" or 4 * len(rows) >= spec.shape[1]
        assert (hessian is not None) == (spec.role in roles and enough), module
        if hessian is not None:
            torch.testing.assert_close(hessian, (rows.T @ rows / len(rows)).float(), rtol=1e-3, atol=1e-4, msg=module)
        if spec.role in roles and len(kept[module]):
            torch.testing.assert_close(held, kept[module][:256], rtol=1e-3, atol=1e-4, msg=module)
        else:
            assert held is None, module
        if spec.role == "routed_expert" and not module.endswith("up_proj"):
            stem, last = module.rsplit(".", 2)[0], module.rsplit(".", 1)[1]
            pools.setdefault(f"{stem}.pool.{last}", []).append(rows)
    assert len(pools) == 6
    for name, parts in pools.items():
        rows = torch.cat(parts)
        assert found.tokens(name) == len(rows)
        torch.testing.assert_close(found.hessian(name), (rows.T @ rows / len(rows)).float(), rtol=1e-3, atol=1e-4)
    for layer in range(1, 4):
        index = torch.cat([index for index, _ in routed[layer]]).flatten()
        counted = found.read(f"model.layers.{layer}.mlp.experts.expert_tokens")
        assert counted is not None and torch.equal(counted, torch.bincount(index, minlength=16))
        ordered = sorted(counted.tolist())
        told = {"min": ordered[0], "median": (ordered[7] + ordered[8]) / 2, "max": ordered[15]}
        assert found.about["layers"][layer]["experts"] == told | {"unseen": ordered.count(0)}


@pytest.mark.parametrize("kind", [*BASES, "shared"])
def test_caches_against_a_dynamic_cache(tmp_path: Path, kind: str) -> None:
    folder, _ = source_of(kind, tmp_path / "source")
    job = job_of(folder, dtype="bfloat16")
    calibrate(job, tmp_path / "out")
    found = open_statistics(tmp_path / "out")
    model = by_transformers(folder, torch.bfloat16)
    rows: dict[tuple[int, str], list[torch.Tensor]] = {}
    for batch in batches_of(job):
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(input_ids=batch, use_cache=True, **{keyword(job): cache})
        for layer, held in enumerate(cache.layers):
            names = ("k", "v") if kind == "tiny-glm4" else ("kv_c", "k_pe")
            for name, value in zip(names, (held.keys, held.values), strict=True):
                rows.setdefault((layer, name), []).append(value.transpose(1, 2).flatten(0, 1).flatten(1))
            if getattr(held, "is_indexer_initialized", False):
                rows.setdefault((layer, "index_k"), []).append(held.indexer_keys.flatten(0, 1))
    expected = {(layer.layer, part.name) for layer in job.source.model.cache() for part in layer.parts}
    assert rows.keys() == expected
    for (layer, name), parts in rows.items():
        values, ours = torch.cat(parts), found.cache(layer, name)
        assert ours is not None and ours.tokens == job.tokens == len(values)
        assert ours.amax == values.abs().max().item()
        assert torch.equal(ours.histogram, cache_bins(values))
        torch.testing.assert_close(ours.second_moment, values.double().square().mean(0).float(), rtol=1e-4, atol=0)
        ordered = values.float().abs().flatten().sort().values
        assert quantile(ours.histogram, 0.999) == ordered[-(-len(ordered) * 999 // 1000) - 1].item()


def keyword(job: Any) -> str:
    """What the installed transformers calls a cache."""
    return Forward(job.source, job.dtype, "cpu").cache_keyword


FORMS = {
    "fp8-block": "tiny-glm5", "fp8-channel": "tiny-glm4", "int4": "tiny-kimi", "k25+int4+nested": "tiny-kimi",
    "mtp+fp8-block": "tiny-glm4",
}  # fmt: skip


@pytest.mark.parametrize("kind", FORMS)
def test_every_form_of_storage_gives_what_its_decoded_copy_gives(tmp_path: Path, kind: str) -> None:
    base = FORMS[kind]
    stored = variants.variant(kind, base, tmp_path / "stored")
    if "int4" in kind:
        plain = variants.variant(kind.replace("int4", "int4-as-bf16").replace("+nested", ""), base, tmp_path / "plain")
    else:
        tensors, config = variants.load(variants.EXAMPLES / base)
        codes, _ = (variants.fp8_channel if "channel" in kind else variants.fp8_block)(tensors, config)
        for name, tensor in tensors.items():
            scale = codes.get(name + "_scale_inv", codes.get(name + "_scale"))
            if scale is not None and "block" in kind:
                scale = scale.repeat_interleave(128, 0)[: len(tensor)].repeat_interleave(128, 1)[:, : tensor.shape[1]]
            tensors[name] = tensor if scale is None else (codes[name].float() * scale).bfloat16()
        plain = variants.save(tmp_path / "plain", tensors, config)
    options: dict[str, Any] = {"sequences": 3, "dtype": "bfloat16"}
    ours = calibrated(stored, tmp_path / "a", **options)
    assert not differing(ours, calibrated(plain, tmp_path / "b", **options))
    assert any(name.startswith("language_model.") for name in ours.files) == ("k25" in kind)
    assert len(ours.about["layers"]) == 4


# what can happen


def test_an_expert_that_no_token_reaches(tmp_path: Path) -> None:
    tensors, config = variants.load(variants.EXAMPLES / "tiny-kimi")
    tensors["model.layers.2.mlp.gate.e_score_correction_bias"][5] = -100
    folder = variants.save(tmp_path / "source", tensors, config)
    for experts in ("together", "apart"):
        options: dict[str, Any] = {"experts": experts, "hessians": ("routed_expert",)}
        found = calibrated(folder, tmp_path / experts, **options)
        module = "model.layers.2.mlp.experts.5.gate_proj"
        assert found.tokens(module) == 0 and f"{module}.tokens" in found.files
        assert found.second_moment(module) is None and found.hessian(module) is None and found.heldout(module) is None
        assert found.about["layers"][2]["experts"]["unseen"] >= 1
        assert summary(found)["experts_seen"]["unseen"] >= 1
        pool = found.hessian("model.layers.2.mlp.experts.pool.gate_proj")
        assert pool is not None and bool(torch.isfinite(pool).all())
    full = calibrated(folder, tmp_path / "full", all_experts=True)
    assert full.tokens(module) == 8 * 24
    assert full.about["layers"][2]["experts"] == found.about["layers"][2]["experts"]  # what the router does


def test_all_experts_see_every_token_and_nothing_else_changes(tmp_path: Path) -> None:
    natural = calibrated(variants.EXAMPLES / "tiny-glm4", tmp_path / "a")
    full = calibrated(variants.EXAMPLES / "tiny-glm4", tmp_path / "b", all_experts=True)
    changed = differing(natural, full)
    assert changed and all(".mlp.experts." in name for name in changed)
    assert not [name for name in changed if name.endswith("expert_tokens")]
    shared = full.second_moment("model.layers.2.mlp.shared_experts.gate_proj")
    for expert in range(16):
        assert full.tokens(f"model.layers.2.mlp.experts.{expert}.down_proj") == 8 * 24
        moment = full.second_moment(f"model.layers.2.mlp.experts.{expert}.gate_proj")
        torch.testing.assert_close(moment, shared, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("experts", ["together", "apart"])
def test_values_that_are_not_finite_are_named(tmp_path: Path, experts: str) -> None:
    tensors, config = variants.load(variants.EXAMPLES / "tiny-kimi")
    bad = tensors | {"model.layers.2.mlp.experts.3.up_proj.weight": torch.full((128, 256), float("nan")).bfloat16()}
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.3\.up_proj\.weight: a value is not finite"):
        calibrated(variants.save(tmp_path / "nan", bad, config), tmp_path / "a", experts=experts)
    kept = tensors["model.layers.1.mlp.shared_experts.down_proj.weight"]
    bad = tensors | {"model.layers.1.mlp.shared_experts.down_proj.weight": kept.float().mul(1e38).bfloat16()}
    with pytest.raises(CheckpointError, match=r"layer 1: a hidden state is not finite in float32"):
        calibrated(variants.save(tmp_path / "inf", bad, config), tmp_path / "b", experts=experts)
    bad = tensors | {"model.embed_tokens.weight": torch.full((1024, 256), float("inf")).bfloat16()}
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight: a value is not finite"):
        calibrated(variants.save(tmp_path / "embed", bad, config), tmp_path / "c", experts=experts)
    assert not (tmp_path / "c" / ".work").exists()


def test_a_matrix_that_went_by_unseen_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    load = Source.load_layer

    def replaced(self: Source, module: Any, *args: Any, **kwargs: Any) -> Any:
        found = load(self, module, *args, **kwargs)
        weight = module.self_attn.o_proj.weight
        module.self_attn.o_proj.forward = lambda given: given @ weight.T
        return found

    monkeypatch.setattr(Source, "load_layer", replaced)
    with pytest.raises(LoadError, match=r"layers\.0\.self_attn\.o_proj: 0 of 192 tokens were seen"):
        calibrated(variants.EXAMPLES / "tiny-kimi", tmp_path / "out")


def test_a_layer_that_fits_no_way_is_refused() -> None:
    with pytest.raises(PlanError, match=r"layer 0 takes 0\.0. GB of memory, --memory allows 0\.00 GB"):
        job_of(variants.EXAMPLES / "tiny-kimi", memory=1_000_000)


def test_a_batch_of_more_than_there_is_takes_no_more_than_all(tmp_path: Path) -> None:
    jobs = [job_of(variants.EXAMPLES / "tiny-kimi", batch=batch) for batch in (9, 10**6)]
    assert jobs[0].needs == jobs[1].needs


def test_a_layer_without_its_place_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    local = Source._local

    def renamed(self: Source, item: Any, layer: int) -> str:
        return local(self, item, layer).replace("o_proj", "out_proj")

    monkeypatch.setattr(Source, "_local", renamed)
    expected = r"layer 0 as DeepseekV3DecoderLayer of transformers 5.*: self_attn\.o_proj\.weight is not in the checkp"
    with pytest.raises(LoadError, match=expected):
        calibrated(variants.EXAMPLES / "tiny-kimi", tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rms_norm_eps", None, "does not take it .*'rms_norm_eps' expected float"),
        ("max_position_embeddings", "many", "does not take it .*'max_position_embeddings' expected int"),
        ("hidden_act", "foo", r"does not take it \(KeyError: 'foo'"),
        ("num_experts_per_tok", 17, "17 of 16 experts a token"),
        ("n_group", 3, "of 3 groups: there is no such choice"),
    ],
)
def test_a_config_that_makes_no_model_is_refused(tmp_path: Path, key: str, value: Any, words: str) -> None:
    tensors, config = variants.load(variants.EXAMPLES / "tiny-glm5")
    folder = variants.save(tmp_path / "source", tensors, config | {key: value})
    with pytest.raises((LoadError, CheckpointError), match=f"config.json: .*{words}"):
        Forward(Source(open_checkpoint(folder)), torch.float32, "cpu")
