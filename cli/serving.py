"""The verbs that read headers and config: check (static rules), pair, launch; pair --run serves."""

from __future__ import annotations

import gc
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from ..formats.checkpoint import in_folder
from ..hub.api import parse
from . import draw
from .options import Artifact, Json, SharedFusion, ends_cleanly, place_of, usable_device
from .verdict import given, merged, pointing_to_check, told

if TYPE_CHECKING:
    from ..serving.deployment import Deployment, Finding


class Server(StrEnum):
    """A serving runtime."""

    vllm = "vllm"
    sglang = "sglang"


Tp = Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")]
Ep = Annotated[
    int, typer.Option(min=1, help="Expert-parallel size; must divide tp. Equal to it: whole experts a rank.")
]
Sm = Annotated[int, typer.Option(help="Compute capability: 90 for Hopper, 100 for Blackwell.")]
Prefill = Annotated[
    str, typer.Argument(metavar="PREFILL", help="What the prefill pool serves: a folder; for pair also a repo.")
]
Decode = Annotated[
    str, typer.Argument(metavar="DECODE", help="What the decode pool serves: a folder, or for pair a repo.")
]
PoolTp = Annotated[int | None, typer.Option(min=1, help="Where this pool's differs from --tp.")]
PoolEp = Annotated[int | None, typer.Option(min=1, help="Where this pool's differs from --ep.")]
PageSize = Annotated[int | None, typer.Option(min=1, help="KV page (block) size, where you give one.")]
Backend = Annotated[str | None, typer.Option(help="Attention backend, where you give one.")]
UseMtp = Annotated[bool, typer.Option("--mtp", help="Speculative decoding with the MTP layer, in both pools.")]
KvDtype = Annotated[str, typer.Option("--kv-dtype", help="The KV dtype as it will be given to the runtime.")]


def check(
    artifact: Artifact,
    runtime: Annotated[Server | None, typer.Option(help="Only this runtime; else both.")] = None,
    tp: Tp = 1,
    ep: Ep = 1,
    sm: Sm = 90,
    kv_dtype: KvDtype = "auto",
    page_size: PageSize = None,
    attention_backend: Backend = None,
    shared_fusion: SharedFusion = True,
    as_json: Json = False,
) -> None:
    """Will vLLM and SGLang load this, and load it right? Reads headers and config only; exits 3 where not."""
    from ..serving.deployment import Deployment
    from ..serving.rules import CUT, largest_tp
    from ..serving.rules import check as judge
    from ..serving.survey import survey

    names = [str(runtime)] if runtime else ["vllm", "sglang"]
    gc.disable()  # see options.planned
    seen = survey(place_of(artifact))
    plans = [
        Deployment(name, tp, ep, sm, kv_dtype, page_size, attention_backend, shared_fusion=shared_fusion)
        for name in names
    ]
    findings = judge(seen, plans)
    whole = ep == tp > 1
    limits = {name: largest_tp(seen, name, sm, ep=ep, ep_whole=whole) for name in names}
    note = draw.limits(
        limits, "whole on each rank" if whole else f"spread with EP {ep}" if ep > 1 else "cut over the ranks"
    )
    uncut = [finding.rule for finding in findings if finding.rule not in CUT and finding.severity != "warning"]
    if uncut:  # which no other number of ranks mends
        rules = list(dict.fromkeys(uncut))
        note = f"once {' and '.join(rules)} {'is' if len(rules) == 1 else 'are'} mended: {note}"
    told(artifact, findings, as_json, {"largest_tp": limits}, note=note)


def pair(
    prefill: Prefill,
    decode: Decode,
    runtime: Annotated[Server | None, typer.Option(help="Judge for this runtime only; else for both.")] = None,
    tp: Tp = 1,
    prefill_tp: PoolTp = None,
    decode_tp: PoolTp = None,
    ep: Ep = 1,
    prefill_ep: PoolEp = None,
    decode_ep: PoolEp = None,
    sm: Sm = 90,
    kv_dtype: KvDtype = "bfloat16",
    page_size: PageSize = None,
    attention_backend: Backend = None,
    mtp: UseMtp = False,
    run: Annotated[bool, typer.Option("--run", help="Serve prompts through both, on this machine.")] = False,
    source: Annotated[str | None, typer.Option(help="With --run: compare with this checkpoint as well.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="With --run: a prompt; may be given several times.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="With --run: tokens to generate for each prompt; 32 if not given.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="With --run: where, as torch names it; cpu if not given.")] = None,
    kv: Annotated[
        str | None, typer.Option(metavar="FILE", help="What `kv` wrote: --run stores fp8_e4m3 rows at its scales.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Do two artifacts belong together as the pools of one service? With --run they are served as a pair."""
    from ..serving.belong import belong
    from ..serving.judge import judge
    from ..serving.kv_given import held_scales, judge_scales, scales_for

    run_only = {"--source": source, "--prompt": prompt, "--tokens": tokens, "--device": device}
    if not run and (useless := given(run_only)):
        raise UsageError(f"{useless}: only for pair --run; add --run, or leave it out")
    layout = _rows_of(kv_dtype) if run else ""
    if "" in (prompt or []):
        raise UsageError("--prompt '': is empty; give some text, or leave it out")
    if kv is not None and layout not in ("", "fp8_e4m3"):
        raise UsageError(f"--kv: {layout} rows are stored at no such scale; add --kv-dtype fp8_e4m3, or leave it out")
    place = usable_device(device) if device is not None else "cpu"
    gc.disable()  # see options.planned
    names = [str(runtime)] if runtime else ["vllm", "sglang"]
    if run and (repo := next((text for text in (prefill, decode) if parse(text)), None)):
        raise UsageError(f"{repo}: --run needs the weights at hand; first `phasefold pull {repo} DIR`")
    places = place_of(prefill), place_of(decode)
    folders = in_folder(places[0]).folder, in_folder(places[1]).folder
    findings: list[Finding] = []
    judged: list[Deployment] = []
    with pointing_to_check(*folders):
        if tokens is not None:
            _check_tokens(folders[0], tokens)
        made, scales = scales_for(places, Path(kv)) if kv is not None else (None, None)
        for name in names:
            pools = _pools(
                name, tp, prefill_tp, decode_tp, ep, prefill_ep, decode_ep, sm, kv_dtype, page_size, attention_backend,
                mtp,
            )  # fmt: skip
            judged.append(pools[1])
            if run:  # D2 says of both pools what K5 says of each
                findings += [finding for finding in judge(folders, pools)[0] if finding.rule != "K5"]
            findings += belong(*places, *pools)
            if made is not None:
                findings += judge_scales(places, pools, Path(str(kv)), made)
    findings = merged(findings)
    more: dict[str, Any] = {}
    stops = [finding for finding in findings if finding.severity != "warning"]
    if run and stops:
        blamed = {finding.runtime for finding in stops}
        hints = [f"; --runtime {name} is served" for name in names if not {name, "both"} & blamed]
        print(draw.clean(f"not served: {draw.finding(stops[0])}{''.join(hints)}"), file=sys.stderr)
    elif run:
        from ..serving.pair import serve

        gc.enable()
        asked = prompt or list(PROMPTS)
        layout, differing = _simulated(folders[1], judged)
        if differing:
            print(differing, file=sys.stderr)
        if layout != "fp8_e4m3":  # rows with scales of their own, where plain ones were asked for: D4 says so
            scales = None
        taken_from = "file" if scales is not None else "artifact"
        if scales is None and layout == "fp8_e4m3":  # as vLLM does; that both hold the same, D4 has seen to
            scales = held_scales(folders[0])
        with ends_cleanly("interrupted"):
            more = serve(
                *folders, asked, tokens=tokens or 32, kv=layout, source=Path(source) if source else None,
                page_size=page_size or 64, device=place, scales=scales,
            )  # fmt: skip
        more["kv_scales"] = None if scales is None else taken_from
        if not as_json:
            draw.served(more, asked)
    closing = "" if run else "whether each of them loads is for `check` and `load` to say"
    told(f"{prefill} + {decode}", findings, as_json, more, closing=closing)


#: what `pair --run` is asked where no prompt is given: the trained examples know such text
PROMPTS = ("Return the number of", "Create a new file", "If the argument is", "Raise an error when")


def _rows_of(asked: str) -> str:
    """The reference runtime's layout for a KV dtype as the runtimes spell it."""
    from ..serving.deployment import kv_dtype

    found = {"auto": "bf16", "bfloat16": "bf16", "fp8": "fp8_e4m3"}.get(name := kv_dtype(asked), name)
    if found == "fp8_e5m2":
        raise UsageError(
            "kv dtype fp8_e5m2: the reference runtime has no such rows; give bfloat16, fp8_e4m3 or fp8_ds_mla"
        )
    return found


def _check_tokens(folder: Path, tokens: int) -> None:
    """UsageError where the model has no positions for so many, whatever the prompt."""
    from ..families import identify
    from ..formats.checkpoint import open_checkpoint

    most = identify(open_checkpoint(folder).config).text.get("max_position_embeddings")
    if isinstance(most, int) and tokens >= most:
        raise UsageError(
            f"--tokens {tokens:,}: this model has {most:,} positions (max_position_embeddings) for prompt and "
            "continuation; ask for fewer"
        )


def _simulated(folder: Path, pools: list[Deployment]) -> tuple[str, str]:
    """The form of the rows that `--run` keeps, and a sentence where two runtimes' are not alike.

    pools: the decode pool of each runtime; its rows are prefill's too, or D2 had stopped it. The first one's are taken.
    """
    from ..families import identify
    from ..formats.checkpoint import open_checkpoint
    from ..serving.kv_layout import kv_layout

    model = identify(open_checkpoint(folder).config)
    first, *others = [(at.runtime, kv_layout(model, at, "decode")) for at in pools]
    told = f"KV rows: as {draw.RUNTIMES[first[0]]}'s {first[1].backend} writes them ({first[1].row})"
    differing = [
        f"{told}; {draw.RUNTIMES[name]}'s {layout.backend} writes {layout.row}, simulated with --runtime {name}"
        for name, layout in others
        if layout.form != first[1].form
    ]
    return first[1].form, "".join(differing)


def launch(
    prefill: Prefill,
    decode: Decode,
    runtime: Annotated[Server, typer.Option(help="Which runtime serves the pools.")],
    tp: Tp = 1,
    prefill_tp: PoolTp = None,
    decode_tp: PoolTp = None,
    ep: Ep = 1,
    prefill_ep: PoolEp = None,
    decode_ep: PoolEp = None,
    sm: Sm = 90,
    kv_dtype: KvDtype = "auto",
    page_size: PageSize = None,
    attention_backend: Backend = None,
    mtp: UseMtp = False,
    mount: Annotated[str, typer.Option(help="Path under which each pool sees its artifact.")] = "/model",
    transfer: Annotated[str, typer.Option(help="What moves the KV cache: nixl or mooncake.")] = "nixl",
    prefill_host: Annotated[str, typer.Option(help="Address of the prefill pool, as others reach it.")] = "127.0.0.1",
    decode_host: Annotated[str, typer.Option(help="Address of the decode pool, as others reach it.")] = "127.0.0.1",
    served_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest text, in tokens.")] = None,
    as_json: Json = False,
) -> None:
    """The exact commands for both pools, and why each flag; refused (exit 3) where a rule finds something wrong."""
    from ..serving.launch import Where
    from ..serving.launch import launch as commands

    gc.disable()  # see options.planned
    pools = _pools(
        str(runtime),
        tp,
        prefill_tp,
        decode_tp,
        ep,
        prefill_ep,
        decode_ep,
        sm,
        kv_dtype,
        page_size,
        attention_backend,
        mtp,
    )
    where = Where(
        mount=mount, transfer=transfer, prefill_host=prefill_host, decode_host=decode_host,
        served_name=served_name, max_model_len=max_model_len,
    )  # fmt: skip
    with pointing_to_check(Path(prefill), Path(decode)):
        made = commands(Path(prefill), Path(decode), *pools, where)
    notes = [note._asdict() for note in made.notes]
    if not as_json:
        draw.launch(made)
    keys = {"prefill": made.prefill, "decode": made.decode, "router": made.router, "notes": notes}
    told(f"{prefill} + {decode}", made.findings, as_json, keys)


def _pools(
    runtime: str,
    tp: int,
    prefill_tp: int | None,
    decode_tp: int | None,
    ep: int,
    prefill_ep: int | None,
    decode_ep: int | None,
    sm: int,
    kv_dtype: str,
    page_size: int | None,
    attention_backend: str | None,
    mtp: bool,
) -> tuple[Deployment, Deployment]:
    from ..serving.deployment import Deployment

    first, second = (
        Deployment(runtime, ranks, experts, sm, kv_dtype, page_size, attention_backend, mtp=mtp)
        for ranks, experts in ((prefill_tp or tp, prefill_ep or ep), (decode_tp or tp, decode_ep or ep))
    )
    return first, second
