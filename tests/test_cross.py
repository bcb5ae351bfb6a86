"""Others load what we write: transformers runs the artifacts, compressed-tensors decodes them; logits must agree.

The reference model is built from our own decode of the artifact: where transformers decodes an artifact to the same
weights, its logits are the very same.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import variants
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, PreTrainedTokenizerFast

from phasefold.formats.checkpoint import open_checkpoint
from phasefold.quantize.account import account
from phasefold.quantize.convert import convert
from phasefold.quantize.plan import make_plan
from phasefold.recipes import load

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and torch, about themselves


def run(source: Path, out: Path, recipe: str, **changes: str) -> Path:
    convert(make_plan(open_checkpoint(source), replace(load(recipe), **changes)), out)
    return out


def decoded(artifact: Path, out: Path) -> Path:
    """A float32 checkpoint that holds what our formats decode from an artifact."""
    tensors, config = variants.load(artifact)
    plain = {}
    for item in account(open_checkpoint(artifact)).items:
        parts = {part.suffix: tensors[item.module + part.suffix] for part in item.parts}
        plain[item.spec.name] = item.format.decode(parts, item.shape) if ".weight" in item.spec.name else parts[""]
    return variants.save(out, plain, {k: v for k, v in config.items() if k != "quantization_config"})


def logits(folder: Path, dtype: torch.dtype, **options: object) -> torch.Tensor:
    """Logits of a fixed prompt, [1, 48, 1024]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager", **options)
    tokens = torch.randint(5, 1024, (1, 48), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model.eval()(tokens).logits


BASES = [
    ("tiny-kimi", "kimi-decode-int4"),
    ("tiny-glm4", "glm-decode-int4"),
    ("tiny-glm5", "glm-decode-int4"),
    ("tiny-glm4", "glm-decode-int4-g128"),
    ("tiny-glm5", "glm-decode-int4-g128"),
    ("tiny-glm4", "glm-prefill-fp8"),
]
# Not glm-decode-int4-fp8: transformers 5.24 cannot merge experts where a config has two groups, a gap of theirs.


@pytest.mark.parametrize(("base", "recipe"), BASES)
def test_compressed_tensors_decodes_to_our_bits(tmp_path: Path, base: str, recipe: str) -> None:
    artifact = run(variants.EXAMPLES / base, tmp_path / "int4", recipe)
    reference = logits(run(artifact, tmp_path / "bf16", "bf16"), torch.bfloat16)  # transformers decodes to BF16 as well
    theirs = logits(artifact, torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True))
    source = logits(variants.EXAMPLES / base, torch.bfloat16)
    assert not torch.equal(source, reference)  # it was quantized
    assert torch.equal(theirs, reference), (theirs - reference).abs().max()


def test_transformers_loads_fp8_blocks_where_it_can(tmp_path: Path) -> None:
    """GQA only: ragged blocks, as MLA has them, transformers 5.24 decodes wrongly (160 rows) or refuses (576)."""
    recipe = tmp_path / "mine.toml"
    rule = '[[rule]]\nroles = ["routed_expert", "shared_expert", "dense_mlp", "attention.o"]\n'
    recipe.write_text('families = ["glm"]\n' + rule + 'format = "fp8-block"\n')
    artifact = run(variants.EXAMPLES / "tiny-glm4", tmp_path / "fp8", str(recipe))
    assert json.loads((artifact / "config.json").read_text())["quantization_config"]["scale_fmt"] == "ue8m0"
    reference = logits(decoded(artifact, tmp_path / "decoded"), torch.float32)
    theirs = logits(artifact, torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True))
    assert torch.equal(theirs, reference), (theirs - reference).abs().max()


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    """Mean Kullback-Leibler divergence of q from p over positions, nats."""
    return (
        torch.nn.functional.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="none")
        .sum(-1)
        .mean()
        .item()
    )


@pytest.mark.parametrize("base", ["tiny-kimi", "tiny-glm4", "tiny-glm5"])
def test_the_trained_examples_show_the_order_of_quality(tmp_path: Path, base: str) -> None:
    """FP8 beats INT4 g32, and both stay near the source: on held-out text of the kind they were trained on."""
    family = "kimi" if base == "tiny-kimi" else "glm"
    source = variants.EXAMPLES / base
    text = " ".join(str(module.__doc__) for module in (json, pytest, __import__("argparse"), __import__("statistics")))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"))
    tokens = torch.tensor(tokenizer(text)["input_ids"][:1024]).view(4, 256)

    def score(folder: Path) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            return model.eval()(tokens).logits

    expected = score(source)
    loss = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert loss < 4.5, "a trained model: chance is 6.9"
    divergence = {}
    for recipe in (f"{family}-prefill-fp8", f"{family}-decode-int4"):
        artifact = run(source, tmp_path / recipe, recipe)
        divergence[recipe] = kl(expected, score(run(artifact, tmp_path / f"{recipe}-bf16", "bf16")))
    fp8, int4 = divergence.values()
    assert 0 < fp8 < 0.002 and 0 < int4 < 0.004, divergence
