"""How vLLM and SGLang read a `quantization_config`, simulated from names alone, and whether that is what lies on disk.

Neither runtime checks that a quantized checkpoint is complete, so a name that resolves to the wrong format is served as
garbage. The simulation asks the config for each module that the runtime builds (`naming`), in the runtime's own order.
Read from vLLM 0.32.0 and SGLang 0.5.23: `compressed_tensors.py`, `utils.py` and `fp8.py` under `quantization/`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..families import Architecture
from ..formats import formats
from .naming import PROJECTOR, RUNTIMES, Built, Module, build


class Refusal(NamedTuple):
    """Why a runtime cannot go on with a module.

    kind: "unreadable" (the config itself), "parts" (of a fused module disagree), "target" (nothing matches), "layout"
    (top-level format) or "blocks" (block size of the group with target "Linear"). text: the rest of a sentence.
    """

    kind: str
    text: str


_MXFP4 = "mxfp4-pack-quantized"

#: format name, and why the runtime cannot go on
Answer = tuple[str | None, Refusal | None]


def resolve(
    config: Mapping[str, Any] | None, modules: Sequence[Module], architecture: Architecture, runtime: str
) -> dict[str, str | None]:
    """Module's name -> format in which the runtime would hold it, None for unquantized, as the config declares it.

    `config` is a `quantization_config` of quant_method fp8 or compressed-tensors, ours or the hub's, or None. A scheme
    that is no format of ours has a name in parentheses. Where the runtime refuses the config, see `check`.
    """
    answers = read(config, modules, architecture, runtime)
    return {member.name: format_ for built, (format_, _) in answers for member in built.members}


def check(config: Mapping[str, Any] | None, modules: Sequence[Module], architecture: Architecture) -> list[str]:
    """Where the declared state differs from the disk's, either way and on either runtime, a sentence a role; or []."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for runtime in RUNTIMES:
        for built, (declared, refusal) in read(config, modules, architecture, runtime):
            for member in built.members:
                problem = refusal.text if refusal else ""
                if not refusal and member.format != declared:
                    problem = f"is {_words(member.format)} on disk, but the config makes it {_words(declared)}"
                    if built.kind == "plain":
                        problem = f"is {_words(member.format)} on disk, but this module is never quantized"
                if problem:
                    found.setdefault((member.role, problem), {}).setdefault(runtime, []).append(member.name)
    sentences = []
    for (role, problem), where in found.items():
        names = next(iter(where.values()))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        sentences.append(f"{' and '.join(where)}: {role} {names[0]}{more} {problem}")
    return sentences


def scheme_name(group: Mapping[str, Any], default: str | None) -> str:
    """The format of a compressed-tensors config group; `default` is the top-level format."""
    weights, layout = group.get("weights") or {}, group.get("format") or default
    for item in formats().values():
        if item.scheme is None or item.scheme["format"] != layout:
            continue
        same = all(weights.get(key, value) == value for key, value in item.scheme["weights"].items())
        if same and bool(item.scheme["input_activations"]) == bool(group.get("input_activations")):
            return item.name
    if layout == _MXFP4:
        return "mxfp4"
    kind = "asymmetric " if weights.get("symmetric") is False else ""
    return f"({kind}{weights.get('num_bits')}-bit {weights.get('type')} {weights.get('strategy')}, {layout})"


def read(
    config: Mapping[str, Any] | None, modules: Sequence[Module], architecture: Architecture, runtime: str
) -> list[tuple[Built, Answer]]:
    """Every module that a runtime builds, with what the config makes of it there.

    Of a config that cannot be read, every module of the checkpoint is refused, each for itself.
    """
    readers = {"fp8": _fp8_reader, "compressed-tensors": _ct_reader, "": lambda *_: lambda _: (None, None)}
    method, refusal = "", ""
    try:
        method = "" if config is None else str(config["quant_method"])
        ask: Callable[[Built], Answer] = readers[method](config or {}, runtime)
        if runtime == "vllm" and architecture.name == "kimi_k3" and (config or {}).get("format") == _MXFP4:
            # models/config.py, KimiK3ForConditionalGenerationConfig: quant_method becomes mxfp4, experts and no Linear
            ask = _mxfp4_experts
    except KeyError as error:
        refusal = f"is declared by a quantization_config with an unknown {error}; fp8 and compressed-tensors are read"
    except (AttributeError, TypeError, ValueError, re.error) as error:
        refusal = f"is declared by a quantization_config that cannot be read: {error}"
    if refusal:
        unreadable = Refusal("unreadable", refusal)
        return [(Built(module.name, "linear", (module,)), (None, unreadable)) for module in modules]
    fixed: dict[str, Callable[[Built], Answer]] = {
        "plain": lambda _: (None, None),
        "free": lambda built: (built.members[0].format, None),
    }
    return [(built, fixed.get(built.kind, ask)(built)) for built in build(modules, architecture, runtime, method)]


def _mxfp4_experts(built: Built) -> Answer:
    """vLLM's Mxfp4Config: routed experts, whatever the lists say."""
    return "mxfp4" if built.kind == "experts" else None, None


def _words(format_: str | None) -> str:
    return format_ or "unquantized"


def _agreed(values: list[Any], name: str) -> tuple[Any, Refusal | None]:
    """What all parts of a module have in common."""
    if all(value == values[0] for value in values):
        return values[0], None
    return None, Refusal("parts", f"is part of {name}, and the config treats the parts of that module differently")


def _fp8_reader(config: Mapping[str, Any], runtime: str) -> Callable[[Built], Answer]:
    """quant_method fp8: `Fp8Config.get_quant_method` and `is_layer_skipped`. Names, no regexes.

    vLLM wants the exact name of the runtime's module; SGLang any run of whole path components in it. For both, experts
    are skipped where their name is a part of an entry.
    """
    declared = "fp8-block" if config.get("weight_block_size") else "fp8-tensor"
    for key in ("ignored_layers", "modules_to_not_convert"):
        if config.get(key) and not isinstance(config[key], list):
            raise ValueError(f"{key} is a {type(config[key]).__name__}, expected a list of names")
    listed = config.get("ignored_layers") or config.get("modules_to_not_convert") or []
    if runtime == "vllm":
        listed = [PROJECTOR.get(name, name) for name in listed]
    else:
        bases = [name.removeprefix("model.").rstrip(".") for name in listed]
        listed = [*bases, *(f"model.{base}" for base in bases)]
    exact, about_experts = set(listed), [name for name in listed if "experts" in name]

    def matches(name: str) -> bool:
        if runtime == "vllm":
            return name in exact
        path = name.split(".")
        return any(".".join(path[i:j]) in exact for i in range(len(path)) for j in range(i + 1, len(path) + 1))

    def ask(built: Built) -> Answer:
        refusal = None
        if built.kind == "named":
            return None, None
        if built.kind == "linear" and built.parts:
            skipped = runtime == "vllm" and matches(built.name)
            if not skipped:
                skipped, refusal = _agreed([matches(part) for part in built.parts], built.name)
        else:
            skipped = (runtime == "sglang" or "experts" not in built.name) and matches(built.name)
            if "experts" in built.name:
                skipped = skipped or any(built.name in name for name in about_experts)
        return None if skipped else declared, refusal

    return ask


def _ct_reader(config: Mapping[str, Any], runtime: str) -> Callable[[Built], Answer]:
    """compressed-tensors: ignore list first, then targets, by name and by class.

    An entry "re:..." is matched from the start of the name; any other is the whole name (SGLang: or its last
    components). A fused module's parts are asked before its class on vLLM, after it on SGLang, which refuses a module
    that nothing matches. Entries of `targets` without "re:" match as part of a class name too.
    """
    vllm, layout = runtime == "vllm", config.get("format")
    ignore = _Names(config.get("ignore") or (), suffix=not vllm)
    groups = {target: group for group in config["config_groups"].values() for target in group["targets"]}
    schemes = {target: scheme_name(group, layout) for target, group in groups.items()}
    names = {target: _Names((target,), suffix=False) for target in groups}
    by_class = next((target for target in groups if target.lower() in "linear" or names[target].match("Linear")), None)
    block = ((groups.get("Linear") or {}).get("weights") or {}).get("block_structure")

    def by_name(name: str) -> str | None:
        return next((target for target in groups if names[target].match(name)), None)

    def ask_one(name: str, parts: tuple[str, ...] = ()) -> Answer:
        ignored, refusal = ignore.match(name), None
        if parts and (not ignored if vllm else name not in ignore.plain):
            ignored, refusal = _agreed([ignore.match(part) for part in parts], name)
        if ignored or refusal:
            return None, refusal
        hits = [by_name(part) for part in parts]
        by_parts = hits[0] if all(hits) and hits else None
        target = by_name(name) or (by_parts or by_class if vllm else by_class or by_parts)
        if target is None:
            return None, None if vllm else Refusal("target", "matches no target, which SGLang refuses")
        return schemes[target], None

    def ask(built: Built) -> Answer:
        if built.kind == "named":
            found = (
                None
                if ignore.match(built.name)
                else next((target for target in groups if _Names((target,), suffix=not vllm).match(built.name)), None)
            )
            return schemes[found] if found else None, None
        if built.kind == "experts":
            answers = [ask_one(part) for part in built.parts]
            declared, refusal = _agreed(answers, built.name)
            declared, refusal = (declared[0], declared[1]) if declared else (None, refusal)
            if not vllm and (declared or "").startswith("int4") and layout != "pack-quantized":
                text = f'needs the top-level format "pack-quantized" on SGLang, which is {layout!r}'
                refusal = Refusal("layout", text)
            return declared, refusal
        declared, refusal = ask_one(built.name, built.parts)
        # SGLang takes the block size of merged scales and of kv_b_proj from the group whose target is "Linear".
        merged = len(built.members) > 1 and not built.name.endswith("_with_mqa")
        kv_b = built.members[0].role == "attention.kv_b"
        if not vllm and ((merged or kv_b) and declared == "fp8-block-ct") and block is None:
            text = 'is FP8 in blocks, which SGLang loads only where the group of target "Linear" is too'
            refusal = Refusal("blocks", text)
        if not vllm and kv_b and declared == "fp8-channel" and block is not None:
            text = 'is FP8 by channel, which SGLang takes for blocks as the group of target "Linear" is'
            refusal = Refusal("blocks", text)
        return declared, refusal

    return ask


class _Names:
    """Entries of an ignore list or of targets. suffix: a plain entry may be the last components of a name."""

    def __init__(self, entries: Iterable[str], *, suffix: bool) -> None:
        entries = list(entries)
        self.plain = {entry for entry in entries if not entry.startswith("re:")}
        self.patterns = [re.compile(entry[3:]) for entry in entries if entry.startswith("re:")]
        self.suffix = suffix

    def match(self, name: str) -> bool:
        """Does any entry match?"""
        tails = [name]
        if self.suffix:
            path = name.split(".")
            tails = [".".join(path[i:]) for i in range(len(path))]
        return any(tail in self.plain for tail in tails) or any(pattern.match(name) for pattern in self.patterns)
