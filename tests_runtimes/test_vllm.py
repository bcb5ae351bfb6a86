"""vLLM itself takes what we write: dry through its GPU loader, and generating with decoded weights on a CPU.

Stage two of CI, in the environment that `make runtimes` builds. Each load is a process of its own.
"""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import sparse
import torch
import variants
from transformers import AutoModelForCausalLM

from phasefold.formats.checkpoint import open_checkpoint
from phasefold.quantize.convert import convert
from phasefold.quantize.plan import make_plan
from phasefold.recipes import load as recipe
from phasefold.serving.runtimes.load import Loaded, find_python, load
from phasefold.serving.runtimes.versions import PROVEN

PROMPT = "Return the sum of all elements along the given axis."
TINY = [
    ("tiny-kimi", "kimi-decode-int4", "WNA16MoEMethod MARLIN"),
    ("tiny-kimi", "kimi-prefill-fp8", "Fp8MoEMethod TRITON"),
    ("tiny-glm4", "glm-decode-int4-g128", "WNA16MoEMethod MARLIN"),
    ("tiny-glm4", "glm-decode-int4-fp8", "W8A8Fp8 CutlassFP8ScaledMMLinearKernel"),
    ("tiny-glm4", "glm-prefill-fp8", "W8A8Fp8MoEMethod VLLM_CUTLASS"),
    ("tiny-glm5", "glm-decode-int4", "WNA16MoEMethod MARLIN"),
    ("tiny-glm5", "glm-decode-int4-fp8", "W8A8Fp8 DeepGemmFp8BlockScaledMMKernel"),
    ("tiny-glm5", "glm-prefill-fp8", "Fp8LinearMethod DeepGemmFp8BlockScaledMMKernel"),
]


def made(source: Path, out: Path, name: str) -> Path:
    convert(make_plan(open_checkpoint(source), recipe(name)), out)
    return out


def tensors_of(folder: Path) -> int:
    return len(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"])


def whole(loaded: Loaded) -> bool:
    return loaded.ok and loaded.mode == "dry" and not (loaded.missing or loaded.unexpected or loaded.refused)


@pytest.mark.parametrize(("base", "name", "method"), TINY)
def test_dry_load_takes_every_tensor(tmp_path: Path, base: str, name: str, method: str) -> None:
    """With an MTP layer, which the draft model takes; by headers alone for one half, with data for the other."""
    source = variants.save(tmp_path / "mtp", *variants.with_mtp(*variants.load(variants.EXAMPLES / base)))
    artifact = made(source, tmp_path / "artifact", name)
    loaded = load(artifact, "vllm", data="int4" in name)
    assert whole(loaded), asdict(loaded)
    assert loaded.tensors == tensors_of(artifact)
    assert any(method in found for found in loaded.methods), loaded.methods
    assert loaded.proven == (loaded.version in PROVEN["vllm"])
    assert loaded.peak_rss_bytes > 100 << 20


def test_dry_load_of_every_rank(tmp_path: Path) -> None:
    artifact = made(variants.EXAMPLES / "tiny-kimi", tmp_path / "kimi", "kimi-decode-int4")
    assert whole(load(artifact, "vllm", tp=4))
    artifact = made(variants.EXAMPLES / "tiny-glm4", tmp_path / "glm", "glm-decode-int4-g128")
    loaded = load(artifact, "vllm", tp=2)
    assert not loaded.ok and "per tensor-parallel partition (64) to be divisible by group_size (128)" in loaded.refused


def without(part: str):
    return lambda tensors, config: ({name: t for name, t in tensors.items() if part not in name}, config)


def with_stray(tensors: variants.Tensors, config: dict) -> tuple[variants.Tensors, dict]:
    return tensors | {"model.layers.1.mlp.experts.0.down_proj.weight_bias": torch.zeros(4)}, config


def undeclared(tensors: variants.Tensors, config: dict) -> tuple[variants.Tensors, dict]:
    config = json.loads(json.dumps(config))
    config["quantization_config"]["modules_to_not_convert"].append("model.layers.1.self_attn.o_proj")
    return tensors, config


FAULTS = [
    ("kimi-decode-int4", without("layers.2.mlp.experts.3.gate_proj"), "w13_weight_packed (4,096 of 131,072 elements)"),
    ("kimi-decode-int4", without("layers.1.mlp.experts.0.down_proj.weight_scale"), "w2_weight_scale (1,024 of"),
    ("kimi-decode-int4", without("layers.3.self_attn.q_b_proj"), "q_b_proj.weight (32,768 of 32,768 elements)"),
    ("kimi-prefill-fp8", without("layers.1.self_attn.o_proj.weight_scale_inv"), "o_proj.weight_scale_inv (2 of 2"),
    ("kimi-prefill-fp8", with_stray, "KeyError"),
    ("kimi-prefill-fp8", undeclared, "o_proj.weight_scale_inv"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fault", "told"), FAULTS)
def test_dry_load_finds_what_is_wrong(tmp_path: Path, name: str, fault, told: str) -> None:
    artifact = made(variants.EXAMPLES / "tiny-kimi", tmp_path / "artifact", name)
    wrong = variants.save(tmp_path / "wrong", *fault(*variants.load(artifact)))
    loaded = load(wrong, "vllm", data=True)
    assert not loaded.ok and not loaded.gap
    assert told in " ".join([*loaded.missing, loaded.refused]), asdict(loaded)


@pytest.mark.parametrize(
    ("model", "name"),
    [("zai-org/GLM-4.7-Flash", "glm-decode-int4"), ("moonshotai/Kimi-K2.5", "kimi-prefill-fp8")],
)
def test_dry_load_of_a_published_model_in_full_size(tmp_path: Path, model: str, name: str) -> None:
    """From headers alone: what the plan would write, its data being holes."""
    sparse.write(model, tmp_path / "source")
    plan = make_plan(open_checkpoint(tmp_path / "source"), recipe(name))
    out = tmp_path / "out"
    out.mkdir()
    for shard in plan.shards:
        with (out / shard.file).open("wb") as file:
            file.write(shard.header)
            file.truncate(shard.size)
    index = {"metadata": {"total_size": plan.output_bytes}, "weight_map": plan.weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    (out / "config.json").write_bytes(plan.config)
    loaded = load(out, "vllm")
    assert whole(loaded), asdict(loaded)
    assert loaded.tensors == len(plan.weight_map) > 20_000


def wide_mla(folder: Path) -> Path:
    """A random Kimi with a latent of DeepSeek's size, the only one for which vLLM has an MLA kernel on a CPU."""
    config = variants.load(variants.EXAMPLES / "tiny-kimi")[1] | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    config |= {"qk_nope_head_dim": 128, "v_head_dim": 128, "head_dim": 64, "qk_head_dim": 192, "num_hidden_layers": 2}
    tensors = variants.random_from(config)
    for name, tensor in tensors.items():
        if "self_attn" in name and name.endswith("_b_proj.weight"):
            tensor *= 16  # so that attention looks at some tokens more than at others, and positions matter
    return variants.save(folder, tensors, config)


GENERATES = [
    ("tiny-kimi", "kimi-decode-int4"),
    ("tiny-glm4", "glm-prefill-fp8"),
    ("tiny-glm4", "glm-decode-int4-fp8"),
    ("wide", "kimi-decode-int4"),
    ("wide", "kimi-prefill-fp8"),
]


@pytest.mark.parametrize(("base", "name"), GENERATES)
def test_decoded_in_vllm_equals_decoded_by_us(tmp_path: Path, base: str, name: str) -> None:
    """Bit for bit, the log probabilities of prompt and answer; and transformers' own, as near as FP32 can be."""
    source = wide_mla(tmp_path / "wide") if base == "wide" else variants.EXAMPLES / base
    artifact = made(source, tmp_path / "artifact", name)
    plain = made(artifact, tmp_path / "bf16", "bf16")
    theirs = load(artifact, "vllm", mode="reference", prompt=PROMPT)
    ours = load(plain, "vllm", mode="reference", prompt=PROMPT)
    assert theirs.ok and ours.ok, (asdict(theirs), asdict(ours))
    assert "weights decoded" in theirs.notes[0] and not any("weights decoded" in note for note in ours.notes)
    assert (theirs.token_ids, theirs.logprobs) == (ours.token_ids, ours.logprobs)
    assert theirs.prompt_logprobs == ours.prompt_logprobs and len(theirs.token_ids) == 16

    exact = load(plain, "vllm", mode="reference", prompt=PROMPT, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    ids = exact.prompt_ids + exact.token_ids
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    chosen = expected[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    got = torch.tensor(exact.prompt_logprobs + exact.logprobs)
    assert (got - chosen).abs().max() < 5e-5
    assert expected[len(exact.prompt_ids) - 1 : -1].argmax(-1).tolist() == exact.token_ids


def test_fp8_kv_cache_changes_little_but_something(tmp_path: Path) -> None:
    artifact = made(variants.EXAMPLES / "tiny-glm4", tmp_path / "artifact", "glm-decode-int4")
    plain, fp8 = (load(artifact, "vllm", mode="reference", prompt=PROMPT, kv_dtype=d) for d in ("auto", "fp8_e4m3"))
    assert plain.ok and fp8.ok
    difference = (torch.tensor(plain.logprobs[:1]) - torch.tensor(fp8.logprobs[:1])).abs().item()
    assert 0 < difference < 0.5


def test_sparse_attention_is_a_gap_on_a_cpu(tmp_path: Path) -> None:
    artifact = made(variants.EXAMPLES / "tiny-glm5", tmp_path / "artifact", "glm-decode-int4")
    loaded = load(artifact, "vllm", mode="reference")
    assert loaded.mode == "dry" and not loaded.ok and "no sparse attention (DSA) on a CPU" in loaded.gap
    assert loaded.tensors == tensors_of(artifact) and not (loaded.missing or loaded.unexpected or loaded.refused)


def test_what_is_missing_is_told_when_generating_too(tmp_path: Path) -> None:
    artifact = made(variants.EXAMPLES / "tiny-glm4", tmp_path / "artifact", "glm-decode-int4")
    lacking = without("layers.2.mlp.experts.3.gate_proj")(*variants.load(artifact))
    loaded = load(variants.save(tmp_path / "lacking", *lacking), "vllm", mode="reference")
    assert not loaded.ok and "layers.2.mlp.experts.routed_experts.w13_weight_packed" in loaded.missing[0]


@pytest.mark.parametrize("base", ["tiny-kimi", "tiny-glm4", "tiny-glm5"])
def test_the_transformers_that_comes_with_vllm_loads_int4_too(tmp_path: Path, base: str) -> None:
    name = "kimi-decode-int4" if base == "tiny-kimi" else "glm-decode-int4"
    artifact = made(variants.EXAMPLES / base, tmp_path / "artifact", name)
    loaded = load(artifact, "transformers", python=find_python("vllm"), prompt=PROMPT, tokens=8)
    assert loaded.ok, asdict(loaded)
    assert loaded.proven == (loaded.version in PROVEN["transformers"])
    decoded = load(made(artifact, tmp_path / "bf16", "bf16"), "transformers", python=find_python("vllm"), prompt=PROMPT)
    assert loaded.token_ids == decoded.token_ids[:8]
