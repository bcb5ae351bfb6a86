"""A checkpoint that lies on the Hub: the same tensors and digest as from its folder, and weights through a window."""

from __future__ import annotations

import os
import pickle
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import variants
from hub_server import HubServer, hub_server, pointed

from phasefold.errors import CheckpointError, HubError
from phasefold.formats.checkpoint import Checkpoint, Range, Reader, Stored, open_checkpoint
from phasefold.hub import patience, pieces, ranges
from phasefold.hub.api import Address, parse
from phasefold.hub.pieces import items_of
from phasefold.hub.repo import RepoShards, open_repo
from phasefold.hub.tree import Entry
from phasefold.hub.window import Window

SOURCE = variants.EXAMPLES / "tiny-kimi"
REPO = "org/tiny"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub that holds tiny-kimi, asked with small pieces and without long waits."""
    with hub_server(tmp_path / "server") as running:
        pointed(monkeypatch, running, tmp_path / "home")
        monkeypatch.setattr(pieces, "PIECE", 1 << 20)
        monkeypatch.setattr(pieces, "_GAP", 1 << 10)
        monkeypatch.setattr(patience, "WAITS", (0.01,) * 7)
        running.add(REPO, SOURCE)
        yield running


def opened(window: Path | None = None, limit: int = 10**8, notices: list[str] | None = None) -> Checkpoint:
    notice = notices.append if notices is not None else None
    return open_checkpoint(open_repo(Address(REPO, None), window=window, window_bytes=limit, notice=notice))


def steps_of(checkpoint: Checkpoint, count: int) -> list[tuple[str, list[str]]]:
    names = list(checkpoint.tensors)
    cuts = [len(names) * number // count for number in range(count + 1)]
    return [(f"step {number}", names[cuts[number] : cuts[number + 1]]) for number in range(count)]


def read_all(reader: Reader, steps: list[tuple[str, list[str]]]) -> None:
    """Every tensor of every step, from several threads, against the folder's bytes."""
    local = Reader(open_checkpoint(SOURCE))
    for step, names in steps:
        wrong: list[str] = []

        def work(mine: list[str], wrong: list[str] = wrong) -> None:
            for name in mine:
                size = local.checkpoint.tensors[name].nbytes
                ours, theirs = bytearray(size), bytearray(size)
                try:
                    reader.read(name, 0, memoryview(ours))
                except Exception as error:
                    wrong.append(str(error))
                    return
                local.read(name, 0, memoryview(theirs))
                if ours != theirs:
                    wrong.append(f"{name} differs")

        threads = [threading.Thread(target=work, args=(names[number::3],)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, wrong[0]
        reader.let_go(step)
    local.close()


def named(checkpoint: Checkpoint) -> str:
    """The folder of a repo at a commit, within a place."""
    repo = checkpoint.place.repo
    assert repo
    return f"{repo.name.replace('/', '--')}@{repo.revision[:12]}"


def held(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def test_a_repo_is_the_checkpoint_that_was_put_there(server: HubServer) -> None:
    ours, folder = opened(), open_checkpoint(SOURCE)
    assert ours.tensors == folder.tensors and ours.config_bytes == folder.config_bytes and ours.sizes == folder.sizes
    assert ours.digest == folder.digest
    sha = server.branches(REPO)["main"]
    assert (
        ours.place.identity() == {"name": "tiny", "repo": REPO, "revision": sha} and ours.label == f"{REPO}@{sha[:12]}"
    )
    assert pickle.loads(pickle.dumps(ours)).tensors == ours.tensors
    carried = sum(one.nbytes for one in server.requests)
    assert carried < folder.total_size / 4, "headers and samples only"


def test_names_of_repos_and_what_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse("org/name") == Address("org/name", None) and parse("org/name@v1.0") == Address("org/name", "v1.0")
    for text in ("name", "./name", "/abs/name", "a/b/c", "org/name@", "org/na me", "org/name@a b", "../x"):
        assert parse(text) is None, text
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert parse("org/name") is None, "a folder of that name comes first"


@pytest.mark.parametrize("count", [1, 4, 9])
def test_weights_come_through_a_window_that_never_overflows(server: HubServer, tmp_path: Path, count: int) -> None:
    """As small a window as the steps allow."""
    checkpoint = opened()
    steps = steps_of(checkpoint, count)
    ranges_of = [(step, [checkpoint.tensors[name].range for name in names]) for step, names in steps]
    items = items_of(ranges_of, checkpoint.shards.files, tmp_path)
    limit = max(sum(item.size for item in items if number in item.steps) for number in range(count))
    reader = Reader(opened(tmp_path / "window", limit))
    reader.expect(steps)
    most, running = [0], threading.Event()

    def watch() -> None:
        while not running.wait(0.001):
            most[0] = max(most[0], held(tmp_path / "window"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    read_all(reader, steps)
    running.set()
    watcher.join()
    reader.close()
    assert 0 < most[0] <= limit + 200_000, "journals and locks aside"
    assert not list((tmp_path / "window").iterdir()), "nothing is left once all steps are done"


def test_a_step_that_needs_more_than_the_window_is_refused_by_name(server: HubServer, tmp_path: Path) -> None:
    reader = Reader(opened(tmp_path / "window", 1_000_000))
    with pytest.raises(HubError, match=r"step 0 needs .* MB of the source at once, the window holds .*; give --window"):
        reader.expect(steps_of(opened(), 2))
    reader.close()


def test_what_is_needed_again_later_is_fetched_again_where_there_is_no_room(server: HubServer, tmp_path: Path) -> None:
    """Every step reads a little of each shard: ranges; the last ones read whole shards."""
    checkpoint = opened()
    names = sorted(checkpoint.tensors, key=lambda name: random.Random(name).random())
    steps = [(str(number), names[number::12]) for number in range(12)]
    reader = Reader(opened(tmp_path / "window", checkpoint.total_size // 2))
    reader.expect(steps)
    read_all(reader, steps)
    reader.close()


def test_unexpected_reads_are_ranges(server: HubServer) -> None:
    checkpoint = opened()
    name, stored = next(iter(checkpoint.tensors.items()))
    out, reader = bytearray(stored.nbytes), Reader(checkpoint)
    before = len(server.asked("get"))
    reader.read(name, 0, memoryview(out))
    (asked,) = server.asked("get")[before:]
    assert (asked.start, asked.stop) == (stored.offset, stored.offset + stored.nbytes)
    reader.close()


def test_a_server_that_is_busy_drops_and_damages(server: HubServer, tmp_path: Path) -> None:
    notices: list[str] = []
    checkpoint = opened(tmp_path / "window", notices=notices)
    server.ways.status["get"] = [429, 503, 500]
    server.ways.drop["get"] = [0.5, 0.0, 0.99]
    reader, steps = Reader(checkpoint), steps_of(checkpoint, 3)
    server.ways.corrupt["get"] = [1000]
    reader.expect(steps)
    read_all(reader, steps)
    reader.close()
    assert any("came damaged, its hash is not the Hub's; fetched once more" in said for said in notices)


def test_damage_that_stays_is_an_error(server: HubServer, tmp_path: Path) -> None:
    checkpoint = opened(tmp_path / "window")
    server.ways.corrupt["get"] = [1000] * 200
    reader, steps = Reader(checkpoint), steps_of(checkpoint, 3)
    reader.expect(steps)
    with pytest.raises(AssertionError, match="does not have the hash that it names, twice"):
        read_all(reader, steps)
    reader.close()


@pytest.mark.parametrize("what", ["config.json", "tokenizer.json"])
def test_small_files_are_held_against_their_hashes(server: HubServer, what: str) -> None:
    """git's own hash for one, sha256 for the other: huggingface_hub looks at sizes alone."""
    size = (SOURCE / what).stat().st_size
    assert (size > server.store.big_bytes) == (what == "tokenizer.json"), "one of each kind"
    server.ways.corrupt["get"] = [size // 2]
    try:
        checkpoint = opened()
    except HubError as error:
        assert "does not have the hash that it names" in str(error)
    else:
        assert (checkpoint.folder / what).read_bytes() == (SOURCE / what).read_bytes()


def test_a_hub_without_ranges_is_refused(server: HubServer) -> None:
    server.ways.whole = True
    server.add("org/whole", SOURCE)
    with pytest.raises(HubError, match="a range was asked for and 200 came"):
        open_checkpoint(open_repo(Address("org/whole", None)))


def test_a_killed_job_finds_its_pieces_again(server: HubServer, tmp_path: Path) -> None:
    """What has come before a crash is not asked for again; a piece that was not noted is; nothing false is taken."""
    checkpoint, limit = opened(), 10**8
    steps = steps_of(checkpoint, 2)
    server.ways.slow["get"] = 20e6
    first = Reader(opened(tmp_path / "window", limit))
    first.expect(steps)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "window").rglob("*.pieces")) and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.1)
    first.give_up()
    first.close()
    (home,) = (tmp_path / "window" / named(checkpoint)).iterdir()
    noted = sum(len(path.read_text().split()) for path in home.glob("*.pieces"))
    ready = [path for path in home.iterdir() if path.suffix not in (".pieces", ".partial") and path.name != "lock"]
    assert noted or ready
    server.ways.slow.clear()
    before = len(server.asked("get"))
    again = Reader(opened(tmp_path / "window", limit))
    heads = len(server.asked("get")) - before
    again.expect(steps)
    read_all(again, steps)
    again.close()
    files = checkpoint.shards.files
    total = sum(-(-entry.nbytes // pieces.PIECE) for entry in files.values())
    have = noted + sum(-(-path.stat().st_size // pieces.PIECE) for path in ready if path.exists()) if ready else noted
    assert len(server.asked("get")) - before - heads <= total - min(have, noted or total)


def test_a_file_that_an_earlier_run_left_damaged_is_noticed(server: HubServer, tmp_path: Path) -> None:
    """A crash of the machine may leave a hole where the journal says that a piece is: the hash finds it."""
    checkpoint, notices = opened(), list[str]()
    steps = steps_of(checkpoint, 1)
    home = tmp_path / "window" / named(checkpoint) / "window-0"
    home.mkdir(parents=True)
    file, entry = next(iter(checkpoint.shards.files.items()))
    (home / f"{file}.0-{entry.nbytes}.partial").write_bytes(bytes(entry.nbytes))
    (home / f"{file}.0-{entry.nbytes}.pieces").write_text(
        "".join(f"{n}\n" for n in range(-(-entry.nbytes // (1 << 20))))
    )
    reader = Reader(opened(tmp_path / "window", notices=notices))
    reader.expect(steps)
    read_all(reader, steps)
    reader.close()
    assert any("came damaged" in said for said in notices)


def test_two_processes_share_a_place(server: HubServer, tmp_path: Path) -> None:
    one, two = Reader(opened(tmp_path / "window")), Reader(opened(tmp_path / "window"))
    steps = steps_of(one.checkpoint, 2)
    one.expect(steps)
    two.expect(steps)
    homes = (tmp_path / "window" / named(one.checkpoint)).iterdir()
    assert sorted(path.name for path in homes) == ["window-0", "window-1"]
    read_all(one, steps)
    one.close()
    read_all(two, steps)
    two.close()
    assert not list((tmp_path / "window").iterdir())


def test_whoever_waits_is_woken(server: HubServer, tmp_path: Path) -> None:
    checkpoint = opened(tmp_path / "window")
    server.ways.slow["get"] = 1000.0
    reader, steps, ended = Reader(checkpoint), steps_of(checkpoint, 1), list[str]()
    reader.expect(steps)

    def wait() -> None:
        try:
            reader.read(steps[0][1][0], 0, memoryview(bytearray(16)))
        except HubError as error:
            ended.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.1)
    reader.give_up()
    waiting.join(timeout=30)
    assert ended and "is not fetched any more" in ended[0]
    server.ways.slow.clear()
    reader.close()


def test_what_is_whole_and_what_is_ranges() -> None:
    """A shard of which a step needs a quarter or more, and the same shard for the steps beside it."""
    files = {name: Entry(100_000_000, "0" * 64, "") for name in "abc"}
    order = [
        ("0", [Range("a", 0, 80_000_000)]),
        ("1", [Range("a", 80_000_000, 100_000_000), Range("b", 0, 5), Range("b", 50_000_000, 50_000_010)]),
        ("2", [Range("c", 0, 30_000_000), Range("b", 7, 9), Range("b", 100, 200)]),
        ("3", [Range("a", 10, 20)]),
    ]
    found = {(item.file, item.start, item.stop, tuple(sorted(item.steps))) for item in items_of(order, files, Path())}
    assert found == {
        ("a", 0, 100_000_000, (0, 1)),
        ("b", 0, 5, (1,)),
        ("b", 50_000_000, 50_000_010, (1,)),
        ("c", 0, 100_000_000, (2,)),
        ("b", 7, 200, (2,)),
        ("a", 10, 20, (3,)),
    }


def test_headers_that_lie_are_refused_as_in_a_folder(server: HubServer, tmp_path: Path) -> None:
    broken = {path.name: path for path in SOURCE.iterdir() if path.is_file()}
    shard = next(name for name in broken if name.endswith(".safetensors"))
    for number, data in enumerate((b"", b"\xff" * 2000, (SOURCE / shard).read_bytes()[:-5])):
        server.add(f"org/broken{number}", broken | {shard: data})
        with pytest.raises(CheckpointError, match=rf"org/broken{number}.*{shard}"):
            open_checkpoint(open_repo(Address(f"org/broken{number}", None)))


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (Address("org/none", None), "no such repo, or none that this token may see"),
        (Address(REPO, "v9"), "no such branch, tag or commit"),
    ],
)
def test_repos_that_are_not_there(server: HubServer, address: Address, text: str) -> None:
    with pytest.raises(HubError, match=text):
        open_repo(address)


def test_a_repo_without_a_config_is_none_that_is_whole(server: HubServer) -> None:
    server.add("org/half", {"model-00001-of-00002.safetensors": b"x" * 100})
    with pytest.raises(HubError, match=r"org/half: no config\.json in it"):
        open_repo(Address("org/half", None))


def test_ranges_are_exact(server: HubServer) -> None:
    place = open_repo(Address(REPO, None))
    assert isinstance(place.shards, RepoShards)
    file, entry = next(iter(place.shards.files.items()))
    data = (SOURCE / file).read_bytes()
    for start, stop in ((0, 1), (5, 77), (entry.nbytes - 3, entry.nbytes)):
        assert ranges.fetch(REPO, place.shards.revision, file, start, stop) == data[start:stop]
    with pytest.raises(HubError):
        ranges.fetch(REPO, place.shards.revision, file, entry.nbytes, entry.nbytes + 5)


def test_a_full_disk_is_told(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = opened(tmp_path / "window")
    reader, steps = Reader(checkpoint), steps_of(checkpoint, 1)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    reader.expect(steps)
    with pytest.raises(HubError, match=r"the window cannot be written \(No space left on device\)"):
        reader.read(steps[0][1][0], 0, memoryview(bytearray(16)))
    reader.close()


def test_an_empty_tensor_asks_for_nothing(server: HubServer, tmp_path: Path) -> None:
    window = Window(REPO, "0" * 40, {"a": Entry(10, None, "")}, tmp_path, 100)
    window.expect([("0", [Stored("F32", (0,), "a", 10, 0).range])])
    window.read("a", 10, memoryview(b""), "nothing")
    window.let_go("0")
    window.close()
    assert not server.asked("get")


def test_a_shared_place_never_hands_out_another_repo_s_shards(server: HubServer, tmp_path: Path) -> None:
    """Of a fine-tune names and sizes are its base's. What is left of one is not taken for the other."""
    changed = {path.name: path for path in SOURCE.iterdir() if path.is_file()}
    for name in [name for name in changed if name.endswith(".safetensors")]:
        data = bytearray((SOURCE / name).read_bytes())
        data[-1000:] = bytes(1000)
        (tmp_path / name).write_bytes(data)
        changed[name] = tmp_path / name
    server.add("org/tuned", changed)
    first = Reader(opened(tmp_path / "window"))
    steps = steps_of(first.checkpoint, 2)
    first.expect(steps)
    read_all(first, steps[:1])
    first.close()
    left = list((tmp_path / "window").rglob("*.safetensors.*"))
    other = open_checkpoint(open_repo(Address("org/tuned", None), window=tmp_path / "window"))
    reader, name = Reader(other), steps[1][1][-1]
    reader.expect(steps)
    ours = bytearray(other.tensors[name].nbytes)
    reader.read(name, 0, memoryview(ours))
    file, start, stop = other.tensors[name].range
    assert ours == (tmp_path / file).read_bytes()[start:stop]
    reader.close()
    assert left and all(path.exists() for path in left), "and what the other job has fetched stays"


def test_a_ready_file_of_an_earlier_run_is_hashed_again(server: HubServer, tmp_path: Path) -> None:
    checkpoint, notices = opened(), list[str]()
    home = tmp_path / "window" / named(checkpoint) / "window-0"
    home.mkdir(parents=True)
    file, entry = next(iter(checkpoint.shards.files.items()))
    (home / f"{file}.0-{entry.nbytes}").write_bytes(bytes(entry.nbytes))
    reader, steps = Reader(opened(tmp_path / "window", notices=notices)), steps_of(checkpoint, 1)
    reader.expect(steps)
    read_all(reader, steps)
    reader.close()
    assert any("came damaged" in said for said in notices)


def test_what_killed_processes_have_left_is_swept_at_the_end(server: HubServer, tmp_path: Path) -> None:
    checkpoint = opened(tmp_path / "window")
    dead = tmp_path / "window" / named(checkpoint) / "window-1"
    dead.mkdir(parents=True)
    (dead / "lock").touch()
    (dead / "a.safetensors.0-5").write_bytes(b"12345")
    reader, steps = Reader(checkpoint), steps_of(checkpoint, 1)
    reader.expect(steps)
    read_all(reader, steps)
    reader.close()
    assert not list((tmp_path / "window").iterdir())


def test_a_reader_goes_on_when_what_it_waits_for_is_let_go(server: HubServer, tmp_path: Path) -> None:
    """Its bytes are in another item, too."""
    checkpoint = opened(tmp_path / "window")
    file, entry = next(iter(checkpoint.shards.files.items()))
    window = checkpoint.shards.open()
    server.ways.slow["get"] = 1e5
    nothing = [("s1", []), ("s2", [])]
    window.expect([("s0", [Range(file, 0, entry.nbytes)]), *nothing, ("s3", [Range(file, 500, 600)])])
    out, done = bytearray(50), threading.Event()

    def read() -> None:
        window.read(file, 510, memoryview(out), "some")
        done.set()

    threading.Thread(target=read, daemon=True).start()
    time.sleep(0.2)
    window.let_go("s0")
    assert done.wait(30) and out == (SOURCE / file).read_bytes()[510:560]
    server.ways.slow.clear()
    window.close()
