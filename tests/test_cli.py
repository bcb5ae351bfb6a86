"""The command line as others script against it: keys, exit codes, one line for what is refused, a quick start."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sparse
import torch
import variants

from phasefold.families import identify

TINY = str(variants.EXAMPLES / "tiny-glm4")


def run(*words: str, code: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run([sys.executable, "-m", "phasefold", *words], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def run_json(*words: str, code: int = 0) -> dict:
    return json.loads(run(*words, "--json", code=code).stdout)


def test_inspect() -> None:
    found = run_json("inspect", TINY)
    assert found["family"] == "glm" and found["tensors"] == 209 and found["total_size"] == 13_205_696
    assert found["roles"]["routed_expert"] == {"tensors": 144, "bytes": 9_437_184, "format": "bf16"}
    assert found["formats"] == {"bf16": 206, "f32": 3} and found["parameters"] == 6_602_800
    assert found["backend"].startswith(("native", "torch"))
    assert "routed_expert" in run("inspect", TINY).stdout


def test_recipes() -> None:
    found = run_json("recipes")
    assert all(item.keys() == {"name", "phase", "families", "summary"} for item in found)
    assert {"glm-prefill-fp8", "glm-decode-int4", "glm-decode-int4-g128", "glm-decode-int4-fp8", "kimi-prefill-fp8",
            "kimi-decode-int4", "bf16"} <= {item["name"] for item in found}  # fmt: skip
    assert "glm-decode-int4" in run("recipes").stdout


def test_plan_convert_verify(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    planned = run_json("plan", TINY, "--recipe", "glm-decode-int4")
    assert planned["units"] == {"copied": 65, "repacked": 0, "folded": 0, "quantized": 144, "added": 0, "dropped": 0}
    said = run("plan", TINY, "--recipe", "glm-decode-int4").stdout
    assert f" tensors in {planned['shards']} shard\n" in said and " bytes (6." in said and " MiB), " in said
    assert {"output_bytes", "tensors", "shards", "digest"} <= planned.keys()
    made = run_json("convert", TINY, out, "--recipe", "glm-decode-int4", "--workers", "2", "--device", "cpu")
    assert {key: made[key] for key in planned if key != "roles"} == {k: v for k, v in planned.items() if k != "roles"}
    assert made.keys() >= {"wall_seconds", "cpu_seconds", "peak_rss_bytes", "source_bytes", "resumed_shards", "backend"}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == planned["output_bytes"] and len(index["weight_map"]) == planned["tensors"]
    checked = run_json("verify", out, "--source", TINY)
    assert checked["ok"] is True and checked["problems"] == []
    assert 0.05 < checked["mean_relative_error"]["routed_expert"] < 0.1
    assert checked["worst"]["tensor"] and 0 < checked["worst"]["relative_error"] < 0.1
    again = run("convert", TINY, out, "--recipe", "glm-decode-int4")
    assert "nothing to do" in again.stdout
    assert "phasefold.json" in run("verify", TINY, code=3).stdout
    (tmp_path / "out" / "config.json").write_text("{}")
    assert run_json("verify", out, code=3)["ok"] is False


def test_human_output_fits_what_happened(tmp_path: Path) -> None:
    assert "55% of 13,205,696" in run("plan", TINY, "-r", "glm-prefill-fp8").stdout
    text = run("convert", TINY, str(tmp_path / "out"), "-r", "glm-prefill-fp8").stdout
    assert "routed_expert" in text and "fp8-channel" in text and "mean error" in text and "exact" in text
    assert "ok" in run("verify", str(tmp_path / "out"), "--source", TINY).stdout


def test_a_recipe_by_path_and_mtp(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('families = ["glm"]\n[[rule]]\nroles = ["routed_expert"]\nformat = "int4-g64"\n')
    assert run_json("plan", TINY, "--recipe", str(recipe))["recipe"] == "mine"
    assert "no MTP layer" in run("plan", TINY, "--recipe", str(recipe), "--mtp", "drop", code=1).stderr
    assert "--mtp" in run("plan", TINY, "--recipe", str(recipe), "--mtp", "maybe", code=2).stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["plan", "nowhere", "--recipe", "bf16"], 1, "nowhere: no such folder"),
        (["plan", TINY, "--recipe", "nothing"], 2, "no recipe 'nothing'; there are bf16, "),
        (["plan", TINY, "--recipe", "nothing.toml"], 2, "no recipe 'nothing.toml': there is no such file"),
        (["plan", TINY, "--recipe", "kimi-decode-int4"], 1, "recipe for kimi"),
        (["convert", TINY, "out", "--recipe", "bf16", "--device", "cuda:99"], 1, "device cuda:99: "),
        (["convert", TINY, "out", "--recipe", "bf16", "--device", "tpu"], 2, "device 'tpu': no such device"),
        (["convert", TINY, "out", "--recipe", "bf16", "--device", "cuda:0,cuda:0"], 2, "names a card twice"),
        (["convert", TINY, "out", "-r", "bf16", "--device", "cpu", "--device-memory", "1GB"], 2, "only with a card"),
        (["verify", "nowhere"], 1, "nowhere: no such folder"),
        (["verify", TINY, "--source", "nowhere"], 1, "nowhere: no such folder"),
        (["plan", "x" * 5000, "--recipe", "bf16"], 1, "File name too long"),
        (["convert", TINY, "x" * 300, "--recipe", "bf16"], 1, "File name too long"),
        (["plan", TINY, "--recipe", "bf16", "--shard-size", "9" * 400 + "GB"], 2, "is no size"),
        (["convert", TINY, "out", "--recipe", "bf16", "--workers", "100000"], 2, "--workers"),
        (["plan", TINY], 2, "--recipe"),
        (["convert", TINY, "out", "--recipe", "bf16", "--workers", "0"], 2, "--workers"),
        (["plan", TINY, "--recipe", "bf16", "--shard-size", "much"], 2, "much"),
        (["frobnicate"], 2, "frobnicate"),
    ],
)
def test_refusals(words: list[str], code: int, said: str) -> None:
    done = run(*words, code=code)
    assert said in done.stderr
    if code == 1:
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("phasefold: ")


@pytest.mark.parametrize("text", ["[" * 6000, "a = " + "9" * 5000, "\xff", "families = 3"])
def test_hostile_recipes_are_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(text.encode("latin-1"))
    said = run("plan", TINY, "--recipe", str(path), code=1).stderr
    assert "mine.toml" in said and said.count("\n") == 1


def test_paths_that_are_no_places(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for words in (["inspect", str(tmp_path / "loop")], ["convert", TINY, str(tmp_path / "loop"), "-r", "bf16"]):
        assert run(*words, code=1).stderr.count("\n") == 1
    odd = os.path.join(os.fsencode(tmp_path), b"caf\xe9")
    shutil.copytree(TINY, os.fsdecode(odd))
    command = [sys.executable, "-m", "phasefold", "inspect", odd]
    assert b"caf" in subprocess.run(command, capture_output=True, check=True).stdout


def test_hostile_names_stay_one_printable_line(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TINY, tmp_path / "source"))
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"lm_head.weight"', '"lm\\ud800\\n\\u001b[31mhead.weight"'))
    said = run("inspect", str(folder), code=1).stderr
    assert said.count("\n") == 1 and "\x1b" not in said


@pytest.mark.parametrize("words", [["--help"], ["recipes"], ["inspect", TINY], ["plan", TINY, "--recipe", "bf16"]])
def test_quick_verbs_import_nothing_heavy(words: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "phasefold", *words]
    imported = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    names = {line.rpartition("|")[2].strip() for line in imported.splitlines()}
    assert "phasefold.cli" in names and not {"torch", "numpy", "safetensors", "transformers"} & names


def test_pipes_that_close_early_are_no_bug() -> None:
    done = subprocess.run(
        f"{sys.executable} -m phasefold inspect {TINY} | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr


def test_memory_does_not_grow_with_matrix_or_shard(tmp_path: Path) -> None:
    """A child process converts a checkpoint with one matrix of 264 MB: its peak stays far below it."""
    config = json.loads((variants.EXAMPLES / "tiny-glm4" / "config.json").read_text())
    config |= {"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 2,
               "num_experts_per_tok": 1, "num_hidden_layers": 2, "vocab_size": 1_000}  # fmt: skip
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    specs = [spec for spec in identify(config).tensors() if not spec.optional]
    dtypes = {"router.bias": "F32"}
    shard = folder / "model.safetensors"
    sparse.write_header(shard, [sparse.Stored(s.name, dtypes.get(s.role, "BF16"), s.shape, s) for s in specs])
    values = (torch.randn(2048, generator=torch.Generator().manual_seed(0)) * 0.05).bfloat16()
    with shard.open("r+b") as file:  # a page in each 64 KB, between holes: a gigabyte costs little disk
        for place in range(1 << 20, shard.stat().st_size - 4096, 1 << 16):
            file.seek(place)
            file.write(values.view(torch.uint8).numpy().tobytes())
    for recipe in ("glm-prefill-fp8", "glm-decode-int4", "bf16"):
        out = str(tmp_path / recipe)
        made = run_json("convert", str(folder), out, "--recipe", recipe, "--workers", "2")
        # the twin needs torch and float32 copies of a row block; the kernels need next to nothing
        assert made["peak_rss_bytes"] < (300e6 if made["backend"].startswith("native") else 1e9), made
        shutil.rmtree(out)
    assert os.path.getsize(shard) > 700e6
