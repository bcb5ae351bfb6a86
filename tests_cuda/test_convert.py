"""Conversions by a card leave the CPU's bytes: on a card, or run on the CPU under its driver (tests/hostcard.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import variants
from made_statistics import make_statistics

from phasefold.errors import CheckpointError, PlanError
from phasefold.formats.checkpoint import MANIFEST, open_checkpoint
from phasefold.formats.statistics import Statistics
from phasefold.quantize import cards
from phasefold.quantize.cards import open_cards
from phasefold.quantize.convert import Result, convert
from phasefold.quantize.device import choose
from phasefold.quantize.extras import NO_EXTRAS, Extras
from phasefold.quantize.plan import Plan, make_plan
from phasefold.quantize.verify import verify
from phasefold.recipes import load, parse

SOURCES = [
    ("tiny-kimi", "bf16", "kimi-decode-int4"),
    ("tiny-kimi", "bf16", "kimi-prefill-fp8"),
    ("tiny-kimi", "f32", "kimi-prefill-fp8"),
    ("tiny-kimi", "f16", "bf16"),
    ("tiny-kimi", "f32", "kimi-decode-int4"),
    ("tiny-kimi", "fp8-channel", "kimi-decode-int4"),
    ("tiny-kimi", "int4", "kimi-prefill-fp8"),
    ("tiny-kimi", "int4", "bf16"),
    ("tiny-kimi", "int4-as-bf16", "kimi-restore-int4"),
    ("tiny-glm4", "fp8-block", "glm-decode-int4-g128"),
    ("tiny-glm5", "mtp+fp8-block", "glm-decode-int4"),
    ("tiny-glm5", "fp8-block", "bf16"),
    ("tiny-glm5", "mtp", "glm-decode-int4-fp8"),
]


def planned(source: Path, recipe: str, extras: Extras = NO_EXTRAS, shard_bytes: int = 2_000_000) -> Plan:
    return make_plan(open_checkpoint(source), load(recipe), shard_bytes, extras)


def on_cards(plan: Plan, out: Path, *, ordinals=(0,), memory: int = 4 << 30, workers: int = 2, **options) -> Result:
    return convert(plan, out, cards=open_cards(ordinals, plan, memory, workers), **options)


def assert_same_folders(found: Path, expected: Path) -> None:
    names = {path.name for path in expected.iterdir()}
    assert {path.name for path in found.iterdir()} == names
    for name in names - {MANIFEST}:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name
    a, b = (json.loads((folder / MANIFEST).read_bytes()) for folder in (found, expected))
    for module, unit in a.pop("units").items():  # errors are sums, added in another order
        other = b["units"][module]
        assert unit[:3] + unit[4:] == other[:3] + other[4:]
        assert unit[3] == pytest.approx(other[3], rel=2e-4)
    assert a == {key: value for key, value in b.items() if key != "units"}


@pytest.mark.parametrize(("base", "kind", "recipe"), SOURCES)
def test_artifacts_are_the_cpus(tmp_path: Path, base: str, kind: str, recipe: str) -> None:
    plan = planned(variants.variant(kind, base, tmp_path / "source"), recipe)
    result = on_cards(plan, tmp_path / "card")
    assert result.backend == choose("cuda").name
    convert(plan, tmp_path / "cpu")
    assert_same_folders(tmp_path / "card", tmp_path / "cpu")
    assert verify(tmp_path / "card", plan.checkpoint.folder).problems == []


def test_lanes_that_hold_less_than_a_matrix(tmp_path: Path) -> None:
    """Matrices are cut into blocks of 128 rows, and a lane is delivered many times over."""
    plan = planned(variants.variant("bf16", "tiny-glm4", tmp_path / "source"), "glm-prefill-fp8")
    least = cards._least(plan)
    on_cards(plan, tmp_path / "card", memory=2 * 3 * (least.source + least.result), workers=2)
    convert(plan, tmp_path / "cpu")
    assert_same_folders(tmp_path / "card", tmp_path / "cpu")


def test_memory_that_holds_no_matrix_is_refused(tmp_path: Path) -> None:
    plan = planned(variants.EXAMPLES / "tiny-glm4", "glm-prefill-fp8")
    with pytest.raises(PlanError, match=r"0 MB of a card's memory are too little for 2 workers: .* --device-memory"):
        on_cards(plan, tmp_path / "out", memory=100_000)
    assert not (tmp_path / "out").exists()


def test_what_a_kernel_finds_is_refused_with_its_place(tmp_path: Path) -> None:
    source = variants.variant("bf16", "tiny-glm4", tmp_path / "source")
    tensors, config = variants.load(source)
    name = "model.layers.2.mlp.experts.7.up_proj.weight"
    tensors[name][3, 17] = float("nan")
    variants.save(source, tensors, config)
    with pytest.raises(CheckpointError, match=rf"{name}\[3, 17\]: weight is not finite"):
        on_cards(planned(source, "glm-decode-int4"), tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_stopped_job_goes_on(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stopping(after: int) -> Callable[[int], None]:
        told = iter(range(after))

        def tell(_: int) -> None:
            if next(told, None) is None:
                raise Stop

        return tell

    plan = planned(variants.EXAMPLES / "tiny-glm4", "glm-decode-int4", shard_bytes=300_000)
    for after in (60, 30):
        with pytest.raises(Stop):
            on_cards(plan, tmp_path / "card", progress=stopping(after))
    resumed = on_cards(plan, tmp_path / "card").resumed_shards
    assert 0 < resumed < len(plan.shards)
    convert(plan, tmp_path / "cpu")
    assert_same_folders(tmp_path / "card", tmp_path / "cpu")


def guided(tmp_path: Path, method: str) -> tuple[Plan, Statistics]:
    source = variants.EXAMPLES / "tiny-glm4"
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    checkpoint = open_checkpoint(source)
    for name, stored in checkpoint.tensors.items():
        if ".layers.1.mlp.experts." in name:
            module, columns = name.removesuffix(".weight"), stored.shape[1]
            inputs = torch.randn(256, columns, generator=generator) * torch.rand(columns, generator=generator)
            tensors[f"{module}.tokens"] = torch.tensor(256)
            tensors[f"{module}.second_moment"] = inputs.square().mean(0)
            if not name.endswith("up_proj.weight"):
                tensors[f"{module}.hessian"] = inputs.T @ inputs / 256
                tensors[f"{module}.heldout"] = torch.randn(32, columns, generator=generator)
    statistics = make_statistics(tmp_path / "stats", source, {1: tensors})
    rule = {"roles": ["routed_expert"], "format": "int4-g32", "method": method, "layers": "1"}
    rule |= {"objective": "imatrix"} if method == "search" else {}
    recipe = parse({"families": ["glm"], "phase": "decode", "rule": [rule]}, "mine", "mine")
    return make_plan(checkpoint, recipe, 2_000_000, Extras(statistics=statistics.identity())), statistics


def test_weights_of_columns(tmp_path: Path) -> None:
    plan, statistics = guided(tmp_path, "search")
    on_cards(plan, tmp_path / "card", statistics=statistics)
    convert(plan, tmp_path / "cpu", statistics=statistics)
    assert_same_folders(tmp_path / "card", tmp_path / "cpu")


def test_gptq(tmp_path: Path) -> None:
    """By torch on the card, where this torch can: sums in another order, so nearly the same codes; else the same."""
    plan, statistics = guided(tmp_path, "gptq")
    made = open_cards((0,), plan, 1 << 30, 2)
    result = convert(plan, tmp_path / "card", cards=made, statistics=statistics)
    expected = convert(plan, tmp_path / "cpu", statistics=statistics)
    assert verify(tmp_path / "card", plan.checkpoint.folder).problems == []
    assert result.errors["routed_expert"] == pytest.approx(expected.errors["routed_expert"], rel=1e-3)
    assert [unit[4:] for unit in result.manifest.units.values()] == [u[4:] for u in expected.manifest.units.values()]
    if not torch.cuda.is_available():
        assert made.notes == ("GPTQ stays on the CPU: this torch was built without CUDA",)
        assert_same_folders(tmp_path / "card", tmp_path / "cpu")
