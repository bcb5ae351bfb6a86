"""One output shard while it is written: its file, what its units have left, and its sha256, which follows the writing.

Hashing is as much work as packing. So whoever has finished a unit hashes on as far as the file is complete, while
others go on with the next units; at the end only a little is left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .. import __version__
from ..errors import ResumeError
from . import output
from .kernels import Buffer
from .units import Shard, Unit


class Outcome(NamedTuple):
    """What a unit left: squared error and squared norm (Frobenius), scales and blocks worth a remark.

    method: what its codes come from in the end, where statistics guide it: see `guide` and `whole`.
    """

    error2: float = 0.0
    norm2: float = 0.0
    tiny_scales: int = 0
    zero_blocks: int = 0
    method: str | None = None

    @property
    def relative_error(self) -> float:
        """||w - w'|| / ||w||, four digits; 0.0 where zeros stay zeros."""
        if self.norm2 == 0:
            return float("inf") if self.error2 else 0.0
        return float(f"{(self.error2 / self.norm2) ** 0.5:.4g}")


class Busy(ResumeError):
    """Another process is writing this very shard."""


class ShardWriter:
    """Writes `FILE.partial` in any order and from any number of threads; `close` makes it the shard.

    source: stamps of the files that it is made of. Raises Busy where another process writes it.
    """

    def __init__(self, out: Path, shard: Shard, source: Mapping[str, Any] | None = None) -> None:
        self.out, self.shard, self.source = out, shard, dict(source or {})
        self._path = out / (shard.file + output.PARTIAL)
        self._handle = self._open()
        try:
            os.fchmod(self._handle, 0o644)
            os.ftruncate(self._handle, 0)
            os.ftruncate(self._handle, shard.size)
            self.write(shard.header, 0)
        except BaseException:
            self.abandon()
            raise
        self._lock, self._hashing = threading.Lock(), threading.Lock()
        self._digest, self._hashed = hashlib.sha256(), 0
        pieces = sorted((o.offset, o.part.nbytes, unit.module) for unit in shard.units for o in unit.outputs)
        self._pieces, self._piece = pieces, 0  # in the order of the file; the first one that is not yet written
        self._complete_to = len(shard.header)
        self._units: dict[str, list[Any]] = {}
        self._scales = {"tiny_scales": 0, "zero_blocks": 0}

    def _open(self) -> int:
        """Open and lock: two processes that write one file would each hash what the other has cut off.

        Between the two, its holder may have given it the shard's own name: then it is another file, and finished.
        """
        while True:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if not output.take(handle, fcntl.LOCK_EX):
                    raise Busy(f"{self._path}: another process is writing it")
                if output.is_at(handle, self._path):
                    return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)

    def write(self, data: Buffer, offset: int) -> None:
        """Write bytes at an absolute offset."""
        view, done = memoryview(data), 0
        while done < len(view):
            done += os.pwrite(self._handle, view[done:], offset + done)

    def finish_unit(self, unit: Unit, outcome: Outcome) -> bool:
        """Take note of a unit that is written; -> whether it was the last one. Then hash what can be hashed."""
        with self._lock:
            error = outcome.relative_error
            entry: list[Any] = [unit.action, unit.source_format, unit.target_format, error]
            self._units[unit.module] = [*entry, outcome.method] if outcome.method else entry
            self._scales["tiny_scales"] += outcome.tiny_scales
            self._scales["zero_blocks"] += outcome.zero_blocks
            while self._piece < len(self._pieces) and self._pieces[self._piece][2] in self._units:
                offset, nbytes, _ = self._pieces[self._piece]
                self._complete_to = offset + nbytes
                self._piece += 1
            last = len(self._units) == len(self.shard.units)
        if self._hashing.acquire(blocking=last):
            try:
                self._hash_on()
            finally:
                self._hashing.release()
        return last

    def _hash_on(self) -> None:
        buffer, start = memoryview(bytearray(1 << 20)), self._hashed
        while self._hashed < self._complete_to:
            chunk = buffer[: self._complete_to - self._hashed]
            got = os.preadv(self._handle, [chunk], self._hashed)
            if got == 0:
                raise OSError(errno.EIO, "shrank while it was written", str(self._path))
            self._digest.update(chunk[:got])
            self._hashed += got
        if hasattr(os, "posix_fadvise"):  # Linux starts to write these pages out: the flush at the end has less to do
            os.posix_fadvise(self._handle, start, self._hashed - start, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Flush, record, rename, in this order: a crash leaves a whole shard with its record, or a partial one."""
        os.fsync(self._handle)
        size = os.fstat(self._handle).st_size
        assert size == self._hashed == self.shard.size, f"{self.shard.file}: {self.shard.size} planned, {size} written"
        if not output.is_at(self._handle, self._path):
            raise ResumeError(f"{self._path}: has been taken away while it was written; give the same command again")
        (self.out / self.shard.file).unlink(missing_ok=True)  # one of another claim: never under this record
        record = {"bytes": size, "sha256": self._digest.hexdigest(), "units": self._units, "scales": self._scales}
        record |= {"tool": __version__, "source": self.source}
        output.atomic_write(output.record_path(self.out, self.shard.file), output.to_json(record))
        os.replace(self._path, self.out / self.shard.file)
        output.flush_folder(self.out)
        os.close(self._handle)

    def abandon(self) -> None:
        """Let a half-written shard go."""
        with contextlib.suppress(OSError):
            try:
                if output.is_at(self._handle, self._path):
                    self._path.unlink(missing_ok=True)
            finally:
                os.close(self._handle)
