"""The reference runtime, one engine: weights and paged cache against transformers' own loading and its DynamicCache."""

import json
from pathlib import Path

import pytest
import torch
import variants
from engines import (
    BASES,
    ORDER_OF_SUMS,
    by_transformers,
    continued,
    divergence,
    forward,
    loaded,
    one_thread,  # noqa: F401  (autouse)
    run_batch,
    tokens,
)
from transformers import DynamicCache

import phasefold.serving.paged.weights as weights
from phasefold.errors import CheckpointError, LoadError
from phasefold.families import Model, identify
from phasefold.formats.checkpoint import open_checkpoint
from phasefold.serving.paged.cache import PagedLayer, PageStorage, Places
from phasefold.serving.paged.engine import Engine, Request
from phasefold.serving.paged.pages import PagePool
from phasefold.serving.paged.reference import generate
from phasefold.serving.paged.rows import make_layout
from phasefold.serving.paged.weights import load_model, text_config
from phasefold.serving.pair import Pair


def same_weights(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    a, b = ours.state_dict(), theirs.state_dict()
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value.dtype == b[name].dtype and torch.equal(value, b[name]), name


# weights


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", ["bf16", "mtp", "mtp-file"])
def test_plain_weights_are_those_that_transformers_loads(tmp_path: Path, base: str, kind: str) -> None:
    folder = variants.variant(kind, base, tmp_path / "source")
    found = load_model(folder)
    same_weights(found.model, by_transformers(variants.EXAMPLES / base))
    assert found.tensors == len(open_checkpoint(variants.EXAMPLES / base).tensors)
    assert [layer.layer for layer in found.cache] == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["int4", "k25+int4", "k25+int4+nested"])
def test_int4_decodes_to_its_bf16_copy(tmp_path: Path, kind: str) -> None:
    found = load_model(variants.variant(kind, "tiny-kimi", tmp_path / "source"))
    same_weights(found.model, by_transformers(variants.variant("int4-as-bf16", "tiny-kimi", tmp_path / "copy")))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", ["fp8-block", "fp8-channel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_decodes_to_code_times_scale(tmp_path: Path, base: str, kind: str, dtype: torch.dtype) -> None:
    tensors, config = variants.load(variants.EXAMPLES / base)
    stored, stored_config = (variants.fp8_block if kind == "fp8-block" else variants.fp8_channel)(tensors, config)
    plain = {}
    for name in tensors:
        scale = stored.get(name + "_scale_inv", stored.get(name + "_scale"))
        if scale is not None and kind == "fp8-block":
            rows, columns = tensors[name].shape
            scale = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        plain[name] = stored[name] if scale is None else (stored[name].float() * scale).to(dtype)
    found = load_model(variants.save(tmp_path / "stored", stored, stored_config), dtype=dtype)
    same_weights(found.model, by_transformers(variants.save(tmp_path / "plain", plain, config), dtype))


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    tensors, config = variants.load(variants.EXAMPLES / "tiny-glm4")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("nan"))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: a value is not finite"):
        load_model(variants.save(tmp_path / "nan", tensors, config))
    known = identify(config)
    strange = Model(known.family, known.architecture, config, {**config, "model_type": "glm4_moe_xxl"})
    with pytest.raises(LoadError, match=r"model_type glm4_moe_xxl: transformers 5.* has no class for it"):
        text_config(strange)
    vision = Model(known.family, known.architecture, config, {"model_type": "siglip_vision_model"})
    with pytest.raises(LoadError, match=r"siglip_vision_model: transformers .* has no causal language model"):
        text_config(vision)


def test_linear_attention_is_refused(tmp_path: Path) -> None:
    config = {
        "model_type": "kimi_linear", "hidden_size": 128, "num_hidden_layers": 2, "first_k_dense_replace": 1,
        "intermediate_size": 128, "moe_intermediate_size": 128, "num_experts": 2, "num_shared_experts": 1,
        "num_attention_heads": 4, "q_lora_rank": None, "kv_lora_rank": 128, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32, "v_head_dim": 32, "vocab_size": 256, "tie_word_embeddings": False,
        "linear_attn_config": {"num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4,
                               "kda_layers": [1], "full_attn_layers": [2]},
    }  # fmt: skip
    with pytest.raises(LoadError, match=r"kimi_linear has linear attention, which keeps a state"):
        load_model(variants.save(tmp_path / "linear", variants.random_from(config), config))


def test_an_architecture_without_a_trained_example(tmp_path: Path) -> None:
    config = json.loads((variants.EXAMPLES / "tiny-kimi" / "config.json").read_text()) | {
        "model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"],
    }  # fmt: skip
    found = load_model(variants.save(tmp_path / "flash", variants.random_from(config), config))
    request = Request(list(range(40)), 6)
    Pair(Engine(found, page_size=16), Engine(found, page_size=16)).run([request])
    assert request.output == continued(found.model, request.prompt, 6)


def test_a_model_that_fills_a_place_of_its_own_is_refused(tmp_path: Path) -> None:
    """The config of a checkpoint says four layers, its text part is made to say three: one layer finds no place."""
    tensors, config = variants.load(variants.EXAMPLES / "tiny-glm4")
    folder = variants.save(tmp_path / "source", tensors, config)
    whole = weights.text_config

    def shortened(model: Model) -> object:
        found = whole(model)
        found.num_hidden_layers = 3
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "text_config", shortened)
        with pytest.raises(LoadError, match=r"unexpected_keys: model\.layers\.3\."):
            load_model(folder)


# the cache


@pytest.mark.parametrize("base", BASES)
def test_paged_is_dynamic_to_the_bit(base: str) -> None:
    """Prompts in chunks, then steps one by one; 300 tokens are more than the indexer of tiny-glm5 chooses."""
    model, prompt = loaded(base).model, tokens(base, 0, 300)
    engine, cache = Engine(loaded(base), page_size=16), DynamicCache(config=loaded(base).model.config)
    theirs = torch.cat([forward(model, [prompt[at : at + 128]], cache)[0] for at in range(0, 300, 128)])
    lease, logits = engine.prefill(prompt, chunk=128)
    assert torch.equal(logits, theirs)
    request = Request(prompt, 20, lease=lease)
    request.take(logits[-1])
    while not request.done:
        step = forward(model, [request.output[-1:]], cache)[0, -1]
        engine.decode([request])
        assert torch.equal(request.logits[-1], step.float())
    for index, layer in enumerate(cache.layers):  # what lies in the pages is what lies in theirs
        slots = [request.lease.pages[at // 16] * 16 + at % 16 for at in range(319)]
        rows = [tensor.flatten(0, 1)[slots].view(torch.bfloat16) for tensor in engine.storage.tensors[index]]
        both = torch.cat([part.transpose(1, 2).flatten(2)[0] for part in (layer.keys, layer.values)], 1)
        assert torch.equal(rows[0], both)
        if base == "tiny-glm5":
            assert torch.equal(rows[1], layer.indexer_keys[0])


@pytest.mark.parametrize("base", BASES)
def test_a_batch_of_one_length_is_dynamic_to_the_bit(base: str) -> None:
    model, engine = loaded(base).model, Engine(loaded(base), page_size=16)
    prompts = [tokens(base, 50 * at, 45) for at in range(4)]
    cache = DynamicCache(config=model.config)
    forward(model, prompts, cache)
    requests = []
    for place, prompt in enumerate(prompts):
        lease = engine.pool.open([])
        engine.pool.grow(lease, 45)
        slots = torch.tensor([lease.pages[at // 16] * 16 + at % 16 for at in range(45)])
        for index, rows in enumerate(engine.storage.layout.layers):  # their cache, put into our pages
            layer = cache.layers[index]
            parts = [layer.keys, layer.values] + ([layer.indexer_keys[:, None]] if len(rows) > 1 else [])
            for row, tensor, values in zip(rows, engine.storage.tensors[index], (parts[:2], parts[2:]), strict=False):
                tensor.flatten(0, 1)[slots] = row.encode([value[place].transpose(0, 1) for value in values])
        engine.pool.commit(lease, prompt)
        requests.append(Request(prompt, 12, output=[7], lease=lease))
    for _ in range(11):
        step = forward(model, [request.output[-1:] for request in requests], cache)[:, -1].float()
        engine.decode(requests)
        assert torch.equal(torch.stack([request.logits[-1] for request in requests]), step)


@pytest.mark.parametrize("base", BASES)
def test_ragged_batches_give_what_single_requests_give(base: str) -> None:
    """Padding and the batch's size change the order of sums, and that in BF16: see ORDER_OF_SUMS."""
    together = run_batch(Engine(loaded(base), page_size=16), base)
    for place, request in enumerate(together):
        (alone,) = run_batch(Engine(loaded(base), page_size=16), base, only=place)
        ours, theirs = torch.stack(request.logits), torch.stack(alone.logits)
        assert divergence(ours, theirs) < ORDER_OF_SUMS
        assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() >= 0.95


@pytest.mark.parametrize("base", BASES)
def test_shared_prefixes_change_nothing(base: str) -> None:
    prompt = tokens(base, 0, 100)
    engine = Engine(loaded(base), page_size=16)
    first, logits = engine.prefill(prompt, chunk=16)
    second, rest = engine.prefill([*prompt[:80], *tokens(base, 200, 20)], chunk=16)
    assert second.shared == 80 and second.pages[:5] == first.pages[:5] and second.pages[5] not in first.pages
    again, tail = engine.prefill(prompt, chunk=16)
    assert again.shared == 96 and torch.equal(tail, logits[96:])
    _, alone = Engine(loaded(base), page_size=16).prefill([*prompt[:80], *tokens(base, 200, 20)], chunk=16)
    assert torch.equal(rest, alone[80:])


def test_another_shape_than_the_familys_is_refused() -> None:
    layer = identify(json.loads((variants.EXAMPLES / "tiny-kimi" / "config.json").read_text())).cache()[0]
    pool, layout = PagePool(4, 16), make_layout("bf16", [layer])
    lease = pool.open([1])
    pool.grow(lease, 3)
    storage = PageStorage(layout, 4, 16)
    paged = PagedLayer(layout.layers[0], storage.tensors[0], Places(pool, [lease], [0], 3))
    with pytest.raises(
        LoadError, match=r"caches kv_c as \[1, 4, 3, 64\], expected \[1, 1, 3, 128\]: pip install 'transf"
    ):
        paged.update(torch.zeros(1, 4, 3, 64), torch.zeros(1, 4, 3, 32))
    with pytest.raises(LoadError, match="indexer keys in a layer that should have none"):
        paged.update_indexer(torch.zeros(1, 3, 64))


def test_without_a_tokenizer_the_text_is_numbers(tmp_path: Path) -> None:
    tensors, config = variants.load(variants.EXAMPLES / "tiny-glm4")
    folder = variants.save(tmp_path / "source", tensors, config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    assert len([int(number) for number in generate(folder, None, 5)["text"].split()]) == 5
    with pytest.raises(LoadError, match=r"no tokenizer\.json in it"):
        generate(folder, "text", 5)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(LoadError, match=r"its tokenizer cannot be read"):
        generate(folder, "text", 5)
