"""How the Hub is asked: which repo a name stands for, huggingface_hub's own client, and its errors as ours.

Endpoint, token and cache are huggingface_hub's own settings (HF_ENDPOINT, HF_TOKEN or `hf auth login`, HF_HOME).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from .. import __version__
from ..errors import HubError, UsageError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

#: errors of writing a file: not the connection's, although huggingface_hub does not say which file
OF_THIS_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM)
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[\w.][\w./-]{0,249}", re.ASCII)


class Address(NamedTuple):
    """A repo of models, `org/name`, and a branch, tag or commit of it; None: its main branch."""

    repo: str
    revision: str | None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def parse(text: str) -> Address | None:
    """`org/name[@revision]`; None where a text is not of that form, or a file or folder has that name."""
    name, at, revision = text.partition("@")
    if os.path.exists(text) or not _REPO.fullmatch(name) or (at and not _REVISION.fullmatch(revision)):
        return None
    return Address(name, revision or None)


def must_parse(text: str) -> Address:
    """The same, where only a repo will do. Raises UsageError for another text."""
    name, at, revision = text.partition("@")
    if not _REPO.fullmatch(name) or (at and not _REVISION.fullmatch(revision)):
        raise UsageError(f"{text!r}: no repo; give org/name, or org/name@revision")
    return Address(name, revision or None)


def must_name(name: str) -> None:
    """Raises UsageError where no branch or tag can have this name."""
    if not _REVISION.fullmatch(name) or name.startswith(("refs/", "-")) or re.fullmatch(r"[0-9a-f]{40}", name):
        raise UsageError(f"{name!r}: no name for a branch or tag that can be made; give another")


def client() -> HfApi:
    """huggingface_hub's client, which says who asks."""
    from huggingface_hub import HfApi

    return HfApi(library_name="phasefold", library_version=__version__)


@contextlib.contextmanager
def asking(what: str) -> Iterator[None]:
    """Turn what huggingface_hub and its HTTP client raise into a HubError; what: the repo, or a file in it."""
    from huggingface_hub import errors

    # of httpx, or of httpx2 in later versions of huggingface_hub
    http_error: type[Exception] = next(c for c in errors.HfHubHTTPError.__mro__ if c.__name__ == "HTTPError")
    broken = f"{what}: the Hub cannot be reached, or the connection broke ({{}}); give the same command again to go on"

    try:
        yield
    except errors.GatedRepoError:
        raise HubError(f"{what}: gated; ask for access on its page, then `hf auth login`, or set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        raise HubError(f"{what}: no such repo, or none that this token may see; try `hf auth whoami`") from None
    except errors.RevisionNotFoundError:
        raise HubError(f"{what}: the repo has no such branch, tag or commit") from None
    except errors.LocalEntryNotFoundError as error:  # hf_hub_download's word for a Hub that does not answer
        raise HubError(broken.format(_first_line(error.__cause__ or error))) from None
    except errors.EntryNotFoundError as error:
        raise HubError(f"{what}: not in the repo ({_first_line(error)})") from None
    except errors.OfflineModeIsEnabled:
        raise HubError(f"{what}: huggingface_hub is set offline; unset HF_HUB_OFFLINE") from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status == 401:
            raise HubError(f"{what}: the Hub does not know this token; `hf auth login`, or set HF_TOKEN") from None
        raise HubError(f"{what}: the Hub refuses{f' with {status}' if status else ''}: {_first_line(error)}") from None
    except (http_error, OSError, errors.XetDownloadError) as error:
        if isinstance(error, OSError) and error.filename is not None:  # a file of this machine
            raise
        if isinstance(error, OSError) and error.errno in OF_THIS_MACHINE:
            raise HubError(
                f"{what}: cannot be written here ({error.strerror}); mend that, then give it again"
            ) from None
        raise HubError(broken.format(_first_line(error))) from None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
