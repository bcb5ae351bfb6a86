"""What a checkpoint, a plan and a result come to, as plain values for `--json` and for tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..formats.checkpoint import Checkpoint
from .account import account
from .convert import Result
from .fold import held
from .guide import METHODS, guided, worker_bytes
from .parts import PartResult
from .plan import Plan
from .units import Unit


def inspect(checkpoint: Checkpoint) -> dict[str, Any]:
    """Family, totals, and what each role is stored as. `parameters` counts logical elements, scales left out.

    `folding` is what the checkpoint's manifest tells of: layer -> cached part -> exponent.
    """
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
        "folding": held(checkpoint),
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
        "roles": [t._asdict() for t in transitions(plan)],
        "notes": list(plan.notes),
        "worker_bytes": worker_bytes(plan),
        "digest": plan.digest,
    }


def result_keys(result: Result) -> dict[str, Any]:
    """What `convert --json` prints: the plan's keys and what the job took."""
    return plan_keys(result.plan) | {
        "roles": [t._asdict() for t in transitions(result.plan, result.manifest.units)],
        "wall_seconds": result.wall_seconds,
        "cpu_seconds": result.cpu_seconds,
        "peak_rss_bytes": result.peak_rss_bytes,
        "source_bytes": result.source_bytes,
        "resumed_shards": result.resumed_shards,
        "backend": result.backend,
        "mean_relative_error": dict(result.errors),
        "scales": dict(result.manifest.scales),
        "methods": methods(result.plan, result.manifest.units),
    }


def part_keys(result: PartResult) -> dict[str, Any]:
    """What `convert --part --json` prints: the plan's keys and what the part took."""
    return plan_keys(result.plan) | {
        "part": list(result.part),
        "shards_done": result.shards_done,
        "shards_missing": result.shards_missing,
        "resumed_shards": result.resumed_shards,
        "wall_seconds": result.wall_seconds,
        "cpu_seconds": result.cpu_seconds,
        "peak_rss_bytes": result.peak_rss_bytes,
        "source_bytes": result.source_bytes,
        "backend": result.backend,
    }


def methods(plan: Plan, units: Mapping[str, list[Any]]) -> dict[str, dict[str, int]]:
    """Of the units that statistics guide: role -> what their codes come from in the end -> how many.

    units: the manifest's.
    """
    found: dict[str, dict[str, int]] = {}
    for unit in filter(guided, plan.units()):
        counts = found.setdefault(unit.role, dict.fromkeys(METHODS, 0))
        counts[units[unit.module][4]] += 1
    return {role: {name: count for name, count in counts.items() if count} for role, counts in found.items()}


class Transition(NamedTuple):
    """What became of the units of one role that went the same way.

    error: mean relative error of the units, 0.0 where all are exact; None before the conversion.
    """

    role: str
    source: str
    action: str
    target: str
    units: int
    source_bytes: int
    bytes: int
    error: float | None


def transitions(plan: Plan, errors: Mapping[str, list[Any]] | None = None) -> list[Transition]:
    """The plan by role and what becomes of it, the largest first. `errors`: the manifest's units."""
    groups: dict[tuple[str, str, str, str], list[Unit]] = {}
    for unit in plan.units():
        groups.setdefault((unit.role, unit.source_format, unit.action, unit.target_format), []).append(unit)
    found = [
        Transition(
            *key,
            len(units),
            sum(unit.source_bytes for unit in units),
            sum(output.part.nbytes for unit in units for output in unit.outputs),
            None if errors is None else sum(errors[unit.module][3] for unit in units) / len(units),
        )
        for key, units in groups.items()
    ]
    return sorted(found, key=lambda t: -t.bytes)
