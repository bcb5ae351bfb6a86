"""Folding: powers of two moved from the KV cache's scales into the weights, exactly.

A cached part is multiplied by 2^e where it is made and by 2^-e where it is read, in weights that stand on both sides of
the cache (`families` says which). Then e4m3 rows at scale 1.0 hold what rows at scale 2^-e would have held, on runtimes
that read no scale at all. A fold is a view of the source: its rows are multiplied as they are read, in the form in
which they are stored, so that what a job copies stays exact and what it quantizes is a rounding of exact values.

Which exponents a source can take depends on its weights alone, so all artifacts of one source are folded alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, NamedTuple

from ..errors import PlanError, VerifyError
from ..families import Fold, Model, TensorSpec
from ..formats.checkpoint import MANIFEST, Checkpoint, Reader
from ..formats.manifest import Manifest, read_manifest
from .account import Account, Item, account
from .blocks import Buffers, StoredMatrix, row_blocks
from .extras import Extras
from .scaling import MOST, Scaling, room

Folding = Mapping[str, Mapping[str, int]]


class Lowered(NamedTuple):
    """A fold that could not be had: `wanted` of a layer's part came to `settled`, 0 where nothing is left of it.

    tensor: the one that has no more room.
    """

    layer: int
    part: str
    wanted: int
    settled: int
    tensor: str


class _Place(NamedTuple):
    """A tensor that takes part in folding one part of one layer."""

    layer: str
    part: str
    sign: int
    item: Item
    scaling: Scaling


def exponents(scales: Mapping[int, Mapping[str, float]]) -> dict[int, dict[str, int]]:
    """KV scales (stored = x / scale), layer -> part -> a power of two, as the exponents that make up for them."""
    found: dict[int, dict[str, int]] = {}
    for layer, parts in scales.items():
        for part, scale in parts.items():
            exponent = -_log2(scale, f"layer {layer}, {part}")
            if exponent:
                found.setdefault(layer, {})[part] = exponent
    return found


def _log2(scale: float, where: str) -> int:
    mantissa, denominator = float(scale).as_integer_ratio() if 0 < scale < float("inf") else (0, 1)
    if mantissa.bit_count() != 1 or denominator.bit_count() != 1:
        raise PlanError(f"KV scale of {where} is {scale!r}: only a power of two can be folded; choose scales with `kv`")
    return mantissa.bit_length() - denominator.bit_length()


def held(checkpoint: Checkpoint) -> Folding:
    """The folding that a checkpoint's manifest tells of; {} without one. Raises PlanError where it cannot be read."""
    if not (checkpoint.folder / MANIFEST).exists():
        return {}
    try:
        return folding_of(read_manifest(checkpoint.folder))
    except VerifyError as error:
        raise PlanError(f"{error}: whether the source is folded cannot be told; get a good copy of it") from None


def folding_of(manifest: Manifest) -> Folding:
    """The folding that a manifest tells of."""
    folding: Folding = manifest.extras.get("folding", {})
    return folding


def settle(
    checkpoint: Checkpoint, wanted: Mapping[int, Mapping[str, int]]
) -> tuple[dict[str, dict[str, int]], list[Lowered]]:
    """The exponents nearest to the wanted ones with which every product is exact -> (folding, what was lowered).

    Reads the tensors concerned, whole. Raises PlanError for a layer or part that the model does not have, an exponent
    beyond 2^64, or a source that is folded already; CheckpointError for a model that cannot be folded.
    """
    if held(checkpoint):
        raise PlanError(f"{checkpoint.label}: is folded already (see its {MANIFEST}); give --unfold, or its own source")
    asked = {str(layer): {part: e for part, e in parts.items() if e} for layer, parts in wanted.items()}
    for layer, parts in asked.items():
        for part, exponent in parts.items():
            if type(exponent) is not int or abs(exponent) > MOST:
                raise PlanError(
                    f"layer {layer}: {part} would be multiplied by 2^{exponent}; up to 2^{MOST} is possible"
                )
    found = account(checkpoint)
    bounds: dict[tuple[str, str], int] = {}
    limiting: dict[tuple[str, str], str] = {}
    reader, buffers = Reader(checkpoint), Buffers()
    try:
        for place in _places(found, asked):
            key, e = (place.layer, place.part), asked[place.layer][place.part]
            least, most = _room(reader, place, buffers)
            # the tensor is multiplied by 2^(sign * e): its bounds, seen from e
            low, high = (least, most) if place.sign > 0 else (-most, -least)
            bound = min(bounds.get(key, e), high) if e > 0 else max(bounds.get(key, e), low)
            if bound != bounds.get(key, e):
                limiting[key] = place.item.spec.name
            bounds[key] = bound
    finally:
        reader.close()
    folding: dict[str, dict[str, int]] = {}
    for (layer, part), exponent in bounds.items():
        if exponent:
            folding.setdefault(layer, {})[part] = exponent
    lowered = [
        Lowered(int(layer), part, asked[layer][part], bounds[layer, part], tensor)
        for (layer, part), tensor in limiting.items()
    ]
    return folding, lowered


def check_unfold(checkpoint: Checkpoint) -> Folding:
    """The folding of a source that can be undone without loss. Reads the tensors concerned, whole.

    Raises PlanError where its manifest knows of none, CheckpointError with the tensor that has lost bits: one of
    blocks that hold other rows too, and that was quantized after the fold.
    """
    folding = held(checkpoint)
    if not folding:
        raise PlanError(f"{checkpoint.label}: no {MANIFEST} there says that it is folded; there is nothing to unfold")
    reader, buffers = Reader(checkpoint), Buffers()
    try:
        for place in _places(account(checkpoint), folding):
            item, exponent = place.item, -place.sign * folding[place.layer][place.part]
            scaling = place.scaling._replace(exponent=exponent)
            matrix = StoredMatrix(reader, item.module, item.parts, item.format.name, item.shape, scaling)
            for first, last in row_blocks(item.shape, item.parts[0]):
                matrix.read(first, last, buffers)
    finally:
        reader.close()
    return folding


def scalings(checkpoint: Checkpoint, found: Account, extras: Extras) -> dict[str, Scaling]:
    """Module -> what a job multiplies it by. Reads no weights.

    Raises PlanError where `extras` does not know of the folding that the source has, or folds what the model lacks.
    """
    if extras.held != held(checkpoint):
        raise PlanError(
            f"{checkpoint.label}: is folded (see its {MANIFEST}), which this job was not told; take it from there"
        )
    applied: dict[str, dict[str, int]] = {}
    for layer in extras.folding.keys() | extras.held.keys():
        after, before = extras.folding.get(layer, {}), extras.held.get(layer, {})
        applied[layer] = {part: after.get(part, 0) - before.get(part, 0) for part in after.keys() | before.keys()}
    applied = {layer: parts for layer, parts in applied.items() if any(parts.values())}
    return {
        place.item.module: place.scaling._replace(exponent=place.sign * applied[place.layer][place.part])
        for place in _places(found, applied)
        if applied[place.layer][place.part]
    }


def settled(checkpoint: Checkpoint, wanted: Mapping[int, Mapping[str, int]]) -> Extras:
    """What a job that folds takes: `settle`."""
    folding, lowered = settle(checkpoint, wanted)
    named: dict[str, dict[str, list[Any]]] = {}
    for one in lowered:
        named.setdefault(str(one.layer), {})[one.part] = [one.wanted, one.tensor]
    return Extras(folding=folding, lowered=named)


def carried(checkpoint: Checkpoint) -> Extras:
    """What a job that folds nothing takes from its source: the folding that it has."""
    folding = held(checkpoint)
    return Extras(folding=folding, held=folding)


def notes(extras: Extras) -> list[str]:
    """What whoever serves the artifact must know of its folding."""
    if extras.held and not extras.folding:
        return [f"unfolded: {_ranges(extras.held)} undone; pair it with artifacts that are not folded"]
    kept = ", as its source was" if extras.held else ""
    found = [f"folded{kept}: {_ranges(extras.folding)}; serve the KV cache at scale 1.0, beside a pool folded alike"]
    found = found * bool(extras.folding) + [_less(extras, part) for part in _parts(extras.lowered)]
    if extras.folded_by and not found:
        found = ["nothing is folded: every scale in the file is 1.0"]
    if extras.folded_by and not extras.folded_by["same_source"]:
        name = extras.folded_by["source"]["name"]
        found.append(f"the folded scales were calibrated on {name}, another checkpoint; they must be of one model")
    return found


def _less(extras: Extras, part: str) -> str:
    """What could not be had of the folds of one part."""
    layers = [layer for layer, parts in extras.lowered.items() if part in parts]
    nothing = sum(part not in extras.folding.get(layer, {}) for layer in layers)
    asked, tensor = extras.lowered[layers[0]][part]
    exponent = extras.folding.get(layers[0], {}).get(part, 0)
    first = f"2^{exponent} for 2^{asked}" if exponent else f"2^{asked} not at all"
    return (
        f"{part} is folded less than asked in {_many(layers)}, not at all in {nothing} of them: more would lose bits "
        f"in the form in which the source is stored (the first: layer {layers[0]}, {first}, of {tensor})"
    )


def _many(layers: Sized) -> str:
    return f"{len(layers)} layer{'s' if len(layers) > 1 else ''}"


def _parts(layers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return sorted({part for parts in layers.values() for part in parts})


def _ranges(folding: Folding) -> str:
    """For the eye, e.g. "kv_c by 2^2 to 2^5 in 4 layers"."""
    found = {part: [layer[part] for layer in folding.values() if part in layer] for part in _parts(folding)}
    return ", ".join(
        f"{part} by 2^{min(e)}{f' to 2^{max(e)}' if min(e) < max(e) else ''} in {_many(e)}" for part, e in found.items()
    )


def undoing(model: Model, folding: Folding) -> dict[str, Scaling]:
    """Module -> what undoes a folding of its values, in whatever format they are stored."""
    return {
        spec.name.removesuffix(".weight"): _scaling(one, -one.sign * folding[str(spec.layer)][one.part])
        for spec, one in _touched(model, model.tensors(), folding)
    }


def _places(found: Account, folding: Folding) -> Iterator[_Place]:
    """All stored tensors that take part in folding the named parts of the named layers."""
    items = {item.spec: item for item in found.items if str(item.spec.layer) in folding}
    for spec, one in _touched(found.model, items, folding):
        yield _Place(str(spec.layer), one.part, one.sign, items[spec], _scaling(one, 0))


def _touched(model: Model, specs: Iterable[TensorSpec], folding: Folding) -> Iterator[tuple[TensorSpec, Fold]]:
    if not folding:
        return
    folds = model.folds()
    _refuse_unknown(model, folding)
    for spec in specs:
        layer = str(spec.layer)
        if spec.mtp or layer not in folding:
            continue
        for one in folds:
            if one.part in folding[layer] and spec.name.endswith(f".layers.{layer}.{one.tail}"):
                yield spec, one


def _scaling(one: Fold, exponent: int) -> Scaling:
    return Scaling(exponent, one.first, one.last, one.period)


def _refuse_unknown(model: Model, folding: Folding) -> None:
    """PlanError for what cannot be folded: an MTP layer cannot, because no statistics of its cache are kept."""
    kept = {str(layer.layer): layer for layer in model.cache()}
    known = {fold.part for fold in model.folds()}
    for layer, parts in folding.items():
        if layer not in kept or kept[layer].mtp:
            raise PlanError(f"folding: layer {layer} is no decoder layer of this {model.architecture.name}")
        for part in parts:
            if part not in known:
                raise PlanError(
                    f"folding: layer {layer} of this {model.architecture.name} has no part {part!r}; those that can be "
                    f"folded are {', '.join(sorted(known))}"
                )


def _room(reader: Reader, place: _Place, buffers: Buffers) -> tuple[int, int]:
    """(least, most) exponents by which a tensor can be multiplied."""
    item = place.item
    matrix = StoredMatrix(reader, item.module, item.parts, item.format.name, item.shape)
    least, most = -MOST, MOST
    for first, last in row_blocks(item.shape, item.parts[0]):
        found = room(matrix.read(first, last, buffers), place.scaling, first, item.shape)
        least, most = max(least, found[0]), min(most, found[1])
    return least, most
