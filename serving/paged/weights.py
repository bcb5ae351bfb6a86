"""A checkpoint of any format as a model of transformers: every tensor decoded by our formats, placed by their loader.

So what runs is our bytes in somebody else's arithmetic. Layers of the MTP module, vision towers and buffers are no part
of the language model and are left out; anything else that does not find its place is an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...errors import CheckpointError, LoadError
from ...families import CacheLayer, Model
from ...formats import DTYPES
from ...formats.checkpoint import Reader, open_checkpoint
from ...quantize.account import Item, account

if TYPE_CHECKING:
    from pathlib import Path

#: model types of the hub that transformers knows under another name
ALIASES = {"kimi_k2": "deepseek_v3"}
_DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
_NOT_TEXT = ("vision", "projector", "buffer")
_WRAPPER = "language_model."


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


def load_model(folder: Path, *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Loaded:
    """Decode a checkpoint and build its language model. The whole of it must fit the memory, decoded.

    Raises CheckpointError for a checkpoint that is not right, LoadError where transformers has no class for it, where a
    tensor is missing or finds no place, or where torch has no such device.
    """
    _check_device(device)
    checkpoint = open_checkpoint(folder)
    found = account(checkpoint)
    wanted = [item for item in found.items if not item.spec.mtp and item.spec.role not in _NOT_TEXT]
    layers = tuple(layer for layer in found.model.cache() if not layer.mtp)
    if not all(layer.parts for layer in layers):
        kind = found.model.text["model_type"]
        raise LoadError(
            f"{folder}: {kind} has linear attention, which keeps a state and no rows: the reference has no such cache"
        )
    config = text_config(found.model)
    reader = Reader(checkpoint)
    try:
        state = {item.spec.name.removeprefix(_WRAPPER): value for item, value in _decoded(reader, wanted, dtype)}
    finally:
        reader.close()
    model = _placed(config, state, dtype, folder)
    return Loaded(model.to(device).eval(), layers, sum(len(item.parts) for item in wanted), folder)


def _check_device(device: str) -> None:
    """LoadError where torch cannot use it; told before the weights are decoded."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the second where torch was built without it
        why = str(error).partition("\n")[0][:160]
        raise LoadError(f"device {device!r}: this torch cannot use it ({why}); cpu always works") from None


def _placed(config: Any, state: dict[str, torch.Tensor], dtype: torch.dtype, folder: Path) -> Any:
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
            attn_implementation="eager",
            output_loading_info=True,
        )
    finally:
        if shown:
            bars.enable_progress_bar()
    where = f"{folder}: {type(model).__name__} of {_version()}"
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if bad := sorted(map(str, info[kind])):
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise LoadError(f"{where}: {kind}: {bad[0]}{more}")
    # transformers ignores tensors of some layers in silence: count what found a place
    placed = sum({value.data_ptr(): value.numel() for value in model.state_dict().values()}.values())
    if placed != elements:
        raise LoadError(f"{where}: {placed:,} elements of the {elements:,} given found a place")
    return model


def text_config(model: Model) -> Any:
    """The language model's config as transformers' own class, without any quantization: weights come decoded."""
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto

    classes: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    values = dict(model.text)
    kind = values.pop("model_type")
    for key in ("quantization_config", "compression_config", "auto_map", "transformers_version"):
        values.pop(key, None)
    values["num_nextn_predict_layers"] = 0
    kind = ALIASES.get(kind, kind)
    try:
        config = AutoConfig.for_model(kind, **values)
    except ValueError:
        raise LoadError(
            f"model_type {kind}: {_version()} has no class for it; the reference runtime needs one"
        ) from None
    if type(config) not in classes:
        raise LoadError(f"model_type {kind}: {_version()} has no causal language model for {type(config).__name__}")
    return config


def _version() -> str:
    import transformers

    return f"transformers {transformers.__version__}"


def _decoded(reader: Reader, items: list[Item], dtype: torch.dtype) -> Iterator[tuple[Item, torch.Tensor]]:
    """Each item's values: `dtype` where it is quantized, as it is stored where it is not."""
    for item in items:
        parts = {part.suffix: _read(reader, item.module + part.suffix, part.dtype, part.shape) for part in item.parts}
        value = parts[item.parts[0].suffix] if item.format.plain else item.format.decode(parts, item.shape)
        if not bool(torch.isfinite(value).all()):
            raise CheckpointError(f"{reader.checkpoint.folder}: {item.spec.name}: a value is not finite")
        yield item, value if item.format.plain else value.to(dtype)


def _read(reader: Reader, name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    raw = bytearray(math.prod(shape) * DTYPES[dtype])
    reader.read(name, 0, memoryview(raw))
    return torch.frombuffer(raw, dtype=_DTYPES[dtype]).reshape(shape)
