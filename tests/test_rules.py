"""Load rules: every one is broken by something, nothing sound breaks any, and published sizes give published limits."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import broken
import pytest
import sparse
import variants
from broken import BASES, FULL_SIZE, MUTATIONS, SOUND, FullSize, Mutation
from hypothesis import given, settings
from hypothesis import strategies as st

from phasefold.errors import CheckpointError
from phasefold.families import identify
from phasefold.formats.checkpoint import open_checkpoint
from phasefold.quantize import resolve
from phasefold.quantize.convert import convert
from phasefold.quantize.plan import make_plan
from phasefold.recipes import load, names, parse
from phasefold.serving.deployment import SEVERITIES, Deployment, Finding
from phasefold.serving.rules import RULES, check, largest_tp
from phasefold.serving.survey import Survey, survey, survey_plan

RUNTIMES = ("vllm", "sglang")


@pytest.fixture(scope="module", autouse=True)
def _no_collector():
    """As the command line does."""
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.fixture(scope="module")
def artifact(module_path: Path):
    return lambda name: broken.make_base(name, module_path / "artifacts")


@pytest.fixture(scope="module")
def hub(module_path: Path) -> sparse.Hub:
    return sparse.Hub(module_path / "hub")


def told(found: Survey, runtime: str, **at: Any) -> list[Finding]:
    return check(found, [Deployment(runtime, **(SOUND | at))])


def broken_rules(findings: list[Finding]) -> set[tuple[str, str]]:
    return {(finding.rule, finding.severity) for finding in findings}


# --------------------------------------------------------------------------------------------------- mutations


def test_every_rule_is_broken_by_something() -> None:
    assert {rule.number for rule in RULES} == {m.rule for m in MUTATIONS} | {full.rule for full in FULL_SIZE}
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize("base", BASES)
def test_what_is_mutated_is_sound(artifact, base: str) -> None:
    found = survey(artifact(base))
    for runtime in RUNTIMES:
        expected = {("T3", "silent")} if (base, runtime) == ("kimi-g128", "vllm") else set()  # 128 wide, one group
        assert broken_rules(told(found, runtime)) == expected


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.rule} {mutation.name}")
def test_a_mutation_breaks_its_rule_alone(artifact, tmp_path: Path, mutation: Mutation) -> None:
    found = survey(broken.apply(mutation, artifact(mutation.base), tmp_path / "broken"))
    for runtime in RUNTIMES:
        findings = told(found, runtime, **mutation.at)
        expected = {(mutation.rule, mutation.expect[runtime])} if runtime in mutation.expect else set()
        assert broken_rules(findings) == expected, findings
        for finding in findings:
            assert finding.runtime == runtime
            assert finding.subject and len(finding.message) > 20 and "\n" not in finding.message


@pytest.mark.parametrize("case", FULL_SIZE, ids=lambda case: f"{case.rule} {case.model} {case.at}")
def test_full_sizes_that_cannot_be_cut(hub, case: FullSize) -> None:
    recipe = load(case.recipe) if isinstance(case.recipe, str) else broken.experts_only(*case.recipe)
    found = survey_plan(make_plan(open_checkpoint(hub(case.model)), recipe))
    for runtime in RUNTIMES:
        findings = told(found, runtime, **case.at)
        expected = {(case.rule, case.expect[runtime])} if runtime in case.expect else set()
        assert broken_rules(findings) == expected, findings
        assert all(case.subject in finding.message for finding in findings)


# ------------------------------------------------------------------------------------------------ what is sound

KIMI = ["bf16", "f32", "fp8-block", "fp8-channel", "int4", "mtp", "mtp+fp8-block", "mtp+int4", "k25", "k25+int4+nested",
        "k25+fp8-channel"]  # fmt: skip
GLM = ["bf16", "fp8-block", "fp8-channel", "int4", "mtp", "mtp+fp8-block", "mtp-file+fp8-block", "mtp+fp8-channel"]
KINDS = [("tiny-kimi", kind) for kind in KIMI] + [(base, kind) for base in ("tiny-glm4", "tiny-glm5") for kind in GLM]


def recipes_for(base: str) -> list[str]:
    family = "kimi" if base == "tiny-kimi" else "glm"
    found = [name for name in names() if family in load(name).families and not load(name).guided]
    return [name for name in found if name != "kimi-restore-int4"]


def expected(base: str, kind: str, recipe: str, notes: tuple[str, ...], runtime: str) -> set[tuple[str, str]]:
    """True facts about artifacts that are sound otherwise."""
    true = set()
    if runtime == "vllm" and "g128" in recipe:  # the examples' experts are one group of 128 wide
        true.add(("T3", "silent"))
    if runtime == "sglang" and base == "tiny-glm4" and any("--disable-shared-experts-fusion" in note for note in notes):
        true.add(("S6", "silent"))
    if recipe in ("glm-prefill-fp8", "glm-decode-int4-fp8", "keep"):  # FP8 of the source is kept
        if base == "tiny-glm4" and kind.endswith("fp8-block"):  # k_proj of the example has 64 rows, half a block
            true.add(("T5", "error"))
    if recipe == "keep" and runtime == "sglang" and base == "tiny-glm5" and kind.endswith("fp8-channel"):
        true.add(("P13", "error"))  # of indexer.wk, which other recipes decode
    return true


@pytest.mark.parametrize(("base", "kind"), KINDS)
def test_what_is_planned_is_clean(tmp_path: Path, base: str, kind: str) -> None:
    """Also with shared experts fused, as SGLang does by itself, but for what the plan's notes say."""
    source = open_checkpoint(variants.variant(kind, base, tmp_path))
    for recipe in recipes_for(base):
        plan = make_plan(source, load(recipe))
        found = survey_plan(plan)
        for runtime in RUNTIMES:
            findings = check(found, [Deployment(runtime, mtp=found.has_mtp)])
            assert broken_rules(findings) == expected(base, kind, recipe, plan.notes, runtime), (recipe, findings)


@pytest.mark.parametrize("base", ["tiny-kimi", "tiny-glm4", "tiny-glm5"])
def test_what_is_written_is_what_was_planned(tmp_path: Path, base: str) -> None:
    source = open_checkpoint(variants.EXAMPLES / base)
    for recipe in recipes_for(base):
        plan = make_plan(source, load(recipe), 1_000_000)
        convert(plan, tmp_path / recipe)
        written, planned = survey(tmp_path / recipe), survey_plan(plan)
        assert set(written.entries) == set(planned.entries)
        assert (written.faults, written.declared, written.extra) == (planned.faults, planned.declared, planned.extra)
        for runtime in RUNTIMES:
            findings = check(written, [Deployment(runtime)])
            assert findings == check(planned, [Deployment(runtime)])
            assert broken_rules(findings) == expected(base, "bf16", recipe, plan.notes, runtime)


#: what is true of published checkpoints, on 1 and on 8 GPUs; everything else is clean
PUBLISHED = {
    "zai-org/GLM-4.7-Flash": [("T8", "both", "config.json: num_attention_heads")],  # 20 heads, 8 GPUs
}


@pytest.mark.parametrize("model", sparse.MODELS)
def test_published_checkpoints(hub, model: str) -> None:
    findings = check(survey(hub(model)), [Deployment(runtime, tp=tp) for runtime in RUNTIMES for tp in (1, 8)])
    assert [(f.rule, f.runtime, f.subject) for f in findings] == PUBLISHED.get(model, []), findings


# ------------------------------------------------------------------------------------------------ how far it is cut

# The load contract's table of what a rank's part divides into: experts in INT4 groups (32, 64, 128) and in FP8 blocks,
# kv_b_proj and dense MLP in FP8 blocks; "." divides, "x" does not, "-" is not there.
TABLE = """
moonshotai/Kimi-K2-Instruct  1 ......   2 ......   4 ......   8 ......   16 ......   32 ..xx.x
zai-org/GLM-5.2              1 ......   2 ......   4 ......   8 ......   16 ......   32 ..xx..
zai-org/GLM-4.7-Flash        1 ......   2 ......   4 ....x.
zai-org/GLM-4.6              1 ....-.   2 ....-.   4 ....-.   8 ..xx-.   16 .xxx-.   32 xxxx-.
zai-org/GLM-4.5-Air          1 ....-x   2 ..xx-x   4 .xxx-x   8 xxxx-x   16 xxxx-x   32 xxxx-x
"""
ROWS = [line.split() for line in TABLE.split("\n") if line]
COLUMNS = ("int4-g32", "int4-g64", "int4-g128", "fp8-block", "fp8-block", "fp8-block")


def small(model: str, folder: Path) -> Path:
    """The same sizes with one dense and one sparse layer, by headers alone, in BF16."""
    config = sparse.config_of(model)
    text = config.get("text_config", config)
    text.pop("quantization_config", None)
    layers = text.get("first_k_dense_replace", 1) + 1
    text |= {"num_hidden_layers": layers, "n_routed_experts": 64, "num_nextn_predict_layers": 0}
    text |= {key: text[key][:layers] for key in ("indexer_types", "mlp_layer_types") if key in text}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    specs = [spec for spec in identify(config).tensors() if spec.role not in ("buffer", "attention.kv_scale")]
    sparse.write_header(folder / "model.safetensors", [sparse.Stored(s.name, "BF16", s.shape, s) for s in specs])
    return folder


@pytest.fixture(scope="module")
def cut(module_path: Path):
    """Model and format -> its planned artifact: experts in INT4, or everything in FP8 blocks."""
    root, made = module_path / "small", {}

    def get(model: str, format_: str) -> Survey:
        if (model, format_) not in made:
            folder = root / model.replace("/", "--")
            source = open_checkpoint(folder if folder.exists() else small(model, folder))
            roles = ["routed_expert"] if format_.startswith("int4") else ["*"]
            rules = [{"roles": roles, "format": format_}]
            recipe = parse({"families": ["glm", "kimi"], "rule": rules}, format_, format_)
            made[model, format_] = survey_plan(make_plan(source, recipe))
        return made[model, format_]

    return get


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_table_of_what_divides(cut, row: list[str]) -> None:
    model = row[0]
    for tp, cells in zip(map(int, row[1::2]), row[2::2], strict=True):
        for column, (format_, cell) in enumerate(zip(COLUMNS, cells, strict=True)):
            for runtime in RUNTIMES:
                findings = check(cut(model, format_), [Deployment(runtime, tp=tp)])
                if column < 4:
                    bad = [f for f in findings if f.rule == ("T1" if column < 3 else "T6")]
                else:
                    part = "kv_b_proj" if column == 4 else "mlp."
                    bad = [f for f in findings if f.rule == "T5" and part in f.subject and "shared" not in f.subject]
                assert bool(bad) == (cell == "x"), (tp, format_, runtime, findings)


# Of the table, T3 (vLLM: an expert is wider than one group) and T4 (SGLang: whole tiles of 64), with experts whole on
# their ranks in the last two columns: model, format, vLLM, SGLang, vLLM with EP, SGLang with EP
LARGEST = [
    ("moonshotai/Kimi-K2-Instruct", "int4-g32", 32, 32, 64, 64),
    ("moonshotai/Kimi-K2-Instruct", "int4-g64", 16, 32, 64, 64),
    ("moonshotai/Kimi-K2-Instruct", "int4-g128", 8, 16, 64, 64),
    ("moonshotai/Kimi-K2-Instruct", "fp8-block", 16, 16, 16, 16),
    ("zai-org/GLM-5.2", "int4-g128", 8, 16, 64, 64),
    ("zai-org/GLM-4.6", "int4-g32", 16, 8, 32, 32),
    ("zai-org/GLM-4.6", "int4-g64", 8, 8, 32, 32),
    ("zai-org/GLM-4.6", "int4-g128", 4, 4, 32, 32),
    ("zai-org/GLM-4.5-Air", "int4-g32", 4, 2, 32, 32),
    ("zai-org/GLM-4.5-Air", "fp8-block", 0, 0, 0, 0),
    ("zai-org/GLM-4.7-Flash", "fp8-block", 2, 2, 2, 2),
    ("zai-org/GLM-4.7-Flash", "int4-g128", 4, 4, 4, 4),
]


@pytest.mark.parametrize(("model", "format_", "vllm", "sglang", "vllm_ep", "sglang_ep"), LARGEST)
def test_largest_tp(cut, model: str, format_: str, vllm: int, sglang: int, vllm_ep: int, sglang_ep: int) -> None:
    found = cut(model, format_)
    assert [largest_tp(found, runtime) for runtime in RUNTIMES] == [vllm, sglang]
    assert [largest_tp(found, runtime, ep_whole=True) for runtime in RUNTIMES] == [vllm_ep, sglang_ep]


def test_largest_tp_with_experts_in_parallel(cut) -> None:
    """EP halves, quarters ... over how many ranks an expert is cut."""
    found = cut("zai-org/GLM-4.6", "int4-g128")
    assert [largest_tp(found, "sglang", ep=ep) for ep in (1, 2, 4, 8)] == [4, 8, 16, 32]


# ------------------------------------------------------------------------------------------------ anybody's


def test_what_lacks_its_weight_shape_is_judged_all_the_same(artifact, tmp_path: Path) -> None:
    """Where all lack it as well: groups that a rank cuts, and groups that are not the config's."""
    tensors, config = variants.load(artifact("kimi-g128"))
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("weight_shape")}
    found = survey(variants.save(tmp_path / "cut", tensors, config))
    assert broken_rules(told(found, "vllm", tp=2)) == {("P3", "warning"), ("T1", "error")}
    assert broken_rules(told(found, "sglang", tp=2)) == {("P3", "warning"), ("T1", "silent")}
    assert largest_tp(found, "sglang") == largest_tp(survey(artifact("kimi-g128")), "sglang") == 1
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64
    found = survey(variants.save(tmp_path / "groups", tensors, config))
    assert "P2" in {rule for rule, _ in broken_rules(told(found, "sglang"))}


def test_faults_of_one_kind_are_one_finding(artifact, tmp_path: Path) -> None:
    tensors, config = variants.load(artifact("kimi"))
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("weight_scale")}
    found = survey(variants.save(tmp_path / "broken", kept, config))
    (finding,) = check(found, [Deployment(runtime) for runtime in RUNTIMES])
    assert finding.runtime == "both"
    assert finding.subject == "model.layers.1.mlp.experts.0.gate_proj and 143 more"


def test_layers_that_are_missing_are_counted_apart_from_modules(artifact, tmp_path: Path) -> None:
    tensors, config = variants.load(artifact("kimi"))
    gone = [name for name in tensors if ".layers.1." in name or ".layers.2." in name]
    kept = {name: tensor for name, tensor in tensors.items() if name not in (*gone, "model.norm.weight")}
    found = told(survey(variants.save(tmp_path / "broken", kept, config)), "sglang")
    assert [(f.rule, f.subject) for f in found] == [("C4", "layer 1 and 1 more"), ("C4", "model.norm.weight")]
    assert "as a whole" in found[0].message


def test_a_missing_expert_is_named_as_a_module(artifact, tmp_path: Path) -> None:
    tensors, config = variants.load(artifact("kimi"))
    kept = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.experts.3.up_proj" not in name}
    (found,) = told(survey(variants.save(tmp_path / "broken", kept, config)), "sglang")
    assert (found.rule, found.subject) == ("C3", "model.layers.1.mlp.experts.3.up_proj")


def test_an_unknown_backend_is_blamed_on_its_own_option(artifact) -> None:
    seen = survey(artifact("kimi"))
    for at in ({"attention_backend": "fa9"}, {"attention_backend": "fa9", "kv_dtype": "bf16"}):
        (found,) = told(seen, "sglang", **at)
        assert (found.rule, found.subject) == ("K5", "--attention-backend fa9")
    (found,) = told(seen, "sglang", kv_dtype="fp8", attention_backend="fa3")
    assert found.subject == "--kv-cache-dtype fp8"


def test_advice_that_can_be_followed(cut) -> None:
    """Nothing is smaller than groups of 32, and no smaller TP than one."""
    for model, format_, tp, smaller in (
        ("zai-org/GLM-4.6", "int4-g32", 32, False),
        ("zai-org/GLM-4.6", "int4-g128", 8, True),
        ("moonshotai/Kimi-K2-Instruct", "int4-g128", 16, True),
        ("moonshotai/Kimi-K2-Instruct", "int4-g32", 64, False),
    ):
        (found,) = [f for f in told(cut(model, format_), "vllm", tp=tp) if f.rule in ("T1", "T3")]
        assert ("smaller groups" in found.message) == smaller, found.message


def test_what_cannot_be_cut_for_one_cause_is_one_finding(cut) -> None:
    found = told(cut("zai-org/GLM-4.6", "int4-g32"), "sglang", tp=32)
    assert [(f.rule, f.severity) for f in found] == [("T1", "error")] and "first token" in found[0].message


def test_a_config_of_deepseek_v3_with_code_of_its_own_may_lack_a_key(artifact, tmp_path: Path) -> None:
    """The code's class may have a default; SGLang reads kimi_k2 into transformers' class all the same."""
    tensors, config = variants.load(artifact("kimi-bf16"))
    config |= {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    del config["moe_layer_freq"]
    for kind, expected in (("deepseek_v3", set()), ("kimi_k2", {("C8", "error")})):
        found = survey(variants.save(tmp_path / kind, tensors, config | {"model_type": kind}))
        assert broken_rules(told(found, "sglang")) == expected and told(found, "vllm") == []


def test_all_faults_are_told(artifact, tmp_path: Path) -> None:
    tensors, config = variants.load(artifact("kimi"))
    del tensors["model.layers.1.input_layernorm.weight"], tensors["model.layers.1.mlp.experts.3.gate_proj.weight_scale"]
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["zero_point"] = False
    folder = variants.save(tmp_path / "broken", tensors, config)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"garbage")
    rules = {finding.rule for finding in told(survey(folder), "vllm", tp=8)}
    assert rules == {"C1", "C2", "C4", "C7", "T1", "T8"}


def test_a_model_that_no_family_knows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="model_type"):
        survey(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        survey(tmp_path / "nothing")


def test_nvfp4_is_named_and_not_judged(tmp_path: Path) -> None:
    """As nvidia's GLM-5.2-NVFP4 stores its experts, with modelopt's two configs."""
    folder = small("zai-org/GLM-5.2", tmp_path / "nvfp4")
    config = json.loads((folder / "config.json").read_text())
    stored = []
    for spec in identify(config).tensors():
        module, (rows, columns) = spec.name.removesuffix(".weight"), (*spec.shape, 1)[:2]
        if spec.role != "routed_expert":
            stored.append(sparse.Stored(spec.name, "BF16", spec.shape, spec))
            continue
        stored.append(sparse.Stored(spec.name, "U8", (rows, columns // 2), spec))
        stored.append(sparse.Stored(f"{module}.weight_scale", "F8_E4M3", (rows, columns // 16), spec))
        stored += [sparse.Stored(f"{module}.{name}", "F32", (), spec) for name in ("weight_scale_2", "input_scale")]
    sparse.write_header(folder / "model.safetensors", stored)
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    quant = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": quant}))
    (finding,) = check(survey(folder), [Deployment(runtime) for runtime in RUNTIMES])
    assert (finding.rule, finding.severity, finding.runtime) == ("C7", "warning", "both")
    assert "quant_method 'modelopt' is not judged" in finding.message


WORDS = """fp8 compressed-tensors pack-quantized float-quantized int float group block tensor re:( re:.* Linear static
dynamic model.layers.1.mlp.experts""".split()
VALUES = st.none() | st.booleans() | st.integers(-1, 256) | st.sampled_from(WORDS)
KEYS = st.sampled_from(
    ["quant_method", "format", "config_groups", "group_0", "targets", "weights", "input_activations", "ignore", "type",
     "num_bits", "group_size", "strategy", "symmetric", "actorder", "block_structure", "weight_block_size",
     "activation_scheme", "modules_to_not_convert", "kv_cache_scheme", "sparsity_config", "dynamic"]
)  # fmt: skip
JSON = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5))


@pytest.fixture(scope="module")
def empty(artifact) -> dict[str, Survey]:
    return {name: survey(artifact(name)) for name in ("kimi", "glm5-mixed", "kimi-fp8")}


@settings(max_examples=150, deadline=None)
@given(base=st.sampled_from(["kimi", "glm5-mixed", "kimi-fp8"]), path=st.integers(0, 5), key=KEYS, value=JSON)
def test_any_config_gets_an_answer(empty, base: str, path: int, key: str, value: object) -> None:
    """Whatever stands in it, the check ends without an exception."""
    held = empty[base]
    config = json.loads(json.dumps(held.config))
    places = [config, config["quantization_config"]]
    for group in config["quantization_config"].get("config_groups", {}).values():
        places += [group, group["weights"]]
    place = places[path % len(places)] if path else config
    if place is config:
        key = "quantization_config"
    place[key] = value
    model = identify(config)
    declared = (("config.json: quantization_config", config["quantization_config"]),)
    found = replace(held, config=config, model=model, declared=declared, _answers={})
    for runtime in RUNTIMES:
        for finding in check(found, [Deployment(runtime, tp=2, sm=100, kv_dtype="fp8_e4m3", kv_scales="x")]):
            assert finding.message


# ------------------------------------------------------------------------------------------------ rules as a whole


def test_rules_are_listed_in_the_docs() -> None:
    page = (Path(__file__).parent.parent / "docs" / "rules.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and line[2] in "CPTFSK" and line[3].isdigit()]
    told = [
        f"| {rule.number} | {rule.summary} | {' | '.join(rule.severity.get(r, '-') for r in RUNTIMES)} |"
        for rule in RULES
    ]
    assert rows == told
    for version in RULES[0].versions.values():
        assert version in page


def test_rules_are_whole() -> None:
    numbers = [f"C{n}" for n in range(1, 9)] + [f"P{n}" for n in range(1, 15)] + [f"T{n}" for n in range(1, 9)]
    numbers += [f"F{n}" for n in range(1, 8)] + ["S6", "S7", "S8"] + [f"K{n}" for n in range(1, 6)]
    assert [rule.number for rule in RULES] == numbers
    for rule in RULES:
        assert rule.severity.keys() <= rule.versions.keys() and set(rule.severity.values()) <= set(SEVERITIES)


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
@pytest.mark.parametrize("value", [True, 3, "lm_head", {"lm_head": 1}])
def test_a_list_of_names_that_is_no_list(artifact, tmp_path: Path, key: str, value: Any) -> None:
    tensors, config = variants.load(artifact("kimi-fp8"))
    config["quantization_config"][key] = value
    seen = survey(variants.save(tmp_path / "out", tensors, config))
    found = check(seen, [Deployment(name) for name in RUNTIMES])
    level = "silent" if isinstance(value, str) else "error"
    assert [(f.rule, f.severity, f.subject) for f in found] == [("F4", level, f"quantization_config.{key}")]
    said = f"cannot be read: {key} is a {type(value).__name__}, expected a list of names"
    sentences = resolve.check(seen.quantization, seen.matrices, seen.model.architecture)
    assert sentences and all(sentence.endswith(said) for sentence in sentences)


def test_checking_imports_no_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from phasefold.serving.survey import survey;"
        "from phasefold.serving.rules import check, largest_tp; from phasefold.serving.deployment import Deployment;"
        f"found = survey(Path({str(variants.EXAMPLES / 'tiny-glm5')!r}));"
        "assert check(found, [Deployment('vllm'), Deployment('sglang')]) == [] and largest_tp(found, 'vllm') == 4;"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
