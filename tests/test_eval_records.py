"""The record on disk, the gate, and the history."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import made_records as made
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasefold.errors import EvalError, UsageError
from phasefold.evals.history import changed, history, like
from phasefold.evals.record import FOLDER, make_ready, read_record, read_records, to_bytes, write_record
from phasefold.evals.require import PROXIES, TOOLS, check_names, judge, parse


@pytest.fixture(scope="module")
def three() -> dict[str, Any]:
    return made.record(*made.runs(made.THREE, 1), margin=0.02)


# --- kept


def test_what_is_written_is_read_again_in_order_of_time(tmp_path: Path, three: dict[str, Any]) -> None:
    assert read_records(tmp_path) == []
    times = (
        "2026-11-30T10:40:00+00:00",
        "2026-11-30T10:40:00Z",
        "2026-11-29T23:30:00-12:00",
        "2026-11-30T12:39:59+02:00",
    )
    paths = {time: write_record(tmp_path, three | {"started": time, "seconds": 1.5}) for time in times}
    assert len({*paths.values()}) == 4 and {path.parent for path in paths.values()} == {tmp_path / FOLDER}
    names = [path.name for path in paths.values()]
    assert names[0].startswith("20261130T104000Z-") and names[2].startswith("20261130T113000Z-")
    assert names[3].startswith("20261130T103959Z-") and all(len(name.split("-")[1]) == 13 for name in names)
    (tmp_path / FOLDER / "report.md").write_text("a page")
    (tmp_path / FOLDER / ".hidden.json").write_text("no record")
    found = read_records(tmp_path)
    assert [record["started"] for _, record in found][::3] == [times[3], times[2]]
    assert dict(found)[paths[times[1]]] == json.loads(json.dumps(three)) | {"started": times[1], "seconds": 1.5}
    assert paths[times[0]].stat().st_mode & 0o777 == 0o644


def test_a_record_is_written_once_and_never_over_another(tmp_path: Path, three: dict[str, Any]) -> None:
    path = write_record(tmp_path, three)
    stamp = path.stat().st_mtime_ns
    assert write_record(tmp_path, three) == path and path.stat().st_mtime_ns == stamp
    path.write_text("mine")
    with pytest.raises(EvalError, match="never overwritten"):
        write_record(tmp_path, three)
    assert path.read_text() == "mine"
    assert [each.name for each in path.parent.iterdir()] == [path.name]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


def nulled(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: nulled(each) for name, each in value.items()}
    return [nulled(each) for each in value] if isinstance(value, list) else value


@given(st.dictionaries(st.text(), JSON, min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_any_object_goes_there_and_back(value: dict[str, Any]) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(to_bytes(value), parse_constant=refuse) == nulled(value)


def test_numbers_of_numpy_are_no_json_and_said_so() -> None:
    with pytest.raises(TypeError):
        to_bytes({"a": np.int64(3)})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "is no JSON"),
        (b"\xff{}", "is no JSON"),
        (b'{"version": NaN}', "NaN in it"),
        (b"[" * 100_000, "is no JSON"),
        (b"[]", "no version 1"),
        (b"{}", "no version 1"),
        (b'{"version": 2}', "of version 2, this phasefold reads up to 1"),
        (b'{"version": 1}', "no started"),
        (b'{"version": "1"}', "no version 1"),
    ],
)
def test_what_is_no_record_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "x.json").write_bytes(content)
    with pytest.raises(EvalError, match=r"x\.json") as error:
        read_records(tmp_path)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_damaged_records_are_refused_before_a_table_is(tmp_path: Path, three: dict[str, Any]) -> None:
    path = tmp_path / "x.json"

    def fault(**other: Any) -> str:
        path.write_bytes(to_bytes(three | other))
        with pytest.raises(EvalError) as error:
            read_record(path)
        return str(error.value)

    task = three["tasks"]["needle_recall"]
    assert "started" in fault(started="yesterday") and "time zone" in fault(started="2026-11-30T10:40:00")
    assert "no scores" in fault(scores=None) and "needle_recall: no n" in fault(
        tasks={"needle_recall": task | {"n": "1"}}
    )
    assert "no ci95" in fault(tasks={"t": {k: v for k, v in task.items() if k != "ci95"}})
    assert "all: no value" in fault(all=task | {"value": None})
    path.write_bytes(to_bytes(three))
    assert read_record(path) == json.loads(to_bytes(three))


def test_where_nothing_can_be_kept_is_said_before_the_work(tmp_path: Path, three: dict[str, Any]) -> None:
    make_ready(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder" / FOLDER).is_dir()
    (tmp_path / FOLDER).write_text("a file")
    with pytest.raises(EvalError, match="evals: cannot be made"):
        write_record(tmp_path, three)


def test_a_folder_without_rights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(EvalError, match="evals: cannot be written"):
        make_ready(tmp_path)


# --- the gate: reading it

NAMES = st.one_of(
    st.from_regex(r"[a-z0-9_]+(\.[a-z_0-9]+(,[a-z-]+)?)?", fullmatch=True),
    st.sampled_from([*PROXIES, "all", "all.value"]),
)
NUMBERS = st.floats(-1e6, 1e6).map(lambda x: repr(round(x, 4)))
ONE = st.tuples(NAMES, st.sampled_from([">=", "<=", ">", "<"]), NUMBERS).filter(
    lambda one: not (one[0] == "top1_agreement" and 0 < float(one[2]) <= 1)
)


@given(st.lists(st.tuples(ONE, st.sampled_from(["", " ", "  "])), min_size=1, max_size=5))
@settings(max_examples=200, deadline=None)
def test_requirements_are_read_as_they_are_written(given_: list[tuple[tuple[str, str, str], str]]) -> None:
    text = ",".join(
        f"{space}{name}{space}{operator}{space}{number}{space}" for (name, operator, number), space in given_
    )
    found = parse(text)
    assert [(one.name, one.operator, one.threshold) for one in found] == [(a, b, float(c)) for (a, b, c), _ in given_]
    assert [one.text for one in found] == ["".join(one) for one, _ in given_]


@given(st.text("ab.,<>=-01 ", max_size=20))
@settings(max_examples=300, deadline=None)
def test_nothing_else_is_taken_for_one(text: str) -> None:
    try:
        found = parse(text)
    except UsageError as error:
        assert "--require" in str(error)
        return
    assert ",".join(one.text for one in found) == ",".join(part.replace(" ", "") for part in text.split(",")) or any(
        " " in one.name for one in found
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("  ", "at character 1"),
        ("mmlu", "at character 1, 'mmlu'"),
        ("mmlu>=-0.3,", "ends in a comma"),
        ("mmlu>=-0.3,,a>1", "at character 12, ',a>1'"),
        ("mmlu>=-0.3,mean_kl<=x", "at character 12, 'mean_kl<=x'"),
        ("mmlu=-0.3", "at character 1"),
        ("mmlu==1", "at character 1"),
        ("mmlu=>1", "at character 1"),
        ("mmlu>=nan", "at character 1"),
        ("mmlu>=inf", "at character 1"),
        ("mmlu>=", "at character 1"),
        (">=1", "at character 1"),
        ("mmlu>=1e400", "at character 1"),
        ("top1_agreement>=0.99", "say top1_agreement>=99"),
        ("tool_calls.f1>=0.8", "say tool_calls.f1>=80"),
        ("tool_calls.schema_accuracy>=1", "say tool_calls.schema_accuracy>=100"),
    ],
)
def test_what_is_no_requirement_is_shown(text: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(text)
    assert said in str(error.value)


def test_commas_within_names_are_no_ends() -> None:
    found = parse("mmlu>=-0.3, gsm8k.exact_match,strict-match >= -1 ,mean_kl<=4e-2")
    assert [one.name for one in found] == ["mmlu", "gsm8k.exact_match,strict-match", "mean_kl"]


def test_names_are_checked_before_the_run() -> None:
    tasks = {"mmlu": ["acc"], "arc.v2": ["acc", "exact_match,strict"], "arc": ["acc"]}
    check_names(parse("mmlu>=0,all>=0,arc.v2.acc>=0,arc.acc.value>=7,mean_kl<1,tool_calls.f1>=90"), tasks)
    with pytest.raises(UsageError, match=r"no 'mmlu2' in this run; there is mmlu, arc\.v2, arc, all"):
        check_names(parse("mmlu2>=0"), tasks)
    with pytest.raises(UsageError, match="no 'mmlu,arc'"):
        check_names(parse("mmlu,arc>=0"), tasks)
    check_names(parse("arc.v2.exact_match,strict>=0,all.value>=7"), tasks)
    with pytest.raises(UsageError, match=r"arc has no metric 'acc_nrm'; it has acc"):
        check_names(parse("arc.acc_nrm>=0"), tasks)
    with pytest.raises(UsageError, match=r"say mmlu\.value>="):
        check_names(parse("mmlu>=0"), tasks, baseline=False)
    check_names(parse("mmlu.value>=70"), tasks, baseline=False)
    for lacking in ({"baseline": False}, {"proxies": False}):
        with pytest.raises(UsageError, match="against a --baseline"):
            check_names(parse("mean_kl<=1"), tasks, **lacking)
    with pytest.raises(UsageError, match="needs --tool-calls"):
        check_names(parse("tool_calls.f1>=1.5"), tasks, tool_calls=False)


# --- the gate: judging


def outcome(text: str, record: dict[str, Any], proof: bool = False) -> dict[str, Any]:
    (found,) = judge(parse(text), record, proof=proof)
    assert found["text"] == text and "\n" not in found["reason"]
    return found


def fixed(lost: int, gained: int, n: int = 1000) -> dict[str, Any]:
    before = np.array([1.0] * (n // 2) + [0.0] * (n // 2))
    after = before.copy()
    after[:lost], after[n // 2 : n // 2 + gained] = 0, 1
    return made.record(*(made.harvest(made.task("t", x)) for x in (after, before)))


def test_points_are_exact_at_the_threshold() -> None:
    for lost in range(1, 60):
        record = fixed(lost, 0)
        text = f"{lost / 10:g}"
        assert outcome(f"t>=-{text}", record)["held"] and not outcome(f"t>-{text}", record)["held"]
        assert outcome(f"t<=-{text}", record)["held"] and not outcome(f"t<-{text}", record)["held"]
        assert outcome(f"t.value>={50 - lost / 10:g}", record)["held"]
        assert not outcome(f"t.value>{50 - lost / 10:g}", record)["held"]


def test_held_by_the_estimate_and_sure_by_the_interval() -> None:
    record = fixed(20, 10)  # -1 point
    low, high = (100 * end for end in record["tasks"]["t"]["ci95"])
    assert low < -1 < high < 0.5
    holds = outcome("t>=-1.5", record)
    assert holds["held"] and not holds["sure"] and holds["value"] == pytest.approx(-1)
    assert "t is -1 points (95 % -2." in holds["reason"] and "1,000 questions" in holds["reason"]
    seen = 100 * record["tasks"]["t"]["smallest"]
    assert f"so many questions see a difference of {seen:.2g} points" in holds["reason"]
    shown = outcome("t>=-1.5", record, proof=True)
    assert not shown["held"] and "is not shown" in shown["reason"]
    for proof in (False, True):
        surely = outcome("t>=-2.5", record, proof)
        assert surely["held"] and surely["sure"] and "see a difference" not in surely["reason"]
        assert not outcome("t>=-0.5", record, proof)["held"]
    might = outcome("t>=-0.5", record)
    assert "though by the interval it might" in might["reason"] and "see a difference" in might["reason"]
    cannot = outcome("t>=0.5", record)
    assert not cannot["held"] and cannot["reason"].endswith(">= 0.5 does not hold")
    assert outcome("t<=0", record)["held"] and not outcome("t<=0", record, proof=True)["held"]
    assert outcome("t<=0.3", record, proof=True)["held"]


def test_proxies_are_judged_by_name(three: dict[str, Any]) -> None:
    for name, key in PROXIES.items():
        found = three["proxies"][key]
        mean = found["mean"] if isinstance(found, dict) else found
        scale = 100 if name == "top1_agreement" else 1
        assert outcome(f"{name}>{scale * mean * 0.9:.6f}", three)["value"] == pytest.approx(scale * mean)
        assert not outcome(f"{name}<{scale * mean * 0.9:.6f}", three)["held"]
    high = three["proxies"]["mean_kl"]["high"]
    assert outcome(f"mean_kl<={high * 1.01:.6f}", three, proof=True)["sure"]
    assert not outcome(f"mean_kl<={high * 0.99:.6f}", three, proof=True)["sure"]
    largest = outcome(f"max_kl<={three['proxies']['max_kl'] * 2}", three, proof=True)
    assert largest["held"] and largest["sure"] and "a maximum has no interval" in largest["reason"]
    assert "4,000 tokens of 100 documents" in largest["reason"]


def test_a_loss_is_below_zero_whichever_way_is_better() -> None:
    worse = made.harvest(made.task("wrong", [1.0] * 90 + [0.0] * 10, metric="error_rate", upward=False))
    base = made.harvest(made.task("wrong", [0.0] * 90 + [0.0] * 10, metric="error_rate", upward=False))
    record = made.record(worse, base)
    assert record["tasks"]["wrong"]["difference"] == pytest.approx(0.9)
    found = outcome("wrong>=-5", record)
    assert not found["held"] and found["value"] == pytest.approx(-90)
    assert outcome("wrong>=-95", record, proof=False)["held"] and not outcome("wrong.value<=50", record)["held"]
    assert outcome("wrong>=-5", made.record(base, worse), proof=True)["held"]


def test_other_metrics_groups_and_all() -> None:
    rng = np.random.default_rng(1)
    bits = [rng.integers(0, 2, 50) for _ in range(4)]
    target, baseline = (
        made.harvest(
            made.task("t", x),
            made.task("t", rng.random(50), metric="exact_match,strict-match"),
            made.task("u", y),
            made.task("p", 3 + rng.random(20), metric="ppl", upward=False),
            groups={"both": ("t", "u")},
        )
        for x, y in (bits[:2], bits[2:])
    )
    record = made.record(target, baseline)
    tasks = record["tasks"]
    expected = {
        "t": 100 * tasks["t"]["difference"],
        "t.acc": 100 * tasks["t"]["difference"],
        "t.value": 100 * tasks["t"]["value"],
        "t.exact_match,strict-match": 100 * tasks["t"]["metrics"]["exact_match,strict-match"]["difference"],
        "t.exact_match,strict-match.value": 100 * tasks["t"]["metrics"]["exact_match,strict-match"]["value"],
        "both": 100 * tasks["both"]["difference"],
        "all": 100 * record["all"]["difference"],
        "all.value": 100 * record["all"]["value"],
        "p": -tasks["p"]["difference"],  # lower is better: more of it is a loss
        "p.value": tasks["p"]["value"],
    }
    for name, value in expected.items():
        assert outcome(f"{name}>=-99", record)["value"] == pytest.approx(value), name
    assert outcome("p.value>=0.5", record)["held"]  # no share, so 0.5 is what it says
    record["tasks"]["t.v2"] = record["tasks"]["u"]  # the longest name that fits is meant
    assert outcome("t.v2>=-99", record)["value"] == outcome("t.v2.acc>=-99", record)["value"]
    record["tasks"].pop("t.v2")
    with pytest.raises(UsageError, match=r"say t\.value>=70"):
        outcome("t.value>=0.7", record)
    with pytest.raises(UsageError, match="t has no metric 'f1'; it has acc, exact_match,strict-match"):
        outcome("t.f1>=0", record)
    with pytest.raises(UsageError, match="no 'x' in this run; there is t, u, p, both, all, mean_kl"):
        outcome("x>=0", record)


def test_what_was_not_measured_is_said() -> None:
    alone = made.record(made.runs(made.THREE, 1)[0])
    with pytest.raises(UsageError, match=r"no baseline; say all\.value"):
        outcome("all>=0", alone)
    assert outcome("docstring_choice.value>=60", alone)["held"]
    with pytest.raises(UsageError, match="compared no distributions"):
        outcome("mean_kl<=0", alone)
    with pytest.raises(UsageError, match="asked for no tool calls"):
        outcome("tool_calls.f1>=90", alone)
    units = made.record(made.harvest(made.task("p", [3.0], metric="ppl")))
    with pytest.raises(UsageError, match=r"no 'all\.value' in this run; there is p"):
        outcome("all.value>=70", units)


def test_a_question_without_an_interval_is_never_sure() -> None:
    runs = [made.harvest(made.task("p", [x], metric="ppl")) for x in (3.0, 2.0)]
    found = outcome("p>=0.5", made.record(*runs))
    assert found["held"] and not found["sure"] and "too few for an interval" in found["reason"]


def test_tool_calls_are_judged_in_points() -> None:
    told = made.tool_calls()
    record = made.record(made.harvest(made.task("t", [1, 0])), tool_calls=told)
    for name, key in zip(TOOLS, ("f1", "schema_accuracy"), strict=True):
        share = 100 * told[key]["mean"]
        assert 70 < share < 99
        found = outcome(f"{name}>={share - 0.01:.4f}", record)
        assert found["held"] and not found["sure"] and found["value"] == pytest.approx(share)
        assert outcome(f"{name}>={100 * told[key]['low'] - 0.1:.4f}", record)["sure"]
        assert not outcome(f"{name}>={share + 0.01:.4f}", record)["held"]
    assert "199 requests" in outcome("tool_calls.f1>=84", record)["reason"]
    alone = made.record(made.harvest(made.task("t", [1, 0])), tool_calls=made.tool_calls(baseline=False))
    with pytest.raises(UsageError, match="none to compare with"):
        outcome("tool_calls.f1>=84", alone)
    silent = made.record(made.harvest(made.task("t", [1, 0])), tool_calls=made.tool_calls(calls=-1, baseline=False))
    silent["tool_calls"]["schema_accuracy"] = None  # as where no answer calls a tool
    with pytest.raises(UsageError, match="has no call to be told from"):
        outcome("tool_calls.schema_accuracy>=84", silent)


# --- the history


def test_a_history_tells_what_changed_and_what_that_did() -> None:
    sizes = dict(made.THREE)
    first = made.record(*made.runs(sizes, 1), digest="a1b2", started="2026-11-01T00:00:00Z")
    same = made.record(*made.runs(sizes, 1), digest="a1b2", started="2026-11-02T00:00:00Z")
    sizes["docstring_choice"] = (600, 0.71, 0.1, 0.0)
    worse = made.record(*made.runs(sizes, 2), digest="c3d4", started="2026-11-03T00:00:00Z", versions={"torch": "2.10"})
    rows = history([first, same, worse])
    assert [row["started"][:10] for row in rows] == ["2026-11-01", "2026-11-02", "2026-11-03"]
    assert rows[0]["changed"] == rows[1]["changed"] == [] and rows[0]["tasks"]["docstring_choice"]["since"] is None
    assert {one["what"] for one in rows[2]["changed"]} == {"artifact", "torch"}
    assert rows[2]["changed"][-1] == {"what": "torch", "before": "2.9.1", "after": "2.10"}
    still = rows[1]["tasks"]["docstring_choice"]["since"]
    assert still["difference"] == 0 and still["started"] == first["started"]
    fell = rows[2]["tasks"]["docstring_choice"]
    assert fell["since"]["difference"] == pytest.approx(worse["tasks"]["docstring_choice"]["value"] - fell_from(same))
    assert fell["since"]["ci95"][1] < 0 and fell["difference"] == worse["tasks"]["docstring_choice"]["difference"]
    assert rows[2]["mean_kl"] == worse["mean_kl"] and rows[2]["floor_kl"] == worse["floor_proxies"]["mean_kl"]["mean"]
    assert rows[2]["baseline"] == "tiny-glm4" and rows[2]["held"] is None


def fell_from(record: dict[str, Any]) -> float:
    return float(record["tasks"]["docstring_choice"]["value"])


def test_only_like_is_compared_with_like() -> None:
    records = [made.record(*made.runs(made.THREE, seed)) for seed in (1, 2, 3)]
    records[1]["prompts"]["docstring_choice"] = "ff"
    records[1]["required"] = [{"held": True, "text": "a"}, {"held": False, "text": "b"}]
    rows = history(records)
    assert rows[1]["tasks"]["docstring_choice"]["since"] is None and rows[1]["tasks"]["needle_recall"]["since"]
    skipped = rows[2]["tasks"]["docstring_choice"]["since"]  # the one before the last asked the same
    values = [record["tasks"]["docstring_choice"]["value"] for record in records]
    assert skipped["difference"] == pytest.approx(values[2] - values[0])
    assert rows[1]["held"] is False
    assert [one["what"] for one in rows[1]["changed"]] == ["prompts of docstring_choice"]
    records[2]["settings"] |= {"num_fewshot": 5}
    assert history(records)[2]["tasks"]["docstring_choice"]["since"] is None
    assert changed(records[0], records[2])[0] == {"what": "num fewshot", "before": "none", "after": "5"}
    assert not like(records[0], records[2], "docstring_choice")


def test_the_last_run_of_the_same_is_the_one_before() -> None:
    times = [f"2026-11-0{day}T00:00:00Z" for day in (1, 2, 3)]
    rows = history([made.record(*made.runs(made.THREE, 1), started=time) for time in times])
    assert [row["tasks"]["needle_recall"]["since"]["started"] for row in rows[1:]] == times[:2]


def test_whatever_changed_is_named() -> None:
    one = made.record(*made.runs(made.THREE, 1))

    def what(**other: Any) -> list[str]:
        two = json.loads(json.dumps(one))
        for key, value in other.items():
            two[key] = {**two[key], **value} if isinstance(value, dict) and two[key] else value
        return [each["what"] for each in changed(one, two)]

    assert what() == []
    assert what(target={"digest": "0"}) == ["artifact"] and what(baseline={"digest": "0"}) == ["baseline"]
    assert what(baseline=None) == ["baseline"]
    assert what(target={"runtime": one["target"]["runtime"] | {"batch": 4}}) == ["artifact's batch"]
    assert what(versions={"lm_eval": "9"}) == ["lm_eval"] and what(settings={"limit": 5}) == ["limit"]
    assert what(task_versions={"needle_recall": "2"}) == ["version of needle_recall"]
    assert what(settings={"gen_kwargs": {"temperature": 0.6}}) == ["gen kwargs"]


def test_joined_points_have_one_baseline_and_one_text() -> None:
    target, baseline, _ = made.runs(made.THREE, 1)
    groups = {"g": ("docstring_choice", "needle_recall")}
    target = made.Harvest(target.tasks, groups, (), {}, {})
    one = made.record(target, baseline)
    two = json.loads(json.dumps(one))
    names = ("docstring_choice", "g", "all", None)
    assert all(like(one, two, name) for name in names)
    two["prompts"]["needle_recall"] = "ff"
    assert [like(one, two, name) for name in names] == [True, False, False, False]
    two = json.loads(json.dumps(one))
    two["baseline"]["digest"] = "ff"
    assert not any(like(one, two, name) for name in names)
    two = json.loads(json.dumps(one))
    two["settings"]["text"]["digest"] = "ff"
    assert [like(one, two, name) for name in names] == [True, True, True, False]
