"""What tests of parts and of Ray share: jobs of many shards, as command lines, and what a folder holds."""

import hashlib
import subprocess
import sys
from pathlib import Path

import variants
from gathered import gather, sequences
from made_statistics import make_statistics

from phasefold.quantize.gptq import one_thread

GLM4, GLM5, KIMI = (variants.EXAMPLES / name for name in ("tiny-glm4", "tiny-glm5", "tiny-kimi"))


def jobs(folder: Path) -> dict[str, list[str]]:
    """FP8, INT4, and INT4 by GPTQ with the statistics that are made in `folder`: source, then options."""
    with one_thread():
        make_statistics(folder / "stats", GLM4, gather(GLM4, sequences(GLM4, "*/*.py", 16)))
    return {
        "fp8": [str(KIMI), "--recipe", "kimi-prefill-fp8", "--shard-size", "500kB"],
        "int4": [str(GLM5), "--recipe", "glm-decode-int4", "--shard-size", "300kB"],
        "gptq": [str(GLM4), "--recipe", "glm-decode-int4-g128-gptq", "--stats", str(folder / "stats"),
                 "--shard-size", "500kB"],
    }  # fmt: skip


def words(job: list[str], out: Path, *more: str) -> list[str]:
    """The command line of a job."""
    return [sys.executable, "-m", "phasefold", "convert", job[0], str(out), *job[1:], *more]


def run(job: list[str], out: Path, *more: str, **how) -> subprocess.CompletedProcess[str]:
    """Run it to its end, whatever that is."""
    return subprocess.run(words(job, out, *more), capture_output=True, text=True, check=False, **how)


def done(job: list[str], out: Path, *more: str) -> str:
    """Run it, and it does not fail; what it has printed."""
    ended = run(job, out, *more)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def refused(job: list[str], out: Path, *more: str) -> str:
    """Run it, and it is refused in one line."""
    ended = run(job, out, *more)
    assert ended.returncode in (1, 2) and ended.stderr.count("\n") == 1, ended.stderr
    return ended.stderr


def hashes(folder: Path) -> dict[str, str]:
    """sha256 of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
