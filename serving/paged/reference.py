"""`load --runtime reference`: one artifact, decoded, in transformers' own model, continues a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import LoadError, PhasefoldError
from ..runtimes.logs import one_line
from ..runtimes.prompts import prompt_ids
from .engine import Engine, Request
from .weights import load_model


def generate(folder: Path, prompt: str | None, tokens: int, *, device: str = "cpu") -> dict[str, Any]:
    """Continue a prompt (one of ours without one) greedily. Returns version, class, text and number of tensors.

    Where the checkpoint has no tokenizer the text is the numbers of the tokens. Raises as `load_model` does, and the
    error of a page if there is one.
    """
    import transformers

    given, tokenizer = encode(folder, prompt)
    loaded = load_model(folder, device=device)
    engine = Engine(loaded, num_pages=2 + (len(given) + tokens) // 64)
    request = Request(given, tokens)
    request.lease, logits = engine.prefill(given)
    request.take(logits[-1])
    while not request.done:
        engine.decode([request])
    if request.lease is not None:
        engine.stop(request)
    if request.error is not None:
        raise request.error
    text = tokenizer.decode(request.output) if tokenizer else " ".join(map(str, request.output))
    version, name = f"transformers {transformers.__version__}", type(loaded.model).__name__
    return {"version": version, "model_class": name, "text": text, "tensors": loaded.tensors}


def encode(folder: Path, prompt: str | None) -> tuple[list[int], Any]:
    """Token ids and tokenizer, as `prompt_ids`. LoadError for a prompt that has none, for want of a tokenizer say."""
    if prompt == "":
        raise LoadError("the prompt is empty; give some text to continue")
    try:
        ids, tokenizer = prompt_ids(folder, prompt)
    except PhasefoldError:
        raise
    except Exception as error:  # tokenizers raises nothing narrower
        raise LoadError(f"{folder}: its tokenizer cannot be read ({one_line(error)})") from None
    if prompt is not None and tokenizer is None:
        raise LoadError(f"{folder}: no tokenizer.json in it; the prompt cannot be made into tokens")
    return ids, tokenizer
