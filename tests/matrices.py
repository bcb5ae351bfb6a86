"""Made matrices of every kind, with everything in them that arithmetic trips over, and how two reports compare."""

from __future__ import annotations

import pytest
import torch

from phasefold.formats import Grid
from phasefold.quantize.kernels import Matrix, Report

PLAIN = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
BLOCKS = {
    "e4m3": [(128, 128), (1, 0), (0, 0), (1, 32), (2, 8), (1, 1024)],
    "int4": [(1, 32), (1, 64), (1, 128)],
    "e2m1": [(1, 32)],
}
SCALES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def plain(weight: torch.Tensor, kind: str = "f32") -> Matrix:
    return Matrix(kind, raw(weight.to(PLAIN[kind])), None, None, *weight.shape)


def assert_reports_agree(found: Report, expected: Report) -> None:
    assert found._replace(error2=0.0, norm2=0.0) == expected._replace(error2=0.0, norm2=0.0)
    for name in ("error2", "norm2"):
        a, b = getattr(found, name), getattr(expected, name)
        assert a == pytest.approx(b, rel=1e-6, abs=1e-13 * expected.norm2), name


def special(generator: torch.Generator, shape: tuple[int, int]) -> torch.Tensor:
    """Denormals, zeros of both signs, halfway points and the floats beside them, enormous values."""
    halves = torch.arange(-17, 18) / 2
    pool = torch.cat(
        [
            torch.tensor([0.0, -0.0, 1e-45, -1e-45, 2.0**-126, 2.0**-133, 1e-38, 3e38, -3e38, 448.0, 464.0, 480.0]),
            halves,
            torch.nextafter(halves, torch.tensor(100.0)),
            torch.nextafter(halves, torch.tensor(-100.0)),
            2.0 ** torch.arange(-140, 127),
        ]
    ).float()
    return pool[torch.randint(len(pool), shape, generator=generator)]


def near_boundaries(generator: torch.Generator, shape: tuple[int, int]) -> torch.Tensor:
    """Halfway between codes under some BF16 scale (amax fixes it), and up to two floats away."""
    scale = torch.rand(shape[0], 1, generator=generator).add(1).bfloat16().float()
    x = (torch.randint(-8, 8, shape, generator=generator) - 0.5) * scale
    x = (x.view(torch.int32) + torch.randint(-2, 3, shape, generator=generator).int()).view(torch.float32)
    x[:, ::32] = 7.5 * scale
    return x


def values(flavour: str, seed: int, shape: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if flavour == "special":
        return special(generator, shape)
    if flavour == "boundaries":
        return near_boundaries(generator, shape)
    x = torch.randn(shape, generator=generator)
    if flavour == "spread":  # groups from 2^-150 to 2^120
        x = x * 2.0 ** torch.randint(-150, 120, (shape[0], 1), generator=generator)
    if flavour == "zeros":
        x = (
            x
            * (torch.rand(shape[0], -(-shape[1] // 32), generator=generator) < 0.5).repeat_interleave(32, 1)[
                :, : shape[1]
            ]
        )
    return x * 0.02


FLAVOURS = ["gauss", "zeros", "spread", "special", "boundaries"]


def stored(kind: str, seed: int, shape: tuple[int, int], flavour: str) -> Matrix:
    """A made matrix of any kind; for quantized ones any codes and mostly good scales."""
    rows, cols = shape
    if kind in PLAIN:
        weight = values(flavour, seed, shape).clamp(-3e38, 3e38)
        return plain(weight.clamp(-6e4, 6e4) if kind == "f16" else weight, kind)
    generator = torch.Generator().manual_seed(seed)
    block = BLOCKS[kind][seed % len(BLOCKS[kind])]
    bits = {"e4m3": 8, "int4": 4, "e2m1": 4}[kind]
    codes = torch.randint(256, (rows, cols * bits // 8), generator=generator).to(torch.uint8)
    if kind == "e4m3" and flavour != "special":
        codes[(codes & 127) == 127] = 0
    dtype = list(SCALES)[seed // 7 % 4] if kind != "e2m1" else "U8"
    scales = torch.rand(Grid(kind, block).scale_shape(shape), generator=generator)
    if flavour == "spread":
        scales = scales * 2.0 ** torch.randint(-30, 14, scales.shape, generator=generator)
    stored_scales = scales.to(SCALES[dtype]) if dtype != "U8" else (scales * 40 + 100).to(torch.uint8)
    return Matrix(kind, raw(codes), raw(stored_scales), dtype, rows, cols, block)
