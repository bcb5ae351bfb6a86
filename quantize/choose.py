"""Rules applied: which format each tensor of a checkpoint gets. Requests that make no sense are refused here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..errors import PlanError, RecipeError
from ..families import ROLES, Architecture, TensorSpec
from ..formats import Format, formats
from ..recipes import Recipe, Rule
from .account import Account, Item
from .kernels import METHODS, OBJECTIVES
from .scaling import Scaling
from .units import Output, Unit


class Choice(NamedTuple):
    """A tensor, the format that it gets, and the rule that says so (None: copied)."""

    item: Item
    target: Format
    rule: Rule | None


def choose(found: Account, recipe: Recipe) -> tuple[list[Choice], dict[str, str]]:
    """Apply a recipe; -> a choice for each tensor that is written, and the dropped tensors with the reason.

    Raises RecipeError for a recipe that is wrong in itself or for this model, PlanError where a shape forbids it.
    """
    _check_recipe(recipe, found.model.family)
    architecture, dropped, choices, matched = found.model.architecture, {}, [], set()
    for item in found.items:
        if item.spec.mtp and recipe.mtp == "drop":
            dropped.update({item.module + part.suffix: "MTP layer, dropped on request" for part in item.parts})
            continue
        number = None if item.spec.mtp and recipe.mtp == "keep" else _first_rule(recipe.rules, item.spec)
        rule = None if number is None else recipe.rules[number]
        matched.add(number)
        choices.append(Choice(item, _target(item, rule, architecture) if rule else item.format, rule))
    for number, rule in enumerate(recipe.rules):
        if number not in matched:
            roles = ", ".join(rule.roles)
            raise RecipeError(f"{recipe.name}: rule {number + 1} ({roles}) matches no tensor of this model")
    if recipe.mtp == "drop" and not dropped:
        raise RecipeError(f'{recipe.name}: mtp = "drop", but this checkpoint has no MTP layer')
    return _spell_fp8(choices), dropped


def _check_recipe(recipe: Recipe, family: str) -> None:
    if family not in recipe.families:
        raise RecipeError(
            f"{recipe.name} is a recipe for {', '.join(recipe.families)}, but this is a {family} checkpoint"
        )
    writable = [name for name, item in formats().items() if item.encode] + ["fp8", "bf16", "keep"]
    known = sorted(ROLES)
    for number, rule in enumerate(recipe.rules, 1):
        where = f"{recipe.name}: rule {number}"
        if rule.format not in writable:
            raise RecipeError(f"{where}: format {rule.format!r} is not written; there are {', '.join(writable)}")
        methods, objectives = (*METHODS, "gptq"), (*OBJECTIVES, "imatrix")
        if rule.method not in methods or rule.objective not in objectives:
            raise RecipeError(f"{where}: method is one of {', '.join(methods)}, objective of {', '.join(objectives)}")
        if rule.method == "gptq" and rule.objective != "imatrix":
            raise RecipeError(f"{where}: gptq works on scales of objective imatrix, not {rule.objective}")
        if rule.objective == "imatrix" and rule.method not in ("search", "gptq"):
            raise RecipeError(f"{where}: objective imatrix is one of search and gptq, not of {rule.method}")
        if rule.method != "rtn" and not rule.format.startswith("int4"):
            raise RecipeError(f"{where}: method {rule.method!r} chooses INT4 codes, not {rule.format}")
        for role in rule.roles:
            if role != "*" and not any(k == role or k.startswith(role + ".") for k in known):
                raise RecipeError(f"{where}: unknown role {role!r}; known are {', '.join(known)}")


def _first_rule(rules: Iterable[Rule], spec: TensorSpec) -> int | None:
    return next((number for number, rule in enumerate(rules) if rule.covers(spec.role, spec.layer)), None)


def _target(item: Item, rule: Rule, architecture: Architecture) -> Format:
    """The format that a rule gives a tensor; the tensor's own where it is to be left alone."""
    spec, have = item.spec, item.format
    if rule.format == "fp8" and spec.role == "indexer.wk" and have.name == "fp8-channel":
        return formats()["bf16"]  # both runtimes decode it when they load, SGLang only from blocks
    if rule.format == "keep" or (rule.format == "fp8" and have.grid.kind == "e4m3"):
        return have
    if spec.role == "attention.kv_scale" and rule.names(spec.role) != spec.role:
        return have  # no rule for the attention's weights means it
    if rule.format == "bf16":
        return formats()["bf16"] if spec.linear or not have.plain or have.name == "f16" else have
    if not spec.linear:
        if rule.names(spec.role) == spec.role:
            raise RecipeError(f"{spec.name}: runtimes hold {spec.role} unquantized, it cannot become {rule.format}")
        return have
    target = formats()[architecture.fp8 if rule.format == "fp8" else rule.format]
    if target.grid.kind == "int4" and (reason := (architecture.no_int4 or {}).get(spec.role)):
        raise RecipeError(f"{spec.name}: {spec.role} cannot be INT4: {reason}; put a rule for it before this one")
    group = target.grid.block[1]
    if target.grid.kind == "int4" and spec.shape[1] % group:
        raise PlanError(f"{spec.name}: {spec.shape[1]} input features are not divisible by the group of {group}")
    if have.grid == target.grid and have.grid.kind == "int4":
        return have
    if rule.method == "inverse" and not have.plain:
        raise RecipeError(f"{spec.name}: stored as {have.name}; the inverse takes a BF16 copy of INT4, or INT4 itself")
    return target


def _spell_fp8(choices: list[Choice]) -> list[Choice]:
    """DeepSeek's spelling of FP8 blocks stands alone; beside any compressed-tensors format it takes their spelling."""
    if any(not choice.target.plain and choice.target.name != "fp8-block" for choice in choices):
        respelt = formats()["fp8-block-ct"]
        return [c._replace(target=respelt) if c.target.name == "fp8-block" else c for c in choices]
    return choices


def make_unit(choice: Choice, scaling: Scaling | None = None) -> Unit:
    """What a choice comes to: copied, folded, repacked or quantized, and the parts that are written."""
    item, target, rule = choice
    have, shape = item.format, item.shape
    if target.name == have.name:
        action, parts = "folded" if scaling else "copied", item.parts
    elif target.grid == have.grid and not target.plain:  # the same numbers under other names
        action = "repacked"
        parts = tuple(
            part._replace(suffix=new.suffix) for part, new in zip(item.parts, target.parts(shape), strict=True)
        )
    else:
        action, parts = ("repacked" if target.plain and not have.plain else "quantized"), target.parts(shape)
    outputs = tuple(Output(item.module + part.suffix, part, 0) for part in parts)
    unit = Unit(
        item.module, item.spec.role, shape, action, item.parts, have.name, target.name, outputs, scaling=scaling
    )
    if action != "quantized" or rule is None:
        return unit
    blocks = target.grid.block[0] > 1
    power_of_two = rule.scale == "power_of_two" or (rule.scale is None and blocks)
    # e2m1 times a power of two fits e4m3 with a power-of-two scale: such a cast is exact, or it is refused
    lossless = have.grid.kind == "e2m1" and target.grid.kind == "e4m3" and power_of_two
    return unit._replace(
        method=rule.method, objective=rule.objective, power_of_two=power_of_two, lossless=lossless
    )  # fmt: skip
