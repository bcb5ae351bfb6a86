"""SGLang's own GPU path without a GPU: its arguments, its quantization, its model and its loader take the artifact.

Says "this version's loader takes it and all of it lands", not "it serves": no weight is repacked for a kernel, and no
kernel runs. Without `data` only headers are read and no weight takes memory, so that a model of any size can be tried.
All ranks are loaded, one after the other, because SGLang may cut a tensor so that a part of it reaches none of them.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from ...families import identify
from ...formats.checkpoint import Checkpoint, open_checkpoint
from .dry import Dry, Tracker, Unwritten, by_rank, fill_with_sentinels, has_draft, left_as_sentinels, offered
from .logs import WeightLog, one_line
from .scalars import Numbers
from .sglang_fake import OnCard, forget_ranks, pretend_cuda, pretend_ranks, stand_in_kernels

_SHARED = ("embed_tokens.weight", "shared_head.head.weight", "lm_head.weight")  # a draft model borrows the target's

#: roles that SGLang never takes
_IN_VAIN = {
    "mtp.embed": "the draft model borrows the target's",
    "mtp.head": "the draft model borrows the target's",
    "buffer": "computed by the runtime",
    "attention.kv_scale": "not read by this class, the KV cache stays at scale 1.0",
}


def dry_load(folder: Path, *, tp: int = 1, data: bool = False, sm: int = 90, **arguments: Any) -> Dry:
    """Load an artifact as each rank of `tp`. The process is spent afterwards: it takes itself for one with a GPU.

    arguments: more fields of SGLang's ServerArgs, e.g. disable_shared_experts_fusion=True, ep_size=2.
    """
    # what is cut out of a tensor for a rank goes straight into the parameter, and is seen to come from there
    os.environ.update(HF_HUB_OFFLINE="1", SGLANG_MOE_COPY_WEIGHT_VIEWS_BEFORE_H2D="0")
    pretend_cuda(sm, tp)
    import sglang

    import_module("sglang.srt.models.registry")  # complains of each model for which the stand-ins are not enough
    stand_in_kernels()
    checkpoint = open_checkpoint(folder)
    dry = Dry(sglang.__version__, "", len(checkpoint.tensors), [], [], [], {}, "", [])
    drafts = (False, True) if has_draft(checkpoint) else (False,)
    seen: Tracker | None = None
    unwritten: dict[str, list[int]] = {}
    try:
        for rank in range(tp):
            server = _start(folder, rank, tp, speculative=len(drafts) > 1, arguments=arguments)
            for draft in drafts:
                with _heard(dry):
                    tracker = _load(checkpoint, server, data=data, draft=draft)
                for text in _note(dry, tracker, data=data, draft=draft, first=rank == 0):
                    unwritten.setdefault(text, []).append(rank)
                if seen is None:
                    seen = tracker
                else:
                    seen.absorb(tracker)
    except Exception as error:  # whatever a runtime raises is its answer
        dry.refused = one_line(error)
        return dry
    dry.unwritten = by_rank(unwritten, tp)
    left = seen.not_taken(whole=True) if seen else []
    in_vain = {
        spec.name: _IN_VAIN[spec.role] for spec in identify(checkpoint.config).tensors() if spec.role in _IN_VAIN
    }
    dry.optional += [f"{name}: {in_vain[name]}" for name in left if name in in_vain]
    dry.not_taken = [name for name in left if name not in in_vain]
    dry.not_taken += [name for name, s in checkpoint.tensors.items() if s.file in checkpoint.unindexed]
    return dry


@contextmanager
def _heard(dry: Dry) -> Iterator[None]:
    """Keep what the runtime has to say about weights in the meantime."""
    log = WeightLog("sglang")
    try:
        yield
    finally:
        logging.getLogger("sglang").removeHandler(log)
        dry.log += [line for line in log.lines if line not in dry.log]


def _start(folder: Path, rank: int, tp: int, *, speculative: bool, arguments: dict[str, Any]) -> Any:
    """What a scheduler process does before it loads a model: arguments, ranks, groups, choice of runners."""
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    given: dict[str, Any] = {"speculative_algorithm": "EAGLE"} if speculative else {}
    given |= {"model_path": str(folder.resolve()), "tp_size": tp, "skip_tokenizer_init": True}
    server = ServerArgs(**(given | arguments))
    forget_ranks()
    publish(server, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    pretend_ranks(rank, tp)
    initialize_dp_attention(server)
    initialize_moe_config()
    initialize_fp8_gemm_config()
    return server


def _load(checkpoint: Checkpoint, server: Any, *, data: bool, draft: bool) -> Tracker:
    """Build one model (the main one or the draft) and give its loader the checkpoint, watched."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.bootstrap import init_layer_runtime
    from sglang.srt.layers.moe.utils import draft_model_build_scope
    from sglang.srt.model_loader import loader

    config, load_config = ModelConfig.from_server_args(server, is_draft_model=draft), LoadConfig()
    init_layer_runtime(model_config=config)
    with draft_model_build_scope() if draft else nullcontext():
        quantization = loader._get_quantization_config(config, load_config)
        with loader.set_default_torch_dtype(config.dtype), OnCard("cpu" if data else "meta"):
            model = loader._initialize_model(config, load_config, quantization)
    if data:
        fill_with_sentinels(model)
        tensors = loader.DefaultModelLoader(load_config)._get_all_weights(config, model)
    else:
        tensors = offered(checkpoint, data=False)
    tracker = Tracker(model)
    with Numbers(), tracker:
        model.load_weights(tracker.watch(tensors))
    return tracker


def _note(dry: Dry, tracker: Tracker, *, data: bool, draft: bool, first: bool) -> list[str]:
    """What was left unwritten in one model, as text; on the `first` rank also notes what is harmless, and methods."""
    model = tracker.model
    found = {item.name: item for item in tracker.unwritten()}
    for name, count in (left_as_sentinels(model) if data else {}).items():
        if name not in found or found[name].count < count:
            found[name] = Unwritten(name, count, model.get_parameter(name).numel(), False)
    defaults = _defaults(model, found)
    harmful, harmless = [], dict[str, list[Unwritten]]()
    for item in found.values():
        if item.padding:
            harmless.setdefault("padding of the vocabulary", []).append(item)
        elif draft and item.count == item.total and item.name.endswith(_SHARED):
            harmless.setdefault("the draft model borrows the target's", []).append(item)
        elif item.name in defaults:
            harmless.setdefault(defaults[item.name], []).append(item)
        else:
            harmful.append(str(item))
    if first:
        dry.model_class = dry.model_class or type(model).__name__
        dry.methods = dict(Counter(dry.methods) + Counter(_methods(model)))
        for why, items in harmless.items():
            more = f" and {len(items) - 1} more" if len(items) > 1 else ""
            dry.optional.append(f"{items[0]}{more}: {why}")
    return harmful


def _defaults(model: Any, unwritten: dict[str, Unwritten]) -> dict[str, str]:
    """Parameters to which SGLang gives a value of its own after loading, and which; none that some layers do have."""
    given: dict[str, str] = {}
    for prefix, module in model.named_modules():
        if type(getattr(module, "quant_method", None)).__name__.endswith("KVCacheMethod"):
            given |= {f"{prefix}.{kind}_scale": "cache scales are 1.0 where absent" for kind in ("k", "v")}
        if getattr(getattr(module, "scheme", None), "actorder", "group") != "group":
            names = (name for name, _ in module.named_parameters(recurse=False) if "g_idx" in name)
            given |= {f"{prefix}.{name}": "of no use without activation order" for name in names}
    written = {_tail(name) for name in given if name not in unwritten}
    return {name: why for name, why in given.items() if _tail(name) not in written}


def _tail(name: str) -> tuple[str, ...]:
    return tuple(name.split(".")[-2:])


def _methods(model: Any) -> Iterator[str]:
    """For each module that has one: quantization method, scheme and runner that SGLang chose."""
    for module in model.modules():
        if (method := getattr(module, "quant_method", None)) is None:
            continue
        scheme = getattr(module, "scheme", None)
        runner = getattr(getattr(scheme or method, "runner", None), "runner_backend", None)
        parts = [type(method).__name__, type(scheme).__name__ if scheme else "", runner.name if runner else ""]
        yield " ".join(filter(None, parts))
