"""The statistics folder: what is written is read again, and the same numbers are the same bytes."""

import json
from pathlib import Path

import pytest
import torch
from made_statistics import make_statistics
from safetensors.torch import load_file

from phasefold.calib.store import LayerWriter, write_layer
from phasefold.errors import CheckpointError
from phasefold.formats.statistics import bin_values, cache_bins, cache_name, input_of, open_statistics, pool_of

FIXTURE = Path(__file__).parent.parent / "examples" / "tiny-glm4"
TENSORS = {
    "model.layers.0.mlp.gate_proj.second_moment": torch.arange(6.0),
    "model.layers.0.mlp.gate_proj.tokens": torch.tensor(7),
    "model.layers.0.mlp.gate_proj.hessian": torch.eye(6),
    "model.layers.0.mlp.gate_proj.heldout": torch.ones(3, 6),
    "model.layers.0.mlp.up_proj.tokens": torch.tensor(0),
}


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    found = make_statistics(tmp_path / "stats", FIXTURE, {0: TENSORS, 1: {}}, tokens=9)
    up = "model.layers.0.mlp.up_proj"
    assert found.identity()["tokens"] == 9
    assert found.tokens(up) == 0 and found.tokens("model.layers.0.mlp.gate_proj") == 7
    assert found.second_moment(up) is None
    hessian, heldout = found.hessian(up), found.heldout(up)  # gate's, whose input it reads
    assert hessian is not None and torch.equal(hessian, torch.eye(6))
    assert heldout is not None and torch.equal(heldout, torch.ones(3, 6))
    theirs = load_file(tmp_path / "stats" / "layer-00000.safetensors")  # the safetensors library reads it too
    assert theirs.keys() == TENSORS.keys() and all(torch.equal(theirs[name], TENSORS[name]) for name in theirs)


def test_the_order_of_writing_leaves_no_trace(tmp_path: Path) -> None:
    first = write_layer(tmp_path / "a", 0, TENSORS)
    writer = LayerWriter(tmp_path / "b", 0)
    for name in reversed(TENSORS):
        writer.add(name, TENSORS[name])
    assert writer.finish() == first
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["layer-00000.safetensors"]


def test_a_name_is_given_once(tmp_path: Path) -> None:
    writer = LayerWriter(tmp_path, 0)
    writer.add("x", torch.zeros(2))
    with pytest.raises(ValueError, match="x was added"):
        writer.add("x", torch.zeros(2))
    writer.close()
    assert not list(tmp_path.iterdir())


def test_an_altered_or_unfinished_folder_is_refused(tmp_path: Path) -> None:
    make_statistics(tmp_path, FIXTURE, {0: TENSORS})
    about = json.loads((tmp_path / "statistics.json").read_text())
    (tmp_path / "statistics.json").write_text(json.dumps(about | {"tokens": 5}))
    with pytest.raises(CheckpointError, match="altered"):
        open_statistics(tmp_path)
    (tmp_path / "statistics.json").unlink()
    with pytest.raises(CheckpointError, match="no statistics"):
        open_statistics(tmp_path)


def test_bins_tell_every_bf16_magnitude() -> None:
    values = torch.randn(5000).bfloat16()
    bins = cache_bins(values)
    assert int(bins.sum()) == 5000
    again = bin_values().repeat_interleave(bins)
    assert torch.equal(again.sort().values, values.float().abs().sort().values)


def test_names() -> None:
    expert = "model.layers.3.mlp.experts.17.up_proj"
    assert input_of(expert) == "model.layers.3.mlp.experts.17.gate_proj"
    assert pool_of(expert) == "model.layers.3.mlp.experts.pool.gate_proj"
    assert pool_of("model.layers.3.mlp.shared_experts.up_proj") is None
    assert cache_name(3, "kv_c", "amax") == "layers.3.cache.kv_c.amax"
