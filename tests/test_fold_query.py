"""Kernels that round the query to e4m3 too: folding by more than the cache needs costs something there."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import folds
import torch
import variants
from engines import one_thread  # noqa: F401  (autouse)

from phasefold.calib.cached import ObservedCache
from phasefold.calib.forward import Forward
from phasefold.calib.kv import choose_scale
from phasefold.calib.model import Source
from phasefold.calib.text import load_tokenizer
from phasefold.formats.checkpoint import open_checkpoint

TINY = variants.EXAMPLES / "tiny-kimi"


class Seen(NamedTuple):
    """Of the first layer: queries [heads, L, latent + rope] with kv_b_proj absorbed, cached rows [L, latent + rope]."""

    queries: torch.Tensor
    rows: torch.Tensor
    latent: int


def seen(folder: Path, monkeypatch: Any) -> Seen:
    source = Source(open_checkpoint(folder))
    config, forward = source.config, Forward(source, torch.bfloat16, "cpu")
    cache: Any = ObservedCache([layer for layer in source.model.cache() if not layer.mtp])
    given: dict[str, torch.Tensor] = {}
    attention, update = torch.nn.functional.scaled_dot_product_attention, cache.layers[0].update

    def attend(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        given["query"] = query[0].float()
        return attention(query, *args, **kwargs)

    def keep(latent: torch.Tensor, rope: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        given["rows"] = torch.cat([latent[0, 0], rope[0, 0]], -1).float()
        return update(latent, rope, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(cache.layers[0], "update", keep)
    words = (variants.EXAMPLES.parent / "docs" / "decisions.md").read_text()[:4000]
    tokens = torch.tensor(load_tokenizer(TINY)(words)["input_ids"][:256])[None]
    layer = forward.layers[0]
    source.load_layer(layer, 0, forward.dtypes, "cpu", whole=True)
    with torch.inference_mode():
        forward.call(layer, forward.embed(tokens), None, cache)
        heads, nope = config.num_attention_heads, config.qk_nope_head_dim
        absorbed = layer.self_attn.kv_b_proj.weight.float().view(heads, -1, config.kv_lora_rank)[:, :nope]
        plain, rope = given["query"].split([nope, config.qk_rope_head_dim], -1)
        return Seen(torch.cat([plain @ absorbed, rope], -1), given["rows"], config.kv_lora_rank)


def e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def error(one: Seen, *, query: bool) -> float:
    """Of the products of queries and rows, rows in e4m3 at scale 1.0, queries too where they are rounded."""
    exact = one.queries @ one.rows.T
    found = (e4m3(one.queries) if query else one.queries) @ e4m3(one.rows).T
    causal = torch.ones(exact.shape[-2:]).tril().bool()
    return float((found - exact)[:, causal].norm() / exact[:, causal].norm())


def test_a_headroom_of_16_leaves_queries_room(tmp_path: Path, monkeypatch: Any) -> None:
    plain = seen(TINY, monkeypatch)
    amax = [
        float(part.abs().max()) for part in plain.rows.split([plain.latent, plain.rows.shape[1] - plain.latent], -1)
    ]
    found = {}
    for headroom in (2.0, 16.0):
        latent, rope = (-round(math.log2(choose_scale(value, headroom))) for value in amax)
        folds.folded(TINY, tmp_path / f"{headroom}", {0: {"kv_c": latent, "k_pe": rope}})
        found[headroom] = seen(tmp_path / f"{headroom}", monkeypatch)
        assert torch.equal(found[headroom].queries @ found[headroom].rows.T, plain.queries @ plain.rows.T)
    # the cache is as exact with either
    assert abs(error(found[16.0], query=False) / error(found[2.0], query=False) - 1) < 0.01
    assert error(found[2.0], query=True) > 1.4 * error(plain, query=True)
    assert error(found[16.0], query=True) < 1.05 * error(plain, query=True)
