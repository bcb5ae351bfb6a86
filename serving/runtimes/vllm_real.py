"""vLLM itself: loads an artifact with its engine and continues a prompt greedily. Needs a GPU for quantized weights.

Its loader does not check that a quantized checkpoint is complete, so its loading is watched (in one process; the
weights' own values still come from its own reader) and its log is read for what it says of weights.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .prompts import prompt_ids


def generate(folder: Path, prompt: str | None, tokens: int, *, tp: int = 1, kv_dtype: str = "auto") -> dict[str, Any]:
    """Load and generate on the GPUs of this machine. With one GPU every tensor and parameter is accounted for."""
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    if tp == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from .logs import WeightLog
    from .vllm_watch import watch_loading

    watched: dict[str, Any] = {}
    if tp == 1:
        watch_loading(watched)
    log = WeightLog("vllm")
    found = run(folder, prompt, tokens, kv_dtype=kv_dtype, dtype="auto", max_model_len=2048, tensor_parallel_size=tp)
    if tp > 1:
        watched["notes"] = ["tensors are not accounted for on several GPUs: a dry load does that"]
    return found | watched | {"log": log.lines}


def run(folder: Path, prompt: str | None, tokens: int, *, kv_dtype: str, dtype: str, **engine: Any) -> dict[str, Any]:
    """Start vLLM's engine on a folder and generate; text, token ids and the log probability of each token."""
    import vllm

    ids, tokenizer = prompt_ids(folder, prompt)
    model = vllm.LLM(
        model=str(folder.resolve()),
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        enforce_eager=True,
        max_num_seqs=1,
        seed=0,
        skip_tokenizer_init=True,
        **engine,
    )
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, logprobs=0, prompt_logprobs=0,
        detokenize=False,
    )  # fmt: skip
    (result,) = model.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
    made = result.outputs[0]
    return {
        "version": vllm.__version__,
        "text": tokenizer.decode(made.token_ids) if tokenizer else " ".join(map(str, made.token_ids)),
        "prompt_ids": ids,
        "token_ids": list(made.token_ids),
        "logprobs": [step[token].logprob for step, token in zip(made.logprobs, made.token_ids, strict=True)],
        "prompt_logprobs": [
            step[token].logprob for step, token in zip(result.prompt_logprobs[1:], ids[1:], strict=True)
        ],
    }
