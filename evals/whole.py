"""A checkpoint of any format as a runner, decoded into memory; and which runner a checkpoint gets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..calib.budget import model_need, workspace_bytes
from ..calib.forward import ATTENTION, EXPERTS
from ..calib.model import Source, version
from ..errors import CheckpointError, UsageError
from ..formats.checkpoint import open_checkpoint
from ..serving.paged.weights import load_model
from .batches import Batch, check_run, make_batches, wanted_logits
from .layered import Layered
from .runner import Advance, Finished, Runner, Sampling

#: how a checkpoint is run: in memory where it fits, or said by name
WAYS = ("auto", "memory", "layers")
#: how long texts are thought to be where the way is chosen, in tokens: it is chosen before there are any
USUAL = 2048


class Whole:
    """transformers' own model, with its own forward pass over batches of texts, without a cache.

    about, max_length, vocabulary: as every runner has them.
    """

    def __init__(self, folder: Path, *, dtype: str = "bfloat16", batch: int = 8, device: str = "cpu") -> None:
        """Raises as `load_model` does, and UsageError for a dtype or batch that makes no sense."""
        self._loaded = load_model(folder, dtype=check_run(dtype, batch), device=device, attention=ATTENTION)
        self._model: Any = self._loaded.model
        self._model.set_experts_implementation(EXPERTS)
        self._batch, self._dtype = batch, dtype
        self.about: Mapping[str, Any] = {
            "runtime": version(), "way": "in memory", "dtype": dtype, "batch": batch, "device": device,
        }  # fmt: skip
        self.max_length: int = self._model.config.max_position_embeddings
        self.vocabulary: int = self._model.config.vocab_size

    def logits(
        self, texts: Sequence[Sequence[int]], firsts: Sequence[int], advance: Advance
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """As every runner's. EvalError for a text that cannot be taken, CheckpointError where a logit is not finite."""
        return self._scored(make_batches(texts, firsts, self._batch, self._model.config), advance)

    @torch.no_grad()
    def _scored(self, batches: list[Batch], advance: Advance) -> Iterator[tuple[int, torch.Tensor]]:
        for batch in batches:
            hidden = self._model.model(input_ids=batch.tokens.to(self._model.device), use_cache=False).last_hidden_state
            for number, logits in wanted_logits(batch, hidden, self._model.lm_head, self.vocabulary):
                if not bool(torch.isfinite(logits).all()):
                    raise CheckpointError(
                        f"{self._loaded.folder}: a logit is not finite in {self._dtype}; try --dtype float32, else the "
                        "weights are damaged: layer by layer the evaluation names the layer"
                    )
                yield number, logits
            advance(len(batch.numbers))

    def generate(
        self, prompts: Sequence[Sequence[int]], limit: int, sampling: Sampling, finished: Finished, advance: Advance
    ) -> list[list[int]]:
        """As every runner's: prompt and continuation through the engine that serves pairs, with BF16 rows."""
        from .continuing import continue_prompts

        with self._as_engines_have_it():
            return continue_prompts(
                self._loaded, self._loaded, prompts, limit, sampling, finished, batch=self._batch, advance=advance
            )

    @contextlib.contextmanager
    def _as_engines_have_it(self) -> Iterator[None]:
        """Attention as a pair's models have it, so that a checkpoint generates what it does paired with itself."""
        self._model.set_attn_implementation("eager")
        try:
            yield
        finally:
            self._model.set_attn_implementation(ATTENTION)
            self._model.set_experts_implementation(EXPERTS)

    def close(self) -> None:
        """Let go of the weights."""
        del self._loaded, self._model


def open_runner(
    folder: Path, *, dtype: str, batch: int, memory: int, device: str, way: str = "auto", work: Path | None = None
) -> Runner:
    """The runner of a checkpoint. way: one of WAYS. memory: in bytes. work: where hidden states may lie meanwhile.

    Raises as the two runners do when they are opened; which it is stands in about["way"].
    """
    if _in_memory(folder, dtype, batch, memory, way):
        return Whole(folder, dtype=dtype, batch=batch, device=device)
    return Layered(folder, dtype=dtype, batch=batch, memory=memory, device=device, work=work)


def check_runner(
    folder: Path, *, dtype: str, batch: int, memory: int, device: str, way: str = "auto", work: Path | None = None
) -> bool:
    """Whether it would run in memory. Raises what `open_runner` would raise before it reads weights."""
    if whole := _in_memory(folder, dtype, batch, memory, way):
        return whole
    Layered(folder, dtype=dtype, batch=batch, memory=memory, device=device, work=work).close()
    return False


def _in_memory(folder: Path, dtype: str, batch: int, memory: int, way: str) -> bool:
    if way not in WAYS:
        raise UsageError(f"way {way!r}: a checkpoint is run by {', '.join(WAYS[:-1])} or {WAYS[-1]}")
    width = check_run(dtype, batch).itemsize
    return way == "memory" or (way == "auto" and needed(folder, width, batch) <= memory)


def needed(folder: Path, width: int, batch: int) -> int:
    """Bytes that it takes in memory, at most, with texts of a usual length. width: bytes of a weight."""
    source = Source(open_checkpoint(folder))
    source.close()
    length = min(USUAL, source.config.max_position_embeddings)
    return model_need(source, width, workspace_bytes(source, batch, length))
