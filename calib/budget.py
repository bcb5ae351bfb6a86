"""What calibrating a layer takes, from shapes alone: is it loaded whole, or are its experts loaded one by one?

The answer depends on the memory limit and on nothing that the machine has, because the two ways round differently: a
job that is gone on with must go on as it began. Python and torch themselves (about 0.5 GB) are not counted.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..errors import PlanError
from ..formats.statistics import input_of, pool_of
from .model import Source
from .observe import HELDOUT_ROWS, ROUTED

_F32 = 4


class Need(NamedTuple):
    """Bytes that a layer takes when it is loaded whole, when its experts come one by one, and of its statistics file.

    single is None where the layer is dense.
    """

    whole: int
    single: int | None
    stored: int


def layer_need(source: Source, layer: int, width: int, workspace: int, hessians: frozenset[str]) -> Need:
    """width: bytes of a weight in the forward pass. workspace: what the pass of a batch takes besides the weights."""
    fixed = routed = largest = stored = 0
    square = {"fixed": 0, "routed": 0, "expert": 0, "pool": 0}  # bytes of Hessians
    for item in source.layers[layer]:
        size = math.prod(item.shape)
        largest = max(largest, size * _F32 + item.nbytes)
        if item.spec.role == ROUTED:
            routed += size * width
        else:
            fixed += size * width
        if item.spec.linear:
            columns = item.shape[1]
            stored += columns * _F32 + 256
            if item.spec.role in hessians and input_of(item.module) == item.module:
                hessian = columns * columns * _F32
                stored += hessian + HELDOUT_ROWS * columns * _F32
                square["routed" if item.spec.role == ROUTED else "fixed"] += hessian
                if pool_of(item.module) and ".experts.0." in f".{item.module}.":
                    square["expert"] += hessian
                    square["pool"] += hessian
    common = fixed + square["fixed"] + square["pool"] + workspace + largest
    experts = source.experts(layer)
    if experts is None:
        return Need(common, None, stored)
    one = routed // len(experts.items)
    return Need(common + routed + square["routed"], common + one + square["expert"], stored + 2 * square["pool"])


def workspace_bytes(source: Source, batch: int, length: int) -> int:
    """A generous estimate of what the forward pass of [batch, length] tokens takes besides weights, in bytes."""
    config, tokens = source.config, batch * length
    inner: int = max(config.intermediate_size, config.moe_intermediate_size * max(1, config.n_shared_experts or 0))
    scores: int = 3 * batch * config.num_attention_heads * length * length * _F32
    routing: int = tokens * config.num_experts_per_tok * (config.n_routed_experts + 1) * 9
    hidden: int = config.hidden_size
    return scores + routing + tokens * (hidden * 10 + inner * 4) * _F32


def choose(needs: list[Need], memory: int) -> list[bool]:
    """For each layer whether it is loaded whole. PlanError where one does not fit either way."""
    chosen = []
    for layer, need in enumerate(needs):
        if need.whole <= memory:
            chosen.append(True)
        elif need.single is not None and need.single <= memory:
            chosen.append(False)
        else:
            least = need.whole if need.single is None else need.single
            raise PlanError(
                f"layer {layer} takes {least / 1e9:.2f} GB of memory, --memory allows {memory / 1e9:.2f} GB: allow "
                "more, or give a shorter --length, a smaller --batch or fewer --hessians"
            )
    return chosen
