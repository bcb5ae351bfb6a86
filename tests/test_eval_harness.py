"""lm-eval's tasks on phasefold's model: every request and metric as with lm-eval's own, and what is made of them."""

import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eval_tasks import QUESTIONS, write_tasks
from lm_eval import simple_evaluate
from lm_eval._cli import HarnessCLI
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from plain import Plain

from phasefold.calib.text import load_tokenizer
from phasefold.errors import EvalError, UsageError
from phasefold.evals.asked import OURS
from phasefold.evals.harness import _without_seed, check_tasks, metrics_of, run_tasks
from phasefold.evals.harvest import clusters_of, questions_of
from phasefold.evals.lm_eval_cli import main
from phasefold.evals.model import PhasefoldLM
from phasefold.evals.scores import Harvest

EXAMPLES = Path(__file__).parent.parent / "examples"
GLM4 = EXAMPLES / "tiny-glm4"
SCORED = ["toy_choice", "toy_shots", "toy_cloze", "toy_rolling"]


@pytest.fixture(scope="module")
def folder(module_path: Path) -> Path:
    return write_tasks(module_path / "toys")


@pytest.fixture(scope="module")
def lm() -> PhasefoldLM:
    return PhasefoldLM(str(GLM4), dtype="float32")


def hf(folder: Path, **more: Any) -> HFLM:
    return HFLM(pretrained=str(folder), dtype="float32", device="cpu", **{"batch_size": 4} | more)


def by_lm_eval(lm: Any, names: list[str], folder: Path) -> Any:
    tasks = TaskManager(include_path=str(folder), include_defaults=False).load(names)
    for task in tasks["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config("num_fewshot", 0)
        task.set_fewshot_seed(1234)
    return evaluate(lm, tasks, bootstrap_iters=0)


def equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Metrics of a task."""
    assert one == {
        name: value if isinstance(value, str) else pytest.approx(value, rel=1e-5) for name, value in other.items()
    }


@pytest.mark.parametrize("name", ["kimi", "glm4", "glm5"])
def test_every_request_is_answered_as_by_lm_eval(name: str, folder: Path) -> None:
    """lm-eval's one at a time: where texts are longer than GLM-5's attention selects, its padding shifts the choice."""
    checkpoint = EXAMPLES / f"tiny-{name}"
    ours = by_lm_eval(PhasefoldLM(str(checkpoint), dtype="float32"), SCORED, folder)
    theirs = by_lm_eval(hf(checkpoint, batch_size=1), SCORED, folder)
    compared = 0
    for task in SCORED:
        for one, other in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            assert one["arguments"] == other["arguments"]
            for found, expected in zip(one["resps"], other["resps"], strict=True):
                value, expected_value = (x[0] if task == "toy_rolling" else x[0][0] for x in (found, expected))
                assert value == pytest.approx(expected_value, abs=1e-5, rel=1e-6)  # float32 has no more of a sum of 40
                assert task == "toy_rolling" or found[0][1] is expected[0][1]
                compared += 1
        equal(ours["results"][task], theirs["results"][task])
    assert compared == QUESTIONS * 9 + 4


def test_answers_are_scored_as_by_lm_eval(folder: Path) -> None:
    ours = by_lm_eval(PhasefoldLM(runner=Plain(GLM4), tokenizer=load_tokenizer(GLM4)), ["toy_answer"], folder)
    theirs = by_lm_eval(hf(GLM4, batch_size=1), ["toy_answer"], folder)
    answers = [[sample["resps"] for sample in run["samples"]["toy_answer"]] for run in (ours, theirs)]
    assert answers[0] == answers[1]
    assert ours["results"] == theirs["results"]


def test_simple_evaluate_takes_the_models_name(folder: Path) -> None:
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    ours, theirs = (
        simple_evaluate(model, arguments, tasks=["toy_both"], task_manager=manager, bootstrap_iters=0, batch_size=3)
        for model, arguments in (
            ("phasefold", f"target={GLM4},dtype=float32"),
            ("hf", f"pretrained={GLM4},dtype=float32,device=cpu"),
        )
    )
    assert ours["results"].keys() == theirs["results"].keys() >= {"toy_choice", "toy_cloze"}
    for task, values in theirs["results"].items():
        equal(ours["results"][task], values)
    assert ours["config"]["batch_size"] == 3


def test_one_number_a_question_comes_out(lm: PhasefoldLM, folder: Path) -> None:
    done: list[int] = []
    found = run_tasks(lm, ["toy_both", *SCORED, "toy_answer"], include=[folder], advance=done.append)
    expected = by_lm_eval(lm, [*SCORED, "toy_answer"], folder)
    assert list(found.tasks) == [*SCORED[:1], "toy_cloze", "toy_shots", "toy_rolling", "toy_answer"]
    assert found.groups == {"toy_both": ("toy_choice", "toy_cloze")}
    assert found.versions["toy_choice"] == "2.5"
    assert found.truncated == {}
    assert sum(done) == QUESTIONS * 9 + 4 + QUESTIONS
    assert {name: [one.metric for one in metrics] for name, metrics in found.tasks.items()} == {
        "toy_choice": ["acc", "acc_norm"],
        "toy_shots": ["acc"],
        "toy_cloze": ["acc", "loglikelihood"],
        "toy_rolling": ["document_bits_per_word", "document_bits_per_byte"],
        "toy_answer": ["exact_match,first", "exact_match,whole"],
    }
    assert found.notes == ("task toy_choice: mcc is left out: it has no number for each question",)
    for name, metrics in found.tasks.items():
        for one in metrics:
            assert (one.task, one.kind) == (name, expected["configs"][name]["output_type"])
            assert one.scores.shape == (len(one.questions), 1)
            assert len(set(one.questions)) == len(one.questions) == (4 if name == "toy_rolling" else QUESTIONS)
            assert one.higher_is_better is ("document" not in one.metric)
            plain = expected["results"][name].get(one.metric if "," in one.metric else f"{one.metric},none")
            if plain is not None:
                assert one.scores.mean() == pytest.approx(plain)
    assert found.tasks["toy_choice"][0].clusters == tuple(f"text {number // 2}" for number in range(QUESTIONS))
    cloze = found.tasks["toy_cloze"][1].scores.mean()
    assert math.exp(-cloze) == pytest.approx(expected["results"]["toy_cloze"]["perplexity,none"])

    assert len(found.passages) == 4 * QUESTIONS + 4
    sample = expected["samples"]["toy_choice"][5]
    context, continuation = sample["arguments"][sample["target"]]
    assert list(found.passages[5].tokens) == lm.tok_encode(context + continuation)
    assert found.passages[5].document == "toy_choice/text 2"
    assert list(found.passages[-1].tokens) == lm.tok_encode(expected["samples"]["toy_answer"][-1]["arguments"][0][0])


def test_layer_by_layer_is_as_in_memory(lm: PhasefoldLM, folder: Path) -> None:
    layered = PhasefoldLM(str(GLM4), dtype="float32", way="layers", memory="1GB")
    assert layered.runner.about["way"] == "layer by layer"
    one, other = (run_tasks(each, SCORED, include=[folder], limit=4) for each in (lm, layered))
    same(one, other, 1e-5)
    lm.runner, kept = Plain(GLM4), lm.runner
    try:
        same(one, run_tasks(lm, SCORED, include=[folder], limit=4), 1e-5)
    finally:
        lm.runner = kept


def same(one: Harvest, other: Harvest, tolerance: float) -> None:
    assert (one.groups, one.passages, one.versions, one.truncated) == (
        other.groups,
        other.passages,
        other.versions,
        other.truncated,
    )
    for metrics, others in zip(one.tasks.values(), other.tasks.values(), strict=True):
        for a, b in zip(metrics, others, strict=True):
            assert (a.metric, a.questions, a.clusters, a.prompts) == (b.metric, b.questions, b.clusters, b.prompts)
            np.testing.assert_allclose(a.scores, b.scores, rtol=0, atol=tolerance)


def test_repeats_sample_and_the_rest_runs_once(lm: PhasefoldLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"include": [folder], "limit": 4, "repeats": 3}
    sampled = {"do_sample": True, "temperature": 1.5, "until": ["\n\n"]}
    seen: list[tuple[int, list[str]]] = []
    answer = lm.generate_until

    def listened(requests: list[Any]) -> list[str]:
        seen.append((lm.seed, answer(requests)))
        return seen[-1][1]

    monkeypatch.setattr(lm, "generate_until", listened)
    found = run_tasks(lm, ["toy_answer", "toy_choice"], gen_kwargs=sampled, seed=5, **asked)
    assert found.tasks["toy_answer"][0].scores.shape == (4, 3)
    assert found.tasks["toy_choice"][0].scores.shape == (4, 1)
    assert [seed for seed, _ in seen] == [5, 6, 7]
    assert len({tuple(texts) for _, texts in seen}) == 3
    once = run_tasks(lm, ["toy_answer"], gen_kwargs=sampled, seed=6, include=[folder], limit=4)
    np.testing.assert_array_equal(once.tasks["toy_answer"][0].scores[:, 0], found.tasks["toy_answer"][0].scores[:, 1])
    assert once.tasks["toy_answer"][0].prompts == found.tasks["toy_answer"][0].prompts
    for gen_kwargs in ({}, {"temperature": 0.7, "do_sample": False}, {"do_sample": True}):
        with pytest.raises(UsageError, match="task toy_answer: its answers are greedy"):
            check_tasks(["toy_answer"], gen_kwargs=gen_kwargs, include=[folder], repeats=3)
    assert list(check_tasks(["toy_both"], include=[folder], repeats=3).tasks) == ["toy_choice", "toy_cloze"]


def test_few_shot_examples(lm: PhasefoldLM, folder: Path) -> None:
    shots = [run_tasks(lm, ["toy_shots"], include=[folder], num_fewshot=n, limit=3, seed=n or 0) for n in (None, 2, 3)]
    prompts = [found.tasks["toy_shots"][0].prompts for found in shots]
    assert prompts[0] == prompts[1] != prompts[2]
    assert [found.notes for found in shots] == [(), (), ("task toy_shots: 3 few-shot examples instead of its own 2",)]
    assert lm.tok_decode(shots[2].passages[0].tokens).count("Goes on:") == 4


def test_chat_template_and_system_instruction(folder: Path) -> None:
    tokenizer = load_tokenizer(GLM4)
    chat = PhasefoldLM(runner=Plain(GLM4), tokenizer=tokenizer)
    asked: dict[str, Any] = {"include": [folder], "limit": 2, "chat_template": True}
    with pytest.raises(EvalError, match="tiny-glm4: has no chat template"):
        run_tasks(chat, ["toy_shots"], **asked)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    found = run_tasks(chat, ["toy_shots"], system_instruction="Go on.", **asked)
    text = chat.tok_decode(found.passages[0].tokens)
    assert text.startswith("<system>Go on.\n<user>Text: ")
    assert [text.count(f"<{role}>") for role in ("system", "user", "assistant")] == [1, 3, 3]


def test_too_long_questions_are_counted(folder: Path) -> None:
    short = PhasefoldLM(str(GLM4), dtype="float32", max_length=48)
    found = run_tasks(short, ["toy_choice", "toy_shots", "toy_answer"], include=[folder], limit=3, num_fewshot=4)
    assert found.truncated["toy_shots"] == 3 * 4
    assert found.truncated["toy_answer"] == 3
    assert max(len(passage.tokens) for passage in found.passages) == 48
    assert run_tasks(short, ["toy_cloze"], include=[folder], limit=3, num_fewshot=0).truncated == {}


def test_files_folders_tags_and_patterns(lm: PhasefoldLM, folder: Path, tmp_path: Path) -> None:
    def names(*asked: str, include: tuple[Path, ...] = (folder,)) -> tuple[list[str], dict[str, tuple[str, ...]]]:
        found = run_tasks(lm, asked, include=include, limit=2)
        return list(found.tasks), dict(found.groups)

    assert names(str(folder / "toy_cloze.yaml"), include=()) == (["toy_cloze"], {})
    assert names("toy_cho*", "toy_tag") == (["toy_choice", "toy_cloze"], {"toy_tag": ("toy_choice", "toy_cloze")})
    few = tmp_path / "few"
    few.mkdir()
    for name in ("toy_choice", "toy_rolling"):
        (few / f"{name}.yaml").write_text((folder / f"{name}.yaml").read_text())
    (few / "_base.yaml").write_text("output_type: loglikelihood\n")
    assert names(str(few), include=()) == (["toy_choice", "toy_rolling"], {})
    assert names(f"{few}/*.yaml", include=()) == (["toy_choice", "toy_rolling"], {})


@pytest.mark.parametrize(
    "task, error, why",
    [
        ("toy_chioce", UsageError, "task toy_chioce: no task, .* near to it are toy_choice"),
        ("toy_missing", EvalError, r"task toy_missing: its data set cannot be had \(.*nobody/has-this"),
        ("toy_fails", EvalError, r"task toy_fails: fails \(ZeroDivisionError: division by zero, at broken.py:4\)"),
        ("toy_pairs", EvalError, r"task toy_pairs: none of its metrics \(mcc\)"),
        ("toy_unsafe", UsageError, "task toy_unsafe: runs code that the model writes"),
        ("toy_base.yaml", UsageError, "toy_base.yaml: names neither a task nor a group"),
        ("toy_broken.yaml", UsageError, r"toy_broken.yaml: is no task \(\w+: "),
    ],
)
def test_what_is_wrong_is_one_line(
    task: str, error: type[Exception], why: str, lm: PhasefoldLM, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "toy_broken.yaml").write_text("task: [\n")
    (folder / "toy_base.yaml").write_text("output_type: loglikelihood\n")
    name = str(folder / task) if task.endswith("yaml") else task
    with pytest.raises(error, match=why) as caught:
        if task not in ("toy_fails", "toy_pairs"):
            check_tasks([name], include=[folder])
        run_tasks(lm, [name], include=[folder], limit=2)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_no_such_include_and_nothing(lm: PhasefoldLM, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none: no such folder"):
        run_tasks(lm, ["toy_cloze"], include=[tmp_path / "none"])
    with pytest.raises(UsageError, match="no tasks"):
        run_tasks(lm, [])


def test_bugs_of_ours_are_not_blamed_on_tasks(lm: PhasefoldLM, folder: Path) -> None:
    class Broken(PhasefoldLM):
        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        run_tasks(Broken(runner=lm.runner, tokenizer=lm.tokenizer), ["toy_cloze"], include=[folder], limit=2)


def test_it_is_quiet(lm: PhasefoldLM, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def advance(done: int) -> None:
        print(f"{done} done", file=sys.stderr)

    before = logging.getLogger().handlers[:]
    run_tasks(lm, ["toy_cloze", "toy_answer"], include=[folder], limit=2, advance=advance)
    out, err = capfd.readouterr()
    assert out == ""
    assert all(line.endswith(" done") for line in err.splitlines())
    assert err
    assert logging.getLogger().handlers == before


def test_equal_questions_are_told_apart_and_clusters_are_found() -> None:
    def samples(*documents: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"doc_hash": "a" * 64, "doc": document} for document in documents]

    assert questions_of(samples({}, {}, {})) == ("a" * 16, "a" * 16 + "-2", "a" * 16 + "-3")
    rows = [{"passage": "p" * 50, "subject": s} for s in ("law", "law", "art")]
    assert clusters_of(samples(*rows)) == ("law", "law", "art")
    rows = [{"passage": p * 50, "subject": "law"} for p in "aab"]
    found = clusters_of(samples(*rows))
    assert found is not None
    assert found[0] == found[1] != found[2]
    assert len(set(clusters_of(samples(*({"document": "d", "subject": "law"} for _ in range(6)))) or ())) == 1
    assert clusters_of(samples({"subject": "law"}, {"subject": "law"})) is None  # what the task is about
    assert clusters_of(samples({"subject": "law"}, {"subject": "art"})) is None
    assert clusters_of(samples({"subject": "law"}, {})) is None


def test_seeds_are_the_commands_and_a_temperature_samples(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"--gen-kwargs seed=3: give --seed"):
        check_tasks(["toy_answer"], include=[folder], gen_kwargs={"seed": 3})
    (task,) = check_tasks(["toy_answer"], include=[folder], gen_kwargs={"temperature": 0.6}).tasks.values()
    assert task.get_config("generation_kwargs")["do_sample"] is True
    seeded = check_tasks(["toy_answer"], include=[folder]).tasks["toy_answer"]
    seeded.set_config(key="generation_kwargs", value={"seed": 5}, update=True)
    assert _without_seed("toy_answer", seeded, {}) == ["task toy_answer: its own seed 5 is left out, --seed counts"]
    assert "seed" not in seeded.get_config("generation_kwargs")


def test_metrics_are_known_before_a_run(lm: PhasefoldLM, folder: Path) -> None:
    names = ["toy_choice", "toy_cloze", "toy_answer"]
    before = {name: set(metrics_of(task)) for name, task in check_tasks(names, include=[folder]).tasks.items()}
    after = {
        name: {one.metric for one in found}
        for name, found in run_tasks(lm, names, include=[folder], limit=2).tasks.items()
    }
    assert all(after[name] <= before[name] for name in names) and before.keys() == after.keys()


def test_lm_evals_own_command_line(folder: Path, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "phasefold.evals.lm_eval_cli", "run", "--model", "phasefold"),
        *("--model_args", f"target={GLM4},dtype=float32", "--tasks", "toy_cloze", "--limit", "4"),
        *("--include_path", str(folder), "--output_path", str(tmp_path / "out.json"), "--batch_size", "2"),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert ran.returncode == 0, ran.stderr
    assert "phasefold" in ran.stdout
    (written,) = tmp_path.rglob("*.json")
    results = json.loads(written.read_text())["results"]
    lm = PhasefoldLM(str(GLM4), dtype="float32", batch_size=2)
    found = run_tasks(lm, ["toy_cloze"], include=[folder], limit=4).tasks["toy_cloze"]
    assert results["toy_cloze"]["acc,none"] == found[0].scores.mean()
    assert results["toy_cloze"]["perplexity,none"] == pytest.approx(math.exp(-found[1].scores.mean()), rel=1e-5)


def test_what_phasefold_refuses_is_one_line_there_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(self: HarnessCLI, arguments: Any) -> None:
        PhasefoldLM.create_from_arg_obj(arguments.model_args)

    monkeypatch.setattr("lm_eval.utils.setup_logging", lambda: None)
    monkeypatch.setattr(HarnessCLI, "execute", execute)
    monkeypatch.setattr(
        sys, "argv", ["lm-eval", "run", "--model", "phasefold", "--model_args", f"target={GLM4},way=no"]
    )
    with pytest.raises(SystemExit, match=r"^phasefold: way 'no': a checkpoint is run by "):
        main()


def test_the_command_line_has_our_tasks_and_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("lm_eval.utils.setup_logging", lambda: None)
    monkeypatch.setattr(HarnessCLI, "execute", lambda self, arguments: seen.append(arguments))
    config = tmp_path / "config.yaml"
    config.write_text(f"include_path: {tmp_path}\n")
    for given in (
        ["--model", "phasefold", "--tasks", "docstring_cloze"],  # lm-eval puts the verb in
        ["run", "--config", str(config)],
        ["run", "--config", str(config), "--include_path", "mine"],
        ["ls", "tasks", "--include_path", "mine"],
        ["validate", "--tasks", "docstring_cloze"],
    ):
        monkeypatch.setattr(sys, "argv", ["lm-eval", *given])
        main()
    ours = str(OURS)
    assert [one.include_path for one in seen] == [[ours], [ours, str(tmp_path)], [ours, "mine"], [ours, "mine"], [ours]]
    known = TaskManager(include_path=seen[0].include_path, include_defaults=False).all_tasks
    assert {"docstring_cloze", "docstring_choice"} <= set(known)
