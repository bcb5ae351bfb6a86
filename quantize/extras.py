"""What a job takes besides its source and its recipe, as plain JSON values: they are recorded and hashed with the plan.

So a plan is a function of values alone: `verify` makes the same plan again from an artifact's manifest, without the
statistics that a search or GPTQ has read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import VerifyError


@dataclass(frozen=True, slots=True)
class Extras:
    """Empty maps where there is nothing.

    statistics: `Statistics.identity()` of the calibration that methods read.
    folding: layer -> cached part -> exponent; the part's values are multiplied by two to that power, as compared with
        the model as it was trained.
    held: the folding that the source has already: what the job multiplies by is `folding` against `held`.
    folded_by: which manifest of KV scales was folded (see `kv.with_folding`).
    lowered: layer -> cached part -> [exponent that was asked for, tensor that cannot take it without loss], where
        `folding` is less, or nothing.
    kv_scales: name of a tensor that is added -> its value, a KV scale (stored = x / scale).
    kv: which manifest of KV scales was given (see `kv.with_kv_scales`); where a runtime reads none, no tensor follows.
    """

    statistics: Mapping[str, Any] = field(default_factory=dict)
    folding: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    held: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    folded_by: Mapping[str, Any] = field(default_factory=dict)
    lowered: Mapping[str, Mapping[str, list[Any]]] = field(default_factory=dict)
    kv_scales: Mapping[str, float] = field(default_factory=dict)
    kv: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As the manifest holds it: only what there is."""
        return {key: value for key, value in asdict(self).items() if value}


NO_EXTRAS = Extras()


def from_json(value: Mapping[str, Any]) -> Extras:
    """As `to_json` left it. Raises VerifyError where a key is unknown."""
    try:
        return Extras(**value)
    except TypeError as error:
        raise VerifyError(f"phasefold.json: extras: {error}") from None
