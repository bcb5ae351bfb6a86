"""Each pool on its own: what the load rules say of an artifact as it will be started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .deployment import Deployment, Finding
from .kv_layout import PHASES
from .rules import check
from .survey import survey

Folders = tuple[Path, Path]
Pools = tuple[Deployment, Deployment]


def judge(folders: Folders, pools: Pools) -> tuple[list[Finding], Pools]:
    """What the load rules find in either pool, each finding's subject led by its pool, and the pools as judged.

    A pool whose shared experts would be garbage when SGLang fuses them is started unfused, as `launch` starts it.
    """
    findings, settled = [], []
    for phase, folder, at in zip(PHASES, folders, pools, strict=True):
        surveyed = survey(folder)
        found = check(surveyed, [at])
        if at.shared_fusion and any(finding.rule == "S6" for finding in found):
            at = replace(at, shared_fusion=False)
            found = check(surveyed, [at])
        findings += [finding._replace(subject=f"{phase}: {finding.subject}") for finding in found]
        settled.append(at)
    return findings, (settled[0], settled[1])
