"""The verbs that bring artifacts to the Hub and fetch them from it: push, pull."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from . import draw, draw_card
from .options import Json, Workers, cores, ends_cleanly, print_json

if TYPE_CHECKING:
    from ..hub.api import Address
    from ..hub.push import Preview, Pushed
    from ..hub.stream import Streamed
    from ..hub.upload import Upload
    from ..quantize.plan import Plan

Repo = Annotated[str, typer.Argument(metavar="REPO", help="org/name, or org/name@branch.")]


def push(
    artifact: Annotated[str, typer.Argument(metavar="ARTIFACT", help="Folder that phasefold wrote.")],
    repo: Repo,
    public: Annotated[
        bool, typer.Option("--public", help="Everybody may see a repo that is made; else private.")
    ] = False,
    branch: Annotated[
        str | None, typer.Option(metavar="NAME", help="Branch to push to, made where it is missing; else main.")
    ] = None,
    tag: Annotated[str | None, typer.Option(metavar="NAME", help="Tag for the last commit.")] = None,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="All else that the branch holds goes, where that is another checkpoint, too."),
    ] = False,
    base_model: Annotated[
        str | None, typer.Option(metavar="REPO", help="The source's repo, for the card; else as the manifest says.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be sent, with sizes; the Hub is only read.")
    ] = False,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Verify an artifact and upload it, shards first. Given again after an interruption, the same command goes on."""
    from ..formats.checkpoint import side_files
    from ..hub.api import must_parse
    from ..hub.patience import telling
    from ..hub.push import About, preview
    from ..hub.push import push as carry_out
    from ..hub.upload import Upload
    from ..serving.survey import survey

    if base_model is not None:
        must_parse(base_model)
    address, folder = _at_branch(must_parse(repo), branch), Path(artifact)
    stopped = "interrupted; what is on the Hub stays, give the same command again to go on"
    with ends_cleanly(stopped), telling(draw.notice):
        upload = Upload(address, private=not public, replace=replace, tag=tag, notice=draw.notice)
        if not as_json:
            _say_what_stays(folder)
        launch = draw_card.launch(survey(folder), side_files(folder), upload.repo, upload.branch)
        about = About(base_model, draw_card.evaluation(folder), launch)
        if dry_run:
            _draw_preview(preview(folder, upload, about), tag, private=not public, as_json=as_json)
            return
        total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        with (
            draw.progress("verify", total, quiet=as_json) as hashed,
            draw.progress("push", total, quiet=as_json) as sent,
        ):
            done = carry_out(folder, upload, about, workers=workers or cores(), hashed=hashed, sent=sent)
    if as_json:
        print_json(done._asdict())
        return
    tell_pushed(artifact, done)


def tell_pushed(artifact: str, done: Pushed) -> None:
    at = f"{done.branch}{f', tag {done.tag}' if done.tag else ''}, revision {done.revision}"
    draw.say(f"{artifact} -> {done.repo}: {at}")
    sent_words = f"{draw.many(done.uploaded, 'file')} uploaded ({draw.size(done.uploaded_bytes)})"
    seen = "private" if done.private else "public"
    draw.say(f"{draw.many(done.files, 'file')}, {draw.size(done.bytes)}: {sent_words}, {done.skipped:,} there; {seen}")


def upload_for(push_to: str | None, public: bool, tag: str | None, replace: bool, *, alone: bool) -> Upload | None:
    """Where `convert --push-to` sends its shards; None without it. alone: one process does the whole job."""
    from ..hub.api import must_parse
    from ..hub.stream import BATCH_BYTES
    from ..hub.upload import Upload

    if push_to is None:
        given = {"--public": public, "--tag": tag is not None, "--replace": replace}
        if unused := [name for name, there in given.items() if there]:
            raise UsageError(f"{unused[0]}: only with --push-to; leave it out")
        return None
    if not alone:
        raise UsageError("--push-to: sends what one process makes; with parts or Ray, `phasefold push` what comes out")
    return Upload(
        must_parse(push_to), private=not public, replace=replace, tag=tag, batch_bytes=BATCH_BYTES, notice=draw.notice
    )


def stream(made: Plan, out: Path, upload: Upload, **how: Any) -> Streamed:
    """`convert --push-to`, with the arguments of `convert`."""
    from ..hub.patience import telling
    from ..hub.push import About
    from ..hub.stream import convert_to_repo
    from ..serving.survey import survey_plan

    launch = draw_card.launch(survey_plan(made), made.checkpoint.side_files(), upload.repo, upload.branch)
    with telling(draw.notice):
        return convert_to_repo(made, out, upload, About(launch=launch), **how)


def _at_branch(address: Address, branch: str | None) -> Address:
    if branch is not None and address.revision not in (None, branch):
        raise UsageError(f"--branch {branch}, but REPO says {address.revision}; give one of the two")
    from ..hub.api import must_parse

    return address if branch is None else must_parse(f"{address.repo}@{branch}")


def _say_what_stays(folder: Path) -> None:
    from ..formats.manifest import read_manifest
    from ..hub.push import stays

    if left := stays(folder, read_manifest(folder)):
        more = f" and {len(left) - 1:,} more" if len(left) > 1 else ""
        draw.notice(f"{left[0]}{more}: not the artifact's, not pushed")


def _draw_preview(made: Preview, tag: str | None, *, private: bool, as_json: bool) -> None:
    sizes, kept = sum(made.send.values()), sum(made.skip.values())
    if as_json:
        keys = {"repo": made.repo, "branch": made.branch, "tag": tag, "revision": None, "private": private}
        counts = {"files": len(made.send) + len(made.skip), "bytes": sizes + kept, "uploaded": len(made.send)}
        told = {
            "uploaded_bytes": sizes,
            "skipped": len(made.skip),
            "dry_run": True,
            "send": made.send,
            "gone": made.gone,
        }
        print_json(keys | counts | told)
        return
    draw.table(["file", "bytes"], [[draw.clean(path), f"{size:,}"] for path, size in made.send.items()], "lr")
    state = "exists" if made.exists else f"would be made, {'private' if private else 'public'}"
    draw.say(f"{made.repo}@{made.branch}: {state}{f', tag {tag}' if tag else ''}")
    there = f"; {draw.many(len(made.skip), 'file')} there ({draw.size(kept)})"
    if made.gone:
        what = ", ".join(list(made.gone)[:5]) + (" and more" if len(made.gone) > 5 else "")
        draw.say(f"{draw.many(len(made.gone), 'file')} would be DELETED ({draw.size(sum(made.gone.values()))}): {what}")
    draw.say(f"{draw.many(len(made.send), 'file')} to send, {draw.size(sizes)}{there}. Nothing was sent or hashed.")


def pull(
    repo: Annotated[str, typer.Argument(metavar="REPO", help="org/name, or org/name@revision.")],
    out: Annotated[str, typer.Argument(metavar="DIR", help="Folder to put its files into, new or empty.")],
    as_json: Json = False,
) -> None:
    """Download a repo at one commit, every file checked. Given again after an interruption, it goes on."""
    from ..hub.api import must_parse
    from ..hub.patience import telling
    from ..hub.pull import prepare

    stopped = "interrupted; files that are done are kept, give the same command again to go on"
    with ends_cleanly(stopped), telling(draw.notice):
        job = prepare(must_parse(repo), Path(out), draw.notice)
        with draw.progress("pull", job.total, quiet=as_json) as progress:
            done = job.carry_out(progress)
    if as_json:
        print_json(done._asdict())
        return
    draw.say(f"{repo} -> {out}: revision {done.revision}")
    fetched = f"{draw.many(done.downloaded, 'file')} downloaded ({draw.size(done.downloaded_bytes)})"
    draw.say(
        f"{draw.many(done.files, 'file')}, {draw.size(done.bytes)}, all checked: {fetched}, {done.skipped:,} there"
    )
