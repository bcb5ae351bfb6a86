"""What the pair says against prefill alone and the source, and what the check of page tags costs.

    python benchmarks/pair.py [--blocks 32] [--device cpu] [--steps 100]

Quality: docstrings of the installed standard library in blocks of 256 tokens; the first half is the prompt, the second
is given token by token to the decode engine. KL is mean KL(reference || pair) in nats a token, its standard error is
over blocks. Both engines keep rows of one layout, as both pools of a service do; the references keep BF16 rows. The
first row of each example is the floor: both engines and the reference have the source's weights.

Cost: the time of `PagePool.check` within decode steps, and whole steps with and without tags.
"""

import argparse
import math
import statistics
import tempfile
import time
from pathlib import Path

import torch
from docstrings import standard_library
from tokenizers import Tokenizer

from phasefold.formats.checkpoint import open_checkpoint
from phasefold.quantize.convert import convert
from phasefold.quantize.plan import make_plan
from phasefold.recipes import load
from phasefold.serving.paged.engine import Engine, Request
from phasefold.serving.paged.rows import Scales
from phasefold.serving.paged.weights import Loaded, load_model
from phasefold.serving.pair import Pair, agreement

EXAMPLES = Path(__file__).parent.parent / "examples"
LAYOUTS = (("bf16", False), ("fp8_e4m3", False), ("fp8_e4m3", True), ("fp8_ds_mla", False))
BLOCK, PAGE = 256, 64


def calibrated(loaded: Loaded, prompts: list[list[int]]) -> Scales:
    """A static scale for each layer: the power of two at or above 2 * amax / 448, one for parts that share a row."""
    engine, amax = Engine(loaded, num_pages=BLOCK // PAGE + 2), dict[tuple[int, str], float]()
    for prompt in prompts:
        lease, _ = engine.prefill(prompt, share=False)
        for layer, rows, tensors in zip(
            loaded.cache, engine.storage.layout.layers, engine.storage.tensors, strict=True
        ):
            values = rows[0].decode(tensors[0][lease.pages].flatten(0, 1)[: lease.length], torch.float32)
            for part, value in zip(rows[0].parts, values, strict=True):
                key = layer.layer, part.name
                amax[key] = max(amax.get(key, 0.0), value.abs().max().item())
        engine.pool.release(lease)
    scales: dict[int, dict[str, float]] = {}
    for (layer, part), value in amax.items():
        scales.setdefault(layer, {})[part] = 2.0 ** math.ceil(math.log2(2 * value / 448))
    return {n: dict.fromkeys(of, max(of.values())) if "kv_c" in of else of for n, of in scales.items()}


def row(name: str, requests: list[Request], *references: Engine) -> None:
    """One line of the table: each reference's KL, its standard error over blocks, and the equal argmaxes."""
    line = f"{name:42}"
    for engine in references:
        each = [agreement([request], engine) for request in requests]
        kl = [found.mean_kl for found in each if found.mean_kl is not None]
        top = [found.top1_agreement for found in each if found.top1_agreement is not None]
        line += f"{statistics.mean(kl):10.5f}{statistics.stdev(kl) / len(kl) ** 0.5:9.5f}{statistics.mean(top):8.2%}"
    print(line, flush=True)


def quality(blocks: int, device: str) -> None:
    """The table of agreement."""
    print(f"{'':42}{'prefill':>10}{'+-':>9}{'top-1':>8}{'source':>10}{'+-':>9}{'top-1':>8}")
    for base, family in (("tiny-kimi", "kimi"), ("tiny-glm4", "glm"), ("tiny-glm5", "glm")):
        tokenizer = Tokenizer.from_file(str(EXAMPLES / base / "tokenizer.json"))
        ids = tokenizer.encode(standard_library()).ids[: blocks * BLOCK]
        texts = [ids[at : at + BLOCK] for at in range(0, len(ids), BLOCK)]
        models = {"source": load_model(EXAMPLES / base, device=device)}
        with tempfile.TemporaryDirectory() as work:
            for recipe in (f"{family}-prefill-fp8", f"{family}-decode-int4"):
                convert(make_plan(open_checkpoint(EXAMPLES / base), load(recipe)), Path(work) / recipe)
                models[recipe.split("-")[1]] = load_model(Path(work) / recipe, device=device)
        pages = blocks * (BLOCK // PAGE) + 1
        source, alone = (Engine(models[name], num_pages=pages) for name in ("source", "prefill"))
        scales = calibrated(models["prefill"], [text[: BLOCK // 2] for text in texts])
        for kv, scaled in ((None, False), *LAYOUTS):
            if kv == "fp8_ds_mla" and models["source"].cache[0].parts[0].name != "kv_c":
                continue
            names = ("prefill", "decode") if kv else ("source", "source")
            first, second = (
                Engine(models[name], kv=kv or "bf16", scales=scales if scaled else None, num_pages=pages)
                for name in names
            )
            half = BLOCK // 2
            requests = [Request(text[:half], half, forced=text[half:]) for text in texts]
            Pair(first, second, max_batch=16).run(requests)
            what = f"{base} " + (f"FP8 + INT4, {kv}{' calibrated' if scaled else ''}" if kv else "source twice, bf16")
            row(what, requests, *((alone, source) if kv else (source, source)))


def timed_steps(
    loaded: Loaded, batch: int, length: int, steps: int, *, tracked: bool
) -> tuple[list[float], list[float]]:
    """Seconds of each decode step, and of the check within it."""
    engine = Engine(loaded, num_pages=2 + batch * (length + steps) // PAGE + batch, tracked=tracked)
    whole, part, check = [], [], engine.pool.check

    def watched(leases):
        started = time.perf_counter()
        found = check(leases)  # ends with a comparison on the host: the device is done with it
        part.append(time.perf_counter() - started)
        return found

    requests = []
    for number in range(batch):
        prompt = [(number * 7 + at) % 1000 for at in range(length)]
        request = Request(prompt, steps + 1)
        request.lease, logits = engine.prefill(prompt, share=False)
        request.take(logits[-1])
        requests.append(request)
    engine.pool.check = watched
    while not requests[0].done:
        if engine.device.startswith("cuda"):
            torch.cuda.synchronize()
        started = time.perf_counter()
        engine.decode(requests)
        whole.append(time.perf_counter() - started)
    return whole, part


def cost(steps: int, device: str) -> None:
    """The table of costs."""
    loaded = load_model(EXAMPLES / "tiny-kimi", device=device)
    print(f"\n{'batch':>5}{'tokens':>8}{'pages':>7}{'step ms':>9}{'check us':>10}{'share':>8}{'step ms without':>17}")
    for batch in (1, 8, 32):
        for length in (128, 1024):
            whole, part = timed_steps(loaded, batch, length, steps, tracked=True)
            without, _ = timed_steps(loaded, batch, length, steps, tracked=False)
            step, check = statistics.median(whole), statistics.median(part)
            pages = batch * -(-(length + steps // 2) // PAGE)
            print(
                f"{batch:5}{length:8}{pages:7}{step * 1e3:9.2f}{check * 1e6:10.1f}{check / step:8.2%}"
                f"{statistics.median(without) * 1e3:17.2f}",
                flush=True,
            )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other
    cost(options.steps, options.device)
    quality(options.blocks, options.device)


if __name__ == "__main__":
    main()
