"""The command line: reads arguments, calls one function, draws (draw.py). Nothing imports it; only it knows typer.

Exit codes: 0 done; 1 refused or failed, one line says why; 2 wrong usage; 3 a check did not hold; 130 interrupted.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from . import __version__, draw
from .errors import CheckpointError, PhasefoldError, PlanError

if TYPE_CHECKING:
    from .formats.checkpoint import Checkpoint
    from .quantize.plan import Plan

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="Folder of a Kimi or GLM checkpoint.")]
RecipeName = Annotated[
    str, typer.Option("--recipe", "-r", help="Name of a recipe that ships, or path of a .toml file.")
]


class MtpChoice(StrEnum):
    """recipes.MTP, for the help text."""

    quantize = "quantize"
    keep = "keep"
    drop = "drop"


class Device(StrEnum):
    """Where the packing runs."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


Mtp = Annotated[
    MtpChoice | None,
    typer.Option(help="MTP layers: quantized by the rules, kept or dropped; else as the recipe says."),
]
ShardSize = Annotated[str, typer.Option(help="Largest size of an output shard, with a unit: 5GB, 4GiB.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Workers = Annotated[int | None, typer.Option(min=1, max=256, help="Threads; as many as there are cores if not given.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    """One Kimi or GLM checkpoint in, the right weights for each phase of serving out."""
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def inspect(source: Source, as_json: Json = False) -> None:
    """What a checkpoint is: family, roles, storage formats, totals. Reads headers only."""
    from .quantize.kernels import backend
    from .quantize.summary import inspect as summarise

    found = summarise(_open(source)) | {"backend": backend()}
    if as_json:
        _print_json(found)
        return
    size, parameters = draw.size(found["total_size"]), f"{found['parameters']:,} parameters"
    draw.say(
        f"{source}: {found['family']} ({found['architecture']}), {found['tensors']:,} tensors, {size}, {parameters}"
    )
    print(f"codec: {found['backend']}")
    rows = [[role, f"{r['tensors']:,}", draw.size(r["bytes"]), r["format"]] for role, r in found["roles"].items()]
    draw.table(["role", "tensors", "bytes", "stored as"], rows, "lrrl")


@app.command()
def recipes(as_json: Json = False) -> None:
    """The recipes that ship with phasefold."""
    from .recipes import load, names

    found = [load(name) for name in names()]
    if as_json:
        keys = ("name", "phase", "families", "summary")
        _print_json([{key: getattr(recipe, key) for key in keys} for recipe in found])
        return
    for recipe in found:
        print(f"{recipe.name:22}{recipe.phase:9}{', '.join(recipe.families)}\n    {recipe.summary}")


@app.command()
def plan(
    source: Source, recipe: RecipeName, mtp: Mtp = None, shard_size: ShardSize = "5GB", as_json: Json = False
) -> None:
    """What a conversion would write, to the byte. Reads headers only."""
    from .quantize.summary import plan_keys

    made = _plan(source, recipe, mtp, shard_size)
    if as_json:
        _print_json(plan_keys(made))
    else:
        draw.plan(made)


@app.command()
def convert(
    source: Source,
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder to write the artifact into.")],
    recipe: RecipeName,
    mtp: Mtp = None,
    workers: Workers = None,
    device: Annotated[
        Device, typer.Option(help="Where the packing runs; this version packs on the CPU.")
    ] = Device.auto,
    shard_size: ShardSize = "5GB",
    as_json: Json = False,
) -> None:
    """Carry a conversion out. Given again after an interruption, the same command goes on where it stopped."""
    from .quantize.convert import convert as carry_out
    from .quantize.summary import result_keys

    if device == Device.cuda:
        raise PlanError("device cuda: this version packs on the CPU; give --device cpu, or nothing")
    with _ends_cleanly("interrupted; finished shards are kept, give the same command again to go on"):
        made = _plan(source, recipe, mtp, shard_size)
        total = sum(unit.source_bytes for unit in made.units())
        threads = workers or _cores()
        sizes = (
            f"{draw.size(made.checkpoint.total_size)} -> {draw.size(made.output_bytes)}, {len(made.shards):,} shards"
        )
        if not as_json:
            for line in (f"{source} -> {out}: {sizes}, {threads} workers", *(f"note: {note}" for note in made.notes)):
                draw.say(line)
            sys.stdout.flush()
        with draw.progress("converting", total, quiet=as_json) as advance:
            result = carry_out(made, Path(out), workers=threads, progress=advance)
    if as_json:
        _print_json(result_keys(result))
    else:
        draw.result(result, out)


@app.command()
def verify(
    artifact: Annotated[str, typer.Argument(metavar="ARTIFACT", help="Folder that phasefold wrote.")],
    source: Annotated[
        str | None, typer.Option(help="The checkpoint it was made from: every tensor is compared.")
    ] = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Hashes, headers, and config against tensors; with --source, every tensor decoded and compared."""
    from .quantize.verify import verify as check

    folder = Path(artifact)
    if not os.path.isdir(artifact):
        raise CheckpointError(f"{artifact}: no such folder")
    total = sum(os.path.getsize(path) for path in folder.glob("*.safetensors")) * (2 if source else 1)
    with _ends_cleanly("interrupted"), draw.progress("verifying", total, quiet=as_json) as advance:
        verdict = check(folder, Path(source) if source else None, workers=workers or _cores(), progress=advance)
    worst = {"tensor": verdict.worst[0], "relative_error": verdict.worst[1]} if verdict.worst else None
    if as_json:
        _print_json({"ok": not verdict.problems, "problems": verdict.problems, "worst": worst,
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


def _open(source: str) -> Checkpoint:
    from .formats.checkpoint import open_checkpoint

    if not os.path.exists(source) and re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", source):
        raise CheckpointError(f"{source}: no such folder; download the repo first, this version reads folders only")
    return open_checkpoint(Path(source))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _plan(source: str, recipe: str, mtp: str | None, shard_size: str) -> Plan:
    from dataclasses import replace

    from .quantize.plan import make_plan
    from .recipes import load

    wanted = load(recipe)
    if mtp is not None:
        wanted = replace(wanted, mtp=str(mtp))
    gc.disable()  # a plan is a million small values without a cycle: the collector would double its time
    made = make_plan(_open(source), wanted, _bytes(shard_size))
    gc.freeze()
    gc.enable()
    return made


def _bytes(text: str) -> int:
    """A size with its unit: GB = 10^9, GiB = 2^30."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?) ?([kKMGT]?)(i?)B", text.strip())
    step = 1024 if match and match[3] else 1000
    value = round(float(match[1]) * step ** " KMGT".index(match[2].upper() or " ")) if match else 0
    if value < 1:
        raise typer.BadParameter(f"{text!r} is no size; write 5GB or 4GiB")
    return value


@contextmanager
def _ends_cleanly(sentence: str) -> Iterator[None]:
    """End with one sentence on SIGINT, and on SIGTERM, which batch systems send."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        _fail(sentence, 130)
    finally:
        signal.signal(signal.SIGTERM, before)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _fail(message: str, code: int) -> NoReturn:
    print(f"phasefold: {draw.clean(message)}", file=sys.stderr)
    raise SystemExit(code)


def main() -> None:
    """Entry point: known errors are one line on stderr."""
    try:
        app(standalone_mode=True)
    except PhasefoldError as error:
        _fail(str(error), 1)
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(1) from None
