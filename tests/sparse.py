"""Full-size checkpoints of published models without their weights: true config, headers, index and file sizes.

The data is a hole in each file, so that a terabyte costs megabytes, and reads as zeros. `published.json` says what each
release is; names and shapes come from our families, and test_families.py holds the totals against the published ones.
Which tensor lies in which shard is not known for most releases: here the shards are of about equal size, in the order
of the layers, and the tensors of one module (codes, scales, shape) lie together.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import shutil
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from phasefold.families import TensorSpec, identify

_PUBLISHED = json.loads((Path(__file__).parent / "data" / "published.json").read_text())

#: what is known of each release, by its name on the hub
MODELS: dict[str, dict[str, Any]] = _PUBLISHED["models"]

_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I32": 4, "U8": 1}
_EXPERTS = ("routed_expert",)
_KDA_IN_F32 = ("linear_attention.decay", "linear_attention.conv", "linear_attention.norm")
_F32 = {"kimi_linear": ("linear_attention.decay",), "kimi_k3": ("router.bias", *_KDA_IN_F32)}
_SHARD_NAME = "model-{index:05d}-of-{count:05d}.safetensors"


class Stored(NamedTuple):
    """A tensor as it lies in a file, and the logical one that it is (a part of)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    spec: TensorSpec

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * _BYTES[self.dtype]


def config_of(model: str) -> dict[str, Any]:
    """The config.json of a release, with its quantization_config where the release has it."""
    config, text = _config(model)
    scheme = MODELS[model]["scheme"]
    if scheme != "bf16":
        quantization = text["quantization_config"] = copy.deepcopy(_PUBLISHED["quantization"][scheme])
        if text["model_type"].startswith("glm"):
            key = "ignore" if scheme == "fp8-channel" else "modules_to_not_convert"
            quantization[key] = _untouched(stored(model))
    return config


def stored(model: str) -> list[Stored]:
    """Every tensor of a release's files, in the order of the layers."""
    about, (config, _) = MODELS[model], _config(model)
    in_f32 = _F32.get(config["model_type"], ("router.bias",))
    return list(itertools.chain.from_iterable(_parts(spec, about, in_f32) for spec in identify(config).tensors()))


def write(model: str, folder: Path, shards: int | None = None, mtp_file: bool = False) -> dict[str, Any]:
    """Write a release into a new folder; gives {"tensors", "total_size", "files"} of what was written.

    shards: how many model files; as published where it is not given, of about 5 GB where that is not known.
    mtp_file: the MTP tensors lie in a file of their own, mtp.safetensors.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(model), indent=2))
    tensors = stored(model)
    total = sum(tensor.nbytes for tensor in tensors)
    mtp = [tensor for tensor in tensors if mtp_file and tensor.spec.mtp]
    if mtp:
        tensors = [tensor for tensor in tensors if not tensor.spec.mtp]
    count = shards or MODELS[model]["shards"] or -(-total // 5_000_000_000)
    shard_name = MODELS[model].get("shard_name", _SHARD_NAME)
    files = {shard_name.format(index=index, count=count): part for index, part in enumerate(_cut(tensors, count), 1)}
    if mtp:
        files["mtp.safetensors"] = mtp
    for name, part in files.items():
        write_header(folder / name, part)
    index = {tensor.name: name for name, part in files.items() for tensor in part}
    whole = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(whole))
    return {"tensors": len(index), "total_size": total, "files": list(files)}


class Hub:
    """Releases, written into a folder when they are asked for. One is kept at a time: all of them are 600 MB."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, model: str, **options: bool) -> Path:
        """The folder of a release. options: of `write`."""
        folder = self._root / (model.replace("/", "--") + "-".join(options))
        if not folder.exists():
            if self._root.exists():
                shutil.rmtree(self._root)
            write(model, folder, **options)
        return folder


def write_header(path: Path, tensors: Iterable[Stored]) -> None:
    """A safetensors file whose data is a hole; wide dtypes come first, as the library does it to keep them aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in sorted(tensors, key=lambda tensor: (-_BYTES[tensor.dtype], tensor.name)):
        end = offset + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + offset)


def _config(model: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A config without its quantization, and the part of it that describes the language model."""
    about = MODELS[model]
    config = _merged(copy.deepcopy(_PUBLISHED["configs"][about["config"]]), about.get("changes", {}))
    text = config.get("text_config", config)
    layers = range(text["num_hidden_layers"])
    if "linear_attn_config" in text:
        linear = text["linear_attn_config"]
        linear["kda_layers"] = [layer + 1 for layer in layers if layer + 1 not in linear["full_attn_layers"]]
    if "full_indexers" in text:
        full, dense = text.pop("full_indexers"), text["first_k_dense_replace"]
        text["indexer_types"] = ["full" if layer in full else "shared" for layer in layers]
        text["mlp_layer_types"] = ["dense" if layer < dense else "sparse" for layer in layers]
    return config, text


def _merged(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        config[key] = _merged(config[key], value) if key == "text_config" else value
    return config


def _parts(spec: TensorSpec, about: dict[str, Any], in_f32: tuple[str, ...]) -> Iterator[Stored]:
    """What is stored for one logical tensor: nothing for an optional one that the release does not have."""
    name, shape, scheme = spec.name, spec.shape, about["scheme"]
    module = name.removesuffix(".weight")
    if spec.role == "buffer":
        if "inv_freq" in about:
            dtype, length = about["inv_freq"]
            yield Stored(name, dtype, (length,), spec)
    elif spec.role in ("mtp.embed", "mtp.head") and not about.get("mtp_copies"):
        return
    elif spec.role == "attention.kv_scale":  # no release has any
        return
    elif scheme == "fp8" and spec.linear:
        yield Stored(name, "F8_E4M3", shape, spec)
        yield Stored(f"{module}.weight_scale_inv", "F32", tuple(-(-size // 128) for size in shape), spec)
    elif scheme == "fp8-channel" and (spec.linear or (spec.role == "mtp.head" and about.get("fp8_mtp_head"))):
        yield Stored(name, "F8_E4M3", shape, spec)
        yield Stored(f"{module}.weight_scale", "F32", (shape[0], 1), spec)
    elif scheme == "ct-int4" and spec.role in _EXPERTS:
        yield Stored(f"{module}.weight_packed", "I32", (shape[0], shape[1] // 8), spec)
        yield Stored(f"{module}.weight_scale", "BF16", (shape[0], shape[1] // 32), spec)
        yield Stored(f"{module}.weight_shape", "I32", (2,), spec)
    elif scheme == "ct-mxfp4" and spec.role in _EXPERTS:
        yield Stored(f"{module}.weight_packed", "U8", (shape[0], shape[1] // 2), spec)
        yield Stored(f"{module}.weight_scale", "U8", (shape[0], shape[1] // 32), spec)
    else:
        yield Stored(name, "F32" if spec.role in in_f32 else "BF16", shape, spec)


def _untouched(tensors: list[Stored]) -> list[str]:
    """The modules that GLM's FP8 releases list as not quantized; the lists have a name of their own for one of them."""
    names = (tensor.name.removesuffix(".weight") for tensor in tensors if tensor.dtype in ("BF16", "F32"))
    plain = [name for name in names if not name.endswith(("weight_scale", "weight_scale_inv"))]
    return sorted(name.replace("indexer.weights_proj", "indexers_proj") for name in plain)


def _cut(tensors: list[Stored], count: int) -> Iterator[list[Stored]]:
    """Exactly `count` runs of whole modules, of about equal size."""
    modules = [list(group) for _, group in itertools.groupby(tensors, key=lambda tensor: tensor.spec.name)]
    total, done, number = sum(tensor.nbytes for tensor in tensors), 0, 1
    run: list[Stored] = []
    for left, module in zip(range(len(modules), 0, -1), modules, strict=True):
        if run and number < count and (done * count >= total * number or left == count - number):
            yield run
            run, number = [], number + 1
        run += module
        done += sum(tensor.nbytes for tensor in module)
    yield run
