"""GPTQ on one stored matrix, decoded whole: the weighted search first, then codes on its scales, then a choice.

The choice is made on inputs that no statistic has seen: GPTQ's codes are taken where the output's error is smaller with
them than with the search's, and only there. A few tokens' Hessian can make codes that are worse than rounding.
"""

from __future__ import annotations

import torch

from ..formats import Quantized
from ..formats.int4 import pack, unpack
from . import kernels
from .gptq import gptq, output_error, weight_error
from .guide import Guide
from .kernels import twin


def improve(
    module: str,
    matrix: kernels.Matrix,
    report: kernels.Report,
    codes: memoryview,
    scales: memoryview,
    guide: Guide,
    device: str = "cpu",
) -> tuple[kernels.Report, str | None]:
    """Put GPTQ's codes in the place of the search's where they are better; -> the report, and what was taken.

    matrix: all rows. report, codes, scales: what the search left. device: where the linear algebra is done, as torch
    names it; its order of sums is its own, so a graphics card's codes are not the CPU's. What was taken: "gptq",
    "gptq-pool" (by the pool's Hessian alone), "singular" (the search's, because the Hessian has no Cholesky factor) or
    None (the search's).
    """
    inputs, found = guide.heldout(module), guide.factors(module, device)
    if inputs is None or found is None:
        return report, None
    factors, pooled = found
    if factors is None:
        return report, "singular"
    weight, inputs = twin.decode(matrix).to(device), inputs.to(device)
    searched = _quantized(matrix, codes, scales, device)
    chosen = gptq(weight, searched.scales, factors)
    if not output_error(weight, chosen, inputs) < output_error(weight, searched, inputs):
        return report, None
    codes[:] = pack(chosen.codes.cpu()).numpy().tobytes()
    return report._replace(error2=weight_error(weight, chosen)), "gptq-pool" if pooled else "gptq"


def _quantized(matrix: kernels.Matrix, codes: memoryview, scales: memoryview, device: str) -> Quantized:
    words = torch.frombuffer(bytearray(codes), dtype=torch.int32).view(matrix.rows, -1)
    values = torch.frombuffer(bytearray(scales), dtype=torch.bfloat16).view(matrix.rows, -1)
    return Quantized(unpack(words).to(device), values.float().to(device))
