"""Maps pages into rows and takes them out again: page table entries and reference counts change, no content does.

begin    a row begins with what of its prompt is cached; pages in swap alone by their slots, which bars it
fork     a row begins with the pages of another one's first positions
drop     a row's pages from one on go: it was shortened, or has ended
"""

import numpy as np

from mm.addresses import ABSENT, Int32Array, pages_for, slot_entry
from mm.flight_recorder import EventKind
from mm.lookup import PrefixMatch
from mm.page_copies import TableChanges
from mm.page_table import PageTables
from mm.residency import Residency


class PageMapping:
    """Over the page tables, with the books of `residency`."""

    def __init__(self, tables: PageTables, residency: Residency) -> None:
        self._tables = tables
        self._residency = residency
        self._swap = residency.swap
        self._all = np.ones(tables.max_pages, np.bool_)

    def begin(self, row: int, match: PrefixMatch, now: float) -> None:
        """The empty `row` has the pages of `match`, which is up to date, and its length.

        Whoever has them alone so far is not told that they are shared: it was told of its pages before.
        """
        tables, entries = self._tables, match.entries
        tables.lengths[row] = match.cached_tokens
        tables.exposed[row] = match.cached_tokens % tables.page_size != 0
        if not len(entries):
            return
        tenant, frames = int(tables.tenants[row]), self._residency.cache.frames[entries]
        self._residency.used(entries.tolist(), now)
        if np.count_nonzero(frames < 0):
            self._begin_with_slots(row, tenant, entries, frames)
        else:
            self._residency.map(frames, tenant)
            tables.entries[row, : len(entries)] = frames
            tables.note(row, np.arange(len(entries), dtype=np.int32))
        serial = int(tables.serials[row])
        self._residency.recorder.record(EventKind.SHARE, serial, tenant, int(frames[0]), len(entries))

    def _begin_with_slots(self, row: int, tenant: int, entries: Int32Array, frames: Int32Array) -> None:
        """The same where some of the pages are in swap alone: `frames` has ABSENT for these."""
        tables, is_resident = self._tables, frames != ABSENT
        slots = self._residency.cache.slots[entries[~is_resident]]
        self._residency.map(frames[is_resident], tenant)
        for slot in slots.tolist():
            self._swap.add_reference(slot)
        mapped = tables.entries[row, : len(entries)]
        mapped[is_resident] = frames[is_resident]
        mapped[~is_resident] = slot_entry(slots)
        tables.barred[row] = len(slots)
        tables.note(row, np.flatnonzero(is_resident).astype(np.int32))

    def fork(self, row: int, child: int, length: int) -> TableChanges:
        """The empty row `child` has the pages of the first `length` positions of `row`. What the device must learn."""
        tables, tenant = self._tables, int(self._tables.tenants[row])
        entries = tables.entries[row, : pages_for(length, tables.page_size)]
        frames, pages = entries.copy(), np.arange(len(entries), dtype=np.int32)
        in_swap = int(np.count_nonzero(entries < 0))
        if in_swap:
            pages = pages[entries >= 0]
            frames = entries[pages]
            for slot in slot_entry(entries[entries < 0]).tolist():
                self._swap.add_reference(slot)
        self._residency.map(frames, tenant)
        tables.entries[child, : len(entries)] = entries
        tables.lengths[child] = length
        tables.barred[child] = in_swap
        tables.exposed[child] = True
        sent, full = tables.sent_as_shared[row], length // tables.page_size
        if sent < len(entries):  # once of each page that stays as it is: there may be many children
            tables.note(row, np.arange(sent, len(entries), dtype=np.int32))
            tables.sent_as_shared[row] = max(sent, full)
        tables.sent_as_shared[child] = full
        if len(entries) == len(tables.mapped(row)):  # the page that `row` goes on writing is shared, too
            tables.exposed[row] = True
        serial = int(tables.serials[child])
        self._residency.recorder.record(EventKind.FORK, serial, tenant, row, len(entries))
        return TableChanges(np.full(len(pages), child, np.int32), pages, frames, self._all[: len(pages)])

    def drop(self, row: int, first: int) -> None:
        """Unmap the pages of `row` from `first` on."""
        tables = self._tables
        entries = tables.mapped(row)[first:]
        frames, slots = entries.copy(), list[int]()
        if tables.barred[row]:
            frames = entries[entries >= 0]
            slots = slot_entry(entries[entries < ABSENT]).tolist()
            tables.barred[row] -= len(slots)
        entries[:] = ABSENT
        if tables.sent_as_shared[row] >= first:  # the last page that is left may be written and copied again
            tables.sent_as_shared[row] = max(first - 1, 0)
        tenant = int(tables.tenants[row])
        if tables.cold[row]:
            self._residency.unmap(frames, np.full(len(frames), tenant, np.int32), coldest=True)
        else:
            self._residency.unmap_row(frames, tenant)
        for slot in reversed(slots):  # of what is cached in swap alone, the last page is the coldest
            self._residency.unmap_slot(slot)
