"""What the trained examples' own caches hold of some text, by transformers alone; statistics folders of such values."""

import inspect
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
import variants
from made_statistics import make_statistics

from phasefold.families import identify
from phasefold.formats.statistics import Statistics, cache_bins, cache_name

TEXTS = (
    "Return the number of items in the list that are larger than the given value.",
    "Create a new file with the given name. Raise an error when it exists already, and leave it untouched.",
)
#: (layer, part) -> BF16 [tokens, heads, width]
Values = Mapping[tuple[int, str], torch.Tensor]


@cache
def values_of(base: str) -> Values:
    """Run an example over `TEXTS` and take what transformers' DynamicCache has kept."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    folder = variants.EXAMPLES / base
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    names = ("k", "v") if base == "tiny-glm4" else ("kv_c", "k_pe")
    held: dict[tuple[int, str], list[torch.Tensor]] = {}
    for text in TEXTS:
        kept = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(input_ids=torch.tensor([tokenizer(text)["input_ids"]]), **{keyword: kept})
        for index, layer in enumerate(kept.layers):
            for name, value in zip(names, (layer.keys, layer.values), strict=True):
                held.setdefault((index, name), []).append(value[0].transpose(0, 1))
    return {place: torch.cat(values) for place, values in held.items()}


def statistics_of(folder: Path, source: Path, values: Values, **about: object) -> Statistics:
    """A statistics folder of such values, as `calibrate` would leave it."""
    layers: dict[int, dict[str, torch.Tensor]] = {}
    for (layer, part), value in values.items():
        layers.setdefault(layer, {}).update(
            {
                cache_name(layer, part, "tokens"): torch.tensor(len(value)),
                cache_name(layer, part, "amax"): value.float().abs().max(),
                cache_name(layer, part, "histogram"): cache_bins(value),
                cache_name(layer, part, "second_moment"): value.float().square().mean(0).flatten(),
            }
        )
    return make_statistics(folder, source, layers, **{"tokens": len(next(iter(values.values())))} | about)


def random_values(source: Path, tokens: int = 8, scale: float = 1.0) -> Values:
    """Normal values of the shape that a checkpoint's config calls for, without running it."""
    torch.manual_seed(0)
    layers = identify(json.loads((source / "config.json").read_text())).cache()
    return {
        (layer.layer, part.name): (torch.randn(tokens, part.heads, part.width) * scale).bfloat16()
        for layer in layers
        for part in layer.parts
        if not layer.mtp and part.name != "index_k"
    }
