"""The verb that says what a checkpoint takes of each GPU, and holds it against budgets for CI."""

from __future__ import annotations

import gc
import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import PlanError, UsageError
from . import draw, draw_size
from .options import Artifact, Json, Stats, open_stats, place_of, planned, print_json, size_of
from .serving import Ep, Server, Tp

if TYPE_CHECKING:
    from ..serving.survey import Survey


class Layout(StrEnum):
    """serving.size.LAYOUTS, for the help text."""

    bf16 = "bf16"
    fp8_e4m3 = "fp8_e4m3"
    fp8_ds_mla = "fp8_ds_mla"


class Count(StrEnum):
    """serving.size.COUNTS, for the help text."""

    runtime = "runtime"
    even = "even"


def size(
    source: Artifact,
    recipe: Annotated[
        str | None, typer.Option("--recipe", "-r", help="Size what this recipe would make of it, without converting.")
    ] = None,
    stats: Stats = None,
    runtime: Annotated[Server, typer.Option(help="Whose way of cutting and of caching.")] = Server.vllm,
    tp: Tp = 1,
    ep: Ep = 1,
    dp: Annotated[
        int, typer.Option(min=1, help="Groups of the GPUs with attention and requests of their own; must divide tp.")
    ] = 1,
    mtp: Annotated[bool, typer.Option("--mtp/--no-mtp", help="The MTP layer is loaded, or not.")] = False,
    count: Annotated[
        Count, typer.Option(help="runtime: what runtimes repeat on each GPU is counted on each; even: total by GPUs.")
    ] = Count.runtime,
    kv_dtype: Annotated[Layout, typer.Option("--kv-dtype", help="How a row of the KV cache lies.")] = Layout.bf16,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory of one GPU, with a unit, e.g. 141GB: counts the tokens that fit.")
    ] = None,
    memory_fraction: Annotated[
        float | None, typer.Option(help="Share of that for weights, cache and reserve; 0.9 if not given.")
    ] = None,
    reserve: Annotated[
        str | None, typer.Option(help="What of that share is for neither weights nor cache; 4GiB if not given.")
    ] = None,
    max_total: Annotated[str | None, typer.Option(help="Budget: all tensors, with a unit, e.g. 421GiB.")] = None,
    max_per_gpu: Annotated[str | None, typer.Option(help="Budget: weights on a GPU, with a unit.")] = None,
    min_kv_tokens: Annotated[str | None, typer.Option(help="Budget: tokens that must fit: 1.1M, 686k.")] = None,
    markdown: Annotated[str | None, typer.Option(metavar="FILE", help="Write the tables as Markdown.")] = None,
    junit: Annotated[str | None, typer.Option(metavar="FILE", help="Write a JUnit test case a budget.")] = None,
    as_json: Json = False,
) -> None:
    """Bytes in all and a GPU, KV bytes a token, tokens that fit. Reads headers only; exits 3 over a budget."""
    from ..serving.deployment import Deployment
    from ..serving.size import Budgets, Gpus, judge_budgets
    from ..serving.size import size as reckon

    if stats is not None and recipe is None:
        raise UsageError("--stats: only with --recipe; leave it out")
    if gpu_memory is None and (memory_fraction is not None or reserve is not None):
        raise UsageError("--memory-fraction and --reserve: only with --gpu-memory; give that of one GPU")
    gpus = Gpus(
        Deployment(str(runtime), tp, ep, mtp=mtp),
        dp,
        str(kv_dtype),
        str(count),
        None if gpu_memory is None else _bytes("--gpu-memory", gpu_memory),
        0.9 if memory_fraction is None else memory_fraction,
        _bytes("--reserve", reserve or "4GiB"),
    )
    budgets = Budgets(
        None if max_total is None else _bytes("--max-total", max_total),
        None if max_per_gpu is None else _bytes("--max-per-gpu", max_per_gpu),
        None if min_kv_tokens is None else _tokens(min_kv_tokens),
    )
    if budgets.kv_tokens is not None and gpus.memory is None:
        raise UsageError("--min-kv-tokens: only with --gpu-memory; give that of one GPU, e.g. 141GB")
    found = reckon(_survey(source, recipe, stats), gpus)
    judged = judge_budgets(found, budgets)
    title = source if recipe is None else f"{source} by {recipe}"
    for file, text in (
        (markdown, draw_size.markdown(title, found, gpus, judged)),
        (junit, draw_size.junit(title, judged)),
    ):
        if file is not None:
            write_text(Path(file), text)
    if as_json:
        print_json(draw_size.keys(found, gpus, judged))
    else:
        draw_size.size(title, found, gpus, judged)
    for budget in judged:
        if not budget.ok:
            print(f"phasefold: {draw.clean(draw_size.reason(budget))}", file=sys.stderr)
    if not all(budget.ok for budget in judged):
        raise typer.Exit(3)


def _survey(source: str, recipe: str | None, stats: str | None) -> Survey:
    from ..serving.survey import survey, survey_plan

    gc.disable()  # a survey is a million small values without a cycle: the collector would double its time
    try:
        if recipe is None:
            return survey(place_of(source))
        return survey_plan(planned(source, recipe, None, "5GB", open_stats(stats)))
    finally:
        gc.enable()


def _bytes(option: str, text: str) -> int:
    try:
        return size_of(text)
    except typer.BadParameter as error:
        raise UsageError(f"{option}: {error.message}") from None


def _tokens(text: str) -> int:
    """A number of tokens: 1100000, 686k, 1.1M."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?) ?([kKM]?)", text.strip())
    value = round(float(match[1]) * {"": 1, "K": 1_000, "M": 1_000_000}[match[2].upper()]) if match else 0
    if value < 1:
        raise UsageError(f"--min-kv-tokens: {text!r} is no number of tokens; write 686k or 1.1M")
    return value


def write_text(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{file}: cannot be written ({error.strerror}); give another place") from None
