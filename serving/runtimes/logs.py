"""What a runtime says about weights while it loads: of its warnings, which are mostly about other things, those."""

from __future__ import annotations

import logging
import re

_ABOUT_WEIGHTS = re.compile(
    r"weight|checkpoint|parameter|missing|ignor|not found|not in params|unexpected|initiali[sz]ed|skip|dropp|unused"
    r"|scal(e|ing factor)|dequanti|marlin",
    re.IGNORECASE,
)


class WeightLog(logging.Handler):
    """Collects, each once and in order, the warnings and errors of some loggers that concern weights, as `lines`."""

    def __init__(self, *loggers: str) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        for name in loggers:
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what is about weights: a whole message, or the lines of a report in which it says so."""
        text = record.getMessage()
        for line in text.splitlines() if text.count("\n") > 3 else [text]:
            if about_weights(line := flat(line)) and line not in self.lines:
                self.lines.append(line)


def about_weights(text: str) -> bool:
    """Does a message concern weights, rather than anything else that a runtime warns of?"""
    return bool(_ABOUT_WEIGHTS.search(text))


def flat(text: str, limit: int = 600) -> str:
    """A text as one line of at most `limit` characters, without a terminal's colours."""
    line = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())
    return line if len(line) <= limit else line[: limit - 4] + " ..."


def one_line(error: BaseException) -> str:
    """An exception as one line: its type and what it says."""
    return flat(f"{type(error).__name__}: {error}")
