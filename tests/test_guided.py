"""INT4 chosen by calibration statistics: the whole way from a statistics folder to an artifact, and every fallback."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import variants
from gathered import gather, sequences
from made_statistics import make_statistics
from safetensors.torch import load_file
from test_cli import run as command

from phasefold.errors import CheckpointError, PlanError, RecipeError, ResumeError
from phasefold.formats import Grid
from phasefold.formats.checkpoint import open_checkpoint
from phasefold.formats.int4 import unpack
from phasefold.formats.statistics import Statistics, open_statistics
from phasefold.quantize import mse
from phasefold.quantize.convert import Result, convert
from phasefold.quantize.extras import Extras
from phasefold.quantize.gptq import one_thread
from phasefold.quantize.guide import FLOOR, Guide
from phasefold.quantize.plan import Plan, make_plan
from phasefold.quantize.summary import methods, result_keys
from phasefold.quantize.verify import verify
from phasefold.recipes import Recipe, load, parse
from phasefold.serving.belong import belong
from phasefold.serving.deployment import Deployment

GLM4 = variants.EXAMPLES / "tiny-glm4"
EXPERT = "model.layers.1.mlp.experts.{}.{}_proj"
Layers = dict[int, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def layers() -> Layers:
    """Of tiny-glm4, 4,096 tokens; read only."""
    with one_thread():
        return gather(GLM4, sequences(GLM4, "*/*.py", 16))


@pytest.fixture
def folder(tmp_path: Path, layers: Layers) -> Callable[..., Statistics]:
    """Statistics with some tensors replaced (None: left out)."""

    def make(name: str = "stats", source: Path = GLM4, **changes: torch.Tensor | None) -> Statistics:
        kept = {
            layer: {n: changes.get(n, value) for n, value in tensors.items() if changes.get(n, value) is not None}
            for layer, tensors in layers.items()
        }
        return make_statistics(tmp_path / name, source, kept)

    return make


def recipe(method: str, *, group: int = 128, layers: str | None = "1") -> Recipe:
    rule = {"roles": ["routed_expert"], "format": f"int4-g{group}", "method": method}
    rule |= {"objective": "imatrix"} if method == "search" else {}
    rule |= {"layers": layers} if layers else {}
    return parse({"families": ["glm", "kimi"], "phase": "decode", "rule": [rule]}, "mine", "mine")


def planned(wanted: Recipe, statistics: Statistics, source: Path = GLM4, shard_bytes: int = 500_000) -> Plan:
    return make_plan(open_checkpoint(source), wanted, shard_bytes, Extras(statistics=statistics.identity()))


def run(wanted: Recipe, statistics: Statistics, out: Path, source: Path = GLM4, **options) -> Result:
    return convert(planned(wanted, statistics, source), out, statistics=statistics, **options)


def hashes(out: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir()}


def held(out: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(out.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def counted(result: Result) -> Counter[str]:
    return Counter(unit[4] for unit in result.manifest.units.values() if len(unit) > 4)


class Stopped(BaseException):
    """Stands for a sudden end."""


@pytest.mark.parametrize("method", ["search", "gptq"])
def test_the_same_bytes_by_one_worker_by_three_and_by_one_that_was_stopped(folder, tmp_path: Path, method: str) -> None:
    statistics, wanted = folder(), recipe(method)
    run(wanted, statistics, tmp_path / "1", workers=1)
    expected = hashes(tmp_path / "1")
    run(wanted, statistics, tmp_path / "3", workers=3)
    assert hashes(tmp_path / "3") == expected

    def stop(_: int) -> None:
        if len(list((tmp_path / "s").glob("*.safetensors"))) >= 9:
            raise Stopped

    with pytest.raises(Stopped):
        run(wanted, statistics, tmp_path / "s", workers=2, progress=stop)
    result = run(wanted, statistics, tmp_path / "s", workers=2)
    assert result.resumed_shards >= 9 and hashes(tmp_path / "s") == expected
    assert verify(tmp_path / "s", GLM4).problems == []


def test_the_weighted_search_weighs_by_second_moments(folder, tmp_path: Path) -> None:
    statistics = folder()
    result = run(recipe("search", group=64), statistics, tmp_path / "out")
    assert counted(result) == {"imatrix": 48}
    source, ours = held(GLM4), held(tmp_path / "out")
    for expert, leaf in ((0, "gate"), (7, "up"), (15, "down")):
        module = EXPERT.format(expert, leaf)
        own, tokens = statistics.second_moment(module).double(), statistics.tokens(module)
        pool = statistics.read(f"model.layers.1.mlp.experts.pool.{leaf.replace('up', 'gate')}_proj.hessian")
        prior = own.mean() if leaf == "down" else pool.diagonal().double()
        mixed = (own * tokens + prior * 16) / (tokens + 16)
        weights = (mixed / mixed.mean()).clamp(min=FLOOR).float()
        found = mse.search(
            source[f"{module}.weight"].float(), Grid("int4", (1, 64)), objective="mse", column_weights=weights
        )
        assert torch.equal(unpack(ours[f"{module}.weight_packed"]), found.codes), module
        assert torch.equal(ours[f"{module}.weight_scale"], found.scales.bfloat16()), module


def test_gptq_writes_plain_int4_on_the_scales_of_the_search(folder, tmp_path: Path) -> None:
    statistics = folder()
    run(recipe("search"), statistics, tmp_path / "search")
    result = run(recipe("gptq"), statistics, tmp_path / "gptq")
    assert counted(result)["gptq"] >= 46 and set(counted(result)) <= {"gptq", "imatrix"}
    assert (tmp_path / "gptq" / "config.json").read_bytes() == (tmp_path / "search" / "config.json").read_bytes()
    searched, found = held(tmp_path / "search"), held(tmp_path / "gptq")
    assert searched.keys() == found.keys()
    for name, tensor in searched.items():
        same = torch.equal(tensor, found[name])
        taken = result.manifest.units.get(name.rpartition(".")[0], [""])[-1] == "gptq"
        assert same != (taken and name.endswith("weight_packed")), name
    keys = result_keys(result)
    assert keys["methods"] == {"routed_expert": dict(counted(result))} and keys["worker_bytes"] > 4 * 6 * 256 * 256
    assert keys["mean_relative_error"]["routed_expert"] > 0.11  # of weights, further than the search's; outputs count


def test_output_errors_on_text_that_nobody_has_seen(folder, layers: Layers, tmp_path: Path) -> None:
    """RTN, search, weighted search, GPTQ at g128: each below the one before, role by role, over a layer's experts."""
    statistics = folder()
    rules = {
        "rtn": {"method": "rtn"}, "search": {"method": "search", "objective": "weighted"},
        "imatrix": {"method": "search", "objective": "imatrix"}, "gptq": {"method": "gptq"},
    }  # fmt: skip
    source, errors = held(GLM4), {}
    with one_thread():
        unseen = gather(GLM4, sequences(GLM4, "[a-s]*.py", 8))[1]
    for name, rule in rules.items():
        rule |= {"roles": ["routed_expert"], "format": "int4-g128", "layers": "1"}
        run(parse({"families": ["glm"], "rule": [rule]}, name, name), statistics, tmp_path / name)
        found = held(tmp_path / name)
        for leaf in ("gate", "up", "down"):
            relative = []
            for expert in range(16):
                module = EXPERT.format(expert, leaf)
                hessian = unseen.get(f"{EXPERT.format(expert, leaf.replace('up', 'gate'))}.hessian")
                if hessian is None:
                    continue
                weight, scale = source[f"{module}.weight"].float(), found[f"{module}.weight_scale"].float()
                error = weight - unpack(found[f"{module}.weight_packed"]).float() * scale.repeat_interleave(128, 1)
                relative.append((((error @ hessian) * error).sum() / ((weight @ hessian) * weight).sum()).sqrt())
            errors[name, leaf] = torch.stack(relative).mean().item()
    for leaf in ("gate", "up", "down"):
        assert errors["search", leaf] < 0.96 * errors["rtn", leaf]
        assert errors["imatrix", leaf] < (0.98 if leaf == "down" else 1.0) * errors["search", leaf]
        assert errors["gptq", leaf] < (0.85 if leaf == "down" else 0.6) * errors["imatrix", leaf], errors


def test_experts_that_no_token_reached(folder, tmp_path: Path) -> None:
    """Gate and up take the pool's statistics, down the search without data; few tokens: the pool's Hessian."""
    gone: dict[str, torch.Tensor | None] = {}
    for leaf in ("gate", "up", "down"):
        module = EXPERT.format(3, leaf)
        gone |= {f"{module}.{what}": None for what in ("second_moment", "hessian", "heldout")}
        gone[f"{module}.tokens"] = torch.tensor(0)
    gone |= {f"{EXPERT.format(4, leaf)}.hessian": None for leaf in ("gate", "down")}
    statistics = folder(**gone)
    result = run(recipe("gptq"), statistics, tmp_path / "gptq")
    units = {leaf: result.manifest.units[EXPERT.format(3, leaf)][4] for leaf in ("gate", "up", "down")}
    assert units == {"gate": "gptq-pool", "up": "gptq-pool", "down": "data-free"}
    units = {leaf: result.manifest.units[EXPERT.format(4, leaf)][4] for leaf in ("gate", "up", "down")}
    assert units == {"gate": "gptq-pool", "up": "gptq-pool", "down": "imatrix"}
    assert verify(tmp_path / "gptq", GLM4).problems == []
    pools = {f"model.layers.1.mlp.experts.pool.{leaf}_proj.hessian": None for leaf in ("gate", "down")}
    for name, changes in {"with": {}, "without": pools}.items():  # the pool's diagonal follows from the experts' too
        result = run(recipe("search"), folder(name, **gone, **changes), tmp_path / f"search-{name}")
        assert counted(result) == {"imatrix": 45, "imatrix-pool": 2, "data-free": 1}
    plain = parse({"families": ["glm"], "rule": [{"roles": ["routed_expert"], "format": "int4-g128",
                                                  "method": "search", "layers": "1"}]}, "p", "p")  # fmt: skip
    run(plain, statistics, tmp_path / "plain")
    name = f"{EXPERT.format(3, 'down')}.weight_packed"
    assert torch.equal(held(tmp_path / "plain")[name], held(tmp_path / "search-with")[name])
    said = command("convert", str(GLM4), str(tmp_path / "cli"), "--recipe", "glm-decode-int4-g128-imatrix", "--stats",
                   str(statistics.folder)).stdout  # fmt: skip
    assert (
        "GPTQ" not in said
        and "codes of 141 by the weighted search, 2 by the search weighted by the layer's pool, 1 by the search" in said
    )


def test_a_hessian_is_factored_once_for_all_that_share_it(folder, tmp_path: Path, monkeypatch) -> None:
    """gate and up of an expert; all experts that have the pool's only. Also by three workers at a time."""
    from phasefold.quantize import gptq

    few = {f"{EXPERT.format(expert, 'gate')}.hessian": None for expert in range(4, 12)}
    asked, factor = [], gptq.factor
    monkeypatch.setattr(gptq, "factor", lambda *given: asked.append(len(given[0])) or factor(*given))
    result = run(recipe("gptq"), folder(**few), tmp_path / "out", workers=3)
    assert counted(result)["gptq-pool"] >= 15 and Counter(asked) == {256: 8 + 1, 128: 16}


def test_weights_of_channels_are_never_zero(folder) -> None:
    module = EXPERT.format(2, "down")
    moment = torch.zeros(128)
    moment[5], moment[6] = 1e30, 3e38
    guide = Guide(folder(**{f"{module}.second_moment": moment, f"{module}.tokens": torch.tensor(10**9)}), 1)
    weights = torch.frombuffer(bytearray(guide.columns(module).weights), dtype=torch.float32)
    assert weights.isfinite().all() and weights.min() == torch.tensor(FLOOR) and weights.argmax() == 6
    guide = Guide(folder("zeros", **{f"{module}.second_moment": torch.zeros(128)}), 1)
    assert guide.columns(module) is None
    one = Guide(folder("one", **{f"{module}.second_moment": torch.eye(128)[0], f"{module}.tokens": torch.tensor(1)}), 1)
    weights = torch.frombuffer(bytearray(one.columns(module).weights), dtype=torch.float32)
    assert 0.9 < weights[1] < 1 < weights[0] < 10  # one token says little


def test_worse_on_unseen_inputs_is_not_taken(folder, tmp_path: Path) -> None:
    """White noise asks for small weight errors, and GPTQ makes larger ones."""
    made = torch.Generator().manual_seed(1)
    noise = {f"{EXPERT.format(e, 'gate')}.heldout": torch.randn(256, 256, generator=made) for e in range(8)}
    noise |= {f"{EXPERT.format(e, 'down')}.heldout": torch.randn(256, 128, generator=made) for e in range(8)}
    noise[f"{EXPERT.format(9, 'down')}.heldout"] = None  # nothing to judge by
    result = run(recipe("gptq"), folder(**noise), tmp_path / "out")
    taken = {module: unit[4] for module, unit in result.manifest.units.items() if len(unit) > 4}
    rejected = [EXPERT.format(e, leaf) for e in range(8) for leaf in ("gate", "up", "down")]
    assert {taken[module] for module in [*rejected, EXPERT.format(9, "down")]} == {"imatrix"}
    assert counted(result)["gptq"] >= 21
    searched = run(recipe("search"), folder("again"), tmp_path / "search")
    name = f"{EXPERT.format(0, 'up')}.weight_packed"
    assert torch.equal(held(tmp_path / "out")[name], held(tmp_path / "search")[name])
    assert result.manifest.units[rejected[0]][3] == searched.manifest.units[rejected[0]][3]


def test_a_hessian_that_is_none(folder, tmp_path: Path) -> None:
    module = EXPERT.format(0, "down")
    far = torch.eye(128) + 900 * (torch.eye(128).roll(1, 0) + torch.eye(128).roll(-1, 0))
    result = run(recipe("gptq"), folder(**{f"{module}.hessian": far}), tmp_path / "out")
    assert result.manifest.units[module][4] == "singular" and counted(result)["singular"] == 1
    bad = folder("bad", **{f"{module}.hessian": torch.full((128, 128), torch.nan)})
    with pytest.raises(CheckpointError, match=r"experts\.0\.down_proj\.hessian is not finite somewhere; calibrate"):
        run(recipe("gptq"), bad, tmp_path / "nan")
    bad = folder("negative", **{f"{module}.second_moment": -torch.ones(128)})
    with pytest.raises(CheckpointError, match=r"second_moment is negative somewhere"):
        run(recipe("search"), bad, tmp_path / "negative-out")


@pytest.mark.parametrize("kind", ["fp8-channel", "f16"])
def test_from_another_release_of_the_model(folder, tmp_path: Path, kind: str) -> None:
    """FP8 and F16 sources; the statistics were made with the BF16 one, and a note says so."""
    statistics, source = folder(), variants.variant(kind, "tiny-glm4", tmp_path / kind)
    result = run(recipe("gptq"), statistics, tmp_path / "out", source)
    assert counted(result)["gptq"] >= 46
    assert any("statistics are of another checkpoint" in note for note in result.manifest.notes)
    assert verify(tmp_path / "out", source).problems == []


def test_a_weight_that_is_no_number_is_named(folder, tmp_path: Path) -> None:
    tensors, config = variants.load(GLM4)
    tensors[f"{EXPERT.format(6, 'up')}.weight"][100, 200] = float("nan")
    source = variants.save(tmp_path / "source", tensors, config)
    with pytest.raises(CheckpointError, match=r"experts\.6\.up_proj\.weight\[100, 200\]: weight is not finite"):
        run(recipe("gptq"), folder(), tmp_path / "out", source)


def test_without_the_compiled_kernels(folder, tmp_path: Path, monkeypatch) -> None:
    from phasefold.quantize.kernels import native

    if native.library() is None:
        pytest.fail("the tests need the compiled kernels")
    statistics, wanted = folder(), recipe("gptq", group=32)
    run(wanted, statistics, tmp_path / "native")
    monkeypatch.setattr(native, "library", lambda: None)
    run(wanted, statistics, tmp_path / "twin")
    ours, theirs = hashes(tmp_path / "native"), hashes(tmp_path / "twin")
    assert {n: h for n, h in ours.items() if n.endswith("tensors")} == {
        n: h for n, h in theirs.items() if n.endswith("tensors")
    }


def test_statistics_that_do_not_fit_are_refused(folder, layers: Layers, tmp_path: Path) -> None:
    statistics = folder()
    with pytest.raises(
        PlanError, match=r"`phasefold calibrate .*tiny-glm4 --text TEXT --out STATS --hessians routed_e"
    ):
        make_plan(open_checkpoint(GLM4), load("glm-decode-int4-g128-gptq"))
    with pytest.raises(PlanError, match=r"there are none; make them with `phasefold calibrate .* --out STATS`, then"):
        make_plan(open_checkpoint(GLM4), load("glm-decode-int4-g128-imatrix"))
    rule = replace(recipe("gptq").rules[0], roles=("routed_expert", "shared_expert"))
    both = replace(recipe("gptq"), rules=(rule,))
    with pytest.raises(PlanError, match="--hessians routed_expert,shared_expert`"):  # the option takes one list
        make_plan(open_checkpoint(GLM4), both)
    with pytest.raises(PlanError, match="none are given"):
        convert(planned(recipe("gptq"), statistics), tmp_path / "out")
    other = folder("other", **{f"{EXPERT.format(0, 'gate')}.tokens": torch.tensor(5)})
    with pytest.raises(PlanError, match="not the statistics that this job was planned with"):
        convert(planned(recipe("gptq"), statistics), tmp_path / "out", statistics=other)
    hessians = {name: None for name in layers[1] if name.endswith("hessian")}
    with pytest.raises(PlanError, match=r"no Hessians of routed_expert in it.*--hessians routed_expert`"):
        run(recipe("gptq"), folder("none", **hessians), tmp_path / "out")
    unseen = {name: None for held in layers.values() for name in held if name.endswith("heldout")}
    with pytest.raises(PlanError, match=r"no held-out inputs of routed_expert in it, .* on 8 sequences or more"):
        run(recipe("gptq"), folder("unseen", **unseen), tmp_path / "out")
    lacking = folder("lacking", **{f"{EXPERT.format(5, 'up')}.tokens": None})
    with pytest.raises(PlanError, match=r"nothing about model\.layers\.1\.mlp\.experts\.5\.up_proj in it"):
        run(recipe("search"), lacking, tmp_path / "out")
    wide = folder("wide", **{f"{EXPERT.format(5, 'up')}.second_moment": torch.ones(512)})
    with pytest.raises(PlanError, match=r"of another model: .*second_moment is \[512\], its inputs have 256"):
        run(recipe("search"), wide, tmp_path / "out")
    kimi = variants.EXAMPLES / "tiny-kimi"
    with pytest.raises(PlanError, match=r"of another model: calibrated on glm4_moe, .*tiny-kimi is deepseek_v3"):
        run(recipe("search"), statistics, tmp_path / "out", kimi)
    assert not (tmp_path / "out").exists()


def test_statistics_whose_bytes_changed_are_refused(folder, tmp_path: Path) -> None:
    """One bit, finite before and after: nothing else could tell."""
    statistics = folder()
    path = tmp_path / "stats" / "layer-00001.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(
        CheckpointError, match=r"layer-00001\.safetensors: altered, its sha256 is not statistics\.json's"
    ):
        run(recipe("search"), statistics, tmp_path / "out")


def test_a_job_goes_on_with_its_own_statistics_only(folder, tmp_path: Path) -> None:
    statistics = folder()
    other = folder("other", **{f"{EXPERT.format(0, 'gate')}.tokens": torch.tensor(5)})

    def stop(_: int) -> None:
        if list((tmp_path / "out").glob("*.safetensors")):
            raise Stopped

    with pytest.raises(Stopped):
        run(recipe("search"), statistics, tmp_path / "out", progress=stop)
    with pytest.raises(ResumeError, match="belongs to another job"):
        run(recipe("search"), other, tmp_path / "out")
    run(recipe("search"), statistics, tmp_path / "out")
    with pytest.raises(ResumeError, match="holds another checkpoint already"):
        run(recipe("search"), other, tmp_path / "out")


def test_recipes_of_gptq() -> None:
    assert all(
        load(f"{base}-{method}").rules[0].objective == "imatrix"
        and load(f"{base}-{method}").rules[0].format == load(base).rules[0].format
        for base in ("glm-decode-int4", "glm-decode-int4-g128", "kimi-decode-int4")
        for method in ("imatrix", "gptq")
    )
    for rule, words in (
        ({"method": "gptq", "objective": "mse"}, "gptq works on scales of objective imatrix, not mse"),
        ({"method": "rtn", "objective": "imatrix"}, "objective imatrix is one of search and gptq, not of rtn"),
    ):
        wrong = parse(
            {"families": ["glm"], "rule": [{"roles": ["routed_expert"], "format": "int4-g32", **rule}]}, "w", "w"
        )
        with pytest.raises(RecipeError, match=words):
            make_plan(open_checkpoint(GLM4), wrong)


def test_a_pair_of_an_fp8_and_a_gptq_artifact_belongs_together(folder, tmp_path: Path) -> None:
    """GPTQ's codes are not the nearest ones; weights that were trained on, and other weights, are still found."""
    statistics, at = folder(), Deployment("sglang", kv_dtype="bfloat16")
    gptq = tmp_path / "gptq"
    result = run(recipe("gptq"), statistics, gptq)
    expert = EXPERT.format(0, "gate")  # the first of a kind is always among those that are looked at
    assert result.manifest.units[expert][4] == "gptq"
    tensors, config = variants.load(GLM4)

    def prefill(name: str, **changed: torch.Tensor) -> Path:
        source = variants.save(tmp_path / f"{name}-source", tensors | changed, config)
        convert(make_plan(open_checkpoint(source), load("glm-prefill-fp8")), tmp_path / name)
        return tmp_path / name

    convert(make_plan(open_checkpoint(GLM4), load("glm-prefill-fp8")), tmp_path / "fp8")
    assert belong(tmp_path / "fp8", gptq, at, at) == [] and belong(GLM4, gptq, at, at) == []
    made = torch.Generator().manual_seed(0)
    tuned = "model.layers.0.self_attn.o_proj.weight"
    noise = torch.randn(tensors[tuned].shape, generator=made).bfloat16() * tensors[tuned].std() * 0.2
    other = torch.randn(tensors[f"{expert}.weight"].shape, generator=made).bfloat16() * 0.02
    for name, changed in {"tuned": {tuned: tensors[tuned] + noise}, "other": {f"{expert}.weight": other}}.items():
        found = [one for one in belong(prefill(name, **changed), gptq, at, at) if "sampled differ" in one.message]
        assert [(one.rule, one.subject) for one in found] == [("D5", next(iter(changed)))]


def test_native_int4_needs_no_statistics(tmp_path: Path) -> None:
    source = variants.variant("int4", "tiny-kimi", tmp_path / "int4")
    result = convert(make_plan(open_checkpoint(source), load("kimi-decode-int4-gptq")), tmp_path / "out")
    assert counted(result) == {} and methods(result.plan, result.manifest.units) == {}
    assert held(tmp_path / "out").keys() == held(source).keys()


def test_the_command_line(folder, layers: Layers, tmp_path: Path) -> None:
    statistics = folder(**{n: None for number in (2, 3) for n in layers[number] if n.endswith("heldout")})
    options = ("--recipe", "glm-decode-int4-g128-gptq", "--stats", str(statistics.folder), "--json")
    told = json.loads(command("plan", str(GLM4), *options).stdout)
    assert told["worker_bytes"] == 4 * (6 * 256 * 256 + 5 * 128 * 256)
    made = json.loads(command("convert", str(GLM4), str(tmp_path / "out"), *options).stdout)
    assert made["digest"] == told["digest"] and sum(made["methods"]["routed_expert"].values()) == 144
    assert made["methods"]["routed_expert"]["gptq"] >= 46 and made["methods"]["routed_expert"]["imatrix"] >= 96
    manifest = json.loads((tmp_path / "out" / "phasefold.json").read_text())
    assert manifest["extras"]["statistics"] == open_statistics(statistics.folder).identity()
    said = command("convert", str(GLM4), str(tmp_path / "out"), *options[:-1]).stdout
    assert said.count("note: GPTQ minimises the error of outputs; that of the weights, above, is larger") == 1
    said = command("verify", str(tmp_path / "out"), "--source", str(GLM4)).stdout  # without the statistics
    assert "ok (every tensor compared with the source)" in said
