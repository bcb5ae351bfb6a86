"""Markdown of what comes from outside: escaped, as code, in tables, in blocks of code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote


def escape(text: Any) -> str:
    """A name as text in one cell or line of Markdown, whatever it holds."""
    line = _line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = re.sub(r"([\\`*\[\]|#~$!])", r"\\\1", line)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", line)


def code(text: Any, *, cell: bool = False) -> str:
    """A name as code within a line. cell: of a table, whose cells end at a bar even within code."""
    line = _line(text).replace("|", "\\|") if cell else _line(text)
    ticks = "`" * (_longest(line) + 1)
    pad = " " if line.startswith("`") or line.endswith("`") or not line else ""
    return f"{ticks}{pad}{line}{pad}{ticks}"


def block(text: str, language: str) -> str:
    """Text as a block of code that nothing in it can close."""
    fence = "`" * max(3, _longest(text) + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def link(repo: str) -> str:
    """A repo's name that leads to its page."""
    return f"[{escape(repo)}](https://huggingface.co/{quote(repo, safe='/')})"


def table(header: Sequence[str], sides: str, body: Sequence[Sequence[str]]) -> str:
    """Cells that are Markdown already. sides: "l" or "r" of each column."""
    rule = ["---:" if side == "r" else "---" for side in sides]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *body))


def size(nbytes: float) -> str:
    """Bytes with a decimal unit, as the Hub shows them."""
    for unit, width in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= width:
            return f"{nbytes / width:.2f} {unit}"
    return f"{nbytes:.0f} B"


def many(count: int, noun: str) -> str:
    """A number and its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _line(text: Any) -> str:
    words = " ".join(str(text).split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)


def _longest(text: str) -> int:
    """Length of the longest run of backticks."""
    return max(map(len, re.findall("`+", text)), default=0)
