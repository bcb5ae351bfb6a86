"""What the pictures have in common: a sheet laid out in inches, text that stays where it is put, one way to a file.

Matplotlib's objects with the Agg canvas: no window system, and no state that a caller could share. Colours are of Okabe
& Ito's palette, which the colour-blind tell apart; what is bad is also marked by its shape. Needs the extra `plot`.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import EvalError, LoadError, UsageError
from ..quantize.output import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, GRID, BAND = "#222222", "#666666", "#e2e2e2", "#f0e3c4"
BLUE, ORANGE, GREEN, GREY, PURPLE = "#0072B2", "#D55E00", "#00805E", "#8a8a8a", "#9C4F86"
#: standing -> colour and marker
LOOK = {
    "worse": (ORANGE, "v"), "surely worse": (ORANGE, "v"), "not worse": (GREEN, "o"), "surely better": (GREEN, "^"),
    "cannot tell": (GREY, "s"), "no difference seen": (BLUE, "o"),
}  # fmt: skip
_FORMATS = (".png", ".svg", ".pdf")
_FONT = "DejaVu Sans"  # comes with matplotlib
_DPI = 160


class Sheet:
    """A page of a width and a height in inches; y is counted from the top."""

    def __init__(self, width: float, height: float) -> None:
        figure_type, canvas = _matplotlib()
        self.width, self.height = width, height
        self.figure: Figure = figure_type(figsize=(width, height), dpi=_DPI, facecolor="white")
        canvas(self.figure)

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """An empty plot with nothing but a bottom line."""
        box = (left / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height)
        made = self.figure.add_axes(box)
        for side in ("top", "right", "left"):
            made.spines[side].set_visible(False)
        made.spines["bottom"].set_color("#999999")
        made.tick_params(axis="both", labelsize=8.5, labelcolor=SOFT, color="#999999", length=3)
        return made

    def text(self, x: float, y: float, words: str, size: float = 9, color: str = INK, **more: Any) -> None:
        """Words on the page."""
        more = {"va": "top", "ha": "left"} | more
        self.figure.text(
            x / self.width, 1 - y / self.height, drawable(words), fontsize=size, color=color, parse_math=False,
            family=_FONT, **more,
        )  # fmt: skip

    def save(self, path: Path) -> None:
        """Write it, whole or not at all. UsageError: not a format for pictures; EvalError: it cannot be written."""
        check_format(path)
        data = io.BytesIO()
        self.figure.savefig(data, format=path.suffix[1:].lower(), dpi=_DPI)
        try:
            atomic_write(path, data.getvalue())
        except OSError as error:
            raise EvalError(f"{path}: cannot be written ({error.strerror})") from None


def check_drawing(path: Path) -> None:
    """What drawing would refuse, before there is anything to draw: UsageError for a format, LoadError for the lack of
    matplotlib.
    """
    check_format(path)
    _matplotlib()


def check_format(path: Path) -> None:
    """UsageError where a picture cannot be of this kind."""
    if path.suffix.lower() not in _FORMATS:
        raise UsageError(f"{path}: pictures are {', '.join(_FORMATS)}; give the file such a name")


def _matplotlib() -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LoadError(f"pictures need matplotlib ({error}); pip install 'phasefold[plot]'") from None
    return Figure, FigureCanvasAgg


def drawable(words: str) -> str:
    """What the font has no picture of becomes a question mark."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont(_FONT))
    return "".join(c if c == "\n" or font.get_char_index(ord(c)) else "?" for c in words)


def paragraph(words: str, width: int) -> list[str]:
    """Lines of running text."""
    return textwrap.wrap(words, width) or [""]


def span(values: Sequence[float], pad: float = 0.07) -> tuple[float, float]:
    """From below the smallest to above the largest."""
    low, high = min(values), max(values)
    room = (high - low) * pad or abs(high) * pad or 1.0
    return low - room, high + room
