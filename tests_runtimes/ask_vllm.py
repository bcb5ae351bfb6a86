"""Worker: what vLLM itself makes of command lines, on a card that it is made to believe in.

python ask_vllm.py SM < cases.json: argument lists of `vllm serve` -> a JSON list of what each means, or the error.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
from typing import Any
from unittest.mock import MagicMock

#: of the CUDA installation only: its modules are imported where a backend is asked what it supports
_FLASHINFER = ("", ".decode", ".prefill", ".utils", ".mla", ".cascade", ".fp4_quantization")


def pretend(sm: int) -> None:
    """A card, and the packages beside vLLM that every CUDA installation has: FlashMLA and FlashInfer."""
    from phasefold.serving.runtimes.vllm_fake import pretend_cuda

    pretend_cuda(sm)
    import torch

    for tail in _FLASHINFER:
        module = MagicMock(name=f"flashinfer{tail}")
        module.__path__, module.__spec__ = [], importlib.machinery.ModuleSpec(f"flashinfer{tail}", None)
        sys.modules[f"flashinfer{tail}"] = module
    import vllm.v1.attention.ops.flashmla as flashmla

    flashmla._is_flashmla_available = lambda: (True, None)
    import vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90 as sparse

    sparse.has_flashinfer_sm90_nope_mla = lambda: True
    empty = torch.empty  # CUTLASS_MLA takes its workspace on the card when it is imported
    torch.empty = lambda *args, **kwargs: empty(*args, **kwargs | {"device": "meta"})
    import vllm.v1.attention.backends.mla.cutlass_mla  # noqa: F401

    torch.empty = empty


def ask(argv: list[str], head: int, mla: bool, dsa: bool) -> dict[str, Any]:
    """Values of the arguments, and the attention backend and page that vLLM chooses with them."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.attention.selector import get_attn_backend

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    args.model = args.model_tag
    engine = AsyncEngineArgs.from_cli_args(args)
    transfer, speculative = engine.kv_transfer_config, engine.speculative_config
    found = {
        "model": engine.model,
        "host": args.host,
        "port": args.port,
        "tp": engine.tensor_parallel_size,
        "ep": engine.enable_expert_parallel,
        "kv_cache_dtype": engine.kv_cache_dtype,
        "block_size": engine.block_size,
        "kv_connector": transfer and transfer.kv_connector,
        "kv_role": transfer and transfer.kv_role,
        "speculative": speculative,
        "served_model_name": engine.served_model_name,
        "max_model_len": engine.max_model_len,
        "trust_remote_code": engine.trust_remote_code,
    }
    engine.kv_transfer_config = engine.speculative_config = None  # what follows is the choice of the backend
    engine.skip_tokenizer_init = True
    config = engine.create_engine_config()
    with set_current_vllm_config(config):
        heads = config.model_config.hf_text_config.num_attention_heads // engine.tensor_parallel_size
        dtype = config.cache_config.cache_dtype
        chosen = get_attn_backend(head, torch.bfloat16, dtype, use_mla=mla, use_sparse=dsa, num_heads=heads)
        page = engine.block_size or chosen.get_preferred_block_size(16)
    asked = config.attention_config.backend
    found |= {"backend": asked and asked.name, "chosen": chosen.get_name(), "page": page, "cache_dtype": dtype}
    if int(sys.argv[1]) >= 100:  # the connectors' modules need triton on Hopper
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import compute_nixl_compatibility_hash

        found["hash"] = compute_nixl_compatibility_hash(config, chosen.get_name())
    return found


def main() -> None:
    """Answer all cases."""
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    pretend(int(sys.argv[1]))
    answers = []
    for case in json.load(sys.stdin):
        try:
            answers.append(ask(**case))
        except (Exception, SystemExit) as error:  # whatever it raises is its answer; argparse exits
            answers.append({"error": f"{type(error).__name__}: {error}"})
    print("ANSWERS " + json.dumps(answers))


if __name__ == "__main__":
    main()
