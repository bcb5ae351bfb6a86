"""The verb eval: is an artifact, or a pair, as good as what it came from; and what earlier runs said."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import PhasefoldError, UsageError
from . import draw, draw_evals
from .options import Json, ends_cleanly, print_json, size_of, usable_device

if TYPE_CHECKING:
    from ..evals.require import Requirement
    from ..evals.settings import Settings
    from ..evals.target import Target


class Dtype(StrEnum):
    """In which the forward pass runs."""

    bfloat16 = "bfloat16"
    float32 = "float32"


class Way(StrEnum):
    """How a checkpoint is run."""

    auto = "auto"
    memory = "memory"
    layers = "layers"


def evaluate(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET...",
            help="Folder of a checkpoint or artifact; PREFILL+DECODE[@kv_scales.json or @LAYOUT], a pair as it is "
            "served; or the address of an OpenAI-compatible server (http://host:8000/v1). Several share a baseline.",
        ),
    ],
    tasks: Annotated[
        str, typer.Option(help="Tasks of lm-eval, ours or of --include, with commas between: names, groups, files.")
    ] = "",
    baseline: Annotated[
        str | None, typer.Option("--baseline", "-b", help="What it is compared with: anything that TARGET may be.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take no more questions of a task.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples before each question.")] = None,
    chat_template: Annotated[
        bool, typer.Option("--chat-template", help="Put questions as chat messages, by the model's own template.")
    ] = False,
    system_instruction: Annotated[str | None, typer.Option(help="System message, with --chat-template.")] = None,
    include: Annotated[
        list[str] | None, typer.Option(metavar="DIR", help="Folder of tasks of your own; may be repeated.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens that a text may have, if less than the model takes.")
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, help="Sample each answer so often; scores are averaged by question.")
    ] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling; repeats take the ones after it.")] = 0,
    gen_kwargs: Annotated[
        str, typer.Option(metavar="KEY=VALUE,...", help="How answers are made: temperature=0.6,top_p=0.95,...")
    ] = "",
    metadata: Annotated[
        str, typer.Option(metavar="JSON", help="What tasks take: '{\"needle_lengths\": [4096]}'.")
    ] = "",
    margin: Annotated[
        float | None, typer.Option(help="Points that a task may lose, for a verdict. Set it before you look.")
    ] = None,
    require: Annotated[
        str, typer.Option(metavar="LIST", help='Exit 3 unless all of it holds: "mmlu>=-0.3,mean_kl<=0.04".')
    ] = "",
    proof: Annotated[
        bool, typer.Option("--proof", help="What is required must hold for the whole 95 % interval.")
    ] = False,
    floor: Annotated[
        bool, typer.Option("--floor/--no-floor", help="Run the baseline twice, to see what is noise.")
    ] = True,
    text: Annotated[
        str | None, typer.Option(metavar="FILE", help="Text to compare distributions on, instead of the tasks' own.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens whose distributions are compared, at most.")] = 8192,
    tool_calls: Annotated[
        str | None, typer.Option(metavar="FILE", help="Requests with tools, one JSON object a line (as K2VV has them).")
    ] = None,
    answers: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Answers to them in place of the baseline's: ours, or K2VV's."),
    ] = None,
    answers_out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write TARGET's answers to them, one a line.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="In which the forward pass runs.")] = Dtype.bfloat16,
    batch: Annotated[int, typer.Option(min=1, help="Texts in a pass.")] = 8,
    memory: Annotated[str, typer.Option(help="A checkpoint that is larger, decoded, runs layer by layer.")] = "16GB",
    way: Annotated[Way, typer.Option(help="How a checkpoint runs: in memory, or layer by layer.")] = Way.auto,
    device: Annotated[str, typer.Option(help="As torch names it.")] = "cpu",
    work: Annotated[str | None, typer.Option(metavar="DIR", help="Folder for what does not fit the memory.")] = None,
    served_model: Annotated[str | None, typer.Option(help="The model's name on a server, if it has several.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder of a served model's tokenizer, for log-likelihoods.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask a server's chat endpoint (generation only).")] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests to a server at a time.")] = 8,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a server has for a request.")] = 600.0,
    key_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Holds a server's API key; else OPENAI_API_KEY does.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the tokenizer that the checkpoint brings as code.")
    ] = False,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder whose evals/ keeps the result, if not TARGET's own.")
    ] = None,
    report: Annotated[str | None, typer.Option(metavar="FILE", help="Write a page of it, Markdown.")] = None,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw it, PNG (phasefold[plot]).")] = None,
    history: Annotated[
        bool, typer.Option("--history", help="Show the runs that TARGET's evals/ holds; nothing is run.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Score it on tasks, paired with a baseline, with intervals; keep it in evals/; exit 3 where --require fails."""
    from ..evals.target import parse_target

    given = [parse_target(text) for text in targets]
    homes = [Path(out) if out else one.home for one in given]
    if None in homes:
        name = given[homes.index(None)].text
        raise UsageError(f"{name}: a server has no folder to keep results in; give --out DIR")
    folders = [home for home in homes if home is not None]
    if history:
        if tasks or baseline or require or report or text or tool_calls:
            raise UsageError("--history shows earlier runs and runs nothing; besides it --out, --plot and --json count")
        _history(given, folders, plot, as_json)
        return
    from ..evals.drawing import check_drawing
    from ..evals.require import parse
    from ..evals.settings import Settings

    requirements = parse(require) if require else []
    if proof and not require:
        raise UsageError("--proof: says how --require is to hold; give that as well")
    if margin is not None and not margin > 0:
        raise UsageError(f"--margin {margin:g}: it says how many points may be lost, and must be above zero")
    settings = Settings(
        tasks=tuple(name.strip() for name in tasks.split(",") if name.strip()),
        include=tuple(Path(folder) for folder in include or ()),
        limit=limit, num_fewshot=num_fewshot, chat_template=chat_template, system_instruction=system_instruction,
        max_length=max_length, repeats=repeats, seed=seed, gen_kwargs=_pairs(gen_kwargs), metadata=_object(metadata),
        margin=margin / 100 if margin is not None else None, floor=floor,
        text=Path(text) if text else None, tokens=tokens, requests=Path(tool_calls) if tool_calls else None,
        answers=Path(answers) if answers else None, answers_out=Path(answers_out) if answers_out else None,
        dtype=str(dtype), batch=batch, memory=size_of(memory), device=usable_device(device), way=str(way),
        work=Path(work) if work else None, trust_remote_code=trust_remote_code, served_model=served_model,
        tokenizer=Path(tokenizer) if tokenizer else None, chat=chat, concurrency=concurrency, timeout=timeout,
        key_file=Path(key_file) if key_file else None,
    )  # fmt: skip
    if plot:
        check_drawing(Path(plot))
    for file in (report, plot):
        if file and not Path(file).resolve().parent.is_dir():
            raise UsageError(f"{file}: the folder that it is to lie in is not there")
    before = parse_target(baseline) if baseline else None
    records, wrong = _run(given, before, settings, requirements, folders, proof=proof, quiet=as_json)
    if as_json:
        print_json(records[0] if len(records) == 1 else records)
    else:
        if len(records) > 1:
            draw_evals.overview(records)
        for record in records:
            draw_evals.record(record)
    failed = [(record, one) for record in records for one in record["required"] if not one["held"]]
    for record, one in failed:
        sentence = f"{record['target']['text']}: required {one['text']}: {one['reason']}"
        print(draw.clean(f"phasefold: {sentence}"), file=sys.stderr)
    if wrong:
        raise wrong
    _write(records, report, plot)
    if failed:
        raise typer.Exit(3)


def _run(
    targets: list[Target],
    baseline: Target | None,
    settings: Settings,
    requirements: list[Requirement],
    folders: list[Path],
    *,
    proof: bool,
    quiet: bool,
) -> tuple[list[dict[str, Any]], PhasefoldError | None]:
    """Each target's record is judged and kept as soon as it is there: what comes after it may fail.

    And the first error in that, to be raised when all has been shown: hours of work are not lost to a full disk, nor to
    a requirement that the run has no figure for.
    """
    from ..evals.evaluate import evaluate as carry_out
    from ..evals.record import make_ready, write_record

    records: list[dict[str, Any]] = []
    wrong: PhasefoldError | None = None
    command = shlex.join(["phasefold", *sys.argv[1:]])
    with ends_cleanly("interrupted; targets that were done are kept in evals/"):
        with draw_evals.progress(quiet=quiet) as advance:

            def ready(names: Mapping[str, Sequence[str]]) -> None:
                _check(requirements, names, settings, baseline)
                for folder in folders:
                    make_ready(folder)

            found = carry_out(targets, baseline, settings, advance, ready)
            for folder, record in zip(folders, found, strict=True):
                record["command"] = command
                records.append(record)
                for step in (partial(_judge, requirements, record, proof=proof), partial(write_record, folder, record)):
                    try:
                        step()
                    except PhasefoldError as error:
                        wrong = wrong or error
    return records, wrong


def _judge(requirements: list[Requirement], record: dict[str, Any], *, proof: bool) -> None:
    from ..evals.require import judge

    record["required"] = judge(requirements, record, proof=proof)


def _check(
    requirements: list[Requirement], names: Mapping[str, Sequence[str]], settings: Settings, baseline: Target | None
) -> None:
    """Names that are required and that the run will not have."""
    from ..evals.require import check_names

    check_names(
        requirements, names, baseline=baseline is not None, proxies=baseline is not None and not baseline.url,
        tool_calls=settings.requests is not None,
    )  # fmt: skip


def _write(records: list[dict[str, Any]], report: str | None, plot: str | None) -> None:
    """A page of all of them, and a plot of each: of several they are numbered, plot-1.png and so on."""
    from ..evals.plot import plot_record
    from ..evals.report import markdown, overview
    from ..quantize.output import atomic_write, writing

    pages = [overview(records)] if report and len(records) > 1 else []
    for number, record in enumerate(records, 1):
        shown = Path(plot) if plot else None
        if shown and len(records) > 1:
            shown = shown.with_stem(f"{shown.stem}-{number}")
        if shown:
            plot_record(record, shown)
        if report:
            near, last = _beside(shown, Path(report)) if shown else None, number == len(records)
            pages.append(markdown(record, plot=near, closing=last))
    if report:
        with writing(Path(report).parent):
            atomic_write(Path(report), "\n".join(pages).encode())


def _beside(picture: Path, page: Path) -> str:
    """How a page names a picture: by its name alone where they lie together, and are sent together."""
    return picture.name if picture.resolve().parent == page.resolve().parent else str(picture.resolve())


def _history(targets: list[Target], folders: list[Path], plot: str | None, as_json: bool) -> None:
    from ..evals.history import history
    from ..evals.plot_history import plot_history
    from ..evals.record import read_records

    if plot and len(folders) > 1:
        raise UsageError(f"--plot {plot}: is of one history; give one TARGET")
    told = []
    for target, folder in zip(targets, folders, strict=True):
        # a pair's results lie beside those of its decode artifact
        kind = "server" if target.url else "pair" if target.is_pair else "checkpoint"
        records = [record for _, record in read_records(folder) if record["target"]["kind"] == kind]
        if plot:
            plot_history(records, Path(plot))
        told.append(history(records))
        if not as_json:
            draw_evals.history(told[-1])
    if as_json:
        print_json(told[0] if len(told) == 1 else told)


def _pairs(text: str) -> dict[str, Any]:
    """key=value pairs with commas between; numbers, true and false are what they look like."""
    found: dict[str, Any] = {}
    for part in (part.strip() for part in text.split(",") if part.strip()):
        name, equals, value = part.partition("=")
        if not equals or not name:
            raise UsageError(f"--gen-kwargs: {part!r} is no KEY=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _object(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--metadata: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise UsageError(f"--metadata: expected a JSON object, found {type(value).__name__}")
    return value
