"""Worker: the parameters of vLLM's own model on one rank of several, on a card that it is made to believe in.

python count_vllm.py FOLDER TP EP DEVICE MODEL -> "ANSWER {name: [elements, bytes of one]}". DEVICE: meta, where no
weight takes memory, or cpu, as placing experts on ranks wants. EP: 1, or as TP. MODEL: main, or draft: the MTP layer.
Rank 0 is the fullest.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Build rank 0 and print what it holds."""
    folder, tp, ep, device = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1")
    from phasefold.serving.runtimes.vllm_fake import pretend_cuda, pretend_rank

    pretend_cuda(90)
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from phasefold.serving.runtimes import vllm_dry

    torch.set_num_threads(1)
    draft = sys.argv[5] == "draft"
    config = vllm_dry._engine_config(folder, tp, draft=draft)
    config.parallel_config.enable_expert_parallel = ep > 1
    pretend_rank(config, 0, tp)
    model_config = config.speculative_config.draft_model_config if draft else config.model_config
    still = vllm_dry._stay_on_meta() if device == "meta" else contextlib.nullcontext()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16), torch.device(device), still:
        model = initialize_model(config, model_config=model_config)
    held = {name: [p.numel(), p.element_size()] for name, p in model.named_parameters()}
    print("ANSWER", json.dumps(held))


if __name__ == "__main__":
    main()
