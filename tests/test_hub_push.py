"""Pushing to a Hub that breaks off, is busy, stores something else: the branch never looks whole before it is."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import variants
from hub_server import HubServer, Request, hub_server, pointed

from phasefold.errors import HubError
from phasefold.formats.checkpoint import INDEX, MANIFEST
from phasefold.hub import patience
from phasefold.hub.api import Address
from phasefold.hub.push import push
from phasefold.hub.upload import Upload

REPO = "org/tiny-INT4"
WRITES = {"preupload", "lfs_batch", "lfs_put", "lfs_complete", "verify", "commit", "create", "branch", "tag"}
#: with small batches, as an artifact of terabytes is pushed
BATCHES = """
import sys
from pathlib import Path
from phasefold.hub.api import Address
from phasefold.hub.push import push
from phasefold.hub.upload import Upload
push(Path(sys.argv[1]), Upload(Address(sys.argv[2], None), batch_bytes=2_000_000))
"""


def converted(folder: Path, recipe: str = "glm-decode-int4") -> Path:
    words = ["convert", str(variants.EXAMPLES / "tiny-glm4"), str(folder), "--recipe", recipe, "--device", "cpu"]
    command = [sys.executable, "-m", "phasefold", *words, "--shard-size", "1MB", "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope="module")
def made(module_path: Path) -> Path:
    return converted(module_path / "INT4")


@pytest.fixture(scope="module")
def other(module_path: Path) -> Path:
    return converted(module_path / "FP8", "glm-prefill-fp8")


@pytest.fixture
def artifact(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "INT4"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HubServer]:
    with hub_server(tmp_path / "hub") as running:
        yield running


@pytest.fixture
def env(server: HubServer, tmp_path: Path) -> dict[str, str]:
    return server.environment(tmp_path / "home")


def run(env: dict[str, str], *words: str | Path, code: int = 0) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "phasefold", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def pushed(env: dict[str, str], artifact: Path, *words: str, repo: str = REPO) -> dict:
    return json.loads(run(env, "push", artifact, repo, "--json", *words).stdout)


def assert_never_half(server: HubServer, whole: Path, *, branch: str = "main") -> None:
    """No commit has config, index or manifest while a shard of the artifact is missing."""
    shards = {path.name for path in whole.glob("*.safetensors")}
    for commit in server.commits(REPO, branch):
        if {"config.json", INDEX, MANIFEST} & commit.files.keys():
            assert shards <= commit.files.keys(), commit.title


def assert_equal(server: HubServer, artifact: Path, *, repo: str = REPO, branch: str = "main") -> None:
    """Every file of the artifact is in the branch as it lies on disk, but for the card."""
    held = server.files(repo, branch)
    names = {path.relative_to(artifact).as_posix() for path in artifact.rglob("*") if path.is_file()}
    assert set(held) - {".gitattributes", "README.md"} == names - {"README.md"}
    assert all((artifact / name).read_bytes() == held[name].read_bytes() for name in names - {"README.md"})
    assert "phasefold" in held["README.md"].read_text()


def test_a_new_repo(server: HubServer, env: dict[str, str], artifact: Path) -> None:
    """Private, shards in a commit before the rest, no byte sent twice; a second push sends nothing."""
    done = pushed(env, artifact)
    shards = len(list(artifact.glob("*.safetensors")))
    assert shards > 5 and server.private(REPO)
    assert_equal(server, artifact)
    assert_never_half(server, artifact)
    _, first, last = server.commits(REPO)
    assert set(first.files) == {".gitattributes"} | {path.name for path in artifact.glob("*.safetensors")}
    assert done["repo"] == REPO and done["revision"] == last.sha and done["skipped"] == 0
    assert done["files"] == done["uploaded"] == len(last.files) - 1
    sizes = sum(path.stat().st_size for name, path in server.files(REPO).items() if name != ".gitattributes")
    assert done["bytes"] == done["uploaded_bytes"] == sizes
    assert len(server.asked("lfs_put")) == shards + sum(
        path.stat().st_size > 10_000 for path in artifact.iterdir() if path.suffix != ".safetensors"
    )
    before = len(server.requests)
    again = pushed(env, artifact)
    assert again == done | {"uploaded": 0, "uploaded_bytes": 0, "skipped": done["files"]}
    assert not {one.kind for one in server.requests[before:]} & WRITES
    assert "uploaded" in run(env, "push", artifact, REPO).stdout


def test_a_dry_run_only_reads(server: HubServer, env: dict[str, str], artifact: Path) -> None:
    said = run(env, "push", artifact, f"{REPO}@int4", "--dry-run", "--tag", "v1").stdout
    assert "model-00001-of-00007.safetensors" in said and "would be made, private, tag v1" in said
    told = json.loads(run(env, "push", artifact, REPO, "--dry-run", "--json").stdout)
    assert told["send"]["config.json"] == (artifact / "config.json").stat().st_size
    assert not server.exists(REPO) and {one.method for one in server.requests} == {"GET"}
    done = pushed(env, artifact)
    assert told["bytes"] == done["bytes"] and told["files"] == told["uploaded"] == done["files"]
    again = json.loads(run(env, "push", artifact, REPO, "--dry-run", "--json").stdout)
    assert again["send"] == {} and again["skipped"] == done["files"] and len(server.commits(REPO)) == 3


def killing(process: list[subprocess.Popen], kind: str, number: int) -> Callable[[Request], None]:
    """Kill a process as the request of a kind with that number begins."""
    count = iter(range(1, 1000))

    def hook(request: Request) -> None:
        if request.kind == kind and next(count) == number:
            process[0].kill()
            process[0].wait()

    return hook


@pytest.mark.parametrize(
    ("kind", "number", "commits"),
    [("lfs_put", 2, 1), ("lfs_put", 5, 2), ("commit", 2, 2), ("lfs_put", 8, 4), ("create", 1, 0), ("tree", 5, 4)],
)
def test_killed_and_given_again(
    server: HubServer, env: dict[str, str], artifact: Path, kind: str, number: int, commits: int
) -> None:
    """What is committed is not sent again, nor what is on the Hub's storage. commits: the branch's at the kill."""
    started = threading.Event()
    process: list[subprocess.Popen] = []
    kill = killing(process, kind, number)

    def hook(request: Request) -> None:
        started.wait()
        kill(request)

    server.ways.hook = hook
    process.append(subprocess.Popen([sys.executable, "-c", BATCHES, str(artifact), REPO], env=env))
    started.set()
    assert process[0].wait() == -signal.SIGKILL
    server.ways.hook = None
    if server.exists(REPO):
        assert not {"config.json", INDEX, MANIFEST} & server.files(REPO).keys() or kind == "tree"
        assert abs(len(server.commits(REPO)) - commits) <= 1  # the request at which it died may still be carried out
    held = set(server.files(REPO)) if server.exists(REPO) else set()
    stored = {one.path.split("/")[-1] for one in server.asked("lfs_put") if one.status == 200}
    before = len(server.requests)
    done = pushed(env, artifact)
    assert_equal(server, artifact)
    assert_never_half(server, artifact)
    sent = [one.path.split("/")[-1] for one in server.requests[before:] if one.kind == "lfs_put"]
    assert not stored & set(sent) and len(sent) == len(set(sent))
    assert done["skipped"] >= len(held - {".gitattributes", "README.md"})


def test_busy_and_broken_lines(server: HubServer, env: dict[str, str], artifact: Path) -> None:
    """429 with Retry-After, 503, a PUT cut at its half, a commit that is done while its answer is lost."""
    server.ways.status = {"lfs_put": [429, 503], "preupload": [429], "lfs_batch": [500], "commit": [502]}
    server.ways.drop = {"lfs_put": [0.5], "commit": [1.0]}
    done = run(env, "push", artifact, REPO)
    assert_equal(server, artifact)
    assert_never_half(server, artifact)
    assert len(server.commits(REPO)) == 3
    assert "Rate limited" in done.stderr and "trying again" in done.stderr
    assert all(line.startswith("note: ") for line in done.stderr.splitlines()), done.stderr


def test_it_outlasts_the_library(
    server: HubServer, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library gives up on a request after six times; a Hub that does not recover is told in one line."""
    pointed(monkeypatch, server, tmp_path / "home")
    monkeypatch.setattr(patience, "WAITS", (0.0, 0.0))
    server.ways.status = {"lfs_put": [429] * 7}
    told: list[str] = []
    push(artifact, Upload(Address(REPO, None), notice=told.append))
    assert_equal(server, artifact)
    assert any("429" in line and "trying again" in line for line in told)
    server.ways.status = {"commit": [503] * 3}
    with pytest.raises(HubError, match=r"gave up after 3 tries .*503.*give the same command again"):
        push(artifact, Upload(Address("org/next", None)))
    push(artifact, Upload(Address("org/next", None)))
    assert_equal(server, artifact, repo="org/next")


@pytest.mark.parametrize("fault", ["dropped", "other"])
def test_a_hub_that_stores_something_else(
    server: HubServer, env: dict[str, str], artifact: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """What a commit made of the files is read back: one that is not there, or is another, is named."""
    honest = server.store.changed

    def changed(repo, before, key, value, data):
        if value["path"] == "tokenizer_config.json":
            return dict(before) if fault == "dropped" else honest(repo, before, key, value, data[:-1] + b"?")
        return honest(repo, before, key, value, data)

    monkeypatch.setattr(server.store, "changed", changed)
    words = {"dropped": "tokenizer_config.json was sent and is not in it", "other": "is something else there"}
    assert words[fault] in run(env, "push", artifact, REPO, code=1).stderr


def test_something_else_is_there(server: HubServer, env: dict[str, str], artifact: Path, other: Path) -> None:
    """Refused by name, nothing written; with --replace it goes, and no commit is a mixture that looks whole."""
    server.add(REPO, other, private=True)
    server.add(REPO, {"pictures/old.png": b"x"})
    before = server.commits(REPO)
    for branch in ("main", "older"):
        server.add(REPO, {"note": branch.encode()}, revision=branch)
    said = run(env, "push", artifact, REPO, code=1).stderr
    assert "holds model-00001-of-00008.safetensors and 10 more, which are not this artifact's" in said
    assert "--replace" in said
    assert not {one.kind for one in server.requests} & WRITES
    done = pushed(env, artifact, "--replace")
    assert_equal(server, artifact)
    first, *_ = server.commits(REPO)[len(before) + 1 :]
    assert not {"config.json", INDEX, MANIFEST} & first.files.keys() and done["uploaded"] > 8
    theirs = {path.name: path for path in other.glob("*.safetensors")}
    for commit in server.commits(REPO)[len(before) + 1 :][:-1]:
        assert theirs and not {"config.json", INDEX, MANIFEST} & commit.files.keys()
    again = pushed(env, artifact, "--replace")
    assert again["uploaded"] == 0 and again["revision"] == done["revision"]


def test_a_changed_artifact(server: HubServer, env: dict[str, str], artifact: Path, tmp_path: Path) -> None:
    """The same names with other weights: refused, whether the one that is there is whole or not."""
    pushed(env, artifact)
    changed = converted(tmp_path / "g128", "glm-decode-int4-g128")
    assert "not this artifact's" in run(env, "push", changed, REPO, code=1).stderr
    server.add("org/half", {path.name: path for path in list(artifact.glob("*.safetensors"))[:2]}, private=True)
    assert "not this artifact's" in run(env, "push", changed, "org/half", code=1).stderr
    pushed(env, changed, "--replace")
    assert_equal(server, changed)
    server.add(REPO, {"config.json": b"{}"})
    assert "config.json" in run(env, "push", changed, REPO, code=1).stderr


def test_branches_and_tags(server: HubServer, env: dict[str, str], artifact: Path, other: Path) -> None:
    """A branch of its own holds nothing of main; a tag that stands elsewhere is refused before anything is sent."""
    pushed(env, artifact)
    done = pushed(env, other, "--branch", "fp8", "--tag", "v1-fp8")
    assert_equal(server, artifact)
    assert_equal(server, other, branch="fp8")
    assert_never_half(server, other, branch="fp8")
    assert server.tags(REPO) == {"v1-fp8": done["revision"]} and done["branch"] == "fp8"
    assert pushed(env, other, "--tag", "v1-fp8", repo=f"{REPO}@fp8")["uploaded"] == 0
    before = len(server.requests)
    for words in (("--tag", "v1-fp8"), ("--branch", "new", "--tag", "v1-fp8")):
        assert "tag v1-fp8 exists" in run(env, "push", artifact, REPO, *words, code=1).stderr
    assert "is a tag" in run(env, "push", artifact, f"{REPO}@v1-fp8", code=1).stderr
    assert not {one.kind for one in server.requests[before:]} & WRITES
    assert "give one of the two" in run(env, "push", artifact, f"{REPO}@a", "--branch", "b", code=2).stderr
    assert pushed(env, artifact, "--tag", "v2")["uploaded"] == 0 and "v2" in server.tags(REPO)


def test_what_is_public(server: HubServer, env: dict[str, str], artifact: Path) -> None:
    """No push changes who may see a repo, and none goes to a public one unasked."""
    pushed(env, artifact, "--public")
    assert not server.private(REPO)
    said = run(env, "push", artifact, REPO, code=1).stderr
    assert "is public" in said and "--public" in said
    pushed(env, artifact, repo="org/mine")
    assert "is private" in run(env, "push", artifact, "org/mine", "--public", code=1).stderr


def test_refused_before_anything_is_written(server: HubServer, env: dict[str, str], artifact: Path) -> None:
    """No token, a byte that is not the manifest's, a file that is missing, a folder that is no artifact."""
    without = {name: value for name, value in env.items() if name != "HF_TOKEN"}
    assert "no token" in run(without, "push", artifact, REPO, code=1).stderr
    run(without, "push", artifact, REPO, "--dry-run")
    shard = artifact / "model-00003-of-00007.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    os.chmod(shard, 0o644)
    shard.write_bytes(data)
    assert f"{shard.name}: altered" in run(env, "push", artifact, REPO, code=1).stderr
    shard.unlink()
    assert shard.name in run(env, "push", artifact, REPO, code=1).stderr
    run(env, "push", variants.EXAMPLES / "tiny-glm4", REPO, code=1)
    assert not server.exists(REPO) and not {one.kind for one in server.requests} & WRITES


def test_results_and_strangers(server: HubServer, env: dict[str, str], artifact: Path) -> None:
    """What is not the artifact's stays here, and is named; a card that was edited in the repo keeps its text."""
    (artifact / "notes.txt").write_text("mine")
    done = run(env, "push", artifact, REPO)
    assert "notes.txt: not the artifact's, not pushed" in done.stderr and "notes.txt" not in server.files(REPO)
    card = server.files(REPO)["README.md"].read_bytes()
    server.add(REPO, {"README.md": card + b"\n## Ours\n"})
    assert pushed(env, artifact)["uploaded"] == 0
    assert server.files(REPO)["README.md"].read_bytes() == card + b"\n## Ours\n"
    server.add(REPO, {"README.md": b"# Mine\n"})
    assert pushed(env, artifact)["uploaded"] == 1
    assert server.files(REPO)["README.md"].read_text().count("# Mine\n") == 1


def test_interrupted_in_one_sentence(server: HubServer, env: dict[str, str], artifact: Path) -> None:
    reached = threading.Event()
    server.ways.slow = {"lfs_put": 100_000}
    server.ways.hook = lambda request: reached.set() if request.kind == "lfs_put" else None
    command = [sys.executable, "-m", "phasefold", "push", str(artifact), REPO]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert reached.wait(60)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 130 and "give the same command again" in said and "Traceback" not in said
