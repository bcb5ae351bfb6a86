"""Pages, pictures and tables of records: what they say, that nothing breaks them, that nothing lies over anything."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import made_records as made
import numpy as np
import pytest

from phasefold.cli import draw_evals
from phasefold.errors import EvalError, LoadError, UsageError
from phasefold.evals import drawing, plot, plot_history
from phasefold.evals.history import history
from phasefold.evals.outcome import headline, rows, sentence, standing, wrapped
from phasefold.evals.report import escape, markdown, model_card_table, overview

LONG = "mmlu_professional_medicine_with_a_very_long_name_indeed"
HOSTILE = "a|b`c*[d](x)\n# $e$ <b>&amp; \x1b[31m_f_ \u6f22"


def wikitext(seed: int) -> made.TaskScores:
    base = np.random.default_rng(8).gamma(5, 2, 200)
    after = base + np.random.default_rng(seed).normal(0.1, 0.2, 200) if seed else base
    return made.task("wikitext", after, metric="word_perplexity", kind="loglikelihood_rolling", upward=False)


def several(names: list[str], *, margin: float | None = 0.01, seed: int = 5, **more: Any) -> dict[str, Any]:
    """A record of many tasks, one of them in another unit, three of them a group, on a pair."""
    rng = np.random.default_rng(4)
    sizes = {
        name: (int(rng.integers(150, 900)), float(rng.uniform(0.3, 0.9)), float(rng.uniform(0.01, 0.06)), 0.01)
        for name in names
    }
    runs = []
    for run, number in zip(made.runs(sizes, seed), (1, 0, 0), strict=True):
        tasks = {**run.tasks, "wikitext": (wikitext(number),)}
        runs.append(made.Harvest(tasks, {"reasoning": tuple(names[:3])}, (), {names[0]: 3}, run.versions))
    name = "art/glm4-fp8+art/glm4-g32@kv.json"
    return made.record(*runs, margin=margin, **{"name": name, "required": f"{names[0]}>=-0.3", **more})


@pytest.fixture(scope="module")
def records() -> dict[str, dict[str, Any]]:
    three = made.runs(made.THREE, 1)
    return {
        "three": made.record(*three, required="all>=-0.3,mean_kl<=0.04", tool_calls=made.tool_calls()),
        "margin": made.record(*three, margin=0.02),
        "one": made.record(*made.runs({"docstring_choice": (600, 0.7, 0.012, 0.014)}, 3), margin=0.01),
        "twelve": several([f"task_number_{number}" for number in range(11)] + [LONG]),
        "alone": made.record(three[0], tool_calls=made.tool_calls(baseline=False)),
        "few": made.record(*(made.harvest(made.task("p", [x], metric="ppl")) for x in (3.0, 2.0, 2.0)), kl=None),
        "hostile": several([HOSTILE, "b", "c"], required="b>=0"),
    }


# --- words


def test_the_outcome_is_said_as_it_is() -> None:
    def said(lost: int, gained: int, margin: float | None, n: int = 1000) -> str:
        before = np.array([1.0] * (n // 2) + [0.0] * (n // 2))
        after = before.copy()
        after[:lost], after[n // 2 : n // 2 + gained] = 0, 1
        return headline(
            made.record(*(made.harvest(made.task("t", x)) for x in (after, before)), margin=margin, kl=None)
        )

    assert said(40, 2, None) == "glm4-g32 is surely worse than tiny-glm4 on t"
    assert said(12, 10, None) == said(2, 40, None) == "No loss of glm4-g32 against tiny-glm4 is seen on the one task"
    assert said(80, 2, 0.01) == "glm4-g32 is worse than tiny-glm4 by more than 1 point on t"
    assert said(12, 10, 0.005) == "Whether glm4-g32 is within 0.5 points of tiny-glm4 cannot be told on t"
    assert said(12, 10, 0.02) == "glm4-g32 is not worse than tiny-glm4 by 2 points on the one task"


def test_a_sure_loss_within_the_margin_is_told() -> None:
    before = np.array([1.0] * 500 + [0.0] * 500)
    after = before.copy()
    after[:15] = 0
    record = made.record(*(made.harvest(made.task("t", x)) for x in (after, before)), margin=0.05, kl=None)
    assert record["tasks"]["t"]["verdict"] == "not worse"
    assert "is not worse" in sentence(record) and "a loss is sure on t" in sentence(record)


def test_the_sentence_names_the_worst_and_what_could_not_be_seen(records: dict[str, dict[str, Any]]) -> None:
    found = records["three"]
    said = sentence(found)
    assert "the worst task, docstring_cloze, differs by -1.50 points (95 % -3.74 to +0.74)" in said
    assert "what is smaller than 2.6 to 3.9 points would mostly not be seen" in said
    assert "required and missed: all>=-0.3." in said and "mean KL is 0.01978 nats a token" in said
    assert "all that was required holds" in sentence(records["twelve"]) or "missed" in sentence(records["twelve"])
    assert sentence(records["alone"]) == "glm4-g32 on 3 tasks, without a baseline."


def test_groups_stand_before_their_tasks(records: dict[str, dict[str, Any]]) -> None:
    names = [name for name, _ in rows(records["twelve"])]
    assert names[:4] == ["reasoning", "task_number_0", "task_number_1", "task_number_2"] and names[-1] == "all"
    assert len(names) == len(set(names)) == 15
    assert [name for name, _ in rows(records["one"])] == ["docstring_choice"]


def test_a_rise_is_a_loss_where_lower_is_better(records: dict[str, dict[str, Any]]) -> None:
    for part in (1, -1):
        found = records["twelve"]["tasks"]["wikitext"]
        assert found["difference"] > 0
        ends = found["ci95"] if part == 1 else [-end for end in found["ci95"][::-1]]
        turned = found | {"difference": part * found["difference"], "ci95": ends}
        assert standing(turned) == ("surely worse" if part == 1 else "surely better")


def test_long_names_are_broken_and_nothing_is_lost() -> None:
    assert wrapped("docstring_choice", 30) == ["docstring_choice"]
    assert wrapped(LONG, 30) == ["mmlu_professional_medicine_", "with_a_very_long_name_indeed"]
    for width in (8, 13, 21):
        assert "".join(wrapped(LONG, width)) == LONG and max(map(len, wrapped("x" * 50, width))) == width


# --- the page


def tables(page: str) -> list[list[list[str]]]:
    """Of the page's tables the cells, by GitHub's rule: | that no backslash stands before."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", page, re.MULTILINE)
    return [[re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()] for block in blocks]


def test_every_table_is_even(records: dict[str, dict[str, Any]]) -> None:
    for name, record in records.items():
        for text in (markdown(record, plot="a (b).png"), model_card_table(record)):
            assert tables(text), name
            for table in tables(text):
                assert len({len(row) for row in table}) == 1 and len(table) > 2, (name, table)
            assert "None" not in text and "nan" not in text.lower().split() and "\x1b" not in text
            assert len(re.findall(r"^# ", text.partition("\n```")[0], re.MULTILINE)) <= 1


def test_the_page_says_what_the_record_holds(records: dict[str, dict[str, Any]]) -> None:
    record = records["three"]
    page = markdown(record, plot="three.png")
    assert page.startswith(f"# glm4-g32 against tiny-glm4\n\n**{escape(sentence(record))}**\n\n![")
    assert "(<three.png>)" in page and "a1b2a1b2a1b2" in page and "6,425,024 bytes" in page
    task = next(row for row in tables(page)[0] if "docstring_choice" in row[0])
    assert [cell.strip() for cell in task] == [
        "docstring_choice", "acc", "600", "70.33", "69.00", "-1.33", "-3.19 to +0.52", "19 / 11", "0.200", "2.55",
        "no difference seen", "+0.33 (-0.49 to +1.16)",
    ]  # fmt: skip
    assert "| all&gt;=-0.3 | **MISSED** |" in page and "lm_eval 0.4.13" in page and "seed 0" in page
    assert "On all the baseline differs from itself by more than its interval" in page
    assert f"```sh\n{record['command']}\n```" in page
    told = record["tool_calls"]
    assert (
        f"F1 {100 * told['f1']['mean']:.4g} (" in page and f"against itself {100 * told['floor']['mean']:.4g} (" in page
    )
    kinds = told["target"]["failures"]["schema"]["count"], told["baseline"]["failures"]["schema"]["count"]
    assert all(kinds) and f"| schema | {kinds[0]} | {kinds[1]} |" in page
    assert page.count("\n* ") == 3
    noted = markdown(record | {"notes": ["t: few-shot | 5"]}, plot=None)
    assert "\n* t: few-shot \\| 5\n" in noted
    assert "lower is better" in markdown(records["twelve"], plot=None)
    assert "fp8_e4m3" in (pair := markdown(records["twelve"], plot=None)) and "task_number_0 3 requests" in pair
    alone = markdown(records["alone"], plot=None)
    assert "Without a baseline" in alone and "65.30 to 72.68" in alone and "![" not in alone


def test_what_comes_from_outside_breaks_nothing() -> None:
    assert escape("docstring_choice") == "docstring_choice"
    assert escape("_a_b_") == "\\_a_b\\_"
    assert escape("a|b\n<i>`x`*&") == "a\\|b &lt;i&gt;\\`x\\`\\*&amp;"
    assert escape("\x1b[0m") == "\\\\x1b\\[0m"
    record = made.record(*made.runs(made.THREE, 1)) | {"command": "a ``` b\nc"}
    assert "````sh\na ``` b\nc\n````" in markdown(record, plot=None)


def test_the_table_for_a_model_card_is_short(records: dict[str, dict[str, Any]]) -> None:
    text = model_card_table(records["three"])
    assert "| docstring_choice | acc | 600 | 70.33 | 69.00 | -1.33 (-3.19 to +0.52) |" in text
    assert "Mean KL 0.01978" in text and "lm-eval 0.4.13" in text and len(text.splitlines()) == 8


def test_several_targets_stand_side_by_side(
    records: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    other = made.record(*made.runs(made.THREE, 2), name="art/glm4-fp8+art/glm4-g32@kv.json", required="all>=-9")
    page = overview([records["three"], other])
    scores, text = tables(page)
    cells = [[cell.strip() for cell in row] for row in scores[2:]]
    assert [row[0] for row in cells[::3]] == [*made.THREE, "all"]
    assert cells[0][:4] == ["docstring_choice", "tiny-glm4", "600", "70.33"]
    assert cells[1][1:6] == ["glm4-g32", "600", "69.00", "-1.33", "-3.19 to +0.52"]
    assert cells[2][1] == "glm4-fp8 + glm4-g32 (fp8_e4m3 KV)"
    assert [row[-1].strip() for row in text[2:]] == ["MISSED", "held", ""] and "12.85 MB" in text[3][1]
    assert text[2][2].strip() == "0.0198 (0.0186 to 0.021)" and text[4][0].strip() == "baseline against itself"
    draw_evals.overview([records["three"], other])
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 100 and "fp8_e4m3" in said
    assert all(len({len(row) for row in table}) == 1 for table in tables(overview(list(records.values()))))


# --- pictures


def overlaps(sheet: drawing.Sheet) -> list[tuple[str, str]]:
    """Pairs of texts that lie over each other, and texts that leave the page."""
    sheet.figure.canvas.draw()
    page = sheet.figure.bbox
    found: list[tuple[str, str]] = []
    texts = [*sheet.figure.texts, *(text for legend in sheet.figure.legends for text in legend.get_texts())]
    for axes in sheet.figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            texts += [axis.label, *ticks]
    assert not [text for text in texts if "$" in text.get_text() and text.get_parse_math()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text().strip()]
    for text, box in boxes:
        if box.x0 < 0 or box.y0 < 0 or box.x1 > page.x1 or box.y1 > page.y1:
            found.append((text, "the edge"))
    for (one, first), (two, second) in itertools.combinations(boxes, 2):
        wide = min(first.x1, second.x1) - max(first.x0, second.x0)
        high = min(first.y1, second.y1) - max(first.y0, second.y0)
        if wide > 1 and high > 1:
            found.append((one, two))
    return found


def test_nothing_lies_over_anything(records: dict[str, dict[str, Any]]) -> None:
    for name, record in records.items():
        assert not overlaps(plot.drawn(record)), name


def runs_over_time(count: int, tasks: int) -> list[dict[str, Any]]:
    sizes = {f"task_{n}_{LONG[: 5 * n]}": (200 + n, 0.6, 0.03, 0.02) for n in range(tasks)}
    return [
        made.record(
            *made.runs(sizes, number), digest="a1b2" if number < count // 2 else "c3d4", kl=0.02 + number / 1000,
            versions={"torch": "2.9" if number < 2 else "2.10", "lm_eval": "0.4.13" if number < 1 else "0.4.14"},
            started=f"2026-11-{number + 1:02}T10:40:00+00:00",
        ) for number in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize(("count", "tasks"), [(1, 1), (4, 3), (30, 1), (3, 12)])
def test_nothing_lies_over_anything_over_time(count: int, tasks: int) -> None:
    assert not overlaps(plot_history.drawn(runs_over_time(count, tasks)))


def test_pictures_are_written(tmp_path: Path, records: dict[str, dict[str, Any]]) -> None:
    for name, record in records.items():
        plot.plot_record(record, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    plot.plot_history(list(records.values()), tmp_path / "history.png")  # runs of other tasks, and without a baseline
    plot.plot_record(records["one"], tmp_path / "one.svg")
    assert b"<svg" in (tmp_path / "one.svg").read_bytes() and not list(tmp_path.glob("*.partial"))


def test_where_nothing_can_be_drawn_it_is_said(tmp_path: Path, records: dict[str, dict[str, Any]]) -> None:
    with pytest.raises(UsageError, match=r"\.png"):
        plot.plot_record(records["one"], tmp_path / "one.gif")
    with pytest.raises(UsageError, match=r"\.png"):
        plot.plot_history([records["one"]], tmp_path / "one")
    with pytest.raises(EvalError, match="no runs"):
        plot.plot_history([], tmp_path / "one.png")
    empty = records["one"] | {"tasks": {}, "proxies": None, "mean_kl": None, "all": None}
    for draw in (
        lambda: plot.plot_record(empty, tmp_path / "e.png"),
        lambda: plot.plot_history([empty], tmp_path / "e.png"),
    ):
        with pytest.raises(EvalError, match="nothing to draw"):
            draw()
    with pytest.raises(EvalError, match="cannot be written"):
        plot.plot_record(records["one"], tmp_path / "gone" / "one.png")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, records: dict[str, dict[str, Any]]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(LoadError, match=r"pip install 'phasefold\[plot\]'"):
        plot.drawn(records["one"])


def test_a_page_needs_no_matplotlib() -> None:
    code = (
        "import sys; from phasefold.cli import draw_evals;"
        "from phasefold.evals import history, plot, record, report, require;"
        "assert not {'matplotlib', 'torch', 'lm_eval', 'transformers'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the command line's tables


def test_tables_fit_a_hundred_columns(records: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    for name, record in records.items():
        draw_evals.record(record)
        said = capsys.readouterr().out
        lines = said.splitlines()
        assert lines[0] == draw_evals.clean(sentence(record)) and "\x1b" not in said
        tables_only = [line for line in lines[1:] if not line.startswith(("required", "note"))]
        assert max(map(len, tables_only)) <= 100, name
    draw_evals.history(history([records["three"], records["margin"], records["twelve"], records["alone"]]))
    said = capsys.readouterr().out
    assert "2. 2026-11-30 10:40 glm4-g32 against tiny-glm4" in said and "   changed: artifact: " in said
    assert max(len(line) for line in said.splitlines() if "changed" not in line) <= 100
    draw_evals.history([])
    assert capsys.readouterr().out == "no runs yet\n"


def test_the_table_says_what_the_record_holds(
    records: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    draw_evals.record(records["three"])
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if line.startswith("docstring_choice"))
    assert line.split() == [
        "docstring_choice", "600", "70.33", "69.00", "-1.33", "-3.19", "to", "+0.52", "19/11", "0.200", "2.55", "+0.33",
        "none", "seen",
    ]  # fmt: skip
    draw_evals.record(records["three"] | {"notes": ["t: few-shot"]})
    assert "note: t: few-shot\n" in capsys.readouterr().out
    assert "required all>=-0.3: MISSED: all is -1.143 points" in said
    assert f"F1 {100 * records['three']['tool_calls']['f1']['mean']:.4g} (" in said


def test_progress_is_told_in_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with draw_evals.progress(quiet=False) as advance:
        for stage, done in (("baseline: tasks", 0), ("baseline: tasks", 5), ("target: tasks", 0), ("target: tasks", 2)):
            advance(stage, done)
    assert capsys.readouterr().err == "baseline: tasks\ntarget: tasks\n"
    with draw_evals.progress(quiet=True) as advance:
        advance("baseline", 3)
    assert capsys.readouterr().err == ""


def test_the_headline_says_what_was_missed_and_what_only_the_text_shows(records: dict[str, dict[str, Any]]) -> None:
    missed = headline(records["three"])
    assert missed == "glm4-g32 misses what was required of it against tiny-glm4: all>=-0.3"
    record = json.loads(json.dumps(records["three"] | {"required": []}))
    record["proxies"]["ratio"] |= {"mean": 1.0381, "low": 1.03, "high": 1.045}
    record["floor_proxies"]["ratio"] |= {"mean": 1.0, "low": 0.999, "high": 1.001}
    assert headline(record).endswith("is seen on any of 3 tasks, but its perplexity is 3.8 % higher")
    record["floor_proxies"]["ratio"]["high"] = 1.035  # no more than the noise
    assert headline(record).endswith("is seen on any of 3 tasks")
