"""The KV-scale manifest: every number against torch on the raw values, the rule against its definition, the file."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import variants
from cache_values import random_values, statistics_of, values_of
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from phasefold.calib.kv import bytes_per_token, choose_scale, counted, kv_scales, loss
from phasefold.errors import CheckpointError
from phasefold.families import CacheLayer, CachePart, identify
from phasefold.formats.checkpoint import open_checkpoint
from phasefold.formats.kv_scales import KVScales, Loss, PartScale, read_kv_scales
from phasefold.formats.statistics import BINS, CacheStatistics, Statistics, cache_bins, cache_name, open_statistics
from phasefold.serving.paged.rows import make_layout

BASES = ("tiny-kimi", "tiny-glm4", "tiny-glm5")
SCHEMA = json.loads((variants.EXAMPLES.parent / "formats" / "kv_scales.schema.json").read_text())


@pytest.fixture(scope="module")
def manifest(module_path: Path) -> Callable[[str], KVScales]:
    made: dict[str, KVScales] = {}

    def get(base: str) -> KVScales:
        if base not in made:
            made[base] = kv_scales(statistics_of(module_path / base, variants.EXAMPLES / base, values_of(base)))
        return made[base]

    return get


def loss_of(values: torch.Tensor, scale: float) -> Loss:
    """The definition, on the raw values, in another way: signed, in float64, element by element."""
    x = values.double().flatten()
    stored = (values.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double().flatten()
    zero, small = (stored == 0) & (x != 0), (stored != 0) & (stored.abs() < 2**-6)
    error = torch.linalg.vector_norm(x - stored * scale) / torch.linalg.vector_norm(x)
    shares = (int(which.sum()) / len(x) for which in (zero, small, x.abs() > 448 * scale))
    return Loss(*shares, float(error))


def same_loss(found: Loss, expected: Loss, where: object) -> None:
    assert found[:3] == expected[:3], (where, found, expected)
    assert math.isclose(found.relative_error, expected.relative_error, rel_tol=1e-12), (where, found, expected)


# ------------------------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("base", BASES)
def test_every_number_is_that_of_the_raw_values(manifest, base: str) -> None:
    made, values = manifest(base), values_of(base)
    assert {(layer.layer, name) for layer in made.layers for name in layer.parts} == values.keys()
    for layer in made.layers:
        for name, part in layer.parts.items():
            raw = values[layer.layer, name]
            where, size = (base, layer.layer, name), raw.float().abs().flatten()
            assert (part.tokens, part.heads, part.width) == raw.shape, where
            assert part.amax == float(size.max()), where
            theirs = np.quantile(size.double().numpy(), [0.999, 0.9999], method="inverted_cdf")
            assert [part.p999, part.p9999] == theirs.tolist(), where
            assert math.isclose(part.rms, float(raw.double().square().mean().sqrt()), rel_tol=1e-12), where
            assert part.scale == 2.0 ** math.ceil(math.log2(2 * part.amax / 448)), where
            same_loss(part.at_scale, loss_of(raw, part.scale), where)
            same_loss(part.at_one, loss_of(raw, 1.0), where)
            assert part.at_scale.clipped == 0 and part.at_scale.relative_error <= part.at_one.relative_error, where
            if layer.row_scale is not None:
                assert part.at_row is not None
                same_loss(part.at_row, loss_of(raw, layer.row_scale), where)
        scales = [part.scale for part in layer.parts.values()]
        assert layer.row_scale == (None if base == "tiny-glm4" else max(scales))


@pytest.mark.parametrize("base", BASES)
def test_what_is_predicted_is_what_rows_lose(manifest, base: str) -> None:
    """Stored and read again by the reference runtime's rows, with the manifest's scales."""
    made, values = manifest(base), values_of(base)
    layers = [layer for layer in identify(open_checkpoint(variants.EXAMPLES / base).config).cache() if not layer.mtp]
    rows = make_layout("fp8_e4m3", layers, made.row_scales())
    for layer, row in zip(made.layers, (each[0] for each in rows.layers), strict=True):
        raw = [values[layer.layer, name] for name in layer.parts]
        for part, before, after in zip(
            layer.parts.values(), raw, row.decode(row.encode(raw), torch.float32), strict=True
        ):
            predicted = (part.at_row or part.at_scale).relative_error
            error = torch.linalg.vector_norm(before.double() - after.double()) / torch.linalg.vector_norm(
                before.double()
            )
            assert math.isclose(predicted, float(error), rel_tol=1e-12), (layer.layer, predicted, float(error))


def test_small_latents_lose_much_at_one_and_nothing_at_their_scale(tmp_path: Path) -> None:
    """A latent of amax 0.02, as published for GLM-5.2's first layers: 13.6 % at scale 1.0 for normal values."""
    source = variants.EXAMPLES / "tiny-glm5"
    values = {place: value * 2**-8 for place, value in random_values(source, tokens=64).items()}
    part = kv_scales(statistics_of(tmp_path, source, values)).layers[0].parts["kv_c"]
    assert 0.012 < part.amax < 0.025
    assert part.at_one.relative_error > 0.1 and part.at_one.zero > 0.1
    assert 0.025 < part.at_scale.relative_error < 0.028 and part.at_scale.zero < 0.001


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-60000, 60000, width=32), min_size=1, max_size=60), st.integers(-20, 20))
def test_losses_follow_from_the_histogram(values: list[float], exponent: int) -> None:
    raw = torch.tensor(values).bfloat16()
    if raw.abs().max() > 0:
        bins = counted(cache_bins(raw))
        same_loss(loss(bins, len(values), 2.0**exponent), loss_of(raw, 2.0**exponent), values)


# ---------------------------------------------------------------------------------------------------- the rule


@settings(max_examples=400, deadline=None)
@given(st.floats(2.0**-133, 2.0**127, width=32), st.floats(1, 64))
def test_a_scale_never_clips_and_is_the_smallest_with_its_headroom(amax: float, headroom: float) -> None:
    scale = choose_scale(amax, headroom)
    assert scale > 0 and math.frexp(scale)[0] == 0.5 and float(torch.tensor(scale)) == scale  # F32 has it
    assert amax / scale <= 448 and Fraction(amax) * Fraction(headroom) <= 448 * Fraction(scale)
    rounded = torch.tensor(amax).bfloat16()  # what a cache row may hold of it
    assert float(rounded) <= 448 * scale and torch.isfinite((rounded.float() / scale).to(torch.float8_e4m3fn).float())
    if scale > 2.0**-126:
        assert Fraction(amax) * Fraction(headroom) > 448 * Fraction(scale) / 2


@pytest.mark.parametrize(
    ("amax", "headroom", "scale"),
    [(448.0, 1, 1.0), (math.nextafter(448, 449), 1, 2.0), (224.0, 2, 1.0), (0.02, 2, 2.0**-13), (5.2, 2, 2.0**-5),
     (5.2, 8, 2.0**-3), (3.5, 64, 0.5), (2.0**-133, 2, 2.0**-126)],
)  # fmt: skip
def test_the_rule(amax: float, headroom: float, scale: float) -> None:
    assert choose_scale(amax, headroom) == scale


@pytest.mark.parametrize("headroom", [0.5, 0.0, -1.0, 65.0, math.nan, math.inf])
def test_headrooms_that_clip_or_underflow_are_refused(tmp_path: Path, headroom: float) -> None:
    source = variants.EXAMPLES / "tiny-glm4"
    found = statistics_of(tmp_path, source, random_values(source))
    with pytest.raises(CheckpointError, match="headroom is"):
        kv_scales(found, headroom)


def test_headroom_moves_scales_by_whole_powers(tmp_path: Path) -> None:
    source = variants.EXAMPLES / "tiny-kimi"
    found = statistics_of(tmp_path, source, random_values(source))
    two, eight = (kv_scales(found, headroom) for headroom in (2, 8))
    for before, after in zip(two.layers, eight.layers, strict=True):
        assert before.row_scale and after.row_scale == 4 * before.row_scale
        for name, part in before.parts.items():
            assert after.parts[name].scale == 4 * part.scale and after.parts[name].exponent == part.exponent - 2
            assert part.scale == 2.0**-part.exponent


# ---------------------------------------------------------------------------------------------- bytes a token

PUBLISHED = CachePart("kv_c", 1, 512), CachePart("k_pe", 1, 64), CachePart("index_k", 1, 128)


def test_bytes_of_the_published_latent() -> None:
    layers = [CacheLayer(0, False, PUBLISHED), CacheLayer(1, False, PUBLISHED[:2]), CacheLayer(2, False, ())]
    assert bytes_per_token(layers) == {"bf16": 2 * 1152, "fp8_e4m3": 2 * 576, "fp8_ds_mla": 2 * 656}
    heads = [CacheLayer(0, False, (CachePart("k", 8, 128), CachePart("v", 8, 128)))]
    assert bytes_per_token(heads) == {"bf16": 4096, "fp8_e4m3": 2048}


@pytest.mark.parametrize("base", BASES)
def test_bytes_are_those_of_the_rows(manifest, base: str) -> None:
    made = manifest(base)
    layers = [layer for layer in identify(open_checkpoint(variants.EXAMPLES / base).config).cache() if not layer.mtp]
    assert ("fp8_ds_mla" in made.bytes_per_token) == (base != "tiny-glm4")
    for name, size in made.bytes_per_token.items():
        assert size == sum(rows[0].nbytes for rows in make_layout(name, layers).layers)
    indexed = make_layout("fp8_e4m3", layers).bytes_per_token - made.bytes_per_token["fp8_e4m3"]
    assert made.indexer_bytes_per_token == indexed == (4 * (64 + 4) if base == "tiny-glm5" else 0)


# ------------------------------------------------------------------------------------------ what a runtime gets


@pytest.mark.parametrize("base", BASES)
def test_what_may_be_given_to_each_runtime(manifest, base: str) -> None:
    made = manifest(base)
    assert made.runtimes["sglang"]["reads"] == "nothing" and not made.tensors("sglang")
    assert "--quantization-param-path" in made.runtimes["sglang"]["why"] and "--fold" in made.runtimes["sglang"]["why"]
    expected = {}
    if base == "tiny-glm4":
        expected = {
            f"model.layers.{layer.layer}.self_attn.{name}_scale": part.scale
            for layer in made.layers
            for name, part in layer.parts.items()
        }
    else:
        assert "--fold" in made.runtimes["vllm"]["why"]
    assert made.tensors("vllm") == expected
    assert ("fp8_ds_mla" in made.runtimes["vllm"]["why"]) == (base == "tiny-glm5")


def test_names_are_those_of_compressed_tensors() -> None:
    from compressed_tensors.quantization.quant_metadata import KVCacheScaleType

    specs = identify(open_checkpoint(variants.EXAMPLES / "tiny-glm4").config).tensors()
    last = {spec.name.rpartition(".")[2] for spec in specs if spec.role == "attention.kv_scale"}
    assert last == {KVCacheScaleType.KEY.value, KVCacheScaleType.VALUE.value}


def test_few_tokens_and_mtp_layers_are_told(tmp_path: Path) -> None:
    source = variants.variant("mtp", "tiny-glm4", tmp_path / "source")
    made = kv_scales(statistics_of(tmp_path / "few", source, random_values(source)))
    assert made.mtp_layers == 1 and made.num_layers == 4
    assert any("16,384" in note and "all layers" in note for note in made.notes) and "MTP" in made.notes[-1]
    many = random_values(source, tokens=16_384)
    assert not [note for note in kv_scales(statistics_of(tmp_path / "many", source, many)).notes if "16,384" in note]
    some = many | {(2, "v"): many[2, "v"][:5]}
    notes = kv_scales(statistics_of(tmp_path / "some", source, some)).notes
    assert [note for note in notes if note.startswith("layers 2: fewer")]


# ------------------------------------------------------------------------------------------------ what is refused


def _broken(what: str, values: dict[tuple[int, str], torch.Tensor]) -> None:
    if what == "missing layer":
        del values[2, "kv_c"], values[2, "k_pe"]
    elif what == "missing part":
        del values[1, "k_pe"]
    elif what in ("nan", "inf"):
        values[3, "kv_c"][0, 0, 7] = float(what)
    elif what == "zero":
        values[0, "k_pe"].zero_()
    elif what == "width":
        values[1, "kv_c"] = values[1, "kv_c"][..., :64]
    else:
        values[1, "kv_c"] = values[1, "kv_c"][:0]


@pytest.mark.parametrize(
    ("what", "sentence"),
    [("missing layer", "layer 2: kv_c: no statistics of it"), ("missing part", "layer 1: k_pe: no statistics of it"),
     ("nan", "layer 3: kv_c: 1 of 1,024 values are Inf or NaN"), ("inf", "layer 3: kv_c: 1 of 1,024 values are Inf"),
     ("zero", "layer 0: k_pe: zero in all 8 tokens"), ("width", "layer 1: kv_c: its histogram does not hold 8 tokens")],
)  # fmt: skip
def test_values_without_a_right_scale_are_refused_by_name(tmp_path: Path, what: str, sentence: str) -> None:
    source = variants.EXAMPLES / "tiny-kimi"
    values = dict(random_values(source))
    _broken(what, values)
    with pytest.raises(CheckpointError, match=sentence):
        kv_scales(statistics_of(tmp_path, source, values, tokens=8))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"tokens": 0, "histogram": torch.zeros(BINS, dtype=torch.int64)}, "no token in its statistics"),
     ({"tokens": 9}, "does not hold 9 tokens"), ({"amax": 99.0}, "amax is 99, but the largest"),
     ({"amax": math.inf}, "Inf or NaN"), ({"histogram": torch.zeros(3, dtype=torch.int64)}, "does not hold")],
)  # fmt: skip
def test_statistics_that_contradict_themselves_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], sentence: str
) -> None:
    source = variants.EXAMPLES / "tiny-kimi"
    found = statistics_of(tmp_path, source, random_values(source))
    read = Statistics.cache

    def altered(self: Statistics, layer: int, part: str) -> CacheStatistics | None:
        held = read(self, layer, part)
        return held._replace(**changes) if held and (layer, part) == (1, "k_pe") else held

    monkeypatch.setattr(Statistics, "cache", altered)
    with pytest.raises(CheckpointError, match=f"layer 1: k_pe: .*{sentence}"):
        kv_scales(found)


def test_statistics_that_do_not_say_the_config_are_refused(tmp_path: Path) -> None:
    source = variants.EXAMPLES / "tiny-kimi"
    found = statistics_of(tmp_path, source, random_values(source), config=None)
    with pytest.raises(CheckpointError, match="does not say the source's config"):
        kv_scales(found)


# ---------------------------------------------------------------------------------------------------- the file


@pytest.mark.parametrize("base", BASES)
def test_the_file_is_read_as_it_was_made_and_fits_its_schema(manifest, tmp_path: Path, base: str) -> None:
    made, path = manifest(base), tmp_path / "kv_scales.json"
    path.write_bytes(made.to_bytes())
    again = read_kv_scales(path)
    assert again == made and again.to_bytes() == made.to_bytes() and again.digest == made.digest
    Draft202012Validator.check_schema(SCHEMA)
    Draft202012Validator(SCHEMA).validate(json.loads(path.read_bytes()))


def test_equal_statistics_give_equal_bytes_in_another_process(manifest, tmp_path: Path) -> None:
    base = "tiny-glm5"
    found = statistics_of(tmp_path / "stats", variants.EXAMPLES / base, values_of(base))
    code = (
        "import sys; from pathlib import Path; from phasefold.calib.kv import kv_scales;"
        "from phasefold.formats.statistics import open_statistics;"
        "sys.stdout.buffer.write(kv_scales(open_statistics(Path(sys.argv[1]))).to_bytes())"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "stats")],
        capture_output=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "7"},
    )
    assert told.stdout == kv_scales(found).to_bytes() == manifest(base).to_bytes()


def _signed(value: dict[str, Any]) -> bytes:
    """The file with a digest that fits, as whoever follows the schema would write it."""
    from hashlib import sha256

    value.pop("digest", None)
    return json.dumps(value | {"digest": sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()}).encode()


Edit = Callable[[dict[str, Any]], Any]
PART = "kv_c"
#: edit of a sound file, the sentence, and whether the schema sees it too
FAULTS: list[tuple[str, Edit, str, bool]] = [
    ("version", lambda v: v.update(version=2), "version 2, this phasefold reads version 1", True),
    ("unknown key", lambda v: v.update(more=1), "'more' is unknown", True),
    ("lost key", lambda v: v.pop("headroom"), "headroom is missing", True),
    ("dtype", lambda v: v.update(kv_dtype="fp8_e5m2"), "kv_dtype is 'fp8_e5m2'", True),
    ("headroom", lambda v: v.update(headroom=0.9), "headroom is 0.9", True),
    ("tokens", lambda v: v.update(tokens=0), "tokens is 0", True),
    ("true is no number", lambda v: v.update(tokens=True), "tokens is True", True),
    ("source", lambda v: v.update(source="x"), "source is 'x', expected an object", True),
    ("folding", lambda v: v["source"].update(folding={"0": {"k": 0.5}}), "source: folding is no map", True),
    ("layer lost", lambda v: v["layers"].pop(1), "layer 1 is missing", False),
    ("layers without end", lambda v: v.update(num_layers=10**12), "layer 4 is missing", False),
    ("huge", lambda v: v["layers"][0]["parts"][PART].update(amax=10**400), "amax is larger than any float32", False),
    ("huge headroom", lambda v: v.update(headroom=1e300), "headroom is larger than any float32", False),
    ("rms", lambda v: v["layers"][0]["parts"][PART].update(rms=-1.0), "rms of magnitudes is negative", True),
    ("layer twice", lambda v: v["layers"].append(v["layers"][0]), "layers are not the model's", False),
    ("no layers", lambda v: v.update(layers=[]), "layer 0 is missing", True),
    ("layers", lambda v: v.update(layers={}), "layers is no list", True),
    ("part lost", lambda v: v["layers"][0]["parts"].pop("k_pe"), "layer 0: parts are not", True),
    ("scale", lambda v: v["layers"][0]["parts"][PART].update(scale=0.03), "layer 0: kv_c: scale is 0.03", False),
    ("no scale", lambda v: v["layers"][0]["parts"][PART].update(scale=0), "layer 0: kv_c: scale is 0.0", True),
    ("negative", lambda v: v["layers"][0]["parts"][PART].update(scale=-1.0), "layer 0: kv_c: scale is -1.0", True),
    ("denormal", lambda v: v["layers"][0]["parts"][PART].update(scale=2.0**-130), "expected a power of two", False),
    ("clips", lambda v: v["layers"][0]["parts"][PART].update(scale=2.0**-9), "it would clip", False),
    ("no tokens", lambda v: v["layers"][0]["parts"][PART].update(tokens=0), "layer 0: kv_c: tokens is 0", True),
    ("row", lambda v: v["layers"][0].update(row_scale=2.0), "layer 0: row_scale is 2.0, expected the larger", False),
    ("no row", lambda v: v["layers"][0].update(row_scale=None), "layer 0: row_scale is None", False),
    ("row loss", lambda v: v["layers"][0]["parts"][PART].update(at_row_scale=None), "at_row_scale stands where", False),
    ("share", lambda v: v["layers"][0]["parts"][PART]["at_one"].update(zero=1.5), "shares lie between", True),
    ("runtimes", lambda v: v["runtimes"].pop("vllm"), "runtimes: vllm is missing", True),
    ("reads", lambda v: v["runtimes"]["vllm"].update(reads="tensors"), "runtimes.vllm: reads tensors", False),
    ("bytes", lambda v: v["bytes_per_token"].pop("bf16"), "bytes_per_token has not the layouts", True),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "sentence", "seen"), [f[1:] for f in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_a_wrong_file_is_refused(manifest, tmp_path: Path, edit: Edit, sentence: str, seen: bool) -> None:
    value, path = json.loads(manifest("tiny-kimi").to_bytes()), tmp_path / "kv.json"
    path.write_bytes(_signed(value))
    assert read_kv_scales(path) == manifest("tiny-kimi")
    edit(value)
    path.write_bytes(_signed(value))
    with pytest.raises(CheckpointError, match=sentence) as error:
        read_kv_scales(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)
    assert Draft202012Validator(SCHEMA).is_valid(json.loads(path.read_bytes())) != seen


def test_tensors_that_contradict_their_layer_are_refused(manifest, tmp_path: Path) -> None:
    path, name = tmp_path / "kv.json", "model.layers.1.self_attn.k_scale"
    for edit, sentence in (
        (lambda t: t[name].update(value=8.0), f"{name} is 8.0, its layer says"),
        (lambda t: t.pop(name), "layer 1 has no tensor; all layers or none"),
        (lambda t: t[name].update(dtype="BF16"), "a scale is F32 of shape"),
        (lambda t: t.update({"model.layers.9.self_attn.k_scale": t[name]}), "its layer says nothing"),
    ):
        value = json.loads(manifest("tiny-glm4").to_bytes())
        edit(value["runtimes"]["vllm"]["tensors"])
        path.write_bytes(_signed(value))
        with pytest.raises(CheckpointError, match=sentence):
            read_kv_scales(path)


def test_an_altered_or_damaged_file_is_refused(manifest, tmp_path: Path) -> None:
    path, text = tmp_path / "kv.json", manifest("tiny-kimi").to_bytes().decode()
    for damaged, sentence in (
        (text.replace('"headroom": 2.0', '"headroom": 4.0'), "altered: its content does not match"),
        (text[:200], "not valid JSON"),
        ("[]", "expected a JSON object"),
        (text.replace('"headroom": 2.0', '"headroom": NaN'), "not valid JSON"),
    ):
        path.write_text(damaged)
        with pytest.raises(CheckpointError, match=sentence):
            read_kv_scales(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_kv_scales(tmp_path / "none.json")


def test_part_scale_knows_every_key_of_the_schema() -> None:
    keys = set(SCHEMA["$defs"]["part"]["properties"]) - {"p99.9", "p99.99", "at_row_scale"}
    assert keys | {"p999", "p9999", "at_row"} == set(PartScale._fields)
    assert set(SCHEMA["properties"]) == {"version", "digest", *KVScales.__slots__}
    assert set(SCHEMA["$defs"]["loss"]["properties"]) == set(Loss._fields)


def test_layers_with_linear_attention_have_none(tmp_path: Path) -> None:
    """Kimi-Linear: only some layers have a cache; the others are named, and asked for nothing."""
    import sparse

    config = sparse.config_of("moonshotai/Kimi-Linear-48B-A3B-Instruct")
    cached = [layer for layer in identify(config).cache() if layer.parts]
    values = {
        (layer.layer, part.name): torch.ones(2, part.heads, part.width).bfloat16()
        for layer in cached
        for part in layer.parts
    }
    made = kv_scales(statistics_of(tmp_path, variants.EXAMPLES / "tiny-kimi", values, config=config))
    assert [layer.layer for layer in made.layers] == [layer.layer for layer in cached] and 0 < len(cached) < 27
    assert sorted([*made.layers_without_cache, *(layer.layer for layer in made.layers)]) == list(range(made.num_layers))
    path = tmp_path / "kv.json"
    path.write_bytes(made.to_bytes())
    assert read_kv_scales(path) == made
    assert open_statistics(tmp_path).read(cache_name(0, "kv_c", "amax")) is None
