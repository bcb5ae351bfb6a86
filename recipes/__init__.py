"""What the user asks for: a recipe is a short .toml file, ordered rules from roles to storage formats.

The first rule that matches a tensor decides; what no rule names is copied as bytes. Recipes of one's own work exactly
like those that ship: give the path of the file instead of a name.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import RecipeError

PHASES = ("prefill", "decode", "any")
MTP = ("quantize", "keep", "drop")
SCALES = ("power_of_two", "float32")


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a recipe: tensors of these roles are stored in this format.

    roles: role names, each also standing for what lies below it ("attention" for "attention.q_a"); "*" for all.
    format: a storage format, "fp8" (FP8 stays as it is, anything else becomes the architecture's own FP8 format),
        "bf16" (quantized weights are decoded) or "keep" (copied as bytes).
    method: how codes are chosen: "rtn", "search", "gptq" or "inverse".
    objective: what the search minimises: "weighted", "weighted2" or "mse", which need no data, or "imatrix", the error
        weighted by calibration statistics. GPTQ has no other.
    scale: for FP8 that is made: "power_of_two" or "float32"; None for the format's own (blocks: power of two, lossless
        where a runtime turns scales into UE8M0; channels: float32, as everybody else writes them).
    layers: only these decoder layers; None for all.
    """

    roles: tuple[str, ...]
    format: str
    method: str = "rtn"
    objective: str = "weighted"
    scale: str | None = None
    layers: frozenset[int] | None = None

    def names(self, role: str) -> str | None:
        """The pattern of this rule that covers `role`, or None."""
        return next((p for p in self.roles if p in ("*", role) or role.startswith(p + ".")), None)

    def covers(self, role: str, layer: int | None) -> bool:
        """Whether a tensor of this role in this layer falls under the rule."""
        return (self.layers is None or layer in self.layers) and self.names(role) is not None


@dataclass(frozen=True, slots=True)
class Recipe:
    """A whole request.

    phase: "prefill", "decode" or "any"; families: the model families that it is made for.
    mtp: what becomes of multi-token-prediction layers: "quantize" (the rules hold for them too), "keep" or "drop".
    """

    name: str
    phase: str
    families: tuple[str, ...]
    summary: str
    rules: tuple[Rule, ...]
    mtp: str = "quantize"

    @property
    def guided(self) -> bool:
        """Whether a rule reads calibration statistics."""
        return any(rule.objective == "imatrix" for rule in self.rules)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; `parse` takes it back."""
        value = asdict(self)
        value["families"] = list(self.families)
        value["rule"] = [
            {
                k: sorted(v)
                if isinstance(v, tuple | frozenset) and k == "layers"
                else list(v)
                if isinstance(v, tuple)
                else v
                for k, v in r.items()
                if v is not None
            }
            for r in value.pop("rules")
        ]
        return value


def names() -> list[str]:
    """The recipes that ship with phasefold."""
    return sorted(item.name.removesuffix(".toml") for item in files(__name__).iterdir() if item.name.endswith(".toml"))


def load(name: str) -> Recipe:
    """A recipe by its name, or by the path of a .toml file. Raises RecipeError."""
    path = Path(name)
    try:
        if name in names():
            text = files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
        elif path.suffix == ".toml":
            text = path.read_text(encoding="utf-8")
        else:
            raise RecipeError(f"no recipe {name!r}; there are {', '.join(names())}, or give the path of a .toml file")
        value = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{name}: cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8'})") from None
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{name}: not valid TOML ({str(error)[:120]})") from None
    return parse(value, name, default_name=path.stem)


def parse(value: Mapping[str, Any], where: str, default_name: str = "") -> Recipe:
    """A recipe from parsed TOML (or from `Recipe.to_json`). Raises RecipeError naming the key that is wrong."""
    _only(value, {"name", "phase", "families", "summary", "mtp", "rule"}, where)
    rules = value.get("rule")
    if not isinstance(rules, list) or not rules or not all(isinstance(rule, dict) for rule in rules):
        raise RecipeError(f"{where}: needs at least one [[rule]] with `roles` and `format`")
    return Recipe(
        name=_text(value, "name", where, default_name),
        phase=_one_of(value, "phase", where, PHASES, "any"),
        families=_texts(value, "families", where),
        summary=_text(value, "summary", where, ""),
        rules=tuple(_rule(rule, f"{where}: rule {number}") for number, rule in enumerate(rules, 1)),
        mtp=_one_of(value, "mtp", where, MTP, "quantize"),
    )


def _rule(value: Mapping[str, Any], where: str) -> Rule:
    _only(value, {"roles", "format", "method", "objective", "scale", "layers"}, where)
    method = _text(value, "method", where, "rtn")
    return Rule(
        roles=_texts(value, "roles", where),
        format=_text(value, "format", where),
        method=method,
        objective=_text(value, "objective", where, "imatrix" if method == "gptq" else "weighted"),
        scale=_one_of(value, "scale", where, SCALES, "") or None,
        layers=_layers(value.get("layers"), where),
    )


def _layers(value: Any, where: str) -> frozenset[int] | None:
    """`[0, 1, 5]` or "0-2,5"."""
    if value is None:
        return None
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return frozenset(value)
    try:
        found: set[int] = set()
        for piece in value.split(","):
            first, _, last = piece.partition("-")
            if int(last or first) > 100_000:
                raise ValueError
            found |= set(range(int(first), int(last or first) + 1))
        return frozenset(found)
    except (AttributeError, ValueError):
        raise RecipeError(f"{where}: layers is {value!r}, expected a list of numbers or a text like '0-2,5'") from None


def _only(value: Mapping[str, Any], known: set[str], where: str) -> None:
    if extra := sorted(value.keys() - known):
        raise RecipeError(f"{where}: unknown key {extra[0]!r}; known are {', '.join(sorted(known))}")


def _text(value: Mapping[str, Any], key: str, where: str, default: str | None = None) -> str:
    found = value.get(key, default)
    if not isinstance(found, str):
        raise RecipeError(f"{where}: {key} is {found!r}, expected a text")
    return found


def _texts(value: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    found = value.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(item, str) and item for item in found):
        raise RecipeError(f"{where}: {key} is {found!r}, expected a list of texts")
    return tuple(found)


def _one_of(value: Mapping[str, Any], key: str, where: str, known: tuple[str, ...], default: str) -> str:
    found = value.get(key, default)
    if key in value and found not in known:
        raise RecipeError(f"{where}: {key} is {found!r}, expected one of {', '.join(known)}")
    return str(found)
