"""How two artifacts compare, of which one was made on a card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phasefold.formats.checkpoint import MANIFEST


def assert_equal_folders(found: Path, expected: Path) -> None:
    """The same files and bytes, but for the manifest's errors: they are sums, which a card adds in another order."""
    names = {path.name for path in expected.iterdir()}
    assert {path.name for path in found.iterdir()} == names
    for name in names - {MANIFEST}:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name
    a, b = (json.loads((folder / MANIFEST).read_bytes()) for folder in (found, expected))
    for module, unit in a.pop("units").items():
        other = b["units"][module]
        assert unit[:3] + unit[4:] == other[:3] + other[4:]
        assert unit[3] == pytest.approx(other[3], rel=2e-4)
    assert a == {key: value for key, value in b.items() if key != "units"}
