"""A lenient reading of anybody's checkpoint: all that headers, index and config say, and all that is wrong with it.

`quantize.account` refuses at the first fault, because what it accepts is converted. Here every fault is a fact for the
rules to judge, and only a config.json that says nothing of the model ends the reading. No weights are read, but for
single numbers: KV scales and the scales of FP8 by tensor.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError
from ..families import Model, TensorSpec, identify
from ..formats import PLAIN, Part, Shape, recognise
from ..formats.checkpoint import STRAY_CONFIG, WORK, Place, in_folder, parse_json, read_file, unfinished
from ..quantize.naming import Built, Module
from ..quantize.plan import Plan
from ..quantize.resolve import Answer, read
from .shards import Fault, compare_with_index, read_number, read_shards, stray_config

#: what a quantized matrix is made of in the formats that are judged
PARTS = (".weight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_shape")
_NVFP4 = (".weight_scale_2", ".weight_global_scale", ".input_global_scale")
#: names of KV-cache scales under every spelling that is in use
KV_SCALE = re.compile(r"(^|.*[._])([kv]|kv|q|prob|output)_(scale|zero_point)$")

# states of an entry beside the names of formats and None (plain): nothing can be said of its format
ABSENT, LOST, BROKEN, NVFP4 = "(absent)", "(lost)", "(broken)", "(nvfp4)"


class Entry(NamedTuple):
    """One tensor that the config calls for, as it is stored.

    module: its name without ".weight". parts: what lies there, companions included. state: None for plain floats, the
    name of a format (INT4 with any group that divides: "int4-g<size>"), or one of ABSENT, LOST (the index or a damaged
    shard would have it), BROKEN (fits no format) and NVFP4.
    """

    spec: TensorSpec
    module: str
    parts: tuple[Part, ...]
    state: str | None

    @property
    def known(self) -> bool:
        """Whether it is stored in a form that can be judged."""
        return self.state is None or not self.state.startswith("(")

    @property
    def companions(self) -> list[Part]:
        """What lies beside the parts of a format: zero points, activation scales, unknown things."""
        return [part for part in self.parts if part.suffix not in (*PARTS, *_NVFP4, "")]


class Kind(NamedTuple):
    """Stored matrices that differ in nothing but their place; leaf: last component of the name, e.g. "o_proj"."""

    role: str
    leaf: str
    shape: Shape
    state: str | None
    scale_dtype: str
    mtp: bool


@dataclass(frozen=True)
class Survey:
    """Everything that is known of a checkpoint, or of an artifact that is only planned.

    entries: what the config calls for, in the family's order; MTP layers only where the checkpoint has them.
    extra: tensors that the config does not call for. faults: of files and index.
    declared: every quantization config that was found, as (where, value); the first is the one that runtimes read.
    scalars: the values of KV scales and of FP8 scales by tensor, where they are single numbers.
    """

    config: Mapping[str, Any]
    model: Model
    entries: tuple[Entry, ...]
    has_mtp: bool
    extra: Mapping[str, Part]
    faults: tuple[Fault, ...]
    declared: tuple[tuple[str, Any], ...]
    scalars: Mapping[str, float]
    _answers: dict[str, list[tuple[Built, Answer]]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def quantization(self) -> Any:
        """The quantization config that both runtimes read, None without one."""
        return self.declared[0][1] if self.declared else None

    @property
    def method(self) -> str:
        """Its quant_method; "" where nothing is declared, "?" where it has none."""
        config = self.quantization
        if config is None:
            return ""
        return str(config.get("quant_method", "?")) if isinstance(config, Mapping) else "?"

    @cached_property
    def groups(self) -> list[tuple[str, Mapping[str, Any]]]:
        """The config groups of a compressed-tensors config that are objects, as (name, group)."""
        groups = self.quantization.get("config_groups") if isinstance(self.quantization, Mapping) else None
        items = groups.items() if isinstance(groups, Mapping) else ()
        return [(name, group) for name, group in items if isinstance(group, Mapping)]

    @cached_property
    def kinds(self) -> dict[Kind, tuple[str, int]]:
        """Every kind of stored matrix whose format is known -> (the first one's name, how many)."""
        found: dict[Kind, tuple[str, int]] = {}
        for spec, module, parts, state in self.entries:
            if len(spec.shape) != 2 or (state is not None and state.startswith("(")):
                continue
            scale = next((part.dtype for part in parts if "_scale" in part.suffix), "")
            kind = Kind(spec.role, module.rpartition(".")[2], spec.shape, state, scale, spec.mtp)
            first, count = found.get(kind, (module, 0))
            found[kind] = first, count + 1
        return found

    @cached_property
    def matrices(self) -> list[Module]:
        """The matrices that the config calls for, as the runtimes' name matching takes them; see `Entry.state`."""
        return [
            Module(entry.module, spec.role, spec.layer, spec.mtp, spec.linear, entry.state)
            for entry in self.entries
            if len((spec := entry.spec).shape) == 2 and spec.name.endswith(".weight")
        ]

    def answers(self, runtime: str) -> list[tuple[Built, Answer]]:
        """What a runtime makes of the config, module by module; see `quantize.resolve.read`."""
        if runtime not in self._answers:
            self._answers[runtime] = read(self.quantization, self.matrices, self.model.architecture, runtime)
        return self._answers[runtime]


def survey(where: Path | Place) -> Survey:
    """Read a checkpoint. Raises CheckpointError where there is no config.json that a family answers to."""
    place = in_folder(where)
    folder = place.folder
    try:
        listed = os.listdir(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror}); give the folder of a checkpoint") from None
    if WORK in listed and "config.json" not in listed:
        raise CheckpointError(f"{folder}: {unfinished(folder)}")
    config = parse_json(read_file(folder / "config.json"), folder / "config.json")
    tensors, faults, broken = read_shards(place)
    model = identify(config)
    specs = model.tensors()
    own_file = {_module(spec.name) for spec in specs if spec.mtp}
    twice = {fault.subject for fault in faults if fault.kind == "twice"}
    lost, more = compare_with_index(place, tensors, broken, own_file, twice)
    stray = stray_config(folder) if STRAY_CONFIG in listed else ()
    parts = ((name, Part("", stored.dtype, stored.shape)) for name, stored in tensors.items())

    def number(name: str) -> float | None:
        return read_number(place.shards, tensors[name])

    return _survey(config, specs, parts, (*faults, *more), lost, stray, number)


def survey_plan(plan: Plan) -> Survey:
    """The artifact that a plan would write, before anything is written."""
    config = json.loads(plan.config)
    source, copied, added = plan.checkpoint, {}, {}
    parts = []
    for unit in plan.units():
        if unit.value is not None:
            added[unit.module] = unit.value
        for old, output in zip(unit.source, unit.outputs, strict=False):
            if unit.action in ("copied", "repacked"):  # scales keep their values
                copied[output.name] = unit.module + old.suffix
        parts += [(output.name, output.part) for output in unit.outputs]

    def number(name: str) -> float | None:
        if name in added:
            return added[name]
        stored = source.tensors.get(copied.get(name, ""))
        return read_number(source.shards, stored) if stored else None

    return _survey(config, identify(config).tensors(), parts, (), frozenset(), (), number)


def _survey(
    config: Mapping[str, Any],
    specs: list[TensorSpec],
    tensors: Iterable[tuple[str, Part]],
    faults: tuple[Fault, ...],
    lost: frozenset[str] | None,
    stray: tuple[tuple[str, Any], ...],
    number: Callable[[str], float | None],
) -> Survey:
    """lost: modules of which tensors should be there by the index; None where that could be any."""
    whole = {spec.name for spec in specs if not spec.name.endswith(".weight")}
    expected = {spec.name.removesuffix(".weight") for spec in specs if spec.name.endswith(".weight")}
    modules: dict[str, list[Part]] = {}
    extra: dict[str, Part] = {}
    for name, part in tensors:
        stem, dot, last = name.rpartition(".")
        if name in whole and not KV_SCALE.match(name):
            modules.setdefault(name, []).append(Part("", part.dtype, part.shape))
        elif stem in expected and (last.startswith("weight") or not KV_SCALE.match(name)):
            modules.setdefault(stem, []).append(Part(dot + last, part.dtype, part.shape))
        else:
            extra[name] = part
    has_mtp = any(spec.mtp and _module(spec.name) in modules for spec in specs)
    entries = []
    for spec in specs:
        module = _module(spec.name)
        parts = tuple(sorted(modules.get(module, ())))  # whatever their order in the file
        if lost is None or module in lost:
            state: str | None = LOST
        else:
            state = _state(parts, spec.shape, module != spec.name) if parts else ABSENT
        if parts or (not spec.optional and (has_mtp or not spec.mtp)):
            entries.append(Entry(spec, module, parts, state))
    wanted = [name for name, part in extra.items() if KV_SCALE.match(name) and part.shape in ((), (1,))]
    for entry in entries:
        if entry.state == "fp8-tensor" and entry.spec.role in ("attention.q_a", "attention.kv_a"):
            wanted.append(f"{entry.module}.weight_scale")
    scalars = {name: value for name in wanted if (value := number(name)) is not None}
    model = identify(config)
    return Survey(config, model, tuple(entries), has_mtp, extra, faults, (*_declared(model), *stray), scalars)


def _module(name: str) -> str:
    return name.removesuffix(".weight")


@lru_cache(maxsize=1 << 16)
def _state(parts: tuple[Part, ...], shape: Shape, matrix: bool) -> str | None:
    """The state of what lies under one name (see `Entry`); `matrix`: the name ends in ".weight"."""
    if any(part.suffix in _NVFP4 for part in parts):
        return NVFP4
    found = {part.suffix: part for part in parts if part.suffix in ("", *PARTS)}
    if found.keys() == {".weight" if matrix else ""}:
        (part,) = found.values()
        fits = len(part.shape) == len(shape) and all(
            want in (-1, have) and have > 0 for want, have in zip(shape, part.shape, strict=True)
        )
        return None if fits and part.dtype in PLAIN else BROKEN
    if len(shape) != 2 or "" in found:
        return BROKEN
    if format_ := recognise(tuple(found.values()), shape):
        return format_.name
    if found.keys() - {".weight_shape"} == {".weight_packed", ".weight_scale"}:
        # INT4 with groups that are not written, or without weight_shape: P3 tells that, the others judge the rest
        packed, scale, sizes = found[".weight_packed"], found[".weight_scale"], found.get(".weight_shape")
        groups = scale.shape[1] if len(scale.shape) == 2 else 0
        fits = packed.dtype == "I32" and packed.shape == (shape[0], shape[1] // 8) and shape[1] % 8 == 0
        fits = fits and scale.dtype in PLAIN
        fits = fits and (sizes is None or (sizes.dtype in ("I32", "I64") and sizes.shape == (2,)))
        if fits and groups and scale.shape[0] == shape[0] and shape[1] % groups == 0:
            return f"int4-g{shape[1] // groups}"
    return BROKEN


def _declared(model: Model) -> list[tuple[str, Any]]:
    """In the order in which both runtimes look."""
    found = []
    for key in ("quantization_config", "compression_config"):
        for where, part in (("", model.config), ("text_config.", model.text)):
            if part.get(key) and not (where and model.text is model.config):
                found.append((f"config.json: {where}{key}", part[key]))
    return found
