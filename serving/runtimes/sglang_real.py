"""SGLang itself: loads an artifact with its engine and continues a prompt greedily. Needs a GPU.

Its engine runs in processes of its own, so that its loading cannot be watched: what it says of weights is read from
what they print, and a dry load says where each tensor goes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .prompts import prompt_ids


def generate(
    folder: Path, prompt: str | None, tokens: int, *, tp: int = 1, kv_dtype: str = "auto", shared_fusion: bool = True
) -> dict[str, Any]:
    """Load and generate on the GPUs of this machine."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import sglang

    ids, tokenizer = prompt_ids(folder, prompt)
    engine = sglang.Engine(
        model_path=str(folder.resolve()),
        tp_size=tp,
        kv_cache_dtype=kv_dtype,
        disable_shared_experts_fusion=not shared_fusion,
        disable_cuda_graph=True,
        skip_tokenizer_init=True,
    )
    try:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "min_new_tokens": tokens, "ignore_eos": True}
        made = engine.generate(input_ids=ids, sampling_params=sampling)["output_ids"]
    finally:
        engine.shutdown()
    return {
        "version": sglang.__version__,
        "text": tokenizer.decode(made) if tokenizer else " ".join(map(str, made)),
        "prompt_ids": ids,
        "token_ids": list(made),
        "notes": ["tensors are not accounted for in this mode: a dry load does that"],
    }
