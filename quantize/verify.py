"""Is an artifact what its manifest says, and does it hold the numbers of its source?

Without the source: every byte of every file against the manifest's hashes, the headers against the index, the config
against the tensors. With the source: every tensor is decoded on both sides and compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import PhasefoldError, VerifyError
from ..formats import formats
from ..formats.checkpoint import (
    CARD,
    INDEX,
    MANIFEST,
    OTHER_WEIGHTS,
    STRAY_CONFIG,
    WORK,
    Checkpoint,
    Place,
    Reader,
    Repo,
    open_checkpoint,
    unfinished,
)
from ..formats.manifest import Manifest, read_manifest
from ..recipes import parse
from . import kernels, output
from .account import account, held_config
from .blocks import Buffers, StoredMatrix, row_blocks
from .convert import mean_errors
from .declare import check
from .extras import from_json
from .kv import added_bytes
from .plan import Plan, declared_modules, make_plan
from .shard import Outcome
from .units import Unit
from .work import stays
from .workers import source_tensors

# Relative errors that no rounding exceeds: e4m3 moves a value by up to 1/17, BF16 by 1/257; INT4 may round all to zero
LIMITS = {"e4m3": 0.0625, "int4": 1.0, "plain": 0.004}


@dataclass(slots=True)
class Verdict:
    """problems: one line each, none when all is well. worst: (tensor, relative error). errors: role -> mean error.

    The mean is that of the units whose numbers changed.
    """

    problems: list[str] = field(default_factory=list)
    worst: tuple[str, float] | None = None
    errors: dict[str, float] = field(default_factory=dict)


def verify(
    artifact: Path,
    source: Path | Place | None = None,
    *,
    workers: int = 2,
    progress: Callable[[int], None] | None = None,
) -> Verdict:
    """Check an artifact, also against its source where that is given. What is wrong with it is in the verdict.

    Raises CheckpointError where the source cannot be read.
    `progress` is told bytes of the artifact as they are hashed, then as they are compared.
    """
    verdict = Verdict()
    theirs = open_checkpoint(source) if source is not None else None
    if (artifact / WORK / "job.json").exists() and not (artifact / "config.json").exists():
        verdict.problems.append(f"{artifact}: {unfinished(artifact)}")
        return verdict
    try:
        manifest = read_manifest(artifact)
    except VerifyError as error:
        verdict.problems.append(str(error))
        return verdict
    verdict.problems += _check_files(artifact, manifest, workers, progress)
    try:
        checkpoint = open_checkpoint(artifact)
        verdict.problems += _check_config(checkpoint)
        if theirs is not None:
            if manifest.source["digest"] != theirs.digest:
                made_from = f"{manifest.source['name']} (headers and config {manifest.source['digest'][:12]})"
                verdict.problems.append(
                    f"{theirs.label}: not the source of this artifact, which was made from {made_from}"
                )
            else:
                theirs = _as_then(theirs, manifest)
                extras = from_json(manifest.extras)
                plan = make_plan(theirs, parse(manifest.recipe, "recipe"), manifest.shard_bytes, extras)
                _compare(plan, checkpoint, manifest, verdict, workers, progress)
    except PhasefoldError as error:
        verdict.problems.append(str(error))
    return verdict


def _check_files(artifact: Path, manifest: Manifest, workers: int, progress: Callable[[int], None] | None) -> list[str]:
    """Every file of the manifest is there with its bytes, and no other weights are."""
    problems = []

    def one(name: str) -> str | None:
        expected = manifest.files[name]
        try:
            handle = os.open(artifact / name, os.O_RDONLY)
        except OSError as error:
            return f"{name}: cannot be read ({error.strerror})"
        try:
            size = os.fstat(handle).st_size
            if size != expected["bytes"]:
                return f"{name}: has {size:,} bytes, the manifest says {expected['bytes']:,}"
            if output.hash_file(handle, size) != expected["sha256"]:
                return f"{name}: altered, its sha256 is not the manifest's"
        except OSError as error:
            return f"{name}: cannot be read ({error.strerror})"
        finally:
            os.close(handle)
        if progress:
            progress(size)
        return None

    with ThreadPoolExecutor(workers) as pool:  # the card is not the artifact's, and older manifests list it
        problems += [problem for problem in pool.map(one, sorted({*manifest.files} - {CARD})) if problem]
    for path in sorted(artifact.rglob("*")):
        name = path.relative_to(artifact).as_posix()
        if name in manifest.files or name == MANIFEST or path.is_dir():
            continue
        if name.startswith(f"{WORK}/") or name.endswith(output.PARTIAL):
            problems.append(f"{name}: left over from a job that did not end; give the same convert command again")
        elif name.endswith((".safetensors", *OTHER_WEIGHTS)) or path.name in (INDEX, STRAY_CONFIG):
            problems.append(f"{name}: weights or a config that the manifest does not know")
    return problems


def _check_config(checkpoint: Checkpoint) -> list[str]:
    """The artifact's own tensors against its own config: complete, and declared as what they are."""
    found = account(checkpoint)
    modules = declared_modules((item, item.format) for item in found.items)
    declared = held_config(checkpoint, found.model)
    return [f"config.json: {problem}" for problem in check(declared, modules, found.model.architecture)]


def _as_then(source: Checkpoint, manifest: Manifest) -> Checkpoint:
    """The source as the job had it: on the Hub, or in a folder. It is the same by its digest, wherever it lies now."""
    repo, revision = manifest.source.get("repo"), manifest.source.get("revision")
    place = source.place._replace(repo=Repo(str(repo), str(revision), None) if repo else None)
    return replace(source, place=place)


def _compare(
    plan: Plan,
    checkpoint: Checkpoint,
    manifest: Manifest,
    verdict: Verdict,
    workers: int,
    progress: Callable[[int], None] | None,
) -> None:
    if plan.digest != manifest.plan:
        verdict.problems.append(
            f"{plan.checkpoint.label}: this phasefold plans the job otherwise than {manifest.tool} did, which made it"
        )
        return
    theirs, ours = Reader(plan.checkpoint), Reader(checkpoint)
    left = {shard.file: len(shard.units) for shard in plan.shards}
    lies = {unit.module: shard.file for shard in plan.shards for unit in shard.units}
    found: dict[str, list[Any]] = {}

    def one(unit: Unit) -> tuple[Unit, Outcome | str]:
        result = compare_unit(unit, theirs, ours, Buffers())
        if progress:
            progress(sum(output.part.nbytes for output in unit.outputs))
        return unit, result

    try:
        theirs.expect([(shard.file, source_tensors(shard)) for shard in plan.shards])
        with ThreadPoolExecutor(workers) as pool:
            try:
                for unit, result in pool.map(one, plan.units()):
                    left[lies[unit.module]] -= 1
                    if not left[lies[unit.module]]:
                        theirs.let_go(lies[unit.module])
                    if isinstance(result, str):
                        verdict.problems.append(result)
                        continue
                    error = result.relative_error
                    found[unit.module] = [None, None, None, error]
                    if verdict.worst is None or error > verdict.worst[1]:
                        verdict.worst = (f"{unit.module}{unit.outputs[0].part.suffix}", error)
                    if problem := _judge(unit, error, manifest.units):
                        verdict.problems.append(problem)
            except BaseException:
                theirs.give_up()  # or the workers that wait for it would be waited for
                raise
    finally:
        theirs.close()
        ours.close()
    compared = [unit for unit in plan.units() if unit.module in found]
    verdict.errors = {unit.role: 0.0 for unit in compared} | mean_errors(compared, found)


def compare_unit(unit: Unit, theirs: Reader, ours: Reader, buffers: Buffers) -> Outcome | str:
    """Decode a unit on both sides: -> its error, or a line that says what differs."""
    if unit.action == "added":
        return _compare_added(unit, ours)
    before = StoredMatrix(theirs, unit.module, unit.source, unit.source_format, unit.shape, unit.scaling)
    parts = tuple(output.part for output in unit.outputs)
    after = StoredMatrix(ours, unit.module, parts, unit.target_format, unit.shape)
    error2 = norm2 = 0.0
    for first, last in row_blocks(unit.shape, unit.source[0]):
        a, b = before.read(first, last, buffers, "a."), after.read(first, last, buffers, "b.")
        if stays(unit):
            if a.codes != b.codes or a.scales != b.scales:
                what = "the folded source's" if unit.scaling else "the source's"
                return f"{unit.module}: {unit.action}, but its bytes differ from {what} in rows {first} to {last - 1}"
            continue
        report = kernels.compare(a, _in_bf16(b, buffers) if unit.method == "inverse" else b)
        if report.fault is not None:
            return f"{after.where(report.fault, report.row, report.column, first)}: {report.fault}"
        error2, norm2 = error2 + report.error2, norm2 + report.norm2
    before.check_shape_tensor(buffers)
    after.check_shape_tensor(buffers)
    return Outcome(error2, norm2)


def _in_bf16(matrix: kernels.Matrix, buffers: Buffers) -> kernels.Matrix:
    """A matrix as it was cast to BF16: what an exact inverse is the inverse of."""
    codes = buffers.get("b.bf16", 2 * matrix.rows * matrix.cols)
    kernels.convert(matrix, kernels.Target("bf16"), codes, None)
    return kernels.Matrix("bf16", codes, None, None, matrix.rows, matrix.cols)


def _compare_added(unit: Unit, ours: Reader) -> Outcome | str:
    """A tensor without a source holds the value of the plan, to the bit."""
    expected = added_bytes(unit)
    found = bytearray(len(expected))
    ours.read(unit.module, 0, memoryview(found))
    return Outcome() if found == expected else f"{unit.module}: added as {unit.value}, but its bytes say otherwise"


def _judge(unit: Unit, error: float, recorded: Mapping[str, list[object]]) -> str | None:
    said = recorded.get(unit.module, [None, None, None, None])[3]
    if not isinstance(said, float | int):
        return f"{unit.module}: the manifest does not know it"
    if abs(error - said) > 1e-3 * max(error, said) + 1e-9:
        return f"{unit.module}: differs from the source by {error:.4g}, the manifest says {said:.4g}"
    if unit.lossless and error:
        return f"{unit.module}: must equal the source, differs by {error:.4g}"
    kind = formats()[unit.target_format].grid.kind
    if not unit.kept and error > LIMITS.get(kind, 0.0):
        return f"{unit.module}: differs from the source by {error:.4g}, more than {kind} rounding can explain"
    return None
