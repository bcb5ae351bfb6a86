"""A server on loopback with the OpenAI API of vLLM, as far as lm-eval asks it, and with ways to misbehave."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import transformers

NAME = "tiny"


@dataclass
class Ways:
    """What a server does. fail, drop: so many requests for answers end in `status`, or with the connection, at first.

    logprobs: "all" of prompt and answer, "none", "generated" alone (llama.cpp's), "short" by one, "null" for the
    prompt's. slow: seconds before an answer. key: that must be given. models: names under /models. length: most tokens.
    odd: a body instead of an answer. strange: prompts are echoed as other text. Switches may be set while it runs.
    """

    fail: int = 0
    status: int = 500
    drop: int = 0
    logprobs: str = "all"
    slow: float = 0.0
    key: str | None = None
    models: tuple[str, ...] = (NAME,)
    owner: str = "vllm"
    root: str | None = None
    length: int | None = 2048
    odd: bytes | None = None
    strange: bool = False
    version: bool = True
    seen: list[dict[str, Any]] = field(default_factory=list)


class Model:
    """A checkpoint in float32, asked by one request at a time."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.lock = threading.Lock()

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """float32 [len, vocabulary]: of the token behind each."""
        with self.lock, torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)

    def generate(self, ids: list[int], body: dict[str, Any]) -> tuple[list[int], list[torch.Tensor], str, str]:
        """Tokens, distributions that they were taken from, their text up to a stop, and why it ends."""
        made, rows = list[int](), list[torch.Tensor]()
        generator = torch.Generator().manual_seed(body.get("seed") or 0)
        stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
        for _ in range(body.get("max_tokens") or 16):
            rows.append(self.logprobs([*ids, *made])[-1])
            if temperature := body.get("temperature", 1.0):
                drawn = torch.multinomial((rows[-1] / temperature).softmax(-1), 1, generator=generator)
                made.append(int(drawn))
            else:
                made.append(int(rows[-1].argmax()))
            text = self.tokenizer.decode(made, skip_special_tokens=True)
            if made[-1] == self.tokenizer.eos_token_id:
                return made, rows, text, "stop"
            if found := [place for stop in stops if (place := text.find(stop)) >= 0]:
                return made, rows, text[: min(found)], "stop"
        return made, rows, self.tokenizer.decode(made, skip_special_tokens=True), "length"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        ways: Ways = self.server.ways
        if not self.allowed(ways):
            return
        if self.path == "/v1/models":
            cards = [
                {"id": n, "object": "model", "owned_by": ways.owner, "root": ways.root, "max_model_len": ways.length}
                for n in ways.models
            ]
            self.send({"object": "list", "data": cards})
        elif self.path == "/version" and ways.version:
            self.send({"version": "0.32.0"})
        else:
            self.send({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ways: Ways = self.server.ways
        if not self.allowed(ways):
            return
        with self.server.lock:
            ways.seen.append({"path": self.path, "body": body, "headers": dict(self.headers)})
            dropped, failed = ways.drop > 0, ways.drop == 0 and ways.fail > 0
            ways.drop, ways.fail = ways.drop - dropped, ways.fail - failed
        time.sleep(ways.slow)
        if dropped:
            self.close_connection = True
        elif failed:
            self.send({"error": {"message": "out of luck", "code": ways.status}}, ways.status)
        elif ways.odd is not None:
            self.send_bytes(ways.odd)
        elif body["model"] not in ways.models:
            self.send({"error": {"message": f"The model `{body['model']}` does not exist."}}, 404)
        elif self.path == "/v1/completions":
            self.complete(body, ways)
        elif self.path == "/v1/chat/completions":
            self.chat(body)
        else:
            self.send({"detail": "Not Found"}, 404)

    def allowed(self, ways: Ways) -> bool:
        if ways.key is None or self.headers.get("Authorization") == f"Bearer {ways.key}":
            return True
        self.send({"error": "Unauthorized"}, 401)
        return False

    def complete(self, body: dict[str, Any], ways: Ways) -> None:
        model: Model = self.server.model
        prompts = body["prompt"]
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        choices = []
        for index, prompt in enumerate(prompts):
            ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            most = ways.length or 1 << 30
            if len(ids) + (body.get("max_tokens") or 16) > most:
                told = f"This model's maximum context length is {most} tokens. Your prompt has {len(ids)}."
                self.send({"error": {"message": told, "type": "BadRequestError", "code": 400}}, 400)
                return
            made, rows, text, why = model.generate(ids, body)
            choice: dict[str, Any] = {"index": index, "text": text, "finish_reason": why, "logprobs": None}
            echo = body.get("echo", False)
            if echo:
                choice["text"] = ("?" if ways.strange else "") + model.tokenizer.decode(ids) + text
            if body.get("logprobs") is not None and ways.logprobs != "none":
                shown = ids if echo and ways.logprobs != "generated" else []
                before = [None, *model.logprobs(ids)[:-1]] if shown else []
                choice["logprobs"] = self.told([*shown, *made], [*before, *rows], body, ways, len(shown))
            choices.append(choice)
        self.send({"object": "text_completion", "model": body["model"], "choices": choices[::-1]})

    def told(
        self, ids: list[int], rows: list[torch.Tensor | None], body: dict[str, Any], ways: Ways, prompt: int
    ) -> dict[str, Any]:
        tokenizer = self.server.model.tokenizer

        def name(token: int) -> str:
            return f"token_id:{token}" if body.get("return_tokens_as_token_ids") else tokenizer.decode([token])

        values, tops = list[float | None](), list[dict[str, float] | None]()
        for token, row in zip(ids, rows, strict=True):
            values.append(None if row is None else float(row[token]))
            best = [] if row is None else [*row.topk(body["logprobs"]).indices.tolist(), token]
            tops.append(None if row is None else {name(one): float(row[one]) for one in best})
        if ways.logprobs == "null":
            values[:prompt] = [None] * prompt
        if ways.logprobs == "short":
            values, tops = values[1:], tops[1:]
        return {"tokens": [name(token) for token in ids], "token_logprobs": values, "top_logprobs": tops}

    def chat(self, body: dict[str, Any]) -> None:
        model: Model = self.server.model
        if model.tokenizer.chat_template is None:
            self.send({"error": {"message": "no chat template was given, and\nthe tokenizer has none"}}, 400)
            return
        text = model.tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        _, _, answer, why = model.generate(model.tokenizer.encode(text), body)
        message = {"role": "assistant", "content": answer}
        self.send({"choices": [{"index": 0, "message": message, "finish_reason": why}], "model": body["model"]})

    def send(self, told: Any, status: int = 200) -> None:
        self.send_bytes(json.dumps(told).encode(), status)

    def send_bytes(self, told: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no matter for stderr."""


@contextmanager
def serving(model: Model, ways: Ways) -> Iterator[str]:
    """The address of a server that runs, with /v1."""
    server: Any = _Server(("127.0.0.1", 0), _Handler)
    server.model, server.ways, server.lock = model, ways, threading.Lock()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
