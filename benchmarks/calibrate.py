"""Peak memory and speed of `calibrate`: a checkpoint of 4 layers and one of 12, experts together and one by one.

    python benchmarks/calibrate.py [--tokens 4096] [--keep FOLDER]

The layers are large enough to matter (about 110 MB each, in BF16) and have seeded random weights; both checkpoints have
the same ones. Peak memory must not grow with the layers: the last column is the larger one's peak over the smaller's.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from phasefold.families import identify

EXAMPLES = Path(__file__).parent.parent / "examples"
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 1024, "vocab_size": 1024,
    "intermediate_size": 4096, "moe_intermediate_size": 512, "n_routed_experts": 32, "n_shared_experts": 1,
    "num_experts_per_tok": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_attention_heads": 8,
    "num_key_value_heads": 8, "q_lora_rank": 512, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
    "v_head_dim": 64, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048,
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


def make(folder: Path, layers: int) -> None:
    """Write a checkpoint, a shard a layer."""
    config = CONFIG | {"num_hidden_layers": layers}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(EXAMPLES / "tiny-kimi" / name, folder / name)
    shards: dict[int, dict[str, torch.Tensor]] = {}
    generator = torch.Generator().manual_seed(0)
    for spec in identify(config).tensors():
        if spec.optional:
            continue
        if spec.role == "norm" or spec.role == "attention.norm":
            value = torch.ones(spec.shape)
        else:
            value = torch.randn(spec.shape, generator=generator) * (0.5 / spec.shape[-1]) ** 0.5
        number = layers if spec.layer is None else spec.layer
        shards.setdefault(number, {})[spec.name] = value if spec.role == "router.bias" else value.bfloat16()
    for number, tensors in shards.items():
        save_file(tensors, folder / f"model-{number:05d}.safetensors", {"format": "pt"})


def measure(folder: Path, text: Path, out: Path, tokens: int, memory: int) -> dict:
    """One run in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "phasefold",
        "calibrate",
        folder,
        "--text",
        text,
        "--out",
        out,
        "--length",
        "512",
        "--batch",
        "1",
    ]
    command += ["--tokens", tokens, "--memory", f"{memory}B", "--device", "cpu", "--json"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--keep", type=Path, help="make the checkpoints here, and leave them")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = given.keep or Path(scratch)
        text = root / "text.txt"
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_text("\n".join(path.read_text() for path in sorted(Path(os.__file__).parent.glob("[a-k]*.py"))))
        for layers in (4, 12):
            if not (root / f"layers-{layers}").exists():
                make(root / f"layers-{layers}", layers)
        layer = (root / "layers-4" / "model-00001.safetensors").stat().st_size
        print(f"{layer / 1e6:.0f} MB a layer, {given.tokens:,} tokens, {torch.get_num_threads()} threads")
        print(f"{'experts':12}{'layers':>7}{'peak MB':>9}{'tokens/s':>10}{'ratio':>8}")
        for name, memory in (("together", 16_000_000_000), ("one by one", 175_000_000)):
            peaks = []
            for layers in (4, 12):
                out = root / f"stats-{layers}-{memory}"
                shutil.rmtree(out, ignore_errors=True)
                told = measure(root / f"layers-{layers}", text, out, given.tokens, memory)
                assert told["layers_one_by_one"] == (0 if name == "together" else layers - 1), told
                peaks.append(told["peak_rss_bytes"])
                speed = told["tokens"] / told["wall_seconds"]
                row = f"{name:12}{layers:7}{peaks[-1] / 1e6:9.0f}{speed:10.0f}"
                print(row + (f"{peaks[1] / peaks[0]:8.3f}" if len(peaks) > 1 else ""), flush=True)


if __name__ == "__main__":
    main()
