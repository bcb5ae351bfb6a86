"""The section of a model card that says what an artifact is, computed from its manifest, and how to repeat it.

GitHub's Markdown, lines end with a newline alone.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..errors import RecipeError
from ..families import TensorSpec, identify
from ..formats import formats
from ..formats.manifest import Manifest
from ..quantize.extras import Extras, from_json
from ..quantize.plan import SHARD_BYTES
from ..recipes import Recipe, load, names, parse
from .card_text import block, code, escape, link, many, size, table

_PHASES = {
    "prefill": "for the prefill pool of a deployment with prefill and decode apart",
    "decode": "for the decode pool of a deployment with prefill and decode apart",
    "any": "for prefill and decode alike",
}
_METHODS = {"rtn": "rounded to nearest", "search": "scale search", "gptq": "GPTQ", "inverse": "exact inverse"}
_ACTIONS = {"folded": "multiplied by powers of two", "repacked": "same numbers, stored otherwise", "added": "added"}


class Group(NamedTuple):
    """Units of one role that went the same way. error: mean relative error of the units, 0.0 where all are exact."""

    role: str
    action: str
    source: str
    target: str
    how: str
    units: int
    error: float


def section(
    config: Mapping[str, Any],
    manifest: Manifest,
    *,
    repo: str,
    base: str | None,
    licence: str,
    evaluation: str | None,
    launch: str | None,
) -> str:
    """The section without its markers and without a last newline.

    config: the artifact's. base: the source's repo, where that is known. licence: a sentence. evaluation, launch:
    Markdown of others. Raises VerifyError or RecipeError where the manifest makes no sense.
    """
    recipe, extras = parse(manifest.recipe, "phasefold.json: recipe"), from_json(manifest.extras)
    found = groups(config, manifest, recipe)
    parts = [
        "## About this checkpoint",
        _opening(manifest, recipe, base),
        licence,
        "### What was quantized",
        _became(found),
    ]
    parts += [_lines([*_kept(found), *_dropped(manifest), *_cache(extras), *_scales(manifest)])]
    if manifest.notes:
        parts += ["### Before serving", _lines(map(escape, manifest.notes))]
    if launch and launch.strip():
        parts += ["### Launch", launch.strip()]
    if evaluation and evaluation.strip():
        parts += ["### Evaluation", evaluation.strip()]
    parts += ["### How to reproduce", _reproduce(manifest, recipe, extras, base), _digests(manifest, extras)]
    parts += ["### How to verify", _verify(manifest, repo)]
    return "\n\n".join(part for part in parts if part)


def groups(config: Mapping[str, Any], manifest: Manifest, recipe: Recipe) -> list[Group]:
    """What became of the units, by role and way, in the order of the checkpoint."""
    specs = {spec.name.removesuffix(".weight"): spec for spec in identify(config).tensors()}
    found: dict[tuple[str, str, str, str, str], list[tuple[float, str | None]]] = {}
    for module, (action, source, target, error, *chosen) in manifest.units.items():
        spec = specs.get(module)
        how = "decoded" if action == "repacked" and _plain(target) else _ACTIONS.get(action, "")
        if action == "quantized" and not chosen:
            how = _method(spec, recipe, target)
        key = (spec.role if spec else "other", action, source, target, how)
        found.setdefault(key, []).append((error, chosen[0] if chosen else None))
    return [_group(key, units) for key, units in found.items()]


def _plain(name: str) -> bool:
    return name in formats() and formats()[name].plain


def _method(spec: TensorSpec | None, recipe: Recipe, target: str) -> str:
    """How a unit's codes were chosen, by the rule that covers it."""
    rule = next((rule for rule in recipe.rules if spec and rule.covers(spec.role, spec.layer)), None)
    if rule is None or _plain(target):
        return "rounded to nearest"
    said = _METHODS.get(rule.method, rule.method)
    return f"{said}, {rule.objective} error" if rule.method == "search" else said


def _group(key: tuple[str, str, str, str, str], units: list[tuple[float, str | None]]) -> Group:
    role, action, source, target, how = key
    if by := Counter(chosen for _, chosen in units if chosen):
        how = ", ".join(f"{name} {count:,}" for name, count in by.most_common())
    return Group(role, action, source, target, how, len(units), sum(error for error, _ in units) / len(units))


def _opening(manifest: Manifest, recipe: Recipe, base: str | None) -> str:
    revision = manifest.source.get("revision")
    name = link(base) if base else f"{code(manifest.source.get('name'))}, whose repo is not recorded"
    at = f" at revision {code(revision)}" if revision else ""
    before, after = manifest.source.get("total_size"), manifest.output_bytes
    shards = many(sum(file.endswith(".safetensors") for file in manifest.files), "shard")
    sizes = f"{size(after)} of tensors ({after:,} bytes) in {shards}"
    if before:
        sizes += f", {after / before:.1%} of the source's {size(before)} ({before:,} bytes)"
    summary = f": {escape(recipe.summary)}" if recipe.summary else ""
    return (
        f"{name}{at} ({escape(manifest.architecture)}), converted by phasefold {escape(manifest.tool)} with recipe "
        f"{code(recipe.name)}{summary}. It is {_PHASES[recipe.phase]}.\n\n{sizes}."
    )


def _became(found: list[Group]) -> str:
    rows = [
        [escape(g.role), escape(g.source), escape(g.target), f"{g.units:,}", escape(g.how), _error(g)]
        for g in found
        if g.action not in ("copied", "added")
    ]
    if not rows:
        return "Nothing: every tensor is copied."
    head = (
        "The error of a tensor is `||w - w'|| / ||w||`, against what the source's decodes to; the mean is over tensors."
    )
    return head + "\n\n" + table(["role", "from", "to", "tensors", "how", "mean error"], "lllrlr", rows)


def _error(group: Group) -> str:
    return f"{100 * group.error:.3g} %" if group.error else "exact"


def _kept(found: list[Group]) -> list[str]:
    """What was copied, by the format that it lies in."""
    kept: dict[str, list[Group]] = {}
    for group in found:
        if group.action == "copied":
            kept.setdefault(group.target, []).append(group)
    return [
        f"Copied byte for byte, {escape(form)}: {many(sum(g.units for g in those), 'tensor')} "
        f"({escape(', '.join(sorted({g.role for g in those})))})."
        for form, those in kept.items()
    ]


def _dropped(manifest: Manifest) -> list[str]:
    reasons = Counter(str(reason) for reason in manifest.dropped.values())
    return [f"Dropped: {many(count, 'tensor')}, {escape(reason)}." for reason, count in reasons.items()]


def _scales(manifest: Manifest) -> list[str]:
    said = {"tiny_scales": "denormal scale", "zero_blocks": "all-zero block"}
    met = [f"{many(count, said.get(key, key))}" for key, count in manifest.scales.items() if count]
    return [f"Met while quantizing: {escape(', '.join(met))}."] if met else []


def _cache(extras: Extras) -> list[str]:
    """Statistics, folding and KV scales: what the job took besides source and recipe."""
    said = []
    if known := extras.statistics:
        said.append(f"Codes chosen by calibration on {known['tokens']:,} tokens (statistics {code(known['digest'])}).")
    exponents: dict[str, list[int]] = {}
    for layer in extras.folding.values():
        for part, exponent in layer.items():
            exponents.setdefault(part, []).append(exponent)
    for part, those in exponents.items():
        low, high = min(those), max(those)
        powers = f"2^{low}" if low == high else f"2^{low} to 2^{high}"
        where = many(len(those), "layer")
        said.append(f"KV cache folded: {escape(part)} times {powers} in {where}, undone exactly where it is read.")
    if extras.held and not extras.folding:
        said.append("KV cache unfolded: the folding of the source is taken out again.")
    if extras.kv_scales:
        least, most = min(extras.kv_scales.values()), max(extras.kv_scales.values())
        said.append(f"KV scales added: {many(len(extras.kv_scales), 'tensor')}, {least:g} to {most:g}.")
    for about, what in ((extras.folded_by, "Folded"), (extras.kv, "Given")):
        if about:
            on = f"calibrated on {code(about['source']['name'])} with {about['tokens']:,} tokens"
            said.append(f"{what} by the KV scales {code(about['digest'])}, {on}, headroom {about['headroom']:g}.")
    return said


def _reproduce(manifest: Manifest, recipe: Recipe, extras: Extras, base: str | None) -> str:
    name = str(manifest.source.get("name") or "source")
    shipped, option = _shipped(recipe), ""
    if shipped and shipped.mtp != recipe.mtp:
        option = f" --mtp {recipe.mtp}"
    file = recipe.name if shipped else "recipe.toml"
    repo, revision = manifest.source.get("repo"), manifest.source.get("revision")
    source = shlex.quote(f"{repo}@{revision}") if repo and revision else _word(name)
    command = f"phasefold convert {source} artifact --recipe {shlex.quote(file)}{option}"
    command += " --stats STATS" * bool(extras.statistics)
    command += " --fold KV_SCALES" * bool(extras.folded_by) + " --kv KV_SCALES" * bool(extras.kv)
    command += " --unfold" * bool(extras.held and not extras.folding)
    if manifest.shard_bytes != SHARD_BYTES:
        command += f" --shard-size {manifest.shard_bytes}B"
    lines = [command]
    if base and not repo:
        lines.insert(0, f"phasefold pull {shlex.quote(base)} {_word(name)}")
    parts = [f"With phasefold {escape(manifest.tool)}:", block("\n".join(lines), "shell")]
    if not shipped:
        parts += ["where `recipe.toml` is:", block(toml(recipe), "toml")]
    needed = [f"`{word}` {what}" for word, what, there in (
        ("STATS", "the statistics", extras.statistics),
        ("KV_SCALES", "the KV scales", extras.folded_by or extras.kv)) if there]  # fmt: skip
    if needed:
        parts.append(f"{' and '.join(needed)} of the digest above.")
    return "\n\n".join(parts)


def _shipped(recipe: Recipe) -> Recipe | None:
    """The recipe of this name that ships, where it is the same but for what becomes of the MTP layer."""
    if recipe.name not in names():
        return None
    found = load(recipe.name)
    return found if replace(found, mtp=recipe.mtp) == recipe else None


def toml(recipe: Recipe) -> str:
    """A recipe as the text of a .toml file; `recipes.load` takes it back."""
    value = recipe.to_json()
    rules = value.pop("rule")
    lines = [f"{key} = {_toml(item)}" for key, item in value.items()]
    for rule in rules:
        lines += ["", "[[rule]]", *(f"{key} = {_toml(item)}" for key, item in rule.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """JSON's texts, numbers and lists are TOML's, but for one character."""
    if not isinstance(value, str | list):
        raise RecipeError(f"a recipe has no value like {value!r}")
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _digests(manifest: Manifest, extras: Extras) -> str:
    rows: list[list[str]] = [["source: headers and config", code(manifest.source["digest"], cell=True)]]
    rows += [["made from, before that", code(digest, cell=True)] for digest in manifest.source.get("origins", [])]
    rows += [["job: plan, recipe and settings", code(manifest.plan, cell=True)]]
    return table(["digest of", "sha256"], "ll", rows)


def _verify(manifest: Manifest, repo: str) -> str:
    name, at = str(manifest.source.get("name") or "source"), manifest.source.get("repo")
    source = shlex.quote(f"{at}@{manifest.source.get('revision')}") if at else _word(name)
    lines = (
        f"phasefold pull {shlex.quote(repo)} artifact",
        "phasefold verify artifact  # every file's sha256, headers, index and config",
        f"phasefold verify artifact --source {source}  # and every tensor, decoded, against the source",
    )
    return block("\n".join(lines), "shell")


def _word(name: str) -> str:
    """A folder's name as one word of a command line, which is no option."""
    return shlex.quote(f"./{name}" if name.startswith("-") else name)


def _lines(texts: Iterable[str]) -> str:
    return "\n".join(f"* {text}" for text in texts)
