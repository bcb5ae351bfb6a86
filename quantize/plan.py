"""A job as a frozen value: every output tensor with its file and offset, every source tensor with what becomes of it.

Only headers are read. What can be known is known here, and every error that can be told is told here, so that nothing
but the weights' own values (NaN, a broken scale) can stop a conversion later.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import PlanError
from ..formats import Format, formats
from ..formats.checkpoint import Checkpoint
from ..recipes import Recipe
from . import fold, guide, kv
from .account import Account, Item, account, held_config
from .choose import choose, make_unit
from .declare import Module, check, launch_notes, quantization_config
from .extras import NO_EXTRAS, Extras
from .units import Shard, Unit, lay_out

SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Plan:
    """What a conversion will write. `config` is config.json as bytes; `dropped` maps source tensors to the reason."""

    checkpoint: Checkpoint
    recipe: Recipe
    architecture: str
    family: str
    shards: tuple[Shard, ...]
    dropped: Mapping[str, str]
    config: bytes
    shard_bytes: int
    notes: tuple[str, ...]
    extras: Extras = NO_EXTRAS

    def units(self) -> Iterator[Unit]:
        """All units in the order of the shards."""
        return (unit for shard in self.shards for unit in shard.units)

    @cached_property
    def digest(self) -> str:
        """Identifies the job: equal digests write equal bytes."""
        # raise the number whenever the same recipe would write other bytes: a job must not go on with another's shards
        digest = hashlib.sha256(b"phasefold plan 1\n" + self.checkpoint.digest.encode())
        if self.checkpoint.place.repo:  # the manifest names it
            digest.update(json.dumps(self.checkpoint.place.repo[:2]).encode())
        digest.update(json.dumps(self.recipe.to_json(), sort_keys=True).encode())
        if extras := self.extras.to_json():
            digest.update(json.dumps(extras, sort_keys=True).encode())
        digest.update(self.config)
        for shard in self.shards:
            digest.update(shard.file.encode() + shard.header)
        return digest.hexdigest()

    @cached_property
    def output_bytes(self) -> int:
        """Bytes of all output tensors, as an index counts them."""
        return sum(output.part.nbytes for unit in self.units() for output in unit.outputs)

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """Output tensor -> file, sorted by name."""
        pairs = ((o.name, shard.file) for shard in self.shards for unit in shard.units for o in unit.outputs)
        return dict(sorted(pairs))

    def actions(self) -> dict[str, int]:
        """Units by action."""
        counts = Counter(unit.action for unit in self.units())
        return {key: counts[key] for key in ("copied", "repacked", "folded", "quantized", "added")} | {
            "dropped": len(self.dropped)
        }


def make_plan(
    checkpoint: Checkpoint, recipe: Recipe, shard_bytes: int = SHARD_BYTES, extras: Extras = NO_EXTRAS
) -> Plan:
    """Turn a request into a plan. Raises CheckpointError, RecipeError or PlanError with the first thing that is wrong.

    shard_bytes: largest sum of tensor bytes in one output shard; a larger single matrix gets a shard of its own.
    extras: what the job takes besides source and recipe.
    """
    found = account(checkpoint)
    architecture = found.model.architecture
    choices, dropped = choose(found, recipe)
    choices, old_scales = kv.replaced(choices, extras)
    modules = declared_modules((choice.item, choice.target) for choice in choices)
    scalings = fold.scalings(checkpoint, found, extras)
    units = [make_unit(choice, scalings.get(choice.item.module)) for choice in choices]
    untrue_mtp = bool(found.model.text.get("num_nextn_predict_layers")) and (bool(dropped) or not found.has_mtp)
    config, declared = _config(found, checkpoint, modules, units, untrue_mtp=untrue_mtp)
    if problems := check(declared, modules, architecture):
        raise PlanError(f"{recipe.name}: no quantization_config can say this to the runtimes: {problems[0]}")
    notes = launch_notes(declared, modules, architecture)
    if untrue_mtp:
        why = "the MTP layer is dropped" if dropped else "the source has no MTP layer although its config claims one"
        notes.append(f"config.json: num_nextn_predict_layers is set to 0, {why}")
    notes += fold.notes(extras)
    notes += guide.notes(checkpoint, recipe.name, units, extras.statistics)
    notes += kv.notes(found.model, extras)
    before, after = checkpoint.total_size, sum(output.part.nbytes for unit in units for output in unit.outputs)
    if after > before:
        notes.append(f"the artifact is larger than its source: {after:,} bytes from {before:,}")
    twice = [
        u for u in units if u.action == "quantized" and u.source_format.startswith("int4") and "int4" in u.target_format
    ]
    if twice:
        notes.append(
            f"{len(twice):,} matrices are {twice[0].source_format} and are rounded a second time, to "
            f"{twice[0].target_format}: their first source gives a smaller error"
        )
    if dropped:
        notes.append(f"dropped: {len(dropped):,} tensors of the MTP layer")
    position = {name: number for number, name in enumerate(checkpoint.tensors)}
    units.sort(key=lambda unit: position[unit.module + unit.source[0].suffix])
    units += kv.added(found, extras, declared=declared is not None)
    shards = lay_out(units, shard_bytes)
    return Plan(
        checkpoint,
        recipe,
        architecture.name,
        found.model.family,
        shards,
        dropped | old_scales,
        config,
        shard_bytes,
        tuple(notes),
        extras,
    )


def declared_modules(pairs: Iterable[tuple[Item, Format]]) -> list[Module]:
    """The matrices among (tensor, format that it has or gets), as the config declares them."""
    return [
        Module(i.module, i.spec.role, i.spec.layer, i.spec.mtp, i.spec.linear, None if f.plain else f.name)
        for i, f in pairs
        if len(i.spec.shape) == 2 and i.spec.name.endswith(".weight")
    ]


def _config(
    found: Account, checkpoint: Checkpoint, modules: list[Module], units: list[Unit], *, untrue_mtp: bool
) -> tuple[bytes, Mapping[str, Any] | None]:
    """config.json as bytes and the quantization_config in it. Unchanged bytes where they tell the truth already."""
    text, architecture, held = found.model.text, found.model.architecture, held_config(checkpoint, found.model)
    if all(unit.kept for unit in units) and not untrue_mtp and not check(held, modules, architecture):
        return checkpoint.config_bytes, held
    fp8 = [unit for unit in units if formats()[unit.target_format].grid.kind == "e4m3"]
    claimed = held.get("scale_fmt") == "ue8m0" if isinstance(held, Mapping) else False
    exact = all(unit.power_of_two or (claimed and unit.kept) for unit in fp8)
    declared = quantization_config(modules, architecture, scale_fmt="ue8m0" if fp8 and exact else None)
    config = {k: v for k, v in checkpoint.config.items() if k not in ("quantization_config", "compression_config")}
    inner = {k: v for k, v in text.items() if k not in ("quantization_config", "compression_config")}
    if untrue_mtp:
        inner["num_nextn_predict_layers"] = 0
    if any(unit.action == "quantized" and unit.target_format == "bf16" for unit in units):  # F16 or F32 was rounded
        for part in (config, inner):
            part.update({key: "bfloat16" for key in ("dtype", "torch_dtype") if key in part})
    config = {**config, "text_config": inner} if text is not checkpoint.config else {**config, **inner}
    if declared:
        config["quantization_config"] = declared
    return (json.dumps(config, indent=2) + "\n").encode(), declared
