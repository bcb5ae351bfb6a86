"""Some bytes of a file in a repo, by a ranged GET through huggingface_hub's session.

`hf_hub_download` takes whole files, and since its version 2 begins them anew after a kill. Headers, samples and pieces
of shards are asked for by range, and what comes must be exactly what was asked for.
"""

from __future__ import annotations

from collections.abc import Callable

from .. import __version__
from ..errors import HubError
from .patience import Notice, patient


class Closed(Exception):
    """Nobody waits for these bytes any more."""


def fetch(
    repo: str,
    revision: str,
    file: str,
    start: int,
    stop: int,
    *,
    notice: Notice | None = None,
    closed: Callable[[], bool] = lambda: False,
) -> bytearray:
    """Bytes `start` to `stop` (exclusive) of a file at a commit, in memory.

    notice: told of delays. closed: asked while bytes arrive; where it says so, Closed is raised.
    Raises HubError where the Hub refuses, does not recover, or answers with anything else.
    """
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils._headers import build_hf_headers
    from huggingface_hub.utils._http import hf_raise_for_status, http_stream_backoff

    what = f"{repo}@{revision[:12]}: {file}"
    url = hf_hub_url(repo, file, revision=revision)
    headers = build_hf_headers(library_name="phasefold", library_version=__version__)
    headers |= {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}

    def ask() -> bytearray:
        found = bytearray()
        with http_stream_backoff(
            "GET",
            url,
            headers=headers,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            retry_on_exceptions=(),  # `patient` does that, and its waits have bounds
            retry_on_status_codes=(),
        ) as response:
            hf_raise_for_status(response)
            _check(what, response.status_code, response.headers.get("Content-Range"), start, stop)
            for chunk in response.iter_bytes(1 << 16):
                if closed():
                    raise Closed
                found += chunk
                if len(found) > stop - start:
                    raise HubError(f"{what}: more bytes come than the range of {stop - start:,} that was asked for")
        if len(found) < stop - start:
            raise ConnectionError(f"{len(found):,} bytes came for a range of {stop - start:,}")
        return found

    return patient(what, ask, notice)


def _check(what: str, status: int, content_range: str | None, start: int, stop: int) -> None:
    """That an answer is the range that was asked for. A whole file of 5 GB would be read for each of its pieces."""
    if status != 206:
        raise HubError(f"{what}: a range was asked for and {status} came; phasefold needs a Hub that serves ranges")
    if not (content_range or "").startswith(f"bytes {start}-{stop - 1}/"):
        raise HubError(f"{what}: asked for bytes {start} to {stop - 1}, the answer is {content_range!r}")
