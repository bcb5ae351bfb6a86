"""Markdown of what comes from outside: escaped, in tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


def escape(text: Any) -> str:
    """A name as text in one cell or line of Markdown, whatever it holds. Within words, underscores mean nothing."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(str(text).split()))
    line = re.sub(r"([\\`*\[\]|#~$!])", r"\\\1", line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", line)


def table(header: Sequence[str], sides: str, body: Sequence[Sequence[str]]) -> str:
    """Cells that are Markdown already. sides: "l" or "r" of each column."""
    rule = ["---:" if side == "r" else "---" for side in sides]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *body))
