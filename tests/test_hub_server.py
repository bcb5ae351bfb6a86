"""That the tests' Hub is one to huggingface_hub, which is what asks here: repos, trees, downloads, and bad luck."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer, Request, hub_server, pointed
from huggingface_hub import CommitOperationAdd, HfApi, HfFileSystem, get_session, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile, RepoFolder
from huggingface_hub.utils._http import http_backoff

BIG = random.Random(1).randbytes(300_000)
SMALL = b'{"a": 1}\n'
NAME = "org/model"
FILES = {"config.json": SMALL, "model.safetensors": BIG, "deep/er/notes.txt": b"of it\n"}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server(tmp_path / "hub") as server:
        pointed(monkeypatch, server, tmp_path / "home")
        yield server


@pytest.fixture
def api(server: HubServer) -> HfApi:
    return HfApi()


def ranged(path: str, start: int, stop: int, revision: str = "main") -> bytes:
    url = hf_hub_url(NAME, path, revision=revision)
    answer = http_backoff("GET", url, headers={"Range": f"bytes={start}-{stop - 1}"}, follow_redirects=True)
    answer.raise_for_status()
    assert answer.status_code == 206
    return answer.content


# repos, branches and tags


def test_a_repo_is_created_once_and_privately(server: HubServer, api: HfApi) -> None:
    url = api.create_repo(NAME, private=True)
    assert (url.repo_id, url.endpoint) == (NAME, server.url)
    assert server.exists(NAME) and server.private(NAME) and api.model_info(NAME).private is True
    with pytest.raises(HfHubHTTPError, match="already created") as caught:
        api.create_repo(NAME)
    assert caught.value.response.status_code == 409
    assert api.create_repo(NAME, exist_ok=True).repo_id == NAME
    assert api.create_repo("alone").repo_id == "tester/alone"
    assert not server.private("tester/alone")
    assert api.list_repo_files(NAME) == [".gitattributes"]
    assert [commit.title for commit in api.list_repo_commits(NAME)] == ["initial commit"]
    api.delete_repo(NAME)
    assert not server.exists(NAME) and not api.repo_exists(NAME)
    assert api.whoami()["name"] == "tester"


def test_who_may_read_and_write(server: HubServer) -> None:
    server.add("org/open", {"a.txt": b"a"})
    server.add("org/closed", {"a.txt": b"a"}, private=True)
    nobody = HfApi(token=False)
    assert nobody.list_repo_files("org/open") == ["a.txt"]
    for name in ("org/closed", "org/none"):
        with pytest.raises(RepositoryNotFoundError) as caught:
            nobody.model_info(name)
        assert caught.value.response.status_code == 401
    with pytest.raises(RepositoryNotFoundError) as caught:
        HfApi().model_info("org/none")
    assert caught.value.response.status_code == 404
    with pytest.raises(HfHubHTTPError, match="401"):
        nobody.create_commit("org/open", [CommitOperationAdd("b.txt", b"b")], commit_message="b")
    with pytest.raises(HfHubHTTPError, match="Invalid credentials"):
        HfApi(token="hf_wrong").model_info("org/open")
    server.ways.need_token = True
    with pytest.raises(HfHubHTTPError, match="401"):
        nobody.list_repo_files("org/open")


def test_branches_and_tags(server: HubServer, api: HfApi) -> None:
    first = server.add(NAME, {"a.txt": b"a"})
    second = server.add(NAME, {"b.txt": b"b"})
    api.create_branch(NAME, branch="decode/fold", revision=first)
    api.create_branch(NAME, branch="prefill")
    assert server.branches(NAME) == {"main": second, "decode/fold": first, "prefill": second}
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_branch(NAME, branch="prefill")
    api.create_branch(NAME, branch="prefill", exist_ok=True)
    with pytest.raises(RevisionNotFoundError):
        api.create_branch(NAME, branch="other", revision="nowhere")
    made = api.create_commit(NAME, [CommitOperationAdd("c.txt", b"c")], commit_message="c", revision="decode/fold")
    api.create_tag(NAME, tag="v1", revision="decode/fold")
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_tag(NAME, tag="v1")
    api.create_tag(NAME, tag="v1", exist_ok=True)
    assert server.tags(NAME) == {"v1": made.oid} and server.branches(NAME)["main"] == second
    for revision in ("decode/fold", "v1", made.oid, made.oid[:7]):
        assert api.list_repo_files(NAME, revision=revision) == ["a.txt", "c.txt"]
        assert api.repo_info(NAME, revision=revision).sha == made.oid
        assert ranged("c.txt", 0, 1, revision) == b"c"
    refs = api.list_repo_refs(NAME)
    assert {one.name: one.target_commit for one in refs.branches} == server.branches(NAME)
    assert [(one.ref, one.target_commit) for one in refs.tags] == [("refs/tags/v1", made.oid)]
    assert [one.commit_id for one in api.list_repo_commits(NAME, revision="decode/fold")] == [made.oid, first]
    api.delete_tag(NAME, tag="v1")
    api.delete_branch(NAME, branch="decode/fold")
    assert server.tags(NAME) == {} and "decode/fold" not in server.branches(NAME)
    with pytest.raises(RevisionNotFoundError, match="Invalid rev id"):
        api.model_info(NAME, revision="decode/fold")


# what is there


def test_trees_and_infos(server: HubServer, api: HfApi) -> None:
    sha = server.add(NAME, FILES)
    found = {one.path: one for one in api.list_repo_tree(NAME, recursive=True)}
    assert set(found) == {*FILES, "deep", "deep/er"}
    big, small = found["model.safetensors"], found["config.json"]
    assert isinstance(big, RepoFile) and isinstance(small, RepoFile) and isinstance(found["deep"], RepoFolder)
    assert big.lfs is not None and small.lfs is None and big.xet_hash is None
    assert (big.lfs.sha256, big.lfs.size, big.size) == (hashlib.sha256(BIG).hexdigest(), len(BIG), len(BIG))
    assert small.blob_id == hashlib.sha1(b"blob %d\0" % len(SMALL) + SMALL).hexdigest()
    assert [one.path for one in api.list_repo_tree(NAME)] == ["deep", "config.json", "model.safetensors"]
    assert [one.path for one in api.list_repo_tree(NAME, "deep/er")] == ["deep/er/notes.txt"]
    with pytest.raises(RemoteEntryNotFoundError):
        list(api.list_repo_tree(NAME, "config.json/none"))
    (expanded,) = api.list_repo_tree(NAME, "deep/er", expand=True)
    assert expanded.last_commit is not None and expanded.last_commit.oid == sha
    told = api.get_paths_info(NAME, ["model.safetensors", "deep", "none"], revision=sha)
    assert [(one.path, type(one)) for one in told] == [("model.safetensors", RepoFile), ("deep", RepoFolder)]
    info = api.model_info(NAME, files_metadata=True)
    assert info.sha == sha and info.siblings is not None
    assert {one.rfilename: one.size for one in info.siblings} == {path: len(data) for path, data in FILES.items()}
    assert [one.lfs.sha256 for one in info.siblings if one.lfs] == [big.lfs.sha256]
    assert api.model_info(NAME, expand=["sha"]).siblings is None
    assert {path: place.read_bytes() for path, place in server.files(NAME).items()} == FILES


def test_a_tree_comes_page_by_page(server: HubServer, api: HfApi) -> None:
    names = [f"part-{number:02}.bin" for number in range(23)]
    server.add(NAME, {name: name.encode() for name in names})
    server.page = 5
    assert sorted(api.list_repo_files(NAME)) == names
    assert len(server.asked("tree")) == 5
    server.page = 1000
    assert sorted(api.list_repo_files(NAME)) == names and len(server.asked("tree")) == 6


# downloads


def test_files_come_whole(server: HubServer, api: HfApi, tmp_path: Path) -> None:
    sha = server.add(NAME, FILES)
    for path, data in FILES.items():
        assert Path(api.hf_hub_download(NAME, path, local_dir=tmp_path / "local")).read_bytes() == data
        cached = Path(api.hf_hub_download(NAME, path))
        assert cached.read_bytes() == data and cached.is_relative_to(tmp_path / "home" / "hub")
        assert cached.resolve().name == server.commits(NAME)[-1].files[path]
    asked = len(server.asked("get"))
    assert Path(api.hf_hub_download(NAME, "model.safetensors", revision=sha)).read_bytes() == BIG
    assert len(server.asked("get")) == asked
    meta = api.get_hf_file_metadata(url=hf_hub_url(NAME, "model.safetensors"))
    assert (meta.commit_hash, meta.etag, meta.size) == (sha, hashlib.sha256(BIG).hexdigest(), len(BIG))
    assert meta.location.startswith(server.files_url) and meta.xet_file_data is None
    with pytest.raises(RemoteEntryNotFoundError):
        api.hf_hub_download(NAME, "none.json")
    with pytest.raises(RevisionNotFoundError):
        api.hf_hub_download(NAME, "config.json", revision="none")
    assert not any("Authorization" in one.headers for one in server.requests if one.path.startswith("/files/"))


def test_a_snapshot(server: HubServer, tmp_path: Path) -> None:
    server.add(NAME, FILES, private=True)
    folder = Path(snapshot_download(NAME, local_dir=tmp_path / "all"))
    assert {path: (folder / path).read_bytes() for path in FILES} == FILES
    some = Path(snapshot_download(NAME, allow_patterns=["*.json"]))
    assert [one.name for one in some.rglob("*") if one.is_file()] == ["config.json"]


def test_ranges(server: HubServer, api: HfApi) -> None:
    server.add(NAME, FILES)
    for path, data in (("model.safetensors", BIG), ("config.json", SMALL)):
        assert ranged(path, 2, 7) == data[2:7]
        assert ranged(path, 3, 10**9) == data[3:]
    url = hf_hub_url(NAME, "model.safetensors")
    last = get_session().get(url, headers={"Range": "bytes=-10"})
    assert (last.status_code, last.content) == (206, BIG[-10:])
    assert last.headers["Content-Range"] == f"bytes {len(BIG) - 10}-{len(BIG) - 1}/{len(BIG)}"
    beyond = get_session().get(url, headers={"Range": f"bytes={len(BIG)}-"})
    assert (beyond.status_code, beyond.headers["Content-Range"]) == (416, f"bytes */{len(BIG)}")
    server.ways.whole = True
    assert get_session().get(url, headers={"Range": "bytes=2-6"}).content == BIG
    server.ways.whole = False
    files = HfFileSystem()
    with files.open(f"{NAME}/model.safetensors", block_size=1000) as stream:
        stream.seek(100_000)
        assert stream.read(500) == BIG[100_000:100_500]
    assert (server.asked("get")[-1].start, server.asked("get")[-1].nbytes) == (100_000, 1500)
    with files.open(f"{NAME}/model.safetensors", block_size=0) as stream:
        assert stream.read(1000) == BIG[:1000]
    assert files.info(f"{NAME}@main/deep/er/notes.txt")["size"] == 6


def test_a_download_that_is_cut_goes_on(server: HubServer, api: HfApi, tmp_path: Path) -> None:
    """What the library keeps of it are whole pieces of 10 MiB."""
    long, kept = BIG * 40, 10 << 20
    server.add(NAME, {"long.safetensors": long})
    server.ways.drop["get"] = [0.95]
    assert Path(api.hf_hub_download(NAME, "long.safetensors", local_dir=tmp_path / "a")).read_bytes() == long
    first, second = server.asked("get")
    assert (first.start, first.status, first.nbytes) == (None, 200, int(len(long) * 0.95))
    assert (second.start, second.stop, second.status, second.nbytes) == (kept, len(long), 206, len(long) - kept)
    server.ways.drop["get"], server.ways.whole = [0.95], True
    assert Path(api.hf_hub_download(NAME, "long.safetensors", local_dir=tmp_path / "b")).read_bytes() == long
    server.ways.drop["get"], server.ways.whole = [0.25], False
    assert ranged("long.safetensors", 0, 1000) == BIG[:1000]
    assert [one.nbytes for one in server.asked("get")[-2:]] == [250, 1000]


def test_a_changed_byte_is_not_seen_by_the_library(server: HubServer, api: HfApi, tmp_path: Path) -> None:
    server.add(NAME, FILES)
    server.ways.corrupt["get"] = [100_000, 3]
    assert ranged("model.safetensors", 0, 10) == BIG[:10]  # too short to have byte 100,000
    got = Path(api.hf_hub_download(NAME, "model.safetensors", local_dir=tmp_path / "a")).read_bytes()
    assert [index for index in range(len(BIG)) if got[index] != BIG[index]] == [100_000]
    part = ranged("model.safetensors", 50, 60)
    assert part != BIG[50:60] and part[:3] + part[4:] == BIG[50:53] + BIG[54:60]
    assert ranged("model.safetensors", 50, 60) == BIG[50:60]


# bad luck


def test_what_the_library_makes_of_failures(server: HubServer, api: HfApi, tmp_path: Path) -> None:
    server.add(NAME, FILES)
    server.ways.status["head"] = [500, 500]  # asked once more, and then with patience
    assert Path(api.hf_hub_download(NAME, "config.json", local_dir=tmp_path)).read_bytes() == SMALL
    server.ways.status["get"] = [503]
    with pytest.raises(HfHubHTTPError, match="503"):
        api.hf_hub_download(NAME, "model.safetensors")
    server.ways.status["get"] = [503]
    assert ranged("model.safetensors", 0, 10) == BIG[:10]
    server.ways.status["info"] = [500]
    with pytest.raises(LocalEntryNotFoundError):
        snapshot_download(NAME, local_dir=tmp_path / "none")
    server.add(NAME, {"config.json": b"new"})
    server.ways.status["head"] = [500]  # what is there is taken for what was asked for
    assert Path(api.hf_hub_download(NAME, "config.json", local_dir=tmp_path)).read_bytes() == SMALL
    server.ways.whole = True  # and the whole file for a range of it
    with HfFileSystem().open(f"{NAME}/model.safetensors", block_size=1000) as stream:
        stream.seek(100_000)
        assert stream.read(500) == BIG[:500]


def test_bodies_may_be_slow(server: HubServer, api: HfApi, tmp_path: Path) -> None:
    server.add(NAME, FILES)
    server.ways.slow = {"get": 1_000_000, "lfs_put": 1_000_000}
    began = time.monotonic()
    assert Path(api.hf_hub_download(NAME, "model.safetensors", local_dir=tmp_path)).read_bytes() == BIG
    api.create_commit(NAME, [CommitOperationAdd("other.safetensors", BIG[1:])], commit_message="slow")
    assert time.monotonic() - began > 0.6


def test_a_hook_sees_each_request_as_it_begins(server: HubServer, api: HfApi) -> None:
    sha = server.add(NAME, {"a.txt": b"a"})
    seen, late = list[Request](), threading.Event()

    def hook(request: Request) -> None:
        seen.append(request)
        if request.kind == "commit":
            late.set()
            assert server.commits(NAME)[-1].sha == sha and request.status == 0

    server.ways.hook = hook
    api.create_commit(NAME, [CommitOperationAdd("b.txt", b"b")], commit_message="b")
    assert late.is_set() and [one.kind for one in seen if one.kind] == ["preupload", "commit"]


def test_a_process_of_its_own_asks_it(server: HubServer, tmp_path: Path) -> None:
    server.add(NAME, FILES, private=True)
    (tmp_path / "b.safetensors").write_bytes(BIG)
    code = (
        "from huggingface_hub import HfApi\n"
        f"HfApi().upload_file(path_or_fileobj={str(tmp_path / 'b.safetensors')!r}, path_in_repo='b', repo_id={NAME!r})"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=server.environment(tmp_path / "other"),
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert server.files(NAME)["b"].read_bytes() == BIG


def test_it_ends_at_once_and_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a body that would take minutes, one client has seen enough, and the other is cut short."""
    with hub_server(tmp_path / "hub") as server:
        pointed(monkeypatch, server, tmp_path / "home")
        server.add(NAME, FILES)
        server.ways.slow["get"] = 1000.0
        url = hf_hub_url(NAME, "model.safetensors")
        for _ in range(2):
            with get_session().stream("GET", url) as answer:
                assert next(answer.iter_raw())
        with get_session().stream("GET", url) as answer:
            pieces = answer.iter_raw()
            assert next(pieces)
            server.close()
            with pytest.raises(Exception, match=r"peer closed|reset"):
                list(pieces)
    assert capfd.readouterr() == ("", "")
