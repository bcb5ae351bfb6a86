"""The INT4 section of quality.py: each method and group size on one tiny checkpoint, beside llmcompressor's GPTQ.

Only routed experts are quantized. All models are decoded to float32 (code * scale, without a further rounding) and run
by transformers in float32, so that what differs is the weights and nothing else.

Weight error of a matrix: |W' - W| / |W|, Frobenius. Output error: |X (W' - W)^T| / |X W^T|, X being the inputs that
the source's expert gets on the evaluation text; it follows from X^T X alone. Intervals of both are over matrices, all
others over blocks of text.
"""

import json
import math
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from docstrings import BLOCK
from intervals import interval, paired, table

from phasefold.calib import model as calib
from phasefold.calib.run import Job, Options, calibrate
from phasefold.calib.text import load_tokenizer, read_text
from phasefold.families import identify
from phasefold.formats.checkpoint import open_checkpoint
from phasefold.formats.statistics import Statistics, open_statistics
from phasefold.quantize.convert import convert
from phasefold.quantize.extras import NO_EXTRAS, Extras
from phasefold.quantize.plan import make_plan
from phasefold.quantize.summary import methods
from phasefold.recipes import Recipe, Rule, load
from phasefold.serving.paged.weights import load_model

KINDS = ("gate/up", "down")
BATCH = 1  # blocks in one forward pass: more were slower
#: ours: name -> how its codes are chosen
METHODS = {
    "RTN": {"method": "rtn"},
    "search": {"method": "search"},
    "imatrix": {"method": "search", "objective": "imatrix"},
    "GPTQ": {"method": "gptq", "objective": "imatrix"},
}
CALIBRATED = ("imatrix", "GPTQ")
PEERS = {
    "llmcompressor": [],
    "llmcompressor, tuned": ["--routed", "--observer", "memoryless_mse"],
}
PAIRS = (
    ("search", "RTN"), ("imatrix", "search"), ("GPTQ", "search"), ("GPTQ", "imatrix"),
    ("GPTQ", "llmcompressor"), ("GPTQ", "llmcompressor, tuned"),
)  # fmt: skip

Matrices = dict[tuple[int, int, str], torch.Tensor]  # layer, expert, "gate", "up" or "down"


class Measured(NamedTuple):
    """One model beside its source.

    nll, kl, top1: one value a block, means over its tokens. weight, output: kind -> one relative error a matrix.
    """

    nll: list[float]
    kl: list[float]
    top1: list[float]
    weight: dict[str, list[float]]
    output: dict[str, list[float]]


def recipe(group: int, **chosen: str) -> Recipe:
    """Routed experts INT4, everything else as it is."""
    rule = Rule(("routed_expert",), f"int4-g{group}", **chosen)
    return Recipe(f"experts-g{group}", "decode", ("kimi", "glm"), "", (rule,))


def experts_of(model: Any) -> dict[int, Any]:
    """Layer -> its module of routed experts, gate and up stacked in one parameter, down in another."""
    layers = enumerate(model.model.layers)
    return {number: layer.mlp.experts for number, layer in layers if hasattr(layer.mlp, "experts")}


def matrices(model: Any) -> Matrices:
    """Every routed expert's matrices, [out, in]."""
    found: Matrices = {}
    for layer, experts in experts_of(model).items():
        for number, (fused, down) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
            gate, up = fused.detach().chunk(2)
            kinds = {"gate": gate, "up": up, "down": down.detach()}
            found |= {(layer, number, kind): value for kind, value in kinds.items()}
    return found


class Moments:
    """X^T X of every matrix's inputs, float64, gathered by hooks while the source runs."""

    def __init__(self, model: Any) -> None:
        self.found: Matrices = {}
        self.hooks = []
        for layer, experts in experts_of(model).items():
            self.hooks.append(experts.register_forward_pre_hook(self._hook(layer)))

    def _hook(self, layer: int) -> Any:
        def take(experts: Any, args: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
            hidden, chosen, _ = args
            for number, (fused, _) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
                x = hidden[(chosen == number).any(-1)]
                gate, up = torch.nn.functional.linear(x, fused).chunk(2, -1)
                inner = torch.nn.functional.silu(gate) * up
                for kind, values in (("gate", x), ("up", x), ("down", inner)):
                    moment = (values.T @ values).double()
                    key = layer, number, kind
                    self.found[key] = self.found[key] + moment if key in self.found else moment

        return take

    def remove(self) -> None:
        """Let the model go."""
        for hook in self.hooks:
            hook.remove()


def log_probs(model: Any, blocks: torch.Tensor) -> torch.Tensor:
    """int64 [blocks, tokens] -> float32 [blocks, tokens, vocabulary]."""
    with torch.inference_mode():
        return torch.cat([model(batch, use_cache=False).logits.log_softmax(-1) for batch in blocks.split(BATCH)])


class Source:
    """The BF16 checkpoint on the evaluation text: what all others are compared with."""

    def __init__(self, folder: Path, blocks: torch.Tensor) -> None:
        model = load_model(folder, dtype=torch.float32).model
        moments = Moments(model)
        self.blocks, self.log_probs = blocks, log_probs(model, blocks)
        moments.remove()
        self.moments, self.matrices = moments.found, {key: w.double() for key, w in matrices(model).items()}

    def nll(self, log_probs: torch.Tensor) -> list[float]:
        """Mean negative log-likelihood of each block's next tokens."""
        return (-log_probs[:, :-1].gather(-1, self.blocks[:, 1:, None]).mean((1, 2))).tolist()

    def measure(self, folder: Path) -> Measured:
        """Another checkpoint of the same model, in any format."""
        model = load_model(folder, dtype=torch.float32).model
        weight: dict[str, list[float]] = {kind: [] for kind in KINDS}
        output: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for key, w in matrices(model).items():
            kind = "down" if key[2] == "down" else "gate/up"
            original, moment = self.matrices[key], self.moments[key]
            error = w.double() - original
            weight[kind].append((error.norm() / original.norm()).item())
            if not moment.any():
                continue  # no token of the evaluation text reached this expert: it has no output error
            ours, whole = ((m @ moment * m).sum().item() for m in (error, original))
            output[kind].append(math.sqrt(ours / whole))
        found = log_probs(model, self.blocks)
        kl = torch.cat(
            [
                torch.nn.functional.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1)
                for ours, theirs in zip(found.split(BATCH), self.log_probs.split(BATCH), strict=True)
            ]
        )
        same = (found.argmax(-1) == self.log_probs.argmax(-1)).double()
        return Measured(self.nll(found), kl.mean(1).tolist(), same.mean(1).tolist(), weight, output)


def run_peer(python: str, source: Path, blocks: Path, out: Path, group: int, options: Sequence[str]) -> None:
    """llmcompressor in its own environment. SystemExit with what it said where it fails."""
    script = Path(__file__).parent / "llmcompressor_gptq.py"
    # -P: this folder has a kernels.py, which transformers would take for a package of that name
    command = [python, "-P", script, source, blocks, out, "--group", str(group), *options]
    done = subprocess.run([str(word) for word in command], check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"llmcompressor failed on {source.name}: {done.stderr.strip()[-600:]}")


def calibrated(source: Path, text: Path, tokens: int, out: Path) -> tuple[Statistics, list[list[int]]]:
    """Statistics of the source with Hessians of its routed experts, as `phasefold calibrate` makes them; the blocks."""
    opened = calib.Source(open_checkpoint(source))
    read = read_text(text, load_tokenizer(source), opened.config.vocab_size, BLOCK, tokens)
    calibrate(Job(opened, read, Options(hessians=("routed_expert",))), out)
    return open_statistics(out), read.blocks.tolist()


def make(source: Path, method: str, group: int, out: Path, statistics: Statistics) -> dict[str, int]:
    """One of our methods; -> how many matrices were chosen how, fallbacks included."""
    used = statistics if method in CALIBRATED else None
    extras = Extras(statistics=used.identity()) if used else NO_EXTRAS
    plan = make_plan(open_checkpoint(source), recipe(group, **METHODS[method]), extras=extras)
    return methods(plan, convert(plan, out, statistics=used).manifest.units).get("routed_expert", {})


def as_json(found: Measured) -> dict[str, Any]:
    """Means and intervals."""
    value: dict[str, Any] = {key: interval(getattr(found, key)).to_json() for key in ("nll", "kl", "top1")}
    value["perplexity"] = {key: math.exp(bound) for key, bound in value["nll"].items()}
    for key in ("weight", "output"):
        value[key] = {kind: interval(errors).to_json() for kind, errors in getattr(found, key).items()}
    return value


def row(group: str, name: str, found: Measured, source_nll: list[float]) -> list[str]:
    """One line of the table of methods."""
    kl, top1, change = interval(found.kl), interval(found.top1), paired(found.nll, source_nll)
    errors = [interval(each[kind]).text(2, 100) for each in (found.weight, found.output) for kind in KINDS]
    perplexity = f"{math.exp(interval(found.nll).mean):.3f}"
    return [group, name, *errors, perplexity, change.text(2, 100), kl.text(3, 1e3), top1.text(2, 100)]


HEAD = (
    "", "method", *(f"weight % {kind}" for kind in KINDS), *(f"output % {kind}" for kind in KINDS),
    "perplexity", "change, %", "KL, 1e-3 nats", "top-1 %",
)  # fmt: skip
PAIRED_HEAD = ("", "paired", "KL, 1e-3 nats", "of it", "", "output % gate/up", "output % down", "ln perplexity, 1e-3")


def differences(group: int, found: dict[str, Measured]) -> tuple[list[list[str]], dict[str, Any]]:
    """Lines and JSON of the paired differences of one group size."""
    rows, value = [], {}
    for ours, theirs in PAIRS:
        if ours not in found or theirs not in found:
            continue
        a, b = found[ours], found[theirs]
        kl, nll = paired(a.kl, b.kl), paired(a.nll, b.nll)
        output = {kind: paired(a.output[kind], b.output[kind]) for kind in KINDS}
        share = kl.mean / (sum(b.kl) / len(b.kl))
        name = f"{ours} - {theirs}"
        errors = [output[kind].text(2, 100) for kind in KINDS]
        rows.append([f"g{group}", name, kl.text(3, 1e3), f"{share:+.1%}", kl.verdict, *errors, nll.text(2, 1e3)])
        value[name] = {
            "kl": kl.to_json(), "verdict": kl.verdict, "share": share, "nll": nll.to_json(),
            "output": {kind: each.to_json() for kind, each in output.items()},
        }  # fmt: skip
    return rows, value


def claims(pairs: dict[str, Any]) -> dict[str, bool]:
    """What should hold at groups of 128, and whether it does; `pairs` as `differences` leaves them.

    "below 0": the whole interval of the difference is. "not above 0": the whole interval is not.
    """
    wanted = {
        "search - RTN": "below 0",
        "imatrix - search": "not above 0",
        "GPTQ - search": "below 0",
        "GPTQ - imatrix": "below 0",
        "GPTQ - llmcompressor": "not above 0",
        "GPTQ - llmcompressor, tuned": "not above 0",
    }
    found = {pair: pairs[pair]["verdict"] for pair in wanted if pair in pairs}
    return {
        f"{pair} {wanted[pair]}": verdict == "below" or (wanted[pair] == "not above 0" and verdict != "above")
        for pair, verdict in found.items()
    }


def section(folder: Path, blocks: torch.Tensor, text: Path, tokens: int, groups: Sequence[int], python: str | None,
            work: Path) -> dict[str, Any]:  # fmt: skip
    """All methods on one checkpoint; -> JSON, with the tables as text under "tables".

    blocks: to evaluate on. text, tokens: to calibrate with. python: of the environment with llmcompressor, if any.
    """
    statistics, calibration = calibrated(folder, text, tokens, work / "statistics")
    (work / "blocks.json").write_text(json.dumps(calibration))
    source = Source(folder, blocks)
    source_nll = source.nll(source.log_probs)
    nll = interval(source_nll)
    value: dict[str, Any] = {"source_nll": nll.to_json(), "statistics": statistics.identity(), "methods": {}}
    name = f"{identify(open_checkpoint(folder).config).family}-prefill-fp8"
    convert(make_plan(open_checkpoint(folder), load(name)), work / name)
    fp8 = source.measure(work / name)
    value["methods"][name] = as_json(fp8)
    rows, pairs = [row("", name, fp8, source_nll)], []
    for group in groups:
        found: dict[str, Measured] = {}
        for number, name in enumerate([*METHODS, *(PEERS if python else ())]):
            out = work / f"g{group}-{number}"
            chosen = None
            if name in METHODS:
                chosen = make(folder, name, group, out, statistics)
            elif python:
                run_peer(python, folder, work / "blocks.json", out, group, PEERS[name])
            found[name] = source.measure(out)
            value["methods"][f"g{group} {name}"] = as_json(found[name]) | ({"matrices": chosen} if chosen else {})
            rows.append(row(f"g{group}", name, found[name], source_nll))
            kl = interval(found[name].kl).text(3, 1e3)
            print(f"{folder.name} g{group} {name}: KL {kl} {chosen or ''}", flush=True)
        lines, value.setdefault("paired", {})[f"g{group}"] = differences(group, found)
        pairs += lines
    if 128 in groups:
        value["claims"] = claims(value["paired"]["g128"])
    perplexity, low, high = (math.exp(bound) for bound in nll)
    head = f"{folder.name}: perplexity of the source {perplexity:.3f} [{low:.3f}, {high:.3f}]"
    value["tables"] = "\n".join([head, table(HEAD, rows), "", table(PAIRED_HEAD, pairs), ""])
    return value
