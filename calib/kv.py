"""From the statistics of a cache to the scales it should be stored at: `formats.kv_scales`.

The rule is s = 2^ceil(log2(headroom * amax / 448)): the smallest power of two that holds `headroom` times what was
seen. It comes from amax and never from a percentile. What clips costs several percent of error at once, while room
above costs nothing: e4m3 has four bits at every exponent, so only what sinks below its smallest numbers loses by it.

Everything told of a part follows exactly from the counts of its BF16 magnitudes (`formats.statistics.cache_bins`): sums
run over the bins and are rounded once, so the same statistics give the same bytes on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import CheckpointError
from ..families import CacheLayer, CachePart, Model, identify
from ..formats.kv_scales import E4M3_MAX, KV_DTYPE, RUNTIMES, KVScales, LayerScales, Loss, PartScale
from ..formats.statistics import BINS, CacheStatistics, Statistics, bin_values
from ..quantize.kv import main_parts, scale_tensors, why

if TYPE_CHECKING:
    from torch import Tensor

MAX_HEADROOM = 64.0
#: where a layer has seen fewer tokens, its amax is not to be trusted, and that is said
FEW_TOKENS = 16_384
_LEAST = -126  # smallest normal F32: kernels flush what is below it
_SMALLEST_NORMAL = 2.0**-6  # of e4m3
_INF = 0x7F80  # bins from here on are Inf and NaN
_TILE, _F32 = 128, 4


def kv_scales(statistics: Statistics, headroom: float = 2.0) -> KVScales:
    """The KV-scale manifest of a calibrated model.

    Raises CheckpointError where a layer has no statistics, no token, or values that no scale is right for.
    """
    if not 1 <= headroom <= MAX_HEADROOM:
        raise CheckpointError(
            f"headroom is {headroom:g}: from 1 (anything less clips) to {MAX_HEADROOM:g} (anything more underflows)"
        )
    about = statistics.about
    if not isinstance(about.get("config"), Mapping):
        raise CheckpointError(f"{statistics.folder}: does not say the source's config; calibrate again")
    model = identify(about["config"])
    cached = [layer for layer in model.cache() if not layer.mtp]
    layers = tuple(_layer(statistics, layer, headroom) for layer in cached if main_parts(layer))
    if not layers:
        raise CheckpointError(f"{statistics.folder}: {model.architecture.name} has no layer with a KV cache")
    few = [layer.layer for layer in layers if min(part.tokens for part in layer.parts.values()) < FEW_TOKENS]
    mtp = sum(layer.mtp for layer in model.cache())
    name = model.architecture.name
    return KVScales(
        tool=__version__,
        source={
            "name": str(about["source"]["name"]),
            "digest": str(about["source"]["digest"]),
            "folding": about["source"].get("folding", {}),
        },
        architecture=name,
        statistics=statistics.digest,
        text=str(about["text"]["digest"]),
        tokens=int(about["tokens"]),
        headroom=float(headroom),
        num_layers=len(cached),
        layers_without_cache=tuple(layer.layer for layer in cached if not main_parts(layer)),
        mtp_layers=mtp,
        kv_dtype=KV_DTYPE,
        bytes_per_token=bytes_per_token(cached),
        indexer_bytes_per_token=sum(part.width + _F32 for layer in cached for part in layer.parts if _indexer(part)),
        notes=_notes(few, len(layers), mtp),
        runtimes=_runtimes(model, layers),
        layers=layers,
    )


def _runtimes(model: Model, layers: Sequence[LayerScales]) -> dict[str, dict[str, Any]]:
    """What may be given to each runtime: tensors that it reads, or nothing, and why."""
    scales = {layer.layer: {name: part.scale for name, part in layer.parts.items()} for layer in layers}
    given: dict[str, dict[str, Any]] = {runtime: {} for runtime in RUNTIMES}
    given["vllm"] = {
        name: {"dtype": "F32", "shape": [1], "value": value} for name, value in scale_tensors(model, scales).items()
    }
    return {
        runtime: {"reads": "tensors" if tensors else "nothing", "why": why(model, runtime), "tensors": tensors}
        for runtime, tensors in given.items()
    }


def _notes(few: Sequence[int], layers: int, mtp: int) -> tuple[str, ...]:
    notes = []
    if few:
        which = "all layers" if len(few) == layers else f"layers {', '.join(map(str, few))}"
        notes.append(
            f"{which}: fewer than {FEW_TOKENS:,} tokens seen, so amax may be far below what serving meets; calibrate "
            "on more and longer text, or give --headroom 4 to 8, which costs nothing"
        )
    if mtp:
        notes.append(f"{mtp} MTP layer{'s' * (mtp > 1)}: not calibrated; the cache of a draft model stays at scale 1.0")
    return tuple(notes)


def _indexer(part: CachePart) -> bool:
    return part.name == "index_k"


def bytes_per_token(layers: Sequence[CacheLayer]) -> dict[str, int]:
    """Layout -> bytes that one token takes in these layers, without indexer keys.

    fp8_ds_mla (latent in e4m3 with an F32 scale for each 128 of it, k_pe in BF16) is for latent attention alone.
    """
    widths = [{part.name: part.heads * part.width for part in main_parts(layer)} for layer in layers]
    values = sum(sum(parts.values()) for parts in widths)
    sizes = {"bf16": 2 * values, KV_DTYPE: values}
    latents = [parts for parts in widths if parts]
    if all("kv_c" in parts and parts["kv_c"] % _TILE == 0 for parts in latents):
        sizes["fp8_ds_mla"] = sum(p["kv_c"] + p["kv_c"] // _TILE * _F32 + 2 * p["k_pe"] for p in latents)
    return sizes


def choose_scale(amax: float, headroom: float) -> float:
    """The smallest power of two s with headroom * amax <= 448 * s, exactly; never below the smallest normal F32."""
    wanted = Fraction(amax) * Fraction(headroom) / Fraction(E4M3_MAX)
    exponent = math.frexp(float(wanted))[1] if wanted >= Fraction(2) ** _LEAST else _LEAST
    while Fraction(2) ** exponent < wanted:  # float(wanted) was rounded: at most one step off, either way
        exponent += 1
    while exponent > _LEAST and Fraction(2) ** (exponent - 1) >= wanted:
        exponent -= 1
    return 2.0**exponent


def _layer(statistics: Statistics, layer: CacheLayer, headroom: float) -> LayerScales:
    parts = main_parts(layer)
    found = {part.name: _checked(statistics, layer.layer, part) for part in parts}
    scales = {name: choose_scale(held.amax, headroom) for name, held in found.items()}
    row = max(scales.values()) if "kv_c" in scales else None
    made = {part.name: _part(part, found[part.name], scales[part.name], row) for part in parts}
    return LayerScales(layer.layer, row, made)


def _checked(statistics: Statistics, layer: int, part: CachePart) -> CacheStatistics:
    """A part's statistics, where a scale can be chosen from them. CheckpointError names layer and part."""
    where = f"{statistics.folder}: layer {layer}: {part.name}"
    found = statistics.cache(layer, part.name)
    if found is None:
        raise CheckpointError(f"{where}: no statistics of it; calibrate again, all layers")
    size = part.heads * part.width
    if found.tokens < 1:
        raise CheckpointError(f"{where}: no token in its statistics; calibrate with more text")
    counts = found.histogram
    if counts.shape != (BINS,) or bool((counts < 0).any()) or int(counts.sum()) != found.tokens * size:
        raise CheckpointError(
            f"{where}: its histogram does not hold {found.tokens:,} tokens of {size} values; calibrate again"
        )
    if broken := int(counts[_INF:].sum()) or int(not math.isfinite(found.amax)):
        raise CheckpointError(
            f"{where}: {broken:,} of {found.tokens * size:,} values are Inf or NaN: no scale is right where the model "
            "or its weights are broken; mend that and calibrate again"
        )
    if not found.amax > 0:
        raise CheckpointError(
            f"{where}: zero in all {found.tokens:,} tokens, so no scale can be chosen; are that layer's weights whole?"
        )
    largest = float(bin_values()[counts.nonzero()[-1]])
    if largest != _as_bf16(found.amax):
        raise CheckpointError(
            f"{where}: amax is {found.amax:g}, but the largest value of its histogram {largest:g}; calibrate again"
        )
    return found


def _as_bf16(value: float) -> float:
    import torch

    return float(torch.tensor(value, dtype=torch.float32).bfloat16())


def _part(part: CachePart, found: CacheStatistics, scale: float, row: float | None) -> PartScale:
    bins = counted(found.histogram)
    total = found.tokens * part.heads * part.width
    return PartScale(
        part.heads,
        part.width,
        found.tokens,
        found.amax,
        quantile(bins, total, Fraction(999, 1000)),
        quantile(bins, total, Fraction(9999, 10000)),
        math.sqrt(math.fsum(count * value * value for _, value, count in bins) / total),
        scale,
        loss(bins, total, scale),
        loss(bins, total, 1.0),
        None if row is None else loss(bins, total, row),
    )


Bins = list[tuple[int, float, int]]


def counted(histogram: Tensor) -> Bins:
    """(bin, magnitude, count) of the bins that hold something, smallest magnitude first."""
    held = histogram.nonzero()[:, 0]
    return list(zip(held.tolist(), bin_values()[held].tolist(), histogram[held].tolist(), strict=True))


def quantile(bins: Bins, total: int, share: Fraction) -> float:
    """The smallest magnitude that at least this share of the values does not exceed."""
    rank = math.ceil(share * total)
    for _, value, count in bins:
        rank -= count
        if rank <= 0:
            return value
    raise AssertionError("the bins hold fewer values than their total")


def loss(bins: Bins, total: int, scale: float) -> Loss:
    """What storing e4m3(x / scale) does to the values, with torch's own float8_e4m3fn rounding."""
    stored = _stored(scale)
    zero = subnormal = clipped = 0
    error2, norm2 = [], []
    for number, value, count in bins:
        code = stored[number]
        zero += count if code == 0 and value > 0 else 0
        subnormal += count if 0 < code < _SMALLEST_NORMAL else 0
        clipped += count if value > E4M3_MAX * scale else 0
        error2.append(count * (value - code * scale) ** 2)
        norm2.append(count * value * value)
    error = math.sqrt(math.fsum(error2) / math.fsum(norm2))
    return Loss(zero / total, subnormal / total, clipped / total, error)


@lru_cache(maxsize=64)
def _stored(scale: float) -> list[float]:
    """e4m3(x / scale) of the magnitude of every finite bin."""
    import torch

    scaled = (bin_values()[:_INF] / scale).clamp(max=E4M3_MAX)
    codes: list[float] = scaled.to(torch.float8_e4m3fn).float().tolist()
    return codes
