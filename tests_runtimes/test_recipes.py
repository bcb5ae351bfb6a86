"""Every recipe's output from every kind of source, taken whole by the loader of this environment's runtime."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import variants

from phasefold.recipes import load, names
from phasefold.serving.runtimes.dry import Dry

RUNTIME = "vllm" if find_spec("vllm") else "sglang"
# vLLM's config class of K2.5 has the real model's vision tower and takes no smaller one
K25 = ("k25", "k25+int4+nested") if RUNTIME == "sglang" else ()
KINDS = {
    "tiny-kimi": ("bf16", "fp8-block", "int4", "mtp", "mtp+fp8-block", *K25),
    "tiny-glm4": ("bf16", "fp8-channel", "mtp"),
    "tiny-glm5": ("bf16", "fp8-block", "mtp", "mtp+fp8-block"),
    "lite": ("bf16", "fp8-block"),
}
EXPERTS = {
    ("vllm", torch.int32): {"CompressedTensorsWNA16MoEMethod MARLIN"},
    ("vllm", torch.float8_e4m3fn): {"Fp8MoEMethod TRITON", "CompressedTensorsW8A8Fp8MoEMethod VLLM_CUTLASS"},
    ("vllm", torch.bfloat16): {"UnquantizedFusedMoEMethod"},
    ("sglang", torch.int32): {"CompressedTensorsFusedMoEMethod CompressedTensorsWNA16MoE MARLIN"},
    ("sglang", torch.float8_e4m3fn): {
        "Fp8MoEMethod TRITON",
        "CompressedTensorsFusedMoEMethod CompressedTensorsW8A8Fp8MoE TRITON",
    },
    ("sglang", torch.bfloat16): {"UnquantizedFusedMoEMethod TRITON"},
}  # fmt: skip


def recipes_for(base: str) -> list[str]:
    family = "kimi" if base == "tiny-kimi" else "glm"
    found = [name for name in names() if family in load(name).families and not load(name).guided]
    return [name for name in found if name != "kimi-restore-int4"]


CASES = [(base, kind, recipe) for base, kinds in KINDS.items() for kind in kinds for recipe in recipes_for(base)]


@pytest.mark.parametrize(("base", "kind", "recipe"), CASES)
def test_every_tensor_lands_and_every_parameter_is_written(
    ask: Callable[..., Dry], artifact: Callable[..., Path], base: str, kind: str, recipe: str
) -> None:
    folder = artifact(base, kind, recipe)
    # what the plan's notes say must be in the launch command
    fused = RUNTIME == "vllm" or base not in ("tiny-glm4", "lite") or "int4" not in recipe
    dry = ask(folder, **({} if fused else {"disable_shared_experts_fusion": True}))
    assert (dry.refused, dry.not_taken, dry.unwritten) == ("", [], [])
    tensors = variants.load(folder)[0]
    assert dry.tensors == len(tensors)
    stored = {tensor.dtype for name, tensor in tensors.items() if ".experts." in name and "scale" not in name}
    codes = next(dtype for dtype in (torch.int32, torch.float8_e4m3fn, torch.bfloat16) if dtype in stored)
    experts = {method for method in dry.methods if "MoE" in method}
    assert len(experts) == 1 and experts <= EXPERTS[RUNTIME, codes], experts
