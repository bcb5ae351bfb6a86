"""The verbs about calibration: forward passes over text, and what follows from their statistics."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from ..hub.api import parse
from . import draw
from .options import Json, Source, ends_cleanly, open_source, print_json, size_of, usable_device

if TYPE_CHECKING:
    from ..calib.model import Source as Opened


class Dtype(StrEnum):
    """In which the forward pass runs."""

    bfloat16 = "bfloat16"
    float32 = "float32"


def calibrate(
    source: Source,
    text: Annotated[str, typer.Option(help="A .txt, .jsonl or .json file, or a folder of those.")],
    out: Annotated[str, typer.Option(metavar="STATS", help="Folder to write the statistics into.")],
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens of the text to take at most.")] = 262_144,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence; 2048, or the model's maximum, if not given.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences in a pass; about 2048 tokens' worth if not given.")
    ] = None,
    memory: Annotated[
        str, typer.Option(help="Beyond this a layer's experts are read one by one, and hidden states go to disk.")
    ] = "16GB",
    dtype: Annotated[Dtype, typer.Option(help="In which the forward pass runs.")] = Dtype.bfloat16,
    device: Annotated[str, typer.Option(help="As torch names it; auto: a GPU if there is one, else the CPU.")] = "auto",
    hessians: Annotated[
        str,
        typer.Option(
            help="Roles, with commas between, whose Hessians are kept for GPTQ: 4 x in x in bytes a matrix on the "
            "disk (an expert of GLM-5: 168 MB, a layer of them: 43 GB)."
        ),
    ] = "",
    all_experts: Annotated[
        bool, typer.Option("--all-experts", help="Every token counts for every expert; the output stays as routed.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the tokenizer that the checkpoint brings as code.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run text through a model layer by layer; keep what its matrices, experts and caches see.

    Given again after an interruption, the same command goes on at the layer where it stopped.
    """
    for cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        # of torch's CPU kernels, which keep up to 0.5 MB for each number of rows that they meet, 1024 of them: and
        # experts meet every number. Read once, when torch is first used.
        os.environ.setdefault(cache, "16")
    with ends_cleanly("interrupted; finished layers are kept, give the same command again to go on"):
        limit = size_of(memory)
        if address := parse(source):
            raise UsageError(f"{source}: statistics need the weights at hand; first `phasefold pull {address} DIR`")
        checkpoint = open_source(source)
        from ..calib.model import Source as Opened
        from ..calib.run import Job, Options
        from ..calib.run import calibrate as carry_out
        from ..calib.summary import summary
        from ..calib.text import load_tokenizer, read_text
        from ..formats.statistics import open_statistics
        from ..quantize.convert import peak_rss

        opened = Opened(checkpoint)
        place = usable_device(_device(device))
        blocks = _length(opened, length)
        roles = _roles(opened, hessians)
        tokenizer = load_tokenizer(checkpoint.folder, trust_remote_code=trust_remote_code)
        taken = read_text(Path(text), tokenizer, opened.config.vocab_size, blocks, tokens)
        options = Options(str(dtype), place, batch or max(1, 2048 // blocks), limit, all_experts, roles)
        job = Job(opened, taken, options)
        if roles and job.training == job.tokens:
            raise UsageError(
                f"--hessians {hessians}: of {job.sequences} sequences none is held out, the first would be the eighth, "
                "and without one GPTQ is never chosen; give more text or --tokens, or a shorter --length"
            )
        if not as_json:
            _begin(source, out, job)
        begun, layers = time.monotonic(), len(opened.layers)
        with draw.passes("calibrating", layers, job.tokens, quiet=as_json) as advance:
            done = carry_out(job, Path(out), advance)
        took = time.monotonic() - begun
    found = open_statistics(Path(out))
    told = summary(found) | {
        "heldout_tokens": job.tokens - job.training,
        "sequences": job.sequences,
        "length": job.length,
        "left_over_tokens": taken.left_over,
        "empty_documents": taken.empty,
        "files_used": dict(taken.taken),
        "files_unused": list(taken.unused),
        "files_passed_over": list(taken.passed),
        "layers_one_by_one": done.one_by_one,
        "resumed_layers": done.resumed,
        "digest": found.digest,
        "wall_seconds": round(took, 3),
        "peak_rss_bytes": peak_rss(),
    }
    if as_json:
        print_json(told)
    else:
        _end(out, told, layers)


def kv(
    stats: Annotated[str, typer.Argument(metavar="STATS", help="Folder that `calibrate` left.")],
    out: Annotated[str, typer.Option(metavar="FILE", help="File to write, kv_scales.json say.")],
    headroom: Annotated[
        float,
        typer.Option(min=1, max=64, help="How many times the largest value seen a scale has room for; it is free."),
    ] = 2.0,
    as_json: Json = False,
) -> None:
    """The KV-scale manifest: what scale each layer's FP8 cache needs, and which runtime may be given it."""
    from ..calib.kv import kv_scales
    from ..formats.statistics import STATISTICS, open_statistics
    from ..quantize.output import atomic_write, writing

    if Path(out).is_dir():
        raise UsageError(f"--out {out}: is a folder; give the name of a file, {Path(out) / 'kv_scales.json'} say")
    found = open_statistics(Path(stats))
    if Path(out).exists() and any(
        Path(out).samefile(found.folder / name) for name in (STATISTICS, *found.files.values())
    ):
        raise UsageError(f"--out {out}: is part of the statistics; give another name, kv_scales.json say")
    made = kv_scales(found, headroom)
    with writing(Path(out)):
        atomic_write(Path(out), made.to_bytes())
    if as_json:
        print_json(made.to_json())
    else:
        draw.kv(made)
        draw.say(f"{out}: scales of {len(made.layers):,} layers, {made.tokens:,} tokens, headroom {made.headroom:g}")


def _device(name: str) -> str:
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _length(source: Opened, wanted: int | None) -> int:
    most = int(source.config.max_position_embeddings)
    if wanted is not None and wanted > most:
        raise UsageError(f"--length {wanted:,}: this model's longest sequence is {most:,} (max_position_embeddings)")
    return wanted or min(2048, most)


def _roles(source: Opened, wanted: str) -> tuple[str, ...]:
    """The roles of --hessians; UsageError where the model has no matrix of one."""
    known = sorted({item.spec.role for layer in source.layers for item in layer if item.spec.linear})
    roles = tuple(sorted({role.strip() for role in wanted.split(",") if role.strip()}))
    for role in roles:
        if role not in known:
            raise UsageError(f"--hessians {role}: this model has no matrices of that role; it has {', '.join(known)}")
    return roles


def _some(names: Sequence[str]) -> str:
    """A number of files, and the first of their names."""
    return f"{draw.many(len(names), 'file')} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"


def _begin(source: str, out: str, job: Any) -> None:
    """What will be run, and what it takes."""
    text, options = job.text, job.options
    left = [f"{draw.many(text.left_over, 'token')} behind the last whole sequence left out"] if text.left_over else []
    left += [f"{draw.many(text.empty, 'empty document')} passed over"] if text.empty else []
    if text.unused:
        left.append(f"nothing used of {_some(text.unused)}: without text, or their turn came too late for --tokens")
    if text.passed:
        left.append(f"passed over {_some(text.passed)}: only .txt, .jsonl and .json files of text are read")
    draw.say(
        f"{source} -> {out}: {job.tokens:,} tokens in {job.sequences:,} sequences of {job.length:,}, of "
        f"{draw.many(text.documents, 'document')} in {draw.many(text.files, 'file')}; "
        f"{job.tokens - job.training:,} of them are held out"
    )
    if text.files > 1:
        shares = [f"{name} {many:,}" for name, many in text.taken.items()]
        draw.say(f"tokens of files: {', '.join(shares[:5])}{', ...' if len(shares) > 5 else ''}")
    for note in left:
        draw.say(f"note: {note}")
    apart = job.whole.count(False)
    ways = f"{apart} of {len(job.whole)} layers expert by expert" if apart else "each layer whole"
    draw.say(f"{options.dtype} on {options.device}, {ways}, needs {draw.size(job.disk)} of disk at most")


def _end(out: str, told: dict[str, Any], layers: int) -> None:
    """What was found."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for layer in told["kv"]:
        for name, part in layer["parts"].items():
            parts.setdefault(name, []).append(part)
    rows = []
    for name, found in parts.items():
        most = [f"{max(part[key] for part in found):.4g}" for key in ("amax", "p99_99", "p99_9")]
        rows.append([name, str(len(found)), *most, f"{min(part['amax'] for part in found):.4g}"])
    draw.table(["cache", "layers", "amax", "p99.99", "p99.9", "least amax"], rows, "lrrrrr")
    seen = told["experts_seen"]
    print(
        f"tokens of an expert: {seen['min']:,} to {seen['max']:,}, median {seen['median']:,.0f}; {seen['unseen']:,} "
        "got none"
    )
    before = f", {told['resumed_layers']} of {layers} layers were done before" if told["resumed_layers"] else ""
    took = f"{told['wall_seconds']:.1f} s, peak memory {draw.size(told['peak_rss_bytes'])}"
    draw.say(f"{out}: {told['tokens']:,} tokens, {layers} layers in {took}{before}")
