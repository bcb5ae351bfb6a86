"""Model cards of artifacts made from the examples, read back by huggingface_hub, and what they leave as it was."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import variants
from huggingface_hub import ModelCard
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from phasefold.errors import HubError
from phasefold.formats.checkpoint import open_checkpoint
from phasefold.formats.manifest import Manifest
from phasefold.hub.card import BEGIN, END, card, pulled_apart
from phasefold.hub.card_body import groups, toml
from phasefold.hub.card_text import block, code, escape, table
from phasefold.quantize.convert import Result, convert
from phasefold.quantize.extras import Extras
from phasefold.quantize.plan import make_plan
from phasefold.recipes import Recipe, load, names, parse

BASE = "moonshotai/Kimi-K2.6"
KIMI = """\
---
# of the publisher
license: other   # see below
license_name: modified-mit
license_link: LICENSE
tags:
- compressed-tensors   # native
- moe
# a comment between
pipeline_tag: image-text-to-text
extra_gated_prompt: |
  Read this.

library_name: vllm
---

<div align="center">Kimi</div>

---

# 1. Introduction
"""


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_bytes())


class Made(NamedTuple):
    """An artifact and its manifest."""

    folder: Path
    manifest: Manifest

    def card(self, existing: str | None, **changes) -> str:
        about = {"repo": "me/Kimi-INT4", "base_model": BASE} | changes
        return card(config_of(self.folder), self.manifest, existing, **about)


def converted(source: Path, out: Path, recipe: str | Recipe, **options) -> Result:
    wanted = load(recipe) if isinstance(recipe, str) else recipe
    return convert(make_plan(open_checkpoint(source), wanted, **options), out)


@pytest.fixture(scope="module")
def kimi(module_path: Path) -> Made:
    source = variants.variant("mtp+int4", "tiny-kimi", module_path / "Kimi-K2.6")
    (source / "LICENSE").write_text("Modified MIT")
    return Made(module_path / "kimi", converted(source, module_path / "kimi", "kimi-decode-int4").manifest)


@pytest.fixture(scope="module")
def glm(module_path: Path) -> Result:
    return converted(variants.variant("bf16", "tiny-glm4", module_path / "GLM"), module_path / "glm", "glm-prefill-fp8")


def read(text: str, folder: Path) -> dict:
    """The front matter as huggingface_hub reads it from a file."""
    (folder / "README.md").write_bytes(text.encode())
    return ModelCard.load(folder / "README.md").data.to_dict()


def test_a_card_is_extended(kimi: Made, tmp_path: Path) -> None:
    text = kimi.card(KIMI)
    before, after = read(KIMI, tmp_path), read(text, tmp_path)
    assert after == before | {
        "base_model": BASE,
        "base_model_relation": "quantized",
        "tags": ["compressed-tensors", "moe", "phasefold", "decode", "int4"],
    }
    new = ("base_model", "base_model_relation", "- phasefold", "- decode", "- int4")
    front = pulled_apart(text).front
    kept = [line for line in (front.head + front.block + front.tail).splitlines(True) if not line.startswith(new)]
    assert "".join(kept) + pulled_apart(text).outside == KIMI  # comments, order, layout
    assert kimi.card(text) == text
    assert "Licence: modified-mit (other), carried over from the source; its text, as in the source: `LICENSE`." in text
    licence = [after[key] for key in ("license", "license_name", "license_link")]
    assert licence == ["other", "modified-mit", "LICENSE"]


def test_without_a_card_nothing_is_invented(kimi: Made, glm: Result, tmp_path: Path) -> None:
    text = kimi.card(None)
    assert read(text, tmp_path).keys() == {"base_model", "base_model_relation", "tags", "library_name"}
    assert text.count("# Kimi-INT4\n") == 1 and kimi.card(text) == text
    assert "names none, so none is named here; what the source has beside it: `LICENSE`." in text
    text = card(
        config_of(glm.plan.checkpoint.folder.with_name("glm")), glm.manifest, None, repo="me/GLM", base_model=None
    )
    assert "names none, so none is named here; ask its publisher." in text and "whose repo is not recorded" in text
    assert "base_model" not in read(text, tmp_path) and "phasefold pull me/GLM artifact" in text


@pytest.mark.parametrize(
    ("front", "said"),
    [
        ("license: mit", "Licence: mit, carried over from the source; its text"),
        ("license: other\nlicense_link: ./LICENSE", "Licence: other, carried over from the source; its text"),
        (
            "license: other\nlicense_link: LICENSE.md",
            "(its link, `LICENSE.md`, is to a file that the source did not have)",
        ),
        (
            "license: a*\nlicense_name: x\nlicense_link: https://x.org/a_b",
            "x (a\\*), carried over from the source (<https://x.org/a_b>)",
        ),
        ("license_name: x", "names none, so none is named here"),
    ],
)
def test_a_licence_is_carried_over_as_it_stands(kimi: Made, front: str, said: str) -> None:
    text = kimi.card(f"---\n{front}\n---\n")
    assert said in text and f"\n{front}\n---\n" in text


def test_the_section_says_what_the_manifest_says(glm: Result, tmp_path: Path) -> None:
    source = glm.manifest.source | {"repo": "zai-org/GLM-4.7", "revision": "a" * 40, "origins": ["0" * 64]}
    manifest = replace(glm.manifest, source=source, notes=["mind <this> | that"])
    folder = glm.plan.checkpoint.folder.with_name("glm")
    text = card(
        config_of(folder), manifest, None, repo="me/GLM", base_model=None, launch="    vllm serve", evaluation="| a |\n"
    )
    assert read(text, tmp_path)["base_model"] == "zai-org/GLM-4.7"
    for group in groups(config_of(folder), manifest, load("glm-prefill-fp8")):
        units = [unit for unit in glm.plan.units() if (unit.role, unit.action) == (group.role, group.action)]
        assert len(units) == group.units
        if group.action == "quantized":
            assert group.error == pytest.approx(glm.errors[group.role])
            error = f"{100 * group.error:.3g} %"
            assert f"| {group.role} | bf16 | fp8-channel | {group.units} | rounded to nearest | {error} |" in text
        else:
            assert group.action == "copied" and group.error == 0 and f"{group.role}" in text
    before, after = manifest.source["total_size"], manifest.output_bytes
    for words in (
        f"({after:,} bytes) in 1 shard, {after / before:.1%} of the source's",
        "* mind &lt;this&gt; \\| that",
        "### Launch\n\nvllm serve\n\n### Evaluation\n\n| a |\n\n### How to reproduce",
        f"```shell\nphasefold convert zai-org/GLM-4.7@{'a' * 40} artifact --recipe glm-prefill-fp8\n```",
        manifest.plan,
        manifest.source["digest"],
        "0" * 64,
        f"phasefold verify artifact --source zai-org/GLM-4.7@{'a' * 40}",
    ):
        assert words in text


def test_a_recipe_of_ones_own_stands_in_the_card(kimi: Made, tmp_path: Path) -> None:
    rules = [
        {"roles": ["routed_expert"], "format": "int4-g32", "layers": "0-2,4"},
        {"roles": ["*"], "format": "keep"},
    ]
    own = parse(
        {"families": ["kimi"], "name": 'our ``` "own"\x7f', "summary": "größe \U0001f600", "rule": rules}, "own"
    )
    source = variants.variant("int4", "tiny-kimi", tmp_path / "it's -a")
    result = converted(source, tmp_path / "out", own, shard_bytes=2_000_000)
    text = card(config_of(tmp_path / "out"), result.manifest, KIMI, repo="me/own", base_model=BASE)
    command = "phasefold convert 'it'\"'\"'s -a' artifact --recipe recipe.toml --shard-size 2000000B"
    assert command in text and f"phasefold pull {BASE} 'it'\"'\"'s -a'" in text
    (found,) = re.findall(r"(````)toml\n(.*?)\n\1\n", text, re.DOTALL)
    (tmp_path / "recipe.toml").write_text(found[1])
    assert (
        make_plan(open_checkpoint(source), load(str(tmp_path / "recipe.toml")), 2_000_000).digest == result.plan.digest
    )
    assert card(config_of(tmp_path / "out"), result.manifest, text, repo="me/own", base_model=BASE) == text
    dropped = replace(kimi.manifest, recipe=replace(load("kimi-decode-int4"), mtp="drop").to_json())
    assert "--recipe kimi-decode-int4 --mtp drop\n" in kimi._replace(manifest=dropped).card(None)


@pytest.mark.parametrize("name", names())
def test_recipes_come_back_from_toml(name: str) -> None:
    assert parse(tomllib.loads(toml(load(name))), name) == load(name)


def test_what_a_job_took_besides(kimi: Made) -> None:
    about = {"digest": "d" * 64, "source": {"name": "K2", "digest": "e" * 64}, "tokens": 5000, "headroom": 2.0}
    statistics = {"digest": "f" * 64, "tokens": 7000, "text": "", "source": ""}
    extras = Extras(statistics=statistics, folding={"0": {"kv_c": 3}, "1": {"kv_c": -1}}, folded_by=about)
    dropped = {"a": "MTP layer", "b": "MTP layer", "c": "old scale"}
    units = {
        name: [*unit, "gptq-pool"] if ".experts.0." in name else unit for name, unit in kimi.manifest.units.items()
    }
    text = kimi._replace(
        manifest=replace(
            kimi.manifest, extras=extras.to_json(), dropped=dropped, units=units, scales={"tiny_scales": 2}
        )
    ).card(None)
    for words in (
        "kv_c times 2^-1 to 2^3 in 2 layers, undone exactly",
        f"* Folded by the KV scales `{'d' * 64}`, calibrated on `K2` with 5,000 tokens, headroom 2.",
        f"* Codes chosen by calibration on 7,000 tokens (statistics `{'f' * 64}`).",
        "* Dropped: 2 tensors, MTP layer.\n* Dropped: 1 tensor, old scale.",
        "* Met while quantizing: 2 denormal scales.",
        "--stats STATS --fold KV_SCALES\n",
    ):
        assert words in text
    given_scales = Extras(kv=about, kv_scales={"x": 0.5, "y": 2.0}).to_json()
    text = kimi._replace(manifest=replace(kimi.manifest, extras=given_scales)).card(None)
    assert "* KV scales added: 2 tensors, 0.5 to 2." in text and " --kv KV_SCALES\n" in text
    undone = Extras(held={"0": {"kv_c": 3}}).to_json()
    assert " --unfold\n" in kimi._replace(manifest=replace(kimi.manifest, extras=undone)).card(None)


@pytest.mark.parametrize(
    ("front", "changes"),
    [
        ("base_model: deepseek-ai/V3\nbase_model_relation: finetune", {}),  # the source is a derivative itself
        ("base_model:\n- deepseek-ai/V3\n- b/c # twice\nlanguage: en", {}),
        ("base_model: # none\nlicense: mit", {}),
        ("base_model:\nlicense: mit", {}),
        ("license: mit\nbase_model:", {}),
        (f"base_model: [{BASE}, b/c]", {"base_model": [BASE, "b/c"]}),
        ("tags: [a, b]  # t", {"tags": ["a", "b", "phasefold", "decode", "int4"]}),
        ("tags: [a, b,]", {"tags": ["a", "b", "phasefold", "decode", "int4"]}),
        ("tags: []", {}),
        ("tags: int4", {"tags": ["int4", "phasefold", "decode"]}),
        ("  tags:\n    - a\n\n    # last\n  license: mit", {"tags": ["a", "phasefold", "decode", "int4"]}),
        ("{license: mit, tags: [a]}", {"tags": ["a", "phasefold", "decode", "int4"]}),
        ("# nothing\n", {}),
        ("text: |+\n  a\n\n", {}),
        ("text: |\n  a", {}),
        ("model-index:\n- name: K\n  results: []", {}),
        ("library_name: ~", {}),
        ("language: no  # Norwegian\n'yes': 2024-01-31\nnumber: .nan", {}),
        ("{language: no, 'yes': 2024-01-31, number: .nan, text: 'größe'}", {}),
        ("license: mit\n...", {}),
        ("!!map\nlicense: mit", {}),
        ("", {}),
    ],
)
@pytest.mark.parametrize("eol", ["\n", "\r\n"])
def test_front_matter_of_any_form(kimi: Made, front: str, changes: dict, eol: str) -> None:
    import yaml

    inner = f"{front}\n" if front else ""
    text = f"---\n{inner}---\n\n# Kimi\n---\n".replace("\n", eol)
    found = kimi.card(text)
    assert found.count("\r\n") == (found.count("\n") if eol == "\r\n" else 0)
    before, after = (yaml.safe_load(pulled_apart(t).front.block) or {} for t in (text, found))
    ours = {"base_model": BASE, "base_model_relation": "quantized", "tags": ["phasefold", "decode", "int4"]}
    wanted = {"library_name": "transformers"} | before | ours | changes
    if before.get("library_name", "") is None:
        wanted["library_name"] = "transformers"
    assert repr(sorted(after.items(), key=repr)) == repr(sorted(wanted.items(), key=repr))
    assert [key for key in after if key in before] == list(before)
    assert pulled_apart(found).outside == pulled_apart(text).outside == f"{eol}# Kimi{eol}---{eol}"
    assert ModelCard(found, ignore_metadata_errors=True).data.base_model == wanted["base_model"]
    assert "language: no" not in front or "language: no" in found
    assert "# " not in front or front.split("# ")[1].split("\n")[0] in found
    assert kimi.card(found) == found


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("---\nlicense: mit\n# Kimi\n", "no front matter is found"),
        ("\n--- \nlicense: mit\n---\n", "no front matter is found"),
        ("---\nKimi\n---\n", "begins with a str"),
        ("---\n- a\n---\n", "begins with a list"),
        ("---\n~\n---\n", "cannot take base_model, "),
        ("---\nlicense: [mit\n---\n", r"no YAML \(line 2"),
        ("---\na: 1\nb: : c\n---\n", r"no YAML \(line 3"),
        ("---\na: !!python/object:os.system x\n---\n", "no YAML"),
        ("---\na: \x07\n---\n", "cannot be read"),
        ("---\na: 2024-13-45\n---\n", "cannot be read"),
        ("---\na: " + "[" * 500 + "]" * 500 + "\n---\n", "cannot be read"),
        ("---\na: &x [b]\nc: *x\n---\n", "alias"),
        ("---\nlicense: mit\nlicense: other\n---\n", "'license' twice"),
        ("---\ntags: {a: b}\n---\n", "tags in its front matter is a dict"),
        (f"a\n{BEGIN}\nb\n", "are begin, expected"),
        (f"a\n{END}\nb\n", "are end, expected"),
        (f"{END}\n{BEGIN}\n", "are end, begin, expected"),
        (f"{BEGIN}\n{END}\n" * 2, "are begin, end, begin, end, expected"),
        (f"say {BEGIN}\n{END}\n", "not alone"),
        (f"{BEGIN}\n{END} and\n", "not alone"),
        (f"{BEGIN} {END}", "not alone"),
    ],
)
def test_what_cannot_be_extended_is_refused(kimi: Made, text: str, reason: str) -> None:
    with pytest.raises(HubError, match=reason) as error:
        kimi.card(text)
    assert str(error.value).startswith("README.md: ") and "\n" not in str(error.value)


def test_a_section_cannot_be_closed_from_within(kimi: Made) -> None:
    with pytest.raises(HubError, match="within the section"):
        kimi.card(None, evaluation=f"| {END} |")


def test_the_section_is_replaced_where_it_stands(kimi: Made) -> None:
    old = f"# Mine\r\n\r\n  {BEGIN} \r\nstale\r\n{END}\r\n\r\nrest\x0b\u2028 \n"
    text = kimi.card(old)
    assert pulled_apart(text).outside == pulled_apart(old).outside == "# Mine\r\n\r\n\r\nrest\x0b\u2028 \n"
    assert "stale" not in text and text.index("# Mine") < text.index(BEGIN) < text.index("rest")
    marked = kimi.card("\ufeff" + KIMI)
    assert marked == "\ufeff" + kimi.card(KIMI)


PIECES = st.sampled_from(
    [BEGIN, END, "---", "\n", "\r\n", "\r", "\ufeff", "tags:", " - a", "base_model: b", "#", "```", " "]
)


@given(st.one_of(st.text(), st.lists(PIECES).map("".join)))
@example("\ufeff---\r\n---\r\n")
@example("---\na: b\n---")
@example("---\n\n\n---")
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_outside_is_touched(kimi: Made, text: str) -> None:
    try:
        found = kimi.card(text)
    except HubError:
        assume(False)
    pieces = pulled_apart(text)
    assert "".join(pieces.front[:3]) + pieces.before + pieces.section + pieces.after == text
    assert pulled_apart(found).outside == pieces.outside or not text
    assert kimi.card(found) == found


@given(st.text(), st.text())
def test_names_stay_in_their_cells(a: str, b: str) -> None:
    row = table(["x", "y"], "ll", [[escape(a), code(b, cell=True)]]).split("\n")
    assert len(row) == 3 and len(re.findall(r"(?<!\\)(?:\\\\)*\|", row[2].replace(code(b, cell=True), ""))) == 3
    fence, *inner, last = block(b, "").split("\n")
    assert fence == last and fence not in "\n".join(inner)
