"""The verbs that read and write checkpoints: inspect, recipes, plan, convert, verify."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from ..errors import CheckpointError, UsageError
from . import draw
from .options import (
    FoldFile,
    Json,
    KvFile,
    Mtp,
    RecipeName,
    ShardSize,
    Source,
    Stats,
    Unfold,
    Workers,
    cores,
    ends_cleanly,
    open_source,
    open_stats,
    planned,
    print_json,
    size_of,
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


def convert(
    source: Source,
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder to write the artifact into.")],
    recipe: RecipeName,
    mtp: Mtp = None,
    stats: Stats = None,
    fold: FoldFile = None,
    unfold: Unfold = False,
    kv: KvFile = None,
    workers: Workers = None,
    device: Annotated[
        str,
        typer.Option(
            help="auto: cuda where that can be used, else cpu; cuda: the first NVIDIA card; or cuda:0,cuda:1."
        ),
    ] = "auto",
    device_memory: Annotated[
        str | None,
        typer.Option(
            help="What packing may take of each card's memory, and of the host's for it, with a unit; 4GB if not "
            "given, and never more than 67MB a worker."
        ),
    ] = None,
    shard_size: ShardSize = "5GB",
    as_json: Json = False,
) -> None:
    """Carry a conversion out. Given again after an interruption, the same command goes on where it stopped."""
    from ..quantize.cards import open_cards
    from ..quantize.convert import convert as carry_out
    from ..quantize.device import choose
    from ..quantize.summary import result_keys

    if device_memory is not None and device == "cpu":
        raise UsageError("--device-memory: only with a card; leave it out, or --device cpu")
    memory, threads = size_of(device_memory or "4GB"), workers or cores()
    devices = choose(device)
    with ends_cleanly("interrupted; finished shards are kept, give the same command again to go on"):
        statistics = open_stats(stats)
        made = planned(source, recipe, mtp, shard_size, statistics, fold=fold, unfold=unfold, kv=kv)
        limits = tp_limits(made)
        cards, place = open_cards(devices, made, memory, threads, or_cpu=device == "auto")
        if not as_json:
            sizes = f"{draw.size(made.checkpoint.total_size)} -> {draw.size(made.output_bytes)}"
            shards, threads = draw.many(len(made.shards), "shard"), len(cards.lanes) if cards else threads
            draw.say(f"{source} -> {out}: {sizes}, {shards}, {draw.many(threads, 'worker')} on {place}")
            for note in (*made.notes, draw.limits(limits), *draw.gptq(made), *(cards.notes if cards else ())):
                draw.say(f"note: {note}")
            sys.stdout.flush()
        total = sum(unit.source_bytes for unit in made.units())
        with cards or nullcontext(), draw.progress("converting", total, quiet=as_json) as advance:
            result = carry_out(
                made,
                Path(out),
                workers=threads,
                progress=advance,
                statistics=statistics,
                notice=draw.notice,
                cards=cards,
            )
    if as_json:
        notes = [*made.notes, *(cards.notes if cards else ())]
        print_json(result_keys(result) | {"notes": notes, "device": place, "largest_tp": limits})
        return
    draw.result(result, out)
    if cards and cards.redone:
        draw.say(f"note: the CPU converted {draw.many(cards.redone, 'row block')} of extreme weights: docs/kernels.md")


def verify(
    artifact: Annotated[str, typer.Argument(metavar="ARTIFACT", help="Folder that phasefold wrote.")],
    source: Annotated[
        str | None, typer.Option(help="The checkpoint it was made from: every tensor is compared.")
    ] = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Hashes, headers, and config against tensors; with --source, every tensor decoded and compared."""
    from ..quantize.verify import verify as check

    folder = Path(artifact)
    if not os.path.isdir(artifact):
        raise CheckpointError(f"{artifact}: no such folder")
    total = sum(os.path.getsize(path) for path in folder.glob("*.safetensors")) * (2 if source else 1)
    with ends_cleanly("interrupted"), draw.progress("verifying", total, quiet=as_json) as advance:
        verdict = check(folder, Path(source) if source else None, workers=workers or cores(), progress=advance)
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
