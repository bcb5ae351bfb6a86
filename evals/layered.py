"""A checkpoint that is larger than memory as a runner: the hidden states of all texts go through one layer at a time.

A layer's weights are decoded once, every batch goes through it, and they are let go; where not even a layer fits, its
experts come one by one. Batches and arithmetic are those of `whole.Whole`, and so are the results, to the bit. It
scores; it does not generate, for which every token would take a pass over all weights.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..calib.budget import Counts, layer_need, workspace_bytes
from ..calib.experts import Apart, Gathered
from ..calib.forward import Forward
from ..calib.model import Source, check_device, version
from ..calib.rows import Rows
from ..calib.run import give_back
from ..errors import CheckpointError, LoadError
from ..formats.checkpoint import open_checkpoint
from ..quantize.output import check_space, writing
from .batches import Batch, check_run, logits_bytes, make_batches, wanted_logits
from .runner import Advance, Finished, Sampling


class _Plan(NamedTuple):
    """How texts are run. whole: of each layer, whether all of it is loaded together.

    on_disk: bytes of rows that go to files, 0 where they are in memory. carried: width of what layers hand on.
    """

    whole: list[bool]
    on_disk: int
    carried: int


class Layered:
    """transformers' own layers, one after the other. about, max_length, vocabulary: as every runner has them."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str = "bfloat16",
        batch: int = 8,
        memory: int = 16_000_000_000,
        device: str = "cpu",
        work: Path | None = None,
    ) -> None:
        """memory: limit in bytes of weights and texts together. work: where a folder for hidden states may be made.

        LoadError where a layer takes more than that for any text; else raises as calibration does.
        """
        self._dtype, self._batch, self._memory = check_run(dtype, batch), batch, int(memory)
        check_device(device)
        self._source, self._device, self._work = Source(open_checkpoint(folder)), device, work
        self._held = contextlib.ExitStack()
        config = self._source.config
        self.about: Mapping[str, Any] = {
            "runtime": version(),
            "way": "layer by layer",
            "dtype": dtype,
            "batch": batch,
            "device": device,
        }
        self.max_length: int = config.max_position_embeddings
        self.vocabulary: int = config.vocab_size
        forward = Forward(self._source, self._dtype, device)
        # a layer with an indexer that is None takes what the one before it has found
        self._sharing = [getattr(module.self_attn, "indexer", module) is None for module in forward.layers]
        self._plan(make_batches([[0, 0]], [1], 1, config))

    def close(self) -> None:
        """Let go of files, also where nobody took all logits."""
        self._held.close()
        self._source.close()

    def generate(
        self, prompts: Sequence[Sequence[int]], limit: int, sampling: Sampling, finished: Finished, advance: Advance
    ) -> list[list[int]]:
        """LoadError: this way scores."""
        raise LoadError(
            f"{self._source.checkpoint.folder}: layer by layer every token would take all weights anew, so that tasks "
            "which generate cannot be run: give more --memory, or tasks of log-likelihoods"
        )

    def logits(
        self, texts: Sequence[Sequence[int]], firsts: Sequence[int], advance: Advance
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """As every runner's: all texts of one call go over the weights together, so ask for all at once.

        EvalError for a text that cannot be taken, LoadError where a layer does not fit; then, as it goes,
        CheckpointError where a weight or a hidden state is not finite.
        """
        batches = make_batches(texts, firsts, self._batch, self._source.config)
        return self._scored(batches, self._plan(batches), advance) if batches else iter(())

    def _plan(self, batches: list[Batch]) -> _Plan:
        """What fits; LoadError where not even an expert at a time, or the matrix behind the layers, does."""
        source, width = self._source, self._dtype.itemsize
        workspace = max(workspace_bytes(source, *batch.tokens.shape) for batch in batches)
        tokens, config = batches[-1].rows.stop, source.config
        choices = tokens * config.num_experts_per_tok * 12  # of experts, with their weights: always in memory
        whole, most = [], 0
        for layer in range(len(source.layers)):
            need = layer_need(source, layer, width, workspace, frozenset(), Counts(0, 0, 0))
            whole.append(need.single is None or need.whole <= self._memory)
            least = need.whole if whole[-1] or need.single is None else need.single + choices
            self._refuse(f"layer {layer}", least)
            most = max(most, least)
        outer = max(math.prod(item.shape) * (width + 4) + item.nbytes for item in source.outside)
        self._refuse("what makes logits", outer + logits_bytes(batches, self.vocabulary, width))
        line = config.hidden_size * width
        carried = min(config.index_topk, batches[0].tokens.shape[1]) if any(self._sharing) else 0
        rows = tokens * ((1 if all(whole) else 4) * line + 4 * carried)
        return _Plan(whole, rows if most + rows > self._memory else 0, carried)

    def _refuse(self, what: str, need: int) -> None:
        if need > self._memory:
            raise LoadError(
                f"{self._source.checkpoint.folder}: {what} takes {need / 1e9:.2f} GB of memory, --memory allows "
                f"{self._memory / 1e9:.2f} GB: allow more, or give a smaller --batch"
            )

    @torch.no_grad()
    def _scored(self, batches: list[Batch], plan: _Plan, advance: Advance) -> Iterator[tuple[int, torch.Tensor]]:
        with contextlib.ExitStack() as held:
            self._held.push(held)
            passing = _Pass(self._source, self._dtype, self._device, batches, plan, self._folder(plan, held), held)
            passing.layers(self._sharing, _in_texts(advance, batches, len(self._source.layers)))
            yield from passing.logits(self.vocabulary)

    def _folder(self, plan: _Plan, held: contextlib.ExitStack) -> Path | None:
        """Where rows lie while texts are run, None for memory."""
        if not plan.on_disk:
            return None
        place = self._work or Path(tempfile.gettempdir())
        check_space(place, plan.on_disk)
        with writing(place):
            place.mkdir(parents=True, exist_ok=True)
            return Path(held.enter_context(tempfile.TemporaryDirectory(prefix="phasefold-", dir=place)))


def _in_texts(advance: Advance, batches: list[Batch], layers: int) -> Callable[[float], None]:
    """Told of tokens that went through a layer, tells of texts."""
    texts, total = sum(len(batch.numbers) for batch in batches), batches[-1].rows.stop * layers
    done, told = 0.0, 0

    def passed(tokens: float) -> None:
        nonlocal done, told
        done += tokens
        now = min(texts, int(texts * (done + 0.5) / total))
        advance(now - told)
        told = now

    return passed


class _Pass:
    """One pass of texts over all weights. held: what is to be let go when it ends, however it ends."""

    def __init__(
        self,
        source: Source,
        dtype: torch.dtype,
        device: str,
        batches: list[Batch],
        plan: _Plan,
        folder: Path | None,
        held: contextlib.ExitStack,
    ) -> None:
        self.source, self.batches, self.plan, self.folder = source, batches, plan, folder
        self.forward = Forward(source, dtype, device)
        self.tokens = batches[-1].rows.stop
        self.hidden = self._rows("hidden", source.config.hidden_size, dtype)
        held.callback(self.hidden.close, delete=True)
        self.carried = self._rows("carried", plan.carried, torch.int32) if plan.carried else None
        if self.carried is not None:
            held.callback(self.carried.close, delete=True)

    def _rows(self, name: str, width: int, dtype: torch.dtype) -> Rows:
        return Rows(self.tokens, width, dtype, self.folder / name if self.folder else None)

    def layers(self, sharing: list[bool], advance: Callable[[float], None]) -> None:
        """Hidden states behind the last layer, in place of the embeddings. advance: told of tokens, each once a layer.

        sharing: whether a layer takes its indices from the one before it.
        """
        for batch in self.batches:
            self.hidden.put(batch.rows, self.forward.embed(batch.tokens).flatten(0, 1))
        for layer in range(len(sharing)):
            gives = layer + 1 < len(sharing) and sharing[layer + 1]
            self._layer(layer, advance, takes=sharing[layer], gives=gives)
            self.forward.layers[layer] = None  # its weights go with it
            give_back()

    def _layer(self, layer: int, advance: Callable[[float], None], *, takes: bool, gives: bool) -> None:
        """takes, gives: whether it has its indices from the layer before it, and hands them to the next one."""
        module, whole, experts = self.forward.layers[layer], self.plan.whole[layer], self.source.experts(layer)
        self.source.load_layer(module, layer, self.forward.dtypes, self.forward.device, whole=whole)
        with contextlib.ExitStack() as held:
            apart = None
            if experts and not whole:
                apart = Apart(self.forward, module, self._gathered())
                held.callback(apart.gathered.close)
            for batch in self.batches:
                found = self._call(module, batch, takes=takes, gives=gives)
                self.hidden.put(batch.rows, found)
                if apart is None:
                    self._finite(found, layer)
                else:
                    apart.note(batch.rows)
                advance(len(batch.rows) / (1 if apart is None else 4))
            if apart is not None and experts:
                step = 0.75 * self.tokens / len(experts.items)
                apart.run_unobserved(experts, [batch.rows for batch in self.batches], lambda: advance(step))
                for batch in self.batches:
                    found = apart.total(batch.rows, self.hidden.get(batch.rows))
                    self.hidden.put(batch.rows, found)
                    self._finite(found, layer)

    def _gathered(self) -> Gathered:
        config = self.source.config
        width, dtype = config.hidden_size, self.hidden.dtype
        inputs, shared, sums = (self._rows(name, width, dtype) for name in ("inputs", "shared", "sums"))
        index = torch.empty(self.tokens, config.num_experts_per_tok, dtype=torch.int64)
        return Gathered(inputs, shared, sums, index, torch.empty(index.shape))

    def _call(self, module: Any, batch: Batch, *, takes: bool, gives: bool) -> torch.Tensor:
        """A layer's output for one batch, [n, hidden]."""
        size, length = batch.tokens.shape
        given = self.hidden.get(batch.rows).view(size, length, -1).to(self.forward.device)
        before = None
        if self.carried is not None and takes:
            chosen = min(self.carried.width, length)  # a short text has fewer tokens than an indexer may choose
            before = self.carried.get(batch.rows).view(size, length, -1)[..., :chosen].to(self.forward.device)
        found, after = self.forward.call(module, given, before, None)
        if self.carried is not None and gives:
            if after is None:
                raise LoadError(f"{version()}: a layer with an indexer hands no indices to the layer that shares them")
            indices = after.flatten(0, 1)
            self.carried.put(batch.rows, torch.nn.functional.pad(indices, (0, self.carried.width - indices.shape[1])))
        return found.flatten(0, 1)

    def _finite(self, found: torch.Tensor, layer: int) -> None:
        if not bool(torch.isfinite(found).all()):
            raise CheckpointError(
                f"{self.source.checkpoint.folder}: layer {layer}: a hidden state is not finite in "
                f"{str(self.hidden.dtype).removeprefix('torch.')}; try --dtype float32, else the weights are damaged"
            )

    def logits(self, vocabulary: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Each text's number and float32 [wanted, vocabulary], when all layers are through."""
        self.forward.load_head()
        for batch in self.batches:
            hidden = self.hidden.get(batch.rows).view(*batch.tokens.shape, -1).to(self.forward.device)
            for number, logits in wanted_logits(batch, hidden, self.forward.head, vocabulary):
                if not bool(torch.isfinite(logits).all()):
                    raise CheckpointError(f"{self.source.checkpoint.folder}: a logit is not finite: damaged weights")
                yield number, logits
