"""Calibration text: files to documents, documents to tokens, tokens to blocks of one length.

The files of a folder take turns, so that each has its part in a mix: a file gives its next document, but no more than a
block's tokens of it; the rest waits for its next turn. Nothing is put between but what the tokenizer itself puts at a
document's ends. What is left behind the last whole block is left out, and counted.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import TextError
from ..formats.checkpoint import natural

#: one block in so many is held out
HELD_OUT = 8
SUFFIXES = (".txt", ".jsonl", ".json")
#: fields of a row that hold a text in two parts, as data sets of questions have them
_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("question", "answer"), ("instruction", "output"))
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "tokenizer_config.json")
_CHARACTERS = 64  # no more of a document are looked at for each token that is wanted
_EMPTY = "{}: is empty; leave it out, or put text into it"
_HEAD = 4096  # bytes of every file that are looked at before the first turn

Messages = list[dict[str, Any]]
Encode = Callable[[str | Messages, str, int], list[int]]


@dataclass(frozen=True, slots=True)
class Text:
    """blocks: int32 [sequences, length]. digest: of the tokens in them. files, documents: how many took part.

    left_over: tokens behind the last whole block. empty: documents without any text, which were passed over.
    taken: name -> tokens in the blocks, of each file that has some. unused: files that could be read and have none.
    passed: files that are of no type that is read.
    """

    blocks: torch.Tensor
    digest: str
    files: int
    documents: int
    left_over: int
    empty: int
    taken: Mapping[str, int] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As statistics.json holds it: what the tokens are of, and nothing that they do not depend on."""
        taken = {"taken": dict(self.taken)} if self.files > 1 else {}
        return {"digest": self.digest, "files": self.files, "documents": self.documents} | taken


class _Piece(NamedTuple):
    """What a file gives at its turn. documents: 1 where one begins. empty: 1 instead of a document without text."""

    tokens: list[int]
    documents: int = 0
    empty: int = 0


def read_text(path: Path, tokenizer: Any, vocabulary: int, length: int, limit: int) -> Text:
    """At most `limit` tokens of a file or folder, in blocks of `length`.

    TextError where there is too little, where a file cannot be read as what its name says, or where the tokenizer
    gives a token that the model does not have.
    """
    files, passed = _files(path)
    for file in files:
        _check(file)
    tokens, given = list[int](), list[tuple[Path, int]]()
    documents = empty = 0
    for file, piece in _turns(files, partial(_encode, tokenizer, vocabulary), length, limit):
        given.append((file, len(piece.tokens)))
        tokens += piece.tokens
        documents, empty = documents + piece.documents, empty + piece.empty
        if len(tokens) >= limit:
            break
    tokens = tokens[:limit]
    if len(tokens) < length:
        why = "--tokens asks for no more" if limit < length else "give more text, or ask for shorter blocks"
        raise TextError(f"{path}: {len(tokens):,} tokens, less than one block of {length:,}: {why}")
    count = len(tokens) // length
    blocks = torch.tensor(tokens[: count * length], dtype=torch.int32).view(count, length)
    digest = hashlib.sha256(f"{count} {length} ".encode() + blocks.numpy().astype("<i4").tobytes())
    taken = dict.fromkeys(files, 0)
    left = count * length
    for file, many in given:
        taken[file] += min(many, left)
        left -= min(many, left)
    used = {_name(file, path): many for file, many in taken.items() if many}
    unused = tuple(_name(file, path) for file, many in taken.items() if not many)
    counts = (len(used), documents, len(tokens) - count * length, empty)
    return Text(blocks, digest.hexdigest(), *counts, used, unused, tuple(_name(file, path) for file in passed))


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The checkpoint's own tokenizer. TextError where it has none, or where it is code that is not to be run."""
    import transformers

    if not any((folder / name).exists() for name in _TOKENIZERS):
        raise TextError(f"{folder}: has no tokenizer (tokenizer.json or another); copy it from the original checkpoint")
    fast: Any = transformers.PreTrainedTokenizerFast
    try:
        if (folder / "tokenizer.json").exists():
            return fast.from_pretrained(folder, local_files_only=True)
        if _is_code(folder) and not trust_remote_code:
            raise TextError(
                f"{folder}: its tokenizer is code, which is not run: read it, then give --trust-remote-code; or put a "
                "tokenizer.json beside it"
            )
        auto: Any = transformers.AutoTokenizer
        return auto.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except TextError:
        raise
    except Exception as error:  # whatever a damaged file, or a checkpoint's own code, makes of itself
        why = " ".join(str(error).split())[:200]
        raise TextError(f"{folder}: its tokenizer cannot be loaded ({type(error).__name__}: {why})") from None


def _is_code(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_bytes()).get("auto_map"))
    except (OSError, ValueError, AttributeError):
        return False


def _encode(tokenizer: Any, vocabulary: int, document: str | Messages, where: str, wanted: int) -> list[int]:
    """Tokens of a document, or of as much of it as `wanted` tokens can take."""
    made = _by_tokenizer(tokenizer, document, where, wanted)
    if made and max(made) >= vocabulary:
        raise TextError(
            f"{where}: the tokenizer gives token {max(made)}, the model has {vocabulary:,}: it is not this model's"
        )
    return made


def _by_tokenizer(tokenizer: Any, document: str | Messages, where: str, wanted: int) -> list[int]:
    if isinstance(document, str):
        taken = document[: wanted * _CHARACTERS]
        if half := re.search("[\ud800-\udfff]", taken):
            raise TextError(f"{where}: holds half a surrogate pair ({half[0]!a}), which is no text; mend it")
        return list(tokenizer(taken, verbose=False)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise TextError(f"{where}: chat messages, but the checkpoint has no chat template: give rows with `text`")
    try:
        return list(tokenizer.apply_chat_template(document, tokenize=True, return_dict=False))
    except Exception as error:  # a template is a program: it can fail in any way
        why = " ".join(str(error).split())[:200]
        raise TextError(f"{where}: the chat template does not take these messages ({why})") from None


def _turns(files: list[Path], encode: Encode, length: int, limit: int) -> Iterator[tuple[Path, _Piece]]:
    """What each file gives in turn, until all have given everything."""
    first = limit if len(files) == 1 else length
    waiting = {
        file: _begun(file, encode, length, limit, first)
        if file.suffix == ".txt"
        else _rows(file, encode, length, limit)
        for file in files
    }
    done = 0
    while waiting:
        # Two, four or eight files whose turns are a block each would have every eighth block, which is held out, of the
        # same file each time: so another one begins as soon as the pattern would repeat.
        order = list(waiting)
        begin = done // (HELD_OUT // gcd(HELD_OUT, len(order))) % len(order)
        for file in order[begin:] + order[:begin]:
            if (piece := next(waiting[file], None)) is None:
                del waiting[file]
            else:
                yield file, piece
        done += 1


def _rows(file: Path, encode: Encode, length: int, limit: int) -> Iterator[_Piece]:
    """A file of rows, each a document."""
    found = False
    for where, row in (_list if file.suffix == ".json" else _lines)(file):
        found = True
        document = _document(row, where)
        if isinstance(document, str) and not document.strip():
            yield _Piece([], empty=1)
            continue
        tokens = encode(document, where, limit)
        yield _Piece(tokens[:length], documents=1)
        for start in range(length, len(tokens), length):
            yield _Piece(tokens[start : start + length])
    if not found:
        raise TextError(_EMPTY.format(file))


def _begun(file: Path, encode: Encode, length: int, limit: int, wanted: int) -> Iterator[_Piece]:
    """A .txt file, one document: of its beginning as much as `wanted` tokens take, then twice that, and so on."""
    given = 0
    while True:
        wanted = min(wanted, limit)
        content, whole = _beginning(file, wanted * _CHARACTERS)
        last = whole or wanted == limit
        if last and not content.strip():
            raise TextError(_EMPTY.format(file))
        tokens = encode(content, str(file), wanted)
        if not last:  # no token is given that the end could have shaped, which is none: only the first half of them
            tokens = tokens[: len(tokens) // 2 // length * length]
        for start in range(given, len(tokens), length):
            yield _Piece(tokens[start : start + length], documents=int(start == 0))
        if last:
            return
        given, wanted = max(given, len(tokens)), 2 * wanted


def _files(path: Path) -> tuple[list[Path], list[Path]]:
    """Files that are read, and files that are passed over for what they are, each in natural order of their names."""
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise TextError(f"{path}: is no {', '.join(SUFFIXES)} file; others (parquet, arrow) are not read")
        return [path], []
    if not path.is_dir():
        raise TextError(f"{path}: no such file or folder; give a file of text, or a folder of such")
    shown = (file for file in path.rglob("*") if "/." not in f"/{file.relative_to(path)}")
    # a link that leads nowhere is among them: it cannot be read, and that is said
    there = [file for file in shown if file.is_file() or (file.is_symlink() and not file.exists())]
    there.sort(key=lambda file: natural(str(file)))
    about = ("dataset_info.json", "dataset_dict.json", "state.json")  # a data set's description
    found = [file for file in there if file.suffix in SUFFIXES and file.name not in about]
    if not found:
        others = ", ".join(sorted({file.suffix or file.name for file in there})[:5]) or "nothing"
        raise TextError(f"{path}: no {', '.join(SUFFIXES)} file in it (found {others}); parquet and arrow are not read")
    return found, [file for file in there if file.suffix not in SUFFIXES or file.name in about]


def _name(file: Path, path: Path) -> str:
    """A file's name in the folder, as can be printed."""
    name = file.name if file == path else file.relative_to(path).as_posix()
    return name.encode(errors="backslashreplace").decode()


def _check(file: Path) -> None:
    """TextError where a file cannot be opened, has no text, or does not begin as UTF-8, be its turn ever to come."""
    with _reading(file), open(file, "rb") as opened:
        head = opened.read(_HEAD)
        content = codecs.getincrementaldecoder("utf-8-sig")().decode(head, final=len(head) < _HEAD)
    if len(head) < _HEAD and not content.strip():
        raise TextError(_EMPTY.format(file))


def _beginning(file: Path, most: int) -> tuple[str, bool]:
    """The first characters of a .txt file, and whether they are all."""
    with _reading(file), open(file, encoding="utf-8-sig", newline="") as opened:
        content = opened.read(min(most, os.fstat(opened.fileno()).st_size))  # as much as is asked for is set aside
    return content, len(content) < most


def _list(file: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a .json file, which is a list."""
    with _reading(file):
        content = file.read_text(encoding="utf-8-sig")
    if content.strip():
        value = _parse(content, str(file))
        if not isinstance(value, list):
            raise TextError(f"{file}: expected a list of objects, found {type(value).__name__}")
        yield from ((f"{file}: row {number}", row) for number, row in enumerate(value, 1))


def _lines(file: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a .jsonl file, some at a time: it may be large, and is not kept open, for there may be many."""
    place = number = 0
    while True:
        with _reading(file), open(file, "rb") as opened:
            opened.seek(place)
            lines, place = opened.readlines(1 << 16), opened.tell()
        if not lines:
            return
        for line in lines:
            number += 1
            with _reading(file):
                row = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if row.strip():
                yield f"{file}: line {number}", _parse(row, f"{file}: line {number}")


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Say which file it is that cannot be read."""
    try:
        yield
    except UnicodeDecodeError as error:
        shown = bytes(error.object[error.start : error.start + 4]).hex(" ")
        raise TextError(f"{file}: not UTF-8 (bytes {shown}); convert it first") from None
    except OSError as error:
        raise TextError(f"{file}: cannot be read ({error.strerror})") from None


def _parse(content: str, where: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TextError(f"{where}: not valid JSON ({error})") from None


def _document(row: Any, where: str) -> str | Messages:
    if not isinstance(row, dict):
        raise TextError(f"{where}: expected an object with `text` or `messages`, found {type(row).__name__}")
    if isinstance(text := row.get("text"), str) and text.strip():
        return text
    messages = row.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages):
        return messages
    for names in _PAIRS:
        if all(isinstance(row.get(name), str) for name in names):
            return "\n".join(row[name] for name in names)
    if "text" in row and (text is None or isinstance(text, str)):
        return ""  # passed over, and counted
    pairs = ", ".join(f"{a} and {b}" for a, b in _PAIRS)
    raise TextError(
        f"{where}: has {', '.join(map(str, row))[:100] or 'no fields'}; expected text, messages, or {pairs}"
    )
