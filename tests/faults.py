"""Changes to a checkpoint: what can be wrong with one, to see who finds it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import variants
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

Change = Callable[[variants.Tensors, dict[str, Any]], Any]


def edit(folder: Path, change: Change, to: Path | None = None) -> Path:
    """The same checkpoint with something changed, there or in another folder."""
    tensors, config = variants.load(folder)
    change(tensors, config)
    if to is None:
        for path in folder.glob("*.safetensors*"):
            path.unlink()
    return variants.save(to or folder, tensors, config)


def vision_names(tensors: variants.Tensors, config: dict[str, Any]) -> None:
    """SGLang knows the sizes of the vision tower by other names, with Kimi-K2.5's own sizes where those are absent."""
    vision = config["vision_config"]
    vision |= {name: vision[f"vt_{name}"] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    vision["num_attention_heads"] = 4


def drop(tensors: variants.Tensors, within: str) -> dict[str, torch.Tensor]:
    return {name: tensors.pop(name) for name in list(tensors) if within in name}


def change_quantization(change: Callable[[dict[str, Any]], None]) -> Change:
    return lambda _, config: change(config["quantization_config"])


def quantized(**keys: Any) -> Change:
    return change_quantization(lambda held: held.update(keys))


def ignored(pattern: str) -> Change:
    return change_quantization(lambda held: held["ignore"].append(pattern))


def unignored(part: str) -> Change:
    return change_quantization(lambda held: held.update(ignore=[p for p in held["ignore"] if part not in p]))


def weights(**keys: Any) -> Change:
    return change_quantization(lambda held: held["config_groups"]["group_0"]["weights"].update(keys))


def group_of(size: int) -> Change:
    return weights(group_size=size)


def experts_only(_: variants.Tensors, config: dict[str, Any]) -> None:
    """No target for a layer that is not ignored."""
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["re:.*experts.*"]
    unignored("gate_up_proj")(_, config)


def without_key(key: str) -> Change:
    return lambda _, config: config.pop(key)


def without(part: str) -> Change:
    return lambda tensors, _: drop(tensors, part)


def renamed(old: str, new: str) -> Change:
    def change(tensors: variants.Tensors, _: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(old)]:
            tensors[name.removesuffix(old) + new] = tensors.pop(name)

    return change


def copied(old: str, new: str) -> Change:
    return lambda tensors, _: tensors.update({n.replace(old, new): t.clone() for n, t in tensors.items() if old in n})


def cache_scales(*names: str) -> Change:
    found = {f"model.layers.{layer}.self_attn.{name}": torch.tensor([0.02]) for layer in range(4) for name in names}
    return lambda tensors, _: tensors.update(found)


def plain_o_proj(tensors: variants.Tensors, _: dict[str, Any]) -> None:
    """BF16 where the config says FP8."""
    del tensors["model.layers.1.self_attn.o_proj.weight_scale_inv"]
    tensors["model.layers.1.self_attn.o_proj.weight"] = tensors["model.layers.1.self_attn.o_proj.weight"].bfloat16()


def plain_modules(tensors: variants.Tensors) -> list[str]:
    """Matrices that are not quantized, and under what names SGLang joins them."""
    plain = sorted(n.removesuffix(".weight") for n, t in tensors.items() if n.endswith(".weight") and t.dim() == 2)
    joined = {"gate_proj": "gate_up_proj", "q_proj": "qkv_proj", "q_a_proj": "fused_qkv_a_proj_with_mqa"}
    return plain + [n.replace(old, new) for n in plain for old, new in joined.items() if n.endswith(f".{old}")]


def pack(*within: str) -> Change:
    """INT4 for modules that have it not: their weights packed, everything else that is plain ignored by name."""

    def change(tensors: variants.Tensors, config: dict[str, Any]) -> None:
        found = [name for name in tensors if name.endswith(".weight") and any(part in name for part in within)]
        assert found
        for name in found:
            codes, scales = variants.native_int4(tensors.pop(name))
            stem = name.removesuffix("weight")
            tensors |= {f"{stem}weight_packed": pack_to_int32(codes, 4), f"{stem}weight_scale": scales}
            tensors[f"{stem}weight_shape"] = torch.tensor(codes.shape)
        config["quantization_config"]["ignore"] = plain_modules(tensors)

    return change
