"""`phasefold eval` as a user calls it: on artifacts and pairs, with a gate, kept results, pages, plots, a history."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import variants
from pairs import folded
from safetensors.torch import load_file, save_file
from test_eval_tools_asked import GLM

from phasefold.cli import main

SOURCE = variants.EXAMPLES / "tiny-kimi"
TASKS = ("--tasks", "docstring_cloze,docstring_choice", "--limit", "12")


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def run(*arguments: object) -> Done:
    command = [sys.executable, "-m", "phasefold", *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def made(module_path: Path) -> Iterator[dict[str, Path]]:
    """FP8, INT4, and INT4 with the scales of one expert doubled; evaluated together once."""
    found = {
        "fp8": folded(SOURCE, "kimi-prefill-fp8", module_path / "fp8"),
        "int4": folded(SOURCE, "kimi-decode-int4", module_path / "int4"),
        "broken": module_path / "broken",
    }
    shutil.copytree(found["int4"], found["broken"])
    for shard in found["broken"].glob("*.safetensors"):
        tensors = load_file(shard)
        for name in tensors:
            if ".layers.1.mlp.experts.3." in name and name.endswith("weight_scale"):
                tensors[name] *= 2
        save_file(tensors, shard, {"format": "pt"})
    yield found


@pytest.fixture(scope="module")
def evaluated(made: dict[str, Path]) -> tuple[Done, list[dict]]:
    pair = f"{made['fp8']}+{made['int4']}@fp8_e4m3"
    page = ("--report", made["int4"].parent / "page.md", "--plot", made["int4"].parent / "plot.png")
    gate = ("--require", "all>=-30,mean_kl<=0.01", "--margin", 5)
    done = run("eval", made["int4"], pair, made["broken"], "-b", SOURCE, *TASKS, *gate, *page, "--json")
    return done, json.loads(done.out)


def test_one_baseline_for_several_targets(evaluated: tuple[Done, list[dict]]) -> None:
    _, (int4, pair, _) = evaluated
    assert int4["target"]["kind"] == "checkpoint" and pair["target"]["kind"] == "pair"
    for record in (int4, pair):
        assert list(record["tasks"]) == ["docstring_cloze", "docstring_choice"]
        for task in (*record["tasks"].values(), record["all"]):
            keys = {"metric", "baseline", "value", "difference", "ci95", "p_value", "flips", "n", "floor", "smallest"}
            assert keys <= task.keys() and task["ci95"][0] <= task["difference"] <= task["ci95"][1]
            assert task["floor"]["difference"] == 0  # this CPU adds up the same numbers in other batches
        assert record["all"]["n"] == 24 and 0 < record["mean_kl"] < 0.01 < record["top1_agreement"]
        assert record["floor_proxies"]["mean_kl"]["mean"] <= 1e-6
        assert record["scores"]["docstring_choice"]["acc"]["questions"] and record["prompts"]
    assert pair["target"]["runtime"]["way"] == "pair" and pair["mean_kl"] > int4["mean_kl"]
    assert len({record["target"]["digest"] for record in (int4, pair)}) == 2


def test_the_broken_one_is_caught(evaluated: tuple[Done, list[dict]], made: dict[str, Path]) -> None:
    done, (int4, pair, broken) = evaluated
    assert done.code == 3 and f"{made['broken']}: required mean_kl<=0.01:" in done.err
    assert [all(one["held"] for one in record["required"]) for record in (int4, pair, broken)] == [True, True, False]


def test_results_are_kept_and_tell_a_history(evaluated: tuple[Done, list[dict]], made: dict[str, Path]) -> None:
    _, records = evaluated
    kept = sorted((made["int4"] / "evals").glob("*.json"))
    assert len(kept) == 2  # its own, and that of the pair that decodes by it
    assert {json.loads(path.read_text())["target"]["kind"] for path in kept} == {"checkpoint", "pair"}
    again = run("eval", made["int4"], "-b", SOURCE, *TASKS, "--no-floor", "--json")
    assert again.code == 0 and json.loads(again.out)["tasks"]["docstring_cloze"]["floor"] is None
    assert json.loads(again.out)["scores"] == records[0]["scores"]
    assert "docstring" not in again.err  # progress is no part of what scripts read
    picture = made["int4"].parent / "history.png"
    rows = json.loads(run("eval", made["int4"], "--history", "--plot", picture, "--json").out)
    assert len(rows) == 2 and picture.read_bytes().startswith(b"\x89PNG")
    shown = run("eval", made["int4"], "--history")
    assert shown.code == 0 and "docstring_choice" in shown.out
    assert run("verify", made["int4"], "--source", SOURCE).code == 0  # results are no part of the artifact


def test_pages_and_plots_are_written(evaluated: tuple[Done, list[dict]], made: dict[str, Path]) -> None:
    page = (made["int4"].parent / "page.md").read_text()
    assert page.count("\n## Tasks") == 3 and page.count("How to read") == 1 and "plot-3.png" in page
    assert (
        page.startswith("# int4, fp8 + int4 (fp8\\_e4m3 KV), broken against tiny-kimi")
        or "against tiny-kimi" in page[:120]
    )
    for number in (1, 2, 3):
        picture = made["int4"].parent / f"plot-{number}.png"
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000


def test_the_baseline_against_itself_is_not_caught(tmp_path: Path) -> None:
    gate = ("--require", "all>=-0.1,mean_kl<=0.0001")
    done = run("eval", SOURCE, "-b", SOURCE, *TASKS, *gate, "--no-floor", "--out", tmp_path)
    assert done.code == 0 and len(list((tmp_path / "evals").glob("*.json"))) == 1, done.err
    assert not (SOURCE / "evals").exists()
    proof = run("eval", SOURCE, "-b", SOURCE, *TASKS, *gate, "--no-floor", "--out", tmp_path, "--proof")
    assert proof.code == 3 and "24 questions" in proof.err  # so few cannot prove it


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "nothing to evaluate on"),
        (("--tasks", "docstring_cloze", "--repeats", 2), "none of the tasks takes answers"),
        (("--tasks", "docstring_cloze", "--gen-kwargs", "temperature=1"), "none of the tasks takes answers"),
        (("--tasks", "docstring_cloze", "--margin", 1), "no --baseline"),
        (("--tasks", "needle", "--gen-kwargs", "temperature=hot"), "make no sense"),
        (("--tasks", "needle", "--gen-kwargs", "seed=3"), "give --seed"),
        (("--tasks", "docstring_cloze", "--require", "docstring_cloze.acc_nrm.value>=0"), "no metric 'acc_nrm'"),
        (("--tasks", "docstring_cloze", "--report", "nowhere/page.md"), "folder"),
        (("--tasks", "docstring_closet"), "docstring_cloze"),
        (("--tasks", "docstring_cloze", "--require", "mmlu>=-1", "-b", SOURCE, "--limit", 2), "no 'mmlu' in this run"),
        (("--tasks", "docstring_cloze", "--require", "mmlu"), "no requirement"),
        (("--tasks", "docstring_cloze", "--proof"), "--proof"),
        (("--tasks", "docstring_cloze", "--margin", "-1"), "--margin"),
        (("--tasks", "docstring_cloze", "--metadata", "[]"), "--metadata"),
        (("--tasks", "docstring_cloze", "--gen-kwargs", "hot"), "--gen-kwargs"),
        (("--text", "x.txt"), "give --baseline"),
        (("--history", "--tasks", "docstring_cloze"), "--history"),
        (("--tasks", "docstring_cloze", "--device", "cuda:7"), "cuda:7"),
    ],
)
def test_wrong_usage_is_one_line(arguments: tuple, reason: str, tmp_path: Path, monkeypatch, capsys) -> None:
    assert _refused(monkeypatch, SOURCE, "--out", tmp_path, *arguments) == 2
    said = capsys.readouterr().err
    assert reason in said and said.count("\n") == 1, said


def test_a_server_needs_a_place_for_results(monkeypatch, capsys) -> None:
    assert _refused(monkeypatch, "http://127.0.0.1:9/v1", *TASKS) == 2
    assert "--out" in capsys.readouterr().err


def test_a_full_disk_loses_no_result(tmp_path: Path, monkeypatch, capsys) -> None:
    def full(path: Path, data: bytes) -> None:
        path.with_name(path.name + ".partial").write_bytes(data[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("phasefold.evals.record.atomic_write", full)
    asked = ("--tasks", "docstring_cloze", "--limit", 2, "--out", tmp_path)
    assert _refused(monkeypatch, SOURCE, *asked) == 1
    shown = capsys.readouterr()
    assert "docstring_cloze" in shown.out and "cannot be written (No space left on device)" in shown.err
    assert not list((tmp_path / "evals").iterdir())  # nothing that looks like a record


def _refused(monkeypatch, *arguments: object) -> object:
    """In this process, which has imported what takes seconds to import."""
    monkeypatch.setattr(sys, "argv", ["phasefold", "eval", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_text_of_ones_own(made: dict[str, Path], tmp_path: Path) -> None:
    text = tmp_path / "some.txt"
    text.write_text("Return the number of items in the queue. " * 200)
    done = run("eval", made["fp8"], "-b", SOURCE, "--text", text, "--tokens", 500, "--json", "--out", tmp_path)
    record = json.loads(done.out)
    assert done.code == 0 and record["tasks"] == {} and record["all"] is None
    assert record["settings"]["text"]["name"] == "some.txt" and 250 <= record["settings"]["text"]["tokens"] <= 600
    assert 0 < record["mean_kl"] < 0.01


def test_tool_calls_from_requests_to_page(tmp_path: Path) -> None:
    """Both ways to a baseline: a model, and a file of answers. The fixture calls nothing; that is a number too."""
    model, asked = tmp_path / "glm", tmp_path / "requests.jsonl"
    shutil.copytree(variants.EXAMPLES / "tiny-glm4", model)
    (model / "chat_template.jinja").write_text(GLM)
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    with asked.open("w") as file:
        for letter in "abcdef":
            said = [{"role": "user", "content": f"Return the {letter}"}]
            print(json.dumps({"messages": said, "tools": [tool], "max_tokens": 4}), file=file)
    common = ("--tool-calls", asked, "--gen-kwargs", "temperature=0", "--out", tmp_path)
    page, kept = tmp_path / "page.md", tmp_path / "answers.jsonl"
    first = run("eval", model, "-b", model, *common, "--answers-out", kept, "--report", page, "--limit", 5)
    assert first.code == 0 and "tool calls, 5 requests" in first.out, first.err
    assert "## Tool calls" in page.read_text() and len(kept.read_text().splitlines()) == 5
    again = run("eval", model, *common, "--answers", kept, "--limit", 5, "--json")
    told = json.loads(again.out)["tool_calls"]
    assert told["triggers"]["compared"] == 5 and told["trigger_rate"]["mean"] == 0 and told["f1"] is None
    gate = run("eval", model, *common, "--answers", kept, "--require", "tool_calls.f1>=80", "--limit", 5)
    assert gate.code == 2 and "none to compare with" in gate.err
