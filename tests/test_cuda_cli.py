"""`convert` on cards, which are hostcard's: the CPU's bytes, one sentence for what fails, and jobs that go on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostcard
import pytest
import variants
from equal_folders import assert_equal_folders

TINY = variants.EXAMPLES / "tiny-glm4"
#: two lanes that hold a few units each, and two dozen shards
SMALL = ("--recipe", "glm-decode-int4", "--shard-size", "300kB", "--workers", "2")
H200 = "cuda:0 (NVIDIA H200)"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def environment(host_folder: Path, host_kernels: list[Path]) -> Callable[..., dict[str, str]]:
    def made(**settings: Any) -> dict[str, str]:
        card = hostcard.environment(host_folder, host_kernels, **{"name": "NVIDIA H200"} | settings)
        return card | {"XDG_CACHE_HOME": str(host_folder / "cache"), "COLUMNS": "200"}

    return made


def command(out: Path, *more: str) -> list[str]:
    memory = () if "cpu" in more else ("--device-memory", "1MB")
    return [sys.executable, "-m", "phasefold", "convert", str(TINY), str(out), *SMALL, *memory, *more]


@pytest.fixture(scope="module")
def convert(environment: Callable[..., dict[str, str]]) -> Run:
    """A conversion in a process with such a card. code: with which it ends."""

    def run(out: Path, *more: str, code: int = 0, **settings: Any) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(command(out, *more), env=environment(**settings), capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run


@pytest.fixture(scope="module")
def by_cpu(convert: Run, module_path: Path) -> Path:
    convert(module_path / "cpu", "--device", "cpu")
    return module_path / "cpu"


@pytest.mark.parametrize(
    ("device", "name"), [("auto", H200), ("cuda", H200), ("cuda:0,cuda:1", f"{H200}, cuda:1 (NVIDIA H200)")]
)
def test_the_cpus_bytes(convert: Run, by_cpu: Path, tmp_path: Path, device: str, name: str) -> None:
    told = json.loads(convert(tmp_path / "out", "--device", device, "--json", devices=2).stdout)
    assert (told["device"], told["backend"], told["resumed_shards"]) == (name, name, 0)
    assert_equal_folders(tmp_path / "out", by_cpu)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"capability": "7.5", "name": "NVIDIA T4"}, "NVIDIA T4 is sm_75, sm_80 or newer is needed"),
        ({"version": 11080}, r"the NVIDIA driver knows CUDA 11\.8, NVRTC \S+ needs one that knows \d+\.0 or [^;]+"),
    ],
    ids=["card", "driver"],
)
def test_too_old(convert: Run, by_cpu: Path, tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    refused = convert(tmp_path / "out", "--device", "cuda", code=1, **settings)
    assert re.fullmatch(rf"phasefold: device cuda: {reason}; --device cpu always works\n", refused.stderr)
    assert refused.stdout == "" and not (tmp_path / "out").exists()
    told = convert(tmp_path / "out", **settings).stdout  # auto is the default
    assert re.search(rf", 2 workers on cpu \({reason}\)$", told, re.MULTILINE)
    assert_equal_folders(tmp_path / "out", by_cpu)


def test_two_lanes_keep_to_their_memory(convert: Run, tmp_path: Path) -> None:
    told = convert(tmp_path / "out", log=tmp_path / "log").stdout
    assert f", 2 workers on {H200}\n" in told and f"codec {H200}," in told
    used, most, waits = Counter[str](), Counter[str](), Counter[str]()
    for line in (tmp_path / "log").read_text().splitlines():
        word, where, *what = line.split()
        if word in ("allocate", "release"):
            used[where] += int(what[1]) * (1 if word == "allocate" else -1)
            most[where] = max(most[where], used[where])
        elif word == "sync" and what == ["event"]:
            waits[where] += 1
    assert len(waits) == 2 and waits.total() > 20
    assert 800_000 < most["0"] <= 1_000_000
    assert most["-1"] == most["0"]  # as much is pinned
    assert not any(used.values())


@pytest.mark.parametrize("kind", ["memory", "pinned"])
def test_memory_that_is_not_there(convert: Run, by_cpu: Path, tmp_path: Path, kind: str) -> None:
    """As where another program has filled the card: the CPU takes its place, unless the card was asked for."""
    where = {"memory": "its memory", "pinned": "pinned host memory"}[kind]
    reason = f"{H200}: 0.5 MB of {where} are not free; give a smaller --device-memory, or --device cpu"
    told = convert(tmp_path / "out", "--device", "cuda", code=1, **{kind: 600_000})
    assert told.stderr == f"phasefold: {reason}\n" and not (tmp_path / "out").exists()
    assert f", 2 workers on cpu ({reason})\n" in convert(tmp_path / "out", **{kind: 600_000}).stdout
    assert_equal_folders(tmp_path / "out", by_cpu)


def test_memory_that_is_no_size(convert: Run, tmp_path: Path) -> None:
    for text in ("much", "0GB", "4"):
        assert f"'{text}' is no size" in convert(tmp_path / "out", "--device-memory", text, code=2).stderr
    told = convert(tmp_path / "out", "--device-memory", "100kB", code=1).stderr
    assert told.startswith("phasefold: 0.1 MB of a card's memory are too little for 2 workers: ")
    assert told.count("\n") == 1 and not (tmp_path / "out").exists()


def finished(out: Path) -> dict[str, int]:
    """Shards and when each was written."""
    return {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}


def assert_unfinished(out: Path) -> dict[str, int]:
    before = finished(out)
    assert before and not (out / "config.json").exists() and not list(out.glob("*.partial"))
    return before


def test_a_launch_that_fails(convert: Run, by_cpu: Path, tmp_path: Path) -> None:
    """Finished shards stay, and the CPU goes on with the others."""
    out = tmp_path / "out"
    told = convert(out, "--device", "cuda", code=1, fail_at=40).stderr
    error = "converting failed (CUDA_ERROR_LAUNCH_FAILED)"
    assert told == f"phasefold: {H200}: {error}; --device cpu works without a card\n"
    before = assert_unfinished(out)
    assert json.loads(convert(out, "--device", "cpu", "--json").stdout)["resumed_shards"] == len(before)
    assert before.items() <= finished(out).items()
    assert_equal_folders(out, by_cpu)


# the command, which is interrupted with its third shard; those after it take so long that not all can be done
INTERRUPTED = """
import os, signal, sys, time
from phasefold.cli import main
from phasefold.quantize.shard import ShardWriter

signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
close, closed = ShardWriter.close, []

def closing(writer):
    close(writer)
    closed.append(writer)
    if len(closed) == 3:
        os.kill(os.getpid(), signal.SIGINT)
    if len(closed) > 2:
        time.sleep(1)

ShardWriter.close = closing
main()
"""


def test_sigint(environment: Callable[..., dict[str, str]], convert: Run, by_cpu: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = [sys.executable, "-c", INTERRUPTED, *command(out)[3:]]
    done = subprocess.run(job, env=environment(), capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr == "phasefold: interrupted; finished shards are kept, give the same command again to go on\n"
    before = assert_unfinished(out)
    assert len(before) >= 3
    assert json.loads(convert(out, "--json").stdout)["resumed_shards"] == len(before)
    assert before.items() <= finished(out).items()
    assert_equal_folders(out, by_cpu)
