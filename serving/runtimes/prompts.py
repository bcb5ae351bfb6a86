"""What a runtime is given to continue, the same for all: token ids, made with the checkpoint's own tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PROMPT = "def main"
PROMPT_IDS = range(5, 21)  # for a checkpoint without a tokenizer


def prompt_ids(folder: Path, prompt: str | None) -> tuple[list[int], Any]:
    """The token ids of a prompt (of ours without one) and the tokenizer; None where the folder has none."""
    import transformers

    if (folder / "tokenizer.json").exists():
        fast: Any = transformers.PreTrainedTokenizerFast
        tokenizer = fast(tokenizer_file=str(folder / "tokenizer.json"))
    elif (folder / "tokenizer_config.json").exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    else:
        return list(PROMPT_IDS), None
    return list(tokenizer.encode(prompt or PROMPT)), tokenizer
