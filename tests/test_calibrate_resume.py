"""A calibration that is interrupted, killed, given again, given to another: same bytes, or refused."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import variants
from calibrated import calibrated, job_of
from engines import one_thread  # noqa: F401  (autouse)

import phasefold.quantize.output as output
from phasefold.calib.run import calibrate
from phasefold.calib.work import Work
from phasefold.errors import PlanError, ResumeError

TINY = variants.EXAMPLES / "tiny-glm5"
# one thread: sums must not depend on how many cores are free
KILLED = """
import os, signal, sys
from pathlib import Path
import torch
sys.path.insert(0, {tests!r})
from calibrated import job_of
from phasefold.calib.run import calibrate
torch.set_num_threads(1)
done = 0.0
def advance(count):
    global done
    done += count
    if done > {limit}:
        os.kill(os.getpid(), signal.SIGKILL)
calibrate(job_of(Path({folder!r}), **{options!r}), Path({out!r}), advance)
"""


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def killed(out: Path, layers: float, folder: Path, **options: Any) -> None:
    """Run a job in a process that is killed, without any notice, after so many layers."""
    limit = layers * 9 * 24
    code = KILLED.format(
        tests=str(Path(__file__).parent), limit=limit, folder=str(folder), options=options, out=str(out)
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("experts", ["together", "apart"])
@pytest.mark.parametrize("layers", [0.1, 2.1, 3.9])
def test_killed_and_given_again_it_ends_with_the_same_bytes(tmp_path: Path, experts: str, layers: float) -> None:
    options: dict[str, Any] = {"experts": experts, "hessians": ("routed_expert",)}
    calibrated(TINY, tmp_path / "whole", **options)
    killed(tmp_path / "out", layers, TINY, **options)
    assert (tmp_path / "out" / ".work").is_dir() and not (tmp_path / "out" / "statistics.json").exists()
    result = calibrate(job_of(TINY, **options), tmp_path / "out")
    assert result.resumed == int(layers)
    whole, again = content(tmp_path / "whole"), content(tmp_path / "out")
    assert whole.keys() == again.keys() == {f"layer-{n:05d}.safetensors" for n in range(4)} | {"statistics.json"}
    assert [name for name in whole if whole[name] != again[name]] == []


def test_indices_that_layers_share_are_kept_too(tmp_path: Path) -> None:
    tensors, config = variants.load(TINY)
    config = config | {"indexer_types": ["full", "full", "full", "shared"], "index_topk": 8}
    tensors = {name: tensor for name, tensor in tensors.items() if ".layers.3.self_attn.indexer." not in name}
    folder = variants.save(tmp_path / "source", tensors, config)
    calibrated(folder, tmp_path / "whole")
    killed(tmp_path / "out", 3.1, folder)
    assert (tmp_path / "out" / ".work" / "carried-00003").exists()
    assert calibrate(job_of(folder), tmp_path / "out").resumed == 3
    assert content(tmp_path / "whole") == content(tmp_path / "out")


def stopped(out: Path, folder: Path = TINY, **options: Any) -> None:
    """Interrupted in the third layer."""
    done = 0.0

    def advance(count: float) -> None:
        nonlocal done
        done += count
        if done > 2.1 * 9 * 24:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(job_of(folder, **options), out, advance)


def test_another_jobs_folder_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path / "out")
    for change, what in (
        ({"dtype": "bfloat16"}, r"options\.dtype"), ({"memory": 15_000_000_000}, r"options\.memory"),
        ({"sequences": 10}, r"text\.digest"), ({"hessians": ("attention.o",)}, r"options\.hessians"),
    ):  # fmt: skip
        with pytest.raises(ResumeError, match=rf"belongs to another job \({what} differs\)"):
            calibrate(job_of(TINY, **change), tmp_path / "out")
    with pytest.raises(ResumeError, match=r"belongs to another job \(source\.name differs\)"):
        calibrate(job_of(variants.EXAMPLES / "tiny-kimi"), tmp_path / "out")
    assert calibrate(job_of(TINY), tmp_path / "out").resumed == 2
    with pytest.raises(ResumeError, match=r"holds statistics of another job \(text\.digest differs\)"):
        calibrate(job_of(TINY, sequences=10), tmp_path / "out")
    before = content(tmp_path / "out")
    assert calibrate(job_of(TINY), tmp_path / "out").resumed == 4  # nothing to do
    assert content(tmp_path / "out") == before


def test_a_source_that_changed_is_not_gone_on_with(tmp_path: Path) -> None:
    folder = variants.save(tmp_path / "source", *variants.load(TINY))
    stopped(tmp_path / "out", folder)
    path = min(folder.glob("*.safetensors"))
    before = path.stat().st_mtime_ns
    os.utime(path, (1, 1))
    with pytest.raises(
        ResumeError, match=r"has changed since .* 2 finished layers may be of other weights; .*touch -d @"
    ):
        calibrate(job_of(folder), tmp_path / "out")
    os.utime(path, ns=(before, before))
    assert calibrate(job_of(folder), tmp_path / "out").resumed == 2


def test_a_layers_file_that_is_gone_or_cut_begins_anew(tmp_path: Path) -> None:
    stopped(tmp_path / "out")
    (tmp_path / "out" / "layer-00001.safetensors").write_bytes(b"x")
    assert calibrate(job_of(TINY), tmp_path / "out").resumed == 0


def test_no_other_folder_is_written_to(tmp_path: Path) -> None:
    job = job_of(TINY)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ResumeError, match="is a file"):
        calibrate(job, tmp_path / "file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("x")
    with pytest.raises(ResumeError, match=r"not empty \(notes\.txt\)"):
        calibrate(job, tmp_path / "full")
    with pytest.raises(PlanError, match="lies inside the source"):
        calibrate(job, TINY / "stats")
    assert not (TINY / "stats").exists()


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    tried = 0

    def advance(count: float) -> None:
        nonlocal tried
        if not tried and count:
            tried = 1
            with pytest.raises(ResumeError, match="another process is working on it"):
                calibrate(job_of(TINY), tmp_path / "out")

    calibrate(job_of(TINY), tmp_path / "out", advance)
    assert tried


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: Any) -> None:
    job = job_of(TINY)
    usage = output.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(output.shutil, "disk_usage", lambda _: usage._replace(free=job.disk - 1))
    with pytest.raises(PlanError, match=r"needs \d+ MB more, the disk has \d+ MB free"):
        calibrate(job, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lacking", [100, 4_000, 200_000])
def test_a_disk_that_is_full_in_the_first_layer_leaves_the_folder_free(tmp_path: Path, lacking: int) -> None:
    """Whether it is the layer's file, the last bytes of what is gathered for it, or most of that."""
    wanted = calibrated(TINY, tmp_path / "whole")
    size = (tmp_path / "whole" / "layer-00000.safetensors").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - lacking, before[1]))
    try:
        with pytest.raises(PlanError, match=r"out: cannot be written \(File too large\)"):
            calibrate(job_of(TINY), tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert content(tmp_path / "out") == {}
    assert calibrate(job_of(TINY), tmp_path / "out").about == wanted.about


def test_a_folder_that_another_job_took_in_between_is_refused(tmp_path: Path) -> None:
    first, second = (job_of(TINY, sequences=count) for count in (9, 10))
    ours, theirs = (Work(tmp_path / "out", job.identity, job.source.checkpoint) for job in (first, second))
    assert ours.finished() is None and theirs.finished() is None  # both ask before either has begun
    with theirs.claimed():
        pass
    with pytest.raises(ResumeError, match=r"belongs to another job \(text\.digest differs\)"), ours.claimed():
        pass
    calibrate(second, tmp_path / "out")
    with pytest.raises(ResumeError, match="another process has just finished it"), theirs.claimed():
        pass
    assert calibrate(second, tmp_path / "out").resumed == 4


@pytest.mark.parametrize("experts", ["together", "apart"])
def test_the_disk_that_was_asked_for_is_enough(tmp_path: Path, experts: str) -> None:
    job = job_of(TINY, experts=experts, hessians=("routed_expert",))
    job.in_memory = lambda layer: False  # type: ignore[method-assign]
    most = 0

    def advance(_: float) -> None:
        nonlocal most
        most = max(most, sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file()))

    calibrate(job, tmp_path / "out", advance)
    assert 0.2 * job.disk < most <= job.disk


def test_what_is_written_names_no_machine_and_no_time(tmp_path: Path) -> None:
    found = calibrated(TINY, tmp_path / "out")
    told = json.dumps({key: value for key, value in found.about.items() if key != "config"})
    for word in (str(tmp_path), str(TINY), os.uname().nodename):
        assert word not in told
