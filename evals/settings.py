"""What an evaluation is asked for, and how it runs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Settings:
    """What is asked, and how. Every field but those of the machine (batch, memory, device, way) shapes the numbers.

    text: what KL is measured on instead of the tasks' own texts. tokens: how many of it are compared. margin: what a
    share may lose, as a fraction. floor: whether the baseline runs twice. requests: a file of tool-call requests;
    answers: of answers to them that stand for the baseline's; answers_out: where the target's are to lie.
    metadata: what tasks are told; told: that, and the folder of a tokenizer. max_length: tokens that a text may have.
    served_model, tokenizer, chat, concurrency, timeout, key_file: of servers.
    """

    tasks: tuple[str, ...] = ()
    include: tuple[Path, ...] = ()
    limit: int | None = None
    num_fewshot: int | None = None
    chat_template: bool = False
    system_instruction: str | None = None
    repeats: int = 1
    seed: int = 0
    gen_kwargs: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    told: Mapping[str, Any] = field(default_factory=dict)
    max_length: int | None = None
    margin: float | None = None
    floor: bool = True
    text: Path | None = None
    tokens: int = 8192
    requests: Path | None = None
    answers: Path | None = None
    answers_out: Path | None = None
    dtype: str = "bfloat16"
    batch: int = 8
    memory: int = 16_000_000_000
    device: str = "cpu"
    way: str = "auto"
    work: Path | None = None
    trust_remote_code: bool = False
    served_model: str | None = None
    tokenizer: Path | None = None
    chat: bool = False
    concurrency: int = 8
    timeout: float = 600.0
    key_file: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """As the record holds it: what shapes the numbers."""
        return {
            "tasks": list(self.tasks),
            "include": [folder.name for folder in self.include],
            "limit": self.limit,
            "num_fewshot": self.num_fewshot,
            "chat_template": self.chat_template,
            "system_instruction": self.system_instruction,
            "repeats": self.repeats,
            "seed": self.seed,
            "gen_kwargs": dict(self.gen_kwargs),
            "metadata": dict(self.metadata),
            "max_length": self.max_length,
            "margin": self.margin,
            "dtype": self.dtype,
            "chat": self.chat,
            "served_model": self.served_model,
            "tool_calls": _file(self.requests) if self.requests else None,
            "answers": _file(self.answers) if self.answers else None,
        }


def _file(path: Path) -> str:
    """Its name, and which content it had."""
    return f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
