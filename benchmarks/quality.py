"""What quantization costs the tiny trained checkpoints, on text that they have never seen, with 95 % intervals.

    python benchmarks/quality.py [--section int4] [--tokens 65536] [--llmcompressor PYTHON] [--out FILE.json] [--quick]

int4: RTN, search, activation-weighted search, GPTQ, and llmcompressor's GPTQ on the same calibration tokens, at groups
of 128, 64 and 32. kv: an FP8 cache at scale 1.0, with the manifest's scales, and folded. Text: see docstrings.py.
Differences are paired over the same blocks. KL is mean KL(source || model) in nats a token.
"""

import argparse
import hashlib
import json
import platform
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import docstrings
import int4
import kv
import torch
import transformers
from tokenizers import Tokenizer

import phasefold

EXAMPLES = Path(__file__).parent.parent / "examples"
BASES = ("tiny-kimi", "tiny-glm4", "tiny-glm5")
GROUPS = (128, 64, 32)


def job(section: str, base: str, blocks: list[list[int]], text: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One section on one checkpoint, in a process of its own."""
    torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other
    with tempfile.TemporaryDirectory() as work:
        folder, given = EXAMPLES / base, torch.tensor(blocks)
        if section == "kv":
            return kv.section(folder, given[: options.kv_blocks], text, options.calibration, Path(work))
        return int4.section(folder, given, text, options.calibration, options.groups, options.llmcompressor, Path(work))


def main() -> None:
    """Print the tables; write all numbers to --out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--section", choices=("int4", "kv", "all"), default="all")
    parser.add_argument("--tokens", type=int, default=65536, help="to evaluate on")
    parser.add_argument("--calibration", type=int, default=32768, help="tokens to calibrate with")
    parser.add_argument("--llmcompressor", metavar="PYTHON", help="python of an environment with llmcompressor")
    parser.add_argument("--bases", nargs="+", choices=BASES, default=list(BASES))
    parser.add_argument("--groups", type=int, nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--quick", action="store_true", help="groups of 128, 8192 tokens")
    parser.add_argument("--kv-blocks", type=int, default=96, help="of the blocks that are evaluated on, for kv")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.kv_blocks, options.groups = 8192, 16, [128]
    started = time.time()
    tokenizer = Tokenizer.from_file(str(EXAMPLES / BASES[0] / "tokenizer.json"))  # all three have the same
    blocks = docstrings.evaluation_blocks(tokenizer, options.tokens // docstrings.BLOCK)
    digest = hashlib.sha256(json.dumps(blocks).encode()).hexdigest()
    value: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"phasefold": phasefold.__version__, "torch": torch.__version__,
                     "transformers": transformers.__version__, "python": platform.python_version()},
        "evaluation": {"blocks": len(blocks), "tokens": len(blocks) * docstrings.BLOCK, "digest": digest},
        "calibration": options.calibration,
    }  # fmt: skip
    print(f"{len(blocks)} blocks of {docstrings.BLOCK} tokens, each of another file, digest {digest[:12]}", flush=True)
    if not options.llmcompressor:
        print("llmcompressor is left out: give --llmcompressor PYTHON")
    with tempfile.TemporaryDirectory() as work:
        text = Path(work) / "calibration.jsonl"
        rows = ({"text": "\n\n".join(file.docstrings)} for file in docstrings.calibration())
        text.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
            waiting = {
                (section, base): pool.submit(job, section, base, blocks, text, options)
                for section in (("int4", "kv") if options.section == "all" else (options.section,))
                for base in options.bases
            }
            for (section, base), future in waiting.items():
                found = value.setdefault(section, {})[base] = future.result()
                print(f"\n{section} {found.pop('tables')}", flush=True)
                for claim, holds in found.get("claims", {}).items():
                    print(f"{'holds' if holds else 'DOES NOT HOLD'}: {base}: {claim}", flush=True)
    value["seconds"] = round(time.time() - started)
    print(f"{value['seconds']} seconds")
    if options.out:
        options.out.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    main()
