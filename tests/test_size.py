"""What a checkpoint takes of each GPU: the published figures, arithmetic by hand, plans against artifacts, budgets."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pairs
import pytest
import sparse
import variants
from test_cli import run, run_json

from phasefold.errors import CheckpointError, LoadError, PhasefoldError, UsageError
from phasefold.families import identify
from phasefold.formats.checkpoint import open_checkpoint
from phasefold.quantize.plan import make_plan
from phasefold.recipes import load
from phasefold.serving.deployment import Deployment
from phasefold.serving.size import Budgets, Gpus, Size, judge_budgets, kv_bytes, size, tokens_that_fit
from phasefold.serving.survey import Survey, survey, survey_plan

GLM, KIMI = "zai-org/GLM-5.2-FP8", "moonshotai/Kimi-K2.6"
H200 = 141_000_000_000
GIB = 1 << 30
TINY = variants.EXAMPLES


@pytest.fixture(scope="module", autouse=True)
def _no_collector() -> Iterator[None]:
    """As the command line does: a survey is a million small values without a cycle."""
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.fixture(scope="module")
def glm(module_path: Path) -> Path:
    sparse.write(GLM, module_path / "glm")
    return module_path / "glm"


@pytest.fixture(scope="module")
def glm_fp8(glm: Path) -> Survey:
    return survey(glm)


@pytest.fixture(scope="module")
def glm_int4(glm: Path) -> Survey:
    return planned(glm, "glm-decode-int4")


@pytest.fixture(scope="module")
def kimi(module_path: Path) -> Survey:
    sparse.write(KIMI, module_path / "kimi")
    return survey(module_path / "kimi")


def planned(folder: Path, recipe: str) -> Survey:
    return survey_plan(make_plan(open_checkpoint(folder), load(recipe)))


def on(runtime: str = "vllm", tp: int = 8, ep: int = 1, dp: int = 1, mtp: bool = False, **options: object) -> Gpus:
    return Gpus(Deployment(runtime, tp, ep, mtp=mtp), dp, **options)


# the five figures, each under what docs/size.md says


def test_figure_glm_fp8_a_gpu(glm_fp8: Survey) -> None:
    found = size(glm_fp8, on())
    assert found.total_bytes == 755_617_140_416
    assert f"{found.per_gpu_bytes / GIB:.1f}" == "88.2"
    assert f"{size(glm_fp8, on(count='even')).per_gpu_bytes / GIB:.1f}" == "86.8"  # neither without the MTP layer
    assert f"{size(glm_fp8, on(mtp=True, count='even')).per_gpu_bytes / GIB:.1f}" == "88.0"  # nor with it


def test_figure_glm_int4_a_gpu_is_the_checkpoint_by_eight(glm_int4: Survey) -> None:
    found = size(glm_int4, on(mtp=True, count="even"))
    assert found.per_gpu_bytes * 8 == found.total_bytes == 450_904_205_312
    assert f"{found.per_gpu_bytes / GIB:.1f}" == "52.5"
    # what runtimes hold is more
    assert f"{size(glm_int4, on()).per_gpu_bytes / GIB:.1f}" == "54.4"
    assert f"{size(glm_int4, on(mtp=True)).per_gpu_bytes / GIB:.1f}" == "55.2"


@pytest.mark.parametrize(("kv", "row", "tokens"), [("bf16", 70_272, "686k"), ("fp8_e4m3", 35_136, "1372k")])
def test_figures_kimi_tokens(kimi: Survey, kv: str, row: int, tokens: str) -> None:
    found = size(kimi, on(kv=kv, count="even", memory=H200))
    assert (found.kv_bytes_per_token, f"{found.kv_tokens / 1000:.0f}k") == (row, tokens)


def test_figure_glm_int4_tokens(glm_int4: Survey) -> None:
    found = size(glm_int4, on("sglang", mtp=True, kv="fp8_e4m3", count="even", memory=H200))
    assert (found.kv_bytes_per_token, f"{found.kv_tokens / 1e6:.2f}M") == (55_932, "1.18M")


# KV cache


@pytest.mark.parametrize(
    ("model", "runtime", "rows"),
    [
        (KIMI, "vllm", (70_272, 35_136, 40_016)),
        ("zai-org/GLM-5.1", "vllm", (100_152, 55_224, 61_464)),
        (GLM, "vllm", (92_628, 47_700, 53_940)),
        (GLM, "sglang", (100_152, 55_224, 61_464)),
        ("zai-org/GLM-4.7-Flash", "vllm", (54_144, 27_072, 30_832)),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", "vllm", (8_064, 4_032, 4_592)),
    ],
)
@pytest.mark.parametrize("tp", [1, 8])
def test_latent_rows_are_whole_on_each_rank(model: str, runtime: str, rows: tuple[int, ...], tp: int) -> None:
    found = identify(sparse.config_of(model))
    layouts = ("bf16", "fp8_e4m3", "fp8_ds_mla")
    assert tuple(kv_bytes(found, on(runtime, tp, kv=layout)) for layout in layouts) == rows


def test_key_value_heads_are_cut_down_to_one() -> None:
    model = identify(sparse.config_of("zai-org/GLM-4.7"))  # 92 layers, 8 heads of 128
    assert [kv_bytes(model, on(tp=tp)) for tp in (1, 2, 8, 16)] == [376_832, 188_416, 47_104, 47_104]
    assert kv_bytes(model, on(tp=8, dp=8)) == 376_832
    assert kv_bytes(model, on(tp=1, mtp=True)) == 376_832 // 92 * 93
    with pytest.raises(LoadError, match="no fp8_ds_mla rows; its cache is bf16 or fp8_e4m3"):
        kv_bytes(model, on(kv="fp8_ds_mla"))


def test_tokens_by_hand() -> None:
    gpus = on(tp=4, dp=2, memory=1_000, fraction=0.5, reserve=100)
    assert tokens_that_fit(190, 20, gpus) == 10 * 2  # (500 - 190 - 100) / 20, in each of two groups
    assert tokens_that_fit(401, 20, gpus) == 0
    assert tokens_that_fit(0, 20, on()) is None


# weights


def test_a_gpu_by_hand() -> None:
    """tiny-glm5: 4 layers, one dense; an indexer where indexer_types says so; BF16 but for the router's F32 bias."""
    seen = survey(TINY / "tiny-glm5")
    config = seen.config
    full = config["indexer_types"].count("full")
    dense = config["first_k_dense_replace"]
    assert (config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]) == (256, 1024, 4)
    a_layer = 2 * 256 + 128 + 128 + 128 * 256 + 160 * 256  # norms, q_a, kv_a
    an_indexer = 4 * 64 * 128 + 64 * 256 + 2 * 64 + 4 * 256
    whole = 2 * (4 * a_layer + full * an_indexer + 256 + (4 - dense) * 16 * 256)
    bias = next(e.parts[0].nbytes for e in seen.entries if e.spec.role == "router.bias") * (4 - dense)
    cut = 2 * 1024 * 256 + 4 * (256 * 128 + 256 * 128 + 256 * 128)  # embedding and head; q_b, kv_b, o
    cut = 2 * (cut + dense * 3 * 512 * 256 + (4 - dense) * 17 * 3 * 128 * 256)
    for tp, ep in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4)):
        found = size(seen, on("sglang", tp, ep))
        assert found.replicated_bytes == whole + bias
        assert found.per_gpu_bytes == whole + bias + cut // tp, (tp, ep)
    assert size(seen, on("vllm", 1)).per_gpu_bytes == whole + bias + cut == size(seen, on("vllm", 1)).total_bytes


def all_ranks(found: Size, tp: int) -> bool:
    """The ranks together hold everything once, and what is replicated once more for each rank but the first."""
    return found.per_gpu_bytes * tp == found.loaded_bytes + (tp - 1) * found.replicated_bytes


@pytest.mark.parametrize(
    ("base", "kind", "tp"),
    [("tiny-kimi", "bf16", 4), ("tiny-kimi", "int4", 2), ("tiny-glm4", "bf16", 2), ("tiny-glm4", "fp8-channel", 2),
     ("tiny-glm5", "fp8-block", 2), ("tiny-kimi", "k25", 2), ("tiny-kimi", "mxfp4", 2), ("tiny-glm5", "mtp", 4)],
)  # fmt: skip
def test_ranks_add_up(tmp_path: Path, base: str, kind: str, tp: int) -> None:
    folder = TINY / base if kind == "bf16" else variants.variant(kind, base, tmp_path / "source")
    seen = survey(folder)
    found = size(seen, on(tp=tp))
    assert found.replicated_bytes > 0 and all_ranks(found, tp)
    assert found.total_bytes == sum(stored.nbytes for stored in open_checkpoint(folder).tensors.values())
    if kind in ("bf16", "k25"):  # experts without sizes and scales that their ranks repeat
        assert size(seen, on(tp=tp, ep=tp)).per_gpu_bytes == found.per_gpu_bytes


def test_few_key_value_heads_are_held_by_several_ranks() -> None:
    seen = survey(TINY / "tiny-glm4")
    assert seen.config["num_key_value_heads"] == 2
    found = {tp: size(seen, on(tp=tp)).roles["attention.k"].per_gpu for tp in (1, 2, 4)}
    assert found[1] == 2 * found[2] == 2 * found[4] == 4 * 2 * 32 * 256 * 2


def test_groups_of_attention_hold_it_whole() -> None:
    seen = survey(TINY / "tiny-kimi")
    cut, grouped = size(seen, on("sglang", 4)), size(seen, on("sglang", 4, dp=2))
    for role in ("attention.q_b", "attention.o", "embed"):
        assert grouped.roles[role].per_gpu == 2 * cut.roles[role].per_gpu
    for role in ("routed_expert", "lm_head", "shared_expert", "router"):
        assert grouped.roles[role].per_gpu == cut.roles[role].per_gpu
    engines = size(seen, on("vllm", 4, 4, dp=2))  # an engine for each group: only experts lie over all
    assert engines.roles["lm_head"].per_gpu == 2 * cut.roles["lm_head"].per_gpu
    assert engines.roles["routed_expert"].per_gpu == cut.roles["routed_expert"].per_gpu


def test_the_mtp_layer_is_loaded_or_not(tmp_path: Path) -> None:
    seen = survey(variants.variant("mtp", "tiny-glm4", tmp_path / "source"))
    without, loaded = size(seen, on(tp=2)), size(seen, on(tp=2, mtp=True))
    assert without.total_bytes == loaded.total_bytes == loaded.loaded_bytes > without.loaded_bytes
    assert without.roles["mtp.eh_proj"].per_gpu == 0 < loaded.roles["mtp.eh_proj"].per_gpu
    assert loaded.kv_bytes_per_token * 4 == without.kv_bytes_per_token * 5
    absent = size(survey(TINY / "tiny-glm4"), on(tp=2, mtp=True))
    assert absent.notes == ("no MTP layer is there to be loaded",)


def test_a_vocabulary_is_padded_before_it_is_cut(tmp_path: Path) -> None:
    tensors, config = variants.load(TINY / "tiny-glm4")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:1000].clone()
    folder = variants.save(tmp_path / "source", tensors, config | {"vocab_size": 1000})
    whole, cut = (size(survey(folder), on(tp=tp)).roles["embed"] for tp in (1, 4))
    assert (whole.per_gpu, cut.per_gpu) == (1000 * 256 * 2, 1024 // 4 * 256 * 2)  # to a multiple of 64


# plans, files, faults


@pytest.mark.parametrize(("base", "recipe"), [("tiny-kimi", "kimi-decode-int4"), ("tiny-glm5", "glm-decode-int4-fp8")])
def test_a_plan_is_as_large_as_what_it_writes(tmp_path: Path, base: str, recipe: str) -> None:
    artifact = pairs.folded(TINY / base, recipe, tmp_path / "out")
    before, after = planned(TINY / base, recipe), survey(artifact)
    for gpus in (on(tp=2, memory=H200), on("sglang", 4, 2, mtp=True, memory=H200, kv="fp8_ds_mla")):
        assert size(before, gpus) == size(after, gpus)
    words = ("--tp", "2", "--gpu-memory", "141GB")
    from_plan = run_json("size", str(TINY / base), "--recipe", recipe, *words)
    assert from_plan == run_json("size", str(artifact), *words)
    files = sum(path.stat().st_size for path in artifact.glob("*.safetensors"))
    assert 0 < files - from_plan["total_bytes"] < 2**20  # headers


def test_what_is_not_all_there_has_no_size(tmp_path: Path) -> None:
    tensors, config = variants.load(TINY / "tiny-glm4")
    name = "model.layers.1.self_attn.o_proj.weight"
    folder = variants.save(tmp_path / "less", {n: t for n, t in tensors.items() if n != name}, config)
    with pytest.raises(CheckpointError, match=rf"^{name} missing: the config calls for it"):
        size(survey(folder), on(tp=2))
    more = variants.save(tmp_path / "more", {**tensors, "odd.thing": tensors["model.norm.weight"].clone()}, config)
    found = size(survey(more), on(tp=2))
    assert found.roles["(unknown)"].stored == 512 and found.roles["(unknown)"].per_gpu == 0
    assert found.notes[0].startswith("odd.thing: the config does not call for it")
    shard = next(iter(sorted(folder.glob("*.safetensors"))))
    shard.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        size(survey(folder), on(tp=2))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tp": 3}, LoadError, "num_attention_heads is 8, not divisible by 3 ranks"),
        ({"tp": 8, "ep": 3}, UsageError, "ep 3 must divide tp 8"),
        ({"tp": 8, "ep": 2}, UsageError, "ep 2 with tp 8: vLLM"),
        ({"tp": 8, "dp": 3}, UsageError, "dp 3 must divide tp 8"),
        ({"kv": "fp8"}, UsageError, "'fp8' is no layout"),
        ({"count": "odd"}, UsageError, "'odd' is unknown"),
        ({"fraction": 1.1}, UsageError, "memory fraction 1.1 is no share"),
        ({"fraction": 0.0}, UsageError, "memory fraction 0.0 is no share"),
    ],
)
def test_ranks_and_options_that_cannot_be(options: dict, error: type[PhasefoldError], words: str) -> None:
    with pytest.raises(error, match=words):
        size(survey(TINY / "tiny-glm4"), on(**options))


def test_budgets_hold_at_the_limit(tmp_path: Path) -> None:
    found = size(survey(TINY / "tiny-glm4"), on(tp=2, memory=H200))
    total, a_gpu, tokens = found.total_bytes, found.per_gpu_bytes, found.kv_tokens
    assert all(budget.ok for budget in judge_budgets(found, Budgets(total, a_gpu, tokens)))
    assert not any(budget.ok for budget in judge_budgets(found, Budgets(total - 1, a_gpu - 1, tokens + 1)))
    assert judge_budgets(found, Budgets()) == []
    with pytest.raises(UsageError, match="known with --gpu-memory only"):
        judge_budgets(size(survey(TINY / "tiny-glm4"), on(tp=2)), Budgets(kv_tokens=1))


# the command line


def test_exit_codes_and_reports(tmp_path: Path) -> None:
    source, table, cases = str(TINY / "tiny-glm4"), tmp_path / "size.md", tmp_path / "size.xml"
    files = ("--markdown", str(table), "--junit", str(cases))
    limits = ("--max-total", "1GiB", "--max-per-gpu", "1kB", "--min-kv-tokens", "9.5M")
    words = ("size", source, "--tp", "2", "--gpu-memory", "8 GB", *limits, *files)
    done = run(*words, code=3)
    first, second = done.stderr.splitlines()
    assert first.startswith("phasefold: max-per-gpu: ") and first.endswith(" bytes over")
    assert second.startswith("phasefold: min-kv-tokens: ") and second.endswith(" too few")
    assert "max-total: holds" in done.stdout and "max-per-gpu: does NOT hold" in done.stdout
    assert "| `--max-per-gpu` | 0.98 KiB |" in table.read_text() and "**does not hold**" in table.read_text()
    tree = ElementTree.parse(cases).getroot()
    assert tree.tag == "testsuites" and (tree.get("tests"), tree.get("failures")) == ("3", "2")
    found = {case.get("name"): [f.get("message") for f in case] for case in tree.iter("testcase")}
    assert found == {
        "max-total": [],
        "max-per-gpu": [first.removeprefix("phasefold: ")],
        "min-kv-tokens": [second.removeprefix("phasefold: ")],
    }
    told = run_json(*words, code=3)
    assert told["within_budget"] is False and [budget["ok"] for budget in told["budgets"]] == [True, False, False]
    assert told["budgets"][0]["reason"] is None and told["budgets"][2]["limit"] == 9_500_000
    within = run_json("size", source, "--max-total", "1GiB")
    assert within["within_budget"] is True and within["kv_tokens"] is None
    assert within["total_bytes"] == within["per_gpu_bytes"] == sum(role["bytes"] for role in within["roles"].values())


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--min-kv-tokens", "5"], 2, "--min-kv-tokens: only with --gpu-memory"),
        (["--gpu-memory", "141GB", "--min-kv-tokens", "many"], 2, "'many' is no number of tokens"),
        (["--gpu-memory", "141"], 2, "--gpu-memory: '141' is no size; write 5GB or 4GiB"),
        (["--max-per-gpu", "0GiB"], 2, "--max-per-gpu: '0GiB' is no size"),
        (["--reserve", "1GB"], 2, "only with --gpu-memory"),
        (["--tp", "8", "--ep", "3"], 2, "ep 3 must divide tp 8"),
        (["--tp", "3"], 1, "not divisible by 3 ranks"),
        (["--stats", "stats"], 2, "--stats: only with --recipe"),
        (["--recipe", "no-such"], 2, "no recipe 'no-such'"),
        (["--markdown", "/no/such/place.md"], 1, "/no/such/place.md: cannot be written"),
        (["--kv-dtype", "fp8_ds_mla"], 1, "glm4_moe has no fp8_ds_mla rows"),
    ],
)
def test_wrong_usage_is_one_line(words: list[str], code: int, said: str) -> None:
    done = run("size", str(TINY / "tiny-glm4"), *words, code=code)
    assert said in done.stderr and done.stderr.count("\n") == 1 and not done.stdout


def test_a_folder_that_is_none() -> None:
    done = run("size", "no/such/folder", code=1)
    assert done.stderr.count("\n") == 1 and "no/such/folder: cannot be read" in done.stderr


def test_nothing_heavy_is_imported() -> None:
    words = ["-m", "phasefold", "size", str(TINY / "tiny-glm5"), "--recipe", "bf16", "--gpu-memory", "141GB"]
    command = [sys.executable, "-X", "importtime", *words]
    imported = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    names = {line.rpartition("|")[2].strip() for line in imported.splitlines()}
    assert "phasefold.serving.size" in names and not {"torch", "numpy", "safetensors", "transformers"} & names
