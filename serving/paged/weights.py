"""A checkpoint of any format as a model of transformers: every tensor decoded by our formats, placed by their loader.

So what runs is our bytes in somebody else's arithmetic. Layers of the MTP module, vision towers and buffers are no part
of the language model and are left out; anything else that does not find its place is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...calib.model import (
    WRAPPER,
    check_device,
    decode,
    refuse_linear_attention,
    text_config,
    text_items,
    version,
)
from ...errors import LoadError
from ...families import CacheLayer
from ...formats.checkpoint import Reader, open_checkpoint
from ...quantize.account import account

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to run.

    model: transformers' ForCausalLM in eval mode. cache: what each decoder layer keeps of a token, in order.
    tensors: how many stored tensors were decoded. folder: where they lay.
    """

    model: Any
    cache: tuple[CacheLayer, ...]
    tensors: int
    folder: Path


def load_model(
    folder: Path, *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", attention: str = "eager"
) -> Loaded:
    """Decode a checkpoint and build its language model. The whole of it must fit the memory, decoded.

    attention: transformers' implementation; pages want "eager".
    Raises CheckpointError for a checkpoint that is not right, LoadError where transformers has no class for it, where a
    tensor is missing or finds no place, or where torch has no such device.
    """
    check_device(device)
    checkpoint = open_checkpoint(folder)
    found = account(checkpoint)
    wanted = text_items(found.items)
    layers = tuple(layer for layer in found.model.cache() if not layer.mtp)
    refuse_linear_attention(folder, found.model)
    config = text_config(found.model)
    reader, state = Reader(checkpoint), {}
    try:
        for item in wanted:
            value = decode(reader, item)
            state[item.spec.name.removeprefix(WRAPPER)] = value if item.format.plain else value.to(dtype)
    finally:
        reader.close()
    model = _placed(config, state, dtype, folder, attention)
    return Loaded(model.to(device).eval(), layers, sum(len(item.parts) for item in wanted), folder)


def _placed(config: Any, state: dict[str, torch.Tensor], dtype: torch.dtype, folder: Path, attention: str) -> Any:
    """The tensors in the model that transformers builds from the config; LoadError unless each has its place."""
    from transformers.models.auto import modeling_auto
    from transformers.utils import logging

    classes: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    bars: Any = logging
    elements = sum(value.numel() for value in state.values())
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        model, info = classes[type(config)].from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
        )
    finally:
        if shown:
            bars.enable_progress_bar()
    where = f"{folder}: {type(model).__name__} of {version()}"
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if bad := sorted(map(str, info[kind])):
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise LoadError(f"{where}: {kind}: {bad[0]}{more}")
    # transformers ignores tensors of some layers in silence: count what found a place
    placed = sum({value.data_ptr(): value.numel() for value in model.state_dict().values()}.values())
    if placed != elements:
        raise LoadError(f"{where}: {placed:,} elements of the {elements:,} given found a place")
    return model
