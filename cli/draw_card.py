"""What a pushed card says besides the artifact itself: how it is served alone, and what its evaluations found."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from . import draw

if TYPE_CHECKING:
    from ..serving.survey import Survey

_NODE = 8  # GPUs of a machine: no command for more


def launch(seen: Survey, sides: Iterable[str], repo: str, branch: str) -> str:
    """Markdown with a command for each runtime that loads an artifact, at the largest TP of one machine.

    sides: the files beside its weights.
    """
    from ..serving.deployment import Deployment
    from ..serving.rules import check, largest_tp

    code = ["--trust-remote-code"] if any(name.endswith(".py") for name in sides) else []
    revision = ["--revision", branch] if branch != "main" else []
    commands, said = [], []
    for runtime, start in (
        ("vllm", ["vllm", "serve", repo, "--tensor-parallel-size"]),
        ("sglang", ["python", "-m", "sglang.launch_server", "--model-path", repo, "--tp-size"]),
    ):
        limit = largest_tp(seen, runtime)
        tp = min(limit, _NODE)
        if not tp:
            said.append(f"{draw.RUNTIMES[runtime]} does not load it; `phasefold check` says why.")
            continue
        fused = any(finding.rule == "S6" for finding in check(seen, [Deployment(runtime, tp)]))
        command = [*start, str(tp), *revision, *(["--disable-shared-experts-fusion"] * fused), *code]
        commands.append(shlex.join(command))
        said.append(f"{draw.RUNTIMES[runtime]} loads it up to TP{limit} (experts cut over the ranks).")
    if code:
        said.append("The checkpoint's own .py files are run: read them before you trust them.")
    said.append("How many GPUs it takes depends on their memory: `phasefold size` counts it.")
    blocks = "```\n" + "\n".join(commands) + "\n```\n\n" if commands else ""
    return blocks + " ".join(said)


def evaluation(artifact: Path) -> str | None:
    """The table of the latest run of `eval` that the artifact keeps; None where it keeps none."""
    from ..evals.record import read_records
    from ..evals.report import model_card_table

    records = [record for _, record in read_records(artifact) if record["tasks"]]
    return model_card_table(records[-1]) if records else None
