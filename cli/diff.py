"""The verb that shows what changed between two checkpoints, for review and for CI."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError
from ..hub.api import parse
from . import draw, draw_diff
from .options import Fetching, Json, Window, WindowDir, ends_cleanly, open_source, print_json
from .size import write_text


def diff(
    before: Annotated[
        str,
        typer.Argument(metavar="BEFORE", help="A checkpoint: a folder, or a repo org/name[@revision]."),
    ],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="Another one, e.g. a later revision.")],
    weights: Annotated[
        bool, typer.Option("--weights", help="Read and compare the tensors that both store alike; else headers only.")
    ] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit 3 where anything differs.")] = False,
    window: Window = None,
    window_dir: WindowDir = None,
    markdown: Annotated[str | None, typer.Option(metavar="FILE", help="Write the tables as Markdown.")] = None,
    as_json: Json = False,
) -> None:
    """What changed from BEFORE to AFTER: tensors, formats, bytes, config.json, side files, manifests."""
    from ..serving.diff import diff as compare
    from ..serving.diff_weights import alike

    gc.disable()  # headers are a million small values without a cycle: the collector would double their time
    fetching = Fetching(window, window_dir) if any(map(parse, (before, after))) else None
    if (window or window_dir) and not (weights and fetching):
        raise UsageError("--window and --window-dir: only with --weights of a repo on the Hub; leave them out")
    old, new = (open_source(one, fetching if parse(one) else None, sides=True) for one in (before, after))
    gc.freeze()
    if weights:
        total = sum(stored.nbytes for _, stored in alike(old, new))
        with (
            ends_cleanly("interrupted; give the same command again"),
            draw.progress("compare", total, quiet=as_json) as advance,
        ):
            found = compare(old, new, weights=True, advance=advance)
    else:
        found = compare(old, new)
    gc.enable()
    if markdown is not None:
        write_text(Path(markdown), draw_diff.markdown(before, after, found))
    if as_json:
        print_json(draw_diff.keys(before, after, found))
    else:
        draw_diff.diff(before, after, found)
    if exit_code and found.differs:
        raise typer.Exit(3)
