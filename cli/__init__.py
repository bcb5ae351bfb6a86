"""The command line: reads arguments, calls one function, draws. Nothing imports it; only it knows typer and rich.

Exit codes: 0 done; 1 refused or failed, one line says why; 2 wrong usage; 3 a check did not hold; 130 interrupted;
141 stdout was closed by its reader.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .. import __version__
from ..errors import PhasefoldError, UsageError
from .artifacts import inspect, plan, recipes, verify
from .calibration import calibrate, kv
from .convert import convert
from .diff import diff
from .evals import evaluate
from .hub import pull, push
from .load import load
from .options import fail
from .serving import check, launch, pair
from .size import size

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    """One Kimi or GLM checkpoint in, the right weights for each phase of serving out."""
    if version:
        print(__version__)
        raise typer.Exit


for verb in (inspect, recipes, plan, size, diff, convert, verify, calibrate, kv, check, load, pair, launch, push, pull):
    app.command()(verb)
app.command("eval")(evaluate)


def main() -> None:
    """Entry point: known errors are one line on stderr."""
    try:
        app(standalone_mode=True)
    except PhasefoldError as error:
        fail(str(error), 2 if isinstance(error, UsageError) else 1)
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(141) from None
