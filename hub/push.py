"""An artifact to the Hub: checked first, then shards, then all that is small in the last commit.

The bytes are hashed once, by `verify`, and go up under the manifest's hashes. README.md is not the artifact's: the one
in the repo, else the one beside the weights, gets the artifact's section. Results of `eval` go along.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..errors import HubError, VerifyError
from ..formats.checkpoint import CARD, MANIFEST, RESULT, natural, parse_json
from ..formats.manifest import Manifest, read_manifest
from ..quantize.verify import verify
from .card import card
from .patience import patient
from .tree import ATTRIBUTES, SMALL, Meant, git_oid, meant
from .upload import Upload

Progress = Callable[[int], None]


class About(NamedTuple):
    """What the card says besides what the artifact knows; see `card`."""

    base_model: str | None = None
    evaluation: str | None = None
    launch: str | None = None


class Pushed(NamedTuple):
    """revision: the commit. files, bytes: of the artifact, its card and results; uploaded of them, the rest skipped."""

    repo: str
    branch: str
    tag: str | None
    revision: str
    private: bool
    files: int
    bytes: int
    uploaded: int
    uploaded_bytes: int
    skipped: int


class Preview(NamedTuple):
    """What a push would do. exists: the repo does.

    send: path -> bytes; skip: the same of files that are there, gone: of those that `replace` takes away.
    """

    repo: str
    branch: str
    exists: bool
    send: dict[str, int]
    skip: dict[str, int]
    gone: dict[str, int]
    card: str


def push(
    artifact: Path,
    upload: Upload,
    about: About = About(),  # noqa: B008 - it is a value
    *,
    workers: int = 2,
    hashed: Progress | None = None,
    sent: Progress | None = None,
) -> Pushed:
    """Carry it out. hashed, sent: told of bytes as they are checked, and as they are on the Hub.

    Raises VerifyError where `verify` refuses the artifact, HubError; before anything is written to the Hub in both
    cases, as far as that can be known.
    """
    manifest = read_manifest(artifact)
    files = artifact_files(artifact, manifest)
    upload.need_token()
    upload.look(files)
    before = _stamps(artifact, files)
    if problems := verify(artifact, workers=workers, progress=hashed).problems:
        more = f" (and {len(problems) - 1:,} more)" if len(problems) > 1 else ""
        raise VerifyError(f"{artifact}: not pushed, {problems[0]}{more}; `phasefold verify` tells all")
    upload.begin(files)
    text = card_of(artifact, (artifact / "config.json").read_bytes(), manifest, upload, about)
    for path in sorted((path for path in files if path.endswith(".safetensors")), key=natural):
        upload.add(path, artifact / path, files[path].nbytes, str(files[path].sha256))
        if sent:
            sent(files[path].nbytes)
    if _stamps(artifact, files) != before:
        raise HubError(f"{artifact}: has changed since it was checked, the push was not finished; give it again")
    small: dict[str, bytes | Path] = {path: artifact / path for path in files if not path.endswith(".safetensors")}
    small |= {CARD: text.encode(), **{path: artifact / path for path in results(artifact)}}
    revision = upload.finish(small)
    if sent:
        sent(sum(files[path].nbytes for path in small if path in files))
    return pushed(upload, revision)


def pushed(upload: Upload, revision: str) -> Pushed:
    """What an upload that has ended has done."""
    done = upload.uploaded | upload.skipped
    return Pushed(
        upload.repo, upload.branch, upload.tag, revision, upload.private, len(done), sum(done.values()),
        len(upload.uploaded), sum(upload.uploaded.values()), len(upload.skipped),
    )  # fmt: skip


def preview(artifact: Path, upload: Upload, about: About = About()) -> Preview:  # noqa: B008
    """What `push` would do; the Hub is only read, and the artifact's bytes are not hashed. Raises as `push`."""
    manifest = read_manifest(artifact)
    files = artifact_files(artifact, manifest)
    there = upload.look(files)
    text = card_of(artifact, (artifact / "config.json").read_bytes(), manifest, upload, about)
    more = {path: meant((artifact / path).read_bytes()) for path in results(artifact)} | {CARD: meant(text.encode())}
    there |= {path for path, one in more.items() if upload.has(path, one)}
    sizes = {path: one.nbytes for path, one in (files | more).items()}
    send = {path: size for path, size in sizes.items() if path not in there}
    skip = {path: size for path, size in sizes.items() if path in there}
    kept = {*sizes, ATTRIBUTES}
    gone = {path: one.nbytes for path, one in upload.tree.items() if upload.replace and path not in kept}
    return Preview(upload.repo, upload.branch, upload.exists, send, skip, gone, text)


def artifact_files(artifact: Path, manifest: Manifest) -> dict[str, Meant]:
    """Every file that makes an artifact up, by path, with the manifest's hashes. VerifyError: one is not there."""
    found = {}
    for path, entry in manifest.files.items():
        if path == CARD:  # older manifests list it
            continue
        try:
            size = os.stat(artifact / path).st_size
            oid = git_oid((artifact / path).read_bytes()) if size <= SMALL else None
        except OSError as error:
            raise VerifyError(
                f"{artifact}: {path} cannot be read ({error.strerror}); make the artifact again"
            ) from None
        if size != entry["bytes"]:
            raise VerifyError(f"{artifact}: {path} has {size:,} bytes, the manifest says {entry['bytes']:,}")
        found[path] = Meant(size, str(entry["sha256"]), oid)
    return found | {MANIFEST: meant((artifact / MANIFEST).read_bytes())}


def results(artifact: Path) -> list[str]:
    """Results of `eval` that lie in an artifact, and what lies beside them under their names."""
    found = sorted(path.relative_to(artifact).as_posix() for path in artifact.glob("evals/*") if path.is_file())
    stems = tuple(path.removesuffix(".json") for path in found if RESULT.fullmatch(path))
    return [path for path in found if path.startswith(stems) and not path.endswith(".partial")] if stems else []


def stays(artifact: Path, manifest: Manifest) -> list[str]:
    """Files that lie in an artifact's folder and are not pushed."""
    known = {*manifest.files, MANIFEST, CARD, *results(artifact)}
    held = (path.relative_to(artifact).as_posix() for path in artifact.rglob("*") if path.is_file())
    return sorted(path for path in held if path not in known)


def card_of(artifact: Path, config: bytes, manifest: Manifest, upload: Upload, about: About) -> str:
    """README.md as it goes up: the repo's own is gone on with, since it may have been edited there."""
    existing: bytes | None = None
    if CARD in upload.tree and not upload.replace:
        get = partial(upload.api.hf_hub_download, upload.repo, CARD, revision=upload.head)
        existing = Path(patient(f"{upload.repo}/{CARD}", get, upload.notice)).read_bytes()
    elif (artifact / CARD).is_file():
        existing = (artifact / CARD).read_bytes()
    try:
        text = existing.decode() if existing is not None else None
    except UnicodeDecodeError:
        raise HubError(f"{upload.repo}: {CARD} is not UTF-8; mend it, or delete it") from None
    told = parse_json(config, artifact / "config.json")
    return card(told, manifest, text, repo=upload.repo, **about._asdict())


def _stamps(artifact: Path, files: Mapping[str, Meant]) -> list[tuple[int, int]]:
    """Sizes and times of change: what was checked is what goes up. A file that is gone has none."""
    stats = [(artifact / path).stat() if (artifact / path).is_file() else None for path in files]
    return [(stat.st_size, stat.st_mtime_ns) if stat else (0, 0) for stat in stats]
