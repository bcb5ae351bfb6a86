"""Going on where huggingface_hub gives up: a busy Hub and a broken connection are waited out, for a bounded time.

The library itself tries most requests six times within half a minute, but no commit, and it gives up on a Hub that is
rate limited for longer. A job of a day has to outlast that.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ..errors import HubError
from .api import OF_THIS_MACHINE, asking

Notice = Callable[[str], None]
T = TypeVar("T")

#: seconds between our own tries, a quarter of an hour in all; more where the Hub asks for more, up to an hour each
WAITS = (3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 300.0)
_LONGEST = 3600.0
_BUSY = (408, 425, 429)


def patient(what: str, act: Callable[[], T], notice: Notice | None = None, *, first: bool = False) -> T:
    """What `act` returns, which asks the Hub; it is done again while the Hub is busy or the connection breaks.

    what: the repo, or a file in it, for messages. first: nothing was asked before, so that no answer at all is more
    likely a wrong address, or no network, than a short failure: that is told at once.
    Raises HubError where the Hub refuses, or does not recover.
    """
    for wait in (*WAITS, None):
        try:
            return act()
        except Exception as error:
            cause = _inner(error)
            if not passes(cause) or (first and status_of(cause) is None):
                _refuse(what, cause)
            if wait is None:
                again = "give the same command again to go on"
                raise HubError(f"{what}: gave up after {len(WAITS) + 1} tries ({words(cause)}); {again}") from None
            asked = min(max(wait, _asked(cause)), _LONGEST)
            if notice:
                notice(f"{what}: {words(cause)}; trying again in {asked:.0f} s")
        time.sleep(asked)
    raise AssertionError


def _inner(error: BaseException) -> BaseException:
    """What went wrong: the uploader wraps it in a RuntimeError, and the downloader in a LocalEntryNotFoundError."""
    from huggingface_hub import errors

    while isinstance(error, RuntimeError | errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def passes(error: BaseException) -> bool:
    """Whether the same request may well succeed later: the Hub is busy or broken, or the connection is."""
    from huggingface_hub import errors

    if isinstance(error, errors.OfflineModeIsEnabled):
        return False
    if isinstance(error, errors.HfHubHTTPError):
        return (status := status_of(error)) is None or status in _BUSY or status >= 500
    if isinstance(error, OSError):
        return error.filename is None and error.errno not in OF_THIS_MACHINE
    transport = any(c.__module__.startswith("httpx") and c.__name__ == "HTTPError" for c in type(error).__mro__)
    return transport or isinstance(error, RuntimeError | errors.XetDownloadError)  # hf_xet's errors are RuntimeErrors


def status_of(error: BaseException) -> int | None:
    """The HTTP status of an answer that was refused."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _asked(error: BaseException) -> float:
    """Seconds that a busy Hub asks to wait."""
    headers: Any = getattr(getattr(error, "response", None), "headers", None) or {}
    reset = re.search(r"\bt=(\d{1,9})", headers.get("RateLimit") or "")
    after = headers.get("Retry-After") or ""
    return 1.0 + max(float(reset[1]) if reset else 0.0, float(after) if after.isdigit() else 0.0)


def _refuse(what: str, error: BaseException) -> None:
    """Raise the HubError for it; what is no word of the Hub's is a bug and goes on as it is."""
    if isinstance(error, ValueError) and status_of(error) is None:  # the library's word for what the Hub will not have
        raise HubError(f"{what}: the Hub refuses: {words(error)}") from None
    with asking(what):
        raise error


def words(error: BaseException) -> str:
    """An error in one line, without the signatures that addresses of uploads carry."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return re.sub(r"(https?://[^\s?'\"]*)\?[^\s'\"]*", r"\1", " ".join(lines[:2]))[:300]


class _Told(logging.Handler):
    """Hands what the library logs to whoever is told of delays."""

    def __init__(self, notice: Notice) -> None:
        super().__init__(logging.WARNING)
        self.notice = notice

    def emit(self, record: logging.LogRecord) -> None:
        self.notice(words(Exception(record.getMessage())))


@contextlib.contextmanager
def telling(notice: Notice) -> Iterator[None]:
    """While it lasts the library draws no bars of its own, and its warnings (waits, retries) are notices."""
    import huggingface_hub.utils.logging  # which gives the library's logger a handler as it is imported
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger, handler = logging.getLogger(huggingface_hub.__name__), _Told(notice)
    before, quiet = (logger.handlers[:], logger.propagate), are_progress_bars_disabled()
    logger.handlers, logger.propagate = [handler], False
    disable_progress_bars()
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before
        if not quiet:
            enable_progress_bars()
