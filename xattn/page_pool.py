"""Which pages hold which sequence: pages with reference counts, lengths, reservations. No tensors: paged.py has them.

A sequence holds exactly the pages that its committed and its reserved tokens need. Pages may be shared up to the
committed length; whoever reserves room in a shared page gets a copy of it first. A change is made whole or not at all.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .errors import OutOfPagesError
from .validate import fail

Ids = tuple[Hashable, ...]


@dataclass
class Sequence:
    """``pages``: ids of its pages, or, where ``host`` is set (swapped out), indices of its pages within ``host``."""

    length: int = 0
    reserved: int = 0
    pages: array[int] = field(default_factory=lambda: array("i"))
    host: Any = None


@dataclass(frozen=True)
class PoolStats:
    """``shared``: pages that several sequences hold. ``sequences``: all, ``swapped``: those of them swapped out.

    ``tokens``: committed ones of the sequences that are not swapped out, counted for each sequence.
    """

    pages: int
    free: int
    shared: int
    sequences: int
    swapped: int
    tokens: int

    @property
    def utilisation(self) -> float:
        """The part of the pages that is in use."""
        return 1 - self.free / self.pages


class PagePool:
    """``num_pages`` pages of ``page_size`` tokens, and the sequences in them. ``ids`` hold an id once."""

    def __init__(self, num_pages: int, page_size: int):
        self.page_size = page_size
        self.sequences: dict[Hashable, Sequence] = {}
        self.references = [0] * num_pages
        self.free_pages = list(reversed(range(num_pages)))  # the last is taken first

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def known(self, name: str, key: Hashable) -> Sequence:
        if key not in self.sequences:
            fail(name, f"the unknown id {key!r}", "ids that reserve or fork made and free did not take")
        return self.sequences[key]

    def resident(self, name: str, key: Hashable) -> Sequence:
        sequence = self.known(name, key)
        if sequence.host is not None:
            fail(name, f"{key!r}, which is swapped out", "ids that are in the cache: call swap_in first")
        return sequence

    # ---------------------------------------------------------------- growing
    def most_pages(self, ids: Ids, counts: list[int]) -> int:
        """Pages of the longest of ``ids`` once ``counts`` tokens are reserved for them."""
        found = (self.sequences.get(key) or Sequence() for key in ids)
        return max(
            (self.pages_for(s.length + max(n, s.reserved)) for s, n in zip(found, counts, strict=True)), default=0
        )

    def reserve(self, ids: Ids, counts: list[int], copy: Callable[[list[int], list[int]], None]) -> None:
        """Room for ``counts`` tokens behind the committed ones.

        ``copy(pages, to)`` is called where shared pages would be written to, before anything is changed here.
        """
        sequences = [self.resident("ids", key) if key in self.sequences else Sequence() for key in ids]
        given_up: Counter[int] = Counter()
        sources, added = [], []
        for s, n in zip(sequences, counts, strict=True):
            # Only the half-filled page can be shared and written to: those behind it never held committed tokens.
            half_filled = s.pages[s.length // self.page_size] if n and s.length % self.page_size else None
            if half_filled is not None and self.references[half_filled] - given_up[half_filled] > 1:
                given_up[half_filled] += 1
                sources.append((s, half_filled))
            added.append(max(0, self.pages_for(s.length + n) - len(s.pages)))
        fresh = self._find(len(sources) + sum(added), "reserve")
        if sources:
            copy([page for _, page in sources], fresh[: len(sources)])

        self._take(fresh)
        for page in fresh:
            self.references[page] = 1
        for (s, page), new in zip(sources, fresh, strict=False):
            self.references[page] -= 1
            s.pages[s.length // self.page_size] = new
        at = len(sources)
        for key, s, n, more in zip(ids, sequences, counts, added, strict=True):
            s.pages.extend(fresh[at : at + more])
            at += more
            s.reserved = max(s.reserved, n)
            self.sequences[key] = s

    def advance(self, ids: Ids, counts: list[int]) -> None:
        sequences = [self.resident("ids", key) for key in ids]
        for key, s, n in zip(ids, sequences, counts, strict=True):
            if n > s.reserved:
                fail("n", f"{n} tokens for {key!r}", f"up to the {s.reserved} that are reserved for it")
        for s, n in zip(sequences, counts, strict=True):
            s.length += n
            s.reserved -= n

    def fork(self, src: Hashable, dst: Hashable) -> None:
        source = self.resident("src", src)
        if dst in self.sequences:
            fail("dst", f"{dst!r}, which exists", "a new id")
        pages = source.pages[: self.pages_for(source.length)]
        for page in pages:
            self.references[page] += 1
        self.sequences[dst] = Sequence(source.length, 0, pages)

    # ---------------------------------------------------------------- shrinking
    def free(self, ids: Ids) -> None:
        for s in [self.known("ids", key) for key in ids]:
            if s.host is None:
                self._release(s.pages)
        for key in ids:
            del self.sequences[key]

    def truncate(self, key: Hashable, length: int) -> None:
        """Keeps the first ``length`` tokens, and drops what is reserved."""
        s = self.resident("id", key)
        if length > s.length:
            fail("length", length, f"up to the {s.length} tokens of {key!r}")
        kept = self.pages_for(length)
        self._release(s.pages[kept:])
        del s.pages[kept:]
        s.length, s.reserved = length, 0

    # ---------------------------------------------------------------- swapping
    def swap_out(self, ids: Ids, save: Callable[[list[int]], Any]) -> None:
        """``save(pages)`` copies pages to the host and returns where they are: each once, though many ids hold it.

        The pages are taken last, as they may still be copied.
        """
        sequences = [self.resident("ids", key) for key in ids]
        held = [s.pages[: self.pages_for(s.length)] for s in sequences]
        index = {page: i for i, page in enumerate(dict.fromkeys(page for pages in held for page in pages))}
        host = save(list(index))
        for s, pages in zip(sequences, held, strict=True):
            self.free_pages[:0] = self._dropped(s.pages)
            s.pages, s.reserved, s.host = array("i", [index[page] for page in pages]), 0, host

    def swap_in(self, ids: Ids, load: Callable[[Any, list[int], list[int]], None]) -> None:
        """``load(host, indices, pages)`` copies pages back.

        Sequences that left together, sharing pages, and come back together share them again.
        """
        sequences = [self.known("ids", key) for key in ids]
        for key, s in zip(ids, sequences, strict=True):
            if s.host is None:
                fail("ids", f"{key!r}, which is in the cache", "ids that are swapped out")
        hosts = {id(s.host): s.host for s in sequences}
        wanted = list(dict.fromkeys((id(s.host), i) for s in sequences for i in s.pages))
        fresh = self._find(len(wanted), "swap_in")
        page_of = dict(zip(wanted, fresh, strict=True))
        for owner, host in hosts.items():
            indices = [i for h, i in wanted if h == owner]
            load(host, indices, [page_of[owner, i] for i in indices])

        self._take(fresh)
        for s in sequences:
            s.pages, s.host = array("i", [page_of[id(s.host), i] for i in s.pages]), None
            for page in s.pages:
                self.references[page] += 1

    # ---------------------------------------------------------------- views
    def written(self, ids: Ids) -> Iterator[int]:
        """The pages into which reserved tokens of ``ids`` go."""
        for s in (self.sequences[key] for key in ids):
            yield from s.pages[s.length // self.page_size :] if s.reserved else ()

    def table(self, ids: Ids, width: int) -> array[int]:
        """The page ids of ``ids``, ``width`` for each, -1 where there is no page."""
        rows, none = array("i"), array("i", [-1]) * width
        for key in ids:
            pages = self.sequences[key].pages
            rows += pages
            rows += none[len(pages) :]
        return rows

    def lengths(self, ids: Ids) -> array[int]:
        return array("i", [self.sequences[key].length for key in ids])

    def stats(self) -> PoolStats:
        swapped = sum(s.host is not None for s in self.sequences.values())
        tokens = sum(s.length for s in self.sequences.values() if s.host is None)
        shared = sum(n > 1 for n in self.references)
        return PoolStats(len(self.references), len(self.free_pages), shared, len(self.sequences), swapped, tokens)

    # ---------------------------------------------------------------- pages
    def _find(self, count: int, call: str) -> list[int]:
        free = len(self.free_pages)
        if count > free:
            got = f"{count} pages are needed, {free} of {len(self.references)} are free"
            raise OutOfPagesError(f"{call}: {got}; nothing was changed")
        return self.free_pages[free - count :][::-1]

    def _take(self, fresh: list[int]) -> None:
        del self.free_pages[len(self.free_pages) - len(fresh) :]

    def _release(self, pages: array[int]) -> None:
        self.free_pages += self._dropped(pages)

    def _dropped(self, pages: array[int]) -> list[int]:
        """One reference to each of ``pages`` less; those of them that nobody holds now."""
        for page in pages:
            self.references[page] -= 1
        return [page for page in pages if not self.references[page]]
