"""check, load, pair and launch as others script against them: keys, exit codes, sentences."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import broken
import pytest
import variants
from safetensors.torch import load_file, save_file
from test_cli import run, run_json

from phasefold.cli.load import _hint, _without
from phasefold.cli.serving import _simulated
from phasefold.formats.checkpoint import INDEX
from phasefold.serving.deployment import Deployment
from phasefold.serving.runtimes.load import Loaded

SOURCE = str(variants.EXAMPLES / "tiny-glm4")


@pytest.fixture(scope="module")
def pair(module_path: Path) -> tuple[str, str]:
    folder = module_path / "pair"
    for name, recipe in (("prefill", "glm-prefill-fp8"), ("decode", "glm-decode-int4")):
        run("convert", SOURCE, str(folder / name), "--recipe", recipe)
    return str(folder / "prefill"), str(folder / "decode")


def test_check(pair: tuple[str, str]) -> None:
    found = run_json("check", pair[1], "--no-shared-fusion")
    assert found == {"ok": True, "findings": [], "largest_tp": {"vllm": 2, "sglang": 2}}
    assert run_json("check", pair[1], "--runtime", "vllm", "--tp", "2")["largest_tp"] == {"vllm": 2}
    found = run_json("check", pair[1], "--no-shared-fusion", "--tp", "8", code=3)
    assert not found["ok"]
    assert {(f["rule"], f["severity"], f["runtime"]) for f in found["findings"]} >= {
        ("T1", "error", "vllm"),
        ("T1", "error", "sglang"),  # half a group is no tile of its kernels either
    }
    assert all(f.keys() == {"rule", "severity", "runtime", "subject", "message"} for f in found["findings"])
    said = run("check", pair[1], code=3).stdout
    assert "S6 SGLang: loads it wrong, without an error" in said and "--disable-shared-experts-fusion" in said
    assert "TP2" in said and "NOT ok, 1 finding" in said
    assert "once S6 is mended: loads up to vLLM TP2, SGLang TP2 (experts cut over" in said


def test_largest_tp_counts_with_the_experts_parallelism_that_is_given(pair: tuple[str, str]) -> None:
    """Experts of 128 in groups of 32 and in tiles of 64; eight heads."""
    words = ["check", pair[1], "--no-shared-fusion", "--tp", "4"]
    assert run_json(*words, code=3)["largest_tp"] == {"vllm": 2, "sglang": 2}
    assert run_json(*words, "--ep", "4")["largest_tp"] == {"vllm": 8, "sglang": 8}
    assert run_json(*words, "--ep", "2")["largest_tp"] == {"vllm": 4, "sglang": 4}
    assert "loads up to vLLM TP8, SGLang TP8 (experts whole on each rank)" in run(*words, "--ep", "4").stdout
    assert "(experts spread with EP 2)" in run(*words, "--ep", "2").stdout
    said = run(*words, code=3).stdout  # a finding of the cut itself
    assert "\nloads up to vLLM TP2, SGLang TP2 (experts cut over the ranks)" in said and "once" not in said


def test_a_checkpoint_that_no_number_of_ranks_serves(tmp_path: Path) -> None:
    artifact = str(broken.make_base("kimi-g128", tmp_path))
    said = run("check", artifact, code=3).stdout
    assert "loads with vLLM at no TP, SGLang up to TP1 (experts cut over the ranks)" in said


def test_largest_tp_is_told_before_anything_is_written() -> None:
    planned = run_json("plan", SOURCE, "--recipe", "glm-decode-int4")
    assert planned["largest_tp"] == {"vllm": 2, "sglang": 2}
    assert "vLLM TP2, SGLang TP2" in run("plan", SOURCE, "--recipe", "glm-decode-int4").stdout


def test_check_tells_a_broken_checkpoint_from_an_unreadable_one(pair: tuple[str, str], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pair[1], tmp_path / "broken"))
    shard = next(folder.glob("*.safetensors"))
    tensors = load_file(shard)
    tensors.pop("model.layers.1.mlp.experts.3.up_proj.weight_packed")
    save_file(tensors, shard)
    found = run_json("check", str(folder), "--no-shared-fusion", code=3)
    assert {"C1", "C2"} & {f["rule"] for f in found["findings"]}
    assert run("check", str(tmp_path), code=1).stderr.count("\n") == 1


def test_check_says_what_it_does_not_know(pair: tuple[str, str]) -> None:
    (found,) = run_json("check", pair[0], "--sm", "80")["findings"]
    assert (found["rule"], found["severity"], found["subject"]) == ("K5", "warning", "--sm 80")
    (found,) = run_json("check", pair[0], "--runtime", "sglang", "--attention-backend", "fa9", code=3)["findings"]
    assert found["rule"] == "K5" and found["subject"] == "--attention-backend fa9"


def test_pair(pair: tuple[str, str]) -> None:
    assert run_json("pair", *pair)["ok"] is True
    said = run("pair", *pair).stdout
    assert said.endswith("whether each of them loads is for `check` and `load` to say\n")
    assert "whether each" not in run("pair", *pair, "--kv-dtype", "fp8_ds_mla", code=3).stdout
    served = run_json("pair", *pair, "--run", "--source", SOURCE, "--tokens", "8", "--prompt", "Return the")
    assert served["ok"] and len(served["text"]) == 1 and served["errors"] == []
    assert (
        0.5 < served["top1_agreement"] <= 1 and 0 <= served["mean_kl"] < 0.1 and 0 <= served["source"]["mean_kl"] < 0.1
    )
    assert served["counters"]["checks"] > 0 and served["counters"]["mismatches"] == 0
    strange = str(variants.EXAMPLES / "tiny-glm5")
    found = run_json("pair", pair[0], strange, "--run", code=3)
    assert "D1" in {f["rule"] for f in found["findings"]} and "text" not in found
    assert "not served: D1" in run("pair", pair[0], strange, "--run", code=3).stderr


def test_rows_of_both_pools_are_told(pair: tuple[str, str]) -> None:
    said = run("pair", *pair, "--run", "--kv-dtype", "fp8_e4m3", "--tokens", "2", "--prompt", "x").stdout
    assert "KV rows: prefill fp8_e4m3, 512 bytes a token; decode fp8_e4m3, 512 bytes a token" in said


@pytest.fixture(scope="module")
def sparse(module_path: Path) -> tuple[str, str]:
    """GLM-5's attention: the runtimes keep rows of their own forms."""
    folder = module_path / "sparse"
    for name, recipe in (("prefill", "glm-prefill-fp8"), ("decode", "glm-decode-int4")):
        run("convert", str(variants.EXAMPLES / "tiny-glm5"), str(folder / name), "--recipe", recipe)
    return str(folder / "prefill"), str(folder / "decode")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--runtime", "sglang", "--kv-dtype", "fp8_ds_mla"], "not served: D2 SGLang: refuses to load: kv cache"),
        (["--runtime", "vllm", "--kv-dtype", "fp8_e4m3"], "not served: D2 vLLM: refuses to load: kv cache"),
        (["--kv-dtype", "fp8_e4m3"], "not served: D2 vLLM: refuses to load: kv cache; --runtime sglang is served"),
    ],
)
def test_pools_that_do_not_start_are_not_served(sparse: tuple[str, str], words: list[str], said: str) -> None:
    done = run("pair", *sparse, "--run", *words, code=3)
    assert done.stderr == f"{said}\n"
    assert "does not start" in done.stdout and "against" not in done.stdout  # findings, and no table of agreement
    found = run_json("pair", *sparse, "--run", *words, code=3)
    assert {f["rule"] for f in found["findings"]} == {"D2"} and found.keys() == {"ok", "findings"}


@pytest.mark.parametrize(("sm", "form", "kept"), [("90", "fp8_ds_mla", 196), ("100", "fp8_e4m3", 160)])
def test_served_rows_are_those_that_the_runtime_keeps(sparse: tuple[str, str], sm: str, form: str, kept: int) -> None:
    """SGLang's flashmla_kv on Hopper writes scales into its rows, trtllm on Blackwell plain e4m3, of one --kv-dtype."""
    words = "--runtime", "sglang", "--kv-dtype", "fp8_e4m3", "--sm", sm, "--tokens", "2", "--prompt", "x"
    served = run_json("pair", *sparse, "--run", *words)
    config = json.loads((Path(sparse[0]) / "config.json").read_text())
    layers, index = config["num_hidden_layers"], config["index_head_dim"] + 4
    assert served["kv"] == {"prefill": form, "decode": form}
    assert kept * layers < served["kv_bytes_per_token"]["decode"] <= (kept + index) * layers


def test_rows_that_differ_between_runtimes_are_told(sparse: tuple[str, str], tmp_path: Path) -> None:
    """A head of 512 + 64 is served by vLLM too, in plain rows."""
    config = json.loads((Path(sparse[0]) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}))
    save_file({}, tmp_path / "model.safetensors")
    pools = [Deployment(name, kv_dtype="fp8_e4m3") for name in ("vllm", "sglang")]
    form, said = _simulated(tmp_path, pools)
    assert form == "fp8_e4m3" and "as vLLM's FLASHINFER_MLA_SPARSE_SM90 writes them (512 + 64 e4m3)" in said
    assert said.endswith(
        "SGLang's flashmla_kv writes 512 e4m3, 4 float32 scales, 64 bfloat16, simulated with --runtime sglang"
    )
    assert _simulated(tmp_path, pools[::-1])[0] == "fp8_ds_mla"
    assert _simulated(tmp_path, pools[1:]) == ("fp8_ds_mla", "")
    assert _simulated(tmp_path, [Deployment(name, kv_dtype="bfloat16") for name in ("vllm", "sglang")]) == ("bf16", "")


def _config_group_of_64(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64
    (folder / "config.json").write_text(json.dumps(config))


def _missing_expert(folder: Path) -> None:
    tensors, config = variants.load(folder)
    for suffix in ("packed", "scale", "shape"):
        tensors.pop(f"model.layers.1.mlp.experts.3.up_proj.weight_{suffix}")
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    variants.save(folder, tensors, config)


@pytest.mark.parametrize(("damage", "rule"), [(_config_group_of_64, "P2"), (_missing_expert, "C3")])
def test_a_pair_with_an_artifact_that_does_not_load_is_not_served(
    pair: tuple[str, str], tmp_path: Path, damage: Callable[[Path], None], rule: str
) -> None:
    folder = Path(shutil.copytree(pair[1], tmp_path / "broken"))
    damage(folder)
    assert run_json("pair", pair[0], str(folder))["ok"]  # they belong together; check tells the rest
    done = run("pair", pair[0], str(folder), "--run", code=3)
    assert f"not served: {rule}" in done.stderr and done.stderr.count("\n") == 1
    assert f"{rule} " in done.stdout and "decode: model.layers.1.mlp.experts" in done.stdout
    found = run_json("pair", pair[0], str(folder), "--run", code=3)
    assert {f["rule"] for f in found["findings"]} == {rule} and "text" not in found


def test_what_cannot_be_opened_points_to_check(pair: tuple[str, str], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pair[1], tmp_path / "broken"))
    index = json.loads((folder / INDEX).read_text())
    index["metadata"]["total_size"] += 1
    (folder / INDEX).write_text(json.dumps(index))
    for words in (["pair", pair[0], str(folder)], ["launch", pair[0], str(folder), "--runtime", "vllm"],
                  ["load", str(folder)]):  # fmt: skip
        assert "`phasefold check` tells all that is wrong with it" in run(*words, code=1).stderr
    found = run_json("check", str(folder), "--runtime", "vllm")
    (finding,) = found["findings"]
    assert finding["severity"] == "warning" and "phasefold's other verbs" in finding["message"]


@pytest.mark.parametrize("runtime", ["vllm", "sglang"])
def test_launch(pair: tuple[str, str], runtime: str) -> None:
    made = run_json("launch", *pair, "--runtime", runtime, "--tp", "2", "--mount", "/models/glm")
    for pool in (made["prefill"], made["decode"]):
        assert "/models/glm" in pool and "--kv-cache-dtype" in pool
    assert ("--disable-shared-experts-fusion" in made["decode"]) == (runtime == "sglang")
    assert all(note.keys() == {"pool", "flag", "reason"} for note in made["notes"])
    refused = run_json("launch", *pair, "--runtime", runtime, "--tp", "8", code=3)
    assert refused["prefill"] == [] and refused["decode"] == [] and refused["findings"]
    assert "# prefill" in run("launch", *pair, "--runtime", runtime).stdout
    flag = "--enable-expert-parallel" if runtime == "vllm" else "--ep-size"
    wider = ["launch", *pair, "--runtime", runtime, "--decode-tp", "2"]
    assert flag not in run_json(*wider, "--decode-ep", "2")["prefill"]
    assert flag in run_json(*wider, "--decode-ep", "2")["decode"]
    assert "must divide" in run(*wider, "--ep", "2", code=2).stderr  # and is not dropped in silence


def test_load_in_the_reference_runtime(pair: tuple[str, str]) -> None:
    done = run_json("load", pair[1], "--runtime", "reference", "--prompt", "Return the", "--tokens", "4")
    assert done["ok"] and done["text"] and not done["missing"] and not done["unexpected"]
    assert done["version"].startswith("transformers ") and done["peak_rss_bytes"] > 100e6
    said = run("load", pair[1], "--tokens", "1").stdout
    assert f"load of {pair[1]} as Glm4MoeForCausalLM" in said and " tensors, " in said and "nothing" not in said
    assert ", 0 tensors" not in said and "real of" not in said


def test_a_load_that_fails_points_to_check(pair: tuple[str, str], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pair[1], tmp_path / "broken"))
    _missing_expert(folder)
    said = run("load", str(folder), "--runtime", "transformers", "--tokens", "1", code=3).stdout
    assert f"`phasefold check {folder}` tells what the load rules find" in said
    shared = Loaded("sglang", mode="dry", unexpected=["model.layers.1.mlp.shared_experts.up_proj.weight"])
    assert "--no-shared-fusion" in _hint("x", shared, fused=True)
    assert "`phasefold check x --runtime sglang`" in _hint("x", shared, fused=False)
    assert _hint("x", Loaded("vllm", mode="dry"), fused=True) == ""


def test_what_the_mode_that_it_came_to_does_not_use() -> None:
    """Without --mode only the runtime knows whether it will be dry: an option of the other mode is told afterwards."""
    asked = {"--prompt": "x", "--tp": 2, "--data": True}
    assert _without(asked, "vllm", ["dry", "real"]) == {}
    assert _without(asked, "vllm", ["dry"]) == {"--prompt": "x"}
    assert _without(asked, "sglang", ["real"]) == {"--data": True}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["check", "nowhere"], 1, "nowhere"),
        (["check", SOURCE, "--tp", "4", "--ep", "3"], 2, "must divide"),
        (["check", SOURCE, "--kv-dtype", "fp7"], 2, "fp7"),
        (["check", SOURCE, "--runtime", "ollama"], 2, "ollama"),
        (["pair", SOURCE, SOURCE, "--ep", "2"], 2, "must divide"),
        (["pair", SOURCE, SOURCE, "--prompt", "x", "--tokens", "5"], 2, "--prompt and --tokens: only for pair --run"),
        (["pair", SOURCE, SOURCE, "--source", SOURCE], 2, "--source: only for pair --run"),
        (["pair", SOURCE, SOURCE, "--device", "cpu"], 2, "--device: only for pair --run"),
        (["pair", SOURCE, SOURCE, "--run", "--kv-dtype", "fp8_e5m2"], 2, "no such rows"),
        (["pair", SOURCE, SOURCE, "--run", "--prompt", ""], 2, "--prompt '': is empty"),
        (["pair", SOURCE, SOURCE, "--run", "--tokens", "100000"], 2, "--tokens 100,000: this model has 2,048 pos"),
        (["pair", SOURCE, SOURCE, "--run", "--device", "nonsense"], 2, "device 'nonsense': this torch cannot use it"),
        (["load", "nowhere"], 1, "nowhere"),
        (["load", SOURCE, "--runtime", "reference", "--mode", "dry"], 2, "dry"),
        (["load", SOURCE, "--runtime", "reference", "--tp", "2"], 2, "--tp: without meaning for load --runtime ref"),
        (["load", SOURCE, "--runtime", "transformers", "--data", "--sm", "90"], 2, "--sm and --data: without meaning"),
        (["load", SOURCE, "--runtime", "vllm", "--mode", "dry", "--prompt", "x"], 2, "--prompt: without meaning"),
        (["load", SOURCE, "--runtime", "vllm", "--mode", "reference", "--tp", "2"], 2, "--tp: without meaning"),
        (["load", SOURCE, "--runtime", "vllm", "--no-shared-fusion"], 2, "--no-shared-fusion: without meaning"),
        (["load", SOURCE, "--runtime", "sglang", "--mode", "real", "--data"], 2, "--data: without meaning"),
        (["load", SOURCE, "--runtime", "sglang", "--kv-dtype", "fp7"], 2, "fp7"),
        (["pair", SOURCE, "nowhere"], 1, "nowhere"),
        (["launch", SOURCE, SOURCE], 2, "--runtime"),
        (["launch", SOURCE, SOURCE, "--runtime", "vllm", "--transfer", "pigeon"], 2, "pigeon"),
        (["launch", SOURCE, SOURCE, "--runtime", "vllm", "--mount", "model"], 2, "absolute path"),
        (["launch", SOURCE, SOURCE, "--runtime", "vllm", "--decode-host", "a b;c"], 2, "no address"),
        (["launch", SOURCE, SOURCE, "--runtime", "vllm", "--max-model-len", "99999999"], 2, "2,048 tokens"),
        (["launch", SOURCE, SOURCE, "--runtime", "vllm", "--tp", "4", "--ep", "2"], 2, "all ranks or none"),
    ],
)
def test_refusals(words: list[str], code: int, said: str) -> None:
    done = run(*words, code=code)
    assert said in done.stderr
    if code == 1 or "Usage:" not in done.stderr:
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("phasefold: ")


def test_json_is_all_that_stands_on_stdout(pair: tuple[str, str]) -> None:
    json.loads(run("load", pair[0], "--runtime", "reference", "--tokens", "2", "--json").stdout)
