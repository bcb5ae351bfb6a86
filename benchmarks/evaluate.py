"""How good are the artifacts of the trained examples: FP8, INT4 g128, INT4 g32 and the pair, each against its source.

    python benchmarks/evaluate.py OUT [--limit N] [tiny-kimi ...]

Converts each example, evaluates its artifacts by `phasefold eval` on the two docstring tasks, then an artifact that is
broken on purpose (one expert's scales doubled) and the source against itself, both under the same --require. Artifacts,
results, pages and plots stay in OUT. KV scales come from the standard library's docstrings, which are in the tasks too:
they are powers of two from amax, and hardly depend on which text it is.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from docstrings import standard_library
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

EXAMPLES = Path(__file__).parent.parent / "examples"
FAMILY = {"tiny-kimi": "kimi", "tiny-glm4": "glm", "tiny-glm5": "glm"}
TASKS = "docstring_cloze,docstring_choice"
REQUIRE = "all>=-1.5,mean_kl<=0.01"


def phasefold(*arguments: str) -> tuple[dict, int]:
    """The command line's JSON and exit code; ends with its message where it refused."""
    done = subprocess.run(
        [sys.executable, "-m", "phasefold", *arguments, "--json"], check=False, stdout=subprocess.PIPE
    )
    if done.returncode not in (0, 3):
        raise SystemExit(done.returncode)
    return json.loads(done.stdout), done.returncode


def artifacts(name: str, out: Path) -> dict[str, str]:
    """What is evaluated, by what a table calls it."""
    source, family = str(EXAMPLES / name), FAMILY[name]
    g128 = out / "g128.toml"
    recipe = (EXAMPLES.parent / "recipes" / "glm-decode-int4-g128.toml").read_text()
    g128.write_text(recipe.replace('families = ["glm"]', f'families = ["{family}"]'))
    made = {"FP8": f"{family}-prefill-fp8", "INT4 g128": str(g128), "INT4 g32": f"{family}-decode-int4"}
    found = {}
    for title, chosen in made.items():
        found[title] = str(out / f"{name}-{title.lower().replace(' ', '-')}")
        phasefold("convert", source, found[title], "--recipe", chosen)
    text, stats, scales = out / "text.txt", out / f"{name}-stats", out / f"{name}-kv.json"
    text.write_text(standard_library())
    phasefold("calibrate", source, "--text", str(text), "--out", str(stats), "--tokens", "16384", "--length", "256")
    phasefold("kv", str(stats), "--out", str(scales))
    found["FP8 + INT4 g32, FP8 KV"] = f"{found['FP8']}+{found['INT4 g32']}@{scales}"
    return found


def break_one_expert(folder: Path, out: Path) -> Path:
    """A copy in which one expert of one layer has its INT4 scales doubled. SystemExit unless it was found."""
    shutil.copytree(folder, out)
    doubled = 0
    for shard in out.glob("*.safetensors"):
        tensors = load_file(shard)
        for key in tensors:
            if ".layers.1.mlp.experts.3." in key and key.endswith(".weight_scale"):
                tensors[key] *= 2
                doubled += 1
        save_file(tensors, shard, {"format": "pt"})
    if doubled != 3:
        raise SystemExit(f"{folder}: {doubled} scales of the expert, expected 3")
    return out


def row(table: Table, title: str, record: dict) -> None:
    """One line: each task's score and difference with its interval, then KL."""
    cells = [title]
    for name in (*record["tasks"], "all"):
        task = record["all"] if name == "all" else record["tasks"][name]
        low, high = (100 * end for end in task["ci95"])
        cells.append(f"{100 * task['value']:.1f}  {100 * task['difference']:+.2f} ({low:+.2f} to {high:+.2f})")
    kl = record["proxies"]["mean_kl"]
    cells += [f"{kl['mean']:.5f} +-{1.96 * kl['error']:.5f}", f"{100 * record['top1_agreement']:.1f}"]
    table.add_row(*cells, f"{record['seconds']:.0f}")


def main() -> None:
    """Convert, evaluate, draw; SystemExit where the broken artifact is not caught, or the source is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", default=list(FAMILY))
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    limit = ["--limit", str(options.limit)] if options.limit else []
    wrong = []
    for name in options.names:
        source = str(EXAMPLES / name)
        found = artifacts(name, options.out)
        broken = break_one_expert(Path(found["INT4 g32"]), options.out / f"{name}-broken")
        found |= {"broken: an expert's scales doubled": str(broken)}
        page = ["--report", str(options.out / f"{name}.md"), "--plot", str(options.out / f"{name}.png")]
        asked = ["--tasks", TASKS, "--baseline", source, "--require", REQUIRE, *limit]
        records, _ = phasefold("eval", *found.values(), *asked, *page)
        itself, code = phasefold("eval", source, *asked, "--no-floor", "--out", str(options.out / f"{name}-itself"))
        table = Table(title=f"{name}: score, difference to BF16 in points (95 % interval)")
        for column in ("", *records[0]["tasks"], "all", "mean KL, nats", "same top, %", "seconds"):
            table.add_column(column)
        first = records[0]
        scores = [first["tasks"][task] for task in first["tasks"]] + [first["all"]]
        table.add_row("BF16", *(f"{100 * one['baseline']:.1f}  n = {one['n']}" for one in scores), "", "", "")
        for title, record in zip(found, records, strict=True):
            row(table, title, record)
        row(table, "BF16 against itself", itself)
        Console(width=170).print(table)
        for title, record in zip(found, records, strict=True):
            for one in record["required"]:
                print(f"{title}: {one['text']}: {'held' if one['held'] else 'NOT held'}: {one['reason']}")
        caught = [
            title
            for title, record in zip(found, records, strict=True)
            if not all(r["held"] for r in record["required"])
        ]
        print(f"{name}: caught by {REQUIRE}: {', '.join(caught) or 'nothing'}; the source against itself: exit {code}")
        wrong += [name] if caught != ["broken: an expert's scales doubled"] or code else []
    if wrong:
        raise SystemExit(f"{', '.join(wrong)}: expected the broken artifact, and nothing else, to be caught")


if __name__ == "__main__":
    main()
