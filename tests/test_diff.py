"""What changed between two checkpoints: against safetensors' own count, by hand, in CI, of any family, to the byte."""

import gc
import hashlib
import json
import math
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pairs
import pytest
import sparse
import variants
from hub_server import hub_server
from safetensors import safe_open
from test_cli import run, run_json

from phasefold.errors import CheckpointError
from phasefold.formats.checkpoint import MANIFEST, Checkpoint, open_checkpoint
from phasefold.formats.manifest import read_manifest
from phasefold.serving.diff import Diff, KeyChange, changed_keys
from phasefold.serving.diff import diff as compare

TINY = variants.EXAMPLES
Headers = dict[str, tuple[str, tuple[int, ...]]]
BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I32": 4, "I64": 8}


@pytest.fixture(scope="module", autouse=True)
def _no_collector() -> Iterator[None]:
    """As the command line does."""
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.fixture(scope="module")
def int4(module_path: Path) -> Path:
    return pairs.folded(TINY / "tiny-glm4", "glm-decode-int4", module_path / "int4")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return shutil.copytree(TINY / "tiny-glm4", tmp_path / "copy")


def diff(before: Path, after: Path, weights: bool = False) -> Diff:
    return compare(open_checkpoint(before), open_checkpoint(after), weights=weights)


def headers(folder: Path) -> Headers:
    """By the safetensors library."""
    found: Headers = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                part = file.get_slice(name)
                found[name] = part.get_dtype(), tuple(part.get_shape())
    return found


def counted(before: Headers, after: Headers) -> Counter[tuple[str, str, str, str]]:
    """(change, ending, dtype before, dtype after) -> tensors."""
    found: Counter[tuple[str, str, str, str]] = Counter()
    for name in before.keys() | after.keys():
        old, new = before.get(name), after.get(name)
        if old != new:
            change = "added" if old is None else "removed" if new is None else "changed"
            found[change, f".{name.split('.')[-1]}", old[0] if old else "", new[0] if new else ""] += 1
    return found


def size_of(tensors: Headers) -> int:
    return sum(BYTES[dtype] * math.prod(shape) for dtype, shape in tensors.values())


def flip(folder: Path, name: str, element: int) -> None:
    """Change one BF16 element."""
    stored = open_checkpoint(folder).tensors[name]
    with (folder / stored.file).open("r+b") as file:
        file.seek(stored.offset + 2 * element)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def check_counts(found: Diff, before: Headers, after: Headers) -> None:
    """Every number of a diff against what the library counts."""
    told: Counter[tuple[str, str, str, str]] = Counter()
    for change in found.tensors:
        told[change.change, change.suffix, change.before, change.after] += change.tensors
    assert told == counted(before, after)
    assert (found.before.tensors, found.after.tensors) == (len(before), len(after))
    assert (found.before.nbytes, found.after.nbytes) == (size_of(before), size_of(after))
    assert sum(role.before_bytes for role in found.storage) == size_of(before)
    assert sum(role.after_bytes for role in found.storage) == size_of(after)
    alike = {name for name in before.keys() & after.keys() if before[name] == after[name]}
    assert found.weights.alike == len(alike)


# headers


def test_glm_from_bf16_to_fp8_is_a_line_a_role(tmp_path: Path) -> None:
    sparse.write("zai-org/GLM-5.2", tmp_path / "bf16")
    sparse.write("zai-org/GLM-5.2-FP8", tmp_path / "fp8")
    found = diff(tmp_path / "bf16", tmp_path / "fp8")
    check_counts(found, headers(tmp_path / "bf16"), headers(tmp_path / "fp8"))
    assert len(found.tensors) == 20 and len(found.storage) == 20
    experts = next(role for role in found.storage if role.role == "routed_expert")
    assert (experts.before, experts.after, experts.modules) == ("bf16", "fp8-block", 58_368)
    assert {change.path for change in found.config} == {
        f"quantization_config.{key}"
        for key in ("activation_scheme", "fmt", "quant_method", "weight_block_size", "modules_to_not_convert")
    }
    assert all(change.change == "added" for change in found.config)
    assert found.weights.state == "not compared" and found.differs
    said = run("diff", str(tmp_path / "bf16"), str(tmp_path / "fp8")).stdout
    assert len(said.splitlines()) < 60 and "NOT compared (--weights compares them)" in said


@pytest.mark.parametrize(
    ("base", "recipe"),
    [("tiny-kimi", "kimi-decode-int4"), ("tiny-glm4", "glm-prefill-fp8"), ("tiny-glm5", "glm-decode-int4-fp8")],
)
def test_a_source_and_its_artifact(tmp_path: Path, base: str, recipe: str) -> None:
    artifact = pairs.folded(TINY / base, recipe, tmp_path / "out")
    found = diff(TINY / base, artifact, weights=True)
    check_counts(found, headers(TINY / base), headers(artifact))
    assert found.files == () and found.manifest == ()
    assert found.weights.state == "equal"  # what a recipe does not quantize is copied
    assert found.notes == (f"{MANIFEST} before: none; after: ok",)
    back = diff(artifact, TINY / base, weights=True)
    assert back.before == found.after and len(back.tensors) == len(found.tensors)
    assert {c.path for c in back.config} == {c.path for c in found.config}
    assert all(change.change == "removed" for change in back.config)


def test_a_checkpoint_and_itself_and_a_copy(int4: Path, copy: Path, tmp_path: Path) -> None:
    plain = diff(TINY / "tiny-glm4", copy)
    assert not plain.differs and plain.weights.state == "not compared" and plain.weights.alike == 209
    assert diff(copy, copy, weights=True).weights.state == "equal"
    again = shutil.copytree(int4, tmp_path / "again")
    found = diff(int4, again)
    assert not found.differs and (found.weights.how, found.weights.state) == ("manifests", "equal")


def test_shapes_and_single_tensors(tmp_path: Path) -> None:
    tensors, config = variants.load(TINY / "tiny-glm4")
    before = variants.save(tmp_path / "before", dict(tensors), config)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:1000].clone()
    del tensors["model.layers.1.self_attn.q_proj.bias"]
    tensors["model.layers.1.odd.thing"] = tensors["model.norm.weight"].clone()
    after = variants.save(tmp_path / "after", tensors, config | {"vocab_size": 1000})
    found = diff(before, after)
    check_counts(found, headers(before), headers(after))
    told = {change.role: change for change in found.tensors}
    assert told["embed"].reshaped and told["embed"].shapes == ((1024, 256), (1000, 256))
    assert told["attention.bias"].change == "removed" and told["attention.bias"].shapes[1] is None
    assert told["model.layers.*.odd.thing"].change == "added"
    assert found.config == (KeyChange("vocab_size", "changed", 1024, 1000),)
    assert "first [1024, 256] -> [1000, 256]" in run("diff", str(before), str(after)).stdout


def test_a_family_that_nobody_knows(copy: Path, tmp_path: Path) -> None:
    other = shutil.copytree(copy, tmp_path / "other")
    for folder in (copy, other):
        config = json.loads((folder / "config.json").read_text()) | {"model_type": "strange"}
        (folder / "config.json").write_text(json.dumps(config))
    tensors, config = variants.load(other)
    tensors = {n: t.float() if ".experts." in n else t for n, t in tensors.items()}
    shutil.rmtree(other)
    variants.save(other, tensors, config | {"hidden_act": "gelu"})
    found = diff(copy, other)
    check_counts(found, headers(copy), headers(other))
    assert {(c.role, c.tensors, c.before, c.after) for c in found.tensors} == {
        (f"model.layers.*.mlp.experts.*.{part}_proj", 48, "BF16", "F32") for part in ("gate", "up", "down")
    }
    assert [change.path for change in found.config] == ["hidden_act"]


def test_shards_of_other_names(copy: Path, tmp_path: Path) -> None:
    tensors, config = variants.load(copy)
    other = variants.save(tmp_path / "other", tensors, config, shards=1)
    found = diff(copy, other)
    assert found.tensors == () and found.moved == len(tensors) and found.differs
    assert diff(copy, other, weights=True).weights.state == "equal"


# config, side files, manifests


def test_keys_at_any_depth() -> None:
    before = {"a": 1, "b": {"c": [1, 2], "d": None, "e.f": 1}, "g": 1, "h": {}, "i": {"j": 1}, "k": True}
    after = {"a": 1.0, "b": {"c": [2, 1], "d": {"x": 1}, "e.f": 2}, "h": {}, "k": 1, "l": {"m": {"n": 2}}, "o": {}}
    assert list(changed_keys(before, after)) == [
        KeyChange("a", "changed", 1, 1.0),
        KeyChange("b.c", "changed", [1, 2], [2, 1]),
        KeyChange("b.d", "changed", None, {"x": 1}),
        KeyChange('b."e.f"', "changed", 1, 2),
        KeyChange("g", "removed", 1, None),
        KeyChange("i.j", "removed", 1, None),
        KeyChange("k", "changed", True, 1),
        KeyChange("l.m.n", "added", None, 2),
        KeyChange("o", "added", None, {}),
    ]
    assert not list(changed_keys(before, dict(reversed(before.items()))))


def test_side_files_by_their_bytes(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    (copy / "generation_config.json").unlink()
    raw = bytearray((copy / "tokenizer.json").read_bytes())
    raw[-2] ^= 1  # the same size
    (copy / "tokenizer.json").write_bytes(raw)
    found = diff(TINY / "tiny-glm4", copy)
    told = {change.file: change.change for change in found.files}
    expected = {"chat_template.jinja": "added", "generation_config.json": "removed", "tokenizer.json": "changed"}
    assert told == expected
    assert found.tensors == () and found.config == () and found.notes == ()


def test_a_config_that_is_only_written_otherwise(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config))
    found = diff(TINY / "tiny-glm4", copy)
    assert found.config == () and found.notes == ("config.json: the same values, written otherwise",) and found.differs


def test_what_manifests_tell(int4: Path, tmp_path: Path) -> None:
    g128 = pairs.folded(TINY / "tiny-glm4", "glm-decode-int4-g128", tmp_path / "g128")
    found = diff(int4, g128)
    told = {change.path: (change.before, change.after) for change in found.manifest}
    assert told["recipe.name"] == ("glm-decode-int4", "glm-decode-int4-g128")
    assert not [path for path in told if path.startswith(("source", "tool"))]
    assert found.weights.state in ("not compared", "partly compared") and found.weights.differ == 0


def altered_twin(source: Path, out: Path) -> Path:
    """An artifact of the same headers with one other weight, and a manifest that is right about it."""
    from dataclasses import replace

    shutil.copytree(source, out)
    name = "model.layers.1.self_attn.o_proj.weight"
    flip(out, name, 0)
    made = read_manifest(out)
    file = open_checkpoint(out).tensors[name].file
    entry = {**made.files[file], "sha256": hashlib.sha256((out / file).read_bytes()).hexdigest()}
    (out / MANIFEST).write_bytes(replace(made, files={**made.files, file: entry}).to_bytes())
    return out


def test_manifests_tell_that_weights_differ(int4: Path, tmp_path: Path) -> None:
    other = altered_twin(int4, tmp_path / "other")
    found = diff(int4, other)
    assert (found.weights.state, found.weights.how, found.weights.differ) == ("differ", "sha256", 1)
    assert found.weights.first.endswith(".safetensors") and found.differs
    read = diff(int4, other, weights=True).weights
    assert (read.how, read.differ, read.first, read.at) == (
        "bytes", 1, "model.layers.1.self_attn.o_proj.weight", (0, 0),
    )  # fmt: skip


def test_a_manifest_is_not_believed_against_the_bytes(int4: Path, tmp_path: Path) -> None:
    """A shard that went bad after it was written: sizes, headers, config and manifest say that nothing differs."""
    other = tmp_path / "other"
    shutil.copytree(int4, other)
    assert diff(int4, other).weights.how == "manifests" and not diff(int4, other).differs
    file, (size, start, _) = next(iter(open_checkpoint(other).heads.items()))
    with open(other / file, "r+b") as shard:
        shard.seek(start)
        shard.write(bytes(size - start))
    found = diff(int4, other)
    assert (found.weights.state, found.weights.differ, found.weights.first) == ("differ", 1, file) and found.differs


def test_a_manifest_that_does_not_fit_its_folder_counts_for_nothing(int4: Path, tmp_path: Path) -> None:
    other = shutil.copytree(int4, tmp_path / "other")
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace('"vocab_size": 1024', '"vocab_size": 1025'))
    found = diff(int4, other)
    assert found.weights.state == "not compared" and found.manifest == ()
    assert found.after.manifest == "of another config.json than lies there"
    (other / MANIFEST).write_text("{}")
    assert diff(int4, other).after.manifest.startswith("version None")


# weights


def test_one_element_is_found(copy: Path) -> None:
    first, second = "model.layers.2.self_attn.k_proj.weight", "model.layers.3.mlp.experts.7.up_proj.weight"
    flip(copy, first, 3 * 256 + 17)
    flip(copy, first, 5 * 256)
    flip(copy, second, 1)
    quiet = diff(TINY / "tiny-glm4", copy)
    assert quiet.weights.state == "not compared"
    found = diff(TINY / "tiny-glm4", copy, weights=True).weights
    assert (found.state, found.alike, found.equal, found.differ) == ("differ", 209, 207, 2)
    assert (found.first, found.at) == (first, (3, 17))


def test_samples_of_the_weights_are_compared_anyway(copy: Path) -> None:
    for path in copy.glob("*.safetensors"):
        with path.open("r+b") as file:
            file.seek(-1, 2)  # bytes of the end and of the start of the data are not the same
            length = int.from_bytes(path.read_bytes()[:8], "little")
            file.seek(8 + length)
            byte = file.read(1)[0]
            file.seek(8 + length)
            file.write(bytes([byte ^ 1]))
    found = diff(TINY / "tiny-glm4", copy)
    assert found.notes == ("samples of the weights differ",) and found.differs


def test_blocks_smaller_than_a_tensor(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from phasefold.serving import diff_weights

    monkeypatch.setattr(diff_weights, "_BLOCK", 1000)
    assert diff(TINY / "tiny-glm4", copy, weights=True).weights.state == "equal"
    flip(copy, "lm_head.weight", 1023 * 256 + 255)
    found = diff(TINY / "tiny-glm4", copy, weights=True).weights
    assert (found.first, found.at) == ("lm_head.weight", (1023, 255))


def test_weights_that_are_gone_are_an_error(copy: Path) -> None:
    before, after = open_checkpoint(TINY / "tiny-glm4"), open_checkpoint(copy)
    next(copy.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        compare(before, after, weights=True)


def test_progress_tells_of_every_byte(copy: Path) -> None:
    told: list[int] = []
    one: Checkpoint = open_checkpoint(copy)
    compare(one, one, weights=True, advance=told.append)
    assert sum(told) == one.total_size


# the command line


def test_exit_codes_keys_and_markdown(int4: Path, copy: Path, tmp_path: Path) -> None:
    source, page = str(TINY / "tiny-glm4"), tmp_path / "diff.md"
    assert "nothing that was compared differs" in run("diff", source, str(copy), "--exit-code").stdout
    assert "nothing differs" in run("diff", source, str(copy), "--exit-code", "--weights").stdout
    run("diff", source, str(int4))
    run("diff", source, str(int4), "--exit-code", "--markdown", str(page), code=3)
    text = page.read_text()
    assert text.startswith("### From ") and "| routed_expert | 144 | bf16 | 9.44 MB | int4-g32 |" in text.replace(
        "\\_", "_"
    )
    assert "#### config.json" in text and "quantization\\_config.quant\\_method" in text
    told = run_json("diff", source, str(int4), "--exit-code", code=3)
    assert told.keys() == {
        "differs", "before", "after", "tensors", "moved", "storage", "config", "files", "manifest", "weights", "notes",
    }  # fmt: skip
    assert told["differs"] is True and told["weights"]["state"] == "not compared" and told["before"]["manifest"] is None
    experts = next(role for role in told["storage"] if role["role"] == "routed_expert")
    assert experts == {
        "role": "routed_expert", "before": "bf16", "after": "int4-g32", "modules": 144, "before_bytes": 9_437_184,
        "after_bytes": experts["after_bytes"],
    }  # fmt: skip
    added = next(c for c in told["tensors"] if c["suffix"] == ".weight_packed")
    assert added["before"] is None and added["change"] == "added" and added["tensors"] == 144


def test_what_cannot_be_opened_or_written(tmp_path: Path) -> None:
    source = str(TINY / "tiny-glm4")
    assert "no such folder" in run("diff", source, str(tmp_path / "none"), code=1).stderr
    assert "cannot be written" in run("diff", source, source, "--markdown", str(tmp_path / "a" / "b"), code=1).stderr


def test_long_lists_and_many_keys_are_summarised(copy: Path, tmp_path: Path) -> None:
    other = shutil.copytree(copy, tmp_path / "other")
    for folder, ignore in ((copy, range(300)), (other, range(100, 450))):
        config = json.loads((folder / "config.json").read_text())
        config["ignore"] = [f"model.layers.{n}" for n in ignore]
        config |= {f"key_{n}": folder.name for n in range(60)}
        (folder / "config.json").write_text(json.dumps(config))
    said = run("diff", str(copy), str(other)).stdout
    assert "300 items" in said and "350 items (150 came, 100 went)" in said
    assert "(21 more; --json has all)" in said
    assert len(run_json("diff", str(copy), str(other))["config"]) == 61


# the Hub


def test_revisions_on_the_hub(copy: Path, tmp_path: Path) -> None:
    """The Hub names the sha256 of each shard: which differ is known without a weight being read."""
    name = "model.layers.2.self_attn.k_proj.weight"
    with hub_server(tmp_path / "hub") as server:
        env = server.environment(tmp_path / "home")
        first = server.add("org/tiny", copy)
        flip(copy, name, 3 * 256 + 17)
        shard = open_checkpoint(copy).tensors[name].file
        server.add("org/tiny", {shard: copy / shard})

        def ask(*words: str, code: int = 0) -> dict:
            command = [sys.executable, "-m", "phasefold", "diff", *words, "--json"]
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            assert done.returncode == code, done.stderr
            return json.loads(done.stdout)

        told = ask(f"org/tiny@{first}", "org/tiny", "--exit-code", code=3)
        weights = {"state": "differ", "how": "sha256", "alike": 209, "differ": 1, "first": shard, "at": None}
        assert {**told["weights"], "equal": 0} == {**weights, "equal": 0} and 0 < told["weights"]["equal"] < 209
        same = ask("org/tiny@main", "org/tiny", "--exit-code")
        assert same["weights"]["state"] == "equal" and same["differs"] is False
        assert ask("org/tiny", str(copy))["weights"]["state"] == "not compared"  # nobody vouches for a folder
        read = ask(f"org/tiny@{first}", "org/tiny", "--weights")["weights"]
        assert (read["differ"], read["equal"], read["first"], read["at"]) == (1, 208, name, [3, 17])
        assert ask("org/tiny", str(copy), "--weights")["weights"]["state"] == "equal"
