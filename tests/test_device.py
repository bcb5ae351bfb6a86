"""Which device is taken, and the reason where it is not the one that was hoped for; with cards that are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hostcard
import pytest

from phasefold.errors import LoadError, UsageError
from phasefold.quantize import device

SCRIPT = """
import json, sys
from phasefold.errors import PhasefoldError
from phasefold.quantize import device
try:
    print(json.dumps(device.choose(sys.argv[1])))
except PhasefoldError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


@pytest.fixture(scope="module")
def folder(host_folder: Path) -> Path:
    return host_folder


def chosen(text: str, env: dict[str, str], before: str = "") -> list[object]:
    command = [sys.executable, "-c", before + SCRIPT, text]
    told: list[object] = json.loads(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
    return told


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", [[0], "cuda:0 (NVIDIA H200)"]),
        ("cuda", [[0], "cuda:0 (NVIDIA H200)"]),
        ("cuda:1", [[1], "cuda:1 (NVIDIA H200)"]),
        ("cuda:1,cuda:0", [[1, 0], "cuda:1 (NVIDIA H200), cuda:0 (NVIDIA H200)"]),
        ("cpu", [[], "cpu"]),
        (
            "cuda:0,cuda:2",
            [
                "LoadError",
                "device cuda:0,cuda:2: there is no card 2, the driver has 2, from cuda:0 on; --device cpu always works",
            ],
        ),
    ],
)
def test_cards(folder: Path, text: str, expected: list[object]) -> None:
    assert chosen(text, hostcard.environment(folder, devices=2, name="NVIDIA H200")) == expected


OLD = {"capability": "7.5", "name": "NVIDIA T4"}
HIDDEN = "import sys; sys.modules['cuda'] = None\n"  # as if it were not installed


@pytest.mark.parametrize(
    ("card", "before", "reason"),
    [
        (OLD, "", "NVIDIA T4 is sm_75, sm_80 or newer is needed"),
        ({"devices": 0}, "", "the NVIDIA driver has no card"),
        ({"init": 100}, "", "the NVIDIA driver has no card"),
        ({"init": 803}, "", "the NVIDIA driver does not work (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)"),
        ({}, HIDDEN, "cuda-core is not installed: install phasefold with its extra cuda"),
    ],
    ids=["old", "none", "hidden", "broken", "not installed"],
)
def test_reasons(folder: Path, card: dict[str, Any], before: str, reason: str) -> None:
    env = hostcard.environment(folder, **card)
    assert chosen("auto", env, before) == [[], f"cpu ({reason})"]
    for text in ("cuda", "cuda:0"):
        assert chosen(text, env, before) == ["LoadError", f"device {text}: {reason}; --device cpu always works"]


def test_reasons_that_name_the_compiler(folder: Path) -> None:
    """NVRTC's version is that which is installed."""
    _, old = chosen("auto", hostcard.environment(folder, version=11080))
    assert str(old).startswith("cpu (the NVIDIA driver knows CUDA 11.8, NVRTC 1")
    assert str(old).endswith(" or newer: install phasefold with its extra cuda12, in an environment of its own)")
    _, new = chosen("auto", hostcard.environment(folder, capability="99.0", name="NVIDIA Z"))
    assert str(new).startswith("cpu (NVIDIA Z is sm_990, which NVRTC 1")
    assert str(new).endswith("does not know: pip install --upgrade nvidia-cuda-nvrtc)")


@pytest.mark.parametrize(
    ("functions", "reason"),
    [
        ("", "is too old, or not whole"),
        ("int cuInit(unsigned flags) { return 0; }", "is too old, or not whole"),
        (
            """#include <string.h>
            int cuInit(unsigned flags) { return 0; }
            int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
            int cuDeviceGetCount(int* count) { *count = 1; return 999; }
            int cuGetProcAddress_v2(const char* name, void** found, int version, unsigned long long flags, int* how) {
              *found = !strcmp(name, "cuInit") ? (void*)cuInit : !strcmp(name, "cuDriverGetVersion")
                     ? (void*)cuDriverGetVersion : !strcmp(name, "cuDeviceGetCount") ? (void*)cuDeviceGetCount : 0;
              return *found ? 0 : 500;
            }""",
            "does not work (CUDA_ERROR_UNKNOWN)",
        ),
    ],
    ids=["empty", "without entry points", "lost card"],
)
def test_a_driver_that_is_not_whole(folder: Path, tmp_path: Path, functions: str, reason: str) -> None:
    (tmp_path / "driver.c").write_text(functions)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", tmp_path / "driver.c", "-o", library], check=True)
    env = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    assert chosen("auto", env, "") == [[], f"cpu (the NVIDIA driver {reason})"]


def test_a_newer_driver_will_do(folder: Path) -> None:
    for version in (13000, 13090, 14020):
        assert chosen("auto", hostcard.environment(folder, version=version))[0] == [0]


def test_without_a_driver_nothing_heavy_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(device.ctypes, "CDLL", none)
    assert device.choose("auto") == ((), "cpu (no NVIDIA driver)")
    with pytest.raises(LoadError, match=r"^device cuda:3: no NVIDIA driver; --device cpu always works$"):
        device.choose("cuda:3")
    script = """
import ctypes, sys
def none(name): raise OSError(name)
ctypes.CDLL = none
from phasefold.quantize.device import choose
print(choose("auto").name, sorted({"cuda", "torch", "numpy"} & sys.modules.keys()))
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert told == "cpu (no NVIDIA driver) []\n"


@pytest.mark.parametrize("text", ["", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:0,", "cuda:0,cpu", "cuda:0 cuda:1"])
def test_nonsense(text: str) -> None:
    with pytest.raises(UsageError, match=r"no such device; give auto, cpu, cuda, or cards by number: cuda:0,cuda:1$"):
        device.choose(text)


def test_a_card_is_named_once() -> None:
    with pytest.raises(UsageError, match=r"^device cuda:0,cuda:1,cuda:00: names a card twice; give each once$"):
        device.choose("cuda:0,cuda:1,cuda:00")
