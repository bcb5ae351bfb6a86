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
from typing import Any, NamedTuple

from ..errors import PlanError, RecipeError
from ..families import ROLES, Architecture, TensorSpec
from ..formats import DTYPES, Format, Part, Shape, formats
from ..formats.checkpoint import Checkpoint, make_header
from ..recipes import Recipe, Rule
from .account import Item, account
from .declare import Module, check, quantization_config

SHARD_BYTES = 5_000_000_000
METHODS = ("rtn", "search", "inverse")
OBJECTIVES = ("weighted", "weighted2", "mse")


class Output(NamedTuple):
    """One tensor of a shard: absolute file offset, and its part of the stored matrix."""

    name: str
    part: Part
    offset: int


class Unit(NamedTuple):
    """One matrix (or one plain tensor) and what becomes of it.

    action: "copied" (bytes), "repacked" (the same numbers in another container) or "quantized" (numbers chosen anew).
    source: the stored parts, names are `module + suffix`. outputs: what is written, in the same order as `parts`.
    method, objective, power_of_two: how codes and scales are chosen where they are.
    lossless: the result must decode to the source's exact values, or the tensor is refused.
    """

    module: str
    role: str
    shape: Shape
    action: str
    source: tuple[Part, ...]
    source_format: str
    target_format: str
    outputs: tuple[Output, ...]
    method: str = "rtn"
    objective: str = "weighted"
    power_of_two: bool = False
    lossless: bool = False

    @property
    def source_bytes(self) -> int:
        """Bytes read for this unit."""
        return sum(part.nbytes for part in self.source)


@dataclass(frozen=True, slots=True)
class Shard:
    """One output file: its header as it will be written, its size, and the units that fill it."""

    file: str
    header: bytes
    size: int
    units: tuple[Unit, ...]


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

    def units(self) -> Iterator[Unit]:
        """All units in the order of the shards."""
        return (unit for shard in self.shards for unit in shard.units)

    @cached_property
    def digest(self) -> str:
        """Identifies the job: equal digests write equal bytes."""
        digest = hashlib.sha256(b"phasefold plan 1\n" + self.checkpoint.digest.encode())
        digest.update(json.dumps(self.recipe.to_json(), sort_keys=True).encode())
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
        return {key: counts[key] for key in ("copied", "repacked", "folded", "quantized")} | {
            "dropped": len(self.dropped)
        }


def make_plan(checkpoint: Checkpoint, recipe: Recipe, shard_bytes: int = SHARD_BYTES) -> Plan:
    """Turn a request into a plan. Raises CheckpointError, RecipeError or PlanError with the first thing that is wrong.

    shard_bytes: largest sum of tensor bytes in one output shard; a larger single matrix gets a shard of its own.
    """
    found = account(checkpoint)
    model = found.model
    architecture = model.architecture
    _check_recipe(recipe, model.family)
    dropped: dict[str, str] = {}
    chosen: list[tuple[Item, Format, Rule | None]] = []
    matched: set[int] = set()
    for item in found.items:
        if item.spec.mtp and recipe.mtp == "drop":
            dropped.update({item.module + part.suffix: "MTP layer, dropped on request" for part in item.parts})
            continue
        number = None if item.spec.mtp and recipe.mtp == "keep" else _first_rule(recipe.rules, item.spec)
        matched |= {number} if number is not None else set()
        rule = recipe.rules[number] if number is not None else None
        chosen.append((item, _target(item, rule, architecture) if rule else item.format, rule))
    for number, rule in enumerate(recipe.rules):
        if number not in matched:
            raise RecipeError(
                f"{recipe.name}: rule {number + 1} ({', '.join(rule.roles)}) matches no tensor of this model"
            )
    chosen = _spell_fp8(chosen)
    modules = [
        Module(
            item.module,
            item.spec.role,
            item.spec.layer,
            item.spec.mtp,
            item.spec.linear,
            target.name if not target.plain else None,
        )
        for item, target, _ in chosen
        if len(item.spec.shape) == 2 and item.spec.name.endswith(".weight")
    ]
    notes = []
    if recipe.mtp == "drop" and not dropped:
        raise RecipeError(f'{recipe.name}: mtp = "drop", but this checkpoint has no MTP layer')
    lacks_mtp = bool(dropped) or not found.has_mtp
    units = [_unit(item, target, rule) for item, target, rule in chosen]
    config, declared = _config(checkpoint, model.text, modules, architecture, units, lacks_mtp=lacks_mtp)
    if problems := check(declared, modules, architecture):
        raise PlanError(f"{recipe.name}: no quantization_config can say this to the runtimes: {problems[0]}")
    if lacks_mtp and model.text.get("num_nextn_predict_layers"):
        notes.append(
            "num_nextn_predict_layers is set to 0: " + ("MTP dropped" if dropped else "the source has no MTP layer")
        )
    position = {name: number for number, name in enumerate(checkpoint.tensors)}
    units.sort(key=lambda unit: position[unit.module + unit.source[0].suffix])
    return Plan(
        checkpoint, recipe, architecture.name, model.family, _shards(units, shard_bytes), dropped, config, shard_bytes,
        tuple(notes),
    )  # fmt: skip


def _check_recipe(recipe: Recipe, family: str) -> None:
    if family not in recipe.families:
        raise RecipeError(
            f"{recipe.name} is a recipe for {', '.join(recipe.families)}, but this is a {family} checkpoint"
        )
    writable = [name for name, item in formats().items() if item.encode] + ["fp8", "bf16", "keep"]
    known = sorted(ROLES)
    for number, rule in enumerate(recipe.rules, 1):
        where = f"{recipe.name}: rule {number}"
        if rule.format not in writable:
            raise RecipeError(f"{where}: format {rule.format!r} is not written; there are {', '.join(writable)}")
        if rule.method not in METHODS or rule.objective not in OBJECTIVES:
            raise RecipeError(f"{where}: method is one of {', '.join(METHODS)}, objective of {', '.join(OBJECTIVES)}")
        if rule.method != "rtn" and not rule.format.startswith("int4"):
            raise RecipeError(f"{where}: method {rule.method!r} chooses INT4 codes, not {rule.format}")
        for role in rule.roles:
            if role != "*" and not any(k == role or k.startswith(role + ".") for k in known):
                raise RecipeError(f"{where}: unknown role {role!r}; known are {', '.join(known)}")


def _first_rule(rules: Iterable[Rule], spec: TensorSpec) -> int | None:
    return next((number for number, rule in enumerate(rules) if rule.covers(spec.role, spec.layer)), None)


def _target(item: Item, rule: Rule, architecture: Architecture) -> Format:
    """The format that a rule gives a tensor; the tensor's own where it is to be left alone."""
    spec, have = item.spec, item.format
    if rule.format == "keep" or (rule.format == "fp8" and have.grid.kind == "e4m3"):
        return have
    if rule.format == "bf16":
        return formats()["bf16"] if spec.linear or not have.plain else have
    if not spec.linear:
        if rule.names(spec.role) == spec.role:
            raise RecipeError(f"{spec.name}: runtimes hold {spec.role} unquantized, it cannot become {rule.format}")
        return have
    target = formats()[architecture.fp8 if rule.format == "fp8" else rule.format]
    if target.grid.kind == "int4" and (reason := (architecture.no_int4 or {}).get(spec.role)):
        raise RecipeError(f"{spec.name}: {spec.role} cannot be INT4: {reason}; put a rule for it before this one")
    group = target.grid.block[1]
    if target.grid.kind == "int4" and spec.shape[1] % group:
        raise PlanError(f"{spec.name}: {spec.shape[1]} input features are not divisible by the group of {group}")
    return have if have.grid == target.grid and have.grid.kind == "int4" else target


def _spell_fp8(chosen: list[tuple[Item, Format, Rule | None]]) -> list[tuple[Item, Format, Rule | None]]:
    """DeepSeek's spelling of FP8 blocks stands alone; beside any compressed-tensors format it takes their spelling."""
    if any(not target.plain and target.name != "fp8-block" for _, target, _ in chosen):
        respelt = formats()["fp8-block-ct"]
        return [(item, respelt if target.name == "fp8-block" else target, rule) for item, target, rule in chosen]
    return chosen


def _unit(item: Item, target: Format, rule: Rule | None) -> Unit:
    have, shape = item.format, item.shape
    if target.name == have.name:
        action, parts = "copied", item.parts
    elif target.grid == have.grid and not target.plain:  # the same numbers under other names
        action = "repacked"
        parts = tuple(
            part._replace(suffix=new.suffix) for part, new in zip(item.parts, target.parts(shape), strict=True)
        )
    else:
        action, parts = ("repacked" if target.plain and not have.plain else "quantized"), target.parts(shape)
    outputs = tuple(Output(item.module + part.suffix, part, 0) for part in parts)
    unit = Unit(item.module, item.spec.role, shape, action, item.parts, have.name, target.name, outputs)
    if action != "quantized" or rule is None:
        return unit
    blocks = target.grid.block[0] > 1
    power_of_two = rule.scale == "power_of_two" or (rule.scale is None and blocks)
    # e2m1 times a power of two fits e4m3 with a power-of-two scale: such a cast is exact, or it is refused
    lossless = have.grid.kind == "e2m1" and target.grid.kind == "e4m3" and power_of_two
    return unit._replace(
        method=rule.method, objective=rule.objective, power_of_two=power_of_two, lossless=lossless
    )  # fmt: skip


def _shards(units: list[Unit], limit: int) -> tuple[Shard, ...]:
    groups: list[list[Unit]] = [[]]
    size = 0
    for unit in units:
        nbytes = sum(output.part.nbytes for output in unit.outputs)
        if groups[-1] and size + nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(unit)
        size += nbytes
    return tuple(_shard(f"model-{n:05d}-of-{len(groups):05d}.safetensors", group) for n, group in enumerate(groups, 1))


def _shard(file: str, units: list[Unit]) -> Shard:
    """Lay a shard out without holes and with every tensor aligned to its element size.

    Units stand one after the other, those with wide dtypes first, so that the file is complete from the front as they
    are finished. Where odd sizes would misalign a tensor, all tensors are sorted by the width of their dtype instead.
    """
    parts = {unit.module: sorted(unit.outputs, key=lambda output: -_width(output.part)) for unit in units}
    widest = {module: _width(outputs[0].part) for module, outputs in parts.items()}
    units = sorted(units, key=lambda unit: -widest[unit.module])
    order = [output for unit in units for output in parts[unit.module]]
    header, offsets = make_header((o.name, o.part.dtype, o.part.shape) for o in order)
    if any(offset % _width(output.part) for output, offset in zip(order, offsets, strict=True)):
        order.sort(key=lambda output: -_width(output.part))
        header, offsets = make_header((o.name, o.part.dtype, o.part.shape) for o in order)
    placed = {o.name: o._replace(offset=offset) for o, offset in zip(order, offsets, strict=True)}
    size = offsets[-1] + order[-1].part.nbytes
    return Shard(file, header, size, tuple(u._replace(outputs=tuple(placed[o.name] for o in u.outputs)) for u in units))


def _width(part: Part) -> int:
    return DTYPES[part.dtype]


def _config(
    checkpoint: Checkpoint,
    text: Mapping[str, Any],
    modules: list[Module],
    architecture: Architecture,
    units: list[Unit],
    *,
    lacks_mtp: bool,
) -> tuple[bytes, Mapping[str, Any] | None]:
    """config.json as bytes and the quantization_config in it. Unchanged bytes where they tell the truth already."""
    held = checkpoint.config.get("quantization_config") or text.get("quantization_config")
    untrue_mtp = lacks_mtp and bool(text.get("num_nextn_predict_layers"))
    if all(unit.action == "copied" for unit in units) and not untrue_mtp and not check(held, modules, architecture):
        return checkpoint.config_bytes, held
    fp8 = [unit for unit in units if formats()[unit.target_format].grid.kind == "e4m3"]
    exact = all(unit.power_of_two for unit in fp8)
    declared = quantization_config(modules, architecture, scale_fmt="ue8m0" if fp8 and exact else None)
    config = {k: v for k, v in checkpoint.config.items() if k not in ("quantization_config", "compression_config")}
    inner = {k: v for k, v in text.items() if k not in ("quantization_config", "compression_config")}
    if untrue_mtp:
        inner["num_nextn_predict_layers"] = 0
    if any(unit.action == "quantized" and unit.target_format == "bf16" for unit in units):  # F16 or F32 was rounded
        inner.update({key: "bfloat16" for key in ("dtype", "torch_dtype") if key in inner})
    config = {**config, "text_config": inner} if text is not checkpoint.config else {**config, **inner}
    if declared:
        config["quantization_config"] = declared
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(), declared
