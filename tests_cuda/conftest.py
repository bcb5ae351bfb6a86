"""The cards of this machine, or of the driver that stands for some (tests/hostcard.py)."""

from __future__ import annotations

import pytest

from phasefold.errors import LoadError
from phasefold.quantize.device import choose


def _usable(ordinal: int) -> bool:
    try:
        choose(f"cuda:{ordinal}")
    except LoadError:
        return False
    return True


@pytest.fixture(scope="session")
def ordinal() -> int:
    """The first card that can be used. LoadError where there is none."""
    return choose("cuda").cards[0]


@pytest.fixture(scope="session")
def ordinals() -> tuple[int, ...]:
    """All cards that can be used; two are enough to tell what several do."""
    return tuple(filter(_usable, range(8)))[:2]
