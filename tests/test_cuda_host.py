"""The device tests (tests_cuda) run: on the CPU under hostcard's driver, in two orders of threads, and on a card.

Each run is a process of its own, since a process has one driver. What was run where is said in pytest's summary.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import hostcard
import pytest

from phasefold.quantize.kernels import build


def device_tests(config: pytest.Config, environment: dict[str, str], folder: Path) -> int:
    """How many device tests have passed; what pytest says where not all did."""
    environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST")}
    options = ["-q", "-c", str(config.inipath), "--rootdir", str(config.rootpath), "-p", "no:cacheprovider"]
    tests = str(config.rootpath / "tests_cuda")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--basetemp={folder / 'device-tests'}", tests],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    tail = done.stdout[-8000:]
    assert done.returncode == 0, tail
    passed = re.fullmatch(r"(\d+) passed in .*", done.stdout.rstrip().splitlines()[-1])
    assert passed, tail  # and none skipped
    return int(passed[1])


@pytest.fixture(scope="session")
def cache(host_folder: Path) -> Path:
    """All kernels as NVRTC compiles them, once for all processes. The host driver looks for their names in there."""
    folder = host_folder / "cache"
    with open(host_folder / "cache-lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for name in build.KERNELS:
            build.build([name], "sm_90a", folder / "phasefold" / "kernels")
    return folder


class Order:
    order: ClassVar[str | int]

    def test_on_the_host_driver(
        self,
        pytestconfig: pytest.Config,
        record_property: Any,
        tmp_path: Path,
        host_folder: Path,
        host_kernels: list[Path],
        cache: Path,
    ) -> None:
        environment = hostcard.environment(host_folder, host_kernels, devices=2, order=self.order)
        environment["XDG_CACHE_HOME"] = str(cache)
        told = self.order if isinstance(self.order, str) else f"shuffled, seed {self.order}"
        print(f"order of threads: {told}")
        count = device_tests(pytestconfig, environment, tmp_path)
        record_property("device tests", ["host", count, told])


# forward, the order in which wrong code would be right by chance, is left out
# classes, since `--dist loadscope` gives each to a process
class TestBackward(Order):
    order = "backward"


class TestShuffled(Order):
    order = random.randrange(2, 2**32)


def test_on_a_card(pytestconfig: pytest.Config, record_property: Any, tmp_path: Path) -> None:
    """Where there is one; else it is said why not."""
    script = "import json; from phasefold.quantize.device import choose; print(json.dumps(choose('auto')))"
    cards, name = json.loads(subprocess.check_output([sys.executable, "-c", script]))
    count = device_tests(pytestconfig, dict(os.environ), tmp_path) if cards else 0
    record_property("device tests", ["card", count, name if cards else re.fullmatch(r"cpu \((.*)\)", name)[1]])
