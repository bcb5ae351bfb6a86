"""What calibrating a layer takes, from shapes alone: is it loaded whole, or are its experts loaded one by one?

The answer depends on the memory limit and on nothing that the machine has, because the two ways round differently: a
job that is gone on with must go on as it began. Python and torch themselves (about 0.5 GB) are not counted.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..errors import PlanError
from ..formats.statistics import BINS, input_of
from .model import Source
from .observe import HELDOUT_ROWS, ROUTED

_F32 = 4
_NAMES = 300  # bytes a matrix takes in a header
_CACHE = 3 * (BINS * 8 + (1 << 18))  # three parts, of at most 65,536 channels


class Need(NamedTuple):
    """Bytes that a layer takes when it is loaded whole, when its experts come one by one, and of its statistics file.

    single is None where the layer is dense.
    """

    whole: int
    single: int | None
    stored: int


class Counts(NamedTuple):
    """Tokens of a job: those that sums are over, those that are held out, and how often one counts for an expert.

    visits: experts that a token is routed to; all of them where every expert is to see every token.
    """

    training: int
    heldout: int
    visits: int


def layer_need(
    source: Source, layer: int, width: int, workspace: int, hessians: frozenset[str], counts: Counts
) -> Need:
    """width: bytes of a weight in the forward pass. workspace: what the pass of a batch takes besides the weights."""
    fixed = routed = largest = stored = 0
    square = {"fixed": 0, "routed": 0, "one": 0}  # bytes of Hessians
    experts = source.experts(layer)
    for item in source.layers[layer]:
        size = math.prod(item.shape)
        largest = max(largest, size * _F32 + item.nbytes)
        mine = item.spec.role == ROUTED
        routed, fixed = routed + size * width * mine, fixed + size * width * (not mine)
        if not item.spec.linear:
            continue
        columns = item.shape[1]
        stored += columns * _F32 + _NAMES
        if item.spec.role not in hessians or input_of(item.module) != item.module:
            continue
        hessian = columns * columns * _F32
        if not mine:
            square["fixed"] += hessian
            stored += hessian + min(HELDOUT_ROWS, counts.heldout) * columns * _F32
            continue
        square["routed"] += hessian
        if experts and item in experts.items[0]:  # what follows is of all experts together
            many = len(experts.items)
            square["one"] += hessian
            own = min(many, 4 * counts.training * counts.visits // columns)  # that can have tokens enough
            stored += hessian * (1 + own)
            stored += min((many + 1) * HELDOUT_ROWS, 2 * counts.heldout * counts.visits) * columns * _F32
    common = fixed + square["fixed"] + square["one"] + workspace + largest  # one: the pool's
    if experts is None:
        return Need(common, None, stored + _CACHE)
    one = routed // len(experts.items)
    return Need(common + routed + square["routed"], common + one + square["one"], stored + _CACHE)


def model_need(source: Source, width: int, workspace: int) -> int:
    """Bytes that a model takes that is loaded whole, at most at a time. width, workspace: as of `layer_need`.

    While it is built there are, besides it, its experts before they are stacked, those of one layer twice more, and
    what is stored in another dtype as it is stored.
    """
    held = stored = routed = largest = layered = 0
    for items in (source.outside, *source.layers):
        mine = 0
        for item in items:
            size = math.prod(item.shape)
            held += size * width
            mine += size * width * (item.spec.role == ROUTED)
            stored += item.nbytes * (item.format.plain and item.nbytes != size * width)
            largest = max(largest, size * _F32 + item.nbytes)
        routed, layered = routed + mine, max(layered, mine)
    return held + max(workspace, stored + routed + 2 * layered + largest)


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
