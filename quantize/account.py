"""Every tensor of a checkpoint accounted for: what it is, by its family, and how it is stored, by its headers.

A missing, an extra, a mis-shaped or a half-stored tensor is refused here, by name, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import CheckpointError
from ..families import Model, TensorSpec, identify
from ..formats import PLAIN, Format, Part, Shape, formats, recognise
from ..formats.checkpoint import Checkpoint

_PARTS = (".weight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_shape")


class Item(NamedTuple):
    """One logical tensor as it is stored.

    spec: what the family says of it. module: its name without ".weight" (the whole name where it has no such ending).
    parts: the stored tensors, codes first; their names are `module + part.suffix`. format: the storage format.
    """

    spec: TensorSpec
    module: str
    parts: tuple[Part, ...]
    format: Format

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    @property
    def shape(self) -> Shape:
        """The logical shape, [out, in] for a matrix."""
        return self.parts[0].shape if self.format.plain else self.spec.shape


@dataclass(frozen=True, slots=True)
class Account:
    """All items of a checkpoint in the family's order. has_mtp: the MTP layers that the config calls for are there."""

    model: Model
    items: tuple[Item, ...]
    has_mtp: bool


def account(checkpoint: Checkpoint) -> Account:
    """Match a checkpoint's headers with what its config calls for. Raises CheckpointError with the first name."""
    model = identify(checkpoint.config)
    modules: dict[str, dict[str, Part]] = {}
    for name, stored in checkpoint.tensors.items():
        stem, dot, last = name.rpartition(".")
        suffix = dot + last if dot + last in _PARTS else ""
        modules.setdefault(stem if suffix else name, {})[suffix] = Part(suffix, stored.dtype, stored.shape)
    specs = list(model.tensors())
    has_mtp = any(spec.mtp and _module(spec.name) in modules for spec in specs)
    items, missing = [], []
    for spec in specs:
        module = _module(spec.name)
        found = modules.pop(module, None)
        if found is not None:
            items.append(_item(spec, module, found, checkpoint))
        elif not spec.optional and (has_mtp or not spec.mtp):
            missing.append(spec.name)
    if missing:
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{checkpoint.label}: {missing[0]}{more} missing: the config calls for it, no shard has it"
        )
    for module, found in modules.items():
        _refuse_unknown(module, found, checkpoint)
    assert sum(len(item.parts) for item in items) == len(checkpoint.tensors), "a tensor is not accounted for"
    _refuse_stray_shards(checkpoint, items)
    return Account(model, tuple(items), has_mtp)


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _item(spec: TensorSpec, module: str, found: Mapping[str, Part], checkpoint: Checkpoint) -> Item:
    if found.keys() == {spec.name.removeprefix(module)}:
        (part,) = found.values()
        if part.dtype in PLAIN and _fits(part.shape, spec):
            return Item(spec, module, (part,), formats()[part.dtype.lower()])
    elif len(spec.shape) == 2 and "" not in found:
        parts = tuple(found[suffix] for suffix in _PARTS if suffix in found)
        if (storage := recognise(parts, spec.shape)) is not None:
            return Item(spec, module, parts, storage)
    raise CheckpointError(f"{_where(module, found, checkpoint)}: {_what_is_wrong(spec, found)}")


def _fits(shape: Shape, spec: TensorSpec) -> bool:
    """A KV scale is one number: vLLM takes it as [1] and without a dimension."""
    if spec.role == "attention.kv_scale" and shape == ():
        return True
    return len(shape) == len(spec.shape) and all(
        want in (-1, have) and have > 0 for want, have in zip(spec.shape, shape, strict=True)
    )


def _what_is_wrong(spec: TensorSpec, found: Mapping[str, Part]) -> str:
    have = ", ".join(f"{part.suffix or 'tensor'} {part.dtype} {list(part.shape)}" for part in found.values())
    expected = f"the config calls for {list(spec.shape)}"
    scale = found.keys() & {".weight_scale", ".weight_scale_inv"}
    if ".weight_packed" in found and not scale:
        return f"packed weight without its weight_scale ({have})"
    if ".weight_packed" in found and ".weight_shape" not in found and found[".weight_packed"].dtype == "I32":
        return f"packed INT4 weight without its weight_shape ({have})"
    weight = found.get(".weight")
    if "" in found and weight is not None:
        return f"unknown tensor beside its .weight (the config calls for no such tensor; {have})"
    if weight is not None and weight.dtype == "U8":
        return f"a weight of packed FP4 with FP8 scales, NVFP4, which is not supported ({have})"
    if weight is None and ".weight_packed" not in found and "" not in found:
        return f"scale without its weight ({have})"
    if weight is not None and weight.dtype == "F8_E4M3" and not scale:
        return f"FP8 weight without its scale, weight_scale_inv or weight_scale ({have})"
    if weight is not None and weight.dtype in PLAIN and scale:
        return f"a scale beside a weight that is not quantized ({have})"
    if weight is not None and len(found) == 1 and weight.dtype not in PLAIN:
        return f"dtype {weight.dtype} is not supported here ({have}); {expected} in BF16, F16, F32 or quantized"
    return f"wrong shape or dtype: found {have}; {expected}"


def held_config(checkpoint: Checkpoint, model: Model) -> Any:
    """The quantization_config that a checkpoint comes with; None without one. Raises CheckpointError where it has two.

    vLLM and SGLang look at the top level, under text_config and for a `compression_config`, and not in the same order.
    """
    keys = ("quantization_config", "compression_config")
    held = [part[key] for part in (checkpoint.config, model.text) for key in keys if part.get(key)]
    if any(config != held[0] for config in held):
        raise CheckpointError(f"{checkpoint.label}/config.json: two quantization configs that differ; keep one")
    return held[0] if held else None


def _where(module: str, found: Mapping[str, Part], checkpoint: Checkpoint) -> str:
    name = module + next(iter(found))
    return f"{checkpoint.label}/{checkpoint.tensors[name].file}: {name}"


def _refuse_unknown(module: str, found: Mapping[str, Part], checkpoint: Checkpoint) -> None:
    last = module.rpartition(".")[2]
    hints = {
        "weight_zero_point": "asymmetric INT4 is not supported",
        "weight_g_idx": "activation ordering is not supported",
        "weight_scale_2": "NVFP4 (modelopt) is not supported",
        "weight_global_scale": "NVFP4 is not supported",
        "input_scale": "static activation scales are not supported",
    }
    if found.keys() <= {".weight_scale", ".weight_scale_inv", ".weight_shape"}:
        hint = "a scale whose weight is missing"
    else:
        hint = hints.get(last, "the config calls for no such tensor")
    raise CheckpointError(f"{_where(module, found, checkpoint)}: unknown tensor ({hint})")


def _refuse_stray_shards(checkpoint: Checkpoint, items: list[Item]) -> None:
    """A shard that the index does not name is accepted only as the MTP layers' own file."""
    for item in items if checkpoint.unindexed else []:
        for part in item.parts:
            file = checkpoint.tensors[item.module + part.suffix].file
            if file in checkpoint.unindexed and not item.spec.mtp:
                raise CheckpointError(
                    f"{checkpoint.label}: shard {file}, which the index lacks, holds {item.spec.name}"
                )
