"""Do two checkpoints hold the same weights? Sound pairs never trip, other weights do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import variants
from pairs import RECIPES, folded

from phasefold.families import identify
from phasefold.formats import Part, Quantized, formats, make_header
from phasefold.formats.checkpoint import MANIFEST, Reader, open_checkpoint
from phasefold.quantize.blocks import StoredMatrix
from phasefold.serving.belong import belong
from phasefold.serving.deployment import Deployment
from phasefold.serving.samples import ONE_MORE, Sample, _row, compare_weights

AT = Deployment("vllm", kv_dtype="bfloat16")


@pytest.fixture(scope="module")
def made(module_path: Path) -> dict[tuple[str, str], list[Path]]:
    """Of each example, in BF16 and as an FP8 release: the source, and what every recipe makes of it."""
    found = {}
    for base, (prefill, decodes) in RECIPES.items():
        for kind in ("bf16", "fp8-block"):
            root = module_path / f"{base}-{kind}"
            source = variants.variant(kind, base, root / "source")
            found[base, kind] = [source, *(folded(source, name, root / name) for name in (prefill, *decodes, "bf16"))]
    return found


def compared(first: Path, second: Path, slack: float = 0.0) -> Sample:
    checkpoints = open_checkpoint(first), open_checkpoint(second)
    return compare_weights(identify(checkpoints[0].config), *checkpoints, slack=slack)


@pytest.mark.parametrize("base", RECIPES)
@pytest.mark.parametrize("kind", ["bf16", "fp8-block"])
def test_roundings_of_one_source_are_never_apart(made, base: str, kind: str) -> None:
    for first in made[base, kind]:
        for second in made[base, kind]:
            found = compared(first, second)
            assert found.differing == [] and found.compared > 30, (first, second)


@pytest.mark.parametrize("base", RECIPES)
def test_one_more_rounding_is_never_apart(made, base: str) -> None:
    for first in made[base, "bf16"]:
        for second in made[base, "fp8-block"]:
            assert compared(first, second, ONE_MORE).differing == [], (first, second)


def other(kind: str, tensors: dict[str, torch.Tensor]) -> None:
    """Change expert weights only: names, shapes, norms and config stay."""
    torch.manual_seed(0)
    names = [name for name in tensors if ".experts." in name and name.endswith(".weight")]
    before = {name: tensors[name].clone() for name in names}
    for name in names:
        weight = before[name].float()
        if kind == "trained on":
            weight = weight + 0.1 * weight.std() * torch.randn_like(weight)
        elif kind == "another model":
            weight = weight.std() * torch.randn_like(weight)
        else:  # experts in another order
            weight = before[_next(name, before)].float()
        tensors[name] = weight.to(before[name].dtype)


def _next(name: str, held: dict[str, torch.Tensor]) -> str:
    head, number, tail = name.partition(".experts.")[0], *name.partition(".experts.")[2].split(".", 1)
    after = f"{head}.experts.{int(number) + 1}.{tail}"
    return after if after in held else f"{head}.experts.0.{tail}"


@pytest.mark.parametrize("base", RECIPES)
@pytest.mark.parametrize("kind", ["trained on", "another model", "another order"])
def test_d5_other_experts_under_the_same_headers(made, base: str, kind: str, tmp_path: Path) -> None:
    tensors, config = variants.load(made[base, "bf16"][0])
    other(kind, tensors)
    source = tmp_path / "source"
    shutil.copytree(made[base, "bf16"][0], source)
    variants.save(source, tensors, config)
    prefill, (decode, *_) = RECIPES[base]
    theirs = folded(source, decode, tmp_path / "decode")
    assert open_checkpoint(source).digest != open_checkpoint(made[base, "bf16"][0]).digest
    ours = next(path for path in made[base, "bf16"] if path.name == prefill)
    for first in (made[base, "bf16"][0], ours):
        (found,) = belong(first, theirs, AT, AT)
        assert (found.rule, found.severity) == ("D5", "silent") and ".experts." in found.subject, found
    (theirs / MANIFEST).unlink()
    (found,) = belong(ours, theirs, AT, AT)  # without it, weights that are near may be those of another quantizer
    assert found.severity == ("warning" if kind == "trained on" else "silent")


@pytest.mark.parametrize("name", formats())
def test_values_are_those_of_the_formats(name: str, tmp_path: Path) -> None:
    """Against the formats' own decoding."""
    torch.manual_seed(1)
    shape, found = (256, 512), formats()[name]
    parts = found.parts(shape)
    tensors = _encoded(name, shape)
    raw = [tensors[part.suffix].contiguous().view(torch.uint8).numpy().tobytes() for part in parts]
    named = [(f"m{part.suffix}", part.dtype, part.shape) for part in parts]
    (tmp_path / "model.safetensors").write_bytes(make_header(named)[0] + b"".join(raw))
    (tmp_path / "config.json").write_text("{}")
    expected = found.decode(tensors, shape)
    reader = Reader(open_checkpoint(tmp_path))
    matrix = StoredMatrix(reader, "m", tuple(Part(*part) for part in parts), name, shape)
    for row in (0, 127, 128, 255):
        values = [value for value, _ in _row(matrix, row)]
        assert values == expected[row, 256:384].tolist()
    reader.close()


def _encoded(name: str, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    found = formats()[name]
    parts, grid = found.parts(shape), found.grid
    if grid.kind == "plain":
        dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[name]
        return {".weight": torch.randn(shape).to(dtype)}
    if grid.kind == "e2m1":
        pieces = [torch.randint(0, 256, parts[0].shape), torch.randint(100, 140, parts[1].shape)]
        return {part.suffix: piece.to(torch.uint8) for part, piece in zip(parts, pieces, strict=True)}
    scales = torch.rand(grid.scale_shape(shape)).bfloat16().float() + 0.5
    scales = scales.bfloat16().float()
    if grid.kind == "int4":
        codes, scales = found.encode(Quantized(torch.randint(-8, 8, shape).to(torch.int8), scales))
        return {".weight_packed": codes, ".weight_scale": scales, ".weight_shape": torch.tensor(shape)}
    return {
        ".weight": (torch.randn(shape) * 50).to(torch.float8_e4m3fn),
        parts[1].suffix: scales.reshape(parts[1].shape),
    }
