"""Whole conversions on Kimi-K2's real matrix shapes: GB of source per CPU-second of the process, less its imports.

    python benchmarks/convert.py FOLDER [--gigabytes 4.4] [--device cuda] [--workers 2] [--peer PYTHON]

Makes a BF16 source and its FP8-block twin in FOLDER (once), converts them by `python -m phasefold`, and prints each
figure beside a memcpy of the same bytes in the same run. PYTHON is an interpreter with llmcompressor, which is then
measured on the same sources (`model_free_ptq`). Machines are shared: trust the ratios, not the seconds. With a card
wall time counts, beside that of the plain loop.
"""

import argparse
import ctypes
import hashlib
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from phasefold.families import identify
from phasefold.formats.checkpoint import INDEX, open_checkpoint

K2 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_shared_experts": 1, "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 4096,
    "num_hidden_layers": 2, "first_k_dense_replace": 1, "num_experts_per_tok": 8, "tie_word_embeddings": False,
    "dtype": "bfloat16",
}  # fmt: skip
EXPERT_BYTES = 3 * 2048 * 7168 * 2

INT4 = '[[rule]]\nroles = ["routed_expert", "shared_expert", "dense_mlp"]\nformat = "int4-g128"\nmethod = "{}"\n'
FP8 = '[[rule]]\nroles = ["routed_expert", "shared_expert", "dense_mlp", "attention"]\nformat = "fp8"\n'
KEEP = '[[rule]]\nroles = ["*"]\nformat = "keep"\n'
# name, source, rules, goal in GB per CPU-second
CASES = [
    ("BF16 -> INT4 g128 RTN", "bf16", INT4.format("rtn"), 1.5),
    ("BF16 -> FP8 block", "bf16", FP8, 0.7),
    ("FP8 block -> INT4 g128 RTN", "fp8", INT4.format("rtn"), 0.7),
    ("BF16 -> INT4 g128 search", "bf16", INT4.format("search"), 0.8),
    ("FP8 block -> INT4 g128 search", "fp8", INT4.format("search"), None),
    ("BF16 copied", "bf16", KEEP, None),
    ("FP8 copied", "fp8", KEEP, None),
]
PEER = """
import sys, time, resource
from llmcompressor import model_free_ptq
started = resource.getrusage(resource.RUSAGE_SELF)
model_free_ptq(model_stub=sys.argv[1], save_directory=sys.argv[2], scheme=sys.argv[3],
               ignore=["re:.*embed_tokens.*", "re:.*lm_head.*", "re:.*mlp.gate$", "re:.*kv_a_proj_with_mqa.*"],
               max_workers=1, device="cpu")
ended = resource.getrusage(resource.RUSAGE_SELF)
print(ended.ru_utime + ended.ru_stime - started.ru_utime - started.ru_stime)
"""
PEER_CASES = [("bf16", "W4A16"), ("bf16", "FP8_BLOCK")]


def make_sources(folder: Path, gigabytes: float) -> dict[str, Path]:
    """The BF16 source and its FP8 twin, with weights of heavier tails than a Gaussian's."""
    config = K2 | {"n_routed_experts": max(1, round((gigabytes * 1e9 - 1.4e9) / EXPERT_BYTES))}
    folders = {"bf16": folder / "bf16", "fp8": folder / "fp8"}
    if all((path / "config.json").exists() for path in folders.values()):
        return folders
    generator = torch.Generator().manual_seed(0)
    shards: dict[str, list[dict[str, torch.Tensor]]] = {"bf16": [{}], "fp8": [{}]}
    for spec in identify(config).tensors():
        if spec.optional:
            continue
        weight = torch.randn(spec.shape, generator=generator)
        weight = (0.02 * weight * (1 + 0.2 * weight.square())).bfloat16()
        twin = {spec.name: weight}
        if spec.linear:
            rows, columns = spec.shape
            padded = torch.zeros(-(-rows // 128) * 128, columns)
            padded[:rows] = weight.float()
            tiles = padded.view(-1, 128, columns // 128, 128)
            scale = tiles.abs().amax((1, 3)) / 448
            codes = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(-1, columns)[:rows].contiguous()
            twin = {spec.name: codes, spec.name + "_scale_inv": scale}
        for kind, tensors in (("bf16", {spec.name: weight}), ("fp8", twin)):
            if sum(t.nbytes for t in shards[kind][-1].values()) > 9e8:
                write_shard(folders[kind], shards[kind])
            shards[kind][-1].update(tensors)
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    for kind, path in folders.items():
        write_shard(path, shards[kind])
        extra = {"quantization_config": quantization} if kind == "fp8" else {}
        (path / "config.json").write_text(json.dumps(config | extra))
        found = open_checkpoint(path)
        index = {"metadata": {"total_size": found.total_size}}
        index["weight_map"] = {name: stored.file for name, stored in found.tensors.items()}
        (path / INDEX).write_text(json.dumps(index))
    return folders


def write_shard(folder: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    """Write the last shard and begin another; its data is let go."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(shards[-1], folder / f"model-{len(shards):05d}.safetensors", {"format": "pt"})
    shards[-1].clear()
    shards.append({})


def cpu_of(command: list[str]) -> tuple[float, str]:
    """CPU-seconds of a child process and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def plain_loop(source: Path, nbytes: int, work: Path) -> tuple[float, float]:
    """CPU and wall seconds of reading the source in large pieces, and of writing and hashing so many bytes."""
    buffer, started, wall = memoryview(bytearray(2 << 20)), time.process_time(), time.monotonic()
    for path in source.glob("*.safetensors"):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    digest = hashlib.sha256()
    with open(work / "plain", "wb", buffering=0) as file:
        for _ in range(nbytes // len(buffer)):
            file.write(buffer)
            digest.update(buffer)
    (work / "plain").unlink()
    return time.process_time() - started, time.monotonic() - wall


def memcpy_rate(nbytes: int = 1 << 28) -> float:
    """GB per second of libc's memcpy over warm buffers larger than the cache, best of five."""
    source, target = bytearray(b"\1" * nbytes), bytearray(nbytes)
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(b)) for b in (target, source)]
    best = 1e9
    for _ in range(5):
        started = time.perf_counter()
        ctypes.memmove(*addresses, nbytes)
        best = min(best, time.perf_counter() - started)
    return nbytes / 1e9 / best


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="gets the sources, twice --gigabytes, and work files")
    parser.add_argument("--gigabytes", type=float, default=4.4)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--peer", help="python with llmcompressor")
    options = parser.parse_args()
    if (options.folder / "config.json").exists():
        parser.error(f"{options.folder} is a checkpoint; give a folder of its own, for gigabytes of made ones")
    sources = make_sources(options.folder, options.gigabytes)
    imports = min(cpu_of([sys.executable, "-m", "phasefold", "recipes", "--json"])[0] for _ in range(3))
    copy = memcpy_rate()
    print(f"memcpy {copy:.1f} GB/s; imports {imports:.2f} CPU-s, taken off; best of {options.repeats}")
    print("plain loop: reading the source and writing and hashing as many bytes as the output has, one thread")
    header = ("GB", "CPU-s", "GB/CPU-s", "goal", "of memcpy", "plain loop", "wall s", "its wall s", "cores", "peak MB")
    print(" " * 32 + "".join(f"{cell:>11}" for cell in header))
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        for name, kind, rules, goal in CASES:
            recipe = Path(work) / "recipe.toml"
            recipe.write_text('families = ["kimi"]\n' + rules)
            runs = []
            for _ in range(options.repeats):
                out = Path(work) / "out"
                command = ["convert", str(sources[kind]), str(out), "--recipe", str(recipe), "--json"]
                command += ["--device", options.device, "--workers", str(options.workers)]
                cpu, text = cpu_of([sys.executable, "-m", "phasefold", *command])
                runs.append((cpu - imports, json.loads(text)))
                shutil.rmtree(out)
            cpu, made = min(runs, key=lambda run: run[0])
            size, cores = made["source_bytes"] / 1e9, made["cpu_seconds"] / made["wall_seconds"]
            least, wall = plain_loop(sources[kind], made["output_bytes"], Path(work))
            cells = [f"{size:.2f}", f"{cpu:.2f}", f"{size / cpu:.2f}", f"{goal or ''}", f"{size / cpu / copy:.0%}"]
            cells += [
                f"{least:.2f}",
                f"{made['wall_seconds']:.2f}",
                f"{wall:.2f}",
                f"{cores:.2f}",
                f"{made['peak_rss_bytes'] / 1e6:.0f}",
            ]
            print(f"{name:32}" + "".join(f"{cell:>11}" for cell in cells), flush=True)
        for kind, scheme in PEER_CASES if options.peer else []:
            out = Path(work) / "peer"
            _, text = cpu_of([options.peer, "-c", PEER, str(sources[kind]), str(out), scheme])
            size = sum(path.stat().st_size for path in sources[kind].glob("*.safetensors")) / 1e9
            cpu = float(text.split()[-1])
            print(f"{f'llmcompressor {kind} -> {scheme}':32}{size:>10.2f}{cpu:>10.2f}{size / cpu:>10.3f}", flush=True)
            shutil.rmtree(out)


if __name__ == "__main__":
    main()
