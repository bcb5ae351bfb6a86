"""Reading: what is damaged is refused by name, whatever the damage; what is sound is read right."""

import json
import os
import random
import shutil
import struct
from pathlib import Path

import pytest
import torch
import variants
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from phasefold.errors import CheckpointError
from phasefold.formats import make_header
from phasefold.formats.checkpoint import INDEX, Reader, open_checkpoint, parse_header, side_files
from phasefold.quantize.account import account, held_config
from phasefold.serving.survey import survey

TINY = variants.EXAMPLES / "tiny-glm4"
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "source"))


def edit_header(path: Path, change) -> None:
    """Rewrite a shard's header in place (the data stays as it is)."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def edit_json(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"
DAMAGE = {
    "truncated shard": (lambda f: truncate(f / SHARD), [SHARD, "truncated"]),
    "empty shard": (lambda f: (f / SHARD).write_bytes(b""), [SHARD, "not a safetensors file"]),
    "shard missing": (lambda f: (f / SHARD).unlink(), [SHARD, "missing"]),
    "config missing": (lambda f: (f / "config.json").unlink(), ["config.json"]),
    "config no JSON": (lambda f: (f / "config.json").write_text("{"), ["config.json", "JSON"]),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), ["config.json", "object"]),
    "ghost in the index": (
        lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].update({"ghost.weight": SHARD})),
        ["ghost.weight", INDEX],
    ),
    "name missing in the index": (
        lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].pop(EXPERT)),
        [EXPERT, INDEX, SHARD],
    ),
    "index names the wrong shard": (
        lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].update({EXPERT: "model-00001-of-00003.safetensors"})),
        [EXPERT, "model-00001"],
    ),
    "wrong total": (
        lambda f: edit_json(f / INDEX, lambda i: i["metadata"].update(total_size=7)),
        ["total_size 7", "13,205,696"],
    ),
    "path in the index": (
        lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].update({EXPERT: "../x.safetensors"})),
        ["../x.safetensors"],
    ),
    "duplicate tensor": (
        lambda f: save_file({EXPERT: torch.zeros(128, 256).bfloat16()}, f / "model-extra.safetensors"),
        [EXPERT, "two shards"],
    ),
    "unknown tensor": (
        lambda f: edit_both(f, EXPERT, "model.layers.2.mlp.experts.3.extra.weight"),
        [EXPERT, "missing"],
    ),
    "header longer than the file": (
        lambda f: (f / SHARD).write_bytes(struct.pack("<Q", 1 << 40) + b"{}"),
        [SHARD, "header"],
    ),
    "overlapping offsets": (
        lambda f: edit_header(f / SHARD, lambda h: shift(h, EXPERT, -512)),
        [SHARD, EXPERT, "overlaps"],
    ),
    "hole in the data": (
        lambda f: edit_header(f / SHARD, lambda h: shift(h, EXPERT, 512)),
        [SHARD, "hole"],
    ),
    "wrong shape": (
        lambda f: edit_header(f / SHARD, lambda h: h[EXPERT].update(shape=[256, 128])),
        [EXPERT, "[128, 256]", "[256, 128]"],
    ),
    "wrong dtype": (
        lambda f: edit_header(f / SHARD, lambda h: h[EXPERT].update(dtype="I16")),
        [EXPERT, "I16"],
    ),
    "unknown dtype": (
        lambda f: edit_header(f / SHARD, lambda h: h[EXPERT].update(dtype="Q4")),
        [EXPERT, "Q4"],
    ),
    "unsupported model": (
        lambda f: edit_json(f / "config.json", lambda c: c.update(model_type="llama")),
        ["llama", "glm4_moe", "kimi_k2"],
    ),
    "stray shard": (
        lambda f: edit_json(f / INDEX, lambda i: drop_shard(i, SHARD)),
        [SHARD],
    ),
}  # fmt: skip


def shift(header: dict, name: str, by: int) -> None:
    header[name]["data_offsets"] = [offset + by for offset in header[name]["data_offsets"]]


def drop_shard(index: dict, shard: str) -> None:
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != shard}
    del index["metadata"]


def edit_both(folder: Path, old: str, new: str) -> None:
    def rename(mapping: dict) -> None:
        mapping[new] = mapping.pop(old)

    edit_header(folder / SHARD, rename)
    edit_json(folder / INDEX, lambda index: rename(index["weight_map"]))


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_by_name(folder: Path, damage: str) -> None:
    inflict, words = DAMAGE[damage]
    inflict(folder)
    with pytest.raises(CheckpointError) as caught:
        account(open_checkpoint(folder))
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_extra_tensor_is_refused(folder: Path) -> None:
    save_file({"model.layers.2.extra.weight": torch.zeros(2, 2)}, folder / "model-00004-of-00003.safetensors")
    (folder / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.extra\.weight: unknown tensor"):
        account(open_checkpoint(folder))


@pytest.mark.parametrize(
    ("kind", "suffix", "words"),
    [
        ("fp8-block", ".weight_scale_inv", ["FP8 weight without its scale"]),
        ("fp8-block", ".weight", ["scale without its weight"]),
        ("int4", ".weight_scale", ["without its weight_scale"]),
        ("int4", ".weight_shape", ["without its weight_shape"]),
        ("int4", ".weight_packed", ["scale without its weight"]),
    ],
)
def test_half_a_quantized_matrix_is_refused(tmp_path: Path, kind: str, suffix: str, words: list[str]) -> None:
    tensors, config = {"fp8-block": variants.fp8_block, "int4": variants.int4}[kind](*variants.load(TINY))
    name = EXPERT.removesuffix(".weight") + suffix
    del tensors[name]
    folder = variants.save(tmp_path / "source", tensors, config)
    with pytest.raises(CheckpointError) as caught:
        account(open_checkpoint(folder))
    for word in [*words, name.rsplit(".", 1)[0]]:
        assert word in str(caught.value)


@pytest.mark.parametrize("extra", ["weight_zero_point", "weight_g_idx", "weight_global_scale", "input_scale"])
def test_companions_that_we_do_not_know_are_refused(tmp_path: Path, extra: str) -> None:
    tensors, config = variants.int4(*variants.load(TINY))
    tensors[EXPERT.removesuffix("weight") + extra] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=f"{extra}: unknown tensor .*not supported"):
        account(open_checkpoint(variants.save(tmp_path / "source", tensors, config)))


def test_reading_gives_the_stored_bytes(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    tensors, _ = variants.load(folder)
    reader = Reader(checkpoint)
    for name, stored in checkpoint.tensors.items():
        out = bytearray(stored.nbytes)
        reader.read(name, 0, memoryview(out))
        assert bytes(out) == tensors[name].view(torch.uint8).numpy().tobytes(), name
    reader.close()


def test_a_source_that_shrinks_is_told(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    truncate(folder / SHARD)
    last = max((s.offset, n) for n, s in checkpoint.tensors.items() if s.file == SHARD)[1]
    with pytest.raises(CheckpointError, match="truncated while it was read"):
        Reader(checkpoint).read(last, 0, memoryview(bytearray(checkpoint.tensors[last].nbytes)))


def test_a_tensor_beside_its_weight_is_not_overlooked(tmp_path: Path) -> None:
    tensors, config = variants.load(TINY)
    tensors["model.layers.1.self_attn.o_proj"] = torch.zeros(4)
    with pytest.raises(CheckpointError, match=r"o_proj.*unknown tensor"):
        account(open_checkpoint(variants.save(tmp_path / "source", tensors, config)))


def test_an_empty_tensor_is_refused(tmp_path: Path) -> None:
    tensors, config = variants.load(variants.EXAMPLES / "tiny-kimi")
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.zeros(0)
    with pytest.raises(CheckpointError, match=r"inv_freq: wrong shape"):
        account(open_checkpoint(variants.save(tmp_path / "source", tensors, config)))


def test_two_configs_that_differ_are_refused(tmp_path: Path) -> None:
    tensors, config = variants.as_k25(*variants.load(variants.EXAMPLES / "tiny-kimi"))
    config["quantization_config"] = variants.INT4_CONFIG
    config["text_config"]["quantization_config"] = {"quant_method": "fp8"}
    found = open_checkpoint(variants.save(tmp_path / "source", tensors, config))
    with pytest.raises(CheckpointError, match="two quantization configs that differ"):
        held_config(found, account(found).model)


@pytest.mark.parametrize("text", ['{"a": 1e999}', '{"a": NaN}', '{"a": 1, "a": 2}', '{"a": -Infinity}'])
def test_numbers_and_keys_that_json_does_not_have(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON"):
        open_checkpoint(folder)


def test_what_is_no_file_is_refused_at_once(folder: Path) -> None:
    os.mkfifo(folder / "model-extra.safetensors")
    with pytest.raises(CheckpointError, match=r"model-extra\.safetensors: is no file"):
        open_checkpoint(folder)
    (folder / "model-extra.safetensors").unlink()
    (folder / "vocab.txt").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"vocab.txt: cannot be read"):
        side_files(folder)


def test_readers_hold_few_files_open(tmp_path: Path) -> None:
    tensors, config = variants.load(TINY)
    checkpoint = open_checkpoint(variants.save(tmp_path / "source", tensors, config, shards=100))
    reader, before = Reader(checkpoint), len(os.listdir("/proc/self/fd"))
    for name, stored in checkpoint.tensors.items():
        reader.read(name, 0, memoryview(bytearray(stored.nbytes)))
    assert len(checkpoint.sizes) == 100 and len(os.listdir("/proc/self/fd")) <= before + 4
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_natural_order_and_side_files(folder: Path) -> None:
    (folder / "code.py").write_text("x = 1")
    (folder / ".hidden").write_text("x")
    (folder / "hf_quant_config.json").write_text("{}")
    (folder / "figures").mkdir()
    (folder / "figures" / "a.png").write_bytes(b"png")
    (folder / "evals").mkdir()
    (folder / "evals" / "20261130T104000Z-0123abcd.json").write_text("{}")
    (folder / "evals" / "theirs.json").write_text("{}")
    (folder / "aborted.bin.partial").write_bytes(b"")
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert list(side_files(folder)) == [
        "code.py", "evals/theirs.json", "figures/a.png", "generation_config.json", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip


def test_headers_that_we_write_are_those_of_the_library(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6).reshape(2, 3), "b": torch.zeros(0), "c": torch.tensor(1.5).bfloat16()}
    save_file(tensors, tmp_path / "theirs.safetensors", {"format": "pt"})
    theirs = (tmp_path / "theirs.safetensors").read_bytes()
    head, offsets = make_header([("a", "I64", (2, 3)), ("b", "F32", (0,)), ("c", "BF16", ())])
    (length,) = struct.unpack("<Q", theirs[:8])
    assert json.loads(head[8:]) == json.loads(theirs[8 : 8 + length])
    assert offsets[0] == len(head) and len(head) % 8 == 0


def test_thousands_of_mutated_files_are_refused_or_right(folder: Path) -> None:
    """Bytes of header and index flipped, cut, doubled: an error with one line, or the very same tensors as before."""
    sound = account(open_checkpoint(folder))
    rng = random.Random(20261129)
    targets = {name: (folder / name).read_bytes() for name in (SHARD, INDEX, "config.json")}
    refused = 0
    for _ in range(3000):
        name = rng.choice(list(targets))
        raw = bytearray(targets[name])
        limit = min(len(raw), 8 + struct.unpack("<Q", raw[:8])[0]) if name == SHARD else len(raw)
        for _ in range(rng.choice((1, 1, 1, 3))):
            place = rng.choice((rng.randrange(limit), rng.randrange(min(16, limit))))
            kind = rng.randrange(4)
            if kind == 0:
                raw[place] ^= 1 << rng.randrange(8)
            elif kind == 1:
                raw[place] = rng.choice(b'{}[]",:0123456789-eE. \x00\xff')
            elif kind == 2:
                del raw[place : place + rng.randrange(1, 9)]
            else:
                raw[place:place] = bytes(raw[place : place + rng.randrange(1, 9)])
        # the data of a shard need not be rewritten to test its header: a sparse tail stands for it
        with open(folder / name, "wb") as file:
            file.write(raw[:limit] if name == SHARD else raw)
            if name == SHARD:
                file.truncate(len(raw))
        try:
            found = account(open_checkpoint(folder))
        except CheckpointError as error:
            assert "\n" not in str(error).encode("utf-8", "backslashreplace").decode()
            refused += 1
        else:
            assert [(i.spec.name, i.parts) for i in found.items] == [(i.spec.name, i.parts) for i in sound.items]
        (folder / name).write_bytes(targets[name]) if name != SHARD else None
        if name == SHARD:
            (folder / name).write_bytes(targets[name])
    assert refused > 1500


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": json_values | st.sampled_from(["BF16", "F32", "U8"]),
        "shape": json_values | st.lists(st.integers(-2, 5), max_size=3),
        "data_offsets": json_values | st.lists(st.integers(-8, 64), max_size=3),
    },
)


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(st.text(max_size=8), entries | json_values, max_size=4) | json_values, st.integers(0, 200))
def test_any_json_as_a_header(value: object, size: int) -> None:
    raw = json.dumps(value).encode()
    try:
        found = list(parse_header(raw, 8 + len(raw) + size, "x.safetensors", Path("x.safetensors")))
    except CheckpointError:
        return
    assert sum(stored.nbytes for _, stored in found) == size


def test_deep_nesting_does_not_overflow() -> None:
    with pytest.raises(CheckpointError):
        list(parse_header(b"[" * 200_000, 10**6, "x", Path("x")))


def test_other_weights_under_the_same_headers_are_another_source(tmp_path: Path) -> None:
    """A fine-tuned model has the headers and the config of its base."""
    base, tuned = (Path(shutil.copytree(TINY, tmp_path / name)) for name in ("base", "tuned"))
    assert open_checkpoint(base).digest == open_checkpoint(tuned).digest
    for path in tuned.glob("*.safetensors"):
        raw = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(raw[:8], "little")
        raw[start:] = bytes(byte ^ 1 for byte in raw[start:])
        path.write_bytes(raw)
    assert open_checkpoint(base).digest != open_checkpoint(tuned).digest


def test_a_folder_that_is_not_finished_says_so(tmp_path: Path) -> None:
    (tmp_path / ".phasefold").mkdir()
    for read in (open_checkpoint, survey):
        with pytest.raises(CheckpointError, match="unfinished; give the same convert command again to go on"):
            read(tmp_path)
