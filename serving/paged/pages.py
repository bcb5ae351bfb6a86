"""Which request holds which physical pages of a KV cache: allocation, sharing of equal prefixes, tags that prove it.

A page table that has gone wrong (an entry that outlived its page, a page given away too early, two entries exchanged)
does not crash: attention reads somebody else's tokens and the answer looks like an answer. So every physical page has
a tag that changes whenever the page is given out anew, and a request keeps the tags that its pages had when it got
them. One gather and one comparison over all pages of a step, before its forward pass, finds every request whose table
leads elsewhere; that one is stopped, the others go on.

What a tag cannot see: bytes that go bad within a page, and an exchange that moves entries and kept tags together.
The contents lie elsewhere (`cache.PageStorage`). Page 0 is never given out: it is all zeros, and padding reads it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...errors import LoadError, PageError

NULL = 0


@dataclass(slots=True)
class Lease:
    """What one request holds.

    entries: int64 [2, num_pages], the page table as the attention reads it, page 0 behind the last entry, and the tags
    that the pages had when the request got them. pages: its pages, in order, as the pool keeps its books.
    length: tokens that are written. shared: how many of them another request had written before.
    digests: of the tokens up to each full page's end.
    """

    entries: torch.Tensor
    pages: list[int] = field(default_factory=list)
    length: int = 0
    shared: int = 0
    digests: list[bytes] = field(default_factory=list)

    @property
    def table(self) -> torch.Tensor:
        """int64 [num_pages]."""
        return self.entries[0]

    @property
    def tags(self) -> torch.Tensor:
        """int64 [num_pages]."""
        return self.entries[1]


@dataclass(slots=True)
class Counters:
    """checks: pages compared. mismatches: times that a request was found to have wrong ones. reused: pages shared.

    retries: requests that were run again, counted by whoever does it.
    """

    checks: int = 0
    mismatches: int = 0
    reused: int = 0
    retries: int = 0


class TagTracker:
    """The tags of the physical pages, int64 [num_pages].

    A tag is `generation * num_pages + page`: no two pages ever have the same, and none comes back.
    """

    def __init__(self, num_pages: int, device: str) -> None:
        self.tags = torch.arange(num_pages, dtype=torch.int64, device=device)

    def renew(self, page: int) -> None:
        """A page is given out anew."""
        self.tags[page] += len(self.tags)

    def tag(self, page: int) -> int:
        """The tag of a page now."""
        return int(self.tags[page])

    def wrong(self, pages: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """Which pages have another tag than expected: bool, of the shape of both."""
        return self.tags[pages] != expected

    def words(self, index: int, page: int, expected: int) -> str:
        """A mismatch for people."""
        pages = len(self.tags)
        said = [f"tag {tag} (page {tag % pages}, generation {tag // pages})" for tag in (expected, self.tag(page))]
        return f"entry {index} of the page table leads to page {page}: expected {said[0]}, found {said[1]}"


class NoTracker(TagTracker):
    """Keeps nothing and finds nothing: the same cache without the check."""

    def __init__(self, num_pages: int, device: str) -> None: ...

    def renew(self, page: int) -> None:
        """Nothing to change."""

    def tag(self, page: int) -> int:
        """All pages look the same."""
        return 0

    def wrong(self, pages: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """Nothing is wrong."""
        return pages.new_zeros(0, dtype=torch.bool)


class PagePool:
    """Physical pages of `page_size` tokens, all but page 0 to be given out. tracked: with tags, or with no tracker."""

    def __init__(self, num_pages: int, page_size: int, *, tracked: bool = True, device: str = "cpu") -> None:
        if num_pages < 2 or page_size < 1:
            raise LoadError(f"{num_pages} pages of {page_size} tokens: give at least 2 (one is never used) of 1")
        self.num_pages, self.page_size, self.device = num_pages, page_size, device
        self.tracker = (TagTracker if tracked else NoTracker)(num_pages, device)
        self.counters = Counters()
        self.references = [0] * num_pages
        self.free = dict.fromkeys(range(1, num_pages))  # in the order in which they are given out
        self._written: dict[bytes, int] = {}  # digest of a prefix -> its last page
        self._digest_of: dict[int, bytes] = {}

    def open(self, tokens: Sequence[int]) -> Lease:
        """A lease for a request that begins with `tokens`. Full pages of them that are written already are shared.

        The last token is left out, so that there is something to compute.
        """
        lease = Lease(torch.zeros(2, self.num_pages, dtype=torch.int64, device=self.device))
        for digest in self._digests(tokens[:-1], []):
            if (page := self._written.get(digest, NULL)) == NULL:
                break
            self.free.pop(page, None)
            self._take(lease, page)
            lease.digests.append(digest)
        self.counters.reused += len(lease.pages)
        lease.length = lease.shared = len(lease.pages) * self.page_size
        return lease

    def grow(self, lease: Lease, length: int) -> None:
        """Give a lease pages for `length` tokens in all. PageError where too few are free; nothing is given then."""
        missing = -(-length // self.page_size) - len(lease.pages)
        if missing > len(self.free):
            cure = "let a request finish first"
            if missing + len(lease.pages) >= self.num_pages:
                cure = f"{length} tokens never fit; make the pool larger"
            wanted = f"{missing} page{'s' if missing > 1 else ''} wanted"
            raise PageError(f"{wanted}, {len(self.free)} of {self.num_pages - 1} are free; {cure}")
        for _ in range(missing):
            page = next(iter(self.free))
            del self.free[page]
            self._written.pop(self._digest_of.pop(page, b""), None)
            self.tracker.renew(page)
            self._take(lease, page)

    def commit(self, lease: Lease, tokens: Sequence[int]) -> None:
        """`tokens`, all of the request's from the first on, are written: their full pages may be shared from now on."""
        lease.length, known = len(tokens), len(lease.digests)
        lease.digests = self._digests(tokens, lease.digests)
        for index in range(known, len(lease.digests)):
            page, digest = lease.pages[index], lease.digests[index]
            if digest not in self._written and page not in self._digest_of:
                self._written[digest], self._digest_of[page] = page, digest

    def check(self, leases: Sequence[Lease]) -> dict[int, PageError]:
        """Compare the tags of all pages of these leases at once. Returns what is wrong by position of the lease."""
        if not leases:
            return {}
        width = max(len(lease.pages) for lease in leases)
        tables, expected = torch.stack([lease.entries[:, :width] for lease in leases], 1)
        wrong = self.tracker.wrong(tables, expected)
        self.counters.checks += sum(len(lease.pages) for lease in leases) if len(wrong) else 0
        errors: dict[int, PageError] = {}
        if bool(wrong.any()):
            for place, index in wrong.nonzero().tolist():
                words = self.tracker.words(index, int(tables[place, index]), int(expected[place, index]))
                errors.setdefault(place, PageError(words))
        self.counters.mismatches += len(errors)
        return errors

    def release(self, lease: Lease) -> PageError | None:
        """Give all pages back; what is in them stays findable until they are given out anew.

        A page that is not the lease's any more is left alone, and so is one that nobody holds: the error says which.
        """
        error = None
        for index, (page, tag) in enumerate(zip(lease.pages, lease.tags.tolist(), strict=False)):
            if self.tracker.tag(page) != tag:
                self.counters.mismatches += error is None
                error = error or PageError(f"given back too late: {self.tracker.words(index, page, tag)}")
            elif self.references[page] == 0:
                error = error or PageError(f"page {page} is given back twice: nobody holds it")
            else:
                self.references[page] -= 1
                if self.references[page] == 0:
                    self.free[page] = None
        lease.entries.zero_()  # whoever goes on with it reads page 0, and nobody's tokens
        lease.pages, lease.digests, lease.length, lease.shared = [], [], 0, 0
        return error

    def _take(self, lease: Lease, page: int) -> None:
        self.references[page] += 1
        lease.table[len(lease.pages)] = page
        lease.tags[len(lease.pages)] = self.tracker.tag(page)
        lease.pages.append(page)

    def _digests(self, tokens: Sequence[int], known: list[bytes]) -> list[bytes]:
        """Digests of all full pages of `tokens`, the first of which are known."""
        digests, size = list(known), self.page_size
        for start in range(len(known) * size, len(tokens) - size + 1, size):
            before = digests[-1] if digests else b""
            digests.append(hashlib.sha256(before + array("q", tokens[start : start + size]).tobytes()).digest())
        return digests
