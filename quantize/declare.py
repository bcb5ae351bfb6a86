"""Write `quantization_config` so that the name matching of vLLM and of SGLang resolves it to what is quantized.

All matrices in FP8 blocks as DeepSeek spells them: `quant_method: fp8` and exact names of what is left alone. Anything
else: compressed-tensors, with an ignore list and targets of short regexes, which match under every name that a runtime
gives to a module. `resolve.check` says whether it came out right; read from vLLM 0.32.0 and SGLang 0.5.23.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import PlanError
from ..families import Architecture
from ..formats import formats
from .naming import RUNTIMES, SGLANG_COMPONENTS, Module, build, runtime_name
from .resolve import check, resolve

__all__ = ["Module", "check", "launch_notes", "quantization_config", "resolve"]

Path = tuple[str, ...]
Cell = tuple[Path, int | None]  # where in a layer, and which layer: None outside of the layers


def quantization_config(
    modules: Sequence[Module], architecture: Architecture, *, scale_fmt: str | None
) -> dict[str, Any] | None:
    """The `quantization_config` of a checkpoint that holds these modules; None where nothing is quantized.

    scale_fmt: "ue8m0" where every FP8 scale is a power of two, None otherwise; goes into quant_method fp8 only.
    Raises PlanError for formats that no config can declare together.
    """
    used = dict.fromkeys(module.format for module in modules if module.format)
    if not used:
        return None
    if set(used) == {"fp8-block"}:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            **({"scale_fmt": scale_fmt} if scale_fmt else {}),
            "modules_to_not_convert": _unconverted(modules, architecture),
        }
    for name in used:
        if formats()[name].scheme is None:
            others = ", ".join(sorted(set(used) - {name})) or "this model"
            raise PlanError(f"quantization_config: {name} cannot be declared for {others}; choose another format")
    return _compressed_tensors(list(used), modules, architecture)


def launch_notes(config: Mapping[str, Any] | None, modules: Sequence[Module], architecture: Architecture) -> list[str]:
    """What the config cannot say and a command line must, a sentence each."""
    notes = []
    if differ_unseen(config, modules, architecture):
        notes.append("SGLang: start with --disable-shared-experts-fusion: shared and routed experts differ in format")
    if any(module.format == "fp8-tensor" and module.role == "attention.q_a" for module in modules):
        notes.append("SGLang: takes q_a_proj's scale for kv_a_proj_with_mqa too; FP8 by tensor is right only if equal")
    if packed_shared(modules, architecture):
        notes.append("SGLang: cannot load packed INT4 shared experts of this architecture; vLLM can")
    return notes


def differ_unseen(config: Mapping[str, Any] | None, modules: Sequence[Module], architecture: Architecture) -> bool:
    """Whether SGLang would fuse shared and routed experts of different formats, which is garbage without an error.

    Its GLM classes serve the shared expert as one more routed expert, unless fusion is off; for glm_moe_dsa it is,
    where "Linear" is INT4. Kimi's never do.
    """
    routed, shared = (_formats_of(modules, role) for role in ("routed_expert", "shared_expert"))
    groups = ((config or {}).get("config_groups") or {}).values()
    sees = architecture.name == "glm_moe_dsa" and any(
        "Linear" in group["targets"] and group["weights"]["num_bits"] == 4 for group in groups
    )
    return architecture.sglang_fuses_shared and bool(shared) and routed != shared and not sees


def packed_shared(modules: Sequence[Module], architecture: Architecture) -> bool:
    """Packed INT4 shared experts that SGLang cannot load unfused: its GLM-4.x class reads their `weight`."""
    packed = any((format_ or "").startswith("int4") for format_ in _formats_of(modules, "shared_expert"))
    return packed and architecture.name == "glm4_moe"


def _formats_of(modules: Sequence[Module], role: str) -> set[str | None]:
    return {module.format for module in modules if module.role == role}


def _unconverted(modules: Sequence[Module], architecture: Architecture) -> list[str]:
    """Names for `modules_to_not_convert`: of every unquantized module, in each spelling that a runtime compares.

    The routed experts of a layer are one name: both runtimes search their own name in the entries.
    """
    names = {module.name for module in modules if module.format is None and module.role != "routed_expert"}
    for runtime in RUNTIMES:
        for built in build(modules, architecture, runtime, "fp8"):
            first = built.members[0]
            # "free": SGLang's DSA class takes indexer.wk for a Linear where the config lacks `indexer_rope_interleave`
            if built.kind not in ("linear", "experts", "free") or any(member.format for member in built.members):
                continue
            names.add(built.name)
            if built.kind != "experts":
                names.update(runtime_name(member, architecture, runtime) for member in built.members)
            else:
                names.add(first.name.partition(".experts.")[0] + ".experts")
    return sorted(names, key=_natural)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key: numbers by their value."""
    return [(int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


def _compressed_tensors(used: list[str], modules: Sequence[Module], architecture: Architecture) -> dict[str, Any]:
    """One config group a format, INT4 first: SGLang looks for INT4 in "group_0" to choose Blackwell's MoE kernel.

    One group has the target "Linear", and its choice matters to SGLang, which reads the block size of merged scales
    and of kv_b_proj from that group: it is the one with blocks; where none has, the one of the routed experts.
    """
    used.sort(key=lambda name: (not name.startswith("int4"), name))
    routed = {module.format for module in modules if module.role == "routed_expert"}
    blocks = [name for name in used if (formats()[name].scheme or {})["weights"]["strategy"] == "block"]
    anchor = (blocks or [name for name in used if name in routed] or used)[0]
    cells = _cells(modules)
    mtp = {module.layer for module in modules if module.mtp and module.layer is not None}
    write = _Writer(architecture, mtp)
    groups = {}
    for number, name in enumerate(used):
        scheme = formats()[name].scheme or {}
        # What is ignored may match a target as well: both runtimes and the library look at the ignore list first.
        targets = ["Linear"] if name == anchor else _cover(cells, name, (name, None), write, root=False)
        groups[f"group_{number}"] = {
            "targets": targets,
            "weights": dict(scheme["weights"]),
            "input_activations": scheme["input_activations"] and dict(scheme["input_activations"]),
            "output_activations": None,
            "format": scheme["format"],
        }
    layouts = [group["format"] for group in groups.values()]
    return {
        "quant_method": "compressed-tensors",
        # SGLang's INT4 experts want this and no "mixed-precision"; the groups' own formats win elsewhere.
        "format": "pack-quantized" if "pack-quantized" in layouts else layouts[0],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": groups,
        "ignore": _cover(cells, None, (None,), write, root=True),
    }


def _cells(modules: Sequence[Module]) -> dict[Cell, str | None]:
    """The format of each module by its place. A layer's routed experts are one cell, with the first one's."""
    cells: dict[Cell, str | None] = {}
    seen: set[str] = set()
    for module in modules:
        name = module.name
        if module.role == "routed_expert":
            name = name[: name.index(".experts.")]
            if name in seen:
                continue
            seen.add(name)
            name += ".experts.*"
        elif module.role.endswith(("norm", "bias")):  # no matrix, nothing to ignore
            continue
        if module.layer is None:
            name = name.removeprefix("language_model.").removeprefix("model.")
        else:
            name = name.partition(f"layers.{module.layer}.")[2]
        cells[tuple(name.split(".")), module.layer] = module.format
    return cells


class _Writer:
    """Writes the regexes: components under both runtimes' names, fused leaves, layers and the MTP layer's decoder."""

    def __init__(self, architecture: Architecture, mtp: set[int]) -> None:
        self.fused = [(tail, parts) for _, tail, parts in architecture.fused]
        self.mtp = mtp

    def __call__(self, node: Path, leaves: Iterable[str] = (), layers: Iterable[int] = ()) -> str:
        """`node`: the container; `leaves`: modules in it, none for all; `layers`: where, none for everywhere."""
        path = [_either([name, *filter(None, [SGLANG_COMPONENTS.get(name)])]) for name in node]
        if numbers := sorted(layers):
            draft = [number for number in numbers if number in self.mtp]
            where = rf"layers\.{_either(map(str, numbers))}"
            path.insert(0, rf"({where}|decoder)" if draft else where)
        names = set(leaves)
        tails = {".".join((*node, name)) for name in names}
        for tail, parts in self.fused:
            if names and all(any(f".{full}".endswith(f".{part}") for full in tails) for part in parts):
                names.add(tail.rpartition(".")[2])
        end = _either(sorted(map(re.escape, names))) + "$" if names else ".*"
        return "re:.*" + r"\.".join([*path, end])


def _either(names: Iterable[str]) -> str:
    names = list(names)
    return names[0] if len(names) == 1 else f"({'|'.join(names)})"


def _cover(
    cells: Mapping[Cell, str | None],
    wanted: str | None,
    harmless: tuple[str | None, ...],
    write: Callable[..., str],
    *,
    root: bool,
) -> list[str]:
    """Regexes that match every cell of format `wanted` and none whose format is not in `harmless`.

    First what holds in all layers, containers before leaves; then, for the rest, the same with layers named. `root`:
    whole layers may be named. They may not for targets: a layer's embedding and head would be named too.
    """
    under: dict[Path, list[Cell]] = {}
    renamed: dict[Path, list[Cell]] = {}  # by the path that SGLang makes of theirs, where it makes another one
    for cell in cells:
        theirs = tuple(SGLANG_COMPONENTS.get(name, name) for name in cell[0])
        for depth in range(len(cell[0]) + 1):
            under.setdefault(cell[0][:depth], []).append(cell)
            if theirs != cell[0]:
                renamed.setdefault(theirs[:depth], []).append(cell)
    children: dict[Path, list[Path]] = {}
    for path in under:
        if path:
            children.setdefault(path[:-1], []).append(path)
    missing = {cell for cell, format_ in cells.items() if format_ == wanted}
    entries: list[str] = []

    def fits(path: Path, layer: int | None = None) -> bool:
        matched = (*under[path], *renamed.get(path, ()))
        return all(cells[cell] in harmless for cell in matched if layer is None or cell[1] == layer)

    def open_layers(path: Path) -> list[int]:
        layers = sorted({cell[1] for cell in under[path] if cell in missing and cell[1] is not None})
        return [layer for layer in layers if fits(path, layer)]

    def add(entry: str, matched: Iterable[Cell]) -> None:
        entries.append(entry)
        missing.difference_update(matched)

    def everywhere(node: Path) -> None:
        if node and fits(node):
            add(write(node), under[node])
            return
        inner = [path for path in children[node] if path in children]
        leaves = [path for path in children[node] if path not in children and missing & set(under[path]) and fits(path)]
        for some in [leaves] if node else [[leaf] for leaf in leaves]:
            if some:
                add(write(node, [path[-1] for path in some]), [cell for path in some for cell in under[path]])
        for path in inner:
            if missing & set(under[path]):
                everywhere(path)

    def by_layer(node: Path) -> None:
        if (node or root) and (layers := open_layers(node)):
            add(write(node, (), layers), [cell for cell in under[node] if cell[1] in layers])
        same: dict[tuple[int, ...], list[Path]] = {}
        for path in children[node]:
            if path in children:
                if missing & set(under[path]):
                    by_layer(path)
            elif layers := open_layers(path):
                same.setdefault(tuple(layers), []).append(path)
        for where, some in same.items():
            matched = [cell for path in some for cell in under[path] if cell[1] in where]
            add(write(node, [path[-1] for path in some], where), matched)

    everywhere(())
    if missing:
        by_layer(())
    return entries
