"""lm-eval's own clients of OpenAI-compatible servers, with each failure told in one line.

They retry, batch and parse as they are. What is added: answers are counted before lm-eval reads them, tokens are
those of `model.PhasefoldLM`, requests that lose their beginning are counted, and what a refusing server says is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import EvalError, LoadError
from .runner import Advance

try:
    import requests
    import tenacity  # noqa: F401  # lm-eval's client cannot do without, and says so too late
    from aiohttp import ClientError, ClientResponseError
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
except ImportError as error:
    raise LoadError(
        f"lm-eval's client of servers cannot be imported ({error}): pip install 'phasefold[evals]'"
    ) from None

_PROBE = "The quick brown fox jumps over the lazy dog."
_WORDS = 200  # characters of what a server says
_DO = {
    401: "set OPENAI_API_KEY to a key of this server", 403: "set OPENAI_API_KEY to a key that may do this",
    404: "see that the address ends where the API begins (/v1)", 429: "lower --concurrency",
}  # fmt: skip


class _Heard(logging.Handler):
    """What lm-eval logs of a failed request: the server's own words, which its exceptions leave out."""

    words = ""

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        for mark in ("Response text: ", "error message: "):
            if mark in line:
                self.words = line.partition(mark)[2].removesuffix(". Retrying...")


@contextlib.contextmanager
def one_line(url: str, timeout: float) -> Iterator[None]:
    """EvalError for whatever keeps a server's answer from us."""
    heard, logger = _Heard(), logging.getLogger("lm_eval.models.api_models")
    logger.addHandler(heard)
    try:
        yield
    except ClientResponseError as error:
        raise EvalError(refused(url, error.status, heard.words)) from None
    except requests.HTTPError as error:
        assert error.response is not None  # raise_for_status has it
        raise EvalError(refused(url, error.response.status_code, heard.words)) from None
    except (requests.Timeout, TimeoutError):
        raise EvalError(f"{url}: no answer within {timeout:g} s; give a longer --timeout, or see its log") from None
    except (requests.RequestException, ClientError, OSError, ValueError) as error:
        why = " ".join(str(error).split())[:_WORDS] or type(error).__name__
        raise EvalError(
            f"{url}: gives no answer that can be read ({why}); is an OpenAI-compatible server up?"
        ) from None
    finally:
        logger.removeHandler(heard)


def refused(url: str, status: int, words: str) -> str:
    """The line for an answer that is none. words: its body."""
    try:
        told = json.loads(words)
        words = str(told.get("message") or told["error"]["message"])
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    said = f" ({' '.join(words.split())[:_WORDS]})" if words.strip() else ""
    return f"{url}: HTTP {status}{said}; {_DO.get(status, 'see the log of the server')}"


class _Told:
    """What both clients have. truncated: requests that lost their beginning, by task. empty: answers without any
    text. advance: told of answers.
    """

    base_url: str
    timeout: float

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.url = self.base_url.removesuffix("/completions").removesuffix("/chat")
        self.truncated: Counter[str] = Counter()
        self.empty = 0
        self.advance: Advance = lambda _: None

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers, by lm-eval's client."""
        with one_line(self.url, self.timeout):
            made: list[str] = super().generate_until(requests, disable_tqdm)  # type: ignore[misc]  # of the client
            return made

    async def get_batched_requests(self, *args: Any, **kwargs: Any) -> Any:
        """As lm-eval has it. Of requests that fail together one is told; asyncio would print the others."""
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        return await super().get_batched_requests(*args, **kwargs)  # type: ignore[misc]

    def parse_generations(self, outputs: Any, **kwargs: Any) -> list[str]:
        """As lm-eval reads it. EvalError for what it would take for an empty answer."""
        for out in outputs if isinstance(outputs, list) else [outputs]:
            try:
                complete = all("text" in c or "content" in c["message"] for c in out["choices"]) and out["choices"]
            except (LookupError, TypeError):
                complete = False
            if not complete:
                raise EvalError(f"{self.url}: an answer without text ({json.dumps(out)[:_WORDS]}); see its log")
        made: list[str] = super().parse_generations(outputs, **kwargs)  # type: ignore[misc]
        self.empty += sum(not text for text in made)  # null, from a reasoning model that was cut, or ""
        self.advance(len(made))
        return made


def _settled(gen_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Greedy where do_sample says so, whatever temperature stands beside it, as transformers has it."""
    given = dict(gen_kwargs or {})
    return given | {"temperature": 0.0} if given.get("do_sample") is False else given


class Completions(_Told, LocalCompletionsAPI):  # type: ignore[misc]  # lm-eval has no types
    """/v1/completions, with prompts in tokens."""

    def read_with(self, tokenizer: Any, by_id: bool) -> None:
        """tokenizer: of the served model. by_id: the server can name alternatives by number instead of text, which
        two tokens may share (vLLM)."""
        self.tokenizer, self.tokenizer_backend, self.tokenized_requests = tokenizer, "huggingface", True
        self.add_bos_token = None
        self._by_id, self._probed, self._tasks, self._last = by_id, False, list[str](), dict[str, Any]()
        lead = tokenizer.decode(tokenizer.encode(""))
        first = tokenizer.decode([self.prefix_token_id]) if self.prefix_token_id is not None else ""
        self._leads = tuple(filter(None, [lead, first]))

    def tok_encode(self, string: Any, add_special_tokens: bool | None = None, **_: Any) -> Any:
        """As `model.PhasefoldLM`: with what the tokenizer puts before a text, once. Of several: of each."""
        if not isinstance(string, str):
            return [self.tok_encode(one, add_special_tokens) for one in string]
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._leads)
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def _create_payload(self, messages: Any, generate: bool = False, gen_kwargs: Any = None, **more: Any) -> Any:
        made = super()._create_payload(messages, generate=generate, gen_kwargs=_settled(gen_kwargs), **more)
        return made if generate or not self._by_id else made | {"return_tokens_as_token_ids": True}

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Of each continuation given its context: nats, and whether greedy decoding makes it."""
        self._tasks = [str(request.task_name) for request in requests]
        self._probe()
        with one_line(self.url, self.timeout):
            return list(super().loglikelihood(requests, disable_tqdm))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Of each whole text: nats, by lm-eval's windows."""
        self._tasks = []
        self._probe()
        with one_line(self.url, self.timeout):
            return list(super().loglikelihood_rolling(requests, disable_tqdm))

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        for task, (_, context, continuation) in zip(self._tasks, requests, strict=False):  # windows have no task
            if len(continuation) >= self.max_length:
                raise EvalError(
                    f"task {task}: a continuation has {len(continuation):,} tokens, too many for {self.url}"
                )
            if len(context) + len(continuation) > self.max_length:
                self.truncated[task] += 1
        return list(super()._loglikelihood_tokens(requests, **kwargs))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers, by lm-eval's client, which cuts prompts that are too long at their beginning."""
        for request in requests:
            context, given = request.args[:2]
            room = self.max_length - given.get("max_gen_toks", self._max_gen_toks)
            if room < 1:
                raise EvalError(f"task {request.task_name}: an answer may be longer than what {self.url} takes in all")
            if len(self.tok_encode(context)) > room:
                self.truncated[request.task_name] += 1
        return super().generate_until(requests, disable_tqdm)

    def _probe(self) -> None:
        """Once: that the server gives what log-likelihoods are made of, and reads our tokens as we do."""
        if self._probed:
            return
        tasks, self._tasks = self._tasks, []
        tokens, advance = self.tok_encode(_PROBE, add_special_tokens=False), self.advance
        self.advance = lambda _: None
        try:
            with one_line(self.url, self.timeout):
                self._loglikelihood_tokens([(None, tokens[:1], tokens[1:])])
        finally:
            self._tasks, self.advance = tasks, advance
        text = str(self._last["choices"][0].get("text"))
        if not text.startswith(_PROBE):
            raise EvalError(
                f"{self.url}: reads the tokens of {_PROBE!r} as {text[: len(_PROBE)]!r}: give --tokenizer, the folder "
                f"of the model that is served ({self.model})"
            )
        self._probed = True

    def parse_logprobs(self, outputs: Any, tokens: Any = None, ctxlens: Any = None, **kwargs: Any) -> Any:
        """As lm-eval reads it. EvalError where there is not one log-probability a token, of prompt and answer."""
        (out,) = outputs if isinstance(outputs, list) else [outputs]
        try:
            ((choice,), (ids,), (first,)) = out["choices"], tokens, ctxlens
            told = choice.get("logprobs") or {}
            found = [value for value in (told.get("token_logprobs") or [])[first:] if value is not None]
            tops = [top for top in (told.get("top_logprobs") or [])[first:] if top]
        except (LookupError, TypeError, ValueError, AttributeError):
            raise EvalError(
                f"{self.url}: an answer without choices ({json.dumps(out)[:_WORDS]}); see its log"
            ) from None
        if not len(found) == len(tops) == len(ids) + 1 - first:
            raise EvalError(
                f"{self.url}: {len(found)} log-probabilities and {len(tops)} alternatives for {len(ids) + 1 - first} "
                "tokens of prompt and answer (echo, logprobs): vLLM's and SGLang's /v1/completions give them all; of "
                "other servers ask only tasks that generate, or evaluate the checkpoint itself"
            )
        self._last = out
        made = super().parse_logprobs(outputs=outputs, tokens=tokens, ctxlens=ctxlens, **kwargs)
        self.advance(len(made))
        return made


class Chat(_Told, LocalChatCompletion):  # type: ignore[misc]
    """/v1/chat/completions. A prompt that is no list of messages is sent as one message of the user."""

    def create_message(self, messages: Sequence[Any], generate: bool = False) -> Any:
        """Messages as the API has them."""
        if isinstance(messages[0], str):
            return [{"role": "user", "content": messages[0]}]
        return super().create_message(messages, generate)

    def _create_payload(self, messages: Any, generate: bool = False, gen_kwargs: Any = None, **more: Any) -> Any:
        made = super()._create_payload(messages, generate=generate, gen_kwargs=_settled(gen_kwargs), **more)
        until = (gen_kwargs or {}).get("until") or []  # all: lm-eval sends four at most, and says nothing
        return made | {"stop": [until] if isinstance(until, str) else list(until)}

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """EvalError: the chat endpoint gives no log-probabilities of a prompt."""
        task = requests[0].task_name if requests else "?"
        raise EvalError(f"task {task}: needs log-likelihoods, which a chat endpoint does not give; ask without --chat")

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """EvalError, as above."""
        self.loglikelihood(requests)
        raise AssertionError("refused")
