"""check, load, pair and launch as others script against them: keys, exit codes, sentences."""

import json
import shutil
from pathlib import Path

import pytest
import variants
from safetensors.torch import load_file, save_file
from test_cli import run, run_json

SOURCE = str(variants.EXAMPLES / "tiny-glm4")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pair")
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
        ("T1", "silent", "sglang"),
    }
    assert all(f.keys() == {"rule", "severity", "runtime", "subject", "message"} for f in found["findings"])
    said = run("check", pair[1], code=3).stdout
    assert "S6 SGLang: loads it wrong, without an error" in said and "--disable-shared-experts-fusion" in said
    assert "TP2" in said and "NOT ok, 1 finding" in said


def test_largest_tp_is_told_before_anything_is_written() -> None:
    planned = run_json("plan", SOURCE, "--recipe", "glm-decode-int4")
    assert planned["largest_tp"] == {"vllm": 2, "sglang": 2}
    assert "vLLM TP2, SGLang TP2" in run("plan", SOURCE, "--recipe", "glm-decode-int4").stdout


def test_check_tells_a_broken_checkpoint_from_an_unreadable_one(pair: tuple[str, str], tmp_path: Path) -> None:
    broken = Path(shutil.copytree(pair[1], tmp_path / "broken"))
    shard = next(broken.glob("*.safetensors"))
    tensors = load_file(shard)
    tensors.pop("model.layers.1.mlp.experts.3.up_proj.weight_packed")
    save_file(tensors, shard)
    found = run_json("check", str(broken), "--no-shared-fusion", code=3)
    assert {"C1", "C2"} & {f["rule"] for f in found["findings"]}
    assert run("check", str(tmp_path), code=1).stderr.count("\n") == 1


def test_check_says_what_it_does_not_know(pair: tuple[str, str]) -> None:
    (found,) = run_json("check", pair[0], "--sm", "80")["findings"]
    assert (found["rule"], found["severity"], found["subject"]) == ("K5", "warning", "--sm 80")
    (found,) = run_json("check", pair[0], "--runtime", "sglang", "--attention-backend", "fa9", code=3)["findings"]
    assert found["rule"] == "K5" and "fa9" in found["message"]


def test_pair(pair: tuple[str, str]) -> None:
    assert run_json("pair", *pair)["ok"] is True
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
    assert "must divide" in run(*wider, "--ep", "2", code=1).stderr  # and is not dropped in silence


def test_load_in_the_reference_runtime(pair: tuple[str, str]) -> None:
    done = run_json("load", pair[1], "--runtime", "reference", "--prompt", "Return the", "--tokens", "4")
    assert done["ok"] and done["text"] and not done["missing"] and not done["unexpected"]
    assert done["version"].startswith("transformers ") and done["peak_rss_bytes"] > 100e6


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["check", "nowhere"], 1, "nowhere"),
        (["check", SOURCE, "--tp", "4", "--ep", "3"], 1, "must divide"),
        (["check", SOURCE, "--kv-dtype", "fp7"], 1, "fp7"),
        (["check", SOURCE, "--runtime", "ollama"], 2, "ollama"),
        (["pair", SOURCE, SOURCE, "--ep", "2"], 1, "must divide"),
        (["load", "nowhere"], 1, "nowhere"),
        (["load", SOURCE, "--runtime", "reference", "--mode", "dry"], 1, "dry"),
        (["pair", SOURCE, "nowhere"], 1, "nowhere"),
        (["launch", SOURCE, SOURCE], 2, "--runtime"),
        (["launch", SOURCE, SOURCE, "--runtime", "vllm", "--transfer", "pigeon"], 1, "pigeon"),
    ],
)
def test_refusals(words: list[str], code: int, said: str) -> None:
    done = run(*words, code=code)
    assert said in done.stderr
    if code == 1:
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("phasefold: ")


def test_json_is_all_that_stands_on_stdout(pair: tuple[str, str]) -> None:
    json.loads(run("load", pair[0], "--runtime", "reference", "--tokens", "2", "--json").stdout)
