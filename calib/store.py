"""Writing a statistics folder, as `formats.statistics` describes it: a file a layer, statistics.json last.

Nothing in it tells of a machine or of a time, and tensors lie in an order of their own: the same numbers are the same
bytes, whoever wrote them and however often the job was interrupted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ResumeError
from ..formats import DTYPES, make_header
from ..formats.statistics import STATISTICS, about_digest
from ..quantize.output import PARTIAL, atomic_write, flush_folder, to_json, writing

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = {"torch.float32": "F32", "torch.int64": "I64"}
_PIECE = 1 << 22


def layer_file(layer: int) -> str:
    """Name of a layer's file."""
    return f"layer-{layer:05d}.safetensors"


class LayerWriter:
    """One layer's file, filled tensor by tensor: what was added need not be held, Hessians would not fit.

    The data is gathered in a file beside it, because a header must know all that follows; `finish` puts both together.
    """

    def __init__(self, folder: Path, layer: int) -> None:
        self.folder, self.layer = folder, layer
        self._gathered = folder / f"layer-{layer:05d}.gathered{PARTIAL}"
        self._held: dict[str, tuple[str, tuple[int, ...], int]] = {}  # name -> dtype, shape, offset in the gathered
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self._gathered, "w+b")

    def add(self, name: str, value: Tensor) -> None:
        """Append a tensor, F32 or I64, on any device. The name must be new."""
        if name in self._held:
            raise ValueError(f"{name} was added to layer {self.layer} already")
        data = value.detach().cpu().contiguous()
        with writing(self.folder):
            self._held[name] = (_DTYPES[str(data.dtype)], tuple(data.shape), self._file.tell())
            self._file.write(data.reshape(-1).numpy().data)

    def finish(self, experts: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Make the file; -> its entry in statistics.json. experts: min, median, max and unseen, of a routed layer."""
        # long elements first, so that each begins at a multiple of its own size
        order = sorted(self._held.items(), key=lambda item: (-DTYPES[item[1][0]], item[0]))
        header, _ = make_header((name, dtype, shape) for name, (dtype, shape, _) in order)
        path = self.folder / layer_file(self.layer)
        partial, digest, size = path.with_name(path.name + PARTIAL), hashlib.sha256(header), len(header)
        with writing(self.folder), _removed_on_error(partial):
            self._file.flush()
            with open(partial, "wb") as file:
                os.fchmod(file.fileno(), 0o644)
                file.write(header)
                for _, (dtype, shape, offset) in order:
                    self._file.seek(offset)
                    for piece in self._pieces(DTYPES[dtype], shape):
                        file.write(piece)
                        digest.update(piece)
                        size += len(piece)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
            self.close()
            flush_folder(self.folder)
        entry: dict[str, Any] = {"layer": self.layer, "file": path.name, "bytes": size, "sha256": digest.hexdigest()}
        return entry | ({"experts": dict(experts)} if experts is not None else {})

    def _pieces(self, width: int, shape: tuple[int, ...]) -> Iterable[bytes]:
        left = width
        for extent in shape:
            left *= extent
        while left:
            piece = self._file.read(min(left, _PIECE))
            if not piece:
                raise OSError(5, "ends early", str(self._gathered))
            left -= len(piece)
            yield piece

    def close(self) -> None:
        """Let go of what was gathered; also where the layer was given up."""
        with contextlib.suppress(OSError):  # a full disk, that has been told of: closing would write the rest
            self._file.close()
        self._gathered.unlink(missing_ok=True)


@contextlib.contextmanager
def _removed_on_error(path: Path) -> Iterator[None]:
    """Leave nothing of a file that could not be finished: a folder that is given up must not be a stranger's."""
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def write_layer(
    folder: Path, layer: int, tensors: Mapping[str, Tensor], experts: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write one layer's file from tensors that fit in memory; -> its entry in statistics.json."""
    writer = LayerWriter(folder, layer)
    for name, value in tensors.items():
        writer.add(name, value)
    return writer.finish(experts)


def finish(folder: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Write statistics.json, which makes the folder a finished one; -> its content, the digest included."""
    missing = [entry["file"] for entry in about["layers"] if not (folder / entry["file"]).is_file()]
    if missing:
        raise ResumeError(f"{folder}: {missing[0]} has gone while the job ran; give the same command again")
    whole = dict(about) | {"digest": about_digest(about)}
    with writing(folder):
        atomic_write(folder / STATISTICS, to_json(whole, indent=2))
    return whole
