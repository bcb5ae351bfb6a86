"""The command line: reads arguments, calls one function, draws. Nothing imports it; only it knows typer and rich.

Exit codes: 0 done; 1 refused or failed, one line says why; 2 wrong usage; 3 a check did not hold; 130 interrupted.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from . import __version__
from .errors import CheckpointError, PhasefoldError, PlanError, RecipeError

if TYPE_CHECKING:
    from .formats.checkpoint import Checkpoint
    from .quantize.convert import Result
    from .quantize.plan import Plan

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="Folder of a Kimi or GLM checkpoint.")]
RecipeName = Annotated[
    str, typer.Option("--recipe", "-r", help="Name of a recipe that ships, or path of a .toml file.")
]
Mtp = Annotated[
    str | None, typer.Option(help="MTP layers: quantize (by the rules), keep or drop; the recipe's by default.")
]
ShardSize = Annotated[str, typer.Option(help="Largest size of an output shard, with a unit: 5GB, 4GiB.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Workers = Annotated[int, typer.Option(min=1, max=256, help="Threads that work on matrices.")]


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
    size, parameters = _size(found["total_size"]), f"{found['parameters']:,} parameters"
    _say(f"{source}: {found['family']} ({found['architecture']}), {found['tensors']:,} tensors, {size}, {parameters}")
    print(f"codec: {found['backend']}")
    rows = [[role, f"{r['tensors']:,}", _size(r["bytes"]), r["format"]] for role, r in found["roles"].items()]
    _table(["role", "tensors", "bytes", "stored as"], rows, "lrrl")


@app.command()
def recipes(as_json: Json = False) -> None:
    """The recipes that ship with phasefold."""
    from .recipes import load, names

    found = [load(name) for name in names()]
    if as_json:
        keys = ("name", "phase", "families", "summary")
        _print_json([{key: getattr(recipe, key) for key in keys} for recipe in found])
        return
    _table(
        ["name", "phase", "families", "summary"],
        [[r.name, r.phase, ", ".join(r.families), r.summary] for r in found],
        "llll",
    )


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
        _draw_plan(made)


@app.command()
def convert(
    source: Source,
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder to write the artifact into.")],
    recipe: RecipeName,
    mtp: Mtp = None,
    workers: Workers = 2,
    device: Annotated[str, typer.Option(help="Where the packing runs: auto or cpu.")] = "auto",
    shard_size: ShardSize = "5GB",
    as_json: Json = False,
) -> None:
    """Carry a conversion out. Given again after an interruption, the same command goes on where it stopped."""
    from .quantize.convert import convert as carry_out
    from .quantize.summary import result_keys

    if device not in ("auto", "cpu"):
        raise PlanError(f"device {device!r}: this version packs on the CPU; give --device cpu, or nothing")
    with _ends_cleanly("interrupted; finished shards are kept, give the same command again to go on"):
        made = _plan(source, recipe, mtp, shard_size)
        total = sum(unit.source_bytes for unit in made.units())
        with _progress("converting", total, quiet=as_json) as advance:
            result = carry_out(made, Path(out), workers=workers, progress=advance)
    if as_json:
        _print_json(result_keys(result))
    else:
        _draw_result(result, out)


@app.command()
def verify(
    artifact: Annotated[str, typer.Argument(metavar="ARTIFACT", help="Folder that phasefold wrote.")],
    source: Annotated[
        str | None, typer.Option(help="The checkpoint it was made from: every tensor is compared.")
    ] = None,
    workers: Workers = 2,
    as_json: Json = False,
) -> None:
    """Hashes, headers, and config against tensors; with --source, every tensor decoded and compared."""
    from .quantize.verify import verify as check

    folder = Path(artifact)
    if not os.path.isdir(artifact):
        raise CheckpointError(f"{artifact}: no such folder")
    total = sum(os.path.getsize(path) for path in folder.glob("*.safetensors")) * (2 if source else 1)
    with _ends_cleanly("interrupted"), _progress("verifying", total, quiet=as_json) as advance:
        verdict = check(folder, Path(source) if source else None, workers=workers, progress=advance)
    worst = {"tensor": verdict.worst[0], "relative_error": verdict.worst[1]} if verdict.worst else None
    if as_json:
        _print_json({"ok": not verdict.problems, "problems": verdict.problems, "worst": worst,
                     "mean_relative_error": verdict.errors})  # fmt: skip
    else:
        for problem in verdict.problems[:20]:
            _say(f"problem: {problem}")
        if verdict.errors:
            _table(["role", "mean relative error"], [[k, f"{v:.2e}"] for k, v in verdict.errors.items()], "lr")
        count = len(verdict.problems)
        _say(f"{artifact}: ok" if not count else f"{artifact}: NOT ok, {count} problem{'s' if count > 1 else ''}")
    if verdict.problems:
        raise typer.Exit(3)


def _open(source: str) -> Checkpoint:
    from .formats.checkpoint import open_checkpoint

    if not os.path.exists(source) and re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", source):
        raise CheckpointError(f"{source}: no such folder; download the repo first, this version reads folders only")
    return open_checkpoint(Path(source))


def _plan(source: str, recipe: str, mtp: str | None, shard_size: str) -> Plan:
    from dataclasses import replace

    from .quantize.plan import make_plan
    from .recipes import MTP, load

    wanted = load(recipe)
    if mtp is not None:
        if mtp not in MTP:
            raise RecipeError(f"--mtp is {mtp!r}, expected one of {', '.join(MTP)}")
        wanted = replace(wanted, mtp=mtp)
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


def _size(nbytes: float) -> str:
    for unit, width in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= width:
            return f"{nbytes / width:.2f} {unit}"
    return f"{nbytes:.0f} B"


def _draw_plan(made: Plan) -> None:
    from .quantize.summary import transitions

    source, written = made.checkpoint, f"{made.output_bytes:,} bytes ({made.output_bytes / 2**30:.2f} GiB)"
    _say(f"{source.folder}: {made.architecture}, {_size(source.total_size)}")
    _say(f"{made.recipe.name}: {written}, {len(made.weight_map):,} tensors, {len(made.shards):,} shards")
    rows = [
        [role, f"{n:,}", before, action, after, _size(size)]
        for role, before, action, after, n, size in transitions(made)
    ]
    _table(["role", "units", "from", "", "to", "bytes"], rows, "lrlllr")
    for note in made.notes:
        _say(f"note: {note}")
    print(f"digest {made.digest}")


def _draw_result(result: Result, out: str) -> None:
    from .quantize.summary import transitions

    made = result.plan
    rows = []
    for role, before, action, after, count, size in transitions(made):
        error = result.errors.get(role) if action in ("quantized", "repacked") else None
        rows.append(
            [role, f"{count:,}", before, action, after, _size(size), f"{error:.2%}" if error is not None else "exact"]
        )
    _table(["role", "units", "from", "", "to", "bytes", "mean error"], rows, "lrlllrr")
    for note in made.notes:
        _say(f"note: {note}")
    if tiny := result.scales["tiny_scales"]:
        print(f"note: {tiny:,} tiny scales were met; they are exact here, kernels that flush denormals read zero")
    rate = result.source_bytes / max(result.wall_seconds, 1e-9)
    _say(f"{out}: {_size(result.source_bytes)} -> {_size(made.output_bytes)} in {result.wall_seconds:.1f} s")
    print(f"{_size(rate)}/s, codec {result.backend}, peak memory {_size(result.peak_rss_bytes)}")
    if result.resumed_shards:
        print(f"{result.resumed_shards} of {len(made.shards)} shards were done before")


def _table(header: list[str], rows: list[list[str]], align: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, side in zip(header, align, strict=True):
        table.add_column(name, justify="right" if side == "r" else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 200
    console.print(table)


@contextmanager
def _progress(what: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None] | None]:
    """A bar with bytes, rate and time left, on stderr; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


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


def _say(text: str) -> None:
    print(_clean(text))


def _clean(text: str) -> str:
    """One printable line, whatever names a damaged file holds."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(text.split()))


def _fail(message: str, code: int) -> NoReturn:
    print(f"phasefold: {_clean(message)}", file=sys.stderr)
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
