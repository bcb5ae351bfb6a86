"""Pulling from a Hub that breaks off, is slow, changes bytes: what lies in its place is right, config.json last."""

import json
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer, Request, hub_server, pointed
from test_hub_push import converted, run

from phasefold.errors import HubError, PlanError, ResumeError
from phasefold.formats.checkpoint import MANIFEST
from phasefold.hub import patience
from phasefold.hub.api import Address
from phasefold.hub.pull import WORK, prepare

REPO = "org/tiny-INT4"


@pytest.fixture(scope="module")
def artifact(module_path: Path) -> Path:
    folder = converted(module_path / "INT4")
    (folder / "README.md").write_text("# of the repo\n")
    (folder / "evals").mkdir()
    (folder / "evals" / "deep.txt").write_text("in a folder\n")
    return folder


@pytest.fixture
def server(tmp_path: Path, artifact: Path) -> Iterator[HubServer]:
    with hub_server(tmp_path / "hub") as running:
        running.add(REPO, {".gitattributes": b"*.safetensors filter=lfs\n"}, private=True)
        running.add(REPO, artifact)
        yield running


@pytest.fixture
def env(server: HubServer, tmp_path: Path) -> dict[str, str]:
    return server.environment(tmp_path / "home")


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if not p.is_dir()}


def pulled(env: dict[str, str], out: Path, repo: str = REPO) -> dict:
    return json.loads(run(env, "pull", repo, out, "--json").stdout)


def downloads(server: HubServer) -> int:
    return len(server.asked("get"))


def test_every_byte(server: HubServer, env: dict[str, str], artifact: Path, tmp_path: Path) -> None:
    """The folder is the artifact, nothing of the library's stays in it; again, nothing is fetched."""
    out = tmp_path / "new" / "out"
    done = pulled(env, out)
    assert contents(out) == contents(artifact)
    assert done["revision"] == server.branches(REPO)["main"] and done["downloaded"] == done["files"]
    assert done["bytes"] == done["downloaded_bytes"] == sum(map(len, contents(artifact).values()))
    run(env, "verify", out)
    before = downloads(server)
    again = pulled(env, out)
    assert again == done | {"downloaded": 0, "downloaded_bytes": 0, "skipped": done["files"]}
    assert downloads(server) == before
    assert "all checked" in run(env, "pull", f"{REPO}@{done['revision']}", tmp_path / "by-sha").stdout
    assert contents(tmp_path / "by-sha") == contents(artifact)


def test_what_is_about_the_artifact_is_brought_up_to_date(
    server: HubServer, env: dict[str, str], artifact: Path, tmp_path: Path
) -> None:
    """A card that was edited on the Hub, and results that came since, are no other checkpoint."""
    out = tmp_path / "out"
    pulled(env, out)
    server.add(REPO, {"README.md": b"# edited\n", "evals/later.txt": b"better\n"})
    done = pulled(env, out)
    assert done["downloaded"] == 2 and done["revision"] == server.branches(REPO)["main"]
    held = contents(out)
    assert held.pop("README.md") == b"# edited\n" and held.pop("evals/later.txt") == b"better\n"
    assert held == {path: data for path, data in contents(artifact).items() if path != "README.md"}
    server.add(REPO, {"generation_config.json": b"{}"})
    text = run(env, "pull", REPO, out, code=1).stderr
    assert "holds another checkpoint than" in text and "(generation_config.json differs)" in text


@pytest.mark.parametrize("number", [1, 4, 9, 13])
def test_killed_and_given_again(
    server: HubServer, env: dict[str, str], artifact: Path, tmp_path: Path, number: int
) -> None:
    """Whatever lies in its place is whole; what is there is not fetched again, also when the branch has moved."""
    out, count, process = tmp_path / "out", iter(range(1, 1000)), []
    started, pinned = threading.Event(), server.branches(REPO)["main"]

    def hook(request: Request) -> None:
        started.wait()
        if request.kind == "get" and next(count) == number:
            process[0].kill()
            process[0].wait()

    server.ways.hook = hook
    process.append(subprocess.Popen([sys.executable, "-m", "phasefold", "pull", REPO, str(out)], env=env))
    started.set()
    assert process[0].wait() == -signal.SIGKILL
    server.ways.hook = None
    there = {name: data for name, data in contents(out).items() if not name.startswith(WORK)}
    assert there.items() <= contents(artifact).items() and "config.json" not in there
    server.add(REPO, {"config.json": b"{}", "more.txt": b"moved"})
    before = downloads(server)
    done = pulled(env, out)
    assert contents(out) == contents(artifact) and done["revision"] == pinned and done["skipped"] == len(there)
    assert downloads(server) - before <= done["files"] - len(there)


def test_broken_and_slow_lines(server: HubServer, env: dict[str, str], artifact: Path, tmp_path: Path) -> None:
    """Answers that end early go on from there; a busy Hub is waited for."""
    server.ways.drop = {"get": [0.5, 0.3, 0.0]}
    server.ways.status = {"get": [429, 500], "head": [503], "tree": [429]}
    server.ways.slow = {"get": 30_000_000}
    said = run(env, "pull", REPO, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(artifact)
    assert "Trying to resume" in said.stderr and all(line.startswith("note: ") for line in said.stderr.splitlines())
    server.ways.slow, before = {}, downloads(server)
    server.add("org/long", {"model.safetensors": random.Random(1).randbytes(24_000_000)})
    server.ways.drop = {"get": [0.9]}
    pulled(env, tmp_path / "long", "org/long")
    assert [one.start or 0 for one in server.asked("get")[before:]] == [0, 20 << 20]


def test_a_changed_byte(server: HubServer, env: dict[str, str], artifact: Path, tmp_path: Path) -> None:
    """Once: fetched again. Twice: refused by name, and the folder does not look whole."""
    server.ways.corrupt = {"get": [700_000]}
    said = run(env, "pull", REPO, tmp_path / "out").stderr
    assert "fetching it again" in said and contents(tmp_path / "out") == contents(artifact)
    server.ways.corrupt = {"get": [700_000] * 2}
    said = run(env, "pull", REPO, tmp_path / "worse", code=1).stderr
    assert "model-00001-of-00007.safetensors: other bytes came than the Hub's sha256 says, twice" in said
    held = {name for name in contents(tmp_path / "worse") if not name.startswith(WORK)}
    assert not held & {"config.json", "model-00001-of-00007.safetensors"}
    pulled(env, tmp_path / "worse")
    assert contents(tmp_path / "worse") == contents(artifact)


def test_a_small_file_changed(server: HubServer, env: dict[str, str], artifact: Path, tmp_path: Path) -> None:
    """Those that git stores are held against git's hash."""
    server.ways.hook = lambda request: server.ways.corrupt.update(
        {"get": [5] if request.path.endswith("/config.json") and request.method == "GET" else []}
    )
    said = run(env, "pull", REPO, tmp_path / "out", code=1).stderr
    assert "config.json: other bytes came than git's hash says, twice" in said
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_repo_that_is_not_what_its_manifest_says(
    server: HubServer, env: dict[str, str], artifact: Path, tmp_path: Path
) -> None:
    """Refused before weights are fetched: another shard, a missing one, a manifest that was altered."""
    shard, data = (
        "model-00002-of-00007.safetensors",
        bytearray((artifact / "model-00002-of-00007.safetensors").read_bytes()),
    )
    data[-1] ^= 1
    server.add(REPO, {shard: bytes(data)}, revision="other")
    some = {path.name: path for path in artifact.iterdir() if path.is_file() and path.name != shard}
    server.add("org/missing", some)
    server.add("org/altered", some | {MANIFEST: (artifact / MANIFEST).read_bytes().replace(b"decode", b"decoda", 1)})
    for repo, words in (
        (f"{REPO}@other", "is another file"),
        ("org/missing", "is missing"),
        ("org/altered", "altered"),
    ):
        said = run(env, "pull", repo, tmp_path / words, code=1).stderr
        assert words in said and not list((tmp_path / words).glob("*.safetensors"))


def test_any_repo(server: HubServer, env: dict[str, str], tmp_path: Path) -> None:
    """Without a manifest, with folders and an empty file; what may not be read is not there."""
    files = {"config.json": b"{}", "a/b/c.bin": bytes(20_000), "empty": b"", "model.safetensors": bytes(5000)}
    server.add("org/plain", files)
    pulled(env, tmp_path / "out", "org/plain")
    assert contents(tmp_path / "out") == files
    without = {name: value for name, value in env.items() if name != "HF_TOKEN"}
    run(without, "pull", "org/plain", tmp_path / "open")
    for repo, words in (("org/none", "no such repo"), ("org/plain@v9", "no such branch")):
        assert words in run(env, "pull", repo, tmp_path / "none", code=1).stderr
    assert "no such repo" in run(without, "pull", REPO, tmp_path / "none", code=1).stderr
    assert not (tmp_path / "none").exists()


def test_folders_that_hold_something_else(
    server: HubServer, env: dict[str, str], artifact: Path, tmp_path: Path
) -> None:
    """Refused, and left as they are."""
    strange, changed, half = tmp_path / "strange", tmp_path / "changed", tmp_path / "half"
    strange.mkdir()
    (strange / "notes.txt").write_text("mine")
    assert "not empty (notes.txt)" in run(env, "pull", REPO, strange, code=1).stderr
    shutil.copytree(artifact, changed)
    (changed / "tokenizer_config.json").write_text("{}")
    assert "tokenizer_config.json differs" in run(env, "pull", REPO, changed, code=1).stderr
    (half / WORK).mkdir(parents=True)
    (half / WORK / "pull.json").write_text(json.dumps({"repo": REPO, "revision": "v1", "commit": "0" * 40}))
    assert f"a pull of {REPO}@v1 was begun" in run(env, "pull", REPO, half, code=1).stderr
    (tmp_path / "file").write_text("")
    assert "is a file" in run(env, "pull", REPO, tmp_path / "file", code=1).stderr
    assert "no repo" in run(env, "pull", "plain", tmp_path / "none", code=2).stderr
    assert contents(strange) == {"notes.txt": b"mine"}


def test_no_room_and_no_hub(server: HubServer, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free disk is looked at first; a Hub that does not recover is one line, and the same folder goes on."""
    pointed(monkeypatch, server, tmp_path / "home")
    monkeypatch.setattr(patience, "WAITS", (0.0,))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=50_000_000))
    with pytest.raises(PlanError, match="the disk has 50 MB free"):
        prepare(Address(REPO, None), tmp_path / "out").carry_out()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert downloads(server) == 0
    server.ways.status = {"get": [500] * 2}
    with pytest.raises(HubError, match=r"gave up after 2 tries"):
        prepare(Address(REPO, None), tmp_path / "out").carry_out()
    with pytest.raises(ResumeError, match="was begun there"):
        prepare(Address("org/more", None), tmp_path / "out")
    done: list[int] = []
    job = prepare(Address(REPO, None), tmp_path / "out")
    job.carry_out(done.append)
    assert sum(done) == job.total and contents(tmp_path / "out") == contents(artifact)
