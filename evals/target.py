"""What is evaluated: a checkpoint, a pair as it is served, or a server that is running."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError

#: layouts of a pair's KV rows that may stand behind the @; else a KV-scale manifest does
LAYOUTS = ("bf16", "fp8_e4m3", "fp8_ds_mla")
_KINDS = "expected a folder, PREFILL+DECODE[@kv_scales.json or @LAYOUT], or the http:// address of a server"


@dataclass(frozen=True, slots=True)
class Target:
    """text: as it was given. folders: of a checkpoint one, of a pair prefill's and decode's, of a server none.

    kv: layout of a pair's rows; with `scales`, the path of a KV-scale manifest, it is fp8_e4m3. url: of a server, with
    the path under which its API lies (http://127.0.0.1:8000/v1).
    """

    text: str
    folders: tuple[Path, ...] = ()
    kv: str = "bf16"
    scales: Path | None = None
    url: str | None = None

    @property
    def is_pair(self) -> bool:
        """Two artifacts."""
        return len(self.folders) == 2

    @property
    def home(self) -> Path | None:
        """The folder whose `evals/` keeps the results: a checkpoint's own, a pair's decode artifact's; no server's."""
        return self.folders[-1] if self.folders else None


def parse_target(text: str) -> Target:
    """UsageError for what is none. A path that exists is a checkpoint's, whatever characters it has."""
    if text.startswith(("http://", "https://")):
        return Target(text, url=text.rstrip("/"))
    if _is_folder(text):
        return Target(text, (Path(text),))
    whole, at, kv = text.rpartition("@") if "@" in text else (text, "", "bf16")
    for place in (index for index, letter in enumerate(whole) if letter == "+"):
        names = whole[:place], whole[place + 1 :]
        if not all(map(_is_folder, names)):
            continue
        folders = Path(names[0]), Path(names[1])
        if kv in LAYOUTS:
            return Target(text, folders, kv)
        if Path(kv).is_file():
            return Target(text, folders, "fp8_e4m3", Path(kv))
        if "/" in kv or "." in kv:
            raise UsageError(f"{text}: no such file: {kv}; expected a KV-scale manifest, or {', '.join(LAYOUTS)}")
        raise UsageError(f"{text}: {kv!r} is neither a KV-scale manifest nor one of {', '.join(LAYOUTS)}")
    missing = [part for part in whole.split("+") if not _is_folder(part)]
    if at and "+" not in whole:
        raise UsageError(f"{text}: a KV layout or manifest behind @ is for pairs; {_KINDS}")
    raise UsageError(f"{text}: no such folder: {(missing[0] if missing else whole) or 'nothing'}; {_KINDS}")


def _is_folder(text: str) -> bool:
    return bool(text) and Path(text).is_dir()  # Path("") would be the folder that we are in
