"""vLLM generates on a CPU with decoded weights: its config, its loader and its model as they are, ordinary matmuls.

The CPU build has no kernels for these formats. So the choice of a kernel is answered with none, and where a kernel
would repack its weights after loading, each quantized layer is decoded and becomes an unquantized one. What is decoded
is what vLLM's loader put there, fused and stacked by vLLM: a checkpoint that it mixes up generates nonsense here as
well. Activations are not quantized. One fault of the CPU build is mended: its rotary embedding is wrong for a query
with a dimension for heads, so that MLA models speak nonsense; vLLM's own torch version of it is used.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ...families import identify
from ...formats.checkpoint import open_checkpoint
from ...quantize.account import held_config
from .logs import WeightLog

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: what is replaced here must hold there
}
_LATENT = 576  # values of a token's latent, of DeepSeek's size


def generate(
    folder: Path, prompt: str | None, tokens: int, *, kv_dtype: str = "auto", dtype: str = "bfloat16"
) -> dict[str, Any]:
    """Load an artifact and continue a prompt greedily; what a worker reports, with `token_ids` and their `logprobs`."""
    os.environ.update(_ENVIRONMENT)
    checkpoint = open_checkpoint(folder)
    text, notes = identify(checkpoint.config).text, []
    if held_config(checkpoint, identify(checkpoint.config)):
        notes.append("weights decoded after loading: vLLM's kernels for them need a GPU")
    latent = text.get("kv_lora_rank", 0) + text.get("qk_rope_head_dim", 0)
    if latent not in (0, _LATENT):
        os.environ["VLLM_MLA_DISABLE"] = "1"
        notes.append(f"attention without MLA's latent: vLLM has no CPU kernel for one of {latent}, only of {_LATENT}")
    decode_after_loading()
    from .vllm_real import run
    from .vllm_watch import watch_loading

    watched: dict[str, Any] = {}
    watch_loading(watched)
    log = WeightLog("vllm")
    found = run(folder, prompt, tokens, kv_dtype=kv_dtype, dtype=dtype, max_model_len=256)
    return found | watched | {"tensors": len(checkpoint.tensors), "log": log.lines, "notes": notes}


def decode_after_loading() -> None:
    """Replace, in this process and for good, vLLM's kernels for INT4 and FP8 by decoded weights."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8, CPUExpertsInt4
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors as ct
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_fp8 as w8a8,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_wna16 as wna16,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w8a8_fp8 as linear_fp8,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_wNa16 as linear_int4,
    )
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    wna16.select_wna16_moe_backend = lambda *args, **kwargs: (WNA16MoEBackend.EMULATION, CPUExpertsInt4)
    for module in (fp8, w8a8):
        module.select_fp8_moe_backend = lambda *args, **kwargs: (Fp8MoeBackend.CPU, CPUExpertsFp8)
    for module in (fp8, linear_fp8):
        module.init_fp8_linear_kernel = _NoKernel
    linear_int4.choose_mp_linear_kernel = lambda config: _NoKernel
    for method in (ct.CompressedTensorsLinearMethod, fp8.Fp8LinearMethod):
        method.process_weights_after_loading = _decode_linear
    for method in (
        fp8.Fp8MoEMethod,
        wna16.CompressedTensorsWNA16MoEMethod,
        w8a8.CompressedTensorsW8A8Fp8MoEMethod,
    ):
        method.process_weights_after_loading = _decode_experts
    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native


class _NoKernel:
    """Stands where vLLM keeps the kernel that it chose for a linear layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def input_quant_key(self) -> None:
        """No quantized activations wanted."""


def _decode_linear(self: Any, layer: Any) -> None:
    """In place of `process_weights_after_loading` of a linear layer's quantization method."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    widths = getattr(layer, "logical_widths", None) or layer.output_partition_sizes
    dtype = getattr(layer, "orig_dtype", None) or layer.params_dtype
    weight = _decoded(layer, "", widths, dtype)
    _replace(layer, {"weight": weight}, "weight")
    layer.quant_method = UnquantizedLinearMethod()
    layer.quant_method.process_weights_after_loading(layer)


def _decode_experts(self: Any, layer: Any) -> None:
    """The same of a layer of routed experts: w13 [experts, 2 x intermediate, hidden] and w2, gate above up."""
    import torch
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    decoded = {}
    for name in ("w13_", "w2_"):
        codes = next(
            p for n, p in layer.named_parameters(recurse=False) if n in (f"{name}weight", f"{name}weight_packed")
        )
        experts, rows, _ = codes.shape
        widths = [rows // 2, rows // 2] if name == "w13_" else [rows]
        matrices = [_decoded(layer, name, widths, self.moe.in_dtype, expert) for expert in range(experts)]
        decoded[f"{name}weight"] = torch.stack(matrices)
    _replace(layer, decoded, "w13_", "w2_")
    method = UnquantizedFusedMoEMethod(self.moe)
    layer._replace_quant_method(method)
    method.process_weights_after_loading(layer)


def _replace(layer: Any, weights: dict[str, Any], *prefixes: str) -> None:
    """Drop a layer's parameters of the given prefixes, then give it others."""
    import torch

    for name in [name for name, _ in layer.named_parameters(recurse=False) if name.startswith(prefixes)]:
        delattr(layer, name)
    for name, weight in weights.items():
        layer.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))


def _decoded(layer: Any, prefix: str, widths: list[int], dtype: Any, expert: int | None = None) -> Any:
    """A layer's weight, [rows, columns] in `dtype`; `widths`: rows of the matrices that are fused in it."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    def part(name: str) -> Any:
        found = getattr(layer, prefix + name, None)
        return found if found is None or expert is None else found[expert]

    scale = part("weight_scale") if part("weight_scale_inv") is None else part("weight_scale_inv")
    if (packed := part("weight_packed")) is not None:
        codes = unpack_from_int32(packed.data, 4, torch.Size([packed.shape[0], packed.shape[1] * 8]))
    else:
        codes = part("weight").data
    rows, columns = codes.shape
    scale = scale.data.float()
    if scale.shape[0] != rows:  # in blocks of 128 x 128, counted anew in each of the fused matrices
        pieces = torch.split(scale, [-(-width // 128) for width in widths])
        scale = torch.cat([p.repeat_interleave(128, 0)[:w] for p, w in zip(pieces, widths, strict=True)])
        scale = scale.repeat_interleave(128, 1)[:, :columns]
    elif scale.shape[1] != 1:  # in groups of a row
        scale = scale.repeat_interleave(columns // scale.shape[1], 1)
    return (codes.float() * scale).to(dtype)
