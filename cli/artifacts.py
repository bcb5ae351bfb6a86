"""The verbs that look at checkpoints and recipes: inspect, recipes, plan, verify."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..errors import CheckpointError, UsageError
from . import draw
from .options import (
    Fetching,
    FoldFile,
    Json,
    KvFile,
    Mtp,
    RecipeName,
    ShardSize,
    Source,
    Stats,
    Unfold,
    Window,
    WindowDir,
    Workers,
    cores,
    ends_cleanly,
    open_source,
    open_stats,
    place_of,
    planned,
    print_json,
    tp_limits,
)


def inspect(source: Source, as_json: Json = False) -> None:
    """What a checkpoint is: family, roles, storage formats, totals. Reads headers only."""
    from ..quantize.extras import Extras
    from ..quantize.fold import notes as folding_notes
    from ..quantize.kernels import backend
    from ..quantize.summary import inspect as summarise

    found = summarise(open_source(source)) | {"backend": backend()}
    if as_json:
        print_json(found)
        return
    size, parameters = draw.size(found["total_size"]), f"{found['parameters']:,} parameters"
    draw.say(
        f"{source}: {found['family']} ({found['architecture']}), {found['tensors']:,} tensors, {size}, {parameters}"
    )
    for note in folding_notes(Extras(folding=found["folding"])):
        draw.say(note)
    print(f"codec: {found['backend']}")
    rows = [[role, f"{r['tensors']:,}", draw.size(r["bytes"]), r["format"]] for role, r in found["roles"].items()]
    draw.table(["role", "tensors", "bytes", "stored as"], rows, "lrrl")


def recipes(as_json: Json = False) -> None:
    """The recipes that ship with phasefold."""
    from ..recipes import load, names

    found = [load(name) for name in names()]
    if as_json:
        keys = ("name", "phase", "families", "summary")
        print_json([{key: getattr(recipe, key) for key in keys} for recipe in found])
        return
    for recipe in found:
        print(f"{recipe.name:30}{recipe.phase:9}{', '.join(recipe.families)}\n    {recipe.summary}")


def plan(
    source: Source,
    recipe: RecipeName,
    mtp: Mtp = None,
    stats: Stats = None,
    fold: FoldFile = None,
    unfold: Unfold = False,
    kv: KvFile = None,
    shard_size: ShardSize = "5GB",
    as_json: Json = False,
) -> None:
    """What a conversion would write, to the byte. Reads headers only; with --fold or --unfold attention too."""
    from ..quantize.summary import plan_keys

    made = planned(source, recipe, mtp, shard_size, open_stats(stats), fold=fold, unfold=unfold, kv=kv)
    limits = tp_limits(made)
    if as_json:
        print_json(plan_keys(made) | {"largest_tp": limits})
    else:
        draw.plan(made, limits)


def verify(
    artifact: Annotated[str, typer.Argument(metavar="ARTIFACT", help="Folder that phasefold wrote.")],
    source: Annotated[
        str | None, typer.Option(help="The checkpoint it was made from: every tensor is compared.")
    ] = None,
    window: Window = None,
    window_dir: WindowDir = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Hashes, headers, and config against tensors; with --source, every tensor decoded and compared."""
    from ..quantize.verify import verify as check

    folder = Path(artifact)
    if source is None and (window or window_dir):
        raise UsageError("--window and --window-dir: only with a --source on the Hub; leave them out")
    if not os.path.isdir(artifact):
        raise CheckpointError(f"{artifact}: no such folder")
    total = sum(os.path.getsize(path) for path in folder.glob("*.safetensors")) * (2 if source else 1)
    with ends_cleanly("interrupted"), draw.progress("verifying", total, quiet=as_json) as advance:
        place = place_of(source, Fetching(window, window_dir, artifact=folder)) if source else None
        verdict = check(folder, place, workers=workers or cores(), progress=advance)
    worst = {"tensor": verdict.worst[0], "relative_error": verdict.worst[1]} if verdict.worst else None
    if as_json:
        print_json({"ok": not verdict.problems, "problems": verdict.problems, "worst": worst,
                     "mean_relative_error": verdict.errors})  # fmt: skip
    else:
        for problem in verdict.problems[:20]:
            draw.say(f"problem: {problem}")
        if changed := [[role, f"{error:.2%}"] for role, error in verdict.errors.items() if error]:
            draw.table(["role", "mean error"], changed, "lr")
        if verdict.errors:
            print(f"{len(verdict.errors) - len(changed)} roles exact")
        count = len(verdict.problems)
        what = (
            "every tensor compared with the source"
            if source
            else "hashes, headers, index, config; give --source for more"
        )
        draw.say(
            f"{artifact}: ok ({what})"
            if not count
            else f"{artifact}: NOT ok, {count} problem{'s' if count > 1 else ''}"
        )
    if verdict.problems:
        raise typer.Exit(3)
