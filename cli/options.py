"""What the verbs share: arguments that several take, opening a source, sizes, clean ends."""

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
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer

from ..errors import HubError, LoadError, UsageError
from . import draw

if TYPE_CHECKING:
    from ..formats.checkpoint import Checkpoint, Place
    from ..formats.statistics import Statistics
    from ..quantize.extras import Extras
    from ..quantize.plan import Plan

Source = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="A Kimi or GLM checkpoint: a folder, or a repo org/name[@revision]."),
]
RecipeName = Annotated[
    str, typer.Option("--recipe", "-r", help="Name of a recipe that ships, or path of a .toml file.")
]


class MtpChoice(StrEnum):
    """recipes.MTP, for the help text."""

    quantize = "quantize"
    keep = "keep"
    drop = "drop"


Mtp = Annotated[
    MtpChoice | None,
    typer.Option(help="MTP layers: quantized by the rules, kept or dropped; else as the recipe says."),
]
Stats = Annotated[
    str | None,
    typer.Option("--stats", metavar="STATS", help="Folder that `calibrate` left, for recipes that choose codes by it."),
]
FoldFile = Annotated[
    str | None,
    typer.Option(
        "--fold", metavar="FILE", help="What `kv` wrote: its scales go into the weights, exactly. Reads weights."
    ),
]
Unfold = Annotated[
    bool, typer.Option("--unfold", help="Take the folding of a folded artifact out of the weights again.")
]
KvFile = Annotated[
    str | None,
    typer.Option("--kv", metavar="FILE", help="What `kv` wrote: its scales become tensors, where vLLM reads any."),
]
ShardSize = Annotated[str, typer.Option(help="Largest size of an output shard, with a unit: 5GB, 4GiB.")]
Artifact = Annotated[
    str,
    typer.Argument(metavar="ARTIFACT", help="A checkpoint, ours or not: a folder, or a repo org/name[@revision]."),
]
SharedFusion = Annotated[
    bool, typer.Option(help="SGLang may fuse shared experts (it runs without --disable-shared-experts-fusion).")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Window = Annotated[
    str | None,
    typer.Option(help="Disk for shards that are fetched from the Hub, with a unit; 20GB, or what is needed at once."),
]
WindowDir = Annotated[str | None, typer.Option(metavar="DIR", help="Folder for them.")]
Workers = Annotated[int | None, typer.Option(min=1, max=256, help="Threads; as many as there are cores if not given.")]


class Fetching(NamedTuple):
    """For a job that reads weights, which may be on the Hub: the folder that it writes into, or reads; its window."""

    window: str | None
    window_dir: str | None
    out: Path | None = None
    artifact: Path | None = None


def place_of(source: str, fetching: Fetching | None = None, *, sides: bool = False) -> Path | Place:
    """A folder; or a repo of the Hub, where the text names one and no such folder is there. sides: see `open_repo`."""
    from ..hub.api import parse

    if match := re.match(r"(https?|hf)://[^\s]*?([\w.-]+/[\w.-]+?)/*$", source):
        raise UsageError(f"{source}: an address; give a repo as org/name: {match[2]}")
    if (address := parse(source)) is None:
        if fetching and (fetching.window or fetching.window_dir):
            raise UsageError("--window and --window-dir: only for a SOURCE on the Hub; leave them out")
        return Path(source)
    from ..formats.checkpoint import WINDOW
    from ..hub.repo import made_from, open_repo, pinned

    how: dict[str, Any] = {"sides": sides or bool(fetching), "notice": draw.notice}
    if fetching is not None:
        how["window"] = Path(fetching.window_dir) if fetching.window_dir else fetching.out and fetching.out / WINDOW
        how["window_bytes"] = size_of(fetching.window) if fetching.window else None
        if fetching.out is not None:
            how["revision"] = pinned(fetching.out, address)
        elif fetching.artifact is not None:
            how["revision"] = made_from(fetching.artifact, address)
    try:
        return open_repo(address, **how)
    except HubError as error:
        raise HubError(f"{error} (and there is no folder {source})") from None


def open_source(source: str, fetching: Fetching | None = None, *, sides: bool = False) -> Checkpoint:
    from ..formats.checkpoint import open_checkpoint

    return open_checkpoint(place_of(source, fetching, sides=sides))


def open_stats(folder: str | None) -> Statistics | None:
    from ..formats.statistics import open_statistics

    return open_statistics(Path(folder)) if folder is not None else None


def usable_device(name: str) -> str:
    """A device as torch names it. UsageError where this torch cannot use it."""
    from ..calib.model import check_device

    try:
        check_device(name)
    except LoadError as error:
        raise UsageError(str(error)) from None
    return name


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def planned(
    source: str,
    recipe: str,
    mtp: str | None,
    shard_size: str,
    statistics: Statistics | None = None,
    *,
    fold: str | None = None,
    unfold: bool = False,
    kv: str | None = None,
    fetching: Fetching | None = None,
) -> Plan:
    from dataclasses import replace

    from ..quantize.guide import check_statistics
    from ..quantize.plan import make_plan
    from ..recipes import load, names

    if recipe not in names() and recipe.endswith(".toml") and not os.path.exists(recipe):
        raise UsageError(f"no recipe {recipe!r}: there is no such file")
    if recipe not in names() and not recipe.endswith(".toml"):
        raise UsageError(f"no recipe {recipe!r}; there are {', '.join(names())}, or give the path of a .toml file")
    wanted = load(recipe)
    if mtp is not None:
        wanted = replace(wanted, mtp=str(mtp))
    checkpoint = open_source(source, fetching)
    extras = _extras(checkpoint, fold, unfold, kv)
    if statistics:
        extras = replace(extras, statistics=statistics.identity())
    gc.disable()  # a plan is a million small values without a cycle: the collector would double its time
    made = make_plan(checkpoint, wanted, size_of(shard_size), extras)
    gc.freeze()
    gc.enable()
    if statistics:
        check_statistics(made, statistics)
    return made


def _extras(checkpoint: Checkpoint, fold: str | None, unfold: bool, kv: str | None) -> Extras:
    """What a job does about the cache: fold or unfold it, or carry on what the source has, with scales or without."""
    from ..families import identify
    from ..formats.kv_scales import read_kv_scales
    from ..quantize.extras import NO_EXTRAS, Extras
    from ..quantize.fold import carried, check_unfold
    from ..quantize.kv import with_folding, with_kv_scales

    asked = [name for name, value in (("--fold", fold), ("--unfold", unfold), ("--kv", kv)) if value]
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)}: give one of the {'two' if len(asked) == 2 else 'three'}")
    if fold is not None:
        file = Path(fold)
        return with_folding(NO_EXTRAS, file, read_kv_scales(file), checkpoint, identify(checkpoint.config))
    if kv is not None:
        file = Path(kv)
        return with_kv_scales(carried(checkpoint), file, read_kv_scales(file), checkpoint, identify(checkpoint.config))
    return Extras(held=check_unfold(checkpoint)) if unfold else carried(checkpoint)


def tp_limits(made: Plan) -> dict[str, int]:
    """Runtime -> the largest tensor-parallel size at which it can load what the plan will write."""
    from ..serving.rules import largest_tp
    from ..serving.survey import survey_plan

    seen = survey_plan(made)
    return {runtime: largest_tp(seen, runtime) for runtime in ("vllm", "sglang")}


def size_of(text: str) -> int:
    """A size with its unit: GB = 10^9, GiB = 2^30."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?) ?([kKMGT]?)(i?)B", text.strip())
    step = 1024 if match and match[3] else 1000
    value = round(float(match[1]) * step ** " KMGT".index(match[2].upper() or " ")) if match else 0
    if value < 1:
        raise typer.BadParameter(f"{text!r} is no size; write 5GB or 4GiB")
    return value


@contextmanager
def ends_cleanly(sentence: str) -> Iterator[None]:
    """End with one sentence on SIGINT, and on SIGTERM, which batch systems send."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        fail(sentence, 130)
    finally:
        signal.signal(signal.SIGTERM, before)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def fail(message: str, code: int) -> NoReturn:
    print(f"phasefold: {draw.clean(message)}", file=sys.stderr)
    raise SystemExit(code)
