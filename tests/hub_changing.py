"""What the Hub of the tests does for those who write, and which path is for what."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hub_reading import Reading
from hub_store import PIECE, Entry, RefusedError, Repo

_REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
_MODEL, _REVISION = rf"/api/models/{_REPO}", r"(?P<revision>[^/]+)"


class Handler(Reading):
    """Of both ports."""

    def create(self) -> None:
        self.allowed(write=True)
        asked = self.json()
        name = f"{asked.get('organization') or 'tester'}/{asked['name']}"
        if asked.get("type", "model") not in (None, "model"):
            raise RefusedError(400, "", f"{asked['type']}: this server has models only")
        url = f"{self.hub.url}/{name}"
        try:
            repo = self.store.create(name, asked.get("visibility") == "private" or asked.get("private") is True)
        except RefusedError as error:
            self.tell({"error": error.message, "url": url}, 409, {"X-Error-Message": error.message})
            return
        self.tell({"url": url, "name": name, "id": repo.name})

    def delete(self) -> None:
        self.allowed(write=True)
        asked = json.loads(b"".join(self.came()))
        name = f"{asked.get('organization') or 'tester'}/{asked['name']}"
        if self.store.repos.pop(name, None) is None:
            raise RefusedError(404, "RepoNotFound", "Repository not found")
        self.tell({})

    def branch(self) -> None:
        repo, name = self.repo(write=True), self.asked["name"]
        start = self.json().get("startingPoint", "main") if self.command == "POST" else ""
        with self.store.lock:
            if self.command == "POST":
                if name in repo.branches:
                    raise RefusedError(409, "", f"Reference already exists: refs/heads/{name}")
                repo.branches[name] = self.store.at(repo, start).sha
            elif name == "main" or repo.branches.pop(name, None) is None:
                raise RefusedError(403 if name == "main" else 404, "", f"{name}: no branch that can go")
        self.tell({})

    def tag(self) -> None:
        repo, name = self.repo(write=True), self.asked["name"]
        tag = self.json()["tag"] if self.command == "POST" else ""
        with self.store.lock:
            if self.command == "POST":
                if tag in repo.tags:
                    raise RefusedError(409, "", f"Tag reference exists already: {tag}")
                repo.tags[tag] = self.store.at(repo, name).sha
            elif repo.tags.pop(name, None) is None:
                raise RefusedError(404, "RevisionNotFound", f"Invalid rev id: {name}")
        self.tell({})

    def preupload(self) -> None:
        asked = self.json()
        commit = self.store.at(self.repo(write=True), self.asked["revision"])
        told = []
        for one in asked["files"]:
            path, entry = one["path"], commit.entries.get(one["path"])
            mode = "lfs" if self.store.is_lfs(path, one["size"]) else "regular"
            told.append(
                {"path": path, "uploadMode": mode, "shouldIgnore": False} | ({"oid": entry.oid} if entry else {})
            )
        self.tell({"files": told})

    def batch(self) -> None:
        asked = self.json()
        repo = self.repo(write=True)
        if (ref := asked.get("ref")) is not None:
            self.store.at(repo, ref["name"])
        told, multipart = [], False
        for one in asked["objects"]:
            oid, size = one["oid"], one["size"]
            told.append({"oid": oid, "size": size, "authenticated": True})
            if oid in repo.lfs:
                continue
            repo.announced[oid] = size
            where, verify = (
                f"{self.hub.files_url}/lfs/{repo.name}/{oid}",
                f"{self.hub.url}/{repo.name}.git/info/lfs/verify",
            )
            upload: dict[str, Any] = {"href": where}
            if size >= self.hub.multipart_bytes and "multipart" in asked["transfers"]:
                count, multipart = -(-size // self.hub.part_bytes), True
                upload = {"href": f"{self.hub.url}/lfs/{repo.name}/{oid}/complete"}
                upload["header"] = {"chunk_size": str(self.hub.part_bytes)}
                upload["header"] |= {f"{part:05}": f"{where}/{part}" for part in range(1, count + 1)}
            told[-1]["actions"] = {"upload": upload, "verify": {"href": verify}}
        self.tell({"transfer": "multipart" if multipart else "basic", "objects": told, "hash_algo": "sha256"})

    def announced(self, oid: str) -> tuple[Repo, int]:
        """Addresses of the other port are signed: they need no token, and are known for what was announced alone."""
        repo = self.store.repos.get(self.asked["repo"])
        if repo is None or oid not in repo.announced:
            raise RefusedError(403, "", "SignatureDoesNotMatch")
        return repo, repo.announced[oid]

    def put(self) -> None:
        """The bytes of an LFS file or of a part of it, which lies as oid.part.md5 until all of them are there."""
        oid, part = self.asked["oid"], self.asked.get("part")
        repo, size = self.announced(oid)
        came, digest = self.store.coming(), hashlib.md5(usedforsecurity=False)
        try:
            with came.open("wb") as stream:
                for piece in self.pieces():
                    stream.write(piece)
                    digest.update(piece)
            if part is None:
                self.store.keep_lfs(repo, came, oid, size)
            else:
                came.replace(self.part(repo, oid, int(part), digest.hexdigest()))
        finally:
            came.unlink(missing_ok=True)
        self.begin(200, 0, {"ETag": f'"{digest.hexdigest()}"'})

    def part(self, repo: Repo, oid: str, number: int, etag: str) -> Path:
        return self.store.folder / "coming" / f"{repo.name.replace('/', '--')}.{oid}.{number}.{etag}"

    def complete(self) -> None:
        asked = self.json()
        oid = self.asked["oid"]
        repo, size = self.announced(oid)
        parts = [
            self.part(repo, oid, one["partNumber"], one["etag"].strip('"'))
            for one in sorted(asked["parts"], key=lambda one: int(one["partNumber"]))
        ]
        if asked["oid"] != oid or not all(one.exists() for one in parts):
            raise RefusedError(400, "", f"{oid}: not the parts that came")
        whole = self.store.coming()
        with whole.open("wb") as stream:
            for one in parts:
                with one.open("rb") as source:
                    while piece := source.read(PIECE):
                        stream.write(piece)
                one.unlink()
        self.store.keep_lfs(repo, whole, oid, size)
        self.tell({"success": True})

    def verify(self) -> None:
        asked = self.json()
        if self.repo(write=True).lfs.get(asked["oid"]) != asked["size"]:
            raise RefusedError(404, "", f"{asked['oid']}: no such object of {asked['size']} bytes")
        self.tell({})

    def commit(self) -> None:
        lines = [json.loads(line) for line in self.body().splitlines() if line]
        repo, branch = self.repo(write=True), self.asked["revision"]
        header = lines[0]["value"]
        with self.store.lock:
            if branch not in repo.branches:
                raise RefusedError(404, "RevisionNotFound", f"Invalid rev id: {branch}")
            head = repo.commits[repo.branches[branch]]
            if not head.sha.startswith(header.get("parentCommit", "")):
                raise RefusedError(412, "", "A commit has happened since. Please refresh and try again.")
            entries: Mapping[str, Entry] = head.entries
            for line in lines[1:]:
                data = base64.b64decode(line["value"].get("content", ""))
                entries = self.store.changed(repo, entries, line["key"], line["value"], data)
            made = self.store.put(repo, branch, entries, header["summary"], header["description"])
        url = f"{self.hub.url}/{repo.name}/commit/{made.sha}"
        self.tell({"success": True, "commitOid": made.sha, "commitUrl": url, "hookOutput": ""})


Handler.routes = [
    ("GET", "/api/whoami-v2", "info", Handler.whoami),
    ("POST", "/api/validate-yaml", "info", Handler.validate),
    ("POST", "/api/repos/create", "create", Handler.create),
    ("DELETE", "/api/repos/delete", "create", Handler.delete),
    ("GET", rf"{_MODEL}(/revision/{_REVISION})?", "info", Handler.info),
    ("GET", rf"{_MODEL}/refs", "info", Handler.refs),
    ("GET", rf"{_MODEL}/commits/{_REVISION}", "info", Handler.commits),
    ("GET", rf"{_MODEL}/tree/{_REVISION}(/(?P<path>.+))?", "tree", Handler.tree),
    ("POST", rf"{_MODEL}/paths-info/{_REVISION}", "info", Handler.paths_info),
    ("POST", rf"{_MODEL}/preupload/{_REVISION}", "preupload", Handler.preupload),
    ("POST", rf"{_MODEL}/commit/{_REVISION}", "commit", Handler.commit),
    ("POST DELETE", rf"{_MODEL}/branch/(?P<name>[^/]+)", "branch", Handler.branch),
    ("POST DELETE", rf"{_MODEL}/tag/(?P<name>[^/]+)", "tag", Handler.tag),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", "lfs_batch", Handler.batch),
    ("POST", rf"/{_REPO}\.git/info/lfs/verify", "verify", Handler.verify),
    ("POST", rf"/lfs/{_REPO}/(?P<oid>[0-9a-f]{{64}})/complete", "lfs_complete", Handler.complete),
    ("PUT", rf"/lfs/{_REPO}/(?P<oid>[0-9a-f]{{64}})(/(?P<part>\d+))?", "lfs_put", Handler.put),
    ("GET HEAD", rf"/{_REPO}/resolve/{_REVISION}/(?P<path>.+)", "file", Handler.file),
    ("GET", r"/files/(?P<oid>[0-9a-f]{64})", "get", Handler.object),
    ("HEAD", r"/files/(?P<oid>[0-9a-f]{64})", "head", Handler.object),
]
