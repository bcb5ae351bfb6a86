"""A runner that is nothing but transformers' model, text by text and without a cache, to hold others against."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers

from phasefold.evals.runner import Advance, Finished, Sampling


class Plain:
    """In float32; greedy."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.about = {"runtime": "transformers", "batch": 1}
        self.max_length: int = self._model.config.max_position_embeddings
        self.vocabulary: int = self._model.config.vocab_size

    @torch.no_grad()
    def logits(
        self, texts: Sequence[Sequence[int]], firsts: Sequence[int], advance: Advance
    ) -> Iterator[tuple[int, torch.Tensor]]:
        for number, (text, first) in enumerate(zip(texts, firsts, strict=True)):
            yield number, self._model(torch.tensor([list(text[:-1])])).logits[0, first - 1 :].float()
            advance(1)

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], limit: int, sampling: Sampling, finished: Finished, advance: Advance
    ) -> list[list[int]]:
        assert sampling.temperature == 0
        made = []
        for number, prompt in enumerate(prompts):
            tokens: list[int] = []
            while len(tokens) < limit and not (tokens and finished(number, tokens)):
                tokens.append(int(self._model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].argmax()))
            made.append(tokens)
            advance(1)
        return made

    def close(self) -> None:
        del self._model
