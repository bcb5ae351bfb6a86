"""How an answer is asked for in lm-eval's words, and where it ends: gen_kwargs, stop strings, ends of text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UsageError
from .runner import Finished, Sampling

#: tokens of an answer where a task does not say, as in lm-eval's own models
MAX_GEN_TOKS = 256
_KNOWN = "do_sample, temperature, top_p, top_k, seed, until, max_gen_toks"
_NEUTRAL = {"num_beams": 1, "repetition_penalty": 1.0, "min_p": 0.0}  # known, as long as they change nothing


class Way(NamedTuple):
    """How a prompt is gone on with. limit: tokens. until: strings before which an answer ends."""

    sampling: Sampling
    limit: int
    until: tuple[str, ...]


def way_of(gen_kwargs: Mapping[str, Any], task: str, seed: int) -> Way:
    """As lm-eval understands them. seed: where they name none.

    UsageError for what is not known: an answer that is made otherwise than asked would be no answer.
    """
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

    try:
        asked = dict(normalize_gen_kwargs(dict(gen_kwargs), MAX_GEN_TOKS))
        numbers = [asked.get(name) for name in ("max_gen_toks", "temperature", "top_p", "top_k", "seed")]
        if any(isinstance(value, str) for value in numbers if value is not None):
            raise ValueError(f"{numbers} are not all numbers")
    except (TypeError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise UsageError(f"task {task}: gen_kwargs {dict(gen_kwargs)} make no sense ({why})") from None
    until = tuple(stop for stop in handle_stop_sequences(asked.pop("until"), None) if stop)
    limit, sample = int(asked.pop("max_gen_toks")), asked.pop("do_sample")
    temperature, top_p, top_k, own = (asked.pop(name, None) for name in ("temperature", "top_p", "top_k", "seed"))
    for name, value in asked.items():
        if name not in _NEUTRAL or value not in (None, _NEUTRAL[name]):
            raise UsageError(f"task {task}: gen_kwargs {name}={value!r} is not known; expected {_KNOWN}")
    if limit < 1:
        raise UsageError(f"task {task}: gen_kwargs max_gen_toks={limit}: expected 1 or more")
    if not sample:
        return Way(Sampling(), limit, until)
    if not temperature or temperature < 0:
        raise UsageError(f"task {task}: gen_kwargs do_sample needs a temperature above 0, found {temperature}")
    nucleus = 1.0 if top_p is None else float(top_p)
    if not 0 < nucleus <= 1:
        raise UsageError(f"task {task}: gen_kwargs top_p={top_p}: expected above 0, and at most 1")
    chosen = Sampling(float(temperature), nucleus, max(0, int(top_k or 0)), seed if own is None else int(own))
    return Way(chosen, limit, until)


def ends(stops: Sequence[str], end_tokens: frozenset[int], decode: Callable[[Sequence[int]], str]) -> Finished:
    """Whether an answer is at its end: at a token that ends it, or as soon as a stop string is there.

    decode: special tokens included. Only the last tokens are decoded: a stop string has no more of them than bytes.
    """
    tail = max((len(stop.encode()) for stop in stops), default=0) + 4  # a decoder may swallow the first of a piece

    def finished(number: int, tokens: Sequence[int]) -> bool:
        if tokens[-1] in end_tokens:
            return True
        shown = decode(tokens[-tail:]) if stops else ""
        return any(stop in shown for stop in stops)

    return finished


def end_tokens(tokenizer: Any) -> frozenset[int]:
    """The tokenizer's end of text, and those that generation_config.json beside it names, or config.json."""
    found = frozenset() if tokenizer.eos_token_id is None else frozenset({int(tokenizer.eos_token_id)})
    for name in ("generation_config.json", "config.json"):
        try:
            content = json.loads((Path(tokenizer.name_or_path) / name).read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            named = content.get("eos_token_id", (content.get("text_config") or {}).get("eos_token_id"))
            if named is not None:
                return found | {int(end) for end in (named if isinstance(named, list) else [named])}
    return found
