"""Interruption: whatever stops a job, the same command given again ends bit-equal and redoes no finished shard."""

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import variants

from phasefold import __version__
from phasefold.errors import CheckpointError, PlanError, ResumeError
from phasefold.formats.checkpoint import MANIFEST, open_checkpoint
from phasefold.quantize import output
from phasefold.quantize.claim import claim
from phasefold.quantize.convert import convert
from phasefold.quantize.plan import Plan, make_plan
from phasefold.quantize.shard import Outcome, ShardWriter
from phasefold.quantize.verify import verify
from phasefold.recipes import load

TINY = variants.EXAMPLES / "tiny-glm5"
SHARD = 300_000  # bytes: two dozen shards


def plan(source: Path = TINY, recipe: str = "glm-decode-int4", shard_bytes: int = SHARD) -> Plan:
    return make_plan(open_checkpoint(source), load(recipe), shard_bytes)


def hashes(folder: Path) -> dict[str, str]:
    """sha256 of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def command(source: Path, out: Path, *more: str) -> list[str]:
    words = ["convert", str(source), str(out), "--recipe", "glm-decode-int4", "--shard-size", "300kB", *more]
    return [sys.executable, "-m", "phasefold", *words]


@pytest.fixture(scope="module")
def whole(module_path: Path) -> dict[str, str]:
    """The files of an uninterrupted job."""
    out = module_path / "out"
    convert(plan(), out)
    return hashes(out)


def test_sigkill_at_random_moments(tmp_path: Path, whole: dict[str, str]) -> None:
    """Until 20 kills have landed, spread over the life of the process, each on what the last one left."""
    out, rng, landed = tmp_path / "out", random.Random(7), 0
    started = time.monotonic()
    subprocess.run(command(TINY, tmp_path / "timing", "--json"), check=True, stdout=subprocess.DEVNULL)
    span = time.monotonic() - started
    for number in range(80):
        if landed == 20:
            break
        if number % 4 == 0 or (out / "config.json").exists():
            shutil.rmtree(out, ignore_errors=True)
        before = {p.name: p.stat().st_mtime_ns for p in out.glob("*.safetensors")} if out.exists() else {}
        process = subprocess.Popen(command(TINY, out, "--json"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(span * rng.uniform(0.3, 0.95))
        process.kill()
        landed += process.wait() == -signal.SIGKILL
        after = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
        assert before.items() <= after.items(), "a finished shard was made again"
        assert all(hashes_of(out / name) == whole[name] for name in after), "a shard under its final name is not whole"
    assert landed == 20
    subprocess.run(command(TINY, out, "--json"), check=True, stdout=subprocess.DEVNULL)
    assert hashes(out) == whole


def hashes_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Stopped(BaseException):
    """Stands for a sudden end; only the clearing up of half-written files still happens."""


@pytest.mark.parametrize("name", ["fsync", "replace", "pwrite", "preadv", "unlink", "mkdir"])
def test_a_stop_at_every_call_to_the_system(tmp_path: Path, monkeypatch, whole: dict[str, str], name: str) -> None:
    """The job is stopped at the first, the second, ... call of each kind, and goes on from each of these states."""
    original, wide = getattr(os, name), plan(shard_bytes=3_000_000)
    reference = tmp_path / "reference"
    convert(wide, reference, workers=1)
    expected = hashes(reference)
    for stop_at in range(1, 40, 1 if name in ("replace", "fsync") else 7):
        out, left = tmp_path / f"{stop_at}", iter(range(stop_at - 1))

        def failing(*arguments, left=left, **keywords):
            if next(left, None) is None:
                raise Stopped
            return original(*arguments, **keywords)

        monkeypatch.setattr(os, name, failing)
        try:
            convert(wide, out, workers=1)
            stopped = False
        except Stopped:
            stopped = True
        monkeypatch.setattr(os, name, original)
        convert(wide, out, workers=1)
        assert hashes(out) == expected, stop_at
        shutil.rmtree(out)
        if not stopped:
            break


def test_sigint_and_sigterm_end_cleanly_and_say_how_to_go_on(tmp_path: Path, whole: dict[str, str]) -> None:
    source, landed = variants.EXAMPLES / "tiny-glm5", set()
    for number, kind in enumerate((signal.SIGINT, signal.SIGTERM) * 8):
        out = tmp_path / str(number)
        process = subprocess.Popen(
            command(source, out, "--workers", "1"),
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # jobs in the background ignore it
        )
        deadline = time.monotonic() + 60
        while not list(out.glob("*.safetensors")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        process.send_signal(kind)
        _, said = process.communicate(timeout=60)
        if process.returncode == 0 or kind in landed:  # it was faster, or was tried before
            continue
        landed.add(kind)
        assert process.returncode == 130 and b"give the same command again" in said and said.count(b"\n") == 1
        assert not list(out.glob("*.partial")) and not (out / "config.json").exists()
        result = convert(plan(), out)
        assert result.resumed_shards >= 1 and hashes(out) == whole
        if len(landed) == 2:
            break
    assert len(landed) == 2


def test_given_again_when_done_nothing_is_written(tmp_path: Path, whole: dict[str, str]) -> None:
    convert(plan(), tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    result = convert(plan(), tmp_path / "out")
    assert result.resumed_shards == len(result.plan.shards)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    next((tmp_path / "out").glob("*.safetensors")).unlink()
    with pytest.raises(ResumeError, match="is missing or has another size"):
        convert(plan(), tmp_path / "out")


def test_workers_and_backends_write_the_same_bytes(tmp_path: Path, monkeypatch, whole: dict[str, str]) -> None:
    for workers in (1, 3):
        convert(plan(), tmp_path / str(workers), workers=workers)
        assert hashes(tmp_path / str(workers)) == whole
    from phasefold.quantize.kernels import native

    monkeypatch.setattr(native, "library", lambda: None)
    convert(plan(), tmp_path / "twin")
    assert hashes(tmp_path / "twin") == whole


def test_a_source_that_disappears_and_comes_back(tmp_path: Path, whole: dict[str, str]) -> None:
    source = Path(shutil.copytree(TINY, tmp_path / "tiny-glm5"))
    made, shard = plan(source), source / "model-00002-of-00003.safetensors"

    def vanish(_nbytes: int) -> None:
        if list((tmp_path / "out").glob("*.safetensors")) and shard.exists():
            shard.rename(tmp_path / "away")

    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: cannot be read"):
        convert(made, tmp_path / "out", progress=vanish)
    (tmp_path / "away").rename(shard)
    assert convert(made, tmp_path / "out").resumed_shards >= 1
    assert hashes(tmp_path / "out") == whole


def test_a_source_with_other_weights_is_not_mixed_in(tmp_path: Path, whole: dict[str, str]) -> None:
    """Same headers, other values, as after a second download of a damaged shard: what came from it is made anew."""
    source = Path(shutil.copytree(TINY, tmp_path / "tiny-glm5"))
    shard = source / "model-00002-of-00003.safetensors"
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-4] + b"\xc0\x7f\x00\x00")
    made = plan(source)
    with pytest.raises(CheckpointError, match="not finite"):
        convert(made, tmp_path / "out", workers=1)
    done = len(output.finished_shards(tmp_path / "out", made))
    shard.write_bytes(raw)
    again, told = plan(source), []
    assert done and again.digest == made.digest, "the damage lies where the digest does not look"
    from_it = [s for s in again.shards if any(again.checkpoint.tensors[u.module + p.suffix].file == shard.name
                                             for u in s.units for p in u.source)]  # fmt: skip
    lost = sum(output.record_path(tmp_path / "out", s.file).exists() for s in from_it)
    assert convert(again, tmp_path / "out", notice=told.append).resumed_shards == done - lost
    assert len(told) == bool(lost) and hashes(tmp_path / "out") == whole


def test_shards_of_a_source_that_was_touched_are_made_anew_and_told(tmp_path: Path, whole: dict[str, str]) -> None:
    source = Path(shutil.copytree(TINY, tmp_path / "tiny-glm5"))
    made, count = plan(source), 0

    def stop(_: int) -> None:
        nonlocal count
        if count := len(output.finished_shards(tmp_path / "out", made)):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(made, tmp_path / "out", workers=1, progress=stop)
    for path in source.glob("*.safetensors"):
        os.utime(path, (1, 1))
    told: list[str] = []
    assert convert(made, tmp_path / "out", notice=told.append).resumed_shards == 0
    assert len(told) == 1 and f"{count} finished shards" in told[0] and hashes(tmp_path / "out") == whole
    (source / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ResumeError, match=r"the source's tokenizer_config\.json has changed"):
        convert(plan(source), tmp_path / "out")


def changed_beside_its_samples(source: Path) -> None:
    """Other weights that the digest, and with it the plan, does not see."""
    for path in source.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-40:-36] = b"\x01\x3f\x02\x3f"
        path.write_bytes(data)


def test_an_old_shard_never_stands_under_a_new_record(tmp_path: Path, monkeypatch) -> None:
    """Killed between record and rename, while shards of a changed source are made anew."""
    source, out = Path(shutil.copytree(TINY, tmp_path / "tiny-glm5")), tmp_path / "out"
    made, replace = plan(source), os.replace
    convert(made, out)
    for name in [path.name for path in out.iterdir() if path.suffix != ".safetensors"]:
        (out / name).unlink() if name != MANIFEST else None  # as if it had not been finished
    (out / MANIFEST).rename(tmp_path / MANIFEST)
    (out / output.WORK).mkdir()
    output.atomic_write(output.claim_path(out), output.to_json({"plan": made.digest}))
    files = json.loads((tmp_path / MANIFEST).read_bytes())["files"]
    with claim(out, made):
        for shard in made.shards:
            record = files[shard.file] | {"units": {}, "scales": {}, "tool": __version__, "source": {}}
            output.atomic_write(output.record_path(out, shard.file), output.to_json(record))
    changed_beside_its_samples(source)
    again = plan(source)
    assert again.digest == made.digest

    def stopped(old: Path, new: Path) -> None:
        if str(new).endswith(".safetensors"):
            raise Stopped
        replace(old, new)

    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(Stopped):
        convert(again, out, workers=1)
    monkeypatch.setattr(os, "replace", replace)
    assert not output.finished_shards(out, again)
    convert(again, out)
    assert not verify(out, source).problems
    convert(plan(source), tmp_path / "fresh")
    assert hashes(out) == hashes(tmp_path / "fresh")


def test_a_source_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    """Nobody knows which shards hold which weights: nothing is finished, and the same command makes them anew."""
    source, out = Path(shutil.copytree(TINY, tmp_path / "tiny-glm5")), tmp_path / "out"
    made = plan(source)

    def replace(_: int) -> None:
        if len(output.finished_shards(out, made)) == 3 and not (tmp_path / "before").exists():
            shutil.copytree(source, tmp_path / "before")
            changed_beside_its_samples(source)

    with pytest.raises(ResumeError, match="has changed while it was read"):
        convert(made, out, workers=1, progress=replace)
    assert not (out / "config.json").exists()
    convert(plan(source), out)
    convert(plan(source), tmp_path / "fresh")
    assert hashes(out) == hashes(tmp_path / "fresh") and not verify(out, source).problems


def test_a_shard_that_is_deleted_while_the_job_runs(tmp_path: Path) -> None:
    out, made, deleted = tmp_path / "out", plan(), list[int]()

    def delete(_: int) -> None:
        if len(output.finished_shards(out, made)) == 3 and not deleted:
            (out / made.shards[0].file).unlink()
            deleted.append(1)

    with pytest.raises(ResumeError, match=r"1 of .* shards are missing, the first is model-00001-of"):
        convert(made, out, workers=1, progress=delete)
    assert convert(made, out).resumed_shards == len(made.shards) - 1


def test_another_process_that_was_faster(tmp_path: Path, monkeypatch, whole: dict[str, str]) -> None:
    out, asked = tmp_path / "out", output.is_finished

    def slow(folder: Path, made: Plan) -> bool:
        monkeypatch.setattr(output, "is_finished", asked)
        answer = asked(folder, made)
        convert(plan(), out)  # the other process, between our question and our lock
        return answer

    monkeypatch.setattr(output, "is_finished", slow)
    result = convert(plan(), out)
    assert result.resumed_shards == len(result.plan.shards) and hashes(out) == whole


def test_a_shard_that_shrinks_while_it_is_written(tmp_path: Path) -> None:
    made = plan()
    (tmp_path / output.WORK).mkdir()
    writer = ShardWriter(tmp_path, made.shards[0])
    os.truncate(tmp_path / (made.shards[0].file + output.PARTIAL), 100)
    with pytest.raises(OSError, match="shrank"):
        for unit in made.shards[0].units:
            writer.finish_unit(unit, Outcome())
    writer.abandon()


def test_a_full_disk(tmp_path: Path, whole: dict[str, str]) -> None:
    """A file size limit stands for the full disk: the job fails in a shard, and goes on when there is room."""
    out = tmp_path / "out"

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    process = subprocess.run(command(TINY, out), preexec_fn=limit, capture_output=True, text=True, check=False)
    assert process.returncode == 1 and process.stderr.startswith("phasefold: ") and process.stderr.count("\n") == 1
    assert not (out / "config.json").exists() and not list(out.glob("*.partial"))
    convert(plan(), out)
    assert hashes(out) == whole


def test_a_disk_that_is_too_small_is_told_before_the_start(tmp_path: Path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(PlanError, match=r"needs .* MB more, the disk has 1 MB free"):
        convert(plan(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_folders_that_are_not_ours_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("x")
    with pytest.raises(ResumeError, match=r"not empty \(thesis.txt\)"):
        convert(plan(), out)
    (out / "thesis.txt").unlink()
    convert(plan(), out)
    with pytest.raises(ResumeError, match="holds another checkpoint"):
        convert(plan(recipe="bf16"), out)
    half = tmp_path / "half"
    with claim(half, plan()), pytest.raises(ResumeError, match="another process"):
        convert(plan(), half)
    with pytest.raises(ResumeError, match="belongs to another job"):
        convert(plan(recipe="bf16"), half)
    (tmp_path / "file").write_text("")
    with pytest.raises(ResumeError, match="is a file"):
        convert(plan(), tmp_path / "file")
    with pytest.raises(PlanError, match="cannot be written"):
        convert(plan(), tmp_path / "file" / "below")
    source = Path(shutil.copytree(TINY, tmp_path / "source"))
    for bad in (source, source / "out", tmp_path):
        with pytest.raises(PlanError, match="inside the source"):
            convert(plan(source), bad)


def test_no_write_permission(tmp_path: Path, monkeypatch) -> None:
    def refuse(*_arguments, **_keywords):
        raise PermissionError(13, "Permission denied", str(tmp_path / "out"))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(PlanError, match=r"out: cannot be written \(Permission denied\)"):
        convert(plan(), tmp_path / "out")


def test_the_manifest_names_no_machine(tmp_path: Path) -> None:
    convert(plan(), tmp_path / "out")
    text = (tmp_path / "out" / MANIFEST).read_text()
    assert str(tmp_path) not in text and str(TINY.parent) not in text
    assert json.loads(text)["source"]["name"] == "tiny-glm5"
