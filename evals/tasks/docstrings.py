"""Questions from the docstrings of the Python standard library: the last word of a passage, and how a text goes on.

A last word is asked for where the library calls for it: in other files no word follows the two before it more often.
Of words chosen without such care, models of a few million weights know one in a hundred, and nothing could be seen.

Nothing is drawn: what is asked, in which order, and which wrong answers stand beside the right one follows from hashes
of paths and texts. So one version of Python asks the same on every machine, and any beginning is a fair sample.
"""

from __future__ import annotations

import ast
import hashlib
import re
import string
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import EvalError

#: questions of a task; fewer than MINIMUM are refused
QUESTIONS, MINIMUM = 1000, 500
#: folders that are not read: tests, programs, what is on its way out, and what distributions ship apart
LEFT_OUT = (
    "__pycache__", "distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages",
    "dist-packages", "test", "tests", "tkinter", "turtledemo", "venv",
)  # fmt: skip
_A_FILE = 10  # questions of one file at most
_WORDS = range(15, 49)  # of a context
_CHARACTERS = 300  # of context and continuation: about 150 tokens of a vocabulary of 1,024
_CONTINUED = 8  # words of a continuation
_SPAN = 4  # lengths in characters that count as one; the right continuation may have each of them
_PLAIN, _LETTERS = frozenset(string.ascii_lowercase + string.whitespace), 0.85  # of running text, at least
_ALIKE = 8  # words at the end, from which two questions are the same one
_SEEN = 2  # other files in which a last word must follow the two before it
_LAST = re.compile(r"(?<=[\w,]) ([a-z]{4,})(?=[\s.,;:)]|$)")
_TOKEN = re.compile(r"[a-z_]\w*|\d+|[^\w\s]")


class File(NamedTuple):
    """A source file: its path below the folder that was searched, and its docstrings in order."""

    path: str
    docstrings: tuple[str, ...]


class Cut(NamedTuple):
    """A text in two: what is given, what comes behind it after one space, and the file that it is from."""

    context: str
    rest: str
    document: str

    @property
    def order(self) -> bytes:
        """Where it stands among others."""
        return digest(self.document, self.context, self.rest)


def digest(*parts: str) -> bytes:
    """What takes the place of chance."""
    return hashlib.sha256("\0".join(parts).encode()).digest()


def docstrings_of(path: Path) -> tuple[str, ...]:
    """All docstrings of a source file; none where it is not Python of this version."""
    try:
        with warnings.catch_warnings():  # of the file's own; as errors they would change what is asked
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return ()
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return tuple(text for node in ast.walk(tree) if isinstance(node, kinds) and (text := ast.get_docstring(node)))


@cache
def library() -> tuple[File, ...]:
    """Files of the installed standard library that have docstrings, in the order of their paths."""
    root, found = Path(sysconfig.get_path("stdlib")), list[File]()
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        inside = path.relative_to(root)
        if not set(inside.parts).intersection(LEFT_OUT) and (texts := docstrings_of(path)):
            found.append(File(inside.as_posix(), texts))
    return tuple(found)


def texts_of(docstring: str) -> Iterator[str]:
    """Its runs of paragraphs that are running text: no code, no table, no list of arguments."""
    run: list[str] = []
    for paragraph in [*re.split(r"\n\s*\n", docstring), ""]:
        lines = paragraph.splitlines()
        code = any(mark in paragraph for mark in (">>>", "::", "--", "==", "|", "\t", "->"))
        code |= sum(map(_PLAIN.__contains__, paragraph)) < _LETTERS * len(paragraph)
        if lines and not code and all(line == line.strip() and "  " not in line for line in lines):
            run.append(paragraph)
        elif run:
            yield "\n\n".join(run)
            run = []


def beginnings(text: str) -> list[int]:
    """Where its sentences and paragraphs begin."""
    return [0, *(match.end() for match in re.finditer(r"(?<=[.!?])\s+(?=[A-Z])|\n\n", text))]


def last_words(text: str, document: str) -> Iterator[tuple[str, str]]:
    """Contexts that end before a word that the rest of the library would put there, and that word."""
    for match in _LAST.finditer(text):
        for start in beginnings(text):
            context = text[start : match.start()]
            if len(context.split()) in _WORDS and match.end() - start <= _CHARACTERS:
                if _expected(context, document) == match[1]:
                    yield context, match[1]
                break


def _expected(context: str, document: str) -> str | None:
    """The word that in most other files follows the context's last two; None where two do, or too few files have it."""
    found = _following().get(tuple(_TOKEN.findall(context.lower())[-2:]), {})
    counts = sorted(((len(files - {document}), word) for word, files in found.items()), reverse=True)[:2]
    if not counts or counts[0][0] < _SEEN or (len(counts) == 2 and counts[0][0] == counts[1][0]):
        return None
    return counts[0][1]


@cache
def _following() -> dict[tuple[str, ...], dict[str, set[str]]]:
    """Of each two words of the library, the words behind them and the files in which they are."""
    found: dict[tuple[str, ...], dict[str, set[str]]] = {}
    for file in library():
        for docstring in file.docstrings:
            words = _TOKEN.findall(docstring.lower())
            for first, second, third in zip(words, words[1:], words[2:], strict=False):
                found.setdefault((first, second), {}).setdefault(third, set()).add(file.path)
    return found


def continuations(text: str, _document: str) -> Iterator[tuple[str, str]]:
    """Contexts, as long as may be, and the next words; no two have a word in common."""
    gaps, done = [*(match.start() for match in re.finditer(r"(?<=\S)\s+(?=\S)", text)), len(text)], 0
    for start in beginnings(text):
        ends = [gap for gap in gaps if gap > start] if start >= done else []  # of each word
        for words in range(min(_WORDS[-1], len(ends) - _CONTINUED), _WORDS[0] - 1, -1):
            here, end = ends[words - 1], ends[words + _CONTINUED - 1]
            if end - start <= _CHARACTERS and text[here] == " ":
                yield text[start:here], text[here + 1 : end]
                done = end
                break


def cloze(**_: Any) -> dict[str, Any]:
    """lm-eval's custom_dataset of `docstring_cloze`: context, target (with its space), word, document.

    EvalError where the library has too few docstrings.
    """
    return {"test": _dataset({"context": c, "target": f" {w}", "word": w, "document": f} for c, w, f in _cuts("cloze"))}


def choice(**_: Any) -> dict[str, Any]:
    """lm-eval's custom_dataset of `docstring_choice`: context, choices (four), answer (0 to 3), document.

    The wrong three are continuations of other files, as long as the right one; no two begin with the same word. The
    right one takes each place in turn, so that any four questions in order have each place once.
    """
    cuts = _cuts("choice")
    by_length: dict[int, list[Cut]] = {}
    for cut in cuts:
        by_length.setdefault(len(cut.rest) // _SPAN, []).append(cut)
    rows = list[dict[str, Any]]()
    for cut in cuts:
        if wrong := _wrong(cut, by_length[len(cut.rest) // _SPAN]):
            place = len(rows) % 4
            choices = [*wrong[:place], cut.rest, *wrong[place:]]
            rows.append({"context": cut.context, "choices": choices, "answer": place, "document": cut.document})
    return {"test": _dataset(rows)}


def _wrong(cut: Cut, near: Iterable[Cut]) -> list[str]:
    """Three wrong continuations out of those that are as long; none where there are too few."""
    others = [other for other in near if other.document != cut.document]
    found, begun = list[str](), {_first(cut.rest)}
    for other in sorted(others, key=lambda other: digest(cut.context, other.rest)):
        if (first := _first(other.rest)) not in begun:
            begun.add(first)
            found.append(other.rest)
            if len(found) == 3:
                return found
    return []


def _first(text: str) -> str:
    return re.sub(r"\W", "", text.split()[0]).lower()


@cache
def _cuts(task: str) -> tuple[Cut, ...]:
    """A task's cuts in their order. Of each file a few; of sentences that stand in several files one."""
    make = last_words if task == "cloze" else continuations
    every = [
        Cut(context, rest, file.path)
        for file in library()
        for docstring in file.docstrings
        for text in texts_of(docstring)
        for context, rest in make(text, file.path)
    ]
    kept, seen, of = list[Cut](), set[str](), Counter[str]()
    for cut in sorted(every, key=lambda cut: cut.order):
        words = " ".join(f"{cut.context} {cut.rest}".split()[-_ALIKE:]).lower()
        if words not in seen and of[cut.document] < _A_FILE:
            seen.add(words)
            of[cut.document] += 1
            kept.append(cut)
    return tuple(kept[:QUESTIONS])


def _dataset(rows: Iterable[dict[str, Any]]) -> Any:
    import datasets

    rows = list(rows)
    if len(rows) < MINIMUM:
        root = sysconfig.get_path("stdlib")
        raise EvalError(
            f"{root}: its docstrings give {len(rows):,} questions, {MINIMUM} are needed: run a Python whose standard "
            "library is whole (*.py files, not stripped of docstrings)"
        )
    return datasets.Dataset.from_list(rows)
