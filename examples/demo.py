"""`make demo`: each tiny checkpoint folded into a prefill and a decode artifact, verified, checked, served."""

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
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE)
    if done.returncode not in (0, 3):  # 3: a check did not hold, and the answer says so
        raise SystemExit(done.returncode)
    return json.loads(done.stdout)


def main(out: Path) -> None:
    """Convert, verify and draw; everything lands in `out`, which is made anew."""
    shutil.rmtree(out, ignore_errors=True)
    backend = phasefold("inspect", str(HERE / "tiny-kimi"))["backend"]
    table = Table(title=f"phasefold demo, codec {backend}")
    for column in ("source", "phase", "recipe", "MB", "of BF16", "experts' error", "verified", "loads"):
        table.add_column(column, no_wrap=True)
    for name, family in RECIPES.items():
        source = str(HERE / name)
        size = phasefold("inspect", source)["total_size"]
        table.add_row(name, "", "(BF16)", f"{size / 1e6:.1f}", "100%", "", "", "")
        for phase, recipe in (("prefill", f"{family}-prefill-fp8"), ("decode", f"{family}-decode-int4")):
            target = str(out / f"{name}-{phase}")
            made = phasefold("convert", source, target, "--recipe", recipe)
            checked = phasefold("verify", target, "--source", source)
            error = checked["mean_relative_error"]["routed_expert"]
            written = made["output_bytes"]
            verdict = "ok" if checked["ok"] else "NOT OK"
            # --no-shared-fusion: the plan's notes say that SGLang must be started so for GLM-4.x
            loads = "vLLM, SGLang" if phasefold("check", target, "--no-shared-fusion")["ok"] else "NO"
            share = f"{written / size:.0%}"
            table.add_row("", phase, recipe, f"{written / 1e6:.1f}", share, f"{error:.2%}", verdict, loads)
    pairs = Table(title="FP8 prefill, INT4 decode, served as a pair: agreement with the BF16 source")
    for column in ("source", "same token", "mean KL (nats)", "tokens", "KV bytes a token"):
        pairs.add_column(column)
    for name in RECIPES:
        folders = (str(out / f"{name}-prefill"), str(out / f"{name}-decode"))
        served = phasefold("pair", *folders, "--run", "--source", str(HERE / name))
        against, kept = served["source"], served["kv_bytes_per_token"]["decode"]
        same, kl = f"{against['top1_agreement']:.1%}", f"{against['mean_kl']:.4f}"
        pairs.add_row(name, same, kl, str(served["tokens"]), f"{kept:,}")
    console = Console(width=110)
    console.print(table)
    console.print(pairs)
    print(f"Artifacts are in {out}/; each holds config.json, shards, an index and phasefold.json.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
