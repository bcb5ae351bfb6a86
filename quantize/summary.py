"""What a checkpoint, a plan and a result come to, as plain values for `--json` and for tables."""

from __future__ import annotations

import math
from typing import Any

from ..formats.checkpoint import Checkpoint
from .account import account
from .convert import Result
from .plan import Plan


def inspect(checkpoint: Checkpoint) -> dict[str, Any]:
    """Family, totals, and what each role is stored as. `parameters` counts logical elements, scales left out."""
    found = account(checkpoint)
    formats: dict[str, int] = {}
    roles: dict[str, dict[str, Any]] = {}
    for item in found.items:
        formats[item.format.name] = formats.get(item.format.name, 0) + len(item.parts)
        role = roles.setdefault(item.spec.role, {"tensors": 0, "bytes": 0, "format": []})
        role["tensors"] += len(item.parts)
        role["bytes"] += item.nbytes
        if item.format.name not in role["format"]:
            role["format"].append(item.format.name)
    return {
        "family": found.model.family,
        "architecture": found.model.architecture.name,
        "tensors": len(checkpoint.tensors),
        "total_size": checkpoint.total_size,
        "parameters": sum(math.prod(item.shape) for item in found.items if item.spec.role != "buffer"),
        "shards": len(checkpoint.sizes),
        "mtp": found.has_mtp,
        "formats": formats,
        "roles": {name: role | {"format": ", ".join(role["format"])} for name, role in roles.items()},
    }


def plan_keys(plan: Plan) -> dict[str, Any]:
    """What `plan --json` prints."""
    return {
        "recipe": plan.recipe.name,
        "phase": plan.recipe.phase,
        "family": plan.family,
        "architecture": plan.architecture,
        "source_bytes": plan.checkpoint.total_size,
        "output_bytes": plan.output_bytes,
        "tensors": len(plan.weight_map),
        "shards": len(plan.shards),
        "units": plan.actions(),
        "notes": list(plan.notes),
        "digest": plan.digest,
    }


def result_keys(result: Result) -> dict[str, Any]:
    """What `convert --json` prints: the plan's keys and what the job took."""
    return plan_keys(result.plan) | {
        "wall_seconds": result.wall_seconds,
        "cpu_seconds": result.cpu_seconds,
        "peak_rss_bytes": result.peak_rss_bytes,
        "source_bytes": result.source_bytes,
        "resumed_shards": result.resumed_shards,
        "backend": result.backend,
        "mean_relative_error": dict(result.errors),
        "scales": dict(result.scales),
    }


def transitions(plan: Plan) -> list[tuple[str, str, str, str, int, int]]:
    """(role, source format, action, target format, units, bytes written), in the order of the model."""
    sums: dict[tuple[str, str, str, str], list[int]] = {}
    for unit in plan.units():
        entry = sums.setdefault((unit.role, unit.source_format, unit.action, unit.target_format), [0, 0])
        entry[0] += 1
        entry[1] += sum(output.part.nbytes for output in unit.outputs)
    return [(*key, count, size) for key, (count, size) in sums.items()]
