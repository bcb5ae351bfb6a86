"""Small checkpoints for tests, in every storage form that is published, derived from the trained examples.

The storage is written here with torch's own float8 cast and with compressed-tensors' own packer, never with phasefold's
formats: what the tests read is not what the code under test wrote.
"""

import json
import shutil
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file

from phasefold.families import identify

EXAMPLES = Path(__file__).parent.parent / "examples"
NEVER = ("embed_tokens", "lm_head", "norm", "mlp.gate.weight", "weights_proj", "eh_proj", "vision", "mm_projector")
INT4_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
                        "actorder": None, "block_structure": None, "dynamic": False, "observer": "minmax",
                        "observer_kwargs": {}},
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}  # fmt: skip

Tensors = dict[str, torch.Tensor]


def load(folder: Path) -> tuple[Tensors, dict]:
    """All tensors of a checkpoint and its config."""
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors, json.loads((folder / "config.json").read_text())


def save(folder: Path, tensors: Tensors, config: dict, shards: int = 2, own_file: tuple[str, ...] = ()) -> Path:
    """Write a checkpoint in the hub's layout; tensors whose name contains one of `own_file` go to mtp.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    files = {
        name: f"model-{n * shards // len(names) + 1:05d}-of-{shards:05d}.safetensors" for n, name in enumerate(names)
    }
    files |= {name: "mtp.safetensors" for name in names if any(part in name for part in own_file)}
    for file in set(files.values()):
        save_file({n: tensors[n].contiguous() for n in names if files[n] == file}, folder / file, {"format": "pt"})
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(EXAMPLES / "tiny-kimi" / name, folder / name)
    return folder


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    """Matrices that FP8 releases quantize."""
    return name.endswith(".weight") and tensor.dim() == 2 and not any(part in name for part in NEVER)


def is_expert(name: str) -> bool:
    """Matrices of routed experts."""
    return ".experts." in name and name.endswith(".weight")


def block_fp8(weight: torch.Tensor, scale_dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] -> float8_e4m3fn codes and [ceil(N/128), ceil(K/128)] scales, amax / 448 (any dtype)."""
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
    padded[:rows, :columns] = weight.float()
    tiles = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scales = (tiles.abs().amax((1, 3)) / 448).clamp_min(1e-12).to(scale_dtype)
    codes = (tiles / scales.float()[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous(), scales


def native_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Kimi's own grid: groups of 32, scale bf16(amax / 7), codes -7..7; -> int8 codes and BF16 scales."""
    groups = weight.float().unflatten(1, (-1, 32))
    scales = (groups.abs().amax(2) / 7).clamp_min(1e-12).bfloat16()
    codes = (groups / scales.float()[..., None]).round().clamp(-7, 7).to(torch.int8)
    return codes.flatten(1), scales


def fp8_block(tensors: Tensors, config: dict, scale_dtype: torch.dtype = torch.float32) -> tuple[Tensors, dict]:
    """As DeepSeek, Kimi-K2-Instruct and GLM-5.x-FP8 store it."""
    out = dict(tensors)
    for name, tensor in tensors.items():
        if is_linear(name, tensor):
            out[name], out[name.removesuffix("weight") + "weight_scale_inv"] = block_fp8(tensor, scale_dtype)
    left = sorted(n.removesuffix(".weight") for n, t in tensors.items() if not is_linear(n, t))
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    return out, config | {"quantization_config": quantization | {"modules_to_not_convert": left}}


def fp8_channel(tensors: Tensors, config: dict) -> tuple[Tensors, dict]:
    """As GLM-4.5-FP8 stores it: compressed-tensors, one F32 scale an output channel."""
    out = dict(tensors)
    for name, tensor in tensors.items():
        if is_linear(name, tensor):
            scale = (tensor.float().abs().amax(1, keepdim=True) / 448).clamp_min(1e-12)
            out[name] = (tensor.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            out[name.removesuffix("weight") + "weight_scale"] = scale
    left = sorted(n.removesuffix(".weight") for n, t in tensors.items() if not is_linear(n, t))
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }
    return out, config | {"quantization_config": quantization | {"quantization_status": "compressed", "ignore": left}}


def int4(tensors: Tensors, config: dict) -> tuple[Tensors, dict]:
    """As Kimi-K2-Thinking stores it: routed experts pack-quantized, I32 `weight_shape`."""
    out = dict(tensors)
    for name, tensor in tensors.items():
        if is_expert(name):
            codes, scales = native_int4(out.pop(name))
            stem = name.removesuffix("weight")
            out[stem + "weight_packed"] = pack_to_int32(codes, 4)
            out[stem + "weight_scale"] = scales
            out[stem + "weight_shape"] = torch.tensor(tensor.shape, dtype=torch.int32)
    return out, config | {"quantization_config": INT4_CONFIG}


def int4_as_bf16(tensors: Tensors, config: dict) -> tuple[Tensors, dict]:
    """A BF16 copy of the native INT4 checkpoint: w = bf16(q * s)."""
    out = dict(tensors)
    for name in tensors:
        if is_expert(name):
            codes, scales = native_int4(tensors[name])
            out[name] = (codes.unflatten(1, (-1, 32)).float() * scales.float()[..., None]).flatten(1).bfloat16()
    return out, config


def with_mtp(tensors: Tensors, config: dict) -> tuple[Tensors, dict]:
    """With a multi-token-prediction layer behind the last one, made from the last one's weights."""
    out, last = dict(tensors), config["num_hidden_layers"]
    for name, tensor in tensors.items():
        if f".layers.{last - 1}." in name:
            out[name.replace(f".layers.{last - 1}.", f".layers.{last}.")] = tensor.clone()
    hidden = config["hidden_size"]
    stem = f"model.layers.{last}."
    out[stem + "eh_proj.weight"] = torch.eye(hidden, 2 * hidden).bfloat16()
    for name in ("enorm", "hnorm", "shared_head.norm"):
        out[f"{stem}{name}.weight"] = torch.ones(hidden).bfloat16()
    return out, config | {"num_nextn_predict_layers": 1}


def as_k25(tensors: Tensors, config: dict) -> tuple[Tensors, dict]:
    """Wrapped as Kimi-K2.5: text_config, `language_model.` prefix, a small vision tower and projector."""
    text = {k: v for k, v in config.items()} | {"model_type": "kimi_k2"}
    vision = {
        "vt_hidden_size": 64, "vt_intermediate_size": 96, "vt_num_hidden_layers": 2, "mm_hidden_size": 64,
        "text_hidden_size": config["hidden_size"],
        "patch_size": 14, "init_pos_emb_height": 8, "init_pos_emb_width": 8, "merge_kernel_size": [2, 2],
    }  # fmt: skip
    wrapper = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text,
               "vision_config": vision, "tie_word_embeddings": False}  # fmt: skip
    out = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    generator = torch.Generator().manual_seed(5)
    for spec in identify(wrapper).tensors():
        if not spec.name.startswith("language_model."):
            out[spec.name] = torch.randn(spec.shape, generator=generator).bfloat16()
    return out, wrapper


def nested(tensors: Tensors, config: dict) -> tuple[Tensors, dict]:
    """The quantization_config moved to where Kimi-K2.5 has it, under text_config."""
    config = json.loads(json.dumps(config))
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    return tensors, config


def random_from(config: dict, seed: int = 0) -> Tensors:
    """Random BF16 tensors for any supported config (F32 where the hub has F32)."""
    generator, out = torch.Generator().manual_seed(seed), {}
    for spec in identify(config).tensors():
        if not spec.optional:
            tensor = torch.randn(spec.shape, generator=generator) * 0.05
            out[spec.name] = tensor if spec.role == "router.bias" else tensor.bfloat16()
    return out


def mxfp4(tensors: Tensors, config: dict) -> tuple[Tensors, dict]:
    """As Kimi-K3 stores it: routed experts in e2m1 with one E8M0 scale for 32 elements."""
    out = dict(tensors)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    for name in tensors:
        if is_expert(name):
            groups = out.pop(name).float().unflatten(1, (-1, 32))
            exponents = torch.floor(torch.log2(groups.abs().amax(2).clamp_min(1e-30))) - 2
            scaled = groups / torch.exp2(exponents)[..., None]
            codes = (scaled.abs()[..., None] - values).abs().argmin(-1) + 8 * (scaled < 0)
            codes = codes.flatten(1).to(torch.uint8)
            stem = name.removesuffix("weight")
            out[stem + "weight_packed"] = codes[:, 0::2] | codes[:, 1::2] << 4
            out[stem + "weight_scale"] = (exponents + 127).to(torch.uint8)
    return out, config


def variant(kind: str, base: str, folder: Path, **options: object) -> Path:
    """One named variant of a trained example, written to `folder`."""
    tensors, config = load(EXAMPLES / base)
    own_file: tuple[str, ...] = ()
    for step in kind.split("+"):
        if step == "mtp-file":
            own_file = (f".layers.{config['num_hidden_layers']}.",)
            step = "mtp"
        if step == "f32":
            tensors = {name: tensor.float() for name, tensor in tensors.items()}
            config = config | {"dtype": "float32"}
        elif step == "f16":
            tensors = {n: t.half() if t.dtype == torch.bfloat16 else t for n, t in tensors.items()}
            config = config | {"dtype": "float16"}
        elif step != "bf16":
            steps = {"fp8-block": fp8_block, "fp8-channel": fp8_channel, "int4": int4, "mtp": with_mtp, "k25": as_k25,
                     "int4-as-bf16": int4_as_bf16, "nested": nested, "mxfp4": mxfp4}  # fmt: skip
            tensors, config = steps[step](tensors, config)
    return save(folder, tensors, config, own_file=own_file, **options)
