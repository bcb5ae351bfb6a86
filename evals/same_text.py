"""Two models on the same text, token by token: the baseline's distributions are kept, the target's compared with them.

Of each text the second half is compared: its tokens have a context, and a pair makes them in decode, one a step, behind
a prompt that prefill computed. A token's distribution is one float32 a vocabulary entry; what is more than `memory`
allows lies in a file without a name.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..calib.rows import Rows
from ..calib.text import Text
from ..errors import EvalError
from ..quantize.output import check_space, writing
from .proxies import Proxies, proxies
from .runner import Advance, Runner
from .scores import Passage

LAST = 1024  # compared tokens of one text, at most: a distribution of each is held at a time
_ROWS = 64  # distributions that are compared at a time


@dataclass(frozen=True, slots=True)
class Texts:
    """texts: their tokens. firsts: the first that is compared. documents: what each belongs to. name: where from."""

    texts: list[list[int]]
    firsts: list[int]
    documents: list[str]
    name: str

    @property
    def tokens(self) -> int:
        """How many are compared."""
        return sum(len(text) - first for text, first in zip(self.texts, self.firsts, strict=True))

    def to_json(self) -> dict[str, Any]:
        """For the record."""
        digest = hashlib.sha256(repr(self.texts).encode()).hexdigest()
        return {"name": self.name, "digest": digest, "documents": len(set(self.documents)), "tokens": self.tokens}


def from_passages(passages: Sequence[Passage], limit: int, longest: int) -> Texts | None:
    """What the tasks' questions are made of, evenly thinned to `limit` compared tokens at most; None without any.

    longest: tokens that the model takes. Of a long text the last `LAST` tokens are compared, and no more.
    """
    usable = [(list(passage.tokens[-longest:]), passage.document) for passage in passages if len(passage.tokens) > 1]
    most = min(limit, LAST)
    firsts = [max(_half(tokens), len(tokens) - most) for tokens, _ in usable]
    counts = [len(tokens) - first for (tokens, _), first in zip(usable, firsts, strict=True)]
    step, left, taken = max(1, -(-sum(counts) // limit)), limit, list[int]()
    for number in range(0, len(usable), step):
        if counts[number] <= left:
            left -= counts[number]
            taken.append(number)
    if not taken:
        return None
    texts, documents = [usable[number][0] for number in taken], [usable[number][1] for number in taken]
    return Texts(texts, [firsts[number] for number in taken], documents, "the tasks' own")


def from_text(text: Text, name: str) -> Texts:
    """A file's blocks, each a document of its own."""
    texts: list[list[int]] = text.blocks.tolist()
    if len(texts[0]) < 2:
        raise EvalError(f"{name}: blocks of one token have no second half; give a longer text")
    return Texts(texts, [_half(block) for block in texts], [str(number) for number in range(len(texts))], name)


def _half(tokens: Sequence[int]) -> int:
    return max(1, len(tokens) // 2)


class Kept:
    """The baseline's log-probabilities [tokens, vocabulary], float32."""

    def __init__(self, runner: Runner, texts: Texts, memory: int, place: Path | None, advance: Advance) -> None:
        """Runs the baseline. place: folder for what does not fit `memory` bytes; None: the system's for such files."""
        self.texts, self.vocabulary = texts, runner.vocabulary
        lengths = [len(text) - first for text, first in zip(texts.texts, texts.firsts, strict=True)]
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        path = None
        nbytes = texts.tokens * runner.vocabulary * 4
        if nbytes > memory:
            place = place or Path(tempfile.gettempdir())
            check_space(place, nbytes)
            with writing(place):
                place.mkdir(parents=True, exist_ok=True)
                self._folder = tempfile.TemporaryDirectory(prefix="phasefold-eval-", dir=place)
            path = Path(self._folder.name) / "baseline"
        self._rows = Rows(texts.tokens, runner.vocabulary, torch.float32, path)
        try:
            for number, logits in runner.logits(texts.texts, texts.firsts, advance):
                self._rows.put(self._range(number), _finite(logits, "the baseline").log_softmax(-1))
        except BaseException:
            self.close()
            raise

    def _range(self, number: int) -> range:
        return range(int(self._starts[number]), int(self._starts[number + 1]))

    def compare(self, runner: Runner, advance: Advance, *, seed: int = 0) -> Proxies:
        """Another model on the same tokens. EvalError where it has another vocabulary, or gives what is not finite."""
        if runner.vocabulary != self.vocabulary:
            raise EvalError(
                f"the baseline has {self.vocabulary:,} tokens, the target {runner.vocabulary:,}: their distributions "
                "cannot be compared; give the checkpoint that the target was made from as --baseline"
            )
        columns = np.empty((4, self.texts.tokens))
        for number, logits in runner.logits(self.texts.texts, self.texts.firsts, advance):
            where, first = self._range(number), self.texts.firsts[number]
            came = torch.tensor(self.texts.texts[number][first:])
            ours = _finite(logits, "the target")
            for start in range(0, len(where), _ROWS):
                some = range(where.start + start, min(where.start + start + _ROWS, where.stop))
                piece = slice(start, start + len(some))
                columns[:, some.start : some.stop] = _measures(self._rows.get(some), ours[piece], came[piece])
        kl, before, after, same = columns
        documents = np.repeat(self.texts.documents, np.diff(self._starts))
        return proxies(kl, before, after, same > 0, documents, seed=seed)

    def close(self) -> None:
        """Let go of the distributions, and of their file."""
        self._rows.close(delete=True)
        if self._folder is not None:
            self._folder.cleanup()


def _measures(baseline: torch.Tensor, logits: torch.Tensor, came: torch.Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """Log-probabilities and logits [n, vocabulary], tokens [n] -> [4, n]: KL, the token's twice, equal argmaxes."""
    first, second = baseline.double(), logits.log_softmax(-1).double()  # rounded alike: of equal logits KL is 0
    kl = (first.exp() * (first - second)).sum(-1).clamp_min(0)  # below zero it is rounding
    picked = [each.gather(1, came[:, None])[:, 0] for each in (first, second)]
    same = first.argmax(-1) == second.argmax(-1)
    return torch.stack([kl, *picked, same.double()]).numpy()


def _finite(logits: torch.Tensor, whose: str) -> torch.Tensor:
    if not bool(torch.isfinite(logits).all()):
        raise EvalError(f"{whose}: a logit is not finite; its weights are damaged, or bfloat16 is too narrow for them")
    return logits
