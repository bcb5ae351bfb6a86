"""llmcompressor's own GPTQ and plain rounding on a checkpoint's routed experts; runs in an environment that has it.

    python -P benchmarks/llmcompressor_gptq.py FOLDER BLOCKS.json OUT --group 128 [--method rtn] [--routed] [...]

BLOCKS.json is a list of lists of token ids, all of one length: the same tokens that phasefold was calibrated with. The
model is loaded in BF16, its experts become Linear modules by llmcompressor's own `linearize_moe`, and `oneshot`
quantizes them as its examples do (sequential pipeline, so each layer sees what the layers before it became; GPTQ with
static activation order and damping 0.01; W4A16, symmetric). All else stays BF16. OUT is its own compressed checkpoint.

Its default sends every token through every expert; `--routed` calibrates each expert with the tokens that it gets.
`-P` keeps Python from taking the kernels.py in this folder for a package that transformers asks for.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modeling.moe.linearize import linearize_moe
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM

EXPERTS = r"re:.*\.mlp\.experts\.\d+\.(gate|up|down)_proj$"


def known_config(folder: Path, work: Path) -> Path:
    """The checkpoint with a config that its transformers, older than ours, can read: it derives `layer_types`."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("layer_types", None)
    for path in folder.iterdir():
        (work / path.name).symlink_to(path.resolve())
    (work / "config.json").unlink()
    (work / "config.json").write_text(json.dumps(config))
    return work


def main() -> None:
    """Quantize and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("blocks", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--method", choices=("gptq", "rtn"), default="gptq")
    parser.add_argument("--observer", default="memoryless_minmax")
    parser.add_argument("--routed", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other
    weights = QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=options.group, observer=options.observer
    )
    groups = {"group_0": QuantizationScheme(targets=[EXPERTS], weights=weights)}
    blocks = json.loads(options.blocks.read_text())
    data = Dataset.from_dict({"input_ids": blocks, "attention_mask": [[1] * len(block) for block in blocks]})
    with tempfile.TemporaryDirectory() as work:
        known = known_config(options.folder, Path(work))
        model = linearize_moe(AutoModelForCausalLM.from_pretrained(known, dtype=torch.bfloat16))
        if options.method == "gptq":
            oneshot(
                model=model,
                dataset=data,
                recipe=GPTQModifier(config_groups=groups),
                num_calibration_samples=len(blocks),
                max_seq_length=len(blocks[0]),
                moe_calibrate_all_experts=not options.routed,
            )
        else:
            oneshot(model=model, recipe=QuantizationModifier(config_groups=groups))
        model.save_pretrained(options.out, save_compressed=True)  # reads the source's config once more


if __name__ == "__main__":
    main()
