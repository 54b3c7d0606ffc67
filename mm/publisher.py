"""Owns which pages of each row are in the page cache, and which are being written right now.

A page is published at commit, after the step that filled it is known to be good: `published[row]` pages are, the next
full ones are due. What is published is named by the row's chain of digests, below the entry of the page before it.

While a prompt is computed, its pages stand in `writing`, so that a second request for the same page can wait for it
instead of computing it twice: see `Lookup`.
"""

from dataclasses import dataclass

import numpy as np

from mm.addresses import ABSENT, IndexArray, Int32Array
from mm.content import ContentChain
from mm.lru import PageLru
from mm.page_cache import ROOT_SERIAL, PageCache
from mm.page_table import PageTables
from mm.refault import Shadows
from mm.residency import Residency

NEVER = 2**31 - 1
"""`published` of a row that publishes nothing: no number of full pages is above it."""


@dataclass(frozen=True, slots=True)
class Writer:
    """Who is computing a page."""

    row: int
    epoch: int  # the row may have changed hands since
    owner: str


@dataclass(slots=True)
class _RowChain:
    chain: ContentChain
    parent: int  # entry of the last published page, or ABSENT
    parent_serial: int
    writer: Writer
    announced: int  # pages before this one stand in `writing`, unless published


class Publisher:
    """Per row: the chain of its pages and how many of them are cached."""

    def __init__(self, tables: PageTables, residency: Residency) -> None:
        self.published: Int32Array = np.full(tables.max_rows, NEVER, np.int32)
        self._published = self.published.data  # the same memory, for one row at a time
        self.writing: dict[bytes, Writer] = {}
        self._rows: list[_RowChain | None] = [None] * tables.max_rows
        self._tables = tables
        self._offsets = np.arange(tables.page_size, dtype=np.int32)
        self._residency = residency
        self._cache: PageCache = residency.cache
        self._lru: PageLru = residency.lru
        self._shadows: Shadows = residency.shadows

    def begin(self, row: int, owner: str, chain: ContentChain, entries: list[int]) -> None:
        """`row` will compute the pages of `chain` after the first len(entries), which are cached as these entries."""
        parent = entries[-1] if entries else ABSENT
        serial = self._cache.serial[parent] if entries else ROOT_SERIAL
        writer = Writer(row, int(self._tables.epochs[row]), owner)
        full = chain.tokens // self._tables.page_size
        for number in range(len(entries), full):
            self.writing.setdefault(chain.key(number), writer)
        self._rows[row] = _RowChain(chain, parent, serial, writer, full)
        self.published[row] = len(entries)

    def end(self, row: int) -> None:
        """The row writes nothing any more."""
        state = self._rows[row]
        if state is not None:
            self._withdraw(state, 0 if self.published[row] == NEVER else int(self.published[row]))
        self._rows[row] = None
        self.published[row] = NEVER

    def fork(self, row: int, child: int, length: int) -> None:
        """`child` goes on after the first `length` positions of `row`."""
        state = self._rows[row]
        if state is None:
            return
        pages = length // self._tables.page_size
        chain = state.chain.fork()
        del chain.digests[pages:]
        parent, serial = self._ancestor(state, self._published[row] - pages)
        writer = Writer(child, int(self._tables.epochs[child]), self._tables.owners[child] or "")
        self._rows[child] = _RowChain(chain, parent, serial, writer, 0)
        self.published[child] = 0 if parent == ABSENT else min(self._published[row], pages)

    def _ancestor(self, state: _RowChain, steps: int) -> tuple[int, int]:
        """The entry so many pages before the last published one, and its serial; ABSENT if the way there is lost."""
        entry, serial = state.parent, state.parent_serial
        for _ in range(steps):
            if entry == ABSENT or self._cache.serial[entry] != serial:
                return ABSENT, ROOT_SERIAL
            entry, serial = self._cache.parent[entry], self._cache.parent_serial[entry]
        return entry, serial

    def truncate(self, row: int, length: int) -> None:
        """Positions from `length` on may be written anew: what they were named is forgotten."""
        state = self._rows[row]
        if state is None:
            return
        pages = length // self._tables.page_size
        self._withdraw(state, pages)
        del state.chain.digests[pages:]
        if pages < self.published[row] < NEVER:
            self._start_again(row)

    def is_being_written(self, key: bytes, writer: Writer) -> bool:
        """Whether that writer is still to publish the page with this key."""
        return self.writing.get(key) == writer

    def publish(self, rows: IndexArray, lengths: Int32Array, tokens: Int32Array, now: float) -> None:
        """Cache the pages that became full in the first lengths[i] positions of rows[i]. tokens: (max_rows, any)."""
        pages = lengths // self._tables.page_size
        due = (pages > self.published[rows]).nonzero()[0]
        if not len(due):
            return
        rows, pages = rows[due], pages[due]
        numbers: list[int] = rows.tolist()
        states, serial = self._rows, self._cache.serial
        for row in numbers:  # if the last published page was evicted, all are named again: below another, or anew
            state = states[row]
            assert state is not None
            if state.parent != ABSENT and serial[state.parent] != state.parent_serial:
                self._start_again(row)
        # The frames and token ids of all pages that are due, gathered at once: (N,) and (N, page_size).
        row_of, number_of = rows, self.published[rows]
        counts = pages - number_of
        starts: Int32Array | range = range(len(numbers))
        if counts.max() > 1:  # not the usual step, in which a row fills one page at most
            starts = (np.cumsum(counts) - counts).astype(np.int32)
            row_of = np.repeat(rows, counts)
            offsets = np.arange(len(row_of), dtype=np.int32) - np.repeat(starts, counts)
            number_of = np.repeat(number_of, counts) + offsets
        positions = number_of[:, None] * self._tables.page_size + self._offsets
        content = tokens[row_of[:, None], positions].tobytes()
        frames = self._tables.entries[row_of, number_of]
        places = frames.tolist()
        for row, start, count in zip(numbers, starts, counts.tolist(), strict=True):
            self._publish(row, places[start : start + count], content, int(start), now)
        held = frames[frames >= 0] if min(places) < 0 else frames
        self._residency.frames.sealed[held] |= self._cache.entries_of_frames[held] >= 0

    def _has_lost_parent(self, row: int) -> bool:
        """Whether the last published page of `row` is not cached any more."""
        state = self._rows[row]
        assert state is not None
        return state.parent != ABSENT and self._cache.serial[state.parent] != state.parent_serial

    def _publish(self, row: int, frames: list[int], content: bytes, start: int, now: float) -> None:
        """Cache the next pages of `row`, in `frames`; their token ids are the pages from `start` on of `content`."""
        state, cache, residency = self._rows[row], self._cache, self._residency
        assert state is not None
        if self._has_lost_parent(row):  # a row before it has made way for a page of its own
            self._start_again(row)
            return
        chain, index, slot_of_frame = state.chain, cache.index, residency.swap.slot_of_frame
        width, digests, suffix = chain.page_bytes, chain.digests, chain.suffix
        number = self._published[row]
        for place, frame in enumerate(frames, start):
            if frame < 0:
                break  # in swap already: published when the row runs again
            page = content[place * width : (place + 1) * width]
            if number == len(digests):
                chain.extend(page)
            key = digests[number] + suffix
            entry = index.get(key, ABSENT)
            if entry != ABSENT and not cache.matches(entry, page, state.parent_serial):
                if not self._make_way(entry):
                    self.end(row)  # nothing can be cached below a page that cannot be found
                    return
                entry = ABSENT
            if entry == ABSENT:
                root = chain.root + suffix if number == 0 else b""
                entry = cache.insert(key, page, root, state.parent, state.parent_serial, frame, now)
                is_active = len(self._shadows) > 0 and self._is_refault(key, frame)
                if is_active or slot_of_frame[frame] != ABSENT:
                    residency.cached(entry, frame, active=is_active)
            elif cache.frame[entry] == ABSENT:
                residency.adopt(entry, frame)
            if self.writing and self.writing.get(key) == state.writer:
                del self.writing[key]
            state.parent, state.parent_serial = entry, cache.serial[entry]
            number += 1
        self._published[row] = number

    def _is_refault(self, key: bytes, frame: int) -> bool:
        """Whether a page is back so soon that it belongs on the active list, where an idle one then makes room."""
        distance = self._shadows.take(key)
        if distance is None or distance > self._lru.active_pages:
            return False
        self._lru.demote(self._residency.tenants.charged[frame], 1)
        return True

    def _make_way(self, other: int) -> bool:
        """Whether another page's key is free now: one that cannot be reached gives way, a collision does not."""
        if self._cache.has_parent(other):
            self._cache.collisions += 1
            return False
        self._residency.uncache(other)
        return True

    def _start_again(self, row: int) -> None:
        state = self._rows[row]
        assert state is not None
        state.parent, state.parent_serial = ABSENT, ROOT_SERIAL
        self.published[row] = 0

    def _withdraw(self, state: _RowChain, first: int) -> None:
        """Pages from `first` on are not being written any more."""
        for number in range(first, state.announced):
            key = state.chain.key(number)
            if self.writing.get(key) == state.writer:
                del self.writing[key]
        state.announced = min(state.announced, first)
