"""Row blocks: every source storage to every target over odd shapes, cut as small as blocks can be cut.

The reference is written here with numpy and torch alone; codes, scales and constants must be equal byte for byte.
"""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from phasefold.families import TensorSpec
from phasefold.formats import Part, formats, recognise
from phasefold.formats.checkpoint import Checkpoint, Reader, Stored, in_folder
from phasefold.quantize import blocks, output
from phasefold.quantize.account import Item
from phasefold.quantize.blocks import Buffers
from phasefold.quantize.choose import Choice, make_unit
from phasefold.quantize.shard import ShardWriter
from phasefold.quantize.units import lay_out
from phasefold.quantize.work import run_unit
from phasefold.recipes import Rule

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E8M0": torch.float8_e8m0fnu}
SHAPES = [(1, 128), (1, 7), (3, 256), (127, 130), (129, 128), (300, 384), (257, 640), (640, 33), (5, 1), (1000, 1152)]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Raw = dict[str, tuple[str, tuple[int, ...], bytes]]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def spread(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    return scales.float().repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]


def words(codes: torch.Tensor) -> bytes:
    nibbles = (codes + 8).numpy().astype(np.uint32).reshape(len(codes), -1, 8)
    return np.bitwise_or.reduce(nibbles << np.arange(0, 32, 4, dtype=np.uint32), axis=2).astype(np.uint32).tobytes()


def source(
    name: str, shape: tuple[int, int], scale_dtype: str, odd: bool, g: torch.Generator
) -> tuple[Raw, torch.Tensor]:
    """Random stored parts by suffix, and what they decode to. `odd`: the other spelling of scale shape or dtype."""
    rows, columns = shape
    if name in ("bf16", "f16", "f32"):
        plain = (torch.randn(shape, generator=g) * 0.05).to(DTYPES[name.upper()])
        return {".weight": (name.upper(), shape, raw(plain))}, plain.float()
    if name == "mxfp4":
        codes = torch.randint(0, 16, shape, generator=g)
        exponents = torch.randint(118, 122, (rows, columns // 32), generator=g)
        packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
        parts: Raw = {".weight_packed": ("U8", (rows, columns // 2), raw(packed)),
                      ".weight_scale": ("U8", (rows, columns // 32), raw(exponents.to(torch.uint8)))}  # fmt: skip
        return parts, E2M1[codes] * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    group = int(name[6:]) if name.startswith("int4") else 0
    block = {"fp8-channel": (1, columns), "fp8-tensor": shape}.get(name, (1, group) if group else (128, 128))
    grid = -(-rows // block[0]), -(-columns // block[1])
    scales = torch.rand(grid, generator=g) * 0.01 + 1e-3
    if scale_dtype == "F8_E8M0":
        scales = torch.exp2(torch.randint(-9, -3, grid, generator=g).float())
    scales = scales.to(DTYPES[scale_dtype])
    if group:
        codes = torch.randint(-8, 8, shape, generator=g)
        said = np.array(shape, np.int32 if odd else np.int64).tobytes()
        parts = {".weight_packed": ("I32", (rows, columns // 8), words(codes)),
                 ".weight_scale": (scale_dtype, grid, raw(scales)),
                 ".weight_shape": ("I32" if odd else "I64", (2,), said)}  # fmt: skip
        return parts, codes.float() * spread(scales, block, shape)
    codes = torch.randint(0, 256, shape, generator=g).to(torch.uint8)
    codes[(codes & 127) == 127] = 0
    stored: tuple[int, ...] = grid
    if name == "fp8-channel":
        stored = (rows,) if odd else (rows, 1)
    if name == "fp8-tensor":
        stored = () if odd else (1,)
    suffix = ".weight_scale_inv" if name == "fp8-block" else ".weight_scale"
    parts = {".weight": ("F8_E4M3", shape, raw(codes)), suffix: (scale_dtype, stored, raw(scales))}
    return parts, codes.view(torch.float8_e4m3fn).float() * spread(scales, block, shape)


def expected(weight: torch.Tensor, name: str) -> dict[str, bytes]:
    """What round-to-nearest makes of a float32 matrix, by suffix."""
    rows, columns = weight.shape
    if name == "bf16":
        return {".weight": raw(weight.bfloat16())}
    block = (128, 128) if "block" in name else (1, columns if "channel" in name else int(name[6:]))
    grid = -(-rows // block[0]), -(-columns // block[1])
    padded = torch.zeros(grid[0] * block[0], grid[1] * block[1])
    padded[:rows, :columns] = weight
    amax = padded.reshape(grid[0], block[0], grid[1], block[1]).abs().amax((1, 3))
    if name.startswith("fp8"):
        scales = torch.maximum(amax / torch.full_like(amax, 448.0), torch.tensor(2.0**-126))
        if "block" in name:
            scales = torch.exp2(torch.ceil(torch.log2(scales.double()))).float()
        scales = torch.where(amax == 0, 1.0, scales)
        codes = (weight / spread(scales, block, (rows, columns))).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {".weight": raw(codes), ".weight_scale_inv" if name == "fp8-block" else ".weight_scale": raw(scales)}
    scales = torch.where(amax == 0, 1.0, (amax / torch.full_like(amax, 7.5)).bfloat16().float())
    codes = (weight / spread(scales, block, (rows, columns))).round().clamp(-8, 7)
    return {".weight_packed": words(codes), ".weight_scale": raw(scales.bfloat16()),
            ".weight_shape": np.array([rows, columns], np.int64).tobytes()}  # fmt: skip


def carry_out(parts: Raw, shape: tuple[int, int], name: str, target: str, folder: Path) -> dict[str, bytes]:
    """One unit by the converter's own way; -> the bytes of each output part."""
    (folder / output.WORK).mkdir(parents=True, exist_ok=True)
    tensors, offset = {}, 0
    with open(folder / "source", "wb") as file:
        for suffix, (dtype, stored, data) in parts.items():
            file.write(data)
            tensors[f"m{suffix}"] = Stored(dtype, stored, "source", offset, len(data))
            offset += len(data)
    checkpoint = Checkpoint(in_folder(folder), {}, b"", tensors, {"source": (offset, 0, b"")}, frozenset())
    found = tuple(Part(suffix, dtype, stored) for suffix, (dtype, stored, _) in parts.items())
    item = Item(TensorSpec("m.weight", shape, "routed_expert", linear=True), "m", found, formats()[name])
    unit = make_unit(Choice(item, formats()[target], Rule(("*",), target)))
    (shard,) = lay_out([unit], 10**12)
    writer, reader = ShardWriter(folder, shard), Reader(checkpoint)
    outcome = run_unit(shard.units[0], reader, writer, Buffers(), threading.Event())
    assert writer.finish_unit(shard.units[0], outcome)
    writer.close()
    reader.close()
    data = (folder / shard.file).read_bytes()
    return {o.part.suffix: data[o.offset : o.offset + o.part.nbytes] for o in shard.units[0].outputs}


@pytest.mark.parametrize("small", [False, True], ids=["usual blocks", "least blocks"])
@pytest.mark.parametrize("name", [name for name in formats()])
def test_every_storage_to_every_target(tmp_path: Path, monkeypatch, name: str, small: bool) -> None:
    if small:
        monkeypatch.setattr(blocks, "TARGET_BYTES", 1)
    kind, generator, done = formats()[name].grid.kind, torch.Generator().manual_seed(0), 0
    dtypes = {"e4m3": list(DTYPES), "int4": ["BF16", "F32", "F16"]}.get(kind, ["F32"])
    for shape in SHAPES:
        if kind in ("int4", "e2m1") and shape[1] % formats()[name].grid.block[1]:
            continue
        for scale_dtype in dtypes:
            parts, weight = source(name, shape, scale_dtype, bool(done % 2), generator)
            found = recognise(tuple(Part(s, d, t) for s, (d, t, _) in parts.items()), shape)
            assert found is not None
            for target in ("bf16", "fp8-block", "fp8-block-ct", "fp8-channel", "int4-g32", "int4-g64", "int4-g128"):
                grid = formats()[target].grid
                if (grid.kind == "int4" and shape[1] % grid.block[1]) or grid == formats()[name].grid:
                    continue
                got = carry_out(parts, shape, name, target, tmp_path)
                for suffix, want in expected(weight, target).items():
                    if got[suffix] != want:
                        first = next(i for i, (a, b) in enumerate(zip(got[suffix], want, strict=True)) if a != b)
                        raise AssertionError(
                            f"{name} {scale_dtype} {shape} -> {target}: {suffix} differs at byte {first}"
                        )
                done += 1
    assert done > 10
