"""The verb `convert`: a whole job by this process or by tasks of Ray, one part of it, or its end."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from . import draw
from .hub import stream, tell_pushed, upload_for
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
    open_stats,
    planned,
    print_json,
    size_of,
    tp_limits,
)

if TYPE_CHECKING:
    from ..formats.statistics import Statistics
    from ..quantize.convert import Result
    from ..quantize.parts import PartResult
    from ..quantize.plan import Plan
    from ..quantize.workers import Executor


class ExecutorChoice(StrEnum):
    """Who writes the shards, for the help text."""

    threads = "threads"
    ray = "ray"


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
    part: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Only the I-th of N parts of the job, beside others; --finish ends it."),
    ] = None,
    finish: Annotated[bool, typer.Option("--finish", help="End a job whose parts are all done.")] = False,
    executor: Annotated[
        ExecutorChoice,
        typer.Option(help="ray: shards are tasks of a Ray cluster over shared folders; --workers: CPUs of a task."),
    ] = ExecutorChoice.threads,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The Ray cluster; if not given, the one that Ray finds, or one of this machine for this job.",
        ),
    ] = None,
    push_to: Annotated[
        str | None,
        typer.Option(
            metavar="REPO",
            help="Send finished shards to a repo, org/name[@branch], while later ones are made; OUT keeps none.",
        ),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push-to: a repo that is made is public.")] = False,
    tag: Annotated[str | None, typer.Option(metavar="NAME", help="With --push-to: tag for the last commit.")] = None,
    replace_all: Annotated[
        bool, typer.Option("--replace", help="With --push-to: all else that the branch holds goes.")
    ] = False,
    window: Window = None,
    window_dir: WindowDir = None,
    as_json: Json = False,
) -> None:
    """Carry a conversion out. Given again after an interruption, the same command goes on where it stopped."""
    from ..quantize.cards import open_cards
    from ..quantize.convert import convert as carry_out
    from ..quantize.device import choose
    from ..quantize.parts import PartResult, convert_part, finish_parts, parse, shards_of
    from ..quantize.summary import part_keys, result_keys

    by_ray = executor is ExecutorChoice.ray
    _check_use(part, finish, by_ray, address, device, device_memory, workers, window or window_dir)
    upload = upload_for(push_to, public, tag, replace_all, alone=not (part or finish or by_ray))
    fetching = Fetching(window, window_dir, out=Path(out))
    mine = parse(part) if part is not None else None
    memory, threads = size_of(device_memory or "4GB"), workers or cores()
    devices = choose("cpu" if by_ray or finish else device)
    with ends_cleanly("interrupted; finished shards are kept, give the same command again to go on"):
        statistics = open_stats(stats)
        made = planned(source, recipe, mtp, shard_size, statistics, fold=fold, unfold=unfold, kv=kv, fetching=fetching)
        limits = tp_limits(made)
        if finish:
            result, before = finish_parts(made, Path(out))
            if not as_json and not before:  # in words, shards of parts count as made now
                result = replace(result, resumed_shards=0)
            _tell(result, out, result_keys(result) | {"notes": list(made.notes), "largest_tp": limits}, as_json)
            return
        cards, place = open_cards(devices, made, memory, threads, or_cpu=device == "auto" and not by_ray)
        shards = _executor(address, workers, statistics) if by_ray else None
        if not as_json:
            whom = f"{draw.many(len(cards.lanes) if cards else threads, 'worker')} on {place}"
            _announce(made, source, out, f", part {mine}" if mine else "", "tasks of Ray" if by_ray else whom)
            for note in (*made.notes, draw.limits(limits), *draw.gptq(made), *(cards.notes if cards else ())):
                draw.say(f"note: {note}")
            sys.stdout.flush()
        total = sum(shard.source_bytes for shard in (shards_of(made, mine) if mine else made.shards))
        how: dict[str, Any] = {"workers": threads, "statistics": statistics, "notice": draw.notice, "cards": cards}
        with cards or nullcontext(), draw.progress("converting", total, quiet=as_json) as advance:
            done: Result | PartResult
            pushed = None
            if upload:
                done, pushed = stream(made, Path(out), upload, progress=advance, **how)
            elif mine:
                done = convert_part(made, Path(out), mine, progress=advance, **how)
            else:
                done = carry_out(made, Path(out), progress=advance, executor=shards, **how)
    keys = part_keys(done) if isinstance(done, PartResult) else result_keys(done)
    notes = [*made.notes, *(cards.notes if cards else ())]
    if pushed:
        keys["push"] = pushed._asdict()
    _tell(done, out, keys | {"notes": notes, "device": "cpu" if by_ray else place, "largest_tp": limits}, as_json)
    if pushed and not as_json:
        tell_pushed(out, pushed)
    if cards and cards.redone and not as_json:
        draw.say(f"note: the CPU converted {draw.many(cards.redone, 'row block')} of extreme weights: docs/kernels.md")


def _check_use(
    part: str | None,
    finish: bool,
    by_ray: bool,
    address: str | None,
    device: str,
    device_memory: str | None,
    workers: int | None,
    window: str | None,
) -> None:
    """UsageError for options that mean nothing together."""
    if part is not None and finish:
        raise UsageError("--part and --finish: give one of the two; --finish once all parts are done")
    if by_ray and (part is not None or finish):
        raise UsageError(f"--executor ray: converts the whole job; leave out {'--finish' if finish else '--part'}")
    if by_ray and device not in ("auto", "cpu"):
        raise UsageError(f"--executor ray: its tasks run on CPUs; leave out --device {device}, or use --part")
    if address is not None and not by_ray:
        raise UsageError("--address: of a Ray cluster; add --executor ray, or leave it out")
    if finish:
        given = {"--workers": workers is not None, "--device": device != "auto", "--device-memory": device_memory}
        given["--window and --window-dir"] = window
        if unused := [name for name, there in given.items() if there]:
            raise UsageError(f"--finish: converts nothing; leave out {unused[0]}")
    if device_memory is not None and (device == "cpu" or by_ray):
        raise UsageError(f"--device-memory: only with a card; leave it out{'' if by_ray else ', or --device cpu'}")


def _executor(address: str | None, workers: int | None, statistics: Statistics | None) -> Executor:
    from ..quantize.ray_tasks import RayTasks

    return RayTasks(address, workers, cores(), statistics, draw.notice)


def _announce(made: Plan, source: str, out: str, which: str, whom: str) -> None:
    sizes = f"{draw.size(made.checkpoint.total_size)} -> {draw.size(made.output_bytes)}"
    draw.say(f"{source} -> {out}: {sizes}, {draw.many(len(made.shards), 'shard')}{which}, {whom}")


def _tell(done: Result | PartResult, out: str, keys: dict[str, Any], as_json: bool) -> None:
    """What was done, as one JSON object or in words."""
    from ..quantize.parts import PartResult

    if as_json:
        print_json(keys)
    elif isinstance(done, PartResult):
        _part(done, out)
    else:
        draw.result(done, out)


def _part(done: PartResult, out: str) -> None:
    """What a part has done, and what is left of the job."""
    if done.finished:
        draw.say(f"{out}: was complete already, nothing to do")
        return
    of_job = f"of the {draw.many(len(done.plan.shards), 'shard')} of the job"
    if not done.shards_done:
        draw.say(f"{out}: part {done.part} has no shard to make: there are more parts than shards")
    else:
        before = f", {done.resumed_shards} of them before" if done.resumed_shards else ""
        took = f"{done.wall_seconds:.1f} s, codec {done.backend}, peak memory {draw.size(done.peak_rss_bytes)}"
        draw.say(f"{out}: part {done.part} is done, {draw.many(done.shards_done, 'shard')}{before}, in {took}")
    if done.shards_missing:
        draw.say(f"{done.shards_missing} {of_job} are missing")
    else:
        draw.say("no shard is missing: the same command with --finish instead of --part ends the job")
