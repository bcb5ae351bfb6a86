"""`convert --fold` and `--unfold`: a manifest of KV scales in, artifacts out, and what is said of it."""

from pathlib import Path

import pytest
import variants
from cache_values import random_values, statistics_of
from test_cli import run, run_json

from phasefold.calib.kv import kv_scales
from phasefold.formats.checkpoint import MANIFEST
from phasefold.formats.manifest import read_manifest

KIMI, GLM4 = (variants.EXAMPLES / name for name in ("tiny-kimi", "tiny-glm4"))


def scales(source: Path, out: Path, small: float = 1.0) -> str:
    """kv_scales.json of a cache of random values; what is `small` wants to be folded upwards."""
    values = {key: value * small * 2.0 ** key[0] for key, value in random_values(source).items()}
    out.write_bytes(kv_scales(statistics_of(out.with_suffix(""), source, values), 2.0).to_bytes())
    return str(out)


def test_fold_and_unfold(tmp_path: Path) -> None:
    file = scales(GLM4, tmp_path / "kv.json", 2.0**-4)
    prefill, decode, back, plain = (str(tmp_path / name) for name in ("prefill", "decode", "back", "plain"))
    planned = run_json("plan", str(GLM4), "--recipe", "glm-prefill-fp8", "--fold", file)
    assert planned["units"]["folded"] == 12  # norms and biases; what is quantized is folded as it is read
    (note,) = (note for note in planned["notes"] if note.startswith("folded: "))
    assert "k by 2^" in note and "v by 2^" in note and "in 4 layers" in note and "at scale 1.0" in note
    made = run_json("convert", str(GLM4), prefill, "--recipe", "glm-prefill-fp8", "--fold", file)
    assert made["digest"] == planned["digest"] and made["notes"] == planned["notes"]
    assert run_json("convert", str(GLM4), prefill, "--recipe", "glm-prefill-fp8", "--fold", file)["resumed_shards"]
    run("convert", str(GLM4), decode, "--recipe", "glm-decode-int4", "--fold", file)
    assert run_json("verify", prefill, "--source", str(GLM4))["ok"]
    assert run_json("pair", prefill, decode, "--runtime", "sglang")["ok"]
    manifests = [read_manifest(Path(folder)) for folder in (prefill, decode)]
    assert manifests[0].extras == manifests[1].extras
    assert manifests[0].extras.keys() == {"folding", "folded_by"} and manifests[0].extras["folded_by"]["same_source"]
    assert run_json("inspect", decode)["folding"] == manifests[1].extras["folding"]
    assert "folded: k by 2^" in run("inspect", decode).stdout and "folded" not in run("inspect", str(GLM4)).stdout
    run("convert", decode, back, "--recipe", "keep", "--unfold")
    run("convert", str(GLM4), plain, "--recipe", "glm-decode-int4")
    theirs, ours = variants.load(Path(plain))[0], variants.load(Path(back))[0]
    assert theirs.keys() == ours.keys() and all(theirs[name].equal(ours[name]) for name in theirs)
    assert run_json("verify", back, "--source", decode)["ok"]
    found = run_json("pair", prefill, back, "--runtime", "sglang", code=3)
    assert [one["rule"] for one in found["findings"] if one["severity"] == "silent"] == ["D4"]
    carried = str(tmp_path / "carried")  # from a folded artifact, without a word of it
    assert any("as its source was" in note for note in run_json("convert", decode, carried, "-r", "keep")["notes"])
    assert read_manifest(Path(carried)).extras["folding"] == manifests[1].extras["folding"]


def test_what_cannot_be_folded_is_told(tmp_path: Path) -> None:
    file = scales(KIMI, tmp_path / "kv.json", 2.0**-3)
    source = variants.variant("fp8-block", "tiny-kimi", tmp_path / "source")
    said = run("convert", str(source), str(tmp_path / "out"), "-r", "keep", "--fold", file).stdout
    assert "note: k_pe is folded less than asked in 4 layers, not at all in 4 of them" in said
    assert "q_b_proj.weight)" in said and "note: folded: kv_c by 2^" in said
    assert "the folded scales were calibrated on tiny-kimi, another checkpoint" in said
    lowered = read_manifest(tmp_path / "out").extras["lowered"]
    assert lowered.keys() == {"0", "1", "2", "3"} and all(list(parts) == ["k_pe"] for parts in lowered.values())


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("--fold", "FILE", "--unfold"), 2, "give one of the two"),
        (("--fold", "FILE", "--kv", "FILE"), 2, "--fold and --kv: give one of the two"),
        (("--unfold",), 1, "nothing to unfold"),
        (("--fold", "nowhere.json"), 1, "nowhere.json"),
        (("--fold", "OTHER"), 1, "not of the model in"),
    ],
)
def test_refusals(tmp_path: Path, words: tuple[str, ...], code: int, sentence: str) -> None:
    files = {"FILE": scales(KIMI, tmp_path / "kv.json"), "OTHER": scales(GLM4, tmp_path / "other.json")}
    given = [files.get(word, word) for word in words]
    for verb in (["plan", str(KIMI)], ["convert", str(KIMI), str(tmp_path / "out")]):
        assert sentence in run(*verb, "--recipe", "keep", *given, code=code).stderr
    assert not (tmp_path / "out").exists()


def test_folding_twice_is_refused(tmp_path: Path) -> None:
    file = scales(KIMI, tmp_path / "kv.json", 2.0**-3)
    run("convert", str(KIMI), str(tmp_path / "once"), "-r", "keep", "--fold", file)
    told = run("convert", str(tmp_path / "once"), str(tmp_path / "twice"), "-r", "keep", "--fold", file, code=1).stderr
    assert "is folded already" in told
    (tmp_path / "once" / MANIFEST).write_text("{}")
    told = run("plan", str(tmp_path / "once"), "-r", "keep", code=1).stderr
    assert "whether the source is folded cannot be told" in told
