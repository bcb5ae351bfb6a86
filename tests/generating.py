"""What tests of served pairs and of generation share: pools that round nothing, artifacts, settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import variants
from engines import artifact

from phasefold.evals.runner import Sampling
from phasefold.serving.paged import engine
from phasefold.serving.paged.rows import Layout, Row
from phasefold.serving.paged.weights import Loaded, load_model

GREEDY = Sampling()
WARM = Sampling(temperature=0.9, top_p=0.95, top_k=40, seed=7)


def nothing(_: int) -> None: ...


def never(_: int, __: Sequence[int]) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class WideRow(Row):
    """A row that rounds nothing of a float32 model: what is left then is arithmetic, and not the cache."""

    @property
    def nbytes(self) -> int:
        return 4 * sum(part.heads * part.width for part in self.parts)

    def encode(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([value.flatten(1).float().contiguous().view(torch.uint8) for value in values], 1)

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        pieces = rows.split([4 * part.heads * part.width for part in self.parts], 1)
        found = [piece.contiguous().view(torch.float32).to(dtype) for piece in pieces]
        return [value.reshape(-1, part.heads, part.width) for value, part in zip(found, self.parts, strict=True)]


@pytest.fixture
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of whatever name keep float32."""
    plain = engine.make_layout

    def wide(*args: Any) -> Layout:
        found = plain(*args)
        return Layout("wide", tuple(tuple(WideRow(row.kind, row.parts) for row in rows) for rows in found.layers))

    monkeypatch.setattr(engine, "make_layout", wide)


@cache
def wide_model(base: str) -> Loaded:
    return load_model(variants.EXAMPLES / base, dtype=torch.float32)


@cache
def folders(base: str) -> tuple[Path, Path]:
    return artifact(base, "prefill"), artifact(base, "decode")
