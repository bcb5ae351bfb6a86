"""Make every choice that a runtime would make for each pool alone, so that the two agree."""

from __future__ import annotations

from dataclasses import replace

from ..families import Model
from .deployment import Deployment
from .kv_layout import PHASES, KVLayout, is_dsa, kv_layout

Models = tuple[Model, Model]
Pools = tuple[Deployment, Deployment]

#: tried where the backends that the pools would choose do not serve both
_FALLBACKS = {"vllm": ("FLASHMLA_SPARSE", "TRITON_MLA", "TRITON_ATTN"), "sglang": ("flashmla_kv",)}


def settle(models: Models, pools: Pools) -> Pools:
    """The deployments with KV dtype, attention backend and page chosen, alike wherever they must be."""
    asked = [at.kv_dtype for at in pools if at.kv_dtype != "auto"]
    dtypes = [at.kv_dtype if at.kv_dtype != "auto" else (asked or ["bfloat16"])[0] for at in pools]
    first, second = (
        replace(at, kv_dtype=_spelled(model, at.runtime, dtype))
        for model, at, dtype in zip(models, pools, dtypes, strict=True)
    )
    pair = _with_backends(models, (first, second))
    layouts = _layouts(models, pair)
    pages = [at.page_size or layout.page for at, layout in zip(pair, layouts, strict=True)]
    given = [at.page_size for at in pools if at.page_size]
    if None not in pages and pages[0] != pages[1] and len(given) < 2:
        wanted = given[0] if given else max(page for page in pages if page)
        pages = [wanted, wanted]
    return replace(pair[0], page_size=pages[0]), replace(pair[1], page_size=pages[1])


def _spelled(model: Model, runtime: str, dtype: str) -> str:
    """FP8 under the name that says exactly one row layout: on vLLM "fp8" is another one from card to card with DSA."""
    if runtime == "sglang":
        return "fp8_e4m3" if dtype == "fp8" else dtype
    return {"fp8": "fp8_ds_mla" if is_dsa(model) else "fp8_e4m3"}.get(dtype, dtype)


def _with_backends(models: Models, pools: Pools) -> Pools:
    """Both pools with a backend: the one that each would take, or one that serves both where theirs do not agree."""
    layouts = _layouts(models, pools)
    names = [layout.backend for layout in layouts]
    must_equal = pools[0].runtime == "vllm"
    if all(names) and (layouts[0].row_bytes != layouts[1].row_bytes or (must_equal and names[0] != names[1])):
        given = [at.attention_backend for at in pools if at.attention_backend]
        for name in given or (*names, *_FALLBACKS[pools[0].runtime]):
            pair = (replace(pools[0], attention_backend=name), replace(pools[1], attention_backend=name))
            tried = _layouts(models, pair)
            if not any(layout.refusal for layout in tried) and tried[0].row == tried[1].row:
                names = [name, name]
                break
    return (
        replace(pools[0], attention_backend=pools[0].attention_backend or names[0] or None),
        replace(pools[1], attention_backend=pools[1].attention_backend or names[1] or None),
    )


def _layouts(models: Models, pools: Pools) -> list[KVLayout]:
    return [kv_layout(model, at, phase) for model, at, phase in zip(models, pools, PHASES, strict=True)]
