"""`make demo`: each tiny checkpoint folded into a prefill and a decode artifact, verified, and shown in one table."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
RECIPES = {"tiny-kimi": "kimi", "tiny-glm4": "glm", "tiny-glm5": "glm"}


def phasefold(*arguments: str) -> dict:
    """Run the command line as a user would and read its JSON."""
    command = [sys.executable, "-m", "phasefold", *arguments, "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def main(out: Path) -> None:
    """Convert, verify and draw; everything lands in `out`, which is made anew."""
    shutil.rmtree(out, ignore_errors=True)
    backend = phasefold("inspect", str(HERE / "tiny-kimi"))["backend"]
    table = Table(title=f"phasefold demo, codec {backend}")
    for column in ("source", "phase", "recipe", "MB", "of BF16", "experts' error", "verified"):
        table.add_column(column, no_wrap=True)
    for name, family in RECIPES.items():
        source = str(HERE / name)
        size = phasefold("inspect", source)["total_size"]
        table.add_row(name, "", "(BF16)", f"{size / 1e6:.1f}", "100%", "", "")
        for phase, recipe in (("prefill", f"{family}-prefill-fp8"), ("decode", f"{family}-decode-int4")):
            target = str(out / f"{name}-{phase}")
            made = phasefold("convert", source, target, "--recipe", recipe)
            checked = phasefold("verify", target, "--source", source)
            error = checked["mean_relative_error"]["routed_expert"]
            written = made["output_bytes"]
            verdict = "ok" if checked["ok"] else "NOT OK"
            table.add_row("", phase, recipe, f"{written / 1e6:.1f}", f"{written / size:.0%}", f"{error:.2%}", verdict)
    Console(width=100).print(table)
    print(f"Artifacts are in {out}/; each holds config.json, shards, an index and phasefold.json.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
