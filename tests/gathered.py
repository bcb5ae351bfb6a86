"""Statistics of a trained example by plain forward hooks on transformers' own model: what `calibrate` is measured by.

Whole model in memory, one pass. Every eighth sequence is held out, as `formats.statistics` has it.
"""

import ast
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from made_statistics import make_statistics
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from phasefold.formats.statistics import Statistics, pool_of

HELDOUT_ROWS = 256


def docstrings(pattern: str) -> str:
    """Docstrings of the installed standard library: text of the kind that the examples were trained on."""
    texts = []
    for path in sorted(Path(os.__file__).parent.glob(pattern)):
        if "test" in path.as_posix() or "-packages" in path.as_posix():
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                texts.append(text)
    return "\n\n".join(texts)


def sequences(folder: Path, pattern: str, count: int, length: int = 256) -> Tensor:
    """[count, length] tokens of docstrings."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokens: list[int] = tokenizer(docstrings(pattern))["input_ids"]
    assert len(tokens) >= count * length, f"{pattern}: {len(tokens)} tokens"
    return torch.tensor(tokens[: count * length]).view(count, length)


class _Inputs:
    """Sums over a module's inputs, and some that were left out of them."""

    def __init__(self, size: int) -> None:
        self.hessian = torch.zeros(size, size, dtype=torch.float64)
        self.tokens, self.heldout = 0, torch.empty(0, size)

    def add(self, rows: Tensor, held: Tensor) -> None:
        """rows: [n, in]; held: [n] bool."""
        seen = rows[~held].double()
        self.hessian += seen.T @ seen
        self.tokens += len(seen)
        self.heldout = torch.cat([self.heldout, rows[held]])[:HELDOUT_ROWS]


def gather(folder: Path, tokens: Tensor) -> dict[int, dict[str, Tensor]]:
    """Layer -> name -> tensor, as a statistics folder holds them, of all matrices with Hessians; no cache."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    inputs: dict[str, _Inputs] = {}
    routed: dict[str, Tensor] = {}
    held = torch.zeros(0, dtype=torch.bool)

    def add(module: str, rows: Tensor, mask: Tensor) -> None:
        inputs.setdefault(module, _Inputs(rows.shape[-1])).add(rows, mask)

    def linear(name: str):
        return lambda _, arguments: add(name, arguments[0].reshape(-1, arguments[0].shape[-1]), held)

    def experts(name: str):
        def hook(module: torch.nn.Module, arguments: tuple[Tensor, Tensor, Tensor]) -> None:
            hidden, chosen = arguments[0], arguments[1]
            counts = routed.setdefault(name, torch.zeros(module.num_experts, dtype=torch.int64))
            for expert in range(module.num_experts):
                places = (chosen == expert).any(-1)
                rows, mask = hidden[places], held[places]
                counts[expert] += int((~mask).sum())
                gate, up = (rows @ module.gate_up_proj[expert].T).chunk(2, dim=-1)
                product = module.act_fn(gate) * up
                for leaf, values in (("gate_proj", rows), ("up_proj", rows), ("down_proj", product)):
                    full = f"{name}.{expert}.{leaf}"
                    add(full, values, mask)
                    if leaf != "up_proj":
                        add(str(pool_of(full)), values, mask)

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.startswith("model.layers."):
            module.register_forward_pre_hook(linear(name))
        elif name.endswith("mlp.experts"):
            module.register_forward_pre_hook(experts(name))
    with torch.no_grad():
        for number, block in enumerate(tokens):
            held = torch.full((len(block),), number % 8 == 7)
            model(block[None])
    layers: dict[int, dict[str, Tensor]] = {}
    for name, found in inputs.items():
        layer = layers.setdefault(int(name.split(".")[2]), {})
        layer[f"{name}.tokens"] = torch.tensor(found.tokens)
        if found.tokens and ".pool." not in name:
            layer[f"{name}.second_moment"] = (found.hessian.diagonal() / found.tokens).float()
        if name.endswith("up_proj"):  # kept under gate_proj
            continue
        if found.tokens:
            layer[f"{name}.hessian"] = (found.hessian / found.tokens).float()
        if len(found.heldout):
            layer[f"{name}.heldout"] = found.heldout.clone()
    for name, counts in routed.items():
        layers[int(name.split(".")[2])][f"{name}.expert_tokens"] = counts
    return layers


def gathered(folder: Path, source: Path, count: int, pattern: str = "*/*.py", length: int = 256) -> Statistics:
    """A finished statistics folder of an example."""
    layers: Mapping[int, Mapping[str, Tensor]] = gather(source, sequences(source, pattern, count, length))
    return make_statistics(folder, source, layers, tokens=count * length, sequences=count, length=length)
