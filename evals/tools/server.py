"""Asking an OpenAI-compatible server (vLLM, SGLang, a provider), several requests at a time.

Through huggingface_hub's client, with its ways looked at: it leaves nulls out of what is nested in lists and objects,
except in tuples; it sends the token of this machine's user to whatever server where no key is given; and it retries
nothing. Answers are asked for whole (no `stream`), so that what is judged is the server's parser for whole answers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from ...errors import EvalError, TextError
from .answers import Answer, from_response
from .requests import Request, shown

NO_KEY = "none"
_AGAIN = frozenset({408, 409, 425, 429})  # and 5xx: what may be over in a moment
_HOPELESS = frozenset({401, 403, 404, 405})  # what is true of every request
_LONGEST = 60.0  # seconds between two tries


@dataclass(frozen=True, slots=True)
class Server:
    """url: with the path under which its API lies, http://127.0.0.1:8000/v1. key: of the API.

    timeout: seconds that an answer may take. tries: of a request; between two of them `pause` seconds, doubled each
    time, or what the server asks for. extra: fields of the body, above those of the requests (temperature, max_tokens,
    chat_template_kwargs, ...); a field of None is left out.
    """

    url: str
    model: str
    key: str | None = None
    timeout: float = 600.0
    tries: int = 4
    pause: float = 1.0
    extra: Mapping[str, Any] = field(default_factory=dict)


class _Refused(EvalError):
    """What is no fault of one request: all of them would fail."""


def ask_server(
    requests: Sequence[Request],
    server: Server,
    *,
    repeats: int = 1,
    seed: int | None = None,
    concurrency: int = 8,
    most_unanswered: float = 0.05,
    advance: Callable[[int], None] = lambda _: None,
) -> list[list[Answer]]:
    """`repeats` samples of each request. seed: sample number i is asked for with seed + i; None: none is sent.

    A request that stays without an answer has one with an error. EvalError as soon as more than the share
    `most_unanswered` has, or where the server would refuse every request; TextError: a body that cannot be sent so.
    """
    for request in requests:
        _check(request)
    allowed = int(most_unanswered * len(requests) * repeats)
    stop, lock, missing = threading.Event(), threading.Lock(), list[str]()

    def ask(request: Request, repeat: int) -> Answer:
        if stop.is_set():
            return Answer(None, error="not asked")
        answer = _ask(request, server, None if seed is None else seed + repeat, stop)
        with lock:
            if answer.error is not None and not stop.is_set():
                missing.append(f"line {request.line}: {answer.error}")
                if len(missing) > allowed:
                    raise EvalError(
                        f"{server.url}: {len(missing)} of {len(requests) * repeats} requests got no answer, more than "
                        f"the share of {most_unanswered:g} that may; the first: {missing[0]}"
                    )
            advance(1)
        return answer

    pool = ThreadPoolExecutor(concurrency)
    try:
        asked = [[pool.submit(ask, request, repeat) for repeat in range(repeats)] for request in requests]
        done, _ = wait([one for some in asked for one in some], return_when=FIRST_EXCEPTION)
        for one in done:
            one.result()
        return [[one.result() for one in some] for some in asked]
    finally:  # also when interrupted: nothing is left waiting or asking
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)


def _check(request: Request) -> None:
    """What the client would send otherwise than it stands."""
    form = request.body.get("response_format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        raise TextError(f"line {request.line}: a response_format of json_schema is not passed on by huggingface_hub")


def _ask(request: Request, server: Server, seed: int | None, stop: threading.Event) -> Answer:
    error, pause = "", server.pause
    for left in range(server.tries - 1, -1, -1):
        try:
            return _once(request, server, seed)
        except _Refused:
            raise
        except _Again as again:
            error = str(again)
            waits = min(max(pause, again.after), _LONGEST)
        except _Rejected as rejected:
            return Answer(None, error=str(rejected))
        if left and stop.wait(waits):
            break
        pause *= 2
    return Answer(None, error=f"{error} ({server.tries} tries)")


class _Again(Exception):
    """May go well another time, after so many seconds."""

    def __init__(self, why: str, after: float = 0.0) -> None:
        super().__init__(why)
        self.after = after


class _Rejected(Exception):
    """The server does not take this request."""


def _once(request: Request, server: Server, seed: int | None) -> Answer:
    from huggingface_hub import InferenceClient
    from huggingface_hub.errors import HfHubHTTPError, InferenceTimeoutError, OfflineModeIsEnabled

    body = {name: value for name, value in request.body.items() if name not in ("messages", "model", "stream")}
    body.pop("stream_options", None)
    body |= {} if seed is None else {"seed": seed}
    body |= server.extra
    body["tools"] = tuple(body["tools"])  # a list is stripped of the nulls in it
    client = InferenceClient(base_url=server.url, api_key=server.key or NO_KEY, timeout=server.timeout)
    try:
        response = client.chat_completion(list(request.body["messages"]), model=server.model, extra_body=body)
        return from_response(response)
    except OfflineModeIsEnabled:
        raise _Refused(f"{server.url}: huggingface_hub is set offline; unset HF_HUB_OFFLINE to ask a server") from None
    except InferenceTimeoutError:
        raise _Again(f"no answer in {server.timeout:g} seconds") from None
    except HfHubHTTPError as error:
        raise _of_status(error, server) from None
    except Exception as error:  # a connection can break anywhere in the client, and a body be anything
        raise _Again(f"{type(error).__name__}: {shown(error)}") from None


def _of_status(error: Any, server: Server) -> Exception:
    status = error.response.status_code
    try:
        said = error.response.text
    except Exception:  # the client has not read it, or the server has hung up
        said = str(error)
    why = shown(f"HTTP {status}: {said}")
    if status in _HOPELESS:
        return _Refused(f"{server.url}, model {server.model}: {why}; see the address, the model's name and the key")
    if status in _AGAIN or status >= 500:
        return _Again(why, _seconds(error.response.headers.get("Retry-After")))
    return _Rejected(why)


def _seconds(given: str | None) -> float:
    try:
        return max(float(given or 0), 0.0)
    except ValueError:  # a date
        return 0.0
