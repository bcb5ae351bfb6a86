"""A job by tasks of Ray: the same files, whoever dies; and what a host must be like to take part.

Real clusters of this machine, each of two CPUs: one that runs already, and one that a job starts for itself.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from scaled import GLM5, done, hashes, jobs, refused, words

from phasefold.errors import CheckpointError, PlanError
from phasefold.formats.checkpoint import WORK, open_checkpoint
from phasefold.quantize import output, ray_worker
from phasefold.quantize.claim import JOB, claim
from phasefold.quantize.convert import convert
from phasefold.quantize.plan import Plan, make_plan
from phasefold.quantize.ray_tasks import RayTasks
from phasefold.quantize.ray_worker import Done, Refused, Task, write
from phasefold.quantize.shard import ShardWriter
from phasefold.recipes import load


@pytest.fixture(scope="module")
def address(module_path: Path) -> Iterator[str]:
    """A cluster that runs already. Its sockets need a short path."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="pf-") as folder:
        patch.setenv("RAY_AUTH_MODE", "token")  # for the drivers, too, which are our children
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        head = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--head",
            "--block",
            "--node-ip-address=127.0.0.1",
        ]
        head += [f"--port={port}", "--num-cpus=2", "--object-store-memory=80000000", f"--temp-dir={folder}"]
        with open(module_path / "ray.log", "wb") as log:
            process = subprocess.Popen(
                [*head, "--include-dashboard=false", "--disable-usage-stats"], stdout=log, stderr=log
            )
        deadline = time.monotonic() + 60
        while not (Path(folder) / "ray_current_cluster").exists():
            assert process.poll() is None and time.monotonic() < deadline, (module_path / "ray.log").read_text()
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
        process.terminate()
        assert process.wait(timeout=60) is not None
        deadline = time.monotonic() + 30
        while named(folder):
            assert time.monotonic() < deadline, "a process of Ray is left"
            time.sleep(0.1)


def named(text: str) -> list[int]:
    """Processes that have a text in their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (entry / "cmdline").read_bytes() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="module")
def made(module_path: Path) -> dict[str, list[str]]:
    return jobs(module_path)


@pytest.fixture(scope="module")
def whole(module_path: Path, made: dict[str, list[str]]) -> dict[str, dict[str, str]]:
    """Of each job the files that one process writes."""
    for name, job in made.items():
        done(job, module_path / name)
    return {name: hashes(module_path / name) for name in made}


def by_ray(address: str) -> list[str]:
    return ["--executor", "ray", "--address", address, "--workers", "1"]


def writing(out: Path) -> list[int]:
    """Processes of Ray that have a half-written shard open."""
    found = []
    for pid in named("ray::"):
        with contextlib.suppress(OSError):
            links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
            found += [pid] if any(link.startswith(f"{out}/") and ".partial" in link for link in links) else []
    return found


@contextlib.contextmanager
def killer(out: Path, most: int) -> Iterator[list[int]]:
    """Kills workers with a shard in their hands, until it has killed so many; which, is what it tells."""
    killed: list[int] = []
    ended = threading.Event()

    def kill() -> None:
        while len(killed) < most and not ended.is_set():
            for pid in writing(out)[: most - len(killed)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
            time.sleep(0.005)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_the_files_are_those_of_threads(tmp_path: Path, address: str, made, whole, name: str) -> None:
    told = json.loads(done(made[name], tmp_path / "out", *by_ray(address), "--json"))
    assert hashes(tmp_path / "out") == whole[name]
    assert told["resumed_shards"] == 0 and told["device"] == "cpu" and told["cpu_seconds"] > 0
    assert "was complete already" in done(made[name], tmp_path / "out", *by_ray(address))


def test_a_worker_killed_with_a_shard_in_its_hands(tmp_path: Path, address: str, made, whole) -> None:
    out = tmp_path / "out"
    with killer(out, 2) as killed:
        done(made["gptq"], out, *by_ray(address))
    assert len(killed) == 2 and hashes(out) == whole["gptq"]


def test_workers_that_always_die(tmp_path: Path, address: str, made) -> None:
    """One shard: its task is begun four times."""
    out, job = tmp_path / "out", [*made["gptq"][:-1], "5GB"]
    with killer(out, 1000) as killed:
        said = run_lines(job, out, *by_ray(address))
    assert len(killed) >= 4 and "no worker of Ray could write it" in said[-1], said
    assert not (out / "config.json").exists() and not list(out.glob("*.safetensors"))


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption(tmp_path: Path, address: str, made, whole, kind: signal.Signals) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(
        words(made["gptq"], out, *by_ray(address)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # jobs in the background ignore it
    )
    deadline = time.monotonic() + 60
    while not list(out.glob("*.safetensors")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(kind)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and b"interrupted; finished shards are kept" in said, said
    assert not list(out.glob("*.partial")) and not writing(out) and not (out / "config.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    done(made["gptq"], out, *by_ray(address))
    assert {path: path.stat().st_mtime_ns for path in kept} == kept and kept and hashes(out) == whole["gptq"]


def test_what_is_refused_ends_the_job_with_one_line(tmp_path: Path, address: str, made) -> None:
    source = Path(shutil.copytree(GLM5, tmp_path / "tiny-glm5"))
    shard = source / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4] + b"\xc0\x7f\x00\x00")
    job = [str(source), *made["int4"][1:]]
    for more in ([], by_ray(address)):
        lines = run_lines(job, tmp_path / f"out{len(more)}", *more)
        assert "not finite" in lines[-1] and lines[-1].startswith("phasefold: "), lines
        assert not list(tmp_path.glob("out*/*.partial")) and len(lines) == 1 + bool(more)
    assert (
        "no host of the Ray cluster has more than 2 CPUs"
        in run_lines(made["int4"], tmp_path / "out", *by_ray(address)[:-1], "3")[-1]
    )


def run_lines(job: list[str], out: Path, *more: str) -> list[str]:
    ended = subprocess.run(words(job, out, *more), capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    return ended.stderr.splitlines()


def test_a_cluster_of_its_own_leaves_nothing(tmp_path: Path, made, whole, monkeypatch) -> None:
    with tempfile.TemporaryDirectory(prefix="pf-") as folder:  # sockets need a short path
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setenv("HOME", folder)
        ended = subprocess.run(
            words(made["int4"], tmp_path / "out", "--executor", "ray", "--address", "local", "--json"),
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert json.loads(ended.stdout)["shards"] == 24 and hashes(tmp_path / "out") == whole["int4"]
        assert ended.stderr.startswith("note: Ray: ") and ended.stderr.count("\n") == 1, ended.stderr
        assert (
            not named(folder) and not list(Path(folder).rglob("*auth*")) and not list(Path(folder).glob("phasefold*"))
        )


def test_an_address_where_nobody_answers(tmp_path: Path, made) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{probe.getsockname()[1]}"
        assert f"no Ray cluster answers at {nobody}" in refused(made["int4"], tmp_path / "out", *by_ray(nobody))
    for wrong in ("", "head", "head:0", "head:99999", "ray://head:10001", "head:port"):
        assert "expected HOST:PORT" in refused(made["int4"], tmp_path / "out", *by_ray(wrong))


def plan(source: Path = GLM5) -> Plan:
    return make_plan(open_checkpoint(source), load("glm-decode-int4"), 300_000)


@pytest.fixture
def task(tmp_path: Path) -> Iterator[Task]:
    """The first task of a job whose driver is this process."""
    made_plan = plan()
    driver = RayTasks(None, 1, 1, None, lambda _: None)
    with claim(tmp_path / "out", made_plan):
        yield next(driver._tasks(made_plan, tmp_path / "out", list(made_plan.shards), 1, "stop-of-this"))


def test_a_task_in_this_process(task: Task) -> None:
    assert isinstance(write(task), Done)
    assert output.record_of(task.out, task.shard) and len(task.checkpoint.tensors) < 30
    assert isinstance(write(task), Done), "it is there already"


def test_hosts_that_are_not_like_the_driver(task: Task, monkeypatch, tmp_path: Path) -> None:
    def said(**changes: object) -> str:
        found = write(task._replace(**changes))
        assert isinstance(found, Refused) and socket.gethostname() in found.message
        return f"{found.error}: {found.message}"

    other = dict(task.made_by) | {"phasefold": "0.0.1"}
    assert "PlanError" in (told := said(made_by=other)) and "the driver 0.0.1; install the same" in told
    assert "has codec" in said(made_by=dict(task.made_by) | {"codec": "abacus"})
    gptq = ray_worker.here(gptq=True)
    assert isinstance(write(task._replace(made_by=gptq)), Done)
    assert "has torch" in said(made_by=gptq | {"torch": "1.0"})
    assert "is not shared with" in said(out=tmp_path)
    assert "is not shared with" in said(job="0" * 64)
    assert "it is another file than the driver's" in said(stamps={file: [1, 1] for file in task.stamps})
    monkeypatch.setattr(output, "take", lambda handle, how: True)
    assert "does not see its locks, or the driver has ended" in said()


def test_a_first_worker_that_lives_on(task: Task, monkeypatch) -> None:
    """Ray has given it up, and it has the shard in its hands: wait, then say so; or find the shard there."""
    monkeypatch.setattr(ray_worker, "PATIENCE", 0.1)
    writer = ShardWriter(task.out, task.shard)
    found = write(task)
    assert isinstance(found, Refused) and found.error == "ResumeError" and "has been writing it for" in found.message
    monkeypatch.setattr(ray_worker, "PATIENCE", 60)
    threading.Timer(0.2, writer.abandon).start()
    assert isinstance(write(task), Done)


def test_what_a_job_does_with_what_its_executor_leaves(tmp_path: Path) -> None:
    made_plan = plan()

    def failing(*_: object) -> None:
        raise CheckpointError("a weight")

    with pytest.raises(CheckpointError, match="a weight"):
        convert(made_plan, tmp_path / "out", executor=failing)
    assert not (tmp_path / "out" / WORK / JOB).exists(), "nothing to go on with"
    with pytest.raises(PlanError, match="lies inside the source"):
        convert(made_plan, GLM5 / "out", executor=failing)
