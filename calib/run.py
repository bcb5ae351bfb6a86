"""Calibration: a checkpoint's forward pass over a text, one decoder layer at a time, and what it leaves.

The hidden states of all tokens lie in a file. A layer's weights are decoded into transformers' own layer, every batch
goes through it, its statistics are written, and its weights are let go. Peak memory is one layer and one batch.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import __version__
from ..errors import CheckpointError, LoadError, PhasefoldError
from ..formats.statistics import VERSION
from ..quantize.fold import held
from ..quantize.output import check_place, check_space
from .budget import Counts, Need, choose, layer_need, workspace_bytes
from .cached import ObservedCache
from .experts import Apart, Gathered, watch_routing
from .forward import ATTENTION, Forward
from .model import Source, version
from .observe import Observer, expert_summary
from .rows import Rows
from .store import LayerWriter, finish
from .text import HELD_OUT, Text
from .work import Work

Advance = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What shapes the numbers besides source and text.

    dtype: of the forward pass. batch: sequences in a pass. memory: limit in bytes, by which a layer's experts are run
    together or one by one. hessians: roles.
    """

    dtype: str = "bfloat16"
    device: str = "cpu"
    batch: int = 1
    memory: int = 16_000_000_000
    all_experts: bool = False
    hessians: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As statistics.json holds it."""
        return {
            "dtype": self.dtype,
            "device": self.device.partition(":")[0],
            "batch": self.batch,
            "memory": self.memory,
            "all_experts": self.all_experts,
            "hessians": sorted(self.hessians),
        }


class Batch(NamedTuple):
    """Sequences that go through a layer together. rows: their tokens among all. All or none of them are held out."""

    rows: range
    heldout: bool


class Result(NamedTuple):
    """about: statistics.json. resumed: layers that were done before. one_by_one: layers whose experts were."""

    about: dict[str, Any]
    resumed: int
    one_by_one: int


class Job:
    """A calibration that is known to fit: everything that can be refused before the first weight is read is refused.

    disk: bytes that it needs at most at a time. training: tokens that are not held out; they come first.
    """

    def __init__(self, source: Source, text: Text, options: Options) -> None:
        self.source, self.text, self.options = source, text, options
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.sequences, self.length = text.blocks.shape
        held = torch.arange(self.sequences) % HELD_OUT == HELD_OUT - 1
        self.blocks = torch.cat([text.blocks[~held], text.blocks[held]])
        self.tokens, self.training = self.blocks.numel(), int((~held).sum()) * self.length
        width = self.dtype.itemsize
        roles = frozenset(options.hessians)
        visits = source.config.n_routed_experts if options.all_experts else source.config.num_experts_per_tok
        counts = Counts(self.training, self.tokens - self.training, visits)
        workspace = workspace_bytes(source, min(options.batch, self.sequences), self.length)
        self.needs: list[Need] = [
            layer_need(source, layer, width, workspace, roles, counts) for layer in range(len(source.layers))
        ]
        self.whole = choose(self.needs, options.memory)
        self._line = source.config.hidden_size * width
        self._carried = 4 * min(getattr(source.config, "index_topk", 0), self.length)
        apart = 0 if all(self.whole) else 3 * self._line
        largest = max(need.stored for need in self.needs)
        self.disk = self.tokens * 2 * (self._line + self._carried) + self.tokens * apart
        self.disk += sum(need.stored for need in self.needs) + largest

    @property
    def identity(self) -> dict[str, Any]:
        """What statistics.json says besides what was found: equal for equal jobs."""
        checkpoint = self.source.checkpoint
        return {
            "version": VERSION,
            "tool": __version__,
            "source": {
                "name": checkpoint.folder.resolve().name,
                "digest": checkpoint.digest,
                "folding": held(checkpoint),  # what a cache holds is by these powers of two off
            },
            "architecture": self.source.model.architecture.name,
            "config": dict(checkpoint.config),
            "text": self.text.to_json(),
            "tokens": self.tokens,
            "heldout_tokens": self.tokens - self.training,
            "sequences": self.sequences,
            "length": self.length,
            "options": self.options.to_json(),
            "forward": {"by": version(), "torch": torch.__version__, "attention": ATTENTION},
        }

    def batches(self) -> Iterator[Batch]:
        """All tokens, in order."""
        size = self.options.batch * self.length
        for first, last, heldout in ((0, self.training, False), (self.training, self.tokens, True)):
            for start in range(first, last, size):
                yield Batch(range(start, min(start + size, last)), heldout)

    def in_memory(self, layer: int) -> bool:
        """Whether what a layer's experts need of every token fits beside them."""
        single = self.needs[layer].single
        return single is not None and 3 * self.tokens * self._line <= self.options.memory - single


def calibrate(job: Job, out: Path, advance: Advance | None = None) -> Result:
    """Carry a calibration out, or go on with it. `advance` is told of tokens, each once a layer.

    ResumeError where the folder is another job's, CheckpointError where a weight or a hidden state is not finite.
    """
    advance = advance or (lambda _: None)
    check_place(job.source.checkpoint.folder, out)
    work = Work(out, job.identity, job.source.checkpoint)
    one_by_one = job.whole.count(False)
    if (about := work.finished()) is not None:
        return Result(about, len(about["layers"]), one_by_one)
    check_space(out, max(0, job.disk - work.held_bytes()))
    with work.claimed():
        entries = work.done()
        resumed = len(entries)
        advance(float(resumed * job.tokens))
        try:
            with torch.inference_mode():
                _Run(job, work, advance).layers(entries)
        except PhasefoldError:
            if not work.done():
                work.remove()  # nothing to go on with: the folder is free for another job
            raise
        about = finish(out, job.identity | {"layers": entries})
        work.remove()
    return Result(about, resumed, one_by_one)


def give_back() -> None:
    """Hand freed memory back to the system: the C library keeps what lies between blocks that are still in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


class _Run:
    """The state of a job while it runs. Files are named by the number of layers that are behind them."""

    def __init__(self, job: Job, work: Work, advance: Advance) -> None:
        self.job, self.work, self.advance = job, work, advance
        self.forward = Forward(job.source, job.dtype, job.options.device)
        self.cache = ObservedCache([layer for layer in job.source.model.cache() if not layer.mtp])

    def _hidden(self, layer: int, *, new: bool) -> Rows:
        width = self.job.source.config.hidden_size
        return Rows(self.job.tokens, width, self.job.dtype, self.work.folder / f"hidden-{layer:05d}", new=new)

    def _carried(self, layer: int, *, new: bool) -> Rows | None:
        """What the layer before this one hands to it besides hidden states: nothing, unless it shares an indexer."""
        module = self.forward.layers[layer] if layer < len(self.forward.layers) else None
        if module is None or getattr(module.self_attn, "indexer", module) is not None:
            return None
        width = min(self.job.source.config.index_topk, self.job.length)
        return Rows(self.job.tokens, width, torch.int32, self.work.folder / f"carried-{layer:05d}", new=new)

    def layers(self, entries: list[dict[str, Any]]) -> None:
        """All layers that are not done; an entry of each is added."""
        begun = len(entries)
        self.work.tidy({f"hidden-{begun:05d}", f"carried-{begun:05d}"} if begun else set())
        if begun == len(self.forward.layers):
            return
        hidden, carried = self._hidden(begun, new=not begun), self._carried(begun, new=not begun)
        if not begun:
            self._embed(hidden)
        for layer in range(begun, len(self.forward.layers)):
            behind, handed = self._hidden(layer + 1, new=True), self._carried(layer + 1, new=True)
            entries.append(self._layer(layer, hidden, behind, carried, handed))
            for rows in (behind, handed):
                if rows is not None:
                    rows.flush()
            self.work.note_done(entries)
            give_back()
            for rows in (hidden, carried):
                if rows is not None:
                    rows.close(delete=True)
            hidden, carried = behind, handed
        hidden.close()

    def _embed(self, hidden: Rows) -> None:
        for batch in self.job.batches():
            tokens = self.job.blocks.view(-1)[batch.rows.start : batch.rows.stop].view(-1, self.job.length)
            hidden.put(batch.rows, self.forward.embed(tokens.long()).flatten(0, 1))

    def _layer(
        self, layer: int, hidden: Rows, behind: Rows, carried: Rows | None, handed: Rows | None
    ) -> dict[str, Any]:
        """One layer for all tokens -> its entry in statistics.json."""
        job, source, module = self.job, self.job.source, self.forward.layers[layer]
        whole, experts = job.whole[layer], source.experts(layer)
        matrices = source.load_layer(module, layer, self.forward.dtypes, self.forward.device, whole=whole)
        count = len(experts.items) if experts else 0
        observer, counts = Observer(frozenset(job.options.hessians), count), torch.zeros(count, dtype=torch.int64)
        for matrix in matrices:
            observer.watch(matrix)
        writer = LayerWriter(self.work.out, layer)
        apart = None
        with contextlib.ExitStack() as held:
            held.callback(writer.close)
            if experts and whole:
                watch_routing(module, observer, counts, all_experts=job.options.all_experts)
            elif experts:
                apart = Apart(self.forward, module, self._gathered(layer, count))
                held.callback(apart.gathered.close)
            with observer:
                for batch in job.batches():
                    observer.heldout = batch.heldout
                    found = self._call(module, batch, hidden, carried, handed)
                    if apart is None:
                        self._finite(found, layer)
                    else:
                        apart.note(batch.rows)
                    behind.put(batch.rows, found)
                    self.advance(len(batch.rows) / (1 if apart is None else 4))
                observer.check(job.training)
                for name, value in observer.release():
                    writer.add(name, value)
                if apart is not None and experts is not None:
                    step = 0.75 * job.tokens / count
                    counts = apart.run(
                        experts, observer, writer, job.training, job.options.batch * job.length,
                        all_experts=job.options.all_experts, advance=lambda: self.advance(step),
                    )  # fmt: skip
                    for batch in job.batches():
                        found = apart.total(batch.rows, behind.get(batch.rows))
                        self._finite(found, layer)
                        behind.put(batch.rows, found)
            self._write_rest(writer, layer, observer, counts)
            self.forward.layers[layer] = None  # its weights go with it
            return writer.finish(expert_summary(counts) if count else None)

    def _gathered(self, layer: int, count: int) -> Gathered:
        job, config = self.job, self.job.source.config
        place = None if job.in_memory(layer) else self.work.folder

        def rows(name: str) -> Rows:
            return Rows(job.tokens, config.hidden_size, job.dtype, place / name if place else None)

        index = torch.empty(job.tokens, config.num_experts_per_tok, dtype=torch.int64)
        return Gathered(rows("inputs"), rows("shared"), rows("sums"), index, torch.empty(index.shape))

    def _call(self, module: Any, batch: Batch, hidden: Rows, carried: Rows | None, handed: Rows | None) -> torch.Tensor:
        """A layer's output for one batch, [n, hidden]."""
        length, device = self.job.length, self.forward.device
        given = hidden.get(batch.rows).view(-1, length, hidden.width).to(device)
        before = None if carried is None else carried.get(batch.rows).view(-1, length, carried.width).to(device)
        found, after = self.forward.call(module, given, before, self.cache)
        if handed is not None:
            if after is None:
                raise LoadError(f"{version()}: a layer with an indexer hands no indices to the layer that shares them")
            handed.put(batch.rows, after.flatten(0, 1))
        return found.flatten(0, 1)

    def _finite(self, found: torch.Tensor, layer: int) -> None:
        if not bool(torch.isfinite(found).all()):
            raise CheckpointError(
                f"{self.job.source.checkpoint.folder}: layer {layer}: a hidden state is not finite in "
                f"{self.job.options.dtype}; try --dtype float32, else the weights are damaged"
            )

    def _write_rest(self, writer: LayerWriter, layer: int, observer: Observer, counts: torch.Tensor) -> None:
        """What is left of a layer when all tokens are through."""
        source = self.job.source
        for name, value in (*observer.release(), *observer.release_pools(), *self.cache.release(layer)):
            writer.add(name, value)
        if experts := source.experts(layer):
            stem = experts.items[0][0].module.rsplit(".", 2)[0]
            writer.add(f"{stem}.expert_tokens", counts)
