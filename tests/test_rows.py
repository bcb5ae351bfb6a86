"""Rows of a KV cache, byte by byte, read with numpy and struct.

e4m3 values are those of a table written out from the OCP FP8 specification, not of torch's float8.
"""

import struct

import numpy as np
import pytest
import torch

from phasefold.errors import LoadError
from phasefold.families import CacheLayer, CachePart
from phasefold.serving.paged.rows import make_layout

LATENT, ROPE = CachePart("kv_c", 1, 512), CachePart("k_pe", 1, 64)
INDEX = CachePart("index_k", 1, 128)
MLA, DSA = CacheLayer(0, False, (LATENT, ROPE)), CacheLayer(0, False, (LATENT, ROPE, INDEX))
GQA = CacheLayer(0, False, (CachePart("k", 2, 32), CachePart("v", 2, 32)))


def e4m3_table() -> np.ndarray:
    """The value of each byte: sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7f and 0xff are NaN."""
    table = []
    for byte in range(256):
        sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
        value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        table.append(float("nan") if byte & 127 == 127 else -value if sign else value)
    return np.array(table)


TABLE = e4m3_table()


def values(seed: int, parts: tuple[CachePart, ...], tokens: int = 9) -> list[torch.Tensor]:
    """BF16 values whose size differs a lot from token to token; a token of zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp2(torch.arange(tokens) * 3.0 - 12)[:, None, None]
    size[4] = 0
    return [(torch.randn(tokens, p.heads, p.width, generator=generator) * size).bfloat16() for p in parts]


def nearest(wanted: np.ndarray, codes: np.ndarray, scale: np.ndarray) -> None:
    """Each code is the nearest to wanted / scale (one float32 division), the even one of two; 448 at most."""
    finite = TABLE[np.isfinite(TABLE)]
    scaled = np.clip(wanted.astype(np.float32) / np.float32(scale), -448, 448).astype(np.float64).reshape(-1)
    away = np.abs(finite[:, None] - scaled)
    off = np.abs(TABLE[codes].reshape(-1) - scaled)
    assert np.array_equal(off, away.min(0))
    tied = ((away == away.min(0)).sum(0) == 2) & (scaled != 0)
    assert np.all(codes.reshape(-1)[tied] % 2 == 0)


def test_published_sizes() -> None:
    sizes = {
        name: [row.nbytes for row in make_layout(name, [DSA]).layers[0]] for name in ("bf16", "fp8_e4m3", "fp8_ds_mla")
    }
    assert sizes == {"bf16": [1152, 256], "fp8_e4m3": [576, 132], "fp8_ds_mla": [656, 132]}
    assert make_layout("fp8_e4m3", [GQA]).bytes_per_token == 128


def test_bf16_rows_are_the_values() -> None:
    (row,) = make_layout("bf16", [MLA]).layers[0]
    given = values(0, row.parts)
    rows = row.encode(given)
    expected = b"".join(struct.pack("<576f", *torch.cat([v[3, 0] for v in given]).tolist()) for _ in range(1))
    high = np.frombuffer(expected, dtype="<u2")[1::2]  # BF16 is the upper half of a float32
    assert rows[3].numpy().tobytes() == high.tobytes()
    assert all(torch.equal(a, b) for a, b in zip(row.decode(rows, torch.bfloat16), given, strict=True))


@pytest.mark.parametrize("layer", [MLA, GQA])
def test_static_scales(layer: CacheLayer) -> None:
    names = [part.name for part in layer.parts]
    scales = {0: dict.fromkeys(names, 0.25) if layer is MLA else {"k": 0.25, "v": 3.0}}
    (row,) = make_layout("fp8_e4m3", [layer], scales).layers[0]
    given = values(1, row.parts)
    rows = row.encode(given).numpy()
    start = 0
    for part, value, read in zip(row.parts, given, row.decode(torch.from_numpy(rows), torch.float32), strict=True):
        width, scale = part.heads * part.width, scales[0][part.name]
        codes = rows[:, start : start + width]
        nearest(value.float().numpy().reshape(9, width), codes, np.full((9, 1), scale))
        assert np.array_equal((TABLE[codes] * scale).astype(np.float32), read.numpy().reshape(9, width))
        start += width
    assert start == rows.shape[1] and not np.isnan(TABLE[rows]).any()
    assert np.abs(TABLE[rows]).max() == 448  # the largest values are beyond the range


@pytest.mark.parametrize("latent", [512, 128])
def test_ds_mla_rows(latent: int) -> None:
    parts = (CachePart("kv_c", 1, latent), CachePart("k_pe", 1, 64))
    (row,) = make_layout("fp8_ds_mla", [CacheLayer(0, False, parts)]).layers[0]
    given = values(2, parts)
    rows = row.encode(given)
    tiles = latent // 128
    for token in range(9):
        raw = rows[token].numpy().tobytes()
        scales = np.frombuffer(raw, "<f4", tiles, latent)
        tile = given[0][token, 0].float().numpy().reshape(tiles, 128)
        amax = np.abs(tile).max(1)
        expected = np.maximum((amax / np.float32(448)).astype(np.float32), np.finfo(np.float32).tiny)
        assert np.array_equal(scales, expected)
        codes = np.frombuffer(raw, np.uint8, latent).reshape(tiles, 128)
        nearest(tile, codes, scales[:, None].astype(np.float64))
        assert token == 4 or np.all(np.abs(TABLE[codes]).max(1) == 448)
        rope = np.frombuffer(raw, "<u2", 64, latent + 4 * tiles)
        assert rope.tobytes() == given[1][token, 0].view(torch.int16).numpy().tobytes()
        read = row.decode(rows, torch.float32)
        decoded = (TABLE[codes] * scales[:, None]).astype(np.float32).reshape(-1)
        assert np.array_equal(read[0][token, 0].numpy(), decoded)
        assert torch.equal(read[1][token], given[1][token].float())
    assert torch.equal(row.decode(rows[:1], torch.bfloat16)[0], row.decode(rows, torch.bfloat16)[0][:1])


def test_indexer_rows_have_scales_that_are_powers_of_two() -> None:
    row = make_layout("fp8_e4m3", [DSA]).layers[0][1]
    given = values(3, row.parts)
    given[0][7, 0, :] = 0
    given[0][7, 0, 5] = 448 * 8  # amax / 448 is a power of two already: it stays
    rows = row.encode(given)
    for token in range(9):
        raw = rows[token].numpy().tobytes()
        (scale,) = struct.unpack("<f", raw[128:])
        amax = max(float(given[0][token].float().abs().max()), float(np.float32(1e-4)))
        assert (
            float(np.log2(scale)).is_integer()
            and scale / 2 < amax / 448 * (1 + 1e-6)
            and amax / 448 <= scale * (1 + 1e-6)
        )
        nearest(given[0][token, 0].float().numpy(), np.frombuffer(raw, np.uint8, 128), np.float64(scale))
        decoded = TABLE[np.frombuffer(raw, np.uint8, 128)] * scale
        assert np.array_equal(row.decode(rows, torch.float32)[0][token, 0].numpy(), decoded.astype(np.float32))
    assert struct.unpack("<f", rows[7].numpy().tobytes()[128:]) == (8.0,)


def test_error_of_a_row_is_what_eight_bits_cost() -> None:
    given = [
        torch.randn(500, 1, 512, generator=torch.Generator().manual_seed(0)).bfloat16(),
        torch.zeros(500, 1, 64).bfloat16(),
    ]
    for name, scales in (("fp8_ds_mla", None), ("fp8_e4m3", {0: {"kv_c": 2**-6, "k_pe": 2**-6}}), ("fp8_e4m3", None)):
        (row,) = make_layout(name, [MLA], scales).layers[0]
        read = row.decode(row.encode(given), torch.float32)[0]
        error = ((read - given[0].float()).norm() / given[0].float().norm()).item()
        assert 0.02 < error < 0.03


REFUSED = [
    ("nvfp4", MLA, None, r"KV layout 'nvfp4' is unknown; known are bf16, fp8_e4m3, fp8_ds_mla"),
    ("fp8_ds_mla", GQA, None, r"layer 0 keeps k and v; it is for kv_c and k_pe"),
    (
        "fp8_ds_mla",
        CacheLayer(3, False, (CachePart("kv_c", 1, 192), ROPE)),
        None,
        r"kv_lora_rank 192 is no multiple of 128",
    ),
    ("bf16", CacheLayer(2, False, ()), None, r"layer 2: linear attention keeps a state"),
    ("bf16", MLA, {}, r"KV layout bf16 takes no scales"),
    ("fp8_e4m3", MLA, {1: {"kv_c": 1.0, "k_pe": 1.0}}, r"layer 1 is no decoder layer of the model, which has 1"),
    ("fp8_e4m3", MLA, {0: {"kv_c": 1.0}}, r"layer 0 has kv_c; expected kv_c, k_pe"),
    ("fp8_e4m3", MLA, {0: {"kv_c": 1.0, "k_pe": 2.0}}, r"kv_c 1\.0 and k_pe 2\.0 share a row"),
    ("fp8_e4m3", GQA, {0: {"k": 0.0, "v": 1.0}}, r"scales are finite and greater than 0"),
    ("fp8_e4m3", GQA, {0: {"k": float("inf"), "v": 1.0}}, r"scales are finite and greater than 0"),
    ("fp8_e4m3", GQA, {0: {"k": 1.0, "v": 1.0, "q": 1.0}}, r"layer 0 has k, v, q; expected k, v"),
]


@pytest.mark.parametrize(("name", "layer", "scales", "words"), REFUSED)
def test_layouts_that_make_no_sense_are_refused(name, layer, scales, words) -> None:
    with pytest.raises(LoadError, match=words):
        make_layout(name, [layer], scales)


def test_bf16_has_two_names() -> None:
    assert make_layout("bfloat16", [GQA]) == make_layout("bf16", [GQA])


def test_a_scale_of_one_is_the_default() -> None:
    assert make_layout("fp8_e4m3", [GQA]) == make_layout("fp8_e4m3", [GQA], {0: {"k": 1.0, "v": 1.0}})
    assert make_layout("fp8_e4m3", [GQA]) != make_layout("fp8_e4m3", [GQA], {0: {"k": 2.0, "v": 1.0}})
