"""Conversions whose source is on the Hub, and whose result goes there; the Hub misbehaves, and the job is killed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import variants
from hub_server import HubServer, Request, hub_server

from phasefold.formats.checkpoint import INDEX, MANIFEST, open_checkpoint
from phasefold.quantize.convert import convert
from phasefold.quantize.plan import make_plan
from phasefold.recipes import load

SOURCE, MADE = "org/tiny", "org/tiny-INT4"
RECIPE = ("--recipe", "glm-decode-int4", "--shard-size", "600kB")
JOB = (*RECIPE, "--device", "cpu", "--workers", "2")
WINDOW, BATCH = 4_500_000, 1_500_000
#: the command line with pieces and commits as small as its window: a real job's are 16 MiB and 10 GB
SMALL = f"""
import sys
from phasefold import cli
from phasefold.hub import patience, pieces, stream
patience.WAITS, pieces.PIECE, pieces._GAP, stream.BATCH_BYTES = (0.05,) * 7, 200_000, 1000, {BATCH}
cli.main()
"""
CARD = "---\nlicense: mit\ntags: [tiny]\n---\n# Tiny\n"


@pytest.fixture(scope="module")
def source(module_path: Path) -> Path:
    """tiny-glm5 in some twenty shards, with a card."""
    folder = module_path / "tiny"
    convert(make_plan(open_checkpoint(variants.EXAMPLES / "tiny-glm5"), load("keep"), 700_000), folder)
    (folder / MANIFEST).unlink()
    (folder / "README.md").write_text(CARD)
    return folder


@pytest.fixture
def server(source: Path, tmp_path: Path) -> Iterator[HubServer]:
    with hub_server(tmp_path / "hub") as running:
        running.add(SOURCE, source)
        yield running


@pytest.fixture
def env(server: HubServer, tmp_path: Path) -> dict[str, str]:
    return server.environment(tmp_path / "home")


def command(*words: object) -> list[str]:
    return [sys.executable, "-c", SMALL, *map(str, words)]


def run(env: dict[str, str], *words: object, code: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run(command(*words), capture_output=True, text=True, check=False, env=env)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


def said(env: dict[str, str], *words: object) -> dict:
    return json.loads(run(env, *words, "--json").stdout)


def killed(env: dict[str, str], server: HubServer, when: Callable[[Request], bool], *words: object) -> None:
    """The command, ended by SIGKILL at a request."""
    with subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:

        def hook(request: Request) -> None:
            if when(request):
                process.send_signal(signal.SIGKILL)
                process.wait()

        server.ways.hook = hook
        _, errors = process.communicate(timeout=120)
        server.ways.hook = None
    assert process.returncode == -signal.SIGKILL, errors.decode()


def counted(kind: str, number: int, what: str = "") -> Callable[[Request], bool]:
    """Whether a request is the n-th of its kind, and of a path that has this in it."""
    seen: list[Request] = []

    def is_it(request: Request) -> bool:
        if request.kind == kind and what in request.path:
            seen.append(request)
        return len(seen) == number and seen[-1] is request

    return is_it


def hashes(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def disk(folder: Path) -> int:
    """Bytes that files take, those aside that are no weights; files may go while it looks."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            if ".safetensors" in name and not name.endswith((".json", ".pieces")):
                try:
                    total += os.stat(os.path.join(parent, name)).st_blocks * 512
                except FileNotFoundError:
                    continue
    return total


class Watch:
    """The most that lies in a folder at once, and in another one."""

    def __init__(self, *folders: Path) -> None:
        self.folders, self.most = folders, [0] * len(folders)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def _work(self) -> None:
        while not self._ends.wait(0.002):
            self.most = [max(most, disk(folder)) for most, folder in zip(self.most, self.folders, strict=True)]

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()


def assert_never_half(server: HubServer) -> None:
    """No commit has config, index or manifest while a shard of the artifact is missing."""
    *_, last = server.commits(MADE)
    shards = {path for path in last.files if path.endswith(".safetensors")}
    for commit in server.commits(MADE):
        if {"config.json", INDEX, MANIFEST} & commit.files.keys():
            assert shards <= commit.files.keys(), commit.title


def test_from_repo_to_repo_killed_three_times(
    server: HubServer, env: dict[str, str], source: Path, tmp_path: Path
) -> None:
    """Through a Hub that is busy, drops, damages and is slow; equal to what is made of a local copy, to the byte."""
    out, job = (
        tmp_path / "out",
        ("convert", SOURCE, tmp_path / "out", *JOB, "--window", f"{WINDOW}B", "--push-to", MADE),
    )
    window = out / ".phasefold" / "window"
    with Watch(window, out) as watch:
        server.ways.status = {"get": [429, 503], "lfs_put": [429, 500], "commit": [503]}
        server.ways.retry_after = 0
        server.ways.drop = {"get": [0.5, 0.2], "lfs_put": [0.5]}
        server.ways.corrupt = {"get": [150_000, 150_000]}
        killed(env, server, counted("get", 230), *job)
        server.ways.drop = {"get": [0.5], "commit": [1.0]}  # the Hub has it, and nobody heard of it
        killed(env, server, counted("lfs_put", 5), *job)
        server.ways.slow = {"get": 5e6, "lfs_put": 5e6}
        killed(env, server, counted("commit", 2), *job)
        if server.exists(MADE):
            assert not {"config.json", INDEX, MANIFEST} & server.files(MADE).keys()
        server.ways.slow = {}
        done = said(env, *job)
    assert done["push"]["repo"] == MADE and done["push"]["revision"] == server.branches(MADE)["main"]
    assert done["resumed_shards"] > 0 and server.private(MADE)
    assert_never_half(server)
    assert 0 < watch.most[0] <= WINDOW + 50_000, "the window"
    biggest = max(path.stat().st_size for path in server.files(MADE).values())
    assert watch.most[1] <= WINDOW + 2 * BATCH + 3 * biggest, "and what waits to be sent or is being written"
    assert disk(out) == 0 and not (out / "config.json").exists()

    pulled, local, copy = tmp_path / "pulled", tmp_path / "local", tmp_path / "copy"
    run(env, "pull", MADE, pulled)
    said(env, "convert", SOURCE, local, *JOB)
    said(env, "convert", source, copy, *JOB)
    theirs, ours = hashes(local), hashes(pulled)
    card = (pulled / "README.md").read_text()
    assert theirs.pop("README.md") != ours.pop("README.md") and theirs == ours
    assert "license: mit" in card and f"base_model: {SOURCE}" in card and "# Tiny\n" in card
    here = hashes(copy)
    assert {name for name in here if here[name] != theirs.get(name)} == {"README.md", MANIFEST}, "README went above"
    made_of = json.loads((pulled / MANIFEST).read_text())["source"]
    assert (made_of["repo"], made_of["revision"]) == (SOURCE, server.branches(SOURCE)["main"])
    for against in (SOURCE, source):
        assert said(env, "verify", pulled, "--source", against)["ok"]


def test_given_again_it_sends_and_reads_nothing(server: HubServer, env: dict[str, str], tmp_path: Path) -> None:
    job = ("convert", SOURCE, tmp_path / "out", *JOB, "--push-to", f"{MADE}@int4", "--tag", "v1")
    first = said(env, *job)
    puts, gets = len(server.asked("lfs_put")), len(server.asked("commit"))
    again = said(env, *job)
    assert again["push"]["revision"] == first["push"]["revision"] == server.tags(MADE)["v1"]
    assert again["resumed_shards"] == again["shards"] and again["push"]["uploaded"] == 0
    assert (len(server.asked("lfs_put")), len(server.asked("commit"))) == (puts, gets)
    told = f"its weights are in {MADE}@int4 ({first['push']['revision'][:12]})"
    assert told in run(env, "check", tmp_path / "out", code=1).stderr
    assert told in run(env, "inspect", tmp_path / "out", code=1).stderr
    assert again["push"]["files"] == first["push"]["files"] and again["push"]["bytes"] == first["push"]["bytes"]


def test_a_job_goes_on_with_the_commit_that_it_began_with(
    server: HubServer, env: dict[str, str], source: Path, tmp_path: Path
) -> None:
    began = server.branches(SOURCE)["main"]
    job = ("convert", SOURCE, tmp_path / "out", *JOB)
    killed(env, server, lambda request: len(list((tmp_path / "out").glob("*.safetensors"))) > 2, *job)
    changed = bytearray((source / "generation_config.json").read_bytes()) + b"\n"
    server.add(SOURCE, {"generation_config.json": bytes(changed)})
    done = said(env, *job)
    assert done["resumed_shards"] > 0
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert manifest["source"]["revision"] == began != server.branches(SOURCE)["main"]
    assert "holds another checkpoint already" in run(env, *job, code=1).stderr, "it has ended: main is what it is now"
    with_name = ("convert", f"{SOURCE}@main", tmp_path / "out", *JOB)
    assert "holds another checkpoint already" in run(env, *with_name, code=1).stderr
    fresh = said(env, "convert", f"{SOURCE}@{began}", tmp_path / "fresh", *JOB)
    assert fresh["digest"] == done["digest"] and hashes(tmp_path / "fresh") == hashes(tmp_path / "out")


def test_headers_alone_answer_what_headers_can(server: HubServer, env: dict[str, str], source: Path) -> None:
    """The same answers as from a folder, and no weights come."""
    for words in (
        ("inspect",),
        ("plan", "--recipe", "glm-decode-int4"),
        ("size", "--tp", "2", "--gpu-memory", "1GB"),
        ("check", "--tp", "2"),
    ):
        server.requests.clear()
        ours, theirs = (said(env, words[0], place, *words[1:]) for place in (SOURCE, source))
        if words[0] == "plan":
            ours.pop("digest"), theirs.pop("digest")
        assert ours == theirs, words
        weights = open_checkpoint(source).total_size
        assert sum(one.nbytes for one in server.requests if one.kind == "get") < weights / 3
    assert not said(env, "diff", SOURCE, source)["differs"]


def test_parts_from_the_hub(server: HubServer, env: dict[str, str], tmp_path: Path) -> None:
    """Two processes side by side, each with its own window in the same folder."""
    out = tmp_path / "out"
    parts = [
        subprocess.Popen(command("convert", SOURCE, out, *JOB, "--part", f"{n}/2"), env=env, stderr=subprocess.PIPE)
        for n in (1, 2)
    ]
    for part in parts:
        _, errors = part.communicate(timeout=120)
        assert part.returncode == 0, errors.decode()
    said(env, "convert", SOURCE, out, *RECIPE, "--finish")
    said(env, "convert", SOURCE, tmp_path / "whole", *JOB)
    assert hashes(out) == hashes(tmp_path / "whole")


def test_ctrl_c_ends_it_and_it_goes_on(server: HubServer, env: dict[str, str], tmp_path: Path) -> None:
    server.ways.slow = {"get": 3e5}
    job = ("convert", SOURCE, tmp_path / "out", *JOB, "--push-to", MADE)
    with subprocess.Popen(
        command(*job), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 60
        while not list((tmp_path / "out").rglob("*.pieces")) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and b"interrupted; finished shards are kept" in errors, errors
    server.ways.slow = {}
    assert said(env, *job)["push"]["private"]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--push-to", "nonsense"), 2, "'nonsense': no repo; give org/name"),
        (("--public",), 2, "--public: only with --push-to"),
        (("--tag", "v1"), 2, "--tag: only with --push-to"),
        (("--replace",), 2, "--replace: only with --push-to"),
        (("--push-to", MADE, "--part", "1/2"), 2, "--push-to: sends what one process makes"),
        (("--push-to", MADE, "--executor", "ray"), 2, "--push-to: sends what one process makes"),
        (("--window", "3"), 2, "3"),
        (("--window", "1kB"), 1, "MB of the source at once, the window holds 0.0 MB; give --window"),
        (("--window", "900000TB"), 0, ""),
        (("--window-dir", "/dev/null/none"), 1, "the window cannot be written"),
    ],
)
def test_wrong_usage(
    server: HubServer, env: dict[str, str], tmp_path: Path, words: tuple[str, ...], code: int, text: str
) -> None:
    done = run(env, "convert", SOURCE, tmp_path / "out", *JOB, *words, code=code)
    assert text in done.stderr + done.stdout and not server.exists(MADE)


def test_another_artifact_in_the_repo_is_refused_before_anything_is_made(
    server: HubServer, env: dict[str, str], source: Path, tmp_path: Path
) -> None:
    server.add(MADE, source, private=True)
    job = ("convert", SOURCE, tmp_path / "out", *JOB, "--push-to", MADE)
    assert "which are not this artifact's; give another --branch, or --replace" in run(env, *job, code=1).stderr
    assert not list((tmp_path / "out").glob("*.safetensors")) and len(server.commits(MADE)) == 1
    assert said(env, *job, "--replace")["push"]["revision"] == server.branches(MADE)["main"]
    assert not any("of-00020" in name for name in server.files(MADE))
    assert_never_half_after_replace(server)


def assert_never_half_after_replace(server: HubServer) -> None:
    """What made the other artifact look whole went first."""
    first, second, *_, last = server.commits(MADE)
    assert "config.json" in first.files and not {"config.json", INDEX, MANIFEST} & second.files.keys()
    assert {"config.json", INDEX, MANIFEST} <= last.files.keys()


def test_a_whole_artifact_is_not_streamed_but_pushed(server: HubServer, env: dict[str, str], tmp_path: Path) -> None:
    said(env, "convert", SOURCE, tmp_path / "out", *JOB)
    job = ("convert", SOURCE, tmp_path / "out", *JOB, "--push-to", MADE)
    assert "holds the whole artifact already; `phasefold push" in run(env, *job, code=1).stderr


def test_a_streamed_job_can_become_a_local_one(server: HubServer, env: dict[str, str], tmp_path: Path) -> None:
    """Shards that are on the Hub are no shards of a folder: they are made again."""
    said(env, "convert", SOURCE, tmp_path / "out", *JOB, "--push-to", MADE)
    told = run(env, "convert", SOURCE, tmp_path / "out", *JOB, "--json")
    assert f"were sent to {MADE}@main and are not here any more: they are made again" in told.stderr
    done = json.loads(told.stdout)
    assert done["resumed_shards"] == 0 and said(env, "verify", tmp_path / "out")["ok"]


def test_a_shard_that_vanished_from_the_hub_is_told(server: HubServer, env: dict[str, str], tmp_path: Path) -> None:
    job = ("convert", SOURCE, tmp_path / "out", *JOB, "--push-to", MADE)
    killed(env, server, counted("commit", 3), *job)
    head = server.commits(MADE)[-1]
    lost = next(name for name in sorted(head.files) if name.endswith(".safetensors"))
    server.store.repos[MADE].branches["main"] = server.commits(MADE)[0].sha
    done = run(env, *job, "--json")
    assert f"{lost} and " in done.stderr and "were sent there and are gone; they are made anew" in done.stderr
    assert json.loads(done.stdout)["push"]["revision"] == server.branches(MADE)["main"]
    run(env, "pull", MADE, tmp_path / "pulled")


def test_shards_that_are_there_already_are_let_go_too(server: HubServer, env: dict[str, str], tmp_path: Path) -> None:
    """The folder of a half-pushed job was lost: what is made again is not sent again, and does not pile up."""
    job = ("convert", SOURCE, tmp_path / "out", *JOB, "--push-to", MADE)
    killed(env, server, counted("commit", 4), *job)
    shutil.rmtree(tmp_path / "out")
    with Watch(tmp_path / "out") as watch:
        done = said(env, *job)
    assert done["push"]["skipped"] > 0 and done["resumed_shards"] == 0
    assert disk(tmp_path / "out") == 0
    made = max(path.stat().st_size for path in server.files(MADE).values())
    source = sum(path.stat().st_size for path in server.files(SOURCE).values())
    assert watch.most[0] <= source + 2 * BATCH + made, "the window is not bounded here"


def test_verbs_that_need_the_weights_say_what_to_do(server: HubServer, env: dict[str, str], tmp_path: Path) -> None:
    text = run(env, "calibrate", SOURCE, "--text", tmp_path, "--out", tmp_path / "s", code=2).stderr
    assert f"first `phasefold pull {SOURCE} DIR`" in text
    assert "phasefold pull" in run(env, "load", SOURCE, "--runtime", "transformers", code=1).stderr


def test_a_pair_on_the_hub(server: HubServer, env: dict[str, str], source: Path, tmp_path: Path) -> None:
    """A release in its repo and an artifact in another: headers and config, as from folders."""
    said(env, "convert", SOURCE, tmp_path / "out", *JOB, "--push-to", MADE)
    found = said(env, "pair", SOURCE, MADE, "--runtime", "vllm", "--kv-dtype", "bf16")
    assert found["ok"], found["findings"]
    text = run(env, "pair", SOURCE, MADE, "--run", code=2).stderr
    assert f"{SOURCE}: --run needs the weights at hand; first `phasefold pull {SOURCE} DIR`" in text
