"""KV scales beside a pair: those of a manifest that is given, and those that the artifacts hold as tensors.

The reference runtime stores plain FP8 rows at whatever scales it is given. What vLLM and SGLang will do with the same
manifest is another question, and that is told here as findings of rule D4.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..errors import LoadError
from ..families import identify
from ..formats.checkpoint import Checkpoint, Place, open_checkpoint
from ..formats.kv_scales import KVScales, read_kv_scales
from ..quantize.kv import ROLE, misfit, other_folding, why
from .deployment import Deployment, Finding
from .kv_layout import PHASES, kv_layout
from .shards import read_number

Scales = Mapping[int, Mapping[str, float]]


def scales_for(places: tuple[Path | Place, Path | Place], path: Path) -> tuple[KVScales, Scales]:
    """The manifest at `path` and its scales for plain FP8 rows, where it is of the model of both pools.

    Raises LoadError where it is of another model, or where a pool is folded, CheckpointError where it cannot be read.
    """
    kv = read_kv_scales(path)
    for where in places:
        checkpoint = open_checkpoint(where)
        if reason := misfit(kv, identify(checkpoint.config)):
            raise LoadError(f"{path}: not of the model in {checkpoint.label}: {reason}; calibrate that one")
        if reason := other_folding(kv, checkpoint):
            raise LoadError(f"{path}: {reason}; a folded cache is right at scale 1.0, without the file")
    return kv, kv.row_scales()


def held_scales(folder: Path) -> Scales | None:
    """The scales that an artifact holds for its decoder layers as vLLM reads them: missing is 1.0. None without any."""
    checkpoint = open_checkpoint(folder)
    model = identify(checkpoint.config)
    found = tensors_of(checkpoint)
    if not found:
        return None
    scales: dict[int, dict[str, float]] = {
        layer.layer: {part.name: 1.0 for part in layer.parts} for layer in model.cache() if not layer.mtp
    }
    for spec in model.tensors():
        value = found.get(spec.name, 0.0)
        if spec.role == ROLE and spec.layer in scales and value > 0:
            scales[spec.layer][spec.name.rpartition(".")[2].removesuffix("_scale")] = value
    return scales


def tensors_of(checkpoint: Checkpoint) -> dict[str, float]:
    """Name -> value of the KV scales of a checkpoint's decoder layers that vLLM would read."""
    names = [s.name for s in identify(checkpoint.config).tensors() if s.role == ROLE and not s.mtp]
    values = {
        name: read_number(checkpoint.shards, checkpoint.tensors[name]) for name in names if name in checkpoint.tensors
    }
    return {name: value for name, value in values.items() if value is not None}


def judge_scales(
    places: tuple[Path | Place, Path | Place], pools: tuple[Deployment, Deployment], path: Path, kv: KVScales
) -> list[Finding]:
    """D4: what the runtime makes of a manifest's scales, if that is not to store the cache at them. Warnings only."""
    runtime, found = pools[0].runtime, []
    checkpoints = [open_checkpoint(where) for where in places]
    model = identify(checkpoints[0].config)
    layouts = [kv_layout(model, at, phase) for phase, at in zip(PHASES, pools, strict=True)]
    if any(layout.refusal for layout in layouts):
        return []
    if not all(layout.dtype.startswith("fp8") for layout in layouts):
        message = "plays no part: the KV cache is not FP8; its scales are for --kv-dtype fp8_e4m3"
        return [Finding("D4", "warning", runtime, str(path), message)]
    if any("float32 scales" in layout.row for layout in layouts):
        message = f"plays no part: {layouts[0].backend}'s rows carry scales of their own, one for every 128 values"
        return [Finding("D4", "warning", runtime, str(path), message)]
    wanted = kv.tensors(runtime)
    if not wanted:
        return [Finding("D4", "warning", runtime, str(path), f"is not applied: {why(model, runtime)}")]
    for phase, checkpoint in zip(PHASES, checkpoints, strict=True):
        have = tensors_of(checkpoint)
        if have != wanted:
            name = min(name for name in have.keys() | wanted.keys() if have.get(name) != wanted.get(name))
            says = f"{have[name]:g}" if name in have else "not there, which is 1.0"
            message = (
                f"the {phase} artifact's {name} is {says}, the manifest says {wanted.get(name, 1.0):g}: "
                f"the runtime takes the artifact's; convert both with --kv {path}"
            )
            found.append(Finding("D4", "warning", runtime, str(path), message))
    return found
