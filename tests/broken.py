"""Sound artifacts, and mutations that break exactly one load rule each.

A mutation takes the tensors and the config of an artifact (or its files) and damages them. What each runtime makes of
it stands beside it, as the load contract says: the static check is tested against that here, vLLM's own loader in
tests_runtimes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import variants
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from phasefold.formats.checkpoint import INDEX, open_checkpoint
from phasefold.quantize.convert import convert
from phasefold.quantize.plan import make_plan
from phasefold.recipes import Recipe, load, parse

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
Edit = Callable[[Tensors, Config], object]
ERROR, SILENT, WARNING = "error", "silent", "warning"

#: sound artifacts: (example, variant of it, recipe or format of the routed experts, changes of the recipe); without a
#: recipe the variant itself
BASES: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "kimi-bf16": ("tiny-kimi", "bf16", "bf16", {}),
    "kimi": ("tiny-kimi", "bf16", "kimi-decode-int4", {}),
    "kimi-g64": ("tiny-kimi", "bf16", "int4-g64", {}),
    "kimi-g128": ("tiny-kimi", "bf16", "int4-g128", {}),
    "kimi-fp8": ("tiny-kimi", "bf16", "kimi-prefill-fp8", {}),
    "k25-fp8": ("tiny-kimi", "k25+fp8-block", "", {}),
    "glm4": ("tiny-glm4", "bf16", "glm-decode-int4", {}),
    "glm4-fp8": ("tiny-glm4", "bf16", "glm-prefill-fp8", {}),
    "glm5": ("tiny-glm5", "bf16", "glm-decode-int4", {}),
    "glm5-mixed": ("tiny-glm5", "bf16", "glm-decode-int4-fp8", {}),
    "glm5-mtp": ("tiny-glm5", "mtp", "glm-decode-int4", {"mtp": "keep"}),
}
#: what every deployment of these artifacts says: SGLang is started as the plan's notes ask for
SOUND = {"shared_fusion": False}


class Mutation(NamedTuple):
    """One way to break an artifact.

    rule: the only one that it breaks. base: of BASES. edit: damages tensors and config in place; files: a folder.
    expect: runtime -> severity; a runtime that is not in it finds nothing. at: of the deployment, beside SOUND.
    vllm: what vLLM's loader does with it on the ranks of `at`: "refuses", "accepts", or None where a dry load cannot
    tell: it opens checkpoints strictly, keeps no cache, and does not look for unset parameters as vLLM does with models
    that are not quantized.
    """

    name: str
    rule: str
    base: str
    expect: dict[str, str]
    vllm: str | None
    edit: Edit = lambda tensors, config: None
    files: Callable[[Path], object] = lambda folder: None
    at: Mapping[str, Any] = MappingProxyType({})


def both(severity: str) -> dict[str, str]:
    """The same severity on both runtimes."""
    return {"vllm": severity, "sglang": severity}


def experts_only(format_: str, role: str = "routed_expert") -> Recipe:
    """A recipe that stores one role in a format and leaves the rest."""
    rules = [{"roles": [role], "format": format_}]
    return parse({"families": ["glm", "kimi"], "rule": rules}, format_, format_)


def make_base(name: str, folder: Path) -> Path:
    """Write a sound artifact into a folder, once."""
    example, kind, recipe, changes = BASES[name]
    out, source = folder / name, folder / f"{name}-source"
    if not out.exists():
        variants.variant(kind, example, source if recipe else out)
        if recipe:
            found = experts_only(recipe) if recipe.startswith("int4") else load(recipe)
            convert(make_plan(open_checkpoint(source), replace(found, **changes), 1_000_000), out)
            shutil.rmtree(source)
    return out


def apply(mutation: Mutation, base: Path, out: Path) -> Path:
    """Write the damaged artifact."""
    tensors, config = variants.load(base)
    mutation.edit(tensors, config)
    variants.save(out, tensors, config)
    mutation.files(out)
    return out


# --------------------------------------------------------------------------------------------------- helpers

LAYER, EXPERT = "model.layers.2", "model.layers.2.mlp.experts.3"


def _pop(*names: str) -> Edit:
    def edit(tensors: Tensors, config: Config) -> None:
        for name in names:
            del tensors[name]

    return edit


def _set(name: str, change: Callable[[Tensors], torch.Tensor]) -> Edit:
    def edit(tensors: Tensors, config: Config) -> None:
        tensors[name] = change(tensors)

    return edit


def _quantization(change: Callable[[Config], object]) -> Edit:
    return lambda tensors, config: change(config["quantization_config"])


def _int4(tensors: Tensors, module: str) -> None:
    """Pack a plain module into groups of 32."""
    weight = tensors.pop(f"{module}.weight")
    codes, scales = variants.native_int4(weight)
    tensors |= {f"{module}.weight_packed": pack_to_int32(codes, 4), f"{module}.weight_scale": scales}
    tensors[f"{module}.weight_shape"] = torch.tensor(weight.shape)


def _all(suffix: str, change: Callable[[torch.Tensor], torch.Tensor], new: str = "") -> Edit:
    """Change every tensor with a suffix; `new`: its suffix afterwards."""

    def edit(tensors: Tensors, config: Config) -> None:
        for name in [name for name in tensors if name.endswith(suffix)]:
            tensors[name.removesuffix(suffix) + (new or suffix)] = change(tensors.pop(name))

    return edit


def _steps(*edits: Edit) -> Edit:
    def edit(tensors: Tensors, config: Config) -> None:
        for step in edits:
            step(tensors, config)

    return edit


def _weights(**keys: Any) -> Edit:
    return _quantization(lambda config: config["config_groups"]["group_0"]["weights"].update(keys))


def _config(**keys: Any) -> Edit:
    return lambda tensors, config: config.update(keys)


def _first_shard(folder: Path) -> Path:
    return min(folder.glob("model-*.safetensors"))


def _truncate(folder: Path) -> None:
    shard = _first_shard(folder)
    shard.write_bytes(shard.read_bytes()[:-100])


def _index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def files(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index)
        (folder / INDEX).write_text(json.dumps(index))

    return files


def _shard(name: str, tensors: Callable[[Path], Tensors], *, listed: bool) -> Callable[[Path], None]:
    """Add a shard; listed: the index names its file, for one made-up reason."""

    def files(folder: Path) -> None:
        from safetensors.torch import save_file

        held = tensors(folder)
        save_file(held, folder / name)
        if listed:
            _index(lambda index: index["weight_map"].update(dict.fromkeys(held, name)))(folder)

    return files


def _from(folder: Path, name: str) -> Tensors:
    return {name: variants.load(folder)[0][name]}


def _move_out(name: str) -> Callable[[Path], None]:
    """Move a tensor into a shard that the index does not name."""

    def files(folder: Path) -> None:
        tensors, config = variants.load(folder)
        moved = {name: tensors.pop(name)}
        variants.save(folder, tensors, config)
        _shard("other.safetensors", lambda _: moved, listed=False)(folder)

    return files


def _forget(name: str) -> Callable[[Path], None]:
    """Lose a tensor that the index goes on to name."""

    def files(folder: Path) -> None:
        index = (folder / INDEX).read_text()
        tensors, config = variants.load(folder)
        del tensors[name]
        variants.save(folder, tensors, config)
        shards = json.loads((folder / INDEX).read_text())["weight_map"]
        held = json.loads(index)
        held["weight_map"] = {**shards, name: next(iter(shards.values()))}
        (folder / INDEX).write_text(json.dumps(held))

    return files


def _copy(tensors: Tensors, old: str, new: str) -> None:
    copies = {n.replace(old, new): t.clone() for n, t in tensors.items() if n.startswith(old)}
    tensors |= copies


def _drop_layer(tensors: Tensors, config: Config) -> None:
    for name in [name for name in tensors if f"{LAYER}." in name]:
        del tensors[name]


def _fp8_tensor(tensors: Tensors, config: Config, *, same: bool) -> None:
    """FP8 by tensor instead of by blocks; q_a and kv_a with one scale, or each with its own."""
    for name in [name for name in tensors if name.endswith(".weight_scale_inv")]:
        module = name.removesuffix(".weight_scale_inv")
        shared = same or not module.endswith(("q_a_proj", "kv_a_proj_with_mqa"))
        tensors[f"{module}.weight_scale"] = torch.tensor(0.01 if shared or "q_a" in module else 0.02)
        del tensors[name]
    del config["quantization_config"]["weight_block_size"]


def _plain(module: str) -> Edit:
    """Store a quantized module in BF16."""

    def edit(tensors: Tensors, config: Config) -> None:
        kept = [name for name in tensors if name.startswith(f"{module}.weight")]
        scale = next(tensors[name] for name in kept if "scale" in name)
        packed = tensors.get(f"{module}.weight_packed")
        shape = (scale.shape[0], packed.shape[1] * 8) if packed is not None else tensors[f"{module}.weight"].shape
        for name in kept:
            del tensors[name]
        tensors[f"{module}.weight"] = torch.zeros(shape, dtype=torch.bfloat16)

    return edit


def _fp8_channel(module: str) -> Edit:
    def edit(tensors: Tensors, config: Config) -> None:
        weight = tensors[f"{module}.weight"]
        tensors[f"{module}.weight_scale"] = torch.ones(weight.shape[0], 1)
        tensors[f"{module}.weight"] = weight.float().to(torch.float8_e4m3fn)

    return edit


def _asymmetric(tensors: Tensors, config: Config) -> None:
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False


def _kv_scales(tail: str, value: float, layers: int) -> Edit:
    def edit(tensors: Tensors, config: Config) -> None:
        for layer in range(layers):
            tensors[f"model.layers.{layer}.self_attn.{tail}"] = torch.tensor(value)

    return edit


def _ignore(*entries: str) -> Edit:
    return _quantization(lambda config: config.update(ignore=list(entries)))


def _lose(word: str) -> Edit:
    """Take the entries that name something from the ignore list."""
    return _quantization(lambda config: config.update(ignore=[name for name in config["ignore"] if word not in name]))


def _list(*names: str) -> Edit:
    return _quantization(lambda config: config["modules_to_not_convert"].extend(names))


def _only_mtp(spelling: str) -> Edit:
    """Ignore the MTP layer under one runtime's name alone."""

    def edit(tensors: Tensors, config: Config) -> None:
        ignore = config["quantization_config"]["ignore"]
        assert any("decoder" in entry for entry in ignore)
        ignore[:] = [entry.replace(r"(layers\.4|decoder)", spelling) for entry in ignore]

    return edit


def _no_vision(tensors: Tensors, config: Config) -> None:
    quantization = config["quantization_config"]
    kept = [name for name in quantization["modules_to_not_convert"] if "encoder.blocks.1.wo" not in name]
    quantization["modules_to_not_convert"] = kept


def _wide_q_lora(tensors: Tensors, config: Config) -> None:
    """A q_lora_rank that blocks do not divide, all anew."""
    config["q_lora_rank"] = 192
    tensors.clear()
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    made, declared = variants.fp8_block(variants.random_from(plain), plain)
    tensors |= made
    config |= declared


GATE, DOWN = f"{EXPERT}.gate_proj", f"{EXPERT}.down_proj"
O_PROJ = f"{LAYER}.self_attn.o_proj"
PACKED = (".weight_packed", ".weight_scale", ".weight_shape")
NORM = f"{LAYER}.input_layernorm.weight"

MUTATIONS = (
    # ---------------------------------------------------------------------------------------- C: completeness
    Mutation("truncated shard", "C1", "kimi", both(ERROR), None, files=_truncate),
    Mutation("no shard at all", "C1", "kimi", both(ERROR), None,
             files=lambda folder: [shard.unlink() for shard in folder.glob("*.safetensors")]),
    Mutation("missing shard", "C1", "kimi", both(ERROR), None, files=lambda folder: _first_shard(folder).unlink()),
    Mutation("index that is no JSON", "C1", "kimi", both(ERROR), None,
             files=lambda folder: (folder / INDEX).write_text("{")),
    Mutation("tensor in two shards", "C1", "kimi", both(SILENT), None,
             files=_shard("model-00003-of-00003.safetensors", lambda folder: _from(folder, NORM), listed=True)),
    Mutation("tensor that only the index has", "C1", "kimi", both(SILENT), None, files=_forget(NORM)),
    Mutation("tensor in a shard without index", "C1", "kimi", both(SILENT), "accepts", files=_move_out(NORM)),
    Mutation("wrong total_size", "C1", "kimi", both(WARNING), None,
             files=_index(lambda index: index["metadata"].update(total_size=1))),
    Mutation("expert without scale", "C2", "kimi", both(SILENT), "accepts", _pop(f"{GATE}.weight_scale")),
    Mutation("FP8 without scale", "C2", "kimi-fp8", both(SILENT), "accepts", _pop(f"{O_PROJ}.weight_scale_inv")),
    Mutation("scale without weight", "C2", "kimi-fp8", both(SILENT), "accepts", _pop(f"{O_PROJ}.weight")),
    Mutation("weight beside weight_packed", "C2", "kimi", {"vllm": ERROR, "sglang": SILENT}, "refuses",
             _set(f"{GATE}.weight", lambda t: torch.zeros(128, 256).bfloat16())),
    Mutation("scale beside a plain weight", "C2", "kimi", {"vllm": ERROR, "sglang": SILENT}, "refuses",
             _set(f"{O_PROJ}.weight_scale", lambda t: torch.ones(256, 1))),
    Mutation("unknown tensor", "C2", "kimi", {"vllm": ERROR, "sglang": WARNING}, "refuses",
             _set(f"{LAYER}.self_attn.q_scaling.weight", lambda t: torch.ones(8))),
    Mutation("norm of another size", "C2", "kimi", both(ERROR), "refuses", _set(NORM, lambda t: t[NORM][:128])),
    Mutation("missing expert", "C3", "kimi", both(SILENT), "accepts", _pop(*(GATE + suffix for suffix in PACKED))),
    Mutation("expert too many", "C3", "kimi", {"vllm": ERROR, "sglang": WARNING}, "refuses",
             lambda t, c: _copy(t, f"{LAYER}.mlp.experts.3.", f"{LAYER}.mlp.experts.16.")),
    Mutation("missing norm", "C4", "kimi", both(SILENT), "accepts", _pop(NORM)),
    Mutation("missing norm, nothing quantized", "C4", "kimi-bf16", {"vllm": ERROR, "sglang": SILENT}, None, _pop(NORM)),
    Mutation("missing layer", "C4", "kimi", both(SILENT), "accepts", _drop_layer),
    Mutation("layer too many", "C4", "kimi", {"vllm": ERROR, "sglang": WARNING}, "refuses",
             lambda t, c: _copy(t, "model.layers.3.", "model.layers.4.")),
    Mutation("MTP layer that is not there", "C4", "glm5", both(WARNING), "accepts",
             _config(num_nextn_predict_layers=1)),
    Mutation("actorder", "C5", "kimi", {"vllm": ERROR, "sglang": SILENT}, "refuses", _weights(actorder="group")),
    Mutation("actorder, weight", "C5", "kimi", {"sglang": SILENT}, "accepts", _weights(actorder="weight"),
             at={"tp": 2}),
    Mutation("weight_g_idx", "C5", "kimi", {"vllm": ERROR, "sglang": SILENT}, "refuses",
             _set(f"{GATE}.weight_g_idx", lambda t: torch.zeros(256, dtype=torch.int32))),
    Mutation("two configs", "C6", "kimi", both(SILENT), "accepts", _config(compression_config={"quant_method": "fp8"})),
    Mutation("modelopt's file beside", "C6", "kimi", both(SILENT), "accepts", files=lambda folder: (
        folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')),
    Mutation("unknown key", "C7", "kimi", both(ERROR), "refuses", _weights(zero_point=False)),
    Mutation("config without quant_method", "C7", "kimi", both(ERROR), "refuses",
             _quantization(lambda config: config.pop("quant_method"))),
    Mutation("no config groups", "C7", "kimi", both(ERROR), "refuses",
             _quantization(lambda config: config.update(config_groups=None))),
    Mutation("sparsity", "C7", "kimi", {"vllm": ERROR}, "refuses", _quantization(
        lambda config: config.update(sparsity_config={"targets": ["Linear"], "format": "sparse-24-bitmask"}))),
    Mutation("a method that is not judged", "C7", "kimi-bf16", both(WARNING), None,
             _config(quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})),
    Mutation("no moe_layer_freq", "C8", "kimi", {"sglang": ERROR}, "accepts", lambda t, c: c.pop("moe_layer_freq")),
    Mutation("no moe_layer_freq, GLM-5", "C8", "glm5", {"sglang": ERROR}, "accepts",
             lambda t, c: c.pop("moe_layer_freq")),
    # ------------------------------------------------------------------------------------------------ P: INT4
    Mutation("expert with half of its rows", "P1", "kimi", both(SILENT), "accepts",
             _set(f"{GATE}.weight_packed", lambda t: t[f"{GATE}.weight_packed"][:64])),
    Mutation("expert with twice its columns", "P1", "kimi", both(ERROR), "refuses",
             _set(f"{GATE}.weight_packed", lambda t: t[f"{GATE}.weight_packed"].repeat(1, 2))),
    Mutation("more groups than declared", "P2", "kimi", both(ERROR), "refuses", _weights(group_size=64)),
    Mutation("fewer groups than declared", "P2", "kimi", {"vllm": SILENT, "sglang": ERROR}, "accepts",
             _all(".weight_scale", lambda scale: scale[:, ::2])),
    Mutation("scales in one row", "P2", "kimi", {"vllm": SILENT, "sglang": SILENT}, "accepts",
             _set(f"{GATE}.weight_scale", lambda t: t[f"{GATE}.weight_scale"][:1])),
    Mutation("scales in F32", "P2", "kimi", both(WARNING), "accepts", _all(".weight_scale", torch.Tensor.float)),
    Mutation("no weight_shape", "P3", "kimi", both(WARNING), "accepts", _pop(f"{GATE}.weight_shape")),
    Mutation("weight_shape of three", "P3", "kimi", both(ERROR), "refuses",
             _set(f"{GATE}.weight_shape", lambda t: torch.tensor([1, 128, 256]))),
    Mutation("zero points", "P4", "kimi", {"vllm": ERROR, "sglang": SILENT}, "refuses",
             _set(f"{GATE}.weight_zero_point", lambda t: torch.zeros(16, 8, dtype=torch.int32))),
    Mutation("asymmetric without zero points", "P4", "kimi", both(SILENT), "accepts", _asymmetric),
    Mutation("codes in another dtype", "P5", "kimi", both(SILENT), "accepts",
             _set(f"{GATE}.weight_packed", lambda t: t[f"{GATE}.weight_packed"].float())),
    Mutation("norm in I8", "P5", "kimi", both(SILENT), "accepts", _set(NORM, lambda t: t[NORM].to(torch.int8))),
    Mutation("groups of 16", "P6", "kimi", {"vllm": WARNING, "sglang": ERROR}, "accepts", _steps(
        _all(".weight_scale", lambda scale: scale.repeat_interleave(2, 1)), _weights(group_size=16))),
    Mutation("3 bits", "P6", "kimi", both(ERROR), "refuses", _weights(num_bits=3)),
    Mutation("mixed-precision at the top", "P7", "kimi", {"sglang": ERROR}, "accepts",
             _quantization(lambda config: config.update(format="mixed-precision"))),
    Mutation("modules without a target", "P8", "kimi", {"sglang": ERROR}, "accepts", _steps(
        _ignore(), _quantization(lambda c: c["config_groups"]["group_0"].update(targets=[r"re:.*mlp\.experts\..*"])))),
    Mutation("blocks without Linear", "P8", "glm5-mixed", {"sglang": ERROR}, "accepts", _quantization(
        lambda config: config["config_groups"]["group_0"]["targets"].append("Linear") or
        config["config_groups"]["group_1"].update(targets=[
            r"re:.*self_attn\..*", r"re:.*mlp\.(shared_experts\.)?(gate|up|gate_up|down)_proj$"]))),
    Mutation("one expert in BF16", "P9", "kimi", {"vllm": ERROR, "sglang": SILENT}, "refuses", _plain(GATE)),
    Mutation("expert 0 ignored in part", "P9", "kimi", both(ERROR), "refuses",
             _quantization(lambda config: config["ignore"].append(r"re:.*experts\.0\.up_proj$"))),
    Mutation("wrong ignore", "P10", "kimi", both(ERROR), "refuses", _lose("shared_experts")),
    Mutation("BF16 where FP8 is declared", "P10", "glm4-fp8", both(SILENT), "accepts", _plain(O_PROJ)),
    Mutation("experts ignored", "P10", "kimi", {"vllm": ERROR, "sglang": SILENT}, "refuses",
             _quantization(lambda config: config["ignore"].append(r"re:.*mlp\.experts.*"))),
    Mutation("no config at all", "P10", "kimi", {"vllm": ERROR, "sglang": SILENT}, "refuses",
             lambda t, c: c.pop("quantization_config")),
    Mutation("q_a in BF16", "P11", "kimi-fp8", both(SILENT), "accepts", _plain(f"{LAYER}.self_attn.q_a_proj")),
    Mutation("q_a in BF16 and listed", "P11", "kimi-fp8", both(ERROR), "refuses", _steps(
        _plain(f"{LAYER}.self_attn.q_a_proj"), _list(f"{LAYER}.self_attn.q_a_proj"))),
    Mutation("kv_b packed", "P12", "kimi", {"sglang": ERROR}, "accepts", _steps(
        lambda t, c: [_int4(t, f"model.layers.{layer}.self_attn.kv_b_proj") for layer in range(4)],
        _lose("self_attn"), _quantization(
            lambda config: config["ignore"].append(r"re:.*self_attn\.(q_a|q_b|o|kv_a|fused_qkv_a)_proj.*")))),
    Mutation("wk packed", "P13", "glm5", {"vllm": ERROR, "sglang": SILENT}, "refuses",
             lambda t, c: _int4(t, f"{LAYER}.self_attn.indexer.wk")),
    Mutation("wk by channel", "P13", "glm5-mixed", {"sglang": ERROR}, "accepts", _steps(
        _plain(f"{LAYER}.self_attn.indexer.wk"), _fp8_channel(f"{LAYER}.self_attn.indexer.wk"))),
    Mutation("router in FP8", "P14", "kimi", {"vllm": ERROR, "sglang": SILENT}, "refuses",
             _fp8_channel(f"{LAYER}.mlp.gate")),
    # ----------------------------------------------------------------------------------- T: tensor parallelism
    Mutation("half a group on a rank", "T1", "kimi-g128", {"vllm": ERROR, "sglang": SILENT}, "refuses", at={"tp": 2}),
    Mutation("one group on a rank", "T3", "kimi-g64", {"vllm": SILENT}, "accepts", at={"tp": 2}),
    Mutation("q_lora_rank of 192", "T7", "kimi-fp8", both(ERROR), "refuses", _wide_q_lora),
    Mutation("more ranks than heads", "T8", "kimi-bf16", both(ERROR), "refuses", at={"tp": 8}),
    # ------------------------------------------------------------------------------------------------- F: FP8
    Mutation("scales transposed", "F1", "kimi-fp8", both(ERROR), "refuses", _set(
        f"{LAYER}.mlp.shared_experts.gate_proj.weight_scale_inv",
        lambda t: t[f"{LAYER}.mlp.shared_experts.gate_proj.weight_scale_inv"].T.contiguous())),
    Mutation("expert with a scale too few", "F1", "kimi-fp8", both(SILENT), "accepts",
             _set(f"{GATE}.weight_scale_inv", lambda t: t[f"{GATE}.weight_scale_inv"][:, :1])),
    Mutation("weight_scale for weight_scale_inv", "F2", "kimi-fp8", {"vllm": ERROR, "sglang": ERROR}, "refuses",
             _all(".weight_scale_inv", lambda scale: scale, ".weight_scale")),
    Mutation("weight_scale_inv for weight_scale", "F2", "glm5-mixed", {"vllm": ERROR, "sglang": SILENT}, "refuses",
             lambda t, c: t.update({f"{O_PROJ}.weight_scale_inv": t.pop(f"{O_PROJ}.weight_scale")})),
    Mutation("blocks of 64", "F3", "kimi-fp8", both(ERROR), "refuses",
             _quantization(lambda config: config.update(weight_block_size=[64, 64]))),
    Mutation("static activations beside blocks", "F3", "kimi-fp8", both(ERROR), "refuses",
             _quantization(lambda config: config.update(activation_scheme="static"))),
    Mutation("an activation scale", "F3", "kimi-fp8", {"vllm": ERROR, "sglang": WARNING}, "refuses",
             _set(f"{O_PROJ}.input_scale", lambda t: torch.tensor(1.0))),
    Mutation("BF16 that is not listed", "F4", "kimi-fp8", both(SILENT), "accepts", _plain(O_PROJ)),
    Mutation("FP8 that is listed", "F4", "kimi-fp8", {"vllm": ERROR, "sglang": SILENT}, "refuses", _list(O_PROJ)),
    Mutation("scales of any value on Blackwell", "F5", "kimi-fp8", both(WARNING), "accepts",
             _quantization(lambda config: config.pop("scale_fmt")), at={"sm": 100}),
    Mutation("two scales for a fused module", "F6", "kimi-fp8", {"sglang": SILENT}, "accepts",
             lambda t, c: _fp8_tensor(t, c, same=False)),
    Mutation("vision that is not listed", "F7", "k25-fp8", {"vllm": SILENT}, None, _no_vision),
    # -------------------------------------------------------------------------------------- S: shared and MTP
    Mutation("shared expert in BF16, fused", "S6", "glm4", {"sglang": SILENT}, "accepts", at={"shared_fusion": True}),
    Mutation("shared expert packed", "S6", "glm4", {"sglang": ERROR}, "accepts", _steps(
        lambda t, c: [_int4(t, f"model.layers.{layer}.mlp.shared_experts.{part}_proj")
                      for layer in (1, 2, 3) for part in ("gate", "up", "down")],
        _lose("shared_experts"))),
    Mutation("MTP layer under vLLM's name alone", "S7", "glm5-mtp", {"sglang": WARNING}, "accepts",
             _only_mtp(r"layers\.4")),
    Mutation("MTP layer under SGLang's name alone", "S7", "glm5-mtp", {"vllm": ERROR}, "refuses", _only_mtp("decoder"),
             at={"mtp": True}),
    Mutation("MTP head packed", "S8", "glm5-mtp", {"vllm": ERROR, "sglang": WARNING}, "refuses", _steps(
        _set("model.layers.4.shared_head.head.weight", lambda t: t["lm_head.weight"].clone()),
        lambda t, c: _int4(t, "model.layers.4.shared_head.head")), at={"mtp": True}),
    # -------------------------------------------------------------------------------------------- K: KV cache
    Mutation("latent scale", "K1", "kimi", {"vllm": WARNING, "sglang": SILENT}, "accepts",
             _kv_scales("k_proj.k_scale", 0.5, 4)),
    Mutation("latent output scale", "K1", "kimi", {"vllm": ERROR, "sglang": WARNING}, "refuses",
             _kv_scales("k_proj.output_scale", 0.5, 4)),
    Mutation("scales of some layers", "K2", "glm4-fp8", {"vllm": SILENT, "sglang": WARNING}, "accepts",
             _kv_scales("k_scale", 0.5, 3)),
    Mutation("scale of zero", "K2", "glm4-fp8", {"vllm": SILENT, "sglang": WARNING}, "accepts",
             _kv_scales("k_scale", 0.0, 4)),
    Mutation("kv_cache_scheme", "K3", "kimi", both(WARNING), "accepts", _quantization(lambda config: config.update(
        kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}))),
    Mutation("kv_cache_scheme of integers", "K3", "glm4-fp8", {"vllm": ERROR, "sglang": WARNING}, "refuses",
             _quantization(lambda config: config.update(
                 kv_cache_scheme={"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True}))),
    Mutation("file of KV scales", "K4", "kimi", {"sglang": ERROR}, None,
             at={"kv_scales": "kv.json", "kv_dtype": "fp8_e4m3"}),
    Mutation("fp8_e5m2 for a latent", "K5", "kimi", {"vllm": ERROR}, None, at={"kv_dtype": "fp8_e5m2"}),
    Mutation("a page that is changed", "K5", "kimi", {"vllm": ERROR, "sglang": WARNING}, None,
             at={"page_size": 16, "attention_backend": "flashmla"}),
)  # fmt: skip


class FullSize(NamedTuple):
    """A published model by headers alone, planned by a recipe, that a deployment cannot cut.

    recipe: its name, or (format, role) for a recipe of that alone.
    """

    rule: str
    model: str
    recipe: str | tuple[str, str]
    at: dict[str, Any]
    expect: dict[str, str]
    subject: str


GLM46, FLASH, GLM5 = "zai-org/GLM-4.6", "zai-org/GLM-4.7-Flash", "zai-org/GLM-5.2"
AIR = "zai-org/GLM-4.5-Air"
FULL_SIZE = (
    FullSize("T1", GLM46, "glm-decode-int4-g128", {"tp": 8}, {"vllm": ERROR, "sglang": SILENT}, "192 columns"),
    FullSize("T1", GLM46, "glm-decode-int4", {"tp": 32}, both(ERROR), "48 columns"),  # and no tile of SGLang's either
    FullSize("T2", GLM5, ("int4-g128", "dense_mlp"), {"tp": 64}, both(ERROR), "192 columns"),
    FullSize(
        "T3", "moonshotai/Kimi-K2-Instruct", ("int4-g128", "routed_expert"), {"tp": 16}, {"vllm": SILENT}, "vllm#50196"
    ),
    FullSize("T4", GLM46, "glm-decode-int4", {"tp": 16}, {"sglang": ERROR}, "5120 x 96"),
    FullSize("T5", FLASH, "glm-prefill-fp8", {"tp": 4}, both(ERROR), "2240 rows"),
    FullSize("T5", AIR, ("fp8-block", "dense_mlp"), {"tp": 1}, both(ERROR), "10944 rows"),
    FullSize("T6", GLM46, ("fp8-block", "routed_expert"), {"tp": 8}, {"vllm": WARNING, "sglang": ERROR}, "192 columns"),
    FullSize("T8", FLASH, "bf16", {"tp": 8}, both(ERROR), "is 20"),
    FullSize("T8", AIR, "glm-decode-int4", {"tp": 3}, both(ERROR), "3 ranks"),  # one line for what does not divide
)
