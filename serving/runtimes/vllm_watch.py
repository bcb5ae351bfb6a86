"""What vLLM's loader left undone, told apart from what it may leave: its own check is off for quantized checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .dry import Tracker, Unwritten

#: parameters for which the runtime has a value where the checkpoint leaves them out in all layers
_OPTIONAL = {
    f"attn.{part}_{kind}": f"{value} where absent"
    for kind, value in (("scale", "1.0"), ("zero_point", "0"))
    for part in ("k", "v", "q", "prob")
}
_SHARED = ("embed_tokens.weight", "shared_head.head.weight", "lm_head.weight")  # a draft model borrows the target's


def left_over(
    tracker: Tracker, sentinels: Mapping[str, int] | None = None, *, draft: bool = False
) -> tuple[list[str], list[str]]:
    """Parameters of a loaded model that were not wholly written: those that matter, and those that may stay so, why.

    sentinels: what `left_as_sentinels` found. draft: the model is the draft of another one.
    """
    model, found = tracker.model, {item.name: item for item in tracker.unwritten()}
    for name, count in (sentinels or {}).items():
        if name not in found or found[name].count < count:
            found[name] = Unwritten(name, count, model.get_parameter(name).numel(), False)
    written = [name for name, _ in model.named_parameters() if name not in found]
    given = {tail for tail in _OPTIONAL if any(name.endswith(tail) for name in written)}
    unwritten, harmless = [], dict[str, list[Unwritten]]()
    for item in found.values():
        if why := _harmless(item, given, draft=draft):
            harmless.setdefault(why, []).append(item)
        else:
            unwritten.append(str(item))
    return unwritten, [f"{_first_of(items)}: {why}" for why, items in harmless.items()]


def _first_of(items: list[Unwritten]) -> str:
    return f"{items[0]} and {len(items) - 1} more" if len(items) > 1 else str(items[0])


def _harmless(item: Unwritten, given: set[str], *, draft: bool) -> str:
    """Why a parameter may stay unwritten; "" where it may not. given: what other layers do have."""
    if item.padding:
        return "padding of the vocabulary"
    if draft and item.count == item.total and item.name.endswith(_SHARED):
        return "the draft model borrows the target's"
    tail = next((tail for tail in _OPTIONAL if item.name.endswith(tail)), "")
    return f"{tail} is {_OPTIONAL[tail]}" if tail and tail not in given else ""


def watch_loading(found: dict[str, Any]) -> None:
    """Have the model loads of this process watched; `found` gets lists: missing, unexpected, optional."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    load, read = DefaultModelLoader.load_weights, DefaultModelLoader.get_all_weights
    found.update(missing=[], unexpected=[], optional=[])
    active: list[Tracker] = []

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        tracker = Tracker(model)
        active.append(tracker)
        with tracker:
            load(self, model, model_config)
        unwritten, optional = left_over(tracker)
        found["missing"] += unwritten
        found["optional"] += optional
        found["unexpected"] += tracker.not_taken(whole=True)

    DefaultModelLoader.load_weights = load_weights
    DefaultModelLoader.get_all_weights = lambda self, config, model: active[-1].watch(read(self, config, model))
