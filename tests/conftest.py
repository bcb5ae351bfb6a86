"""Where pytest runs in several processes, each keeps to one thread: more would wait for each other.

And the folder of what the tests of a module share, the card without a GPU, and where the device tests ran.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import hostcard
import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported; children inherit it
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def module_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What tests of one module share. It goes with the module, where pytest would keep it until the last test."""
    folder = tmp_path_factory.mktemp("module")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def host_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For `hostcard`. Tests that have this run where there is g++."""
    return hostcard.shared_folder(tmp_path_factory)


@pytest.fixture(scope="session")
def host_kernels(host_folder: Path) -> list[Path]:
    """phasefold's CUDA kernels for the CPU, which end the process at undefined behaviour."""
    from phasefold.quantize.kernels import build

    source = Path(build.__file__).with_name("cuda.cu")
    return hostcard.kernels(host_folder, source, list(build.KERNELS), options=hostcard.SANITIZED)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hostcard.COMPILER is None:  # the summary says it
        need = [item for item in items if "host_folder" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=need)
        items[:] = [item for item in items if item not in need]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line: how many tests of tests_cuda ran on what, by the properties of the tests that ran them."""
    ran = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == "device tests"
    ]
    none = "no g++" if hostcard.COMPILER is None else "not selected"
    host, card = (
        ", ".join(f"{count} ({how})" for where, count, how in ran if where == wanted) or f"0 ({why})"
        for wanted, why in (("host", none), ("card", "not selected"))
    )
    terminalreporter.write_line(f"CUDA device tests run: {host} on the CPU by the host driver; {card} on a card")
