"""How the Hub of the tests sends and receives: HTTP, with bodies that end early, come slowly or come back changed."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO

from hub_store import PIECE, RefusedError


@dataclass
class Request:
    """One request. start, stop: of the range that it asks for, stop exclusive, as far as the file goes.

    status: 0 until there is an answer, and where none was sent. nbytes: of the body that came, for an upload (PUT,
    POST), else of the body that was sent.
    """

    kind: str
    method: str
    path: str
    headers: dict[str, str]
    start: int | None = None
    stop: int | None = None
    status: int = 0
    nbytes: int = 0


@dataclass
class Ways:
    """What a server does to requests, by their kind; switches may be set while it runs.

    status: statuses of the next requests, from the front. retry_after: the header of such a 429 or 503 (None: none).
    drop: the next requests end, with their connection, after that share of their body: of an upload (PUT, POST) so much
    is read, of another answer so much is sent; an upload's share of 1: all is read and *done*, and only the answer is
    lost. corrupt: the next answers long enough to have it get the byte at that offset flipped. slow: bytes a second.
    whole: ranges are ignored. need_token: reading needs one too. hook: called as each request begins.
    """

    status: dict[str, list[int]] = field(default_factory=dict)
    retry_after: int | None = 0
    drop: dict[str, list[float]] = field(default_factory=dict)
    corrupt: dict[str, list[int]] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)
    whole: bool = False
    need_token: bool = False
    hook: Callable[[Request], None] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def next(self, what: dict[str, list[Any]], kind: str) -> Any:
        """The first of those of a kind, which is then gone; None where there is none."""
        with self.lock:
            return what[kind].pop(0) if what.get(kind) else None

    def flipped(self, kind: str, length: int) -> int | None:
        """The same of `corrupt`, where an answer is so long."""
        with self.lock:
            waiting = self.corrupt.get(kind)
            return waiting.pop(0) if waiting and waiting[0] < length else None


class CutError(Exception):
    """The connection ends here."""


class Wire(BaseHTTPRequestHandler):
    """A connection. A subclass says what is asked (`kind`) and answers it (`reply`)."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    server: Any
    request_: Request
    left = 0  # of the body, or of its chunk
    chunked = False
    most = 1 << 62  # of the body, before the connection ends
    lost = False  # its answer

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def kind(self) -> str:
        """Of the request, before anything is done."""
        raise NotImplementedError

    def reply(self) -> None:
        """Answer."""
        raise NotImplementedError

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (CutError, OSError):
            self.close_connection = True

    def do(self) -> None:
        """One request: its status if it has bad luck, else its answer, or what the Hub says instead."""
        ways: Ways = self.server.ways
        self.left = int(self.headers.get("Content-Length") or 0)
        self.chunked = self.headers.get("Transfer-Encoding", "").lower() == "chunked"
        self.most, self.lost = Wire.most, False
        asked = self.request_ = Request(self.kind(), self.command, self.path, dict(self.headers))
        with ways.lock:
            self.server.requests.append(asked)
        if ways.hook is not None:
            ways.hook(asked)
        try:
            if (status := ways.next(ways.status, asked.kind)) is not None:
                raise RefusedError(status, "", "out of luck")
            self.reply()
        except RefusedError as error:
            self.refuse(error)
        except (KeyError, TypeError, ValueError) as error:  # 500 would be asked again
            self.refuse(RefusedError(400, "", f"{type(error).__name__}: {error}"))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do

    def refuse(self, error: RefusedError) -> None:
        for piece in self.came():  # what is left: unread bytes would reset the connection before the answer is read
            self.request_.nbytes += len(piece)
        headers = {"X-Error-Message": error.message} | ({"X-Error-Code": error.code} if error.code else {})
        if error.commit:
            headers["X-Repo-Commit"] = error.commit
        if error.status in (429, 503) and self.server.ways.retry_after is not None:
            headers["Retry-After"] = str(self.server.ways.retry_after)
        self.tell({"error": error.message}, error.status, headers)

    def came(self) -> Iterator[bytes]:
        """The body of the request, as it is on the wire."""
        while self.chunked:
            self.left = int(self.rfile.readline().split(b";")[0], 16)
            self.chunked = self.left > 0
            while self.left > 0:
                yield self.piece(self.left)
            self.rfile.readline()
        while self.left > 0:
            yield self.piece(self.left)

    def piece(self, most: int) -> bytes:
        piece = self.rfile.read(min(most, self.pace(), self.most - self.request_.nbytes))
        if not piece:
            raise CutError
        self.left -= len(piece)
        return piece

    def pieces(self) -> Iterator[bytes]:
        """The body of the request, slowly or only in part where that is asked for."""
        share = self.server.ways.next(self.server.ways.drop, self.request_.kind) if self.uploads() else None
        if share is not None:
            self.lost, self.most = share >= 1, self.most if share >= 1 else int(self.left * share)
        if self.most == 0:
            raise CutError
        for piece in self.came():
            self.request_.nbytes += len(piece)
            self.rest(len(piece))
            yield piece
            if self.request_.nbytes == self.most:
                raise CutError

    def uploads(self) -> bool:
        return self.command in ("PUT", "POST")

    def body(self) -> bytes:
        return b"".join(self.pieces())

    def pace(self) -> int:
        """Bytes to be read or sent at once."""
        rate = self.server.ways.slow.get(self.request_.kind)
        return PIECE if rate is None else max(1, min(PIECE, int(rate / 20)))

    def rest(self, nbytes: int) -> None:
        rate = self.server.ways.slow.get(self.request_.kind)
        if rate is not None:
            time.sleep(nbytes / rate)

    def tell(self, told: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """An answer in JSON."""
        data = json.dumps(told).encode()
        self.begin(status, len(data), {"Content-Type": "application/json"} | (headers or {}))
        self.send_pieces(iter([data]), len(data))

    def begin(self, status: int, length: int, headers: dict[str, str]) -> None:
        """Status and headers. None are sent where the answer is to be lost."""
        if self.lost:
            raise CutError
        self.request_.status = status
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value.replace("\n", " "))
        self.end_headers()

    def send_file(self, path: Path, start: int, stop: int) -> None:
        def read(stream: BinaryIO) -> Iterator[bytes]:
            stream.seek(start)
            at = start
            while at < stop and (piece := stream.read(min(self.pace(), stop - at))):
                at += len(piece)
                yield piece

        with path.open("rb") as stream:
            self.send_pieces(read(stream), stop - start)

    def send_pieces(self, pieces: Iterator[bytes], length: int) -> None:
        """A body of `length` bytes, or what `ways` make of it."""
        if self.command == "HEAD":
            return
        ways, at, counts = self.server.ways, 0, not self.uploads()
        flip = ways.flipped(self.request_.kind, length)
        share = ways.next(ways.drop, self.request_.kind) if counts else None
        most = length if share is None else int(length * share)
        for piece in pieces:
            if flip is not None and at <= flip < at + len(piece):
                changed = bytearray(piece)
                changed[flip - at] ^= 0xFF
                piece = bytes(changed)
            piece = piece[: most - at]
            self.wfile.write(piece)
            at += len(piece)
            self.request_.nbytes += len(piece) if counts else 0
            if counts and ways.slow.get(self.request_.kind):
                self.wfile.flush()
                self.rest(len(piece))
            if at >= most:
                break
        self.wfile.flush()
        if share is not None:
            raise CutError


class Listener(ThreadingHTTPServer):
    """A port. Its connections end with it, and a client that went away is no matter for stderr."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, handler: type[Wire]) -> None:
        self.live = set[socket.socket]()
        super().__init__(("127.0.0.1", 0), handler)
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def process_request(self, request: Any, client_address: Any) -> None:
        self.live.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.live.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing."""

    def end(self) -> None:
        self.shutdown()
        self.server_close()
        for request in list(self.live):
            try:
                request.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self.thread.join()
