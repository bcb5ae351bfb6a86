"""kv, and --kv of plan, convert and pair, as others script against them: keys, exit codes, sentences."""

import json
import os
import shutil
from pathlib import Path

import pytest
import variants
from cache_values import random_values, statistics_of
from jsonschema import Draft202012Validator
from safetensors.torch import load_file
from test_cli import run, run_json

from phasefold.formats.kv_scales import read_kv_scales

GLM4, KIMI = str(variants.EXAMPLES / "tiny-glm4"), str(variants.EXAMPLES / "tiny-kimi")
SCHEMA = json.loads((variants.EXAMPLES.parent / "formats" / "kv_scales.schema.json").read_text())


@pytest.fixture(scope="module")
def files(module_path: Path) -> dict[str, str]:
    """Manifests by the folder of their source."""
    for source in (GLM4, KIMI):
        statistics_of(module_path / Path(source).name, Path(source), random_values(Path(source)))
        run("kv", str(module_path / Path(source).name), "--out", str(module_path / f"{Path(source).name}.json"))
    return {source: str(module_path / f"{Path(source).name}.json") for source in (GLM4, KIMI)}


def test_kv_says_what_is_written(files: dict[str, str], tmp_path: Path) -> None:
    stats, out = files[GLM4].removesuffix(".json"), tmp_path / "kv_scales.json"
    told = run_json("kv", stats, "--out", str(out))
    assert told == json.loads(out.read_bytes()) and told.keys() >= {"layers", "kv_dtype", "bytes_per_token"}
    assert [layer["layer"] for layer in told["layers"]] == [0, 1, 2, 3] and told["kv_dtype"] == "fp8_e4m3"
    assert told["bytes_per_token"] == {"bf16": 1024, "fp8_e4m3": 512} and told["headroom"] == 2.0
    Draft202012Validator(SCHEMA).validate(told)
    assert out.read_bytes() == Path(files[GLM4]).read_bytes() and os.stat(out).st_mode & 0o777 == 0o644
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv_scales.json"]
    eight = run_json("kv", stats, "--out", str(out), "--headroom", "8")
    scales = [[layer["parts"]["k"]["scale"] for layer in each["layers"]] for each in (told, eight)]
    assert scales[1] == [4 * scale for scale in scales[0]] and read_kv_scales(out).headroom == 8


def test_kv_in_words(files: dict[str, str], tmp_path: Path) -> None:
    out = str(tmp_path / "kv.json")
    said = run("kv", files[KIMI].removesuffix(".json"), "--out", out).stdout
    assert "row scale" in said and said.count("kv_c") == 4 and "fp8_ds_mla 784" in said
    assert "note: all layers: fewer than 16,384 tokens" in said
    assert "vLLM reads nothing" in said and "--fold" in said and f"{out}: scales of 4 layers" in said
    said = run("kv", files[GLM4].removesuffix(".json"), "--out", out).stdout
    assert "vLLM reads tensors" in said and "SGLang reads nothing" in said and "row scale" not in said


def test_many_layers_show_the_worst(tmp_path: Path) -> None:
    """The worst are those that lose most at scale 1.0: here the last layers, whose values are the smallest."""
    config = json.loads((Path(GLM4) / "config.json").read_text()) | {"num_hidden_layers": 20}
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    values = {(n, p): v * 2.0 ** (-n / 2) for (n, p), v in random_values(tmp_path / "source").items()}
    statistics_of(tmp_path / "stats", Path(GLM4), values, config=config)
    said = run("kv", str(tmp_path / "stats"), "--out", str(tmp_path / "kv.json")).stdout
    lines = [line.split()[0] for line in said.splitlines() if line.split()[1:2] in (["k"], ["v"])]
    assert "the 12 of 40 that lose most" in said
    assert lines == [str(n) for n in range(14, 20) for _ in "kv"]
    assert len(read_kv_scales(tmp_path / "kv.json").layers) == 20


def test_kv_does_not_write_over_what_it_reads(files: dict[str, str], tmp_path: Path) -> None:
    stats = Path(shutil.copytree(files[GLM4].removesuffix(".json"), tmp_path / "stats"))
    before = {path.name: path.read_bytes() for path in stats.iterdir()}
    for name in before:
        said = run("kv", str(stats), "--out", str(stats / name), code=2).stderr
        assert "is part of the statistics" in said
    run("kv", str(stats), "--out", str(stats / "kv_scales.json"))
    assert {name: (stats / name).read_bytes() for name in before} == before


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [(("--headroom", "0.5"), 2, "headroom"), (("--headroom", "100"), 2, "headroom"),
     (("--out", "{}"), 2, "is a folder"),
     (("--out", "{}/none/kv.json"), 1, "cannot be written")],
)  # fmt: skip
def test_kv_refuses(files: dict[str, str], tmp_path: Path, words: tuple[str, ...], code: int, sentence: str) -> None:
    given = [word.format(tmp_path) for word in words]
    out = [] if "--out" in words else ["--out", str(tmp_path / "kv.json")]
    assert sentence in run("kv", files[GLM4].removesuffix(".json"), *given, *out, code=code).stderr
    assert not list(tmp_path.iterdir())


def test_kv_of_no_statistics(tmp_path: Path) -> None:
    said = run("kv", str(tmp_path), "--out", str(tmp_path / "kv.json"), code=1).stderr
    assert "no statistics.json" in said and said.count("\n") == 1


def test_plan_and_convert_take_the_file(files: dict[str, str], tmp_path: Path) -> None:
    words = GLM4, "--recipe", "glm-decode-int4", "--kv", files[GLM4]
    planned = run_json("plan", *words)
    assert planned["units"]["added"] == 8 and sum("KV scales" in note for note in planned["notes"]) == 2
    out = str(tmp_path / "out")
    made = run_json("convert", GLM4, out, *words[1:])
    assert made["digest"] == planned["digest"] != run_json("plan", *words[:3])["digest"]
    scales = {key: tensor.item() for path in (tmp_path / "out").glob("*.safetensors")
              for key, tensor in load_file(path).items() if key.endswith(("k_scale", "v_scale"))}  # fmt: skip
    assert scales == read_kv_scales(Path(files[GLM4])).tensors("vllm") and len(scales) == 8
    assert run_json("verify", out, "--source", GLM4)["ok"] is True
    assert "nothing to do" in run("convert", GLM4, out, *words[1:]).stdout
    assert "holds another checkpoint" in run("convert", GLM4, out, *words[1:3], code=1).stderr
    found = run_json("check", out, "--runtime", "vllm", "--kv-dtype", "fp8")
    assert found["ok"] and found["findings"] == []


def test_convert_says_why_a_latent_gets_none(files: dict[str, str], tmp_path: Path) -> None:
    words = KIMI, str(tmp_path / "out"), "--recipe", "kimi-prefill-fp8", "--kv", files[KIMI]
    said = run("convert", *words).stdout
    assert said.count("KV scales: none added") == 2 and "--fold" in said


@pytest.mark.parametrize("verb", ["plan", "convert"])
def test_a_file_of_another_model_is_refused(files: dict[str, str], tmp_path: Path, verb: str) -> None:
    words = [KIMI, str(tmp_path / "out")][: 2 if verb == "convert" else 1]
    said = run(verb, *words, "-r", "kimi-decode-int4", "--kv", files[GLM4], code=1).stderr
    assert "not of the model in" in said and said.count("\n") == 1 and not (tmp_path / "out").exists()
    (tmp_path / "kv.json").write_text("{}")
    said = run(verb, *words, "-r", "kimi-decode-int4", "--kv", str(tmp_path / "kv.json"), code=1).stderr
    assert "KV scales of version None" in said


# ------------------------------------------------------------------------------------------------------- pair


def test_pair_takes_the_file(files: dict[str, str], tmp_path: Path) -> None:
    folders = str(tmp_path / "prefill"), str(tmp_path / "decode")
    for out, recipe in zip(folders, ("glm-prefill-fp8", "glm-decode-int4"), strict=True):
        run("convert", GLM4, out, "--recipe", recipe)
    words = *folders, "--runtime", "vllm", "--kv-dtype", "fp8_e4m3", "--kv", files[GLM4]
    found = run_json("pair", *words)
    assert found["ok"] and [(f["rule"], f["severity"]) for f in found["findings"]] == [("D4", "warning")] * 2
    served = run_json("pair", *words, "--run", "--tokens", "3")
    assert served["kv_scales"] == "file" and served["kv"]["decode"] == "fp8_e4m3" and served["mean_kl"] < 0.1
    said = run("pair", *folders, "--kv", files[KIMI], code=1).stderr
    assert "not of the model in" in said and said.count("\n") == 1
    for dtype in ("bfloat16", "fp8_ds_mla"):
        refused = run("pair", *folders, "--run", "--kv", files[GLM4], "--kv-dtype", dtype, code=2).stderr
        assert "add --kv-dtype fp8_e4m3" in refused
