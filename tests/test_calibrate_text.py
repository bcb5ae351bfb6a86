"""Calibration text: what is read, how it becomes blocks, and a sentence for whatever cannot be used."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import variants
from tokenizers import Tokenizer

from phasefold.calib.text import Text, load_tokenizer, read_text
from phasefold.errors import TextError

TINY = variants.EXAMPLES / "tiny-kimi"
WORDS = "Return a new array of the given shape and type, without initializing entries. " * 8
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


def ids(text: str) -> list[int]:
    """Tokens by the tokenizers library alone."""
    return Tokenizer.from_file(str(TINY / "tokenizer.json")).encode(text).ids


def read(path: Path, length: int = 16, limit: int = 100_000, tokenizer: Any = None, vocabulary: int = 1024) -> Text:
    return read_text(path, tokenizer or load_tokenizer(TINY), vocabulary, length, limit)


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return path


def test_documents_follow_each_other_in_whole_blocks(tmp_path: Path) -> None:
    write(tmp_path / "b" / "10.txt", WORDS)
    write(tmp_path / "b" / "2.jsonl", '{"text": "First row."}\n\n{"text": "Zweite, größer."}\n{"text": " "}\n')
    write(
        tmp_path / "b" / "3.json",
        json.dumps([{"question": "Why?", "answer": "Therefore."}, {"prompt": "A", "completion": "B"}]),
    )
    write(tmp_path / "b" / ".hidden.txt", "never")
    write(tmp_path / "b" / "dataset_info.json", "{}")
    write(tmp_path / "b" / "train.parquet", "PAR1")
    found = read(tmp_path / "b")
    words = ids(WORDS)
    turns = ("First row.", "Why?\nTherefore.", words[:16], "Zweite, größer.", "A\nB", words[16:])
    expected = [token for turn in turns for token in (ids(turn) if isinstance(turn, str) else turn)]
    count = len(expected) // 16
    assert found.blocks.dtype == torch.int32
    assert found.blocks.flatten().tolist() == expected[: count * 16] and found.blocks.shape == (count, 16)
    assert (found.files, found.documents, found.empty, found.left_over) == (3, 5, 1, len(expected) - count * 16)
    assert list(found.taken) == ["2.jsonl", "3.json", "10.txt"] and sum(found.taken.values()) == count * 16
    assert found.unused == () and found.passed == ("dataset_info.json", "train.parquet")


def test_a_limit_ends_the_reading(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", WORDS * 50)
    found = read(tmp_path, limit=100)
    assert found.blocks.flatten().tolist() == ids(WORDS * 50)[:96]
    assert (found.files, found.documents, found.left_over) == (1, 1, 4)
    assert found.digest == read(tmp_path / "a.txt", limit=100).digest != read(tmp_path / "a.txt", limit=128).digest


def test_files_take_turns_of_a_block_and_each_is_in_the_mix(tmp_path: Path) -> None:
    long = [WORDS * 50, "def f(x):\n    return x + 1\n" * 300, "中文文本很长。" * 300]
    for name, content in zip(("a.txt", "b.txt", "c.txt"), long, strict=True):
        write(tmp_path / "t" / name, content)
    found = read(tmp_path / "t", limit=16 * 30)
    assert found.taken == {"a.txt": 160, "b.txt": 160, "c.txt": 160} and (found.files, found.documents) == (3, 3)
    blocks = found.blocks.tolist()
    assert blocks[:4] == [ids(long[0])[:16], ids(long[1])[:16], ids(long[2])[:16], ids(long[0])[16:32]]
    for text in long:  # each file's tokens in their order
        parts = [ids(text)[start : start + 16] for start in range(0, 160, 16)]
        assert [block for block in blocks if block in parts] == parts
    assert found.to_json()["taken"] == found.taken
    assert found.digest == read(tmp_path / "t", limit=16 * 30).digest != read(tmp_path / "t", limit=16 * 29).digest
    few = read(tmp_path / "t", limit=40)  # c.txt's turn comes when 32 are there, and its 8 are behind the last block
    assert few.taken == {"a.txt": 16, "b.txt": 16} and few.unused == ("c.txt",) and few.left_over == 8
    write(tmp_path / "t" / "d.txt", WORDS)  # that nothing is used of changes nothing
    assert read(tmp_path / "t", limit=40).to_json() == few.to_json()
    (tmp_path / "t" / "a.txt").rename(tmp_path / "t" / "z.txt")
    assert read(tmp_path / "t", limit=40).digest != few.digest


def test_a_long_row_does_not_crowd_out_other_files(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", json.dumps({"text": WORDS * 50}))
    write(tmp_path / "b.txt", WORDS)
    found, words = read(tmp_path, limit=96), ids(WORDS)
    assert found.taken == {"a.jsonl": 48, "b.txt": 48} and found.documents == 2
    assert found.blocks[1::2].flatten().tolist() == words[:48]
    alone = read(tmp_path / "a.jsonl", limit=96)
    assert alone.blocks.flatten().tolist() == ids(WORDS * 50)[:96]
    assert alone.to_json() == {"digest": alone.digest, "files": 1, "documents": 1}


@pytest.mark.parametrize("count", [2, 3, 4, 6, 8, 16])
def test_what_is_held_out_is_of_every_file_in_turn(tmp_path: Path, count: int) -> None:
    for number in range(count):
        write(tmp_path / f"{number}.txt", "".join(f"{chr(97 + number)} " for _ in range(16 * 16)))
    found = read(tmp_path, limit=16 * 8 * count)
    assert set(found.taken.values()) == {16 * 8}
    owners = [block[8] for block in found.blocks.tolist()]  # a file's letter
    assert len(set(owners)) == count and sorted(owners[7::8]) == sorted(set(owners))


def test_every_file_is_looked_at_even_if_its_turn_never_comes(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", WORDS * 20)
    (tmp_path / "b.txt").write_bytes(b"gr\xf6sser " * 10)
    with pytest.raises(TextError, match=r"b\.txt: not UTF-8"):
        read(tmp_path, limit=16)
    write(tmp_path / "b.txt", " \n")
    with pytest.raises(TextError, match=r"b\.txt: is empty"):
        read(tmp_path, limit=16)
    (tmp_path / "b.txt").unlink()
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(TextError, match=r"b\.jsonl: cannot be read \(No such file or directory\)"):
        read(tmp_path, limit=16)
    (tmp_path / "b.jsonl").unlink()
    write(tmp_path / "b.txt", "x" * 4095 + "ä")  # a character across the end of what is looked at
    assert read(tmp_path, limit=16).unused == ("b.txt",)


def test_the_command_says_what_each_file_gave(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "c.txt", "README.md", "train.parquet"):
        write(tmp_path / "text" / name, WORDS)
    words = ["--text", str(tmp_path / "text"), "--out", str(tmp_path / "stats"), "--tokens", "32", "--length", "16"]
    command = [sys.executable, "-m", "phasefold", "calibrate", str(TINY), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert "32 tokens in 2 sequences of 16, of 2 documents in 2 files" in said
    assert "tokens of files: a.txt 16, b.txt 16\n" in said
    assert "note: nothing used of 1 file (c.txt): " in said
    assert "note: passed over 2 files (README.md, train.parquet): only .txt, .jsonl and .json files" in said
    again = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True, env=environment)
    told = json.loads(again.stdout)
    assert told["files_used"] == {"a.txt": 16, "b.txt": 16} and told["files_unused"] == ["c.txt"]
    assert told["files_passed_over"] == ["README.md", "train.parquet"]
    about = json.loads((tmp_path / "stats" / "statistics.json").read_text())
    assert about["text"]["files"] == 2 and about["text"]["taken"] == told["files_used"]


def test_chat_goes_through_the_models_own_template(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TINY, tmp_path / "model"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    rows = [{"messages": [{"role": "user", "content": WORDS}, {"role": "assistant", "content": "Yes."}]}]
    path = write(tmp_path / "chat.jsonl", "\n".join(map(json.dumps, rows)))
    found = read(path, tokenizer=load_tokenizer(folder))
    expected = ids(f"<user>{WORDS}<assistant>Yes.")
    assert found.blocks.flatten().tolist() == expected[: found.blocks.numel()] and found.documents == 1
    with pytest.raises(TextError, match=r"chat\.jsonl: line 1: chat messages, but the checkpoint has no chat template"):
        read(path)
    broken = TEMPLATE + "{{ raise_exception('no such role') }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": broken}))
    with pytest.raises(TextError, match=r"line 1: the chat template does not take these messages \(no such role\)"):
        read(path, tokenizer=load_tokenizer(folder))


def test_rows_without_text_are_counted_and_what_else_they_have_is_taken(tmp_path: Path) -> None:
    rows = [{"text": None}, {"text": " "}, {"text": "", "prompt": WORDS, "completion": "Yes."}, {"text": WORDS}]
    found = read(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows))))
    expected = ids(f"{WORDS}\nYes.") + ids(WORDS)
    assert found.blocks.flatten().tolist() == expected[: found.blocks.numel()]
    assert (found.documents, found.empty) == (2, 2)


@pytest.mark.parametrize(
    "name,content,sentence",
    [
        ("a.txt", "Too short.", r"\d tokens, less than one block of 16: give more text, or ask for shorter blocks"),
        ("a.txt", "", r"a\.txt: is empty"),
        ("a.txt", " \n ", r"a\.txt: is empty"),
        ("a.jsonl", "", r"a\.jsonl: is empty"),
        ("a.jsonl", '{"text": "a"}\n{"text"', r"a\.jsonl: line 2: not valid JSON"),
        ("a.jsonl", '["a"]', r"line 1: expected an object with `text` or `messages`, found list"),
        ("a.jsonl", '{"body": "a", "n": 1}', r"line 1: has body, n; expected text, messages, or prompt and completion"),
        ("a.jsonl", '{"messages": []}', r"line 1: has messages; expected text, messages"),
        ("a.jsonl", '{"text": "\\ud83d x"}', r"line 1: holds half a surrogate pair \('\\ud83d'\), which is no text"),
        ("a.json", '{"text": "a"}', r"a\.json: expected a list of objects, found dict"),
        ("a.parquet", "PAR1", r"a\.parquet: is no \.txt, \.jsonl, \.json file; others \(parquet, arrow\) are not read"),
        ("data/train.arrow", "x", r"data: no \.txt, \.jsonl, \.json file in it \(found \.arrow\)"),
        ("data/", "", r"data: no \.txt.* file in it \(found nothing\)"),
    ],
)  # fmt: skip
def test_each_has_its_sentence(tmp_path: Path, name: str, content: str, sentence: str) -> None:
    if name.endswith("/"):
        (tmp_path / name).mkdir()
    else:
        write(tmp_path / name, content)
    with pytest.raises(TextError, match=sentence):
        read(tmp_path / name.split("/")[0])


def test_other_encodings_missing_files_and_small_limits(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"gr\xf6sser " * 100)
    with pytest.raises(TextError, match=r"latin\.txt: not UTF-8 \(bytes f6 73 73 65\); convert it first"):
        read(tmp_path / "latin.txt")
    with pytest.raises(TextError, match="no such file or folder"):
        read(tmp_path / "nowhere")
    with pytest.raises(TextError, match=r"10 tokens, less than one block of 16: --tokens asks for no more"):
        read(write(tmp_path / "a.txt", WORDS), limit=10)
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbf" + WORDS.encode())
    assert read(tmp_path / "bom.txt").blocks[0].tolist() == ids(WORDS)[:16]


def test_tokens_outside_the_vocabulary(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", WORDS)
    with pytest.raises(
        TextError, match=r"a\.txt: the tokenizer gives token \d+, the model has 300: it is not this mod"
    ):
        read(path, vocabulary=300)


def test_tokenizers_that_are_not_there_or_not_to_be_run(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(TextError, match="none: has no tokenizer"):
        load_tokenizer(tmp_path / "none")
    code = tmp_path / "code"
    code.mkdir()
    write(code / "tokenizer_config.json", json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_kimi.Kimi", None]}}))
    write(code / "tiktoken.model", "x")
    write(code / "config.json", json.dumps({"model_type": "deepseek_v3"}))
    write(code / "tokenization_kimi.py", "raise SystemError('it was run')")
    with pytest.raises(TextError, match=r"its tokenizer is code, which is not run: .*--trust-remote-code"):
        load_tokenizer(code)
    with pytest.raises(TextError, match=r"cannot be loaded \(SystemError: it was run\)"):
        load_tokenizer(code, trust_remote_code=True)
    shutil.copyfile(TINY / "tokenizer.json", code / "tokenizer.json")  # data: no code is asked for
    assert load_tokenizer(code)("Return")["input_ids"] == ids("Return")
    write(code / "tokenizer.json", "{}")
    with pytest.raises(TextError, match="its tokenizer cannot be loaded"):
        load_tokenizer(code)


def test_no_more_of_a_file_is_read_than_is_wanted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", WORDS * 100)
    with open(path, "ab") as file:
        file.write(b"\xff")  # never come to: 32 tokens take no more than 2,048 characters
    assert read(path, limit=32).blocks.flatten().tolist() == ids(WORDS)[:32]
    whole = write(tmp_path / "b.txt", WORDS)
    assert read(whole, limit=10**15).blocks.flatten().tolist() == read(whole).blocks.flatten().tolist()
    rows = write(tmp_path / "a.jsonl", json.dumps({"text": WORDS}) + "\n")
    with open(rows, "ab") as file:
        file.write(b" " * 100_000 + b"\n\xff\n")
    assert read(rows, limit=32).blocks.flatten().tolist() == ids(WORDS)[:32]
    with pytest.raises(TextError, match=r"a\.jsonl: not UTF-8 \(bytes ff 0a\)"):
        read(rows)
