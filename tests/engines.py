"""What tests of the reference runtime share: models and artifacts of the examples, text, transformers on its own."""

import atexit
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import variants
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache

from phasefold.formats.checkpoint import open_checkpoint
from phasefold.quantize.convert import convert
from phasefold.quantize.plan import make_plan
from phasefold.recipes import load
from phasefold.serving.paged.engine import Engine, Request
from phasefold.serving.paged.weights import Loaded, load_model

BASES = ("tiny-kimi", "tiny-glm4", "tiny-glm5")
TEXT = """Return a new array of the given shape and type, without initializing entries.

    Parameters
    ----------
    shape : int or tuple of int
        Shape of the empty array, e.g. ``(2, 3)`` or ``2``. If the file does not exist, an error is raised.
    dtype : data-type, optional
        The default is the same as the input. Whether to store multi-dimensional data in row-major order.

    Returns
    -------
    out : ndarray
        Array of uninitialized data of the given shape, dtype, and order. Object arrays will be set to None.
    """


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The models are tiny: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def artifact(base: str, phase: str) -> Path:
    """The prefill (FP8) or decode (INT4) artifact of an example, made once."""
    root = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, root)
    family = "kimi" if base == "tiny-kimi" else "glm"
    recipe = load(f"{family}-{'prefill-fp8' if phase == 'prefill' else 'decode-int4'}")
    convert(make_plan(open_checkpoint(variants.EXAMPLES / base), recipe), root / "out")
    return root / "out"


@cache
def loaded(base: str, phase: str = "source") -> Loaded:
    """The model of an example or of an artifact of it."""
    return load_model(variants.EXAMPLES / base if phase == "source" else artifact(base, phase))


@cache
def text_tokens(base: str) -> list[int]:
    return Tokenizer.from_file(str(variants.EXAMPLES / base / "tokenizer.json")).encode(TEXT * 5).ids


def tokens(base: str, start: int, count: int) -> list[int]:
    """Some tokens of a text of the kind that the examples were trained on."""
    return text_tokens(base)[start : start + count]


def by_transformers(folder: Path, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def forward(model: torch.nn.Module, tokens: list[list[int]], cache: DynamicCache) -> torch.Tensor:
    """Logits [B, new, vocabulary] by transformers alone, with the experts as the engine has them."""
    model.set_experts_implementation("batched_mm" if len(tokens[0]) == 1 else "eager")
    with torch.inference_mode():
        return model(input_ids=torch.tensor(tokens), cache=cache, use_cache=True).logits


def continued(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """Greedy, by transformers alone."""
    cache, found = DynamicCache(config=model.config), list(prompt)
    while len(found) < len(prompt) + count:
        new = found[cache.get_seq_length() :]
        found.append(int(forward(model, [new], cache)[0, -1].argmax()))
    return found[len(prompt) :]


def divergence(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Mean KL(reference || ours) in nats, in float64, by hand."""
    a, b = (value.double().numpy() - value.double().logsumexp(-1, keepdim=True).numpy() for value in (ours, reference))
    return float((np.exp(b) * (b - a)).sum(-1).mean())


ORDER_OF_SUMS = 6e-4  # nats: 0.00003 on one CPU, 0.00036 on another, where an expert is chosen otherwise
LENGTHS = (300, 37, 128, 65, 11)


def run_batch(engine: Engine, base: str, *, budget: int = 30, only: int | None = None, fault=None) -> list[Request]:
    """Five requests of different lengths made to continue their texts; before each step `fault` may do something."""
    requests = []
    for place, length in enumerate(LENGTHS):
        if only in (None, place):
            start = 70 * place
            request = Request(tokens(base, start, length), budget, forced=tokens(base, start + length, budget))
            request.lease, logits = engine.prefill(request.prompt)
            request.take(logits[-1])
            requests.append(request)
    for step in range(budget - 1):
        if fault is not None:
            fault(engine, requests, step)
        engine.decode(requests)
    return requests
