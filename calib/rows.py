"""Rows of one width, one a token, in memory or in a file: hidden states, and what a layer needs of every token.

Read and written by position, not mapped: what is in the page cache is not in the process, so memory stays what it is
said to be. A file of rows is a hole before it is written, and reads as zeros.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ..errors import ResumeError
from ..quantize.output import writing


class Rows:
    """`count` rows [width] of a dtype; `path` is where they lie, None for memory."""

    def __init__(self, count: int, width: int, dtype: torch.dtype, path: Path | None, *, new: bool = True) -> None:
        self.count, self.width, self.dtype, self.path = count, width, dtype, path
        self._line = width * dtype.itemsize
        self._held = torch.zeros(count, width, dtype=dtype) if path is None else None
        self._handle = -1
        if path is not None:
            with writing(path.parent):
                flags = os.O_RDWR | ((os.O_CREAT | os.O_TRUNC) if new else 0)
                self._handle = os.open(path, flags, 0o644)
                if new:
                    os.ftruncate(self._handle, count * self._line)

    def get(self, rows: torch.Tensor | range) -> torch.Tensor:
        """Some rows, [n, width]: an int64 tensor of row numbers, or a range of consecutive ones."""
        if self._held is not None:
            return self._held[rows.start : rows.stop].clone() if isinstance(rows, range) else self._held[rows]
        found = torch.empty(len(rows), self.width, dtype=self.dtype)
        raw = memoryview(found.view(torch.uint8).numpy().data).cast("B") if len(rows) else memoryview(b"")
        for start, place, length in _runs(rows):
            piece = raw[place * self._line : (place + length) * self._line]
            done = 0
            while done < len(piece):
                got = os.preadv(self._handle, [piece[done:]], start * self._line + done)
                if not got:
                    raise ResumeError(f"{self.path}: ends early; delete the folder and calibrate again")
                done += got
        return found

    def put(self, rows: torch.Tensor | range, values: torch.Tensor) -> None:
        """Write [n, width] to some rows."""
        values = values.detach().to("cpu", self.dtype).contiguous()
        if self._held is not None:
            self._held[torch.arange(rows.start, rows.stop) if isinstance(rows, range) else rows] = values
            return
        raw = memoryview(values.view(torch.uint8).numpy().data).cast("B") if len(rows) else memoryview(b"")
        assert self.path is not None
        with writing(self.path.parent):
            for start, place, length in _runs(rows):
                piece = raw[place * self._line : (place + length) * self._line]
                done = 0
                while done < len(piece):
                    done += os.pwritev(self._handle, [piece[done:]], start * self._line + done)

    def add(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Add [n, width] to some rows, none of them twice."""
        self.put(rows, self.get(rows) + values.to("cpu"))

    def flush(self) -> None:
        """Make a file survive a power loss."""
        if self.path is not None:
            with writing(self.path.parent):
                os.fsync(self._handle)

    def close(self, *, delete: bool = False) -> None:
        """Let go; `delete`: the file too."""
        self._held = None
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        if delete and self.path is not None:
            self.path.unlink(missing_ok=True)


def _runs(rows: torch.Tensor | range) -> list[tuple[int, int, int]]:
    """Consecutive rows together: (first row, its place among those asked for, how many)."""
    if isinstance(rows, range):
        return [(rows.start, 0, len(rows))] if len(rows) else []
    if not len(rows):
        return []
    cuts = (rows.diff() != 1).nonzero().flatten() + 1
    places = [0, *cuts.tolist(), len(rows)]
    firsts = rows[torch.tensor(places[:-1])].tolist()
    return [(first, a, b - a) for first, a, b in zip(firsts, places[:-1], places[1:], strict=True)]
