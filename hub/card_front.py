"""A card's front matter: the YAML block at its head, read as the Hub reads it and changed in place.

Only the entries that change are written anew. All others keep their bytes, with the comments between them, which a
YAML library that loads and dumps would lose.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import HubError

_EMPTY = re.compile(r"(\s*---(?:\r\n|\r|\n))(---[ \t]*(?:\r\n|\n|$))")
_OPENED = re.compile(r"\s*---[ \t]*(?:\r|\n|$)")


class Front(NamedTuple):
    """A card cut behind its front matter; the pieces in order make up the card.

    head: up to the block; block: the YAML, without the last line's end; tail: the line that closes it, with its end;
    body: what follows. Without front matter head holds at most a byte order mark, and block and tail are empty.
    """

    head: str
    block: str
    tail: str
    body: str


def split(text: str) -> Front:
    """Cut a card behind its front matter. HubError where that is opened and not closed."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK  # the Hub's own

    mark = "\ufeff" if text.startswith("\ufeff") else ""
    rest = text[len(mark) :]
    if empty := _EMPTY.match(rest):
        return Front(mark + empty[1], "", empty[2], rest[empty.end() :])
    if found := REGEX_YAML_BLOCK.search(rest):
        start, end = found.span(2)
        return Front(mark + rest[:start], rest[start:end], rest[end : found.end()], rest[found.end() :])
    if _OPENED.match(rest):
        raise HubError(
            "README.md: begins with ---, but no front matter is found there; open and close it with lines that hold "
            "--- alone"
        )
    return Front(mark, "", "", rest)


def loaded(block: str) -> dict[Any, Any]:
    """The block's entries in their order. HubError where it is no YAML, no map, or names a key twice."""
    import yaml  # type: ignore[import-untyped]

    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(block, yaml.SafeLoader)):
            raise HubError("README.md: its front matter has an alias (*name); write the value out")
        root, value = yaml.compose(block, yaml.SafeLoader), yaml.safe_load(block)
        _dump(value)  # what is nested too deep for that is refused here
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 2}: " if error.problem_mark else ""
        raise HubError(f"README.md: its front matter is no YAML ({line}{error.problem}); mend it") from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        first = str(error).partition("\n")[0]
        raise HubError(f"README.md: its front matter cannot be read ({first[:120]}); mend it") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise HubError(
            f"README.md: begins with a {type(value).__name__} between lines of ---, where front matter has keys and "
            "values; mend it, or let the text not begin with ---"
        )
    keys = [key.value for key, _ in root.value]
    if twice := next((key for n, key in enumerate(keys) if key in keys[:n]), None):
        raise HubError(f"README.md: its front matter has {str(twice)[:40]!r} twice; leave one")
    return value


def changed(front: Front, changes: Mapping[str, Any], eol: str) -> str:
    """The front matter with some entries set, without the body; changes: key -> text, or list of texts.

    An entry that is new goes to the top; a list that only grows keeps its items as they lie. Where that cannot be done
    in place, as in a map in braces, the block is written anew: same keys, values and order, without the comments.
    """
    before = loaded(front.block)
    wanted = {key: value for key, value in changes.items() if key not in before} | before | dict(changes)
    block = front.block
    if changes:
        block = _in_place(front.block, before, changes, eol)
        if not _holds(block, wanted):
            block = _in_place(_plain(front.block, eol), before, changes, eol)
        if not _holds(block, wanted):
            raise HubError(f"README.md: its front matter cannot take {', '.join(changes)}; write them there yourself")
    if not front.tail:
        return f"{front.head}---{eol}{block}{eol}---{eol}"
    between = eol if block and not front.block and not front.tail.startswith(("\r", "\n")) else ""
    return front.head + block + between + front.tail + ("" if front.tail.endswith("\n") else eol)


def _holds(block: str, wanted: Mapping[Any, Any]) -> bool:
    """Whether a block says this and nothing else, in this order."""
    try:
        found = loaded(block)
    except HubError:
        return False
    return _dump(found) == _dump(dict(wanted))  # as text: nan is not equal to itself, and true is to 1


def _dump(value: Any) -> str:
    import yaml

    return str(yaml.safe_dump(value, allow_unicode=True, sort_keys=False, width=10**6))


def _plain(block: str, eol: str) -> str:
    """The block with a line or more for each entry. From its nodes: what YAML 1.1 reads as false may be Norwegian."""
    import yaml

    root = yaml.compose(block, yaml.SafeLoader)
    if root is None:
        return block
    root.flow_style = False
    text = yaml.serialize(root, Dumper=yaml.SafeDumper, allow_unicode=True, width=10**6, line_break=eol)
    return str(text).removesuffix(eol)


def _in_place(block: str, before: Mapping[Any, Any], changes: Mapping[str, Any], eol: str) -> str:
    """The block with each change where its entry lies, by the positions that the YAML library gives."""
    import yaml

    root = yaml.compose(block, yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):  # nothing, or comments
        return block + (eol if block else "") + eol.join(_entry(key, value, eol) for key, value in changes.items())
    nodes = {key.value: (key, value) for key, value in root.value}
    indent = " " * root.start_mark.column
    edits: list[tuple[int, int, str]] = []
    for key, value in changes.items():
        if key not in nodes:
            continue
        name, node = nodes[key]
        old = before[key]
        if isinstance(node, yaml.SequenceNode) and old and isinstance(value, list) and value[: len(old)] == old:
            edits.append(_grown(block, node, value[len(old) :], eol))
        else:
            end = max(_end(block, node), name.end_mark.index)
            edits.append((name.start_mark.index, end, _entry(key, value, eol, indent)))
    top = "".join(_entry(key, value, eol, indent) + eol + indent for key, value in changes.items() if key not in nodes)
    edits.append((root.start_mark.index, root.start_mark.index, top))
    for start, end, text in sorted(edits, reverse=True):
        block = block[:start] + text + block[end:]
    return block


def _entry(key: str, value: Any, eol: str, indent: str = "") -> str:
    return (eol + indent).join(_dump({key: value}).splitlines())


def _grown(block: str, node: Any, items: list[str], eol: str) -> tuple[int, int, str]:
    """The edit that adds items to a list behind its last one."""
    end = _end(block, node.value[-1])
    lines = _dump(items).splitlines()
    if node.flow_style:
        return end, end, "".join(", " + line.removeprefix("- ") for line in lines)
    rest = re.search(r"\r?\n|$", block[end:])  # behind a comment on the same line
    end += rest.start() if rest else 0
    return end, end, "".join(eol + " " * node.start_mark.column + line for line in lines)


def _end(block: str, node: Any) -> int:
    """Where a value ends: the library's own mark of a block stands behind the comments that follow it."""
    import yaml

    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(block, last[1] if isinstance(last, tuple) else last)
    end = int(node.end_mark.index)
    return len(block[:end].rstrip()) if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">") else end
