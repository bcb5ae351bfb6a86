"""vLLM's own GPU path without a GPU: its config, its choice of kernels, its model and its loader take the artifact.

Says "this version's loader takes it and all of it lands", not "it serves": no weight is repacked for a kernel, no
kernel runs. Without `data` only headers are read and no weight takes memory, so that a model of any size can be tried.
All ranks are loaded, one after the other: what none of them takes is lost.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...formats.checkpoint import Checkpoint, open_checkpoint
from .dry import Dry, Tracker, by_rank, fill_with_sentinels, has_draft, left_as_sentinels, offered
from .logs import WeightLog, one_line
from .scalars import Numbers
from .vllm_fake import pretend_cuda, pretend_rank
from .vllm_watch import left_over


def dry_load(folder: Path, *, tp: int = 1, data: bool = False, sm: int = 90) -> Dry:
    """Load an artifact as each rank of `tp`. The process is spent afterwards: it takes itself for one with a GPU."""
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1")
    pretend_cuda(sm)
    import vllm

    checkpoint, log = open_checkpoint(folder), WeightLog("vllm")
    dry = Dry(vllm.__version__, "", len(checkpoint.tensors), [], [], [], {}, "", log.lines)
    seen: Tracker | None = None
    unwritten: dict[str, list[int]] = {}
    try:
        for rank in range(tp):
            config = _engine_config(folder, tp, draft=has_draft(checkpoint))
            pretend_rank(config, rank, tp)
            draft = config.speculative_config and config.speculative_config.draft_model_config
            for model_config in filter(None, (config.model_config, draft)):
                tracker = _load(checkpoint, config, model_config, data=data)
                for text in _note(dry, tracker, data=data, draft=model_config is draft, first=rank == 0):
                    unwritten.setdefault(text, []).append(rank)
                if seen is None:
                    seen = tracker
                else:
                    seen.absorb(tracker)
    except Exception as error:  # whatever a runtime raises is its answer
        dry.refused = one_line(error)
        return dry
    dry.unwritten = by_rank(unwritten, tp)
    dry.not_taken = seen.not_taken(whole=True) if seen else []
    dry.not_taken += [name for name, stored in checkpoint.tensors.items() if stored.file in checkpoint.unindexed]
    return dry


def _engine_config(folder: Path, tp: int, *, draft: bool) -> Any:
    """vLLM's whole configuration for the artifact, with its MTP layer as the draft model where it has one."""
    from vllm.engine.arg_utils import EngineArgs

    speculative = {"method": "mtp", "num_speculative_tokens": 1} if draft else None
    return EngineArgs(
        model=str(folder.resolve()),
        dtype="bfloat16",
        max_model_len=256,
        enforce_eager=True,
        skip_tokenizer_init=True,
        tensor_parallel_size=tp,
        distributed_executor_backend="external_launcher" if tp > 1 else None,
        speculative_config=speculative,
    ).create_engine_config()


def _load(checkpoint: Checkpoint, config: Any, model_config: Any, *, data: bool) -> Tracker:
    """Build one model (the main one or the draft) and give its loader the checkpoint, watched."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    device = torch.device("cpu" if data else "meta")
    with set_current_vllm_config(config):
        with set_default_torch_dtype(torch.bfloat16), device, contextlib.nullcontext() if data else _stay_on_meta():
            model = initialize_model(config, model_config=model_config)
        if data:
            fill_with_sentinels(model)
        tracker = Tracker(model)
        if data:
            tensors = DefaultModelLoader(config.load_config).get_all_weights(model_config, model)
        else:
            tensors = offered(checkpoint, data=False)
        with Numbers(), tracker:
            model.load_weights(tracker.watch(tensors))
    return tracker


def _note(dry: Dry, tracker: Tracker, *, data: bool, draft: bool, first: bool) -> list[str]:
    """Write down what one model is made of, once; gives what its load left unwritten."""
    unwritten, optional = left_over(tracker, left_as_sentinels(tracker.model) if data else {}, draft=draft)
    if first:
        dry.model_class = dry.model_class or type(tracker.model).__name__
        dry.optional += optional
        for method in _methods(tracker.model):
            dry.methods[method] = dry.methods.get(method, 0) + 1
    return unwritten


def _methods(model: Any) -> Iterator[str]:
    """For each module that has one: quantization method, scheme and kernel that vLLM chose."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is None:
            continue
        scheme = getattr(module, "scheme", None)
        parts = [type(method).__name__, type(scheme).__name__ if scheme is not None else ""]
        for holder in (method, scheme):
            for key in ("kernel", "fp8_linear", "w8a8_block_fp8_linear"):
                if (kernel := getattr(holder, key, None)) is not None:
                    parts.append(type(kernel).__name__)
            for key in ("wna16_moe_backend", "wna16_backend", "fp8_backend"):
                if (backend := getattr(holder, key, None)) is not None:
                    parts.append(getattr(backend, "name", str(backend)))
        yield " ".join(filter(None, parts))


@contextlib.contextmanager
def _stay_on_meta() -> Iterator[None]:
    """A vision tower is moved to the card as soon as it is built; without data there is nothing to move."""
    import torch

    move = torch.nn.Module.to

    def to(module: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        return move(module, *args, **kwargs) if args or kwargs else module

    torch.nn.Module.to = to  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.nn.Module.to = move  # type: ignore[method-assign]
