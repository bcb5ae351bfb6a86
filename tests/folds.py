"""Foldings for tests: exponents of mixed signs, and artifacts that are folded by them."""

from __future__ import annotations

from pathlib import Path

from phasefold.formats.checkpoint import open_checkpoint
from phasefold.quantize import fold
from phasefold.quantize.convert import Result, convert
from phasefold.quantize.extras import NO_EXTRAS, Extras
from phasefold.quantize.plan import make_plan
from phasefold.recipes import Recipe, load

#: by layer, for the first and the second part
MIXED = ((3, -2), (-4, 5), (1, 7), (-6, -1))


def parts_of(base: str) -> tuple[str, str]:
    """The cached parts of an example."""
    return ("k", "v") if base == "tiny-glm4" else ("kv_c", "k_pe")


def wanted(base: str, exponents: tuple[tuple[int, int], ...] = MIXED) -> dict[int, dict[str, int]]:
    """A fold for each layer of an example."""
    return {layer: dict(zip(parts_of(base), pair, strict=True)) for layer, pair in enumerate(exponents)}


def run(source: Path, out: Path, recipe: str | Recipe = "keep", extras: Extras = NO_EXTRAS) -> Result:
    """One conversion."""
    found = load(recipe) if isinstance(recipe, str) else recipe
    return convert(make_plan(open_checkpoint(source), found, 2_000_000, extras), out)


def folded(source: Path, out: Path, asked: dict[int, dict[str, int]], recipe: str | Recipe = "keep") -> Extras:
    """An artifact folded as far as the source allows; -> what was settled."""
    extras = fold.settled(open_checkpoint(source), asked)
    run(source, out, recipe, extras)
    return extras


def unfolded(source: Path, out: Path, recipe: str | Recipe = "keep") -> Result:
    """A folded artifact with its folding undone."""
    return run(source, out, recipe, Extras(held=fold.check_unfold(open_checkpoint(source))))
