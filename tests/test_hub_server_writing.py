"""The same of what goes up: commits, LFS files whole and in parts, and what becomes of them with bad luck."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hub_server import HubServer, hub_server, pointed
from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError, RevisionNotFoundError

BIG = random.Random(1).randbytes(300_000)
SMALL = b'{"a": 1}\n'
NAME = "org/model"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server(tmp_path / "hub") as server:
        pointed(monkeypatch, server, tmp_path / "home")
        yield server


@pytest.fixture
def api(server: HubServer) -> HfApi:
    return HfApi()


def added(path: str, data: bytes, folder: Path) -> CommitOperationAdd:
    """An operation that reads a file, as uploads of LFS files do."""
    place = folder / hashlib.sha256(data).hexdigest()
    place.write_bytes(data)
    return CommitOperationAdd(path, place)


def kinds(server: HubServer) -> list[str]:
    return [one.kind for one in server.requests if one.kind]


def test_a_commit_of_small_and_large_files(server: HubServer, api: HfApi, tmp_path: Path) -> None:
    api.create_repo(NAME)
    operations = [CommitOperationAdd("config.json", SMALL), added("deep/model.safetensors", BIG, tmp_path)]
    operations += [CommitOperationAdd("README.md", b"---\nlicense: mit\n---\n"), CommitOperationAdd("empty", b"")]
    made = api.create_commit(NAME, operations, commit_message="first", commit_description="of two")
    assert kinds(server) == ["create", "info", "preupload", "lfs_batch", "lfs_put", "verify", "commit"]
    assert (server.asked("lfs_put")[0].nbytes, server.asked("lfs_put")[0].status) == (len(BIG), 200)
    commit = server.commits(NAME)[-1]
    assert (commit.sha, commit.title, commit.message) == (made.oid, "first", "of two")
    held = {path: place.read_bytes() for path, place in server.files(NAME).items()}
    assert held["config.json"] == SMALL and held["deep/model.safetensors"] == BIG and held["empty"] == b""
    assert made.commit_url == f"{server.url}/{NAME}/commit/{made.oid}"

    again = [CommitOperationAdd("config.json", SMALL), added("deep/model.safetensors", BIG, tmp_path)]
    assert api.create_commit(NAME, again, commit_message="same").oid == made.oid  # the library sends none
    assert len(server.asked("commit")) == 1
    copied: list[CommitOperationAdd | CommitOperationCopy] = [
        added("other.safetensors", BIG, tmp_path),
        CommitOperationCopy("deep/model.safetensors", "b.safetensors"),
    ]
    api.create_commit(NAME, copied, commit_message="copy")
    assert len(server.asked("lfs_put")) == 1
    assert server.commits(NAME)[-1].files["b.safetensors"] == hashlib.sha256(BIG).hexdigest()
    gone = [CommitOperationDelete("deep/"), CommitOperationDelete("config.json")]
    api.create_commit(NAME, gone, commit_message="delete")
    assert set(server.files(NAME)) == {".gitattributes", "README.md", "empty", "other.safetensors", "b.safetensors"}
    with pytest.raises(RemoteEntryNotFoundError, match="A file with this name doesn't exist"):
        api.create_commit(NAME, [CommitOperationDelete("config.json")], commit_message="delete")
    with pytest.raises(RevisionNotFoundError):
        api.create_commit(NAME, [CommitOperationAdd("a", b"a")], commit_message="a", revision="none")
    assert [one.title for one in server.commits(NAME)] == ["initial commit", "first", "copy", "delete"]


@pytest.mark.parametrize("size", [100_000, 100_001, 250_000])
def test_large_files_go_up_in_parts(server: HubServer, api: HfApi, tmp_path: Path, size: int) -> None:
    api.create_repo(NAME)
    server.multipart_bytes, server.part_bytes = 100_000, 50_000
    api.create_commit(NAME, [added("model.safetensors", BIG[:size], tmp_path)], commit_message="parts")
    assert server.files(NAME)["model.safetensors"].read_bytes() == BIG[:size]
    parts = [one.nbytes for one in server.asked("lfs_put")]
    assert sum(parts) == size and len(parts) == -(-size // 50_000) and max(parts) == 50_000
    assert kinds(server)[-3:] == ["lfs_complete", "verify", "commit"]


def test_files_go_up_before_their_commit(server: HubServer, api: HfApi, tmp_path: Path) -> None:
    api.create_repo(NAME)
    api.create_branch(NAME, branch="fold")
    operations = [added(f"model-{number}.safetensors", BIG[number:], tmp_path) for number in range(3)]
    for one in operations:
        api.preupload_lfs_files(NAME, [one], revision="fold")
    assert "model-0.safetensors" not in server.files(NAME, "fold") and len(server.asked("lfs_put")) == 3
    api.create_commit(NAME, operations, commit_message="all", revision="fold")
    assert len(server.asked("lfs_put")) == 3 and set(server.files(NAME)) == {".gitattributes"}
    assert {len(one.read_bytes()) for path, one in server.files(NAME, "fold").items() if path != ".gitattributes"} == {
        len(BIG) - number for number in range(3)
    }


def test_bytes_that_are_not_what_their_hash_says_are_refused(server: HubServer, api: HfApi, tmp_path: Path) -> None:
    api.create_repo(NAME)
    operation = added("model.safetensors", BIG, tmp_path)
    assert operation.upload_info.sha256.hex() == hashlib.sha256(BIG).hexdigest()
    Path(str(operation.path_or_fileobj)).write_bytes(BIG[::-1])  # behind the library's back
    for server.multipart_bytes, server.part_bytes in ((1 << 30, 1 << 30), (1000, 100_000)):
        with pytest.raises(RuntimeError, match=r"model\.safetensors") as caught:
            api.create_commit(NAME, [operation], commit_message="wrong")
        assert isinstance(caught.value.__cause__, HfHubHTTPError)
        assert caught.value.__cause__.response.status_code == 422
    operation._is_uploaded = True  # and of what never went up there is no commit
    with pytest.raises(HfHubHTTPError, match="no LFS object"):
        api.create_commit(NAME, [operation], commit_message="wrong")
    assert set(server.files(NAME)) == {".gitattributes"} and not (list((tmp_path / "hub" / "objects").iterdir())[1:])


def test_a_commit_upon_another_than_the_head_is_refused(server: HubServer, api: HfApi) -> None:
    first = server.add(NAME, {"a.txt": b"a"})
    second = api.create_commit(NAME, [CommitOperationAdd("b.txt", b"b")], commit_message="b", parent_commit=first)
    with pytest.raises(HfHubHTTPError, match="A commit has happened since") as caught:
        api.create_commit(NAME, [CommitOperationAdd("c.txt", b"c")], commit_message="c", parent_commit=first)
    assert caught.value.response.status_code == 412
    assert [one.sha for one in server.commits(NAME)] == [first, second.oid]


def test_commits_at_once_follow_each_other(server: HubServer, api: HfApi) -> None:
    server.add(NAME, {"a.txt": b"a"})

    def commit(number: int) -> str:
        operation = CommitOperationAdd(f"{number}.txt", b"%d" % number)
        return api.create_commit(NAME, [operation], commit_message=str(number)).oid

    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(commit, range(16)))
    assert len(server.commits(NAME)) == 17 and {one.sha for one in server.commits(NAME)[1:]} == made
    assert set(server.files(NAME)) == {"a.txt", *(f"{number}.txt" for number in range(16))}


@pytest.mark.parametrize("wait", [0, 1])
def test_a_server_that_is_busy_is_asked_again(
    server: HubServer, api: HfApi, tmp_path: Path, caplog: pytest.LogCaptureFixture, wait: int
) -> None:
    api.create_repo(NAME)
    server.ways.status, server.ways.retry_after = {"lfs_put": [429]}, wait
    api.create_commit(NAME, [added("model.safetensors", BIG, tmp_path)], commit_message="first")
    assert f"Waiting {wait + 1}.0s" in caplog.text  # a second more than it is told
    assert [(one.status, one.nbytes) for one in server.asked("lfs_put")] == [(429, len(BIG)), (200, len(BIG))]


def test_what_the_library_asks_once_alone(server: HubServer, api: HfApi) -> None:
    server.add(NAME, {"a.txt": b"a"})
    server.ways.status = {"commit": [503], "info": [503], "create": [503], "branch": [503], "tag": [503]}
    for ask in (
        lambda: api.create_commit(NAME, [CommitOperationAdd("b.txt", b"b")], commit_message="b"),
        lambda: api.model_info(NAME),
        lambda: api.create_repo("org/other", exist_ok=True),
        lambda: api.create_branch(NAME, branch="b", exist_ok=True),
        lambda: api.create_tag(NAME, tag="v1", exist_ok=True),
    ):
        with pytest.raises(HfHubHTTPError, match="out of luck"):
            ask()
    assert len(server.commits(NAME)) == 1 and server.tags(NAME) == {} and not server.exists("org/other")


def test_uploads_that_are_cut(server: HubServer, api: HfApi, tmp_path: Path) -> None:
    api.create_repo(NAME)
    server.multipart_bytes, server.part_bytes = 200_000, 100_000
    server.ways.drop = {"lfs_put": [0.5, 1.0]}
    api.create_commit(NAME, [added("model.safetensors", BIG, tmp_path)], commit_message="first")
    assert server.files(NAME)["model.safetensors"].read_bytes() == BIG
    first, second, *others = server.asked("lfs_put")
    assert (first.path, first.status, first.nbytes) == (second.path, 0, 50_000)
    assert (second.status, second.nbytes) == (0, 100_000) and [one.status for one in others] == [200, 200, 200]
    server.ways.drop["commit"] = [0.5, 1.0]
    for count in (2, 3):  # the second is done, though nobody hears of it
        with pytest.raises(Exception, match=r"disconnected|reset|Broken"):
            api.create_commit(NAME, [CommitOperationAdd("a.txt", b"a")], commit_message="a")
        assert len(server.commits(NAME)) == count
