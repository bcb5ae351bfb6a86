"""Pairs of checkpoints for tests: small ones with weights, and those of published models as headers alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import sparse
import variants

from phasefold.formats import make_header
from phasefold.formats.checkpoint import INDEX, MANIFEST, open_checkpoint
from phasefold.formats.manifest import Manifest
from phasefold.quantize.convert import convert
from phasefold.quantize.plan import make_plan
from phasefold.recipes import load

#: example -> recipe for prefill, recipes for decode
RECIPES = {
    "tiny-kimi": ("kimi-prefill-fp8", ("kimi-decode-int4",)),
    "tiny-glm4": ("glm-prefill-fp8", ("glm-decode-int4", "glm-decode-int4-g128", "glm-decode-int4-fp8")),
    "tiny-glm5": ("glm-prefill-fp8", ("glm-decode-int4", "glm-decode-int4-g128", "glm-decode-int4-fp8")),
}


def folded(source: Path, recipe: str, out: Path) -> Path:
    """An artifact of a recipe that ships."""
    convert(make_plan(open_checkpoint(source), load(recipe)), out)
    return out


def make_pair(base: str, root: Path, kind: str = "bf16") -> tuple[Path, Path]:
    """FP8 and INT4 artifacts of a variant of an example."""
    source = variants.variant(kind, base, root / "source")
    prefill, (decode, *_) = RECIPES[base]
    pair = folded(source, prefill, root / "prefill"), folded(source, decode, root / "decode")
    shutil.rmtree(source)
    return pair


def planned(source: Path, recipe: str, out: Path) -> Path:
    """The artifact that a plan promises, without weights: headers, index, config and manifest, holes for data."""
    plan = make_plan(open_checkpoint(source), load(recipe))
    out.mkdir()
    for shard in plan.shards:
        tensors = [(u.module + o.part.suffix, o.part.dtype, o.part.shape) for u in shard.units for o in u.outputs]
        prefix, starts = make_header(tensors)
        with (out / shard.file).open("wb") as file:
            file.write(prefix)
            file.truncate(starts[-1] + shard.units[-1].outputs[-1].part.nbytes)
    index = {"metadata": {"total_size": plan.output_bytes}, "weight_map": plan.weight_map}
    (out / INDEX).write_text(json.dumps(index))
    (out / "config.json").write_bytes(plan.config)
    source_of = {"name": source.name, "digest": plan.checkpoint.digest}
    units = {unit.module: [unit.action, unit.source_format, unit.target_format, 0.0] for unit in plan.units()}
    rest: dict[str, Any] = {"files": {}, "units": units, "dropped": {}, "scales": {}, "notes": []}
    manifest = Manifest("0", "any", plan.architecture, source_of, {}, plan.digest, 0, plan.output_bytes, **rest)
    (out / MANIFEST).write_bytes(manifest.to_bytes())
    return out


def planned_pair(model: str, root: Path) -> tuple[Path, Path]:
    """Artifacts of a published model, planned only."""
    source = root / "source"
    sparse.write(model, source)
    family = "kimi" if model.startswith("moonshotai") else "glm"
    recipes = f"{family}-prefill-fp8", f"{family}-decode-int4"
    pair = planned(source, recipes[0], root / "prefill"), planned(source, recipes[1], root / "decode")
    shutil.rmtree(source)
    return pair


def config_only(name: str, root: Path) -> tuple[Path, dict[str, Any]]:
    """A folder with the config.json of a published model, without code of its own and without quantization."""
    config = sparse.config_of(name)
    for part in (config, config.get("text_config", config)):
        part.pop("auto_map", None)
        part.pop("quantization_config", None)
    folder = root / name.replace("/", "--")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder, config
