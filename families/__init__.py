"""What a tensor *is*: every checkpoint family as data, one file each with a `FAMILY` value. No torch, no files.

A family derives from `config.json` the name, shape and role of every logical tensor of its models (as if nothing were
quantized), so that a missing, an extra or a mis-shaped tensor is found from headers alone. `identify` finds the
architecture that a config calls for; the builders that families share are in `_layers`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from ..errors import CheckpointError

Config = Mapping[str, Any]

#: every role that a tensor can have; a recipe that names another one is mistaken
ROLES = frozenset(
    """
    routed_expert shared_expert dense_mlp router router.bias latent.down latent.up latent.norm
    attention.q attention.q_a attention.q_b attention.kv_a attention.kv_b attention.k attention.v attention.o
    attention.gate attention.norm attention.bias indexer.wq_b indexer.wk indexer.weights_proj indexer.norm
    linear_attention.q linear_attention.k linear_attention.v linear_attention.b
    linear_attention.f_a linear_attention.f_b
    linear_attention.g linear_attention.g_a linear_attention.g_b linear_attention.o linear_attention.conv
    linear_attention.decay linear_attention.norm attention.kv_scale norm residual.norm residual.proj embed lm_head
    mtp.eh_proj mtp.norm mtp.embed mtp.head vision projector buffer
    """.split()
)


class TensorSpec(NamedTuple):
    """One logical tensor of a model.

    name: as on the hub, e.g. "model.layers.3.mlp.experts.0.gate_proj.weight".
    shape: [out, in] for matrices; -1 stands for any extent.
    role: dotted, e.g. "routed_expert", "attention.kv_a", "indexer.wk", "router", "norm".
    layer: decoder layer, or None outside of the layers.
    mtp: belongs to a multi-token-prediction layer.
    linear: a matrix that runtimes can hold quantized.
    optional: may be absent (buffers; KV scales; copies of the embedding in an MTP layer).
    """

    name: str
    shape: tuple[int, ...]
    role: str
    layer: int | None = None
    mtp: bool = False
    linear: bool = False
    optional: bool = False


class CachePart(NamedTuple):
    """What one layer keeps of each token. name: "kv_c", "k_pe", "k", "v" or "index_k"; `heads` rows of `width`."""

    name: str
    heads: int
    width: int


class CacheLayer(NamedTuple):
    """The KV cache of one decoder layer. No parts: linear attention, whose state does not grow with the tokens.

    MLA keeps one latent row a token, `kv_c` after its norm and `k_pe` after RoPE; grouped-query attention keeps `k`
    after RoPE and `v`; a DSA layer with an indexer of its own keeps that one's keys too.
    """

    layer: int
    mtp: bool
    parts: tuple[CachePart, ...]


class Fold(NamedTuple):
    """A tensor that takes part when a cached part is multiplied by 2^e: it is multiplied by 2^(sign * e).

    tail: its name within a decoder layer. Multiplied are the output features (rows; elements of a vector) with
    first <= number % period < last: all of them unless said otherwise.
    """

    part: str
    tail: str
    sign: int
    first: int = 0
    last: int = 1
    period: int = 1


@dataclass(frozen=True, slots=True)
class Architecture:
    """One model architecture.

    name: its `model_type`.
    tensors(config): every logical tensor that the config calls for, MTP layers included, in the order of the layers.
        Given the whole config.json; a key that is missing or makes no sense is a CheckpointError that names it.
    cache(config): what each layer keeps of a token, MTP layers included, in order.
    fp8: the FP8 format (a name of `formats`) in which this architecture is served.
    folds(text): the tensors of every decoder layer that take part in folding a cached part, such that what the layer
        puts out stays the same to the bit; None where that is not known. Given the language model's config.
    text_models: the model types that its language model may have, where that one's config is in `text_config`.
    fused: modules that a runtime builds out of several of the checkpoint's and that must share one format, as
        (runtimes, tail of the fused module's name, tails of its parts), e.g.
        (("vllm",), "self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")).
    no_int4: roles that a runtime cannot hold as packed INT4, with the reason.
    sglang_prefix: (checkpoint's prefix, SGLang's prefix) where SGLang names modules differently.
    sglang_fuses_shared: SGLang serves the shared expert as one more routed one, which wants one format for both.
    """

    name: str
    tensors: Callable[[Config], Iterator[TensorSpec]]
    cache: Callable[[Config], list[CacheLayer]]
    fp8: str
    folds: Callable[[Config], list[Fold]] | None = None
    text_models: tuple[str, ...] = ()
    fused: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = ()
    no_int4: Mapping[str, str] | None = None
    sglang_prefix: tuple[str, str] | None = None
    sglang_fuses_shared: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: the architectures that it answers to, by `model_type`."""

    name: str
    architectures: Mapping[str, Architecture]


@dataclass(frozen=True, slots=True)
class Model:
    """One checkpoint's model, as its config.json describes it.

    family: name of the family.
    config: the whole config.json.
    text: the part of it that describes the language model; `config` itself where there is no other part.
    """

    family: str
    architecture: Architecture
    config: Config
    text: Config

    def tensors(self) -> list[TensorSpec]:
        """Every logical tensor, in the order of the layers. Derived anew at each call: keep what you get.

        Where `num_nextn_predict_layers` asks for MTP layers their tensors are here, although a checkpoint may hold none
        of them: some savers drop the layer and leave the config as it was.
        """
        return list(self.architecture.tensors(self.config))

    def cache(self) -> list[CacheLayer]:
        """What each layer keeps of a token: decoder layers in order, MTP layers behind them."""
        return self.architecture.cache(self.config)

    def folds(self) -> list[Fold]:
        """What folding touches in each decoder layer. Raises CheckpointError where it is not known to be exact."""
        if self.architecture.folds is None:
            raise CheckpointError(
                f"{self.architecture.name}: folding is not known to be exact for this model; go without"
            )
        return self.architecture.folds(self.text)


@cache
def families() -> Mapping[str, Family]:
    """All families by name. Every public module of this package takes part, with its `FAMILY` value."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    found = [importlib.import_module(f".{name}", __name__).FAMILY for name in names]
    return {family.name: family for family in found}


def identify(config: Config) -> Model:
    """The model that a config.json describes. A type that no family answers to is refused."""
    if not isinstance(config, Mapping):
        raise CheckpointError(f"config.json: holds a {type(config).__name__}, expected an object")
    kind = config.get("model_type")
    for family in families().values():
        architecture = family.architectures.get(kind) if isinstance(kind, str) else None
        if architecture:
            return Model(family.name, architecture, config, _text_of(config, architecture))
    known = ", ".join(sorted(name for family in families().values() for name in family.architectures))
    raise CheckpointError(f"config.json: model_type is {_shown(kind)}; supported are {known}")


def _text_of(config: Config, architecture: Architecture) -> Config:
    if not architecture.text_models:
        return config
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(f"config.json: text_config is {_shown(text)}; {architecture.name} needs an object there")
    if (kind := text.get("model_type")) not in architecture.text_models:
        expected = " or ".join(architecture.text_models)
        raise CheckpointError(f"config.json: text_config.model_type is {_shown(kind)}, expected {expected}")
    return text


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value[:40]) if isinstance(value, str) else f"a {type(value).__name__}"
