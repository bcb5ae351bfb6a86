"""The modules that vLLM and SGLang make of a checkpoint's, and the names that they give to them.

They fuse matrices, drop or keep a prefix, serve the MTP layer as a draft model and hold some modules in floats always.
Read from the model classes of vLLM 0.32.0 and SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..families import Architecture

RUNTIMES = ("vllm", "sglang")

#: modules that are loaded whatever the config says: wk is decoded into an unquantized fused module, and the MTP head is
#: skipped (SGLang) or shares a parameter with lm_head (vLLM). Either may be FP8 or plain, never packed.
FREE = ("indexer.wk", "mtp.head")
#: leaves of the vision tower and projector that are Linear
VISION_LINEAR = ("wqkv", "wo", "fc0", "fc1", "0", "2")
#: vLLM renames these in names and in lists
PROJECTOR = {"mm_projector.proj.0": "mm_projector.linear_1", "mm_projector.proj.2": "mm_projector.linear_2"}
#: checkpoint's component -> SGLang's, in its Kimi-Linear classes
SGLANG_COMPONENTS = {"block_sparse_moe": "mlp"}
#: fused modules whose parts SGLang's config knows (`packed_modules_mapping`). glm4_moe and glm4_moe_lite declare none:
#: there only an entry that matches the fused name itself counts.
_QKV_A = ("fused_qkv_a_proj_with_mqa",)
SGLANG_MAPPED = {
    **dict.fromkeys(("kimi_k2", "deepseek_v3", "kimi_k25", "glm_moe_dsa"), _QKV_A),
    "kimi_k3": ("gate_up_proj", "qkv_proj"),
}
#: what SGLang's `quant_method: fp8` falls back to
SGLANG_FP8_MAPPED = ("qkv_proj", "gate_up_proj")


class Module(NamedTuple):
    """One matrix of a checkpoint. name: without ".weight". format: a name of `formats.formats()`, None for floats."""

    name: str
    role: str
    layer: int | None
    mtp: bool
    linear: bool
    format: str | None


class Built(NamedTuple):
    """One module as a runtime builds it.

    kind: "linear" (quantized where the config says so), "experts" (all routed experts of a layer), "named" (only where
        a target names it), "plain" (never quantized) or "free" (follows the tensors).
    members: the checkpoint's modules in it.
    parts: the runtime's names of the parts under which the config is asked too; for experts the three of expert 0.
    """

    name: str
    kind: str
    members: Sequence[Module]
    parts: tuple[str, ...] = ()


def runtime_name(module: Module, architecture: Architecture, runtime: str) -> str:
    """The name that a runtime gives to a module. SGLang serves an MTP layer as `model.decoder`, from a draft model."""
    name = module.name
    if runtime == "vllm":
        return PROJECTOR.get(name, name)
    if architecture.sglang_prefix:
        theirs, ours = architecture.sglang_prefix
        name = name.removeprefix(theirs.removesuffix(ours))
    for old, new in SGLANG_COMPONENTS.items():
        name = name.replace(f".{old}.", f".{new}.")
    return name.replace(f"layers.{module.layer}.", "decoder.", 1) if module.mtp else name


def build(modules: Iterable[Module], architecture: Architecture, runtime: str, method: str) -> list[Built]:
    """The modules that a runtime makes of the checkpoint's. `method`: the config's quant_method."""
    fusions = [(tail, parts) for runtimes, tail, parts in architecture.fused if runtime in runtimes]
    experts: dict[str, list[Module]] = {}
    fused: dict[str, dict[str, Module]] = {}
    built = []
    for module in modules:
        if module.role == "routed_expert":
            experts.setdefault(module.name.partition(".experts.")[0], []).append(module)
            continue
        kind = kind_of(module, runtime, method)
        name = runtime_name(module, architecture, runtime)
        tail, part = next(
            (
                (tail, part)
                for tail, parts in fusions
                for part in parts
                if kind == "linear" and name.endswith("." + part)
            ),
            ("", ""),
        )
        if tail:
            fused.setdefault(name.removesuffix(part) + tail, {})[part] = module
        else:
            built.append(Built(name, kind, (module,)))
    for name, found in fused.items():
        parts = next(parts for tail, parts in fusions if name.endswith("." + tail))
        names = {part: runtime_name(module, architecture, runtime) for part, module in found.items()}
        if len(found) < len(parts):
            built += [Built(names[part], "linear", (module,)) for part, module in found.items()]
            continue
        mapped = runtime == "vllm" or name.rpartition(".")[2] in (
            *SGLANG_MAPPED.get(architecture.name, ()),
            *(SGLANG_FP8_MAPPED if method == "fp8" else ()),
        )
        built.append(
            Built(name, "linear", tuple(found.values()), tuple(names[part] for part in parts) if mapped else ())
        )
    for group in experts.values():
        name = runtime_name(group[0], architecture, runtime).partition(".experts.")[0] + ".experts"
        leaves = [module.name.rpartition(".")[2] for module in group[:3]]
        if runtime == "sglang":
            leaves = ["gate_proj", "up_proj", "down_proj"]
        built.append(Built(name, "experts", group, tuple(f"{name}.0.{leaf}" for leaf in leaves)))
    return built


def kind_of(module: Module, runtime: str, method: str) -> str:
    """What a runtime makes of a module (see `Built`)."""
    role = module.role
    if role in FREE:
        return "free" if module.format is None or module.format.startswith("fp8") else "plain"
    if role == "lm_head" or (role == "embed" and runtime == "vllm"):
        return "named"
    if role in ("vision", "projector"):  # vLLM leaves them alone for compressed-tensors only
        linear = runtime == "vllm" and method == "fp8" and module.name.rpartition(".")[2] in VISION_LINEAR
        return "linear" if linear else "plain"
    other = role.startswith("linear_attention.") or role == "attention.gate"
    other = other or (role.startswith("latent.") and runtime == "vllm")  # SGLang takes them from Quark alone
    return "linear" if module.linear or (other and not role.endswith(("norm", "conv", "decay"))) else "plain"
