"""The model card of an artifact: the card that is there, with a section of ours between two markers.

Everything else in it stays as it is, byte for byte; pushed again, the section alone is replaced. In the front matter
the base model is set, tags are added, and nothing else is touched: the licence is the source's, or there is none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import HubError
from ..formats import formats
from ..formats.manifest import Manifest
from .card_body import section
from .card_front import Front, changed, loaded, split
from .card_text import code, escape

BEGIN = "<!-- phasefold:begin -->"
END = "<!-- phasefold:end -->"
_MARKER = re.compile(r"<!--[ \t]*phasefold:(begin|end)[ \t]*-->")
_LICENCE_FILE = re.compile(r"(LICEN[CS]E|COPYING)([\W_].*)?", re.IGNORECASE)
#: grids that are tags: what people look for
_TAGS = {"e4m3": "fp8", "int4": "int4"}


class Pieces(NamedTuple):
    """A card taken apart: front matter, and the body's text before our section, that section, and after it."""

    front: Front
    before: str
    section: str
    after: str

    @property
    def outside(self) -> str:
        """The body without our section: what a push leaves as it is."""
        return self.before + self.after


class License(NamedTuple):
    """What a card's front matter says of its licence; name and link stand beside `other`."""

    license: str
    name: str | None
    link: str | None


def card(
    config: Mapping[str, Any],
    manifest: Manifest,
    existing: str | None,
    *,
    repo: str,
    base_model: str | None,
    evaluation: str | None = None,
    launch: str | None = None,
) -> str:
    """The text of README.md for an artifact that goes to `repo`.

    config: the artifact's. existing: the card that is there, the source's or the repo's, as text with its own line
    ends; None: none.
    base_model: the source's repo; None: the one in the manifest, and where that has none, base_model stays as it is.
    evaluation, launch: Markdown of others, without a heading of its own.
    Raises HubError where the card that is there cannot be extended without damage.
    """
    base = base_model or _text(manifest.source.get("repo"))
    pieces = pulled_apart(existing or f"# {escape(repo.rpartition('/')[2])}\n\n")
    if not existing:
        pieces = pieces._replace(before=pieces.after, after="")
    eol = _line_end(pieces)
    data = loaded(pieces.front.block)
    front = changed(pieces.front, _changes(data, manifest, base), eol)
    told = _licence(_license(data), manifest)
    ours = section(config, manifest, repo=repo, base=base, licence=told, evaluation=evaluation, launch=launch)
    if found := _MARKER.search(ours):
        raise HubError(f"README.md: {found[0]} stands within the section that it marks; rename what holds it")
    ours = f"{BEGIN}\n{ours}\n{END}\n".replace("\r\n", "\n").replace("\r", "\n").replace("\n", eol)
    return front + pieces.before + ours + pieces.after


def pulled_apart(text: str) -> Pieces:
    """Take a card apart; front matter, before, section, after in this order make it up.

    Raises HubError where a marker of ours lacks its other one, is there twice, or is not alone on its line.
    """
    front = split(text)
    body = front.body
    found = list(_MARKER.finditer(body))
    if not found:
        return Pieces(front, "", "", body)
    if (kinds := [marker[1] for marker in found]) != ["begin", "end"]:
        raise HubError(
            f"README.md: markers of phasefold's section are {', '.join(kinds)}, expected begin, end; take them out, "
            "or the section with them, and it is written anew"
        )
    start, stop = body.rfind("\n", 0, found[0].start()) + 1, body.find("\n", found[1].end()) + 1 or len(body)
    inner = body.find("\n", found[0].end()), body.rfind("\n", 0, found[1].start())
    beside = (body[start : found[0].start()], body[found[0].end() : inner[0]],
              body[inner[1] + 1 : found[1].start()], body[found[1].end() : stop])  # fmt: skip
    if inner[0] > inner[1] or any(text.strip() for text in beside):
        raise HubError("README.md: a marker of phasefold's section is not alone on its line; put it on one of its own")
    return Pieces(front, body[:start], body[start:stop], body[stop:])


def _license(data: Mapping[Any, Any]) -> License | None:
    value = data.get("license")
    named = ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
    return License(named, _text(data.get("license_name")), _text(data.get("license_link"))) if named else None


def _text(value: Any) -> str | None:
    return str(value) if value else None


def _changes(data: Mapping[Any, Any], manifest: Manifest, base: str | None) -> dict[str, Any]:
    """Entries of the front matter to set. The source may have a base model of its own: the artifact's is the source."""
    changes: dict[str, Any] = {}
    named = data.get("base_model")
    if base and base not in (named if isinstance(named, list) else [named]):
        changes["base_model"] = base
    if base and data.get("base_model_relation") != "quantized":
        changes["base_model_relation"] = "quantized"
    tags = data.get("tags")
    tags = [] if tags is None else [tags] if isinstance(tags, str) else tags
    if not isinstance(tags, list):
        raise HubError(f"README.md: tags in its front matter is a {type(tags).__name__}, expected a list; mend it")
    known = formats()
    grids = {known[unit[2]].grid.kind for unit in manifest.units.values() if unit[2] in known}
    ours = ["phasefold", *([manifest.phase] if manifest.phase != "any" else []),
            *(tag for kind, tag in _TAGS.items() if kind in grids)]  # fmt: skip
    if more := [tag for tag in ours if tag not in tags]:
        changes["tags"] = [*tags, *more]
    if data.get("library_name") is None:
        changes["library_name"] = "transformers"
    return changes


def _licence(found: License | None, manifest: Manifest) -> str:
    """What the section says of the licence. None is ever guessed from a file's text."""
    files = [name for name in manifest.files if "/" not in name and _LICENCE_FILE.fullmatch(name)]
    named = ", ".join(map(code, files))
    if found is None:
        lacking = "Licence: the card of the source names none, so none is named here"
        return f"{lacking}; what the source has beside it: {named}." if files else f"{lacking}; ask its publisher."
    name = f"{escape(found.name)} ({escape(found.license)})" if found.name else escape(found.license)
    said = f"Licence: {name}, carried over from the source"
    link = found.link
    if link and re.match(r"https?://", link):
        said += f" (<{link}>)" if re.fullmatch(r"[!-;=?-~]+", link) else f" ({code(link)})"
    elif link and link.removeprefix("./") not in manifest.files:
        said += f" (its link, {code(link)}, is to a file that the source did not have)"
    return f"{said}; its text, as in the source: {named}." if files else f"{said}."


def _line_end(pieces: Pieces) -> str:
    """The line end that most lines have: of the body, which stays, and where that is a line at most, of all."""
    text = pieces.outside if "\n" in pieces.outside else pieces.front.block + pieces.front.tail
    windows = text.count("\r\n")
    return "\r\n" if windows > text.count("\n") - windows else "\n"
