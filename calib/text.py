"""Calibration text: files to documents, documents to tokens, tokens to blocks of one length.

Documents are taken in the order of the files' names and follow each other without anything between them but what the
tokenizer itself puts at their ends. What is left behind the last whole block is left out, and counted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import TextError
from ..formats.checkpoint import natural

SUFFIXES = (".txt", ".jsonl", ".json")
#: fields of a row that hold a text in two parts, as data sets of questions have them
_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("question", "answer"), ("instruction", "output"))
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "tokenizer_config.json")
_CHARACTERS = 64  # no more of a document are looked at for each token that is still wanted

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Text:
    """blocks: int32 [sequences, length]. digest: of the tokens in them. files, documents: how many took part.

    left_over: tokens behind the last whole block. empty: documents without any text, which were passed over.
    """

    blocks: torch.Tensor
    digest: str
    files: int
    documents: int
    left_over: int
    empty: int


def read_text(path: Path, tokenizer: Any, vocabulary: int, length: int, limit: int) -> Text:
    """At most `limit` tokens of a file or folder, in blocks of `length`.

    TextError where there is too little, where a file cannot be read as what its name says, or where the tokenizer
    gives a token that the model does not have.
    """
    tokens: list[int] = []
    used: set[Path] = set()
    documents = empty = 0
    for file, where, document in _documents(path, limit * _CHARACTERS):
        used.add(file)
        if isinstance(document, str) and not document.strip():
            empty += 1
            continue
        made = _encode(tokenizer, document, where, limit - len(tokens))
        if made and max(made) >= vocabulary:
            raise TextError(
                f"{where}: the tokenizer gives token {max(made)}, the model has {vocabulary:,}: it is not this model's"
            )
        documents, tokens = documents + 1, tokens + made
        if len(tokens) >= limit:
            break
    tokens = tokens[:limit]
    if len(tokens) < length:
        why = "--tokens asks for no more" if limit < length else "give more text, or a shorter --length"
        raise TextError(f"{path}: {len(tokens):,} tokens, less than one block of {length:,}: {why}")
    count = len(tokens) // length
    blocks = torch.tensor(tokens[: count * length], dtype=torch.int32).view(count, length)
    digest = hashlib.sha256(f"{count} {length} ".encode() + blocks.numpy().astype("<i4").tobytes())
    return Text(blocks, digest.hexdigest(), len(used), documents, len(tokens) - count * length, empty)


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


def _encode(tokenizer: Any, document: str | Messages, where: str, wanted: int) -> list[int]:
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


def _documents(path: Path, most: int) -> Iterator[tuple[Path, str, str | Messages]]:
    """File, where in it, and text or messages, of every document in order. most: characters that are wanted of one."""
    for file in _files(path):
        found = False
        rows = {".txt": _whole, ".json": _list, ".jsonl": _lines}[file.suffix](file, most)
        for where, row in rows:
            found = True
            yield file, where, _document(row, where)
        if not found:
            raise TextError(f"{file}: is empty; leave it out, or put text into it")


def _files(path: Path) -> list[Path]:
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise TextError(f"{path}: is no {', '.join(SUFFIXES)} file; others (parquet, arrow) are not read")
        return [path]
    if not path.is_dir():
        raise TextError(f"{path}: no such file or folder; give text to calibrate with")
    there = [file for file in path.rglob("*") if file.is_file() and "/." not in f"/{file.relative_to(path)}"]
    found = sorted((file for file in there if file.suffix in SUFFIXES), key=lambda file: natural(str(file)))
    # a data set's folder describes itself in files of these names
    found = [file for file in found if file.name not in ("dataset_info.json", "dataset_dict.json", "state.json")]
    if not found:
        others = ", ".join(sorted({file.suffix or file.name for file in there})[:5]) or "nothing"
        raise TextError(f"{path}: no {', '.join(SUFFIXES)} file in it (found {others}); parquet and arrow are not read")
    return found


def _whole(file: Path, most: int) -> Iterator[tuple[str, Any]]:
    """A .txt file as a row with its text, or with the beginning of it."""
    with _reading(file), open(file, encoding="utf-8-sig", newline="") as opened:
        content = opened.read(min(most, os.fstat(opened.fileno()).st_size))  # as much as is asked for is set aside
    if content.strip():
        yield str(file), {"text": content}


def _list(file: Path, _: int) -> Iterator[tuple[str, Any]]:
    """The rows of a .json file, which is a list."""
    with _reading(file):
        content = file.read_text(encoding="utf-8-sig")
    if content.strip():
        value = _parse(content, str(file))
        if not isinstance(value, list):
            raise TextError(f"{file}: expected a list of objects, found {type(value).__name__}")
        yield from ((f"{file}: row {number}", row) for number, row in enumerate(value, 1))


def _lines(file: Path, _: int) -> Iterator[tuple[str, Any]]:
    """The rows of a .jsonl file, one after the other: it may be large."""
    with _reading(file), open(file, encoding="utf-8-sig", newline="\n") as opened:
        for number, line in enumerate(opened, 1):
            if line.strip():
                yield f"{file}: line {number}", _parse(line, f"{file}: line {number}")


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
