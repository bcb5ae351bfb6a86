"""What the command line draws: tables, progress, one-line sentences. The only file that knows rich."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..formats.kv_scales import KVScales
    from ..quantize.convert import Result
    from ..quantize.plan import Plan
    from ..serving.deployment import Finding
    from ..serving.launch import Launch
    from ..serving.runtimes.load import Loaded


def size(nbytes: float) -> str:
    """Bytes with a decimal unit."""
    for unit, width in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= width:
            return f"{nbytes / width:.2f} {unit}"
    return f"{nbytes:.0f} B"


def binary(nbytes: float) -> str:
    """Bytes with a unit of 1024s: GiB, or what is small in that in a smaller one."""
    unit, width = next(((u, w) for u, w in (("GiB", 2**30), ("MiB", 2**20)) if nbytes >= w), ("KiB", 2**10))
    return f"{nbytes / width:,.2f} {unit}"


def many(count: int, noun: str) -> str:
    """A number of things."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def plan(made: Plan, tp: Mapping[str, int]) -> None:
    """What a conversion would write. tp: runtime -> largest tensor-parallel size."""
    from ..quantize.summary import transitions

    before, after = made.checkpoint.total_size, made.output_bytes
    say(f"{made.checkpoint.label}: {made.family} ({made.architecture})")
    share = f"{after / before:.0%} of {before:,}"
    print(f"{made.recipe.name}: {after:,} bytes ({binary(after)}), {share}")
    print(f"{len(made.weight_map):,} tensors in {many(len(made.shards), 'shard')}")
    for note in (*made.notes, limits(tp), *gptq(made)):
        say(f"note: {note}")
    rows = [
        [t.role, f"{t.units:,}", t.source, size(t.source_bytes), t.action, t.target, size(t.bytes)]
        for t in transitions(made)
    ]
    table(["role", "units", "from", "size", "", "to", "size"], rows, "lrlrllr")


def limits(tp: Mapping[str, int], experts: str = "cut over the ranks") -> str:
    """Largest tensor-parallel sizes in words. experts: how they lie on the ranks."""
    if all(tp.values()):
        words = [f"{RUNTIMES[name]} TP{limit}" for name, limit in tp.items()]
        return f"loads up to {', '.join(words)} (experts {experts})"
    words = [f"{RUNTIMES[name]} {f'up to TP{limit}' if limit else 'at no TP'}" for name, limit in tp.items()]
    return f"loads with {', '.join(words)} (experts {experts})"


def gptq(made: Plan) -> list[str]:
    """What GPTQ takes, in words."""
    from ..quantize.guide import worker_bytes

    return [f"GPTQ holds up to {size(held)} a worker"] if (held := worker_bytes(made)) else []


#: what codes come from, where statistics guide them
CODES = {
    "gptq": "GPTQ", "gptq-pool": "GPTQ by the layer's pool", "imatrix": "the weighted search",
    "imatrix-pool": "the search weighted by the layer's pool",
    "singular": "the weighted search (no factor of the Hessian)",
    "data-free": "the search without data (no token has reached them)",
}  # fmt: skip


def result(done: Result, out: str) -> None:
    """What a conversion has written, and how exact it is."""
    from ..quantize.summary import methods, transitions

    made = done.plan
    rows = []
    for t in transitions(made, done.manifest.units):
        error = f"{t.error:.2%}" if t.error else "exact"
        rows.append([t.role, f"{t.units:,}", t.source, t.action, t.target, size(t.bytes), error])
    table(["role", "units", "from", "", "to", "size", "mean error"], rows, "lrlllrr")
    for role, counts in methods(made, done.manifest.units).items():
        print(f"{role}: codes of " + ", ".join(f"{count:,} by {CODES[name]}" for name, count in counts.items()))
        if counts.keys() & {"gptq", "gptq-pool"}:
            print("note: GPTQ minimises the error of outputs; that of the weights, above, is larger than the search's")
    if tiny := done.manifest.scales["tiny_scales"]:
        print(f"note: {tiny:,} tiny scales were met; they are exact here, kernels that flush denormals read zero")
    if done.resumed_shards == len(made.shards):
        say(f"{out}: was complete already, nothing to do")
        return
    before = f", {done.resumed_shards} of {len(made.shards)} shards were done before" if done.resumed_shards else ""
    took = f"{done.wall_seconds:.1f} s, codec {done.backend}, peak memory {size(done.peak_rss_bytes)}"
    say(f"{out}: {size(made.output_bytes)} in {took}{before}")


RUNTIMES = {"vllm": "vLLM", "sglang": "SGLang", "both": "vLLM and SGLang"}
#: what a severity means to whoever reads it
WORDS = {"error": "refuses to load", "silent": "loads it wrong, without an error", "warning": "works, but worse"}


def findings(found: list[Finding]) -> None:
    """What is wrong with a checkpoint or a pair: what will happen and where, then the sentence."""
    for one in found:
        say(finding(one))
        print(f"    {clean(one.message)}")


def finding(one: Finding) -> str:
    """The head of a finding."""
    return f"{one.rule} {RUNTIMES[one.runtime]}: {WORDS[one.severity]}: {one.subject}"


def loaded(artifact: str, done: Loaded) -> None:
    """What a runtime made of an artifact."""
    proven = "" if done.proven else ", unproven with this phasefold"
    how = {"dry": "dry load of", "reference": "decoded weights of"}.get(done.mode, "load of")
    made = f" as {done.model_class}" if done.model_class else ""
    say(f"{done.runtime} {done.version}{proven}: {how} {artifact}{made}")
    for name, many in (("missing", done.missing), ("not taken", done.unexpected), ("optional", done.optional)):
        for item in many[:10]:
            say(f"{name}: {item}")
        if len(many) > 10:
            print(f"{name}: {len(many) - 10:,} more")
    for line in (*done.notes, *(f"log: {line}" for line in done.log[:10])):
        say(line)
    if done.methods:
        say("kernels: " + ", ".join(f"{name} x {count}" for name, count in done.methods.items()))
    for what, text in (("gap of the runtime", done.gap), ("refused", done.refused), ("text", done.text)):
        if text:
            say(f"{what}: {text}")
    counted = f"{done.tensors:,} tensors, " if done.tensors else ""
    took = f"{counted}{done.wall_seconds:.1f} s, peak memory {size(done.peak_rss_bytes)}"
    say(f"{artifact}: {'ok' if done.ok else 'NOT ok'} ({took})")


def served(result: Mapping[str, Any], prompts: list[str]) -> None:
    """What a pair made of some prompts, and how near it is to prefill alone and to the source."""
    for prompt, text in zip(prompts, result["text"], strict=True):
        say(f"{prompt} | {text}")
    rows = [["prefill alone", result["top1_agreement"], result["mean_kl"]]]
    if against := result["source"]:
        rows.append(["source", against["top1_agreement"], against["mean_kl"]])
    told = [[name, f"{same:.1%}", f"{kl:.5f}"] if same is not None else [name, "-", "-"] for name, same, kl in rows]
    table(["against", "same token", "mean KL"], told, "lrr")
    rows, kept, checks = result["kv"], result["kv_bytes_per_token"], result["counters"]
    pools = [f"{pool} {rows[pool]}, {kept[pool]:,} bytes a token" for pool in ("prefill", "decode")]
    print(f"KV rows: {'; '.join(pools)}")
    if result.get("kv_scales"):
        print(f"KV scales: those of the {result['kv_scales']}")
    print(f"{result['tokens']:,} tokens compared")
    print(f"page tags: {checks['checks']:,} compared, {checks['mismatches']:,} wrong")
    for error in result["errors"]:
        say(f"stopped: {error}")


def kv(made: KVScales) -> None:
    """The scales of a KV-scale manifest and what they change, a line a part; of many layers the worst at scale 1.0."""
    parts = [(layer.layer, name, part) for layer in made.layers for name, part in layer.parts.items()]
    shown = parts
    if len(parts) > _MANY_PARTS:
        worst = sorted(parts, key=lambda item: -item[2].at_one.relative_error)[: _MANY_PARTS // 2]
        shown = sorted(worst, key=lambda item: item[0])
        print(f"the {len(shown)} of {len(parts)} that lose most at scale 1.0:")
    row_scales = {layer.layer: layer.row_scale for layer in made.layers}
    latent = any(row_scales.values())
    rows = [
        [str(layer), name, f"{part.tokens:,}", f"{part.amax:.4g}", f"{part.p999:.4g}", _power(part.scale)]
        + [_power(row_scales[layer] or 1.0)] * latent
        + [text for loss in (part.at_one, part.at_scale) for text in (f"{loss.zero:.2%}", f"{loss.relative_error:.2%}")]
        for layer, name, part in shown
    ]
    header = ["layer", "part", "tokens", "amax", "p99.9", "scale", *["row scale"] * latent]
    table([*header, "lost at 1.0", "error", "lost at scale", "error"], rows, "rlrrrr" + "r" * latent + "rrrr")
    sizes = ", ".join(f"{name} {size:,}" for name, size in made.bytes_per_token.items())
    indexer = made.indexer_bytes_per_token
    print(f"bytes a token: {sizes}{f'; the indexer keys are {indexer:,} more' if indexer else ''}")
    for note in made.notes:
        say(f"note: {note}")
    for runtime, given in made.runtimes.items():
        say(f"{RUNTIMES[runtime]} reads {given['reads']}: {given['why']}")


_MANY_PARTS = 24


def _power(scale: float) -> str:
    return f"2^{math.frexp(scale)[1] - 1}"


def launch(made: Launch) -> None:
    """Command lines to copy, each flag's reason below."""
    for name, command in (("prefill", made.prefill), ("decode", made.decode), ("router", made.router)):
        if command:
            print(f"# {name}\n{clean(shlex.join(command))}\n")
    for note in made.notes:
        say(f"{note.pool}: {note.flag}: {note.reason}")


def table(header: list[str], rows: list[list[str]], align: str) -> None:
    """Draw a table, a column aligned to "l"eft or "r"ight. Nothing is cut where the terminal is narrow."""
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for number, (name, side) in enumerate(zip(header, align, strict=True)):
        width = max(len(row[number]) for row in [header, *rows])
        drawn.add_column(name, justify="right" if side == "r" else "left", no_wrap=True, min_width=width)
    for row in rows:
        drawn.add_row(*row)
    Console(highlight=False, markup=False, width=200).print(drawn, soft_wrap=True)


@contextmanager
def progress(what: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None] | None]:
    """A bar with bytes, rate and time left on stderr; where that is no terminal, a line a minute. `quiet`: nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if quiet:
        yield None
    elif not console.is_terminal:
        yield _minute_lines(what, total)
    else:
        columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda nbytes: bar.advance(task, nbytes)


def _minute_lines(what: str, total: int) -> Callable[[int], None]:
    begun = last = time.monotonic()
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done, last
        done, now = done + nbytes, time.monotonic()
        if now - last >= 60:
            last, rate = now, done / (now - begun)
            left = (total - done) / rate / 60
            print(f"{what}: {size(done)} of {size(total)}, {size(rate)}/s, {left:.0f} min left", file=sys.stderr)

    return advance


@contextmanager
def passes(what: str, layers: int, tokens: int, *, quiet: bool) -> Iterator[Callable[[float], None] | None]:
    """A bar with layers, tokens/s through the whole model and time left on stderr; no terminal: a line a minute.

    What is yielded is told of tokens, each once a layer; its first call says what was done before.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    told = Passes(what, layers, tokens)
    if quiet:
        yield None
    elif not console.is_terminal:
        yield told.advance_in_lines
    else:
        columns = (TextColumn(what), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=layers * tokens)

            def advance(count: float) -> None:
                told.advance(count)
                bar.update(task, completed=told.done, description=told.words())

            yield advance


class Passes:
    """How far forward passes have come. done: tokens, each once a layer."""

    def __init__(self, what: str, layers: int, tokens: int) -> None:
        self.what, self.layers, self.tokens = what, layers, tokens
        self.done, self.before = 0.0, 0.0
        self.begun = self.last = 0.0

    def advance(self, count: float) -> bool:
        """Count; whether a minute has gone by since this was last true."""
        now = time.monotonic()
        self.done += count
        if not self.begun:
            self.begun, self.last, self.before = now, now, count
        due = now - self.last >= 60
        self.last = now if due else self.last
        return due

    def rate(self) -> float:
        """Tokens a second through the whole model."""
        return (self.done - self.before) / max(time.monotonic() - self.begun, 1e-9) / self.layers

    def words(self) -> str:
        """Layers and tokens/s."""
        return f"layer {min(int(self.done / self.tokens) + 1, self.layers)}/{self.layers}, {self.rate():,.0f} tokens/s"

    def advance_in_lines(self, count: float) -> None:
        """Count, and print a line a minute."""
        if self.advance(count):
            left = (self.layers * self.tokens - self.done) / self.layers / max(self.rate(), 1e-9) / 60
            print(f"{self.what}: {self.words()}, {left:.0f} min left", file=sys.stderr)


def say(text: str) -> None:
    """Print one line that may hold names of files and tensors."""
    print(clean(text))


def notice(text: str) -> None:
    """A line on stderr, also where stdout is JSON."""
    print(f"note: {clean(text)}", file=sys.stderr)


def clean(text: str) -> str:
    """One printable line, whatever names a damaged file holds."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(text.split()))
