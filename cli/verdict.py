"""What the verbs about serving share: findings told, one exit code for them, options that have no meaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import CheckpointError
from . import draw
from .options import print_json

if TYPE_CHECKING:
    from ..serving.deployment import Finding


def merged(findings: list[Finding]) -> list[Finding]:
    """What both runtimes say in the same words is one finding, of runtime "both"."""
    told: dict[Finding, set[str]] = {}
    for finding in findings:
        told.setdefault(finding._replace(runtime=""), set()).add(finding.runtime)
    return [key._replace(runtime=names.pop() if len(names) == 1 else "both") for key, names in told.items()]


def given(options: Mapping[str, Any]) -> str:
    """Those options that were given, that is, are neither None nor False, in words."""
    names = [name for name, value in options.items() if value is not None and value is not False]
    return " and ".join(names)


@contextmanager
def pointing_to_check(*folders: Path) -> Iterator[None]:
    """Say of a checkpoint that cannot be opened, which names one fault, where all of them are told."""
    try:
        yield
    except CheckpointError as error:
        if all((folder / "config.json").exists() for folder in folders):
            raise CheckpointError(f"{error}; `phasefold check` tells all that is wrong with it") from None
        raise


def told(
    artifact: str, findings: list[Finding], as_json: bool, more: dict[str, Any], *, note: str = "", closing: str = ""
) -> None:
    """Show findings; exit 3 where one of them is more than a warning. note: said below them; closing: after an ok."""
    fatal = [finding for finding in findings if finding.severity != "warning"]
    if as_json:
        print_json({"ok": not fatal, "findings": [finding._asdict() for finding in findings], **more})
    else:
        draw.findings(findings)
        if note:
            print(note)
        warnings = len(findings) - len(fatal)
        also = f", {warnings} warning{'s' if warnings > 1 else ''}" if warnings else ""
        verdict = f"NOT ok, {len(fatal)} finding{'s' if len(fatal) > 1 else ''}" if fatal else "ok"
        draw.say(f"{artifact}: {verdict}{also}")
        if closing and not fatal:
            print(closing)
    if fatal:
        raise typer.Exit(3)
