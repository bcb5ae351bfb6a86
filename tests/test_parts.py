"""A job in parts: in any order, side by side, again, with another n, every file is that of one process."""

import itertools
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from scaled import GLM5, done, hashes, jobs, refused, run, words

from phasefold.errors import CheckpointError, ResumeError, UsageError
from phasefold.formats.checkpoint import WORK, open_checkpoint
from phasefold.quantize import claim as claims
from phasefold.quantize import output
from phasefold.quantize.claim import claim, share
from phasefold.quantize.convert import convert
from phasefold.quantize.parts import Part, convert_part, finish_parts, parse, shards_of
from phasefold.quantize.plan import Plan, make_plan
from phasefold.quantize.shard import ShardWriter
from phasefold.recipes import load


def plan(source: Path = GLM5, recipe: str = "glm-decode-int4", shard_bytes: int = 300_000) -> Plan:
    return make_plan(open_checkpoint(source), load(recipe), shard_bytes)


@pytest.fixture(scope="module")
def made(module_path: Path) -> dict[str, list[str]]:
    return jobs(module_path)


@pytest.fixture(scope="module")
def whole(module_path: Path, made: dict[str, list[str]]) -> dict[str, dict[str, str]]:
    """Of each job the files that one process writes."""
    for name, job in made.items():
        done(job, module_path / name)
    return {name: hashes(module_path / name) for name in made}


@pytest.mark.parametrize("name", ["fp8", "int4", "gptq"])
def test_parts_side_by_side_write_what_one_process_writes(tmp_path: Path, made, whole, name: str) -> None:
    out, job = tmp_path / "out", made[name]
    started = [
        subprocess.Popen(words(job, out, "--part", f"{i}/3", "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for i in (3, 1, 2)
    ]
    ended = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], ended
    told = [json.loads(printed) for printed, _ in ended]
    assert [one["part"] for one in told] == [[3, 3], [1, 3], [2, 3]]
    assert sum(one["shards_done"] for one in told) == told[0]["shards"] > 9
    assert min(one["shards_missing"] for one in told) == 0 and not (out / "config.json").exists()
    assert sum(one["source_bytes"] for one in told) == sum(one["source_bytes"] for one in told[0]["roles"])
    ends = json.loads(done(job, out, "--finish", "--json"))
    assert ends["resumed_shards"] == ends["shards"] and hashes(out) == whole[name]
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert "was complete already" in done(job, out, "--finish")
    assert "was complete already" in done(job, out, "--part", "2/5")
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_parts_in_every_order(tmp_path: Path, whole) -> None:
    for number, order in enumerate(itertools.permutations((1, 2, 3))):
        out = tmp_path / str(number)
        for i in order:
            result = convert_part(plan(), out, Part(i, 3), workers=1)
            assert result.resumed_shards == 0 and result.shards_done == len(shards_of(plan(), Part(i, 3)))
            if i != order[-1]:
                with pytest.raises(ResumeError, match=r"of 24 shards are missing, the first is model-"):
                    finish_parts(plan(), out)
        finish_parts(plan(), out)
        assert hashes(out) == whole["int4"]
        shutil.rmtree(out)


@pytest.mark.parametrize("seed", range(3))
def test_killed_parts_started_again_with_another_n(tmp_path: Path, made, whole, seed: int) -> None:
    """Half of the parts are killed with a shard in their hands; then others, differently many, take over."""
    out, job, landed = tmp_path / "out", made["int4"], 0
    for _ in range(20):
        process = subprocess.Popen(
            words(job, out, "--part", f"{1 + seed}/3", "--workers", "1"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while process.poll() is None and not (list(out.glob("*.partial")) and list(out.glob("*.safetensors"))):
            time.sleep(0.0005)
        process.kill()
        if process.wait() == -signal.SIGKILL:
            landed += 1
            break
        shutil.rmtree(out)
    assert landed and not (out / "config.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    assert "shards are missing" in refused(job, out, "--finish")
    started = [subprocess.Popen(words(job, out, "--part", f"{i}/4"), stdout=subprocess.DEVNULL) for i in (1, 2, 3, 4)]
    assert [process.wait(timeout=120) for process in started] == [0] * 4
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "a finished shard was made again"
    done(job, out, "--finish")
    assert hashes(out) == whole["int4"]


def test_a_whole_job_goes_on_with_parts(tmp_path: Path, whole) -> None:
    out = tmp_path / "out"
    count = convert_part(plan(), out, Part(2, 3)).shards_done
    assert convert(plan(), out).resumed_shards == count and hashes(out) == whole["int4"]


def test_parts_are_runs_of_neighbours_that_are_about_equal() -> None:
    made_plan = plan()
    files = [shard.file for shard in made_plan.shards]
    largest = max(shard.source_bytes for shard in made_plan.shards)
    total = sum(shard.source_bytes for shard in made_plan.shards)
    for count in (1, 2, 3, 5, 7, 24, 25, 100, 999_999):
        parts = [shards_of(made_plan, Part(i, count)) for i in range(1, min(count, 1000) + 1)]
        if count <= 1000:
            assert [shard.file for part in parts for shard in part] == files
        for part in parts:
            assert sum(shard.source_bytes for shard in part) <= total / count + largest
    assert shards_of(made_plan, Part(1, 999_999)) == []


def test_more_parts_than_shards(tmp_path: Path, whole, made) -> None:
    out, count = tmp_path / "out", 60
    empty = next(i for i in range(1, count + 1) if not shards_of(plan(), Part(i, count)))
    assert f"part {empty}/60 has no shard to make" in done(made["int4"], out, "--part", f"{empty}/60")
    for i in range(1, count + 1):
        convert_part(plan(), out, Part(i, count))
    finish_parts(plan(), out)
    assert hashes(out) == whole["int4"]


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "-1/2", "1/0", "1/2/3", " 1/2", "1.0/2", "a/b", "1/9999999",
                                  "\u0661/\u0662", "1/2\n"])  # fmt: skip
def test_what_is_no_part(text: str) -> None:
    with pytest.raises(UsageError, match="expected i/n with i from 1 to n"):
        parse(text)
    assert parse("2/8") == (2, 8)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--part", "1/2", "--finish"], "give one of the two"),
        (["--part", "1/2", "--executor", "ray"], "converts the whole job"),
        (["--finish", "--executor", "ray"], "converts the whole job"),
        (["--finish", "--workers", "2"], "converts nothing; leave out --workers"),
        (["--finish", "--device", "cpu"], "converts nothing; leave out --device"),
        (["--executor", "ray", "--device", "cuda"], "its tasks run on CPUs"),
        (["--executor", "ray", "--device-memory", "1GB"], "only with a card"),
        (["--address", "127.0.0.1:6379"], "add --executor ray"),
        (["--executor", "ray", "--address", "ray://127.0.0.1:10001"], "expected HOST:PORT"),
    ],
)
def test_options_that_mean_nothing_together(tmp_path: Path, made, options: list[str], said: str) -> None:
    ended = run(made["int4"], tmp_path / "out", *options)
    assert ended.returncode == 2 and said in ended.stderr and ended.stderr.count("\n") == 1
    assert not list(tmp_path.rglob("*.safetensors")) and not (tmp_path / "out" / WORK).exists()


def test_who_may_work_beside_whom(tmp_path: Path) -> None:
    out, job = tmp_path / "out", plan()
    with share(out, job, "1/3"):
        with pytest.raises(ResumeError, match="other processes are working on parts of it"):
            convert(job, out)
        with pytest.raises(ResumeError, match="other processes are working on parts of it"):
            finish_parts(job, out)
        with pytest.raises(ResumeError, match="another process is working on part 1/3 of it"):
            convert_part(job, out, Part(1, 3))
        convert_part(job, out, Part(2, 3))
    with claim(out, job), pytest.raises(ResumeError, match="another process is working on it as a whole"):
        convert_part(job, out, Part(1, 3))
    with pytest.raises(ResumeError, match="nothing is begun in it"):
        finish_parts(job, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_first_parts_at_once(tmp_path: Path, whole) -> None:
    """Sixteen that all find no claim: one writes it, and no one waits for ever."""
    out, failed = tmp_path / "out", []

    def one(number: int) -> None:
        try:
            convert_part(plan(), out, Part(number, 16), workers=1)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    finish_parts(plan(), out)
    assert hashes(out) == whole["int4"]


def test_a_claim_that_is_being_written_for_ever(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(claims, "_PATIENCE", 0.1)
    (tmp_path / WORK).mkdir()
    with open(tmp_path / WORK / "lock-claim", "w") as held:
        assert output.take(held.fileno(), 2)
        with pytest.raises(ResumeError, match="another part has been writing the claim"):
            convert_part(plan(), tmp_path, Part(1, 2))


def test_a_shard_that_another_process_is_writing_is_left_to_it(tmp_path: Path, whole) -> None:
    out, job = tmp_path / "out", plan()
    convert_part(job, out, Part(2, 2))
    shard = job.shards[0]
    writer = ShardWriter(out, shard)
    with pytest.raises(ResumeError, match=r"model-00001-of-00024.*another process is writing it"):
        convert_part(job, out, Part(1, 2))
    assert set(output.finished_shards(out, job)) == {s.file for s in job.shards} - {shard.file}
    with pytest.raises(ResumeError, match="1 of 24 shards are missing, the first is model-00001"):
        finish_parts(job, out)
    with pytest.raises(ResumeError, match="another process is writing it"):
        convert(job, out)
    writer.abandon()
    assert convert_part(job, out, Part(1, 3)).shards_missing == 0
    finish_parts(job, out)
    assert hashes(out) == whole["int4"]


def test_a_writer_that_waits_for_the_lock_never_cuts_a_finished_shard(tmp_path: Path, monkeypatch, whole) -> None:
    """Between opening and locking the partial file, its holder renames it: what was opened is the shard itself."""
    out, job, take = tmp_path / "out", plan(), output.take

    def late(handle: int, how: int) -> bool:
        monkeypatch.setattr(output, "take", take)
        os.replace(out / (job.shards[0].file + output.PARTIAL), out / job.shards[0].file)
        return take(handle, how)

    (out / WORK).mkdir(parents=True)
    (out / (job.shards[0].file + output.PARTIAL)).write_bytes(b"whole")
    monkeypatch.setattr(output, "take", late)
    writer = ShardWriter(out, job.shards[0])
    assert (out / job.shards[0].file).read_bytes() == b"whole"
    writer.abandon()


def test_a_source_or_a_version_that_is_another(tmp_path: Path, monkeypatch) -> None:
    source = Path(shutil.copytree(GLM5, tmp_path / "tiny-glm5"))
    out = tmp_path / "out"
    count = convert_part(plan(source), out, Part(1, 3)).shards_done
    with pytest.raises(ResumeError, match="belongs to another job"):
        convert_part(plan(source, "bf16"), out, Part(1, 3))
    shard = source / "model-00001-of-00003.safetensors"
    times = shard.stat().st_atime_ns, shard.stat().st_mtime_ns
    os.utime(shard, (1, 1))
    for again in (lambda: convert_part(plan(source), out, Part(2, 3)), lambda: finish_parts(plan(source), out)):
        with pytest.raises(ResumeError, match=r"model-00001.* has changed since this job began .*touch -d @"):
            again()
    os.utime(shard, ns=times)
    with monkeypatch.context() as patch:
        patch.setattr(claims, "__version__", "0.0.1")
        for again in (lambda: convert_part(plan(source), out, Part(2, 3)), lambda: finish_parts(plan(source), out)):
            with pytest.raises(ResumeError, match=r"begun by phasefold .*, this is 0\.0\.1; .* same version"):
                again()
    assert len(output.finished_shards(out, plan(source))) == count, "nothing is given up"


def test_a_fault_in_the_shard_of_one_part(tmp_path: Path, whole) -> None:
    source = Path(shutil.copytree(GLM5, tmp_path / "tiny-glm5"))
    shard = source / "model-00003-of-00003.safetensors"
    raw, times = shard.read_bytes(), (shard.stat().st_atime_ns, shard.stat().st_mtime_ns)
    shard.write_bytes(raw[:-4] + b"\xc0\x7f\x00\x00")
    os.utime(shard, ns=times)
    out, job = tmp_path / "out", plan(source)
    bad = [number for number in (1, 2, 3) if not works(job, out, Part(number, 3))]
    assert bad == [3] and not list(out.glob("*.partial")) and not (out / "config.json").exists()
    with pytest.raises(ResumeError, match="shards are missing"):
        finish_parts(job, out)
    shard.write_bytes(raw)
    os.utime(shard, ns=times)
    assert works(job, out, Part(3, 3))
    finish_parts(job, out)
    assert hashes(out) == whole["int4"]


def works(job: Plan, out: Path, part: Part) -> bool:
    try:
        convert_part(job, out, part)
    except CheckpointError as error:
        assert "not finite" in str(error)
        return False
    return True


@pytest.mark.parametrize("damage", [b"", b"[]", b"{}", b'{"bytes": 1}', b"\xff", b"null"])
def test_a_record_that_is_none(tmp_path: Path, whole, damage: bytes) -> None:
    """It counts as a shard that is not there, for parts and for the end."""
    out, job = tmp_path / "out", plan()
    convert_part(job, out, Part(1, 1))
    output.record_path(out, job.shards[3].file).write_bytes(damage)
    (out / job.shards[5].file).write_bytes(b"short")
    with pytest.raises(ResumeError, match=f"2 of 24 shards are missing, the first is {job.shards[3].file}"):
        finish_parts(job, out)
    assert convert_part(job, out, Part(1, 1)).resumed_shards == 22
    finish_parts(job, out)
    assert hashes(out) == whole["int4"]


def test_a_full_disk_in_one_part(tmp_path: Path, made, whole) -> None:
    """A file size limit stands for the full disk."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    out, job = tmp_path / "out", made["int4"]
    ended = run(job, out, "--part", "1/2", preexec_fn=limit)
    assert ended.returncode == 1 and ended.stderr.startswith("phasefold: ") and ended.stderr.count("\n") == 1
    assert not list(out.glob("*.partial"))
    for part in ("1/2", "2/2"):
        done(job, out, "--part", part)
    done(job, out, "--finish")
    assert hashes(out) == whole["int4"]


def test_where_gptq_ran_is_told_by_whoever_finishes(tmp_path: Path, made) -> None:
    out = tmp_path / "out"
    for part in ("1/2", "2/2"):
        done(made["gptq"], out, "--part", part)
    path = out / WORK / claims.JOB
    told = json.loads(path.read_text())
    assert told["algebra"] == ["cpu"]
    path.write_text(json.dumps(told | {"algebra": ["NVIDIA H200", "cpu"]}))
    done(made["gptq"], out, "--finish")
    assert "GPTQ ran on NVIDIA H200, cpu" in json.loads((out / "phasefold.json").read_text())["notes"]


def test_a_checkpoint_and_a_plan_can_be_sent_to_another_process() -> None:
    job = plan()
    assert pickle.loads(pickle.dumps(job)).digest == job.digest
