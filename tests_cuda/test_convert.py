"""Conversions by a card leave the CPU's bytes: on a card, or run on the CPU under its driver (tests/hostcard.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import variants
from equal_folders import assert_equal_folders
from made_statistics import make_statistics

from phasefold.errors import CheckpointError, PlanError
from phasefold.formats.checkpoint import open_checkpoint
from phasefold.formats.statistics import Statistics
from phasefold.quantize import cards
from phasefold.quantize.cards import Cards, open_cards
from phasefold.quantize.convert import Result, convert
from phasefold.quantize.device import choose
from phasefold.quantize.extras import NO_EXTRAS, Extras
from phasefold.quantize.kernels.card import Arena
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


def opened(plan: Plan, *ordinals: int, memory: int = 4 << 30) -> Cards:
    devices = choose(",".join(f"cuda:{ordinal}" for ordinal in ordinals) or "cuda")
    made, name = open_cards(devices, plan, memory, 2)
    assert made is not None and name == str(made)
    return made


def on_cards(plan: Plan, out: Path, *ordinals: int, memory: int = 4 << 30, **options: Any) -> Result:
    """By two lanes of a card, of the first one if no other is given."""
    with opened(plan, *ordinals, memory=memory) as made:
        return convert(plan, out, cards=made, **options)


@pytest.mark.parametrize(("base", "kind", "recipe"), SOURCES)
def test_artifacts_are_the_cpus(tmp_path: Path, base: str, kind: str, recipe: str) -> None:
    plan = planned(variants.variant(kind, base, tmp_path / "source"), recipe)
    result = on_cards(plan, tmp_path / "card")
    assert result.backend == choose("cuda").name
    convert(plan, tmp_path / "cpu")
    assert_equal_folders(tmp_path / "card", tmp_path / "cpu")
    assert verify(tmp_path / "card", plan.checkpoint.folder).problems == []


def test_all_cards(tmp_path: Path, ordinals: tuple[int, ...]) -> None:
    """As many as there are, to two."""
    plan = planned(variants.EXAMPLES / "tiny-glm5", "glm-decode-int4", shard_bytes=300_000)
    result = on_cards(plan, tmp_path / "cards", *ordinals)
    assert result.backend == choose(",".join(f"cuda:{ordinal}" for ordinal in ordinals)).name
    convert(plan, tmp_path / "cpu")
    assert_equal_folders(tmp_path / "cards", tmp_path / "cpu")


def test_lanes_that_hold_less_than_a_matrix(tmp_path: Path) -> None:
    """Matrices are cut into blocks of 128 rows, and a lane is delivered many times over."""
    plan = planned(variants.variant("bf16", "tiny-kimi", tmp_path / "source"), "kimi-prefill-fp8")
    least = cards._least(plan)
    on_cards(plan, tmp_path / "card", memory=2 * 3 * (least.source + least.result))
    convert(plan, tmp_path / "cpu")
    assert_equal_folders(tmp_path / "card", tmp_path / "cpu")


def test_lanes_are_under_way_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its copy to the card enqueued, and waits for the other to come as far, before it waits for the card."""
    copy, met, both = Arena.copy, threading.local(), threading.Barrier(2, timeout=60)

    def meet(self: Arena, *arguments: Any, **options: Any) -> None:
        copy(self, *arguments, **options)
        if not hasattr(met, "other"):
            met.other = both.wait()

    monkeypatch.setattr(Arena, "copy", meet)
    plan = planned(variants.EXAMPLES / "tiny-glm4", "glm-decode-int4")
    on_cards(plan, tmp_path / "card", memory=1_000_000)
    convert(plan, tmp_path / "cpu")
    assert_equal_folders(tmp_path / "card", tmp_path / "cpu")


def test_a_job_without_work_for_a_card_is_the_cpus() -> None:
    plan = planned(variants.EXAMPLES / "tiny-glm4", "keep")
    assert open_cards(choose("cuda"), plan, 4 << 30, 2) == (None, "cpu (nothing in this job is a card's work)")


def test_memory_that_holds_no_matrix_is_refused(tmp_path: Path) -> None:
    plan = planned(variants.EXAMPLES / "tiny-glm4", "glm-prefill-fp8")
    with pytest.raises(PlanError, match=r"0.1 MB of a card's memory are too little for 2 workers: .* --device-memory"):
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
    assert_equal_folders(tmp_path / "card", tmp_path / "cpu")


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
    assert_equal_folders(tmp_path / "card", tmp_path / "cpu")


def test_gptq(tmp_path: Path) -> None:
    """By torch on the card, where this torch can: sums in another order, so nearly the same codes; else the same."""
    plan, statistics = guided(tmp_path, "gptq")
    with opened(plan) as made:
        result = convert(plan, tmp_path / "card", cards=made, statistics=statistics)
    expected = convert(plan, tmp_path / "cpu", statistics=statistics)
    assert verify(tmp_path / "card", plan.checkpoint.folder).problems == []
    assert result.errors["routed_expert"] == pytest.approx(expected.errors["routed_expert"], rel=1e-3)
    assert [unit[4:] for unit in result.manifest.units.values()] == [u[4:] for u in expected.manifest.units.values()]
    if not torch.cuda.is_available():
        assert made.notes == ("GPTQ stays on the CPU: this torch cannot use the card",)
        assert_equal_folders(tmp_path / "card", tmp_path / "cpu")
