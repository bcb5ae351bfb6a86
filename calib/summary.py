"""What a statistics folder says in short: tokens, experts, and the cache of each layer."""

from __future__ import annotations

from typing import Any

import torch

from ..families import identify
from ..formats.statistics import BINS, CacheStatistics, Statistics, bin_values


def summary(statistics: Statistics) -> dict[str, Any]:
    """The keys of `calibrate --json` that tell what was found.

    experts_seen: tokens of the expert that got least, of a middle one and of the one that got most, over all layers,
    and how many got none. kv: a layer's parts with amax, quantiles of the magnitudes, root mean square and tokens.
    """
    about = statistics.about
    seen = [entry["experts"] for entry in about["layers"] if "experts" in entry]
    experts = {
        "min": min((one["min"] for one in seen), default=0),
        "median": float(torch.tensor([one["median"] for one in seen]).median()) if seen else 0.0,
        "max": max((one["max"] for one in seen), default=0),
        "unseen": sum(one["unseen"] for one in seen),
    }
    kv = []
    for layer in identify(about["config"]).cache():
        parts = {part.name: statistics.cache(layer.layer, part.name) for part in layer.parts}
        if found := {name: _part(held) for name, held in parts.items() if held is not None}:
            kv.append({"layer": layer.layer, "parts": found})
    return {"tokens": about["tokens"], "layers": len(about["layers"]), "experts_seen": experts, "kv": kv}


def _part(held: CacheStatistics) -> dict[str, Any]:
    return {
        "tokens": held.tokens,
        "amax": held.amax,
        "p99_9": quantile(held.histogram, 0.999),
        "p99_99": quantile(held.histogram, 0.9999),
        "rms": float(held.second_moment.double().mean().sqrt()),
    }


def quantile(histogram: torch.Tensor, share: float) -> float:
    """The smallest BF16 magnitude that at least this share of the values do not exceed. histogram: I64 [BINS]."""
    wanted = -(-int(histogram.sum()) * round(share * 1e6) // 1_000_000)  # in whole numbers, rounded up
    bin_ = int((histogram.cumsum(0) < wanted).sum())
    return float(bin_values()[min(bin_, BINS - 1)])
