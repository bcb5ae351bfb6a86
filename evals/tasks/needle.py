"""Long-context recall: a code that stands somewhere in a long text, among codes of other names, is asked for.

The text is made of docstrings of the standard library. As much of it is taken as makes the prompt as long as was asked,
in tokens of the model's own tokenizer. Four sentences in it have one form, four names and four numbers, so a number
copied without regard to its name is right one time in four, and `needle_choice` offers just those four.

Parameters come through lm-eval's metadata: `TaskManager(metadata={...})`, or `lm_eval --metadata '{...}'`.
    needle_lengths: tokens of prompt and answer together. Else 4096 doubled up to `max_length`; without that, 4096.
    needle_depths: percent of the text that stand before the sentence that is asked for; else 0, 25, 50, 75, 100.
    needle_samples: questions of each length and depth; else 10.
    tokenizer: folder of the model, or its name for transformers; `pretrained` is looked at next. Without either, a word
    counts as `RATIO` tokens.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from ...errors import EvalError
from .docstrings import digest, library

#: tokens that a word counts for where no tokenizer is known
RATIO = 1.5
#: tokens of a length that are left for the answer
ROOM = 32
_DEPTHS, _SAMPLES, _SHORTEST = (0, 25, 50, 75, 100), 10, 4096
_NAMES = (
    "amber", "basil", "cedar", "coral", "ember", "fern", "hazel", "ivory", "jasper", "lemon", "linen", "maple",
    "olive", "opal", "pearl", "pine", "raven", "river", "robin", "rose", "sage", "silver", "tiger", "velvet",
)  # fmt: skip
_PARAMETERS = ("needle_lengths", "needle_depths", "needle_samples")
_WORD = 20  # characters; longer ones are left out of the text, so that a length can be met closely
_FORM, _QUESTION = "The code of {} is {}.", "\n\nWhat is the code of {0}? The code of {0} is"
_NUMBER = re.compile(r"(?<!\d)\d{5,7}(?!\d)")

Count = Callable[[str], int]


def questions(**metadata: Any) -> dict[str, Any]:
    """lm-eval's custom_dataset of `needle` and `needle_choice`: context, choices (four numbers, the right one at
    `answer`), target (the right one), length, depth, tokens (of the context), cluster (which text it is: one text is
    asked at every depth).

    EvalError for parameters that make no sense, a length that is too short, or one that the docstrings cannot fill.
    """
    import datasets

    unknown = [name for name in metadata if name.startswith("needle") and name not in _PARAMETERS]
    if unknown:
        raise EvalError(f"needle: no parameter {unknown[0]!r}; there are {', '.join(_PARAMETERS)}")
    lengths = _numbers(metadata, "needle_lengths", _lengths(metadata.get("max_length")), 1, 1 << 30)
    depths = _numbers(metadata, "needle_depths", _DEPTHS, 0, 100)
    (samples,) = _numbers(metadata, "needle_samples", (_SAMPLES,), 1, 1 << 20)[:1]
    name = str(metadata.get("tokenizer") or metadata.get("pretrained") or "")
    rows = _rows(lengths, depths, samples, name, bool(metadata.get("trust_remote_code")))
    return {"test": datasets.Dataset.from_list([*rows])}


def score(row: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """lm-eval's process_results of `needle`: 1 where the first number of an answer's length is the right one.

    What a model thinks aloud, up to </think>, is no answer; commas within a number are none.
    """
    answer = re.sub(r"(?<=\d),(?=\d{3})", "", results[0].rpartition("</think>")[2])
    found = _NUMBER.search(answer)
    return {"exact_match": float(found is not None and found[0] == row["target"])}


def _lengths(most: Any) -> tuple[int, ...]:
    if not isinstance(most, int) or most <= _SHORTEST:
        return (most if isinstance(most, int) else _SHORTEST,)
    doubled = [_SHORTEST << n for n in range(most.bit_length()) if _SHORTEST << n < most]
    return (*doubled, most)


def _numbers(metadata: Mapping[str, Any], name: str, default: Sequence[int], low: int, high: int) -> tuple[int, ...]:
    """A parameter: whole numbers, or one; each once, in order."""
    given = metadata.get(name, default)
    values = given if isinstance(given, list | tuple) else [given]
    if not values or not all(isinstance(n, int) and not isinstance(n, bool) and low <= n <= high for n in values):
        raise EvalError(f"needle: {name} is {given!r}; expected whole numbers from {low:,} to {high:,}")
    return tuple(sorted(set(values)))


@cache
def _rows(
    lengths: tuple[int, ...], depths: tuple[int, ...], samples: int, name: str, trusted: bool
) -> tuple[dict[str, Any], ...]:
    """All questions; a beginning has every length and depth of the first samples."""
    if name:
        tokenizer = _tokenizer(name, trusted)
        count: Count = lambda text: len(tokenizer.encode(text, add_special_tokens=False))  # noqa: E731
    else:
        count = lambda text: int(len(text.split()) * RATIO) + 1  # noqa: E731
    count_word = cache(lambda word: count(f" {word}"))
    rows = list[dict[str, Any]]()
    for sample in range(samples):
        for length in lengths:
            for place, depth in enumerate(depths):
                rows.append(_row(length, depth, sample, (sample + place) % 4, count, count_word))
    return tuple(rows)


@cache
def _tokenizer(name: str, trusted: bool) -> Any:
    if Path(name).is_dir():
        from ...calib.text import load_tokenizer

        return load_tokenizer(Path(name), trust_remote_code=trusted)
    import transformers

    auto: Any = transformers.AutoTokenizer
    try:
        return auto.from_pretrained(name, trust_remote_code=trusted)
    except Exception as error:  # whatever transformers and the Hub make of a name
        why = " ".join(str(error).split())[:200]
        kind = type(error).__name__
        raise EvalError(f"needle: no tokenizer {name!r} ({kind}: {why}); give a folder that has one") from None


@cache
def _texts() -> tuple[str, ...]:
    """All docstrings of the library, a line each, in an order without meaning; none twice, none with long numbers."""
    lines = {
        " ".join(word for word in text.split() if len(word) <= _WORD)
        for file in library()
        for text in file.docstrings
        if not re.search(r"\d{4}", text)
    }
    return tuple(sorted(lines, key=digest))


def _row(length: int, depth: int, sample: int, place: int, count: Count, count_word: Count) -> dict[str, Any]:
    """One question. Length and sample decide text, names and numbers; place: the right number's among the choices."""
    cluster = f"{length}/{sample}"
    names = sorted(_NAMES, key=lambda name: digest(cluster, name))[:4]
    numbers = _four(cluster)
    needles = [_FORM.format(name, code) for name, code in zip(names, numbers, strict=True)]
    # the right one where it was asked for, the others anywhere
    shares = [depth / 100, *(digest(cluster, needle)[0] / 256 for needle in needles[1:])]
    words = _words(cluster, length)

    def made(many: int) -> str:
        """With the first `many` words of text: each needle behind the sentence's end next to its share of them."""
        ends = [0, *(n + 1 for n, word in enumerate(words[:many]) if word.endswith(".")), many]
        at = [min(ends, key=lambda end: abs(end - share * many)) for share in shares]
        pieces, done = list[str](), 0
        for number in sorted(range(4), key=lambda n: (at[n], shares[n], n)):
            pieces += [*words[done : at[number]], needles[number]]
            done = at[number]
        return " ".join([*pieces, *words[done:many]]) + _QUESTION.format(names[0])

    context, tokens = _fitted(length, words, made, count, count_word)
    choices = [*numbers[1 : place + 1], numbers[0], *numbers[place + 1 :]]
    return {
        "context": context, "choices": choices, "answer": place, "target": numbers[0], "length": length,
        "depth": depth, "tokens": tokens, "cluster": cluster,
    }  # fmt: skip


def _four(cluster: str) -> list[str]:
    """Numbers of as many digits, five to seven; no two begin with the same two."""
    digits, found, step = 5 + digest(cluster, "digits")[0] % 3, dict[str, str](), 0
    while len(found) < 4:
        drawn = int.from_bytes(digest(cluster, str(step))[:8], "big")
        one = str(10 ** (digits - 1) + drawn % (9 * 10 ** (digits - 1)))
        found.setdefault(one[:2], one)
        step += 1
    return list(found.values())


def _fitted(
    length: int, words: Sequence[str], made: Callable[[int], str], count: Count, count_word: Count
) -> tuple[str, int]:
    """A context from as many words as fit into length - ROOM tokens, and its tokens.

    Words are counted alone first: nearly right for most tokenizers, and the whole is counted a few times only.
    """
    wanted, tokens = length - ROOM, count(made(0))
    if tokens > wanted:
        raise EvalError(
            f"needle: a length of {length:,} tokens has no room for four sentences, the question and {ROOM} tokens of "
            f"answer: give needle_lengths of {tokens + ROOM:,} or more"
        )
    sums = [*accumulate((count_word(word) for word in words), initial=tokens)]
    many = bisect_right(sums, wanted) - 1
    while (tokens := count(made(many))) > wanted:
        many -= max(1, (tokens - wanted) // 4)
    step = max(1, (wanted - tokens) // 2)
    while step:
        more = count(made(many + step)) if many + step <= len(words) else wanted + 1
        if more <= wanted:
            many, tokens = many + step, more
        else:
            step //= 2
    if many == len(words) and tokens < wanted - _WORD:
        raise EvalError(f"needle: all docstrings make {tokens:,} tokens, and a length of {length:,} was asked for")
    return made(many), tokens


def _words(cluster: str, most: int) -> list[str]:
    """Words of the text from a place of the sample's own on, `most` of them, where there are as many."""
    texts = _texts()
    start = int.from_bytes(digest(cluster, "start")[:8], "big") % len(texts)
    return [*islice((word for text in (*texts[start:], *texts[:start]) for word in text.split()), most)]
