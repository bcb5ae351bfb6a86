"""FP8 weights: OCP e4m3fn codes with one scale for a 128x128 block, an output channel, or the whole tensor.

Three spellings of the same numbers are in use. DeepSeek's (`quant_method: fp8`) calls the block scale
`weight_scale_inv` although it multiplies; compressed-tensors calls every scale `weight_scale`. The codec is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import PLAIN, Format, Grid, Part, Quantized, Shape, decode_e4m3

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = (128, 128)
_SCALE_DTYPES = (*PLAIN, "F8_E8M0")

_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_ACTIVATIONS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True}
_BLOCK_SCHEME = {
    "format": "float-quantized",
    "weights": {**_WEIGHTS, "strategy": "block", "block_structure": list(BLOCK)},
    "input_activations": {**_ACTIVATIONS, "strategy": "group", "group_size": 128},
}
_CHANNEL_SCHEME = {
    "format": "float-quantized",
    "weights": {**_WEIGHTS, "strategy": "channel"},
    "input_activations": {**_ACTIVATIONS, "strategy": "token"},
}
_TENSOR_SCHEME = {
    "format": "float-quantized",
    "weights": {**_WEIGHTS, "strategy": "tensor"},
    "input_activations": {**_ACTIVATIONS, "strategy": "token"},
}


def _format(name: str, block: tuple[int, int], scale: str, scheme: dict[str, Any] | None, *, written: bool) -> Format:
    grid = Grid("e4m3", block)

    def shapes(shape: Shape) -> tuple[Shape, ...]:
        """The shapes under which scales of this geometry are found; the first is the one we write."""
        if block == (0, 0):
            return (1,), ()
        return (grid.scale_shape(shape),) if block == BLOCK else ((shape[0], 1), (shape[0],))

    def parts(shape: Shape) -> tuple[Part, ...]:
        return Part(".weight", "F8_E4M3", shape), Part(scale, "F32", shapes(shape)[0])

    def recognise(found: Mapping[str, Part], shape: Shape) -> bool:
        if found.keys() != {".weight", scale} or found[".weight"] != Part(".weight", "F8_E4M3", shape):
            return False
        return found[scale].dtype in _SCALE_DTYPES and found[scale].shape in shapes(shape)

    def decode(tensors: Mapping[str, Tensor], shape: Shape) -> Tensor:
        return decode_e4m3(tensors[".weight"], tensors[scale], block, shape)

    def encode(quantized: Quantized) -> tuple[Tensor, Tensor]:
        return quantized.codes, quantized.scales

    return Format(name, grid, parts, recognise, decode, encode if written else None, scheme)


FORMATS = (
    _format("fp8-block", BLOCK, ".weight_scale_inv", None, written=True),
    _format("fp8-channel", (1, 0), ".weight_scale", _CHANNEL_SCHEME, written=True),
    _format("fp8-tensor", (0, 0), ".weight_scale", _TENSOR_SCHEME, written=False),
    _format("fp8-block-ct", BLOCK, ".weight_scale", _BLOCK_SCHEME, written=True),
)
