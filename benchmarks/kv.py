"""The FP8 KV cache section of quality.py: scale 1.0, the manifest's scales, and folded into the weights at 1.0.

A block is computed as one prompt over the pages of the reference runtime, so every token attends to rows that were
rounded as they are stored. All arithmetic beside the rows is float32, and the reference is the source with BF16 rows.

Each is measured on the checkpoint as it is, and on copies whose cached parts are small, made by folding (exactly, and
then called a source of its own): all parts to an amax of about 0.02; and, for latent attention, kv_c alone, whose row
shares its scale with a k_pe that is not small.
"""

import math
from pathlib import Path
from typing import Any

import torch
from int4 import calibrated
from intervals import interval, paired, table

from phasefold.calib.kv import kv_scales
from phasefold.families import identify
from phasefold.formats.checkpoint import MANIFEST, open_checkpoint
from phasefold.formats.kv_scales import KVScales
from phasefold.quantize.convert import convert
from phasefold.quantize.extras import NO_EXTRAS, Extras
from phasefold.quantize.fold import settled
from phasefold.quantize.kv import with_folding
from phasefold.quantize.plan import make_plan
from phasefold.recipes import load
from phasefold.serving.paged.engine import Engine
from phasefold.serving.paged.rows import Scales
from phasefold.serving.paged.weights import load_model

SMALL = 0.02
PAGE = 64
HEAD = ("checkpoint", "cache", "KL, 1e-3 nats", "top-1 %")
PAIRED_HEAD = ("checkpoint", "paired", "KL, 1e-3 nats", "", "times as large")


def fold(source: Path, folding: Extras, out: Path) -> Path:
    """A copy of a checkpoint with powers of two moved into its weights. SystemExit where one finds no room."""
    if folding.lowered:
        raise SystemExit(f"{source.name}: the fold does not fit: {folding.lowered}")
    convert(make_plan(open_checkpoint(source), load("keep"), extras=folding), out)
    return out


def logits(folder: Path, blocks: torch.Tensor, kv: str, scales: Scales | None = None) -> torch.Tensor:
    """float32 log-probabilities [blocks, tokens, vocabulary], each block computed over rows of this layout."""
    loaded = load_model(folder, dtype=torch.float32)
    engine = Engine(loaded, kv=kv, scales=scales, num_pages=blocks.shape[1] // PAGE + 2)
    found = []
    for block in blocks.tolist():
        lease, values = engine.prefill(block, share=False)
        engine.pool.release(lease)
        found.append(values.log_softmax(-1))
    return torch.stack(found)


def compare(reference: torch.Tensor, found: torch.Tensor) -> tuple[list[float], list[float]]:
    """KL and top-1 agreement of each block."""
    kl = torch.nn.functional.kl_div(found, reference, log_target=True, reduction="none").sum(-1)
    return kl.mean(1).tolist(), (found.argmax(-1) == reference.argmax(-1)).double().mean(1).tolist()


def section(folder: Path, blocks: torch.Tensor, text: Path, tokens: int, work: Path) -> dict[str, Any]:
    """All caches on one checkpoint and its copies; -> JSON, with the tables as text under "tables"."""
    reference = logits(folder, blocks, "bf16")
    statistics = calibrated(folder, text, tokens, work / "statistics")[0]
    manifest = kv_scales(statistics)
    amax = {layer.layer: {name: part.amax for name, part in layer.parts.items()} for layer in manifest.layers}
    small = {n: {name: round(math.log2(SMALL / value)) for name, value in of.items()} for n, of in amax.items()}
    copies = {"as it is": {}, f"amax {SMALL}": small}
    if "kv_c" in amax[0]:
        copies[f"kv_c {SMALL}"] = {number: {"kv_c": of["kv_c"]} for number, of in small.items()}
    value: dict[str, Any] = {"amax": amax, "tokens": tokens}
    rows, pairs = [], []
    for number, (name, wanted) in enumerate(copies.items()):
        source = folder
        if wanted:
            source = fold(folder, settled(open_checkpoint(folder), wanted), work / f"copy-{number}")
            (source / MANIFEST).unlink()  # nobody knows that it was folded
            manifest = kv_scales(calibrated(source, text, tokens, work / f"statistics-{number}")[0])
        found = caches(source, manifest, blocks, reference, work / f"folded-{number}")
        value[name] = {}
        for cache, (kl, top1) in found.items():
            print(f"{folder.name} {name}, {cache}: KL {interval(kl).text(4, 1e3)}", flush=True)
            rows.append([name, cache, interval(kl).text(4, 1e3), interval(top1).text(2, 100)])
            value[name][cache] = {"kl": interval(kl).to_json(), "top1": interval(top1).to_json()}
        for ours, theirs in (("manifest", "scale 1.0"), ("folded", "scale 1.0"), ("folded", "manifest")):
            a, b = found[ours][0], found[theirs][0]
            difference, ratio = paired(a, b), sum(b) / sum(a)
            pairs.append([name, f"{ours} - {theirs}", difference.text(4, 1e3), difference.verdict, f"{ratio:.2f}"])
            value[name][f"{ours} - {theirs}"] = {
                "kl": difference.to_json(), "verdict": difference.verdict, "ratio": ratio,
                "times_5": paired([5 * x for x in a], b).to_json(),
            }  # fmt: skip
    value["claims"] = claims(value[f"amax {SMALL}"], [value[name] for name in copies])
    value["tables"] = "\n".join([folder.name, table(HEAD, rows), "", table(PAIRED_HEAD, pairs), ""])
    return value


def claims(small: dict[str, Any], every: list[dict[str, Any]]) -> dict[str, bool]:
    """What should hold, and whether it does. small: of the copy with small parts; every: of all checkpoints."""
    gains = [small[f"{cache} - scale 1.0"]["times_5"]["high"] for cache in ("manifest", "folded")]
    worse = [each[f"{cache} - scale 1.0"]["verdict"] for each in every for cache in ("manifest", "folded")]
    return {
        "manifest and folded not told apart, all parts scaled alike": small["folded - manifest"]["verdict"]
        == every[0]["folded - manifest"]["verdict"]
        == "not told apart",
        "neither worse than scale 1.0 anywhere": "above" not in worse,
        f"scale 1.0 five times as bad at amax {SMALL}": max(gains) < 0,
    }


def caches(
    source: Path, manifest: KVScales, blocks: torch.Tensor, reference: torch.Tensor, out: Path
) -> dict[str, tuple[list[float], list[float]]]:
    """KL and top-1 agreement of each block, for each way to keep the cache."""
    checkpoint = open_checkpoint(source)
    model = identify(checkpoint.config)
    folded = fold(source, with_folding(NO_EXTRAS, source, manifest, checkpoint, model), out)
    found = {
        "bf16": logits(source, blocks, "bf16"),
        "scale 1.0": logits(source, blocks, "fp8_e4m3"),
        "manifest": logits(source, blocks, "fp8_e4m3", manifest.row_scales()),
        "folded": logits(folded, blocks, "fp8_e4m3"),
    }
    if "kv_c" in manifest.layers[0].parts:
        found["fp8_ds_mla"] = logits(source, blocks, "fp8_ds_mla")
    return {name: compare(reference, values) for name, values in found.items()}
