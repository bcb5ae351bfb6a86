"""Worker: what SGLang itself makes of command lines, on a card that it is made to believe in.

python ask_sglang.py SM < cases.json: a list of argument lists -> a JSON list of what each resolves to, or the error.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

FIELDS = (
    "model_path", "host", "port", "tp_size", "ep_size", "kv_cache_dtype", "page_size", "attention_backend",
    "dsa_prefill_backend", "dsa_decode_backend", "disaggregation_mode", "disaggregation_transfer_backend",
    "disaggregation_bootstrap_port", "disable_shared_experts_fusion", "speculative_algorithm", "speculative_num_steps",
    "speculative_eagle_topk", "speculative_num_draft_tokens", "served_model_name", "context_length",
    "trust_remote_code",
)  # fmt: skip


def ask(argv: list[str]) -> dict[str, Any]:
    """The resolved arguments, and how many elements wide a row of latent attention is."""
    import torch
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view
    from sglang.srt.mem_cache.kv_cache_configurator import calculate_mla_kv_cache_dim
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import prepare_server_args

    args = prepare_server_args(argv)
    args.resolve_once()
    view = resolved_view(args)
    found = {name: getattr(view, name) for name in FIELDS}
    model = model_config_of(args)
    if getattr(model, "kv_lora_rank", None):
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        fp8 = found["kv_cache_dtype"].startswith("fp8")
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        found["row_bytes"] = calculate_mla_kv_cache_dim(model_config=model, kv_cache_dtype=dtype) * dtype.itemsize
    return found


def main() -> None:
    """Answer all cases."""
    from phasefold.serving.runtimes.sglang_fake import pretend_cuda

    os.environ["HF_HUB_OFFLINE"] = "1"
    pretend_cuda(int(sys.argv[1]), 8)
    answers = []
    for argv in json.load(sys.stdin):
        try:
            answers.append(ask(argv))
        except (Exception, SystemExit) as error:  # whatever it raises is its answer; argparse exits
            answers.append({"error": f"{type(error).__name__}: {error}"})
    print("ANSWERS " + json.dumps(answers))


if __name__ == "__main__":
    main()
