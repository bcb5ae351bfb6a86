"""Plans of every published checkpoint, from headers alone, against published totals."""

import gc
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import sparse
import variants

from phasefold.errors import PlanError, RecipeError
from phasefold.formats.checkpoint import INDEX, open_checkpoint
from phasefold.quantize.convert import convert
from phasefold.quantize.plan import Plan, make_plan
from phasefold.quantize.summary import inspect
from phasefold.recipes import Recipe, load, names, parse

TINY = variants.EXAMPLES / "tiny-glm5"


@pytest.fixture(scope="module", autouse=True)
def _no_collector():
    """As the command line does: a plan is a million small values without a cycle."""
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.fixture(scope="module")
def hub(module_path: Path) -> sparse.Hub:
    return sparse.Hub(module_path / "hub")


def plan(folder: Path, recipe: str | Recipe, **changes: str) -> Plan:
    found = load(recipe) if isinstance(recipe, str) else recipe
    return make_plan(open_checkpoint(folder), replace(found, **changes))


def custom(*rules: dict, **top: object) -> Recipe:
    return parse({"families": ["glm", "kimi"], "rule": list(rules), **top}, "mine", "mine")


# (model, recipe, bytes, quantized, config is copied): totals published or derived by others
GLM52 = "zai-org/GLM-5.2-FP8"
TOTALS = [
    (GLM52, "glm-decode-int4", 450_904_205_312, False),
    (GLM52, "glm-prefill-fp8", 755_617_140_416, True),
    (GLM52, "bf16", 1_506_659_919_872, False),
    ("zai-org/GLM-5.2", "glm-prefill-fp8", 755_617_140_416, False),
    ("zai-org/GLM-5.2", "glm-decode-int4", 450_904_205_312, False),
    ("zai-org/GLM-5.2", "bf16", 1_506_659_919_872, True),
    ("zai-org/GLM-5-FP8", "glm-prefill-fp8", 756_162_687_872, True),
    ("zai-org/GLM-4.5-Air-FP8", "glm-prefill-fp8", 112_558_098_944, True),
    ("moonshotai/Kimi-K2.6", "kimi-decode-int4", 595_148_192_736, True),
    ("moonshotai/Kimi-K2.5", "kimi-decode-int4", 595_148_192_736, True),
    ("moonshotai/Kimi-K2-Thinking", "kimi-decode-int4", 594_205_920_512, True),
    ("moonshotai/Kimi-K2-Instruct", "kimi-prefill-fp8", 1_029_173_256_720, True),
    ("moonshotai/Kimi-K2-Instruct-0905", "kimi-prefill-fp8", 1_029_173_265_504, True),
]


@pytest.mark.parametrize(("model", "recipe", "total", "untouched"), TOTALS)
def test_planned_bytes_are_the_published_totals(hub, model: str, recipe: str, total: int, untouched: bool) -> None:
    made = plan(hub(model), recipe)
    assert made.output_bytes == total
    assert sum(shard.size - len(shard.header) for shard in made.shards) == total
    assert (made.config == made.checkpoint.config_bytes) == untouched
    if untouched:
        assert set(made.actions().items()) >= {("quantized", 0), ("repacked", 0), ("dropped", 0)}


@pytest.mark.parametrize("model", list(sparse.MODELS))
def test_every_published_model_is_inspected_and_planned(hub, model: str) -> None:
    checkpoint = open_checkpoint(hub(model))
    found = inspect(checkpoint)
    assert found["tensors"] == sum(found["formats"].values()) == sum(r["tensors"] for r in found["roles"].values())
    assert found["total_size"] == sum(role["bytes"] for role in found["roles"].values())
    made = make_plan(checkpoint, load(f"{found['family']}-prefill-fp8"))
    assert len(made.weight_map) == sum(len(unit.outputs) for unit in made.units())
    assert all(shard.size <= made.shard_bytes + len(shard.header) or len(shard.units) == 1 for shard in made.shards)


@pytest.mark.parametrize("model", ["moonshotai/Kimi-K2.6", "zai-org/GLM-4.5-Air-FP8", GLM52])
def test_shards_lie_without_holes_and_aligned(hub, model: str) -> None:
    for shard in plan(hub(model), "bf16").shards:
        end = len(shard.header)
        for output in sorted((o for unit in shard.units for o in unit.outputs), key=lambda o: o.offset):
            width = {"I64": 8, "F32": 4, "I32": 4, "BF16": 2}.get(output.part.dtype, 1)
            assert output.offset == end and output.offset % width == 0
            end += output.part.nbytes
        assert end == shard.size


@pytest.mark.parametrize("recipe", ["glm-decode-int4", "glm-prefill-fp8", "glm-decode-int4-fp8"])
@pytest.mark.parametrize("mtp", ["quantize", "keep", "drop"])
def test_config_tells_the_truth_about_mtp(hub, recipe: str, mtp: str) -> None:
    made = plan(hub(GLM52), recipe, mtp=mtp)
    config = json.loads(made.config)
    has = any(name.startswith("model.layers.78.") for name in made.weight_map)
    assert has == (mtp != "drop") and config["num_nextn_predict_layers"] == int(has)
    assert bool(made.dropped) == (mtp == "drop")
    if mtp == "keep":
        assert all(u.action in ("copied", "repacked") and u.source_format.startswith(u.target_format[:4])
                   for u in made.units() if u.module.startswith("model.layers.78."))  # fmt: skip


def test_an_mtp_layer_in_a_file_of_its_own(hub) -> None:
    folder = hub(GLM52, mtp_file=True)
    assert plan(folder, "glm-decode-int4").output_bytes == 450_904_205_312
    index = json.loads((folder / INDEX).read_text())  # some repos leave that file out of the index
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f != "mtp.safetensors"}
    del index["metadata"]
    (folder / INDEX).write_text(json.dumps(index))
    assert plan(folder, "glm-decode-int4").output_bytes == 450_904_205_312


def test_a_config_that_claims_a_missing_mtp_layer_is_corrected(tmp_path: Path) -> None:
    tensors, config = variants.load(TINY)
    folder = variants.save(tmp_path / "source", tensors, config | {"num_nextn_predict_layers": 1})
    made = plan(folder, "glm-decode-int4")
    assert json.loads(made.config)["num_nextn_predict_layers"] == 0 and "no MTP layer" in made.notes[0]
    with pytest.raises(RecipeError, match="no MTP layer"):
        plan(folder, "glm-decode-int4", mtp="drop")


def test_digest_follows_everything_that_changes_the_bytes(tmp_path: Path) -> None:
    def digest(folder: Path = TINY, **changes: object) -> str:
        rule = {"roles": ["routed_expert"], "format": "int4-g32", "method": "search", **changes}
        return plan(folder, custom(rule)).digest

    tensors, config = variants.load(TINY)
    other = variants.save(tmp_path / "other", tensors, config)
    digests = [
        digest(),
        digest(format="int4-g64"),
        digest(method="rtn"),
        digest(objective="mse"),
        digest(layers=[1]),
        digest(other),
    ]
    assert len(set(digests)) == len(digests) and digest() == digests[0]
    assert make_plan(open_checkpoint(TINY), load("bf16"), 10**6).digest != plan(TINY, "bf16").digest


REFUSED = [
    ({"roles": ["routed_experts"], "format": "int4-g32"}, RecipeError, "unknown role 'routed_experts'"),
    ({"roles": ["latent"], "format": "bf16"}, RecipeError, "matches no tensor"),
    ({"roles": ["routed_expert"], "format": "int4-g32", "layers": [0]}, RecipeError, "matches no tensor"),
    ({"roles": ["routed_expert"], "format": "int3"}, RecipeError, "'int3' is not written"),
    ({"roles": ["routed_expert"], "format": "fp8-tensor"}, RecipeError, "'fp8-tensor' is not written"),
    ({"roles": ["routed_expert"], "format": "int4-g32", "method": "awq"}, RecipeError, "method is one of"),
    ({"roles": ["routed_expert"], "format": "fp8", "method": "search"}, RecipeError, "chooses INT4 codes"),
    ({"roles": ["router"], "format": "fp8"}, RecipeError, "runtimes hold router unquantized"),
    ({"roles": ["attention"], "format": "int4-g32"}, RecipeError, "attention.q_a cannot be INT4"),
]


@pytest.mark.parametrize(("rule", "error", "words"), REFUSED)
def test_rules_that_cannot_be_meant_are_refused(rule: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        plan(TINY, custom(rule))


def test_a_group_that_does_not_divide_is_told_before_anything_is_read(tmp_path: Path) -> None:
    config = json.loads((variants.EXAMPLES / "tiny-glm4" / "config.json").read_text()) | {"moe_intermediate_size": 96}
    folder = variants.save(tmp_path / "source", variants.random_from(config), config)
    with pytest.raises(PlanError, match=r"down_proj.weight: 96 input features are not divisible by the group of 128"):
        plan(folder, "glm-decode-int4-g128")


def test_a_recipe_for_another_family_is_refused() -> None:
    with pytest.raises(RecipeError, match="recipe for kimi, but this is a glm checkpoint"):
        plan(TINY, "kimi-decode-int4")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("families = ['glm']", "at least one"),
        ("families = 'glm'\n[[rule]]\nroles=['*']\nformat='bf16'", "families"),
        ("families = ['glm']\nfamilie = 1\n[[rule]]\nroles=['*']\nformat='bf16'", "unknown key 'familie'"),
        ("families = ['glm']\nmtp = 'maybe'\n[[rule]]\nroles=['*']\nformat='bf16'", "mtp"),
        ("families = ['glm']\n[[rule]]\nroles=['*']\nformat='bf16'\nlayers='a-b'", "layers"),
        ("families = [", "TOML"),
    ],
)
def test_bad_recipes_name_the_key(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=words):
        load(str(path))


@pytest.mark.parametrize("name", names())
def test_recipes_are_short_and_survive_the_manifest(name: str) -> None:
    recipe = load(name)
    assert parse(recipe.to_json(), name) == recipe
    assert name == recipe.name and recipe.summary and len(recipe.rules) <= 3


def test_int4_that_is_rounded_a_second_time_is_told(tmp_path: Path) -> None:
    convert(make_plan(open_checkpoint(TINY), load("glm-decode-int4-g128")), tmp_path / "g128")
    notes = make_plan(open_checkpoint(tmp_path / "g128"), load("glm-decode-int4")).notes
    assert any(re.search(r"\d+ matrices are int4-g128 and are rounded a second time, to int4-g32", n) for n in notes)
