"""A checkpoint of any format as a model of transformers: its text config, its tensors decoded, its layers one by one.

What runs is our bytes in somebody else's arithmetic. Layers of the MTP module, vision towers and buffers are no part of
the language model and are left out; anything else that does not find its place is an error.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError, LoadError
from ..families import Model
from ..formats import DTYPES
from ..formats.checkpoint import Checkpoint, Reader
from ..quantize.account import Item, account

#: from 5.19 on MLA models cache what the runtimes hold, the latent
NEEDED = "transformers>=5.19,<6"
#: model types of the hub that transformers knows under another name
ALIASES = {"kimi_k2": "deepseek_v3"}
WRAPPER = "language_model."
_DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
_NOT_TEXT = ("vision", "projector", "buffer", "attention.kv_scale")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def version() -> str:
    """The installed transformers, by name and version."""
    import transformers

    return f"transformers {transformers.__version__}"


def check_transformers() -> None:
    """LoadError unless an installed transformers has what the models need."""
    try:
        from transformers import __version__ as found
    except ImportError as error:
        raise LoadError(f"forward passes are transformers' own ({error}): pip install '{NEEDED}'") from None
    if tuple(map(int, found.split(".")[:2])) < (5, 19):
        raise LoadError(f"transformers {found} caches whole keys and values of MLA models: pip install '{NEEDED}'")


def check_device(device: str) -> None:
    """LoadError where torch cannot use it; told before any weight is decoded."""
    try:
        torch.zeros(1, device=device).cpu()  # "meta" has no values to give back
    except (RuntimeError, AssertionError) as error:  # the second where torch was built without it
        why = str(error).partition("\n")[0][:160]
        raise LoadError(f"device {device!r}: this torch cannot use it ({why}); cpu always works") from None


@contextlib.contextmanager
def no_errors_of_config() -> Iterator[None]:
    """What transformers makes of a config.json that it does not take, in one line: it can fail in any way."""
    try:
        yield
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise LoadError(f"config.json: {version()} does not take it ({type(error).__name__}: {why})") from None


def text_config(model: Model) -> Any:
    """The language model's config as transformers' own class, without any quantization: weights come decoded."""
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.models.auto import modeling_auto

    classes: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    values = dict(model.text)
    kind = values.pop("model_type")
    for key in ("quantization_config", "compression_config", "auto_map", "transformers_version"):
        values.pop(key, None)
    values["num_nextn_predict_layers"] = 0
    kind = ALIASES.get(kind, kind)
    if kind not in CONFIG_MAPPING:
        raise LoadError(
            f"model_type {kind}: {version()} has no class for it, and its own code is not run; {NEEDED} has "
            "deepseek_v3 (kimi_k2), glm4_moe, glm4_moe_lite and glm_moe_dsa"
        )
    with no_errors_of_config():
        config: Any = AutoConfig.for_model(kind, **values)
    if type(config) not in classes:
        raise LoadError(f"model_type {kind}: {version()} has no causal language model for {type(config).__name__}")
    experts, groups = config.n_routed_experts, config.n_group
    if not (1 <= config.num_experts_per_tok <= experts and 1 <= config.topk_group <= groups and experts % groups == 0):
        raise CheckpointError(
            f"config.json: {config.num_experts_per_tok} of {experts} experts a token, from {config.topk_group} of "
            f"{groups} groups: there is no such choice"
        )
    return config


def text_items(items: tuple[Item, ...]) -> list[Item]:
    """Those that make up the language model: no MTP layer, vision, KV scale or buffer that is computed anyhow."""
    return [item for item in items if not item.spec.mtp and item.spec.role not in _NOT_TEXT]


def refuse_linear_attention(where: object, model: Model) -> None:
    """LoadError for a model with layers that keep a state and no rows."""
    if not all(layer.parts for layer in model.cache()):
        raise LoadError(
            f"{where}: {model.text['model_type']} has linear attention, which keeps a state and no rows: there is no "
            "such cache here"
        )


def decode(reader: Reader, item: Item) -> torch.Tensor:
    """The values of one item: float32 where it is quantized, as it is stored where it is not.

    CheckpointError where a value is not finite.
    """
    parts = {part.suffix: _read(reader, item.module + part.suffix, part.dtype, part.shape) for part in item.parts}
    value = parts[item.parts[0].suffix] if item.format.plain else item.format.decode(parts, item.shape)
    if not bool(torch.isfinite(value).all()):
        raise CheckpointError(f"{reader.checkpoint.folder}: {item.spec.name}: a value is not finite")
    return value


def _read(reader: Reader, name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    raw = bytearray(math.prod(shape) * DTYPES[dtype])
    reader.read(name, 0, memoryview(raw))
    return torch.frombuffer(raw, dtype=_DTYPES[dtype]).reshape(shape)


class Matrix(NamedTuple):
    """A weight that has been loaded. modules: the names on the hub of those that it is made of (gate and up: two).

    weight: as it will be given to `torch.nn.functional.linear`. role: what a recipe calls it.
    """

    modules: tuple[str, ...]
    role: str
    weight: torch.Tensor


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a layer: (gate, up, down) of each, in order."""

    items: tuple[tuple[Item, Item, Item], ...]


class Source:
    """A checkpoint as the language model that transformers makes of its config. Only headers are read to open it.

    model: what the family knows of it. config: transformers' own. layers: the items of each decoder layer.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        check_transformers()
        self.checkpoint = checkpoint
        found = account(checkpoint)
        self.model = found.model
        refuse_linear_attention(checkpoint.folder, found.model)
        self.config = text_config(found.model)
        self.reader = Reader(checkpoint)
        self.layers: list[list[Item]] = [[] for _ in range(self.config.num_hidden_layers)]
        self._others: dict[str, Item] = {}
        for item in text_items(found.items):
            if item.spec.layer is None:
                self._others[item.spec.name.removeprefix(WRAPPER)] = item
            else:
                self.layers[item.spec.layer].append(item)

    def close(self) -> None:
        """Close the checkpoint's files."""
        self.reader.close()

    @property
    def outside(self) -> list[Item]:
        """The items outside of the layers: embeddings, the last norm, what makes logits."""
        return list(self._others.values())

    def experts(self, layer: int) -> Experts | None:
        """The routed experts of a layer, None where it is dense."""
        found: dict[int, dict[str, Item]] = {}
        for item in self.layers[layer]:
            if match := _EXPERT.fullmatch(self._local(item, layer)):
                found.setdefault(int(match[1]), {})[match[2]] = item
        return Experts(tuple((e["gate"], e["up"], e["down"]) for _, e in sorted(found.items()))) if found else None

    def _local(self, item: Item, layer: int) -> str:
        return item.spec.name.removeprefix(WRAPPER).removeprefix(f"model.layers.{layer}.")

    def rows(self, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Embeddings of int64 [B, L] -> [B, L, hidden], read row by row: the whole table is never held."""
        item = self._others["model.embed_tokens.weight"]
        (part,) = item.parts
        wanted, places = torch.unique(tokens, return_inverse=True)
        line = part.shape[1] * DTYPES[part.dtype]
        raw = bytearray(len(wanted) * line)
        for place, token in enumerate(wanted.tolist()):
            into = memoryview(raw)[place * line : (place + 1) * line]
            self.reader.read(item.module + part.suffix, token * line, into)
        table = torch.frombuffer(raw, dtype=_DTYPES[part.dtype]).reshape(len(wanted), -1).to(dtype)
        if not bool(torch.isfinite(table).all()):
            raise CheckpointError(f"{self.checkpoint.folder}: {item.spec.name}: a value is not finite")
        return table[places]

    def outer(self, name: str) -> torch.Tensor:
        """A tensor outside of the layers: "model.norm.weight", or "lm_head.weight", which may be the embedding."""
        return decode(self.reader, self._others.get(name) or self._others["model.embed_tokens.weight"])

    def load_layer(self, module: Any, layer: int, dtypes: DtypePlan, device: str, *, whole: bool) -> list[Matrix]:
        """Decode a layer's weights into transformers' meta layer -> those matrices that a runtime can hold quantized.

        whole: with its routed experts; else they are left out (`load_expert`). LoadError unless each has its place.
        """
        state: dict[str, torch.Tensor] = {}
        matrices = []
        for item in self.layers[layer]:
            local = self._local(item, layer)
            if _EXPERT.fullmatch(local):
                continue
            state[local] = decode(self.reader, item).to(device, dtypes.of(f"model.layers.{layer}.{local}"))
            if item.spec.linear:
                matrices.append(Matrix((item.module,), item.spec.role, state[local]))
        experts = self.experts(layer)
        if experts and whole:
            for name, value in self._stacked(experts, dtypes.default, device):
                state[f"mlp.experts.{name}"] = value
            gate_up, down = state["mlp.experts.gate_up_proj"], state["mlp.experts.down_proj"]
            for expert, (gate, up, last) in enumerate(experts.items):
                matrices.append(Matrix((gate.module, up.module), gate.spec.role, gate_up[expert]))
                matrices.append(Matrix((last.module,), last.spec.role, down[expert]))
        self._place(module, state, layer, left_out=bool(experts) and not whole)
        return matrices

    def _stacked(self, experts: Experts, dtype: torch.dtype, device: str) -> Iterator[tuple[str, torch.Tensor]]:
        """All experts as transformers holds them: [E, 2 * inner, hidden], gate rows first, and [E, hidden, inner]."""
        inner, hidden = experts.items[0][0].shape
        gate_up = torch.empty(len(experts.items), 2 * inner, hidden, dtype=dtype, device=device)
        down = torch.empty(len(experts.items), hidden, inner, dtype=dtype, device=device)
        for expert, (gate, up, last) in enumerate(experts.items):
            gate_up[expert, :inner] = decode(self.reader, gate).to(dtype)
            gate_up[expert, inner:] = decode(self.reader, up).to(dtype)
            down[expert] = decode(self.reader, last).to(dtype)
        yield "gate_up_proj", gate_up
        yield "down_proj", down

    def load_expert(self, experts: Experts, expert: int, dtype: torch.dtype, device: str) -> tuple[Matrix, Matrix]:
        """One routed expert: gate and up together, [2 * inner, hidden], and down."""
        gate, up, last = experts.items[expert]
        one = Experts((experts.items[expert],))
        (_, gate_up), (_, down) = self._stacked(one, dtype, device)
        role = gate.spec.role
        return Matrix((gate.module, up.module), role, gate_up[0]), Matrix((last.module,), role, down[0])

    def _place(self, module: Any, state: dict[str, torch.Tensor], layer: int, *, left_out: bool) -> None:
        expected = {name: value.shape for name, value in module.state_dict().items()}
        if left_out:
            expected = {name: shape for name, shape in expected.items() if not name.startswith("mlp.experts.")}
        where = f"{self.checkpoint.folder}: layer {layer} as {type(module).__name__} of {version()}"
        for name in sorted(expected.keys() ^ state.keys()):
            what = "is not in the checkpoint" if name in expected else "has no place in it"
            raise LoadError(f"{where}: {name} {what}")
        for name, value in state.items():
            if value.shape != expected[name]:
                raise LoadError(f"{where}: {name} is {list(value.shape)}, expected {list(expected[name])}")
        module.load_state_dict(state, strict=False, assign=True)


class DtypePlan:
    """In which dtype transformers holds each parameter when it is asked for `default`: routers stay in float32."""

    def __init__(self, model: Any, default: torch.dtype) -> None:
        self.default = default
        self._plan: dict[str, torch.dtype] = model._get_dtype_plan(default)
        self._built: dict[str, torch.dtype] = {name: value.dtype for name, value in model.state_dict().items()}

    def of(self, name: str) -> torch.dtype:
        """The dtype of a parameter, by transformers' name of it."""
        for part, dtype in self._plan.items():
            if part in name:
                return dtype
        return self._built.get(name, self.default)
