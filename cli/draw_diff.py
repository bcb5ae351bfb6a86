"""What `diff` shows: tables for people and for pull requests, keys for scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from . import draw
from .draw_size import cell

if TYPE_CHECKING:
    from ..serving.diff import Diff, KeyChange, Side, TensorChange

_MANY = 40  # rows of a table; a config of a family that nobody knows can have any number
_LONG = 60  # characters of a value


class _Table(NamedTuple):
    title: str
    header: list[str]
    rows: list[list[str]]
    align: str


_HOW = {
    "bytes": "bytes compared",
    "sha256": "sha256 of the shards",
    "manifests": "as manifests and samples of the shards say; --weights reads them",
}


def diff(before: str, after: str, found: Diff) -> None:
    """Sentences, then a table for each kind of change that there is."""
    for line in _sentences(before, after, found):
        draw.say(line)
    for title, header, rows, align in _tables(found):
        print(f"\n{title}")
        draw.table(header, [[draw.clean(text) for text in row] for row in rows[:_MANY]], align)
        if len(rows) > _MANY:
            print(_more(rows))


def markdown(before: str, after: str, found: Diff) -> str:
    """The same for the summary of a job or a comment."""
    lines = [f"### From {cell(before)} to {cell(after)}", ""]
    for line in _sentences(before, after, found):
        lines += [f"{cell(line)}.", ""]
    for title, header, rows, align in _tables(found):
        sides = "|".join("---:" if side == "r" else "---" for side in align)
        lines += [f"#### {title}", "", f"| {' | '.join(header)} |", f"|{sides}|"]
        lines += [f"| {' | '.join(map(cell, row))} |" for row in rows[:_MANY]]
        lines += ["", *([_more(rows), ""] if len(rows) > _MANY else ())]
    return "\n".join(lines)


def keys(before: str, after: str, found: Diff) -> dict[str, Any]:
    """What `--json` prints: everything, where tables are cut."""
    return {
        "differs": found.differs,
        "before": _side(before, found.before),
        "after": _side(after, found.after),
        "tensors": [
            {**change._asdict(), "before": change.before or None, "after": change.after or None}
            for change in found.tensors
        ],
        "moved": found.moved,
        "storage": [
            {**role._asdict(), "before": role.before or None, "after": role.after or None} for role in found.storage
        ],
        "config": [change._asdict() for change in found.config],
        "files": [change._asdict() for change in found.files],
        "manifest": [change._asdict() for change in found.manifest],
        "weights": {"state": found.weights.state, **found.weights._asdict(), "first": found.weights.first or None},
        "notes": list(found.notes),
    }


def _side(name: str, side: Side) -> dict[str, Any]:
    return {
        "name": name,
        "tensors": side.tensors,
        "bytes": side.nbytes,
        "shards": side.shards,
        "manifest": side.manifest or None,
    }


def _sentences(before: str, after: str, found: Diff) -> Iterator[str]:
    for name, side in ((before, found.before), (after, found.after)):
        held = f"{side.nbytes:,} bytes ({draw.binary(side.nbytes)})"
        yield f"{name}: {held}, {draw.many(side.tensors, 'tensor')} in {draw.many(side.shards, 'shard')}"
    more = found.after.nbytes - found.before.nbytes
    if more:
        share = f", {more / found.before.nbytes:+.1%}" if found.before.nbytes else ""
        yield f"in all: {more:+,} bytes{share}"
    yield f"weights: {_weights(found)}"
    if found.moved:
        yield f"{draw.many(found.moved, 'tensor')} in shards of other names"
    yield from (f"note: {note}" for note in found.notes)
    if not found.differs:
        unknown = found.weights.state in ("not compared", "partly compared")
        yield "nothing that was compared differs" if unknown else "nothing differs"


def _weights(found: Diff) -> str:
    """What is known of them, in words."""
    known = found.weights
    stored = f"{draw.many(known.alike, 'tensor')} stored alike"
    if known.state == "none alike":
        return "no tensor is stored alike, none can be compared as bytes"
    if known.state == "equal":
        return f"{stored}, all equal ({_HOW[known.how]})"
    if known.state == "not compared":
        return f"{stored}, NOT compared (--weights compares them)"
    if known.state == "partly compared":
        return f"{stored}, {known.equal:,} equal ({_HOW[known.how]}), the others NOT compared (--weights does it)"
    if known.how == "bytes":
        return f"{stored}, {known.differ:,} DIFFER, first {known.first} at {list(known.at or ())}"
    many = draw.many(known.differ, "shard")
    return f"DIFFER: {many} of equal headers with other data, first {known.first}; {stored}, {known.equal:,} equal"


def _tables(found: Diff) -> Iterator[_Table]:
    changed = [role for role in found.storage if (role.before, role.before_bytes) != (role.after, role.after_bytes)]
    if changed:
        rows = [
            [r.role, f"{r.modules:,}", r.before or "-", _size(r.before and r.before_bytes), r.after or "-",
             _size(r.after and r.after_bytes), f"{r.after_bytes - r.before_bytes:+,}"]
            for r in changed
        ]  # fmt: skip
        yield _Table("storage by role", ["role", "modules", "from", "size", "to", "size", "bytes"], rows, "lrlrlrr")
    if found.tensors:
        rows = [[c.role, c.change, f"{c.tensors:,}", _what(c), c.first] for c in found.tensors]
        yield _Table("tensors", ["role", "", "tensors", "what", "first"], rows, "llrll")
    for title, header, changes in (("config.json", "key", found.config), ("manifests", "fact", found.manifest)):
        if changes:
            yield _Table(title, [header, "before", "after"], [[c.path, *_values(c)] for c in changes], "lll")
    if found.files:
        rows = [[c.file, c.change, _size(c.before_bytes), _size(c.after_bytes)] for c in found.files]
        yield _Table("side files", ["file", "", "before", "after"], rows, "llrr")


def _what(change: TensorChange) -> str:
    """Ending, dtypes, and the shapes of the first where they changed."""
    dtypes = " -> ".join(dict.fromkeys(text for text in (change.before, change.after) if text))
    if not change.reshaped:
        return f"{change.suffix} {dtypes}"
    shapes = " -> ".join(str(list(shape)) for shape in change.shapes if shape is not None)
    return f"{change.suffix} {dtypes}, first {shapes}"


def _values(change: KeyChange) -> list[str]:
    """Both values, "-" for one that is not there; of long lists what came and went."""
    before, after = change.before, change.after
    texts = ["-" if change.change == "added" else _value(before), "-" if change.change == "removed" else _value(after)]
    if isinstance(before, list) and isinstance(after, list):
        old, new = ({json.dumps(item, sort_keys=True) for item in items} for items in (before, after))
        came, went = len(new - old), len(old - new)
        texts[1] += f" ({came:,} came, {went:,} went)" if came or went else " (in another order or number)"
    return texts


def _value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= _LONG:
        return text
    return f"{len(value):,} items" if isinstance(value, list) else f"{text[:_LONG]}..."


def _size(nbytes: int | str | None) -> str:
    """A size; "-" for what is not there."""
    return draw.size(nbytes) if isinstance(nbytes, int) else "-"


def _more(rows: list[list[str]]) -> str:
    return f"({len(rows) - _MANY:,} more; --json has all)"
