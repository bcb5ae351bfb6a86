"""Where pytest runs in several processes, each keeps to one thread: more would wait for each other.

And the folder of what the tests of a module share.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported; children inherit it
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def module_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What tests of one module share. It goes with the module, where pytest would keep it until the last test."""
    folder = tmp_path_factory.mktemp("module")
    yield folder
    shutil.rmtree(folder)
