"""`load --runtime transformers`: from_pretrained and a greedy generation, with every key that it reports.

transformers is the one runtime that runs these formats on any CPU: it decodes them while it loads. Where it decodes
them wrongly or not at all, that is told as a gap of the installed version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...families import identify
from ...formats.checkpoint import Checkpoint, open_checkpoint
from ...quantize.account import Item, account, held_config
from .logs import WeightLog, one_line
from .prompts import prompt_ids

#: keys of the vision config as Kimi has it on the hub -> as transformers calls them
_VISION = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_hidden_layers": "num_hidden_layers",
    "vt_num_attention_heads": "num_attention_heads",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
}


def generate(folder: Path, prompt: str | None, tokens: int) -> dict[str, Any]:
    """Load an artifact and continue a prompt greedily; what a worker reports."""
    import torch
    import transformers

    checkpoint, log = open_checkpoint(folder), WeightLog("transformers")
    try:
        model, info = _load(checkpoint)
    except Exception as error:  # what it raises is its answer
        refused = one_line(error)
        gap = _two_groups(checkpoint) if "has no attribute `mlp`" in refused else ""
        # its report of the keys goes to its log, before it raises
        missing = [line.partition("|")[0].strip() for line in log.lines if "| MISSING |" in line]
        told = {"refused": refused, "gap": gap, "missing": missing, "log": log.lines}
        return {"version": transformers.__version__, **told}
    specs = identify(checkpoint.config).tensors()
    mtp = {spec.layer for spec in specs if spec.mtp}
    scales = {spec.name for spec in specs if spec.role == "attention.kv_scale"}
    drafts = tuple(f"model.layers.{layer}." for layer in mtp)
    unexpected = sorted(info["unexpected_keys"])
    extra = [name for name in unexpected if not (drafts and name.removeprefix("language_model.").startswith(drafts))]
    missing = sorted({*info["missing_keys"], *(str(key[0]) for key in info["mismatched_keys"])})
    notes, wrong = [], ""
    extra, kv = [name for name in extra if name not in scales], [name for name in extra if name in scales]
    if kv:
        notes.append(f"transformers keeps no FP8 cache: {len(kv)} KV scales were left out")
    if drafted := len(unexpected) - len(extra) - len(kv):
        notes.append(f"transformers has no MTP layer: {drafted} of its tensors were left out")
    try:
        wrong = _wrong_blocks(checkpoint, model)
    except CheckpointError as error:  # FP8 without its scale, for one, is taken for numbers, and nothing is said of it
        missing.append(str(error))
        notes.append("transformers did not complain: that the checkpoint is incomplete, its headers say")
    gap = wrong and f"transformers {transformers.__version__} decodes FP8 blocks at a ragged edge wrongly: {wrong}"
    ids, tokenizer = prompt_ids(folder, prompt)
    device = next(model.parameters()).device
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids], device=device), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )
    made = out[0, len(ids) :].tolist()
    return {
        "version": transformers.__version__,
        "model_class": type(model).__name__,
        "tensors": len(checkpoint.tensors),
        "missing": missing,
        "unexpected": extra,
        "text": tokenizer.decode(made) if tokenizer else " ".join(map(str, made)),
        "prompt_ids": ids,
        "token_ids": made,
        "gap": gap,
        "notes": notes,
        "log": log.lines,
    }


def _load(checkpoint: Checkpoint) -> tuple[Any, dict[str, Any]]:
    import torch
    import transformers as hf

    config = json.loads(checkpoint.config_bytes)
    held = held_config(checkpoint, identify(checkpoint.config))
    for part in (config, config.get("text_config", {})):
        if part.get("model_type") == "kimi_k2":  # DeepSeek's, under a name of its own
            part["model_type"] = "deepseek_v3"
        part.pop("auto_map", None)
        part.pop("quantization_config", None)
    vision = config.get("vision_config", {})
    vision.update({theirs: vision[ours] for ours, theirs in _VISION.items() if ours in vision})
    if "mm_hidden_size" in vision:
        config.setdefault("projection_hidden_size", vision["mm_hidden_size"])
    options: dict[str, Any] = {}
    if held:
        config["quantization_config"] = dict(held)
        block = held.get("quant_method") == "fp8"
        wanted = hf.FineGrainedFP8Config if block else hf.CompressedTensorsConfig
        options["quantization_config"] = wanted(dequantize=True)
    made = hf.AutoConfig.for_model(**config)
    auto: Any = hf.AutoModelForImageTextToText if "vision_config" in config else hf.AutoModelForCausalLM
    model, info = auto.from_pretrained(
        checkpoint.folder,
        config=made,
        dtype=torch.bfloat16,
        attn_implementation="eager",
        device_map="cuda" if torch.cuda.is_available() else None,
        output_loading_info=True,
        **options,
    )
    return model.eval(), info


def _two_groups(checkpoint: Checkpoint) -> str:
    import transformers

    held = held_config(checkpoint, identify(checkpoint.config)) or {}
    if len(held.get("config_groups", ())) > 1:
        return f"transformers {transformers.__version__} cannot merge the experts of a config with several groups"
    return ""


def _wrong_blocks(checkpoint: Checkpoint, model: Any) -> str:
    """Matrices with a partial FP8 block whose loaded values are not what the checkpoint holds; "" where all are right.

    A version that divides a matrix evenly among its scales takes 160 rows of two blocks for two blocks of 80.
    """
    import torch

    loaded, wrong = dict(model.named_parameters()), []
    for item in _ragged(checkpoint):
        name = next((name for name in _names(item.spec.name) if name in loaded), None)
        if name is not None:
            weight = loaded[name].detach().cpu()
            if not torch.equal(weight, _decoded(checkpoint, item).to(weight.dtype)):
                wrong.append(item.spec.name)
    return f"{len(wrong)} matrices, {wrong[0]} first" if wrong else ""


def _names(name: str) -> Iterator[str]:
    """Under which names transformers may hold a tensor of the checkpoint."""
    yield name
    inner = name.removeprefix("language_model.")
    yield inner
    yield inner.replace("model.", "model.language_model.", 1)


def _ragged(checkpoint: Checkpoint) -> Iterator[Item]:
    for item in account(checkpoint).items:
        rows, columns = item.format.grid.block
        if item.format.grid.kind == "e4m3" and rows > 1 and (item.shape[0] % rows or item.shape[1] % columns):
            yield item


def _decoded(checkpoint: Checkpoint, item: Item) -> Any:
    from safetensors import safe_open

    parts = {}
    for part in item.parts:
        name = item.module + part.suffix
        with safe_open(checkpoint.folder / checkpoint.tensors[name].file, framework="pt") as shard:
            parts[part.suffix] = shard.get_tensor(name)
    return item.format.decode(parts, item.shape)
