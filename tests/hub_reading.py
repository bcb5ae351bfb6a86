"""What the Hub of the tests answers to those who read: repos, trees, and files with their ranges."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from hub_store import Commit, RefusedError, Repo, Store, folders
from hub_wire import Wire

if TYPE_CHECKING:
    from hub_server import HubServer

TOKEN = "hf_ofthetests"


class Reading(Wire):
    """Of both ports; each pattern is tried on the path as it came, and its groups are decoded behind that."""

    routes: ClassVar[list[tuple[str, str, str, Callable[[Any], None]]]]

    hub: HubServer
    store: Store
    answer: Callable[[Any], None]

    def kind(self) -> str:
        self.hub = self.server.hub
        self.store = self.hub.store
        self.url = urlsplit(self.path)
        self.query = parse_qs(self.url.query)
        self.answer, kind, self.asked = Reading.lost_way, "", dict[str, str]()
        for methods, pattern, named, answer in self.routes:
            if self.command in methods.split() and (match := re.fullmatch(pattern, self.url.path)):
                self.asked = {name: unquote(part) for name, part in match.groupdict().items() if part is not None}
                self.answer, kind = answer, named
                break
        if kind == "file":
            kind = "head" if self.command == "HEAD" else self.get_kind()
        return kind

    def get_kind(self) -> str:
        """A GET of an LFS file is sent on first."""
        try:
            repo = self.store.repos[self.asked["repo"]]
            entry = self.store.entry(self.store.at(repo, self.asked["revision"]), self.asked["path"])
        except (KeyError, RefusedError):
            return "get"
        return "redirect" if entry.sha256 else "get"

    def reply(self) -> None:
        self.answer(self)

    def lost_way(self) -> None:
        raise RefusedError(404, "", f"{self.command} {self.path}: nothing that this server knows")

    # who asks, and for what

    def allowed(self, *, write: bool = False) -> bool:
        """Whether a token was given. Raises RefusedError for a wrong one, and without one that is needed."""
        given = self.headers.get("Authorization")
        if given is not None and given != f"Bearer {TOKEN}":
            raise RefusedError(401, "", "Invalid credentials in Authorization header")
        if given is None and (write or self.server.ways.need_token):
            raise RefusedError(401, "", "Invalid username or password.")
        return given is not None

    def repo(self, *, write: bool = False) -> Repo:
        known = self.allowed(write=write)
        repo = self.store.repos.get(self.asked["repo"])
        if repo is None or (repo.private and not known):
            told = "Repository not found" if known else "Invalid username or password."
            raise RefusedError(404 if known else 401, "RepoNotFound", told)
        return repo

    def commit_asked(self) -> tuple[Repo, Commit]:
        repo = self.repo()
        return repo, self.store.at(repo, self.asked.get("revision", "main"))

    def json(self) -> Any:
        return json.loads(self.body() or b"{}")

    # what is there

    def whoami(self) -> None:
        self.allowed(write=True)
        self.tell({"type": "user", "name": "tester", "fullname": "Tester", "orgs": []})

    def validate(self) -> None:
        self.body()
        self.tell({"errors": [], "warnings": []})

    def info(self) -> None:
        repo, commit = self.commit_asked()
        siblings = list[dict[str, Any]]()
        for path, entry in commit.entries.items():
            siblings.append({"rfilename": path})
            if "blobs" in self.query:
                siblings[-1] |= {"size": entry.size, "blobId": entry.blob}
                lfs = {"sha256": entry.sha256, "size": entry.size, "pointerSize": entry.pointer}
                siblings[-1] |= {"lfs": lfs} if entry.sha256 else {}
        first = min(one.date for one in repo.commits.values())
        told: dict[str, Any] = {"author": repo.name.split("/")[0], "sha": commit.sha, "lastModified": commit.date}
        told |= {"private": repo.private, "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []}
        told |= {"createdAt": first, "siblings": siblings, "usedStorage": sum(repo.lfs.values())}
        if expand := self.query.get("expand"):
            told = {name: value for name, value in told.items() if name in expand}
        self.tell(
            {"_id": hashlib.md5(repo.name.encode()).hexdigest()[:24], "id": repo.name, "modelId": repo.name} | told
        )

    def refs(self) -> None:
        repo = self.repo()

        def told(names: Mapping[str, str], kind: str) -> list[dict[str, str]]:
            return [{"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": sha} for name, sha in names.items()]

        requests = {"pullRequests": list[Any]()} if "include_prs" in self.query else {}
        self.tell(
            {"branches": told(repo.branches, "heads"), "tags": told(repo.tags, "tags"), "converts": []} | requests
        )

    def commits(self) -> None:
        self.page([commit.told() for commit in self.store.history(*self.commit_asked())])

    def tree(self) -> None:
        _, commit = self.commit_asked()
        within = self.asked.get("path", "")
        dirs = folders(commit.entries)
        if within and within not in dirs:
            raise RefusedError(404, "EntryNotFound", f"{within} does not exist on this tree", commit.sha)
        start = f"{within}/" if within else ""
        deep = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        made = [self.entry_told(commit, dirs, one) for one in [*sorted(dirs), *commit.entries]]
        shown = [
            one for one in made if one["path"].startswith(start) and (deep or "/" not in one["path"][len(start) :])
        ]
        self.page(shown, commit)

    def entry_told(self, commit: Commit, dirs: dict[str, str], path: str) -> dict[str, Any]:
        folder: dict[str, Any] = {"type": "directory", "oid": dirs.get(path), "size": 0, "path": path}
        told = folder if path in dirs else commit.entries[path].told(path)
        if self.query.get("expand", ["false"])[0].lower() in ("true", "1"):
            told["lastCommit"] = {"id": commit.sha, "title": commit.title, "date": commit.date}
        return told

    def page(self, told: list[dict[str, Any]], commit: Commit | None = None) -> None:
        """So many of a list, and a Link to the next."""
        at, most = int(self.query.get("cursor", ["0"])[0]), int(self.query.get("limit", [str(self.hub.page)])[0])
        headers = {"X-Repo-Commit": commit.sha} if commit else {}
        if at + most < len(told):
            query = urlencode({**self.query, "cursor": [at + most]}, doseq=True)
            headers["Link"] = f'<{self.hub.url}{self.url.path}?{query}>; rel="next"'
        self.tell(told[at : at + most], headers=headers)

    def paths_info(self) -> None:
        form = parse_qs(self.body().decode())
        _, commit = self.commit_asked()
        self.query = {name: form[name] for name in form.keys() & {"expand"}}
        dirs = folders(commit.entries)
        paths = [path.strip("/") for path in form.get("paths", [])]
        found = [path for path in paths if path in dirs or path in commit.entries]
        self.tell([self.entry_told(commit, dirs, path) for path in found])

    def file(self) -> None:
        _, commit = self.commit_asked()
        entry = self.store.entry(commit, self.asked["path"])
        headers = {"X-Repo-Commit": commit.sha, "ETag": f'"{entry.oid}"', "Accept-Ranges": "bytes"}
        if entry.sha256 is None:
            self.content(entry.oid, entry.size, headers)
            return
        where = f"{self.hub.files_url}/files/{entry.oid}"
        linked = {"X-Linked-Etag": f'"{entry.oid}"', "X-Linked-Size": str(entry.size), "Location": where}
        self.range_asked(entry.size)
        told = b"Found. Redirecting"
        self.begin(302, len(told), {"Content-Type": "text/plain", **headers, **linked})
        self.send_pieces(iter([told]), len(told))

    def object(self) -> None:
        path = self.store.place(self.asked["oid"])
        if not path.exists():
            raise RefusedError(404, "", "no such object")
        headers = {"ETag": f'"{self.asked["oid"]}"', "Accept-Ranges": "bytes"}
        self.content(self.asked["oid"], path.stat().st_size, headers)

    def range_asked(self, size: int) -> tuple[int, int] | None:
        """Of bytes of a file. None: all; start beyond its end: 416."""
        match = re.fullmatch(r"\s*bytes\s*=\s*(\d*)\s*-\s*(\d*)\s*", self.headers.get("Range", ""))
        if match is None or not any(match.groups()):
            return None
        first, last = match.groups()
        start = int(first) if first else max(0, size - int(last))
        stop = min(size, int(last) + 1) if first and last else size
        self.request_.start, self.request_.stop = start, stop
        return start, stop

    def content(self, oid: str, size: int, headers: dict[str, str]) -> None:
        asked = self.range_asked(size)
        headers = {"Content-Type": "application/octet-stream", **headers}
        if asked is None or self.server.ways.whole:
            self.begin(200, size, headers)
            self.send_file(self.store.place(oid), 0, size)
            return
        start, stop = asked
        if start >= size or start >= stop:
            self.begin(416, 0, {"Content-Range": f"bytes */{size}"})
            return
        self.begin(206, stop - start, headers | {"Content-Range": f"bytes {start}-{stop - 1}/{size}"})
        self.send_file(self.store.place(oid), start, stop)
