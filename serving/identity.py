"""What two checkpoints of one model must have in common, found by content: side files, norms, KV scales, foldings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..formats import PLAIN
from ..formats.checkpoint import Checkpoint, Reader, read_file
from ..quantize.fold import Folding

#: the files that turn text into tokens
_VOCABULARY = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt", "added_tokens.json")
#: keys of tokenizer_config.json that change the tokens of a text
_TOKENS = (
    "added_tokens_decoder", "add_bos_token", "add_eos_token", "add_prefix_space", "bos_token", "eos_token", "unk_token",
    "tokenizer_class",
)  # fmt: skip
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_SCALES = ("k_scale", "v_scale", "kv_scale", "output_scale", "k_zero_point", "v_zero_point")
#: small tensors that no recipe quantizes: equal in all artifacts of one source
_NORMS = ("norm.weight", "norm.bias", "e_score_correction_bias")
#: norms whose output is cached, which a folding multiplies by powers of two
_OF_CACHE = ("self_attn.kv_a_layernorm.weight", "self_attn.k_norm.weight", "self_attn.q_norm.weight")
_LARGEST = 1 << 20  # bytes


class Norms(NamedTuple):
    """Norms and router biases that two checkpoints hold in one dtype and shape: how many, and those that differ.

    of_cache: norms whose output is cached, or that belong to the queries which read it. others: all the rest.
    """

    compared: int
    of_cache: list[str]
    others: list[str]


def differing_norms(first: Checkpoint, second: Checkpoint) -> Norms:
    """Compare all small unquantized tensors that both have, by their bytes. Reads a few megabytes."""
    readers = Reader(first), Reader(second)
    compared = 0
    of_cache: list[str] = []
    others: list[str] = []
    try:
        for name, stored in first.tensors.items():
            other = second.tensors.get(name)
            if other is None or not name.endswith(_NORMS) or stored.dtype not in PLAIN or stored.nbytes > _LARGEST:
                continue
            if (stored.dtype, stored.shape) != (other.dtype, other.shape):
                continue
            compared += 1
            if _bytes(readers[0], name, stored.nbytes) != _bytes(readers[1], name, stored.nbytes):
                (of_cache if name.endswith(_OF_CACHE) else others).append(name)
    finally:
        for reader in readers:
            reader.close()
    return Norms(compared, of_cache, others)


def kv_scales(checkpoint: Checkpoint) -> dict[str, bytes]:
    """KV scales and zero points: name -> dtype and bytes."""
    reader = Reader(checkpoint)
    try:
        return {
            name: stored.dtype.encode() + _bytes(reader, name, stored.nbytes)
            for name, stored in checkpoint.tensors.items()
            if name.endswith(tuple(f".{scale}" for scale in _SCALES)) and stored.nbytes <= _LARGEST
        }
    finally:
        reader.close()


def differing_folds(first: Folding, second: Folding) -> list[tuple[str, str, int, int]]:
    """(layer, part, exponent of the first, exponent of the second) where two foldings differ; the first layer first."""
    pairs = {(layer, part) for folding in (first, second) for layer, parts in folding.items() for part in parts}
    found = []
    for layer, part in sorted(pairs, key=lambda pair: (int(pair[0]), pair[1])):
        one, two = (folding.get(layer, {}).get(part, 0) for folding in (first, second))
        if one != two:
            found.append((layer, part, one, two))
    return found


def _bytes(reader: Reader, name: str, size: int) -> bytes:
    out = bytearray(size)
    reader.read(name, 0, memoryview(out))
    return bytes(out)


def differing_side_files(first: Checkpoint, second: Checkpoint) -> Iterator[tuple[str, str, str]]:
    """(severity, file, message) for the files beside the weights that matter when two pools serve one request.

    The pools tokenize a request each for itself, so another vocabulary or template gives the decode pool positions that
    the cache does not have.
    """
    files = set(first.side_files()), set(second.side_files())
    for name in sorted(files[0] | files[1]):
        if name not in files[0] or name not in files[1]:
            if name in _VOCABULARY:
                where = "prefill" if name in files[0] else "decode"
                yield "error", name, f"only the {where} checkpoint has it: the pools tokenize differently; copy it over"
            elif name in (*_TEMPLATES, "generation_config.json"):
                where = "prefill" if name in files[0] else "decode"
                yield "warning", name, f"only the {where} checkpoint has it; copy it over"
            continue
        one, two = read_file(first.folder / name), read_file(second.folder / name)
        if hashlib.sha256(one).digest() == hashlib.sha256(two).digest():
            continue
        if name in _VOCABULARY:
            yield "silent", name, "the pools tokenize differently: the cache is at other positions; use one tokenizer"
        elif name in _TEMPLATES:
            yield "warning", name, "chat templates differ: the pools may see prompts of different length; use one"
        elif name == "tokenizer_config.json":
            yield from _tokenizer_config(_object(one), _object(two))
        elif name == "generation_config.json":
            yield "warning", name, "differs: the decode pool's decides how texts end and are sampled; use one"
        elif name.endswith(".py"):
            yield "warning", name, "code that --trust-remote-code runs differs between the pools; use one"


def _tokenizer_config(one: dict[str, Any], two: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    keys = sorted(key for key in one.keys() | two.keys() if one.get(key) != two.get(key))
    hard = [key for key in keys if key in _TOKENS]
    if hard:
        yield "silent", "tokenizer_config.json", f"{', '.join(hard)} differ: the pools tokenize differently; use one"
    if "chat_template" in keys:
        message = "chat templates differ: the pools may see prompts of different length; use one"
        yield "warning", "tokenizer_config.json", message
    rest = [key for key in keys if key not in (*_TOKENS, "chat_template")]
    if rest:
        yield "warning", "tokenizer_config.json", f"{', '.join(rest)} differ; use one"


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
