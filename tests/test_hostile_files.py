"""Files of ours that somebody made by hand: the digest is right, the content is not. Each has its sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import variants
from made_statistics import make_statistics

from phasefold.errors import CheckpointError, PlanError, VerifyError
from phasefold.formats import manifest
from phasefold.formats.checkpoint import open_checkpoint
from phasefold.formats.manifest import read_manifest
from phasefold.formats.statistics import about_digest, open_statistics
from phasefold.quantize.convert import convert
from phasefold.quantize.fold import held
from phasefold.quantize.plan import make_plan
from phasefold.recipes import load

TINY = variants.EXAMPLES / "tiny-glm4"
GATE = "model.layers.0.mlp.gate_proj"
Change = Callable[[dict[str, Any]], Any]


def put(*path: Any) -> Change:
    """Put the last of these at the place that the others lead to."""

    def change(value: Any) -> None:
        for key in path[:-2]:
            value = value[key]
        value[path[-2]] = path[-1]

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda about: about.pop("layers"), "layers is no list"),
        (put("layers", []), "layers is no list"),
        (put("layers", 0, 5), r"layers\[0\] names no safetensors file"),
        (put("layers", 0, "file", "../stats/layer-00000.safetensors"), r"layers\[0\] names no safetensors file"),
        (put("layers", 0, "file", "a\0b"), r"layers\[0\] names no safetensors file"),
        (put("layers", 0, "bytes", "many"), r"layers\[0\] has no bytes"),
        (lambda about: about["layers"].append(about["layers"][0]), "stands in layer-00000.safetensors, too"),
        (lambda about: about.pop("source"), "source has no name and digest"),
        (put("source", "digest", 5), "source has no name and digest"),
        (put("source", "folding", {"0": {"k": "1"}}), r"source\.folding is no map"),
        (put("source", "folding", {"0": {"k": 10**9}}), r"source\.folding is no map"),
        (put("text", 5), "text has no digest"),
        (put("tokens", -5), "tokens is no number"),
        (put("tokens", "9"), "tokens is no number"),
    ],
)
def test_statistics(tmp_path: Path, change: Change, words: str) -> None:
    make_statistics(tmp_path / "stats", TINY, {0: {f"{GATE}.tokens": torch.tensor(3)}})
    path = tmp_path / "stats" / "statistics.json"
    about = json.loads(path.read_bytes())
    change(about)
    path.write_text(json.dumps(about | {"digest": about_digest(about)}))
    with pytest.raises(CheckpointError, match=words):
        open_statistics(tmp_path / "stats")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("tokens", torch.ones(3, dtype=torch.int64), r"tokens is I64 \[3\], which no statistic is"),
        ("tokens", torch.tensor(1.0), r"tokens is F32 \[\]"),
        ("hessian", torch.ones(4), r"hessian is F32 \[4\]"),
        ("something", torch.ones(4), r"something is F32 \[4\]"),
    ],
)
def test_tensors_of_statistics(tmp_path: Path, name: str, value: torch.Tensor, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        make_statistics(tmp_path, TINY, {0: {f"{GATE}.{name}": value}})


def test_fewer_than_no_tokens(tmp_path: Path) -> None:
    found = make_statistics(tmp_path, TINY, {0: {f"{GATE}.tokens": torch.tensor(-16)}})
    with pytest.raises(CheckpointError, match="tokens is -16"):
        found.tokens(GATE)


@pytest.fixture(scope="module")
def artifact(module_path: Path) -> Path:
    out = module_path / "out"
    convert(make_plan(open_checkpoint(TINY), load("keep")), out)
    return out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("extras", []), "extras is no object"),
        (put("extras", "folding", 5), "folding is no map"),
        (put("extras", "folding", {"x": {"k": 1}}), "folding is no map"),
        (put("extras", "folding", {"0": ["k"]}), "folding is no map"),
        (put("extras", "folding", {"0": {"k": 1.5}}), "folding is no map"),
        (put("extras", "folding", {"0": {"k": 4096}}), "folding is no map"),
        (put("source", "x"), "source is no object"),
        (put("source", "origins", 5), "origins are no list"),
        (put("files", "config.json", 5), "a file has no size"),
        (put("units", []), "units is no object"),
        (put("units", "lm_head", []), "a unit does not say"),
    ],
)
def test_manifests(artifact: Path, tmp_path: Path, change: Change, words: str) -> None:
    value = json.loads((artifact / "phasefold.json").read_bytes())
    del value["digest"]
    change(value)
    for path in artifact.iterdir():
        (tmp_path / path.name).hardlink_to(path)
    (tmp_path / "phasefold.json").unlink()
    (tmp_path / "phasefold.json").write_text(json.dumps(value | {"digest": manifest._digest(value)}))
    with pytest.raises(VerifyError, match=words):
        read_manifest(tmp_path)
    with pytest.raises(PlanError, match=f"{words}.*whether the source is folded cannot be told"):
        held(open_checkpoint(tmp_path))
