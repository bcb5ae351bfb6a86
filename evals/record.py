"""The record of a run: a JSON in `evals/` beside the artifact, written whole or not at all, never overwritten."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import EvalError
from ..quantize.output import atomic_write, flush_folder

#: the folder in an artifact
FOLDER = "evals"
VERSION = 1
#: what every record has, and of which type
_KEYS: dict[str, type | tuple[type, ...]] = {
    "started": str, "target": dict, "settings": dict, "versions": dict, "prompts": dict, "tasks": dict, "scores": dict,
    "required": list,
}  # fmt: skip
_RESULT: dict[str, type | tuple[type, ...]] = {
    "metric": str, "higher_is_better": bool, "share": bool, "value": (int, float), "n": int,
}  # fmt: skip
_COMPARED: dict[str, type | tuple[type, ...]] = {"baseline": (int, float), "difference": (int, float), "ci95": list}


def make_ready(folder: Path) -> None:
    """Make `evals/` in an artifact, and see that a file can be written there, before hours of work. EvalError."""
    place = folder / FOLDER
    try:
        if not place.is_dir():
            place.mkdir(parents=True)
            flush_folder(folder)
    except OSError as error:
        raise EvalError(f"{place}: cannot be made ({error.strerror}); results are kept there: see its rights") from None
    if not os.access(place, os.W_OK | os.X_OK):
        raise EvalError(f"{place}: cannot be written; results are kept there: see its rights")


def write_record(folder: Path, record: Mapping[str, Any]) -> Path:
    """Keep the record of a run in the artifact's `evals/`; -> its path.

    Named by the time it started (UTC) and the first digits of its sha256. What is not finite is null in it. Raises
    EvalError where it cannot be written, or where another file has its name.
    """
    make_ready(folder)
    data = to_bytes(record)
    when = moment(record).strftime("%Y%m%dT%H%M%SZ")
    path = folder / FOLDER / f"{when}-{hashlib.sha256(data).hexdigest()[:8]}.json"
    try:
        if path.exists():
            if path.read_bytes() == data:
                return path
            raise EvalError(f"{path}: is there with another content; records are never overwritten: move it away")
        atomic_write(path, data)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.with_name(path.name + ".partial").unlink(missing_ok=True)
        raise EvalError(f"{path}: cannot be written ({error.strerror})") from None
    return path


def to_bytes(record: Mapping[str, Any]) -> bytes:
    """JSON, a line each for what stands at the top, so that a page of it can be read without the scores."""
    lines = [f"{json.dumps(name)}: {_dump(value)}" for name, value in record.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _dump(value: Any) -> str:
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def moment(record: Mapping[str, Any]) -> datetime:
    """When a run started, in UTC. ValueError where that is no time, or one without a zone."""
    when = datetime.fromisoformat(record["started"])
    if when.tzinfo is None:
        raise ValueError(f"{record['started']!r} has no time zone")
    return when.astimezone(UTC)


def read_records(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The records of an artifact in the order of their time; [] where it has none.

    Raises EvalError for a .json in `evals/` that is no record, or one of a newer phasefold. Other files may lie there.
    """
    place = folder / FOLDER
    try:
        names = sorted(os.listdir(place)) if place.is_dir() else []
    except OSError as error:
        raise EvalError(f"{place}: cannot be read ({error.strerror})") from None
    paths = [place / name for name in names if name.endswith(".json") and not name.startswith(".")]
    return sorted(((path, read_record(path)) for path in paths), key=lambda item: (moment(item[1]), item[0].name))


def read_record(path: Path) -> dict[str, Any]:
    """One record. Raises EvalError, see `read_records`."""
    try:
        record = json.loads(path.read_bytes(), parse_constant=_refuse)
    except OSError as error:
        raise EvalError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise EvalError(f"{path}: is no JSON ({error}); move it out of {FOLDER}/") from None
    if isinstance(record, dict) and isinstance(version := record.get("version"), int) and version > VERSION:
        raise EvalError(
            f"{path}: is a record of version {version}, this phasefold reads up to {VERSION}; use a newer one"
        )
    if fault := _fault(record):
        raise EvalError(f"{path}: is no record of an evaluation ({fault}); move it out of {FOLDER}/")
    return dict(record)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} in it")


def _fault(record: Any) -> str | None:
    """What is wrong with it, if anything: enough that tables, plots and the gate can rely on the rest."""
    if not isinstance(record, dict) or record.get("version") != VERSION:
        return f"it has no version {VERSION}"
    if fault := _misses(record, _KEYS):
        return fault
    try:
        moment(record)
    except ValueError as error:
        return f"started: {error}"
    results = {**record["tasks"], **({"all": record["all"]} if record.get("all") else {})}
    for name, result in results.items():
        wanted = _RESULT | (_COMPARED if record.get("baseline") else {})
        if fault := _misses(result, wanted):
            return f"{name}: {fault}"
    return None


def _misses(found: Any, wanted: Mapping[str, type | tuple[type, ...]]) -> str | None:
    if not isinstance(found, dict):
        return "no object"
    for name, kind in wanted.items():
        if not isinstance(found.get(name), kind):
            return f"no {name}, or of the wrong type"
    return None
