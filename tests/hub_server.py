"""A server on loopback with the API of the Hugging Face Hub, as far as huggingface_hub uses it for models without Xet.

It has two ports, as the Hub has two hosts: one for its API, and one that LFS files come from and go to. `hub_wire` is
how it misbehaves, `hub_store` what it holds. Kinds of requests: "info" (api/models..., whoami), "tree", "head" and
"get" (of a file, wherever it lies), "redirect" (GET that is sent on to the other port), "preupload", "lfs_batch",
"lfs_put" (of a file or a part), "lfs_complete", "verify", "commit", "create", "branch", "tag", else "".
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hub_changing import Handler
from hub_reading import TOKEN
from hub_store import Commit, Store
from hub_wire import Listener, Request, Ways

__all__ = ["Commit", "HubServer", "Request", "Ways", "hub_server", "pointed"]


class HubServer:
    """It runs from its making to `close`.

    page: entries of a tree at once. multipart_bytes: LFS files from that size on go up in parts of part_bytes. What is
    an LFS file is said by store.tensor_bytes and store.big_bytes.
    """

    def __init__(self, folder: Path) -> None:
        self.store, self.ways, self.requests = Store(folder), Ways(), list[Request]()
        self.page, self.multipart_bytes, self.part_bytes = 1000, 32 << 20, 16 << 20
        self.token = TOKEN
        self._ports = [Listener(Handler), Listener(Handler)]
        self.url, self.files_url = (port.url for port in self._ports)
        for port in self._ports:
            vars(port).update(hub=self, ways=self.ways, requests=self.requests)
            port.thread.start()

    def close(self) -> None:
        for port in self._ports:
            port.end()

    def add(
        self, repo: str, files: Path | Mapping[str, bytes | Path], *, revision: str = "main", private: bool = False
    ) -> str:
        """One commit with the files of a folder, or by their paths, upon what the branch has; -> its sha."""
        return self.store.add(repo, files, revision, private).sha

    def files(self, repo: str, revision: str = "main") -> dict[str, Path]:
        """Path in the repo -> where its bytes lie; not to be changed."""
        found = self.store.at(self.store.repos[repo], revision).files
        return {path: self.store.place(oid) for path, oid in found.items()}

    def commits(self, repo: str, revision: str = "main") -> list[Commit]:
        """Oldest first."""
        held = self.store.repos[repo]
        return self.store.history(held, self.store.at(held, revision))[::-1]

    def tags(self, repo: str) -> dict[str, str]:
        return dict(self.store.repos[repo].tags)

    def branches(self, repo: str) -> dict[str, str]:
        return dict(self.store.repos[repo].branches)

    def exists(self, repo: str) -> bool:
        return repo in self.store.repos

    def private(self, repo: str) -> bool:
        return self.store.repos[repo].private

    def asked(self, kind: str) -> list[Request]:
        """The requests of a kind, so far."""
        return [one for one in list(self.requests) if one.kind == kind]

    def environment(self, home: Path) -> dict[str, str]:
        """For a process that is to ask this server, with all that huggingface_hub keeps in a home of its own."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
        kept.pop("TRANSFORMERS_OFFLINE", None)
        return kept | _settings(self, home)


def _settings(server: HubServer, home: Path) -> dict[str, str]:
    switches = ("DISABLE_XET", "DISABLE_PROGRESS_BARS", "DISABLE_TELEMETRY", "DISABLE_UPDATE_CHECK")
    told = {"HF_ENDPOINT": server.url, "HF_TOKEN": server.token, "HF_HOME": str(home)}
    told |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return told | {f"HF_HUB_{name}": "1" for name in switches}


@contextmanager
def hub_server(folder: Path) -> Iterator[HubServer]:
    """A server with nothing in it yet; what it gets lies in the folder."""
    server = HubServer(folder)
    try:
        yield server
    finally:
        server.close()


def pointed(monkeypatch: pytest.MonkeyPatch, server: HubServer, home: Path) -> None:
    """Have huggingface_hub in this process ask the server: what `environment` says, wherever it has been copied to."""
    import huggingface_hub
    from huggingface_hub import constants, hf_api, hf_file_system
    from huggingface_hub.utils import _http

    for name in [one for one in os.environ if one.startswith(("HF_", "HUGGINGFACE_"))] + ["TRANSFORMERS_OFFLINE"]:
        monkeypatch.delenv(name, raising=False)
    for name, value in _settings(server, home).items():
        monkeypatch.setenv(name, value)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    places = {"HF_HOME": ".", "HF_HUB_CACHE": "hub", "HUGGINGFACE_HUB_CACHE": "hub", "HF_ASSETS_CACHE": "assets"}
    places |= {"HF_XET_CACHE": "xet", "HF_TOKEN_PATH": "token", "HF_STORED_TOKENS_PATH": "stored_tokens"}
    values: dict[str, Any] = {name: str(home / place) for name, place in places.items()}
    values |= {"ENDPOINT": server.url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False}
    values |= {"HF_HUB_DISABLE_XET": True, "HF_HUB_DISABLE_PROGRESS_BARS": True, "HF_HUB_DISABLE_TELEMETRY": True}
    for name, value in values.items():
        monkeypatch.setattr(constants, name, value)
    if hasattr(_http, "_HUB_ORIGINS"):  # of huggingface_hub 2: who is told the token
        origin = _http._url_origin(server.url)
        monkeypatch.setattr(_http, "_HUB_ORIGINS", _http._HUB_ORIGINS | {origin})
    monkeypatch.setattr(hf_api.api, "endpoint", server.url)
    if hasattr(hf_file_system, "hffs"):
        monkeypatch.setattr(hf_file_system.hffs._api, "endpoint", server.url)
    monkeypatch.setattr(sys.modules["huggingface_hub.utils.tqdm"], "HF_HUB_DISABLE_PROGRESS_BARS", True)
    huggingface_hub.HfFileSystem.clear_instance_cache()
    if hasattr(_http, "close_session"):
        _http.close_session()  # its connections were to another server
    # its own uploads of LFS files give a file as `data`, of which its HTTP client warns
    warnings.filterwarnings("ignore", "Use 'content=<...>'", DeprecationWarning)
