"""What quantization costs the tiny trained checkpoints: weight error, mean KL and top-1 agreement.

    python benchmarks/quality.py [--tokens 8192]

The text is docstrings of the installed standard library, in blocks of 256 tokens. KL is from the BF16 source, in nats a
token; its standard error is over blocks.
"""

import argparse
import ast
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from phasefold.formats.checkpoint import open_checkpoint
from phasefold.quantize.convert import convert
from phasefold.quantize.plan import make_plan
from phasefold.recipes import Recipe, load

EXAMPLES = Path(__file__).parent.parent / "examples"


def rtn(recipe: Recipe) -> Recipe:
    """The same recipe with plain rounding."""
    return replace(recipe, rules=tuple(replace(rule, method="rtn") for rule in recipe.rules))


def docstrings() -> str:
    """Docstrings of the installed standard library: text of the kind that the examples were trained on."""
    texts = []
    for path in sorted(Path(os.__file__).parent.glob("[a-s]*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                texts.append(text)
    return "\n\n".join(texts)


def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """[blocks, 256, vocabulary] float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return torch.cat([model(block[None]).logits for block in tokens])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    count = parser.parse_args().tokens // 256
    print(f"{'':12}{'':26}{'MB':>6}{'experts':>9}{'mean KL':>10}{'+-':>9}{'top-1':>8}")
    for base, family in (("tiny-kimi", "kimi"), ("tiny-glm4", "glm"), ("tiny-glm5", "glm")):
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(EXAMPLES / base / "tokenizer.json"))
        tokens = torch.tensor(tokenizer(docstrings())["input_ids"][: count * 256]).view(-1, 256)
        source = logits(EXAMPLES / base, tokens)
        decode = load(f"{family}-decode-int4")
        recipes = {
            f"{family}-prefill-fp8": load(f"{family}-prefill-fp8"),
            decode.name: decode,
            "  with rtn": rtn(decode),
        }
        if family == "glm":
            recipes |= {"glm-decode-int4-g128": load("glm-decode-int4-g128")}
        with tempfile.TemporaryDirectory() as work:
            for name, recipe in recipes.items():
                made = convert(make_plan(open_checkpoint(EXAMPLES / base), recipe), Path(work) / name)
                plain = Path(work) / f"{name}-bf16"
                convert(make_plan(open_checkpoint(Path(work) / name), load("bf16")), plain)
                ours = logits(plain, tokens)
                kl = torch.nn.functional.kl_div(
                    ours.log_softmax(-1), source.log_softmax(-1), log_target=True, reduction="none"
                ).sum(-1)
                per_block = kl.mean(1)
                error = per_block.std().item() / len(per_block) ** 0.5
                top = (ours.argmax(-1) == source.argmax(-1)).float().mean().item()
                row = f"{base:12}{name:26}{made.plan.output_bytes / 1e6:6.1f}{made.errors['routed_expert']:9.2%}"
                print(f"{row}{per_block.mean().item():10.5f}{error:9.5f}{top:8.2%}", flush=True)


if __name__ == "__main__":
    main()
