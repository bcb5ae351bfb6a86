"""The bytes that one token leaves in one layer of a KV cache, in the layouts of vLLM and SGLang.

| layout | MLA layer | GQA layer | indexer's key |
|---|---|---|---|
| bf16 | kv_c, k_pe in BF16 | k, v in BF16 | BF16 |
| fp8_e4m3 | kv_c, k_pe in e4m3, one static scale | k, v in e4m3, a static scale each | e4m3, F32 scale |
| fp8_ds_mla | kv_c in e4m3, an F32 scale for each 128 of it, k_pe in BF16 | (none) | e4m3, F32 scale |

For the published 512 + 64 that is 1152, 576 and 656 bytes, and 256 or 132 for an indexer's key of 128. Codes are
`e4m3(x / scale)`, round to nearest even, saturating at 448. Static scales are the caller's, 1.0 unless given. Dynamic
ones are amax / 448 of their 128 values, as SGLang 0.5.23 has it (vLLM 0.32.0 rounds them up to powers of two in its K3
kernel; readers take either), never below the smallest normal number. An indexer's is rounded up to a power of two
(`ue8m0`), from an amax of at least 1e-4. The runtimes rotate an indexer's keys (Hadamard) before they round them,
transformers does not rotate, and so neither do we.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...errors import LoadError
from ...families import CacheLayer, CachePart

LAYOUTS = ("bf16", "fp8_e4m3", "fp8_ds_mla")
TILE = 128  # values of kv_c that share a scale in an fp8_ds_mla row
_MAX = 448.0
_LEAST_AMAX = 1e-4
_F32, _BF16 = 4, 2

Scales = Mapping[int, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Row:
    """How parts that are written together lie side by side. kind: "bf16", "static", "ds_mla" or "index".

    scales: for "static", one for each part.
    """

    kind: str
    parts: tuple[CachePart, ...]
    scales: tuple[float, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of one token."""
        widths = [part.heads * part.width for part in self.parts]
        if self.kind == "bf16":
            return _BF16 * sum(widths)
        if self.kind == "static":
            return sum(widths)
        if self.kind == "index":
            return widths[0] + _F32
        return widths[0] + widths[0] // TILE * _F32 + _BF16 * widths[1]

    def encode(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """One float tensor [N, heads, width] for each part -> uint8 [N, nbytes]."""
        flat = [value.flatten(1) for value in values]
        if self.kind == "bf16":
            return torch.cat([_bytes(value.bfloat16()) for value in flat], 1)
        if self.kind == "static":
            pairs = zip(flat, self.scales, strict=True)
            return torch.cat([_bytes(_codes(value.float() / scale)) for value, scale in pairs], 1)
        if self.kind == "index":
            scale = flat[0].float().abs().amax(1, keepdim=True).clamp_min(_LEAST_AMAX) / _MAX
            mantissa, exponent = torch.frexp(scale)
            scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
            return torch.cat([_bytes(_codes(flat[0].float() / scale)), _bytes(scale)], 1)
        tiles = flat[0].float().reshape(len(flat[0]), -1, TILE)
        scale = (tiles.abs().amax(2) / _MAX).clamp_min(torch.finfo(torch.float32).tiny)
        codes = _codes(tiles / scale[..., None]).flatten(1)
        return torch.cat([_bytes(codes), _bytes(scale), _bytes(flat[1].bfloat16())], 1)

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """uint8 [N, nbytes] -> [N, heads, width] of each part; the product with a scale is rounded once, to `dtype`."""
        widths = [part.heads * part.width for part in self.parts]
        if self.kind == "bf16":
            found = [piece.view(torch.bfloat16).to(dtype) for piece in _cut(rows, [_BF16 * width for width in widths])]
        elif self.kind == "static":
            pairs = zip(_cut(rows, widths), self.scales, strict=True)
            found = [(piece.view(torch.float8_e4m3fn).float() * scale).to(dtype) for piece, scale in pairs]
        elif self.kind == "index":
            codes, scale = _cut(rows, [widths[0], _F32])
            found = [(codes.view(torch.float8_e4m3fn).float() * scale.view(torch.float32)).to(dtype)]
        else:
            codes, scale, rope = _cut(rows, [widths[0], widths[0] // TILE * _F32, _BF16 * widths[1]])
            tiles = codes.view(torch.float8_e4m3fn).float().reshape(len(rows), -1, TILE)
            latent = (tiles * scale.view(torch.float32)[..., None]).flatten(1).to(dtype)
            found = [latent, rope.view(torch.bfloat16).to(dtype)]
        return [value.reshape(-1, part.heads, part.width) for value, part in zip(found, self.parts, strict=True)]


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows of each decoder layer: what `update` writes, and the indexer's where there is one."""

    name: str
    layers: tuple[tuple[Row, ...], ...]

    @property
    def bytes_per_token(self) -> int:
        """Of all layers."""
        return sum(row.nbytes for rows in self.layers for row in rows)


def make_layout(name: str, layers: Sequence[CacheLayer], scales: Scales | None = None) -> Layout:
    """The layout `name` ("bfloat16" is "bf16") for a model's decoder layers.

    scales: layer -> part -> scale of fp8_e4m3; None is 1.0.

    Raises LoadError where there is no such layout for the model, or where scales do not fit it.
    """
    name = {"bfloat16": "bf16"}.get(name, name)
    if name not in LAYOUTS:
        raise LoadError(f"KV layout {name!r} is unknown; known are {', '.join(LAYOUTS)}")
    if scales is not None and name != "fp8_e4m3":
        raise LoadError(f"KV layout {name} takes no scales; only fp8_e4m3 does")
    if unknown := sorted(set(scales or ()) - {layer.layer for layer in layers}):
        raise LoadError(f"KV scales: layer {unknown[0]} is no decoder layer of the model, which has {len(layers)}")
    return Layout(
        name, tuple(_rows(name, layer, None if scales is None else scales.get(layer.layer)) for layer in layers)
    )


def _rows(name: str, layer: CacheLayer, scales: Mapping[str, float] | None) -> tuple[Row, ...]:
    main = tuple(part for part in layer.parts if part.name != "index_k")
    index = tuple(part for part in layer.parts if part.name == "index_k")
    names = [part.name for part in main]
    if not main:
        raise LoadError(
            f"layer {layer.layer}: linear attention keeps a state and no rows; the paged cache has no place for it"
        )
    if name == "bf16":
        row = Row("bf16", main)
    elif name == "fp8_e4m3":
        chosen = [1.0] * len(main) if scales is None else [scales.get(part) for part in names]
        if scales is not None and (None in chosen or len(scales) > len(main)):
            raise LoadError(f"KV scales: layer {layer.layer} has {', '.join(scales)}; expected {', '.join(names)}")
        values = tuple(float(scale) for scale in chosen if scale is not None)
        if not all(0 < scale < float("inf") for scale in values):
            raise LoadError(f"KV scales: layer {layer.layer}: {values}; scales are finite and greater than 0")
        if names == ["kv_c", "k_pe"] and values[0] != values[1]:
            raise LoadError(
                f"KV scales: layer {layer.layer}: kv_c {values[0]} and k_pe {values[1]} share a row and its scale"
            )
        row = Row("static", main, values)
    else:
        if names != ["kv_c", "k_pe"]:
            raise LoadError(
                f"KV layout fp8_ds_mla: layer {layer.layer} keeps {' and '.join(names)}; it is for kv_c and k_pe (MLA)"
            )
        if main[0].width % TILE:
            raise LoadError(f"KV layout fp8_ds_mla: kv_lora_rank {main[0].width} is no multiple of {TILE}")
        row = Row("ds_mla", main)
    kind = "bf16" if name == "bf16" else "index"
    return (row, *(Row(kind, (part,)) for part in index))


def _codes(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.clamp(-_MAX, _MAX).to(torch.float8_e4m3fn)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def _cut(rows: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """Pieces of the rows in memory of their own, aligned for wider dtypes."""
    return [piece.clone(memory_format=torch.contiguous_format) for piece in torch.split(rows, sizes, 1)]
