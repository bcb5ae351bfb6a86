"""What a runtime is given to continue, the same for all: token ids, made with the checkpoint's own tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import LoadError
from ...formats.checkpoint import parse_json, read_file

PROMPT = "def main"
PROMPT_IDS = range(5, 21)  # for a checkpoint without a tokenizer


def prompt_ids(folder: Path, prompt: str | None) -> tuple[list[int], Any]:
    """The token ids of a prompt (of ours without one) and the tokenizer; None where the folder has none that is data.

    Kimi's tokenizers are code of the checkpoint, which is not run: LoadError where a prompt is given all the same.
    """
    import transformers

    if (folder / "tokenizer.json").exists():
        fast: Any = transformers.PreTrainedTokenizerFast
        tokenizer = fast(tokenizer_file=str(folder / "tokenizer.json"))
    elif (settings := folder / "tokenizer_config.json").exists():
        if "auto_map" in parse_json(read_file(settings), settings):
            if prompt is not None:
                raise LoadError(f"{folder}: its tokenizer is code, which is not run here; leave the prompt out")
            return list(PROMPT_IDS), None
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    else:
        return list(PROMPT_IDS), None
    return list(tokenizer.encode(PROMPT if prompt is None else prompt)), tokenizer
