"""The files of one artifact on their way into a branch of a repo: shards first, what makes it look whole last.

huggingface_hub uploads; what it is told is what to send, in which order, and with which sha256, so that it hashes
nothing again. Whatever breaks off, the branch never looks whole before it is, and the same job goes on from what is
there: LFS files that are on the Hub's storage, and shards that are committed, are not sent again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import HubError
from .api import Address, asking, client, must_name
from .patience import Notice, patient, status_of
from .tree import (
    ATTRIBUTES,
    MARKS,
    Entry,
    Meant,
    added,
    deleted,
    differing,
    git_oid,
    holds,
    meant,
    of_file,
    others,
    read_tree,
)

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

BATCH_BYTES = 25_000_000_000  # a commit each: a terabyte takes forty, and the Hub allows some hundred an hour


class Upload:
    """One job: `begin`, then `add` for each shard, then `finish` with all that is small.

    private: of a repo that is made; one that exists must be so already. replace: what else the branch holds goes; what
    makes it look whole in a commit of its own before anything comes, the rest with the last commit. tag: put on the
    last commit. notice: told of waits and new tries. committed: paths that are in the branch with the right content,
    as the Hub itself says: the local file may go. Counts are of this job: uploaded, skipped and their bytes.
    """

    def __init__(
        self,
        address: Address,
        *,
        private: bool = True,
        replace: bool = False,
        tag: str | None = None,
        batch_bytes: int = BATCH_BYTES,
        notice: Notice | None = None,
    ) -> None:
        self.repo, self.branch = address.repo, address.revision or "main"
        self.private, self.replace, self.tag = private, replace, tag
        self.batch_bytes, self.notice = batch_bytes, notice
        self.api = client()
        self.exists = False
        self.head: str | None = None
        self.tree: dict[str, Entry] = {}
        self.committed: set[str] = set()
        self.uploaded: dict[str, int] = {}
        self.skipped: dict[str, int] = {}
        self._branches: dict[str, str] = {}
        self._tags: set[str] = set()
        self._meant: dict[str, Meant] = {}
        self._pending: list[CommitOperationAdd] = []
        must_name(self.branch)
        if tag is not None:
            must_name(tag)

    def __str__(self) -> str:
        return f"{self.repo}@{self.branch}"

    # before anything is written

    def need_token(self) -> None:
        """HubError where there is no token: nothing can be pushed."""
        from huggingface_hub import get_token

        if get_token() is None:
            raise HubError(f"{self.repo}: no token to push with; `hf auth login`, or set HF_TOKEN")

    def look(self, expected: Mapping[str, Meant]) -> set[str]:
        """What of the artifact's files is there already; nothing is written.

        expected: every file that makes the artifact up, by path; README.md and results of `eval` are not of them.
        Raises HubError where the repo may not be read, is public and was not to be (or the reverse), where the branch
        holds another checkpoint or parts of one, and where the tag stands somewhere else.
        """
        self._meant = dict(expected)
        self._read()
        there = {path for path, one in expected.items() if holds(self.tree.get(path), one)}
        if not self.replace and (strange := others(self.tree, self._meant, there)):
            more = f" and {len(strange) - 1:,} more" if len(strange) > 1 else ""
            raise HubError(
                f"{self}: holds {strange[0]}{more}, which {'is' if len(strange) == 1 else 'are'} not this artifact's; "
                "give another --branch, or --replace, and then this artifact takes the place of all that is there"
            )
        if self.tag in self._branches or self.tag == self.branch:
            raise HubError(f"{self.repo}: {self.tag} is a branch, a tag of its name would stand for it; give another")
        if self.tag in self._tags and differing(self._tree_at(str(self.tag)), expected):
            raise HubError(f"{self.repo}: tag {self.tag} exists and is of something else; give another tag")
        return there

    def _read(self) -> None:
        """What the repo holds now."""
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        with asking(self.repo):  # the first request is not repeated: a wrong endpoint or no network shows at once
            try:
                info = self.api.repo_info(self.repo)
            except RepositoryNotFoundError as error:
                if isinstance(error, GatedRepoError):
                    raise
                self.exists, self.head, self.tree = False, None, {}
                return
        if bool(info.private) != self.private:
            had, wish = ("private", "public") if info.private else ("public", "private")
            cure = "leave --public out" if info.private else "give --public"
            raise HubError(
                f"{self.repo}: is {had}, and would not become {wish} by a push; {cure}, or change its settings"
            )
        self.exists = True
        refs = patient(self.repo, lambda: self.api.list_repo_refs(self.repo), self.notice)
        self._branches = {ref.name: ref.target_commit for ref in refs.branches}
        self._tags = {ref.name for ref in refs.tags}
        if self.branch in self._tags and self.branch not in self._branches:
            raise HubError(f"{self}: is a tag, and nothing can be pushed to one; give a branch")
        self.head = self._branches.get(self.branch)
        self.tree = self._tree_at(self.head) if self.head else {}

    def _tree_at(self, revision: str) -> dict[str, Entry]:
        return patient(str(self), lambda: read_tree(self.api, self.repo, revision), self.notice)

    def _at(self, revision: str) -> str | None:
        """The commit that a branch or tag stands for."""
        return patient(str(self), lambda: self.api.repo_info(self.repo, revision=revision).sha, self.notice)

    def present(self, wanted: Mapping[str, Meant]) -> set[str]:
        """Which of these files the branch has now; nothing is written, and nothing else is refused."""
        if not wanted:
            return set()
        self._read()
        return {path for path, one in wanted.items() if holds(self.tree.get(path), one)}

    def has(self, path: str, wanted: Meant) -> bool:
        """Whether the branch held a file, with this content, when it was last looked at."""
        return holds(self.tree.get(path), wanted) is True

    # writing

    def begin(self, expected: Mapping[str, Meant]) -> set[str]:
        """`look`, then make the repo and the branch where they are missing, and with `replace` make room.

        -> files that are there with the right content. A new branch starts from the repo's first commit, so that
        nothing of the main branch is in it.
        """
        from huggingface_hub import CommitOperationDelete

        self.need_token()
        there = self.look(expected)
        if not self.exists:
            make = partial(self.api.create_repo, self.repo, private=self.private, exist_ok=True)
            patient(self.repo, make, self.notice)
            there = self.look(expected)
        if self.head is None:
            commits = patient(self.repo, lambda: self.api.list_repo_commits(self.repo), self.notice)
            start = partial(self.api.create_branch, self.repo, revision=commits[-1].commit_id, exist_ok=True)
            patient(str(self), partial(start, branch=self.branch), self.notice)
            there = self.look(expected)
        marks = [mark for mark in others(self.tree, self._meant, there) if mark in MARKS]
        if marks:  # only ever with `replace`
            self._commit([CommitOperationDelete(mark) for mark in marks], "Take away what another artifact replaces")
        self.committed |= there - set(marks)
        return there - set(marks)

    def add(self, path: str, data: Path | bytes, nbytes: int, sha256: str) -> bool:
        """Send a file, and commit once enough came together; False: the branch has it, nothing was sent.

        nbytes, sha256: as the manifest has them; the file is not hashed again. Raises HubError.
        """
        from huggingface_hub import CommitOperationAdd

        wanted = Meant(nbytes, sha256, git_oid(data) if isinstance(data, bytes) else None)
        found = self.tree.get(path)
        if holds(found, wanted) is None and isinstance(data, Path):  # stored by git itself: small
            wanted = wanted._replace(oid=git_oid(data.read_bytes()))
        self._meant[path] = wanted
        if holds(found, wanted):
            self.skipped[path] = nbytes
            self.committed.add(path)
            return False
        if isinstance(data, Path) and (not data.is_file() or os.stat(data).st_size != nbytes):
            raise HubError(f"{data}: has gone, or no longer has {nbytes:,} bytes, while it was pushed; see `verify`")
        operation = CommitOperationAdd(path, data)
        operation.upload_info.sha256 = bytes.fromhex(sha256)
        send = partial(self.api.preupload_lfs_files, self.repo, [operation], revision=self.branch, free_memory=False)
        patient(f"{self.repo}/{path}", send, self.notice)
        self.uploaded[path] = nbytes
        self._pending.append(operation)
        if sum(one.upload_info.size for one in self._pending) >= self.batch_bytes:
            self.commit()
        return True

    @property
    def pending(self) -> bool:
        """Whether anything was sent since the last commit."""
        return bool(self._pending)

    def commit(self) -> None:
        """Commit what was sent since the last one."""
        if self._pending:
            more = f" and {len(self._pending) - 1} more" if len(self._pending) > 1 else ""
            self._commit(self._pending, f"Add {self._pending[0].path_in_repo}{more}")
            self._pending = []

    def _commit(self, operations: list[Any], title: str) -> None:
        """One commit upon the head that is known, and a look at what the Hub made of it."""
        tried = False

        def once() -> None:
            nonlocal tried
            if tried and self._happened(operations):
                return
            tried = True
            try:
                made = self.api.create_commit(
                    self.repo, operations, commit_message=title, revision=self.branch, parent_commit=self.head
                )
            except Exception as error:
                if status_of(error) == 412:
                    raise self._moved() from None
                raise
            self.head = made.oid

        patient(str(self), once, self.notice)
        self.tree = self._tree_at(str(self.head))
        for path in added(operations):
            self._check(path)
            self.committed.add(path)
        self.committed -= deleted(operations)

    def _happened(self, operations: list[Any]) -> bool:
        """Whether a commit whose answer was lost is in the branch. HubError where another one is."""
        if (head := self._at(self.branch)) == self.head:
            return False
        tree = self._tree_at(str(head))
        if any(holds(tree.get(path), self._known(path, tree)) is not True for path in added(operations)) or any(
            path in tree for path in deleted(operations)
        ):
            raise self._moved()
        self.head = head
        return True

    def _moved(self) -> HubError:
        return HubError(f"{self}: somebody else has committed to it meanwhile; give the same command again to go on")

    def _known(self, path: str, tree: Mapping[str, Entry]) -> Meant:
        """A file as it has to be, with git's hash where the Hub stores it by that."""
        wanted = self._meant[path]
        if holds(tree.get(path), wanted) is None:
            for sent in (one.path_or_fileobj for one in self._pending if one.path_in_repo == path):
                data = sent if isinstance(sent, bytes) else Path(str(sent)).read_bytes()
                wanted = self._meant[path] = wanted._replace(oid=git_oid(data))
        return wanted

    def _check(self, path: str) -> None:
        """HubError where a file is not in the branch as it has to be."""
        found, wanted = self.tree.get(path), self._known(path, self.tree)
        if found is None:
            raise HubError(f"{self}: {path} was sent and is not in it; does a .gitignore in the repo name it?")
        if not holds(found, wanted):
            size = f", {found.nbytes:,} bytes of {wanted.nbytes:,}" if found.nbytes != wanted.nbytes else ""
            raise HubError(f"{self}: {path} was sent and is something else there (hash{size}); push it again")

    def finish(self, small: Mapping[str, bytes | Path]) -> str:
        """Commit the rest; the last commit holds all that is small: side files, card, config, index, manifest.

        Then the whole branch is held against what it has to be, and tagged; -> the revision. small: path -> content.
        """
        from huggingface_hub import CommitOperationDelete

        self.commit()
        limit, self.batch_bytes = self.batch_bytes, 1 << 62  # all of these in one commit
        for path in sorted(small, key=lambda path: (path in MARKS, path)):
            data = small[path]
            wanted = self._meant.get(path)
            if wanted is None or wanted.sha256 is None or isinstance(data, bytes):
                wanted = meant(data) if isinstance(data, bytes) else of_file(data)
            self.add(path, data, wanted.nbytes, str(wanted.sha256))
        self.batch_bytes = limit
        if lacking := differing(self.tree, {p: one for p, one in self._meant.items() if p not in small}):
            raise HubError(f"{self}: {lacking[0]} is not in it, and was not sent; push the artifact again")
        kept = {*self._meant, ATTRIBUTES}
        gone = sorted(path for path in self.tree if path not in kept) if self.replace else []
        if gone and self.notice:
            self.notice(f"{self}: {len(gone):,} other files go, as --replace says: {', '.join(gone[:3])} ...")
        operations = [*self._pending, *(CommitOperationDelete(path, is_folder=False) for path in gone)]
        if operations:
            self._commit(operations, f"Add {len(self._meant)} files by phasefold {__version__}")
            self._pending = []
        for path in self._meant:
            self._check(path)
        self._put_tag()
        return str(self.head)

    def _put_tag(self) -> None:
        if (tag := self.tag) is None:
            return
        if tag in self._tags:
            if (at := str(self._at(tag))) != self.head and self.notice:
                self.notice(f"{self.repo}: tag {tag} stays at {at[:12]}, which holds the same artifact")
            return

        def once() -> None:
            try:
                self.api.create_tag(self.repo, tag=tag, revision=self.head)
            except Exception as error:
                if status_of(error) != 409 or self._at(tag) != self.head:
                    raise

        patient(f"{self}: tag {tag}", once, self.notice)
