"""Where pytest runs in several processes, each keeps to one thread: more would wait for each other."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported; children inherit it
    os.environ.setdefault("OMP_NUM_THREADS", "1")
