"""One conversion by threads, by parts and by Ray, with one worker and with two: wall seconds, and the same bytes.

    python benchmarks/scale.py FOLDER [--gigabytes 3]

Makes a BF16 source with Kimi-K2's matrices in FOLDER (once), converts it to INT4 g128 by the search, and deletes each
artifact. A worker is one thread: `--workers N`; N processes with `--part i/N` side by side, then `--finish`; N tasks
of one CPU each on a Ray cluster of N CPUs that runs already. Trust the ratios within one run, not the seconds.
"""

import argparse
import contextlib
import hashlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from convert import INT4, make_sources

PHASEFOLD = [sys.executable, "-m", "phasefold", "convert"]


def digest(folder: Path) -> str:
    """sha256 over the name and the sha256 of every file."""
    whole = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            whole.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()


def run(*commands: list[str]) -> list[dict[str, Any]]:
    """Commands side by side; what each has printed."""
    started = [subprocess.Popen([*PHASEFOLD, *words, "--json"], stdout=subprocess.PIPE) for words in commands]
    printed = [process.communicate()[0] for process in started]
    assert not any(process.returncode for process in started), "a conversion failed"
    return [json.loads(text) for text in printed]


def by_threads(job: list[str], count: int, _: str) -> list[dict[str, Any]]:
    """The whole job in one process."""
    return run([*job, "--workers", str(count)])


def by_parts(job: list[str], count: int, _: str) -> list[dict[str, Any]]:
    """Processes that know nothing of each other, and the end."""
    parts = run(*([*job, "--workers", "1", "--part", f"{part}/{count}"] for part in range(1, count + 1)))
    return [*parts, *run([*job, "--finish"])]


def by_ray(job: list[str], _: int, address: str) -> list[dict[str, Any]]:
    """The whole job, its shards as tasks."""
    return run([*job, "--workers", "1", "--executor", "ray", "--address", address])


@contextlib.contextmanager
def cluster(cpus: int) -> Iterator[str]:
    """A Ray cluster of one host; -> its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="scale-", ignore_cleanup_errors=True) as folder:
        words = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}"]
        words += [
            "--node-ip-address=127.0.0.1",
            f"--num-cpus={cpus}",
            f"--temp-dir={folder}",
            "--include-dashboard=false",
            "--disable-usage-stats",
        ]
        process = subprocess.Popen([*words, "--object-store-memory=100000000"], stdout=subprocess.DEVNULL)
        try:
            time.sleep(10)  # its workers are started before the clock is
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="gets the sources, twice --gigabytes, and work files")
    parser.add_argument("--gigabytes", type=float, default=3)
    parser.add_argument("--shard-size", default="60MB")
    options = parser.parse_args()
    source = make_sources(options.folder, options.gigabytes)["bf16"]
    ways = {"threads": by_threads, "parts": by_parts, "Ray": by_ray}
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # of the cluster below
    names = ("workers", "wall s", "speed-up", "of threads", "CPU-s", "peak MB", "shards")
    print(" " * 10 + "".join(f"{name:>11}" for name in names))
    walls: dict[tuple[str, int], float] = {}
    found: set[str] = set()
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        recipe, out = Path(work) / "recipe.toml", Path(work) / "out"
        recipe.write_text('families = ["kimi"]\n' + INT4.format("search"))
        job = [str(source), str(out), "--recipe", str(recipe), "--shard-size", options.shard_size]
        run([*job, "--workers", "2"])  # the source is in memory from now on
        for count in (1, 2):
            shutil.rmtree(out)
            with cluster(count) as address:
                for name, way in ways.items():
                    shutil.rmtree(out, ignore_errors=True)

                    began = time.monotonic()
                    printed = way(job, count, address)
                    walls[name, count] = time.monotonic() - began
                    found.add(digest(out))
                    cpu = sum(one["cpu_seconds"] for one in printed)
                    peak = max(one["peak_rss_bytes"] for one in printed) / 1e6
                    faster, beside = walls[name, 1] / walls[name, count], walls["threads", count] / walls[name, count]
                    cells = [f"{count}", *(f"{value:.2f}" for value in (walls[name, count], faster, beside, cpu))]
                    cells += [f"{peak:.0f}", f"{printed[0]['shards']}"]
                    print(f"{name:10}" + "".join(f"{cell:>11}" for cell in cells), flush=True)
    print("all files equal" if len(found) == 1 else "THE FILES DIFFER")


if __name__ == "__main__":
    main()
