"""The tasks that ship: questions that are fair, the same everywhere, and above chance for a model that can read."""

import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scipy import stats
from tokenizers import Tokenizer

from phasefold.errors import EvalError
from phasefold.evals.tasks import FOLDER, docstrings, needle

EXAMPLES = Path(__file__).parent.parent / "examples"
FIXTURE = EXAMPLES / "tiny-glm5"
TOKENIZER = Tokenizer.from_file(str(FIXTURE / "tokenizer.json"))
NEEDLE = {"needle_lengths": [200, 600], "needle_depths": [0, 50, 100], "needle_samples": 4, "tokenizer": str(FIXTURE)}


def tokens(text: str) -> int:
    return len(TOKENIZER.encode(text).ids)


@pytest.fixture(scope="module")
def cloze() -> list[dict[str, Any]]:
    return list(docstrings.cloze()["test"])


@pytest.fixture(scope="module")
def choice() -> list[dict[str, Any]]:
    return list(docstrings.choice()["test"])


@pytest.fixture(scope="module")
def needles() -> list[dict[str, Any]]:
    return list(needle.questions(**NEEDLE)["test"])


def test_there_are_enough_questions_of_enough_documents(
    cloze: list[dict[str, Any]], choice: list[dict[str, Any]]
) -> None:
    library = Path(sysconfig.get_path("stdlib"))
    for rows in (cloze, choice):
        documents = Counter(row["document"] for row in rows)
        assert 500 <= len(rows) <= 1000 and len(documents) > 150 and max(documents.values()) <= 10
        assert all((library / name).is_file() for name in documents)
        assert not [name for name in documents if re.search(r"(^|/)(tests?|idlelib|site-packages)/", name)]
        right = [row["word"] if "word" in row else row["choices"][row["answer"]] for row in rows]
        whole = [f"{row['context']} {text}".lower().split() for row, text in zip(rows, right, strict=True)]
        assert len({tuple(words[-8:]) for words in whole}) == len(rows), "a question twice"
        assert all(15 <= len(row["context"].split()) <= 48 for row in rows)


def test_questions_fit_what_the_examples_were_trained_with(
    cloze: list[dict[str, Any]], choice: list[dict[str, Any]]
) -> None:
    assert max(tokens(row["context"] + row["target"]) for row in cloze) < 200
    assert max(tokens(f"{row['context']} {text}") for row in choice for text in row["choices"]) < 200


def test_the_answer_is_what_the_docstring_says(cloze: list[dict[str, Any]], choice: list[dict[str, Any]]) -> None:
    texts = {file.path: " ".join(" ".join(file.docstrings).split()) for file in docstrings.library()}
    for row in cloze:
        assert " ".join(f"{row['context']}{row['target']}".split()) in texts[row["document"]]
        assert row["target"] == " " + row["word"] and not row["context"][-1].isspace()
    for row in choice:
        assert " ".join(f"{row['context']} {row['choices'][row['answer']]}".split()) in texts[row["document"]]


def test_the_right_choice_cannot_be_told_by_its_form(choice: list[dict[str, Any]]) -> None:
    for row in choice:
        lengths = [len(text) for text in row["choices"]]
        assert max(lengths) - min(lengths) < 4
        assert len({re.sub(r"\W", "", text.split()[0]).lower() for text in row["choices"]}) == 4
        assert len(row["choices"]) == 4
    for start in range(0, len(choice) - 3, 4):
        assert sorted(row["answer"] for row in choice[start : start + 4]) == [0, 1, 2, 3]
    # rules that read no context: the longest, the shortest, the middle one, most letters, fewest
    rules: tuple[Callable[[str], float], ...] = (
        len,
        lambda text: -len(text),
        lambda text: -abs(len(text) - sum(map(len, row["choices"])) / 4),
        lambda text: sum(map(str.isalpha, text)),
        lambda text: -sum(map(str.isalpha, text)),
    )
    for rule in rules:
        points = sum(
            (max(map(rule, row["choices"])) == rule(row["choices"][row["answer"]]))
            / sum(rule(text) == max(map(rule, row["choices"])) for text in row["choices"])
            for row in choice
        )
        assert abs(points / len(choice) - 0.25) < 0.05


def test_questions_are_the_same_in_every_process(cloze: list[dict[str, Any]], choice: list[dict[str, Any]]) -> None:
    code = (
        "import hashlib, json; from phasefold.evals.tasks import docstrings as d;"
        "rows = [list(d.choice()['test']), list(d.cloze()['test'])];"
        "print(hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest())"
    )
    env = os.environ | {"PYTHONHASHSEED": "77", "PYTHONWARNINGS": "default"}
    found = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    ours = hashlib.sha256(json.dumps([choice, cloze], sort_keys=True).encode()).hexdigest()
    assert found.stdout.strip() == ours


def test_a_library_without_docstrings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.py").write_text('"""One line."""\n')
    (tmp_path / "broken.py").write_text("def (:\n")
    monkeypatch.setattr(docstrings.sysconfig, "get_path", lambda _: str(tmp_path))
    caches = (docstrings.library, docstrings._cuts, docstrings._following)
    for cached in caches:
        cached.cache_clear()
    try:
        for make in (docstrings.cloze, docstrings.choice):
            with pytest.raises(EvalError, match=r"give 0 questions, 500 are needed: run a Python"):
                make()
    finally:
        for cached in caches:
            cached.cache_clear()


def test_an_example_is_above_chance() -> None:
    """By lm-eval's own model; all questions and all examples are in docs/benchmarks.md."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(pretrained=str(FIXTURE), device="cpu", dtype="float32", batch_size=20)
    manager = TaskManager(include_path=str(FOLDER), include_defaults=False)
    results = {
        task: lm_eval.simple_evaluate(model, tasks=[task], task_manager=manager, limit=limit, bootstrap_iters=0)
        for task, limit in (("docstring_cloze", 80), ("docstring_choice", 120))
    }
    share = {task: found["results"][task]["acc,none"] for task, found in results.items()}
    right = round(share["docstring_choice"] * 120)
    assert stats.binomtest(right, 120, 0.25, alternative="greater").pvalue < 0.01, right
    words = Counter(row["doc"]["word"] for row in results["docstring_cloze"]["samples"]["docstring_cloze"])
    guess = words.most_common(1)[0][1]
    assert share["docstring_cloze"] * 80 > guess + 3 * guess**0.5, (share, guess)
    assert results["docstring_cloze"]["results"]["docstring_cloze"]["perplexity,none"] < 1024


def test_a_needle_stands_where_it_was_asked_for(needles: list[dict[str, Any]]) -> None:
    assert len(needles) == 2 * 3 * 4
    assert len({row["context"] for row in needles}) == len(needles)
    assert [(row["length"], row["depth"]) for row in needles[:6]] == [(n, d) for n in (200, 600) for d in (0, 50, 100)]
    for row in needles:
        text, _, question = row["context"].partition("\n\nWhat is the code of ")
        name, number = question.split("?")[0], row["target"]
        sentence = f"The code of {name} is {number}."
        assert row["choices"][row["answer"]] == number and question.endswith(f"The code of {name} is")
        assert text.count(sentence) == 1 and text.count("The code of ") == 4 and number not in question
        for other in row["choices"]:
            assert len(re.findall(rf"The code of [a-z]+ is {other}\.", text)) == 1 and len(other) == len(number)
        assert len({other[:2] for other in row["choices"]}) == 4 and 5 <= len(number) <= 7
        before, after = (len(part.split()) for part in text.split(sentence))
        sentences = max(len(part.split()) for part in text.split(". "))
        assert abs(100 * before / (before + after) - row["depth"]) <= 100 * (sentences + 25) / (before + after)
        assert row["depth"] not in (0, 100) or min(before, after) == 0
    places = Counter(row["answer"] for row in needles)
    assert set(places.values()) == {6}
    texts = {row["cluster"]: set() for row in needles}
    for row in needles:
        texts[row["cluster"]].add(row["target"])
    assert len(texts) == 2 * 4 and all(len(of) == 1 for of in texts.values()), "one text is asked at every depth"


@pytest.mark.parametrize("length", [200, 601, 1024, 4096])
def test_a_needles_prompt_has_the_length(length: int) -> None:
    given = NEEDLE | {"needle_lengths": length, "needle_samples": 3}
    for row in needle.questions(**given)["test"]:
        made = tokens(row["context"])
        assert row["tokens"] == made and length - needle.ROOM - 8 <= made <= length - needle.ROOM


def test_needles_without_a_tokenizer_count_words() -> None:
    rows = needle.questions(max_length=10000, needle_samples=1, needle_depths=[50])["test"]
    assert [row["length"] for row in rows] == [4096, 8192, 10000]
    for row in rows:
        assert abs(len(row["context"].split()) * needle.RATIO + needle.ROOM - row["length"]) < 4
    assert [row["length"] for row in needle.questions(needle_samples=1, needle_depths=[0])["test"]] == [4096]
    assert {row["length"] for row in needle.questions(max_length=2048, needle_samples=1)["test"]} == {2048}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"needle_lengths": [60]}, r"a length of 60 tokens has no room for four .* give needle_lengths of 1\d\d"),
        ({"needle_lengths": [10**7]}, r"all docstrings make [\d,]+ tokens, and a length of 10,000,000"),
        ({"needle_length": [200]}, r"no parameter 'needle_length'; there are needle_lengths, needle_depths"),
        ({"needle_lengths": "long"}, r"needle_lengths is 'long'; expected whole numbers"),
        ({"needle_lengths": []}, r"needle_lengths is \[\]"),
        ({"needle_depths": [50, 101]}, r"needle_depths is \[50, 101\]; expected whole numbers from 0 to 100"),
        ({"needle_depths": [0.5]}, r"needle_depths is \[0\.5\]"),
        ({"needle_samples": 0}, r"needle_samples is 0"),
        ({"needle_samples": True}, r"needle_samples is True"),
        ({"tokenizer": "no/such-model"}, r"needle: no tokenizer 'no/such-model' \("),
    ],
)
def test_needles_that_cannot_be_made_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(EvalError, match=message):
        needle.questions(**NEEDLE | given)


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        (" 73920.", 1.0),
        ("The code of amber is 73920. The code of fern is 11111.", 1.0),
        ("It is 73,920.", 1.0),
        ("<think>Is it 11111? No.</think> 73920", 1.0),
        (" 11111, or 73920", 0.0),
        (" 739201", 0.0),
        ("12 of 73920", 1.0),
        ("", 0.0),
    ],
)
def test_the_first_number_of_an_answer_counts(answer: str, share: float) -> None:
    assert needle.score({"target": "73920"}, [answer]) == {"exact_match": share}


def test_needles_come_through_lm_evals_metadata() -> None:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(pretrained=str(FIXTURE), device="cpu", dtype="float32", batch_size=4)
    few = NEEDLE | {"needle_lengths": [200], "needle_samples": 1}
    manager = TaskManager(include_path=str(FOLDER), include_defaults=False, metadata=few)
    found = lm_eval.simple_evaluate(model, tasks=["needle", "needle_choice"], task_manager=manager, bootstrap_iters=0)
    for task, metric in (("needle", "exact_match"), ("needle_choice", "acc")):
        samples = found["samples"][task]
        assert [(row["doc"]["length"], row["doc"]["depth"]) for row in samples] == [(200, 0), (200, 50), (200, 100)]
        assert 0.0 <= found["results"][task][f"{metric},none"] <= 1.0
    request = found["samples"]["needle_choice"][0]["arguments"][0]
    assert request[1] == f" {found['samples']['needle_choice'][0]['doc']['choices'][0]}"


def test_lm_evals_own_command_runs_them(tmp_path: Path) -> None:
    """No phasefold in the command but the folder; 20 questions, by lm-eval's own model."""
    command = (
        *(sys.executable, "-m", "lm_eval", "--model", "hf", "--include_path", FOLDER, "--tasks", "docstring_cloze"),
        *("--model_args", f"pretrained={FIXTURE},dtype=float32", "--device", "cpu", "--batch_size", "10"),
        *("--limit", "20", "--output_path", tmp_path, "--log_samples"),
    )
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    (found,) = tmp_path.rglob("results_*.json")
    result = json.loads(found.read_text())["results"]["docstring_cloze"]
    assert result["sample_len"] == 20 and 0.0 < result["acc,none"] < 1.0 and result["perplexity,none"] > 1.0
