"""Growth of rows by tokens, of all that run in a step at once: where a token's memory comes from.

A *fault* is resolved before the step that would meet it. `grow` finds all of them for all rows together:

    position written next   page it lies in               what grow does
    ─────────────────────   ──────────────────────────    ───────────────────────────────────────────────────────
    at a page edge          none yet                      minor fault: allocate a frame, set the entry
    inside a page           a frame held once             nothing
    inside a page           a frame held by several       copy-on-write: allocate a frame, order a copy, set the
                                                          entry; if all holders write in this step, the last keeps it
    inside a page           a sealed frame: the cache or  copy-on-write, also for the only holder
                            a swap slot has its content
    inside a page           a pinned frame: it is being   the same: the copy may read positions beyond
                            copied elsewhere

Only a row that is *exposed* can write into a page that is shared or sealed, or over what a copy reads: `fork`,
`truncate` and a partly matching cached page expose it, and its next growth ends that. So a step that nobody enters
exposed looks at no page at all.
"""

from dataclasses import dataclass

import numpy as np

from mm.addresses import IndexArray, Int32Array, empty_int32, pages_for
from mm.errors import OutOfFrames, PageNotResident
from mm.flight_recorder import EventKind
from mm.frame_allocator import FrameAllocator
from mm.page_copies import MemoryOrders, PageCopies, TableChanges
from mm.page_table import PageTables
from mm.reclaim import Reclaimer
from mm.residency import Residency
from mm.steady_rows import SteadyRows


@dataclass(frozen=True, slots=True)
class Faults:
    """What a growth needs, before anything is changed. Rows are intp, as numpy indexes fastest by it."""

    ends: Int32Array  # (S,) the lengths after the growth
    rows: IndexArray  # (N,) page table entries that get a new frame: first those that are copied, then new pages
    pages: Int32Array  # (N,)
    copy_sources: Int32Array  # (C,) the frames that the first C of them name now
    exposed: IndexArray  # (E,) rows whose last page is private once the faults are resolved


class Growth:
    """Finds the faults of a step, and resolves them with frames of `reclaimer`."""

    def __init__(self, tables: PageTables, residency: Residency, reclaimer: Reclaimer) -> None:
        self.cow_faults = self.denials = 0  # since the start
        self._tables = tables
        self._residency = residency
        self._reclaimer = reclaimer
        self._frames = residency.frames
        self._recorder = residency.recorder

    def needed(self, rows: Int32Array, counts: Int32Array) -> Int32Array:
        """(N,) the tenants for whom `grow` would allocate a frame each. Changes nothing. Raises PageNotResident."""
        return self._tables.tenants[self._find(rows.astype(np.intp), counts).rows]

    def grow(self, rows: Int32Array, counts: Int32Array) -> MemoryOrders:
        """See `MemoryManager.grow`."""
        index, most = rows.astype(np.intp), self._tables.max_pages * self._tables.page_size
        faults = self._find(index, counts)
        if np.count_nonzero(faults.ends > most):
            raise ValueError(f"{faults.ends.max()} positions do not fit into {self._tables.max_pages} pages")
        return self._resolve(index, faults)

    def grow_steadily(self, steady: SteadyRows) -> MemoryOrders:
        """See `MemoryManager.grow_steadily`."""
        tables, index = self._tables, steady.index
        if np.count_nonzero(tables.exposed[index]) or np.count_nonzero(tables.barred[index]):
            orders = self.grow(steady.rows, np.ones(len(steady.rows), np.int32))
            steady.lengths = steady.lengths + 1
            return orders
        rows, places = steady.growing()
        pages = steady.lengths[places] // self._tables.page_size
        if len(pages) and pages.max() >= tables.max_pages:
            raise ValueError(f"page {pages.max()} is none of {tables.max_pages} pages")
        ends = steady.lengths + 1
        orders = self._resolve(index, Faults(ends, rows, pages, empty_int32(), rows[:0]))
        steady.lengths = ends
        return orders

    def _resolve(self, index: IndexArray | slice, faults: Faults) -> MemoryOrders:
        """Carry out what a growth of the rows `index` needs. Raises OutOfFrames, and then nothing has changed."""
        tables, rows, frames = self._tables, faults.rows, empty_int32()
        if len(rows):
            owner, tenants, serials = tables.owners[rows[0]] or "", tables.tenants[rows], tables.serials[rows]
            try:
                frames = self._reclaimer.allocate(tenants, self._recorder.now, owner)
            except OutOfFrames as error:
                self.denials += 1
                obtainable = error.free + error.reclaimable
                self._recorder.record(EventKind.DENY, int(serials[0]), int(tenants[0]), obtainable, error.needed)
                raise
            self._frames.last_owner[frames] = serials
            tables.entries[rows, faults.pages] = frames
            self._recorder.record_frames(EventKind.ALLOCATE, serials, tenants, frames)
        tables.lengths[index] = faults.ends
        if len(faults.exposed):
            tables.exposed[faults.exposed] = False
        copies = len(faults.copy_sources)
        if copies:
            self.cow_faults += copies
            self._recorder.record_frames(EventKind.COPY, serials[:copies], tenants[:copies], frames[:copies])
            self._residency.unmap(faults.copy_sources, tenants[:copies])
        changes = TableChanges(rows.astype(np.int32), faults.pages, frames)
        return MemoryOrders(
            PageCopies(faults.copy_sources, frames[:copies]),
            self._with_unsent(changes) if tables.has_unsent else changes,
        )

    def _find(self, rows: IndexArray, counts: Int32Array) -> Faults:
        """Raises PageNotResident."""
        if np.count_nonzero(self._tables.barred[rows]):
            raise PageNotResident(f"rows {rows[self._tables.barred[rows] > 0].tolist()} have pages elsewhere")
        return find_faults(self._tables, self._frames, rows, counts)

    def _with_unsent(self, changes: TableChanges) -> TableChanges:
        """These changes, and those of all entries that changed outside a step: each entry once, as it is now."""
        rows, pages = self._tables.take_unsent()
        keys = np.concatenate((rows, changes.rows)).astype(np.int64) * self._tables.max_pages
        keys = np.unique(keys + np.concatenate((pages, changes.pages)))
        rows, pages = (part.astype(np.int32) for part in np.divmod(keys, self._tables.max_pages))
        frames = self._tables.entries[rows, pages]
        return TableChanges(rows, pages, frames, self._frames.references[frames] > 1)


def find_faults(tables: PageTables, frames: FrameAllocator, rows: IndexArray, counts: Int32Array) -> Faults:
    """The faults of growing each of the distinct `rows` (S,) by `counts` (S,) >= 1 tokens. Changes nothing."""
    if len(rows) == 1 and not tables.exposed[rows[0]]:
        return _faults_of_one(tables, rows, int(counts[0]))
    page_size = tables.page_size
    starts = tables.lengths[rows]
    ends = starts + counts
    first_new = (starts + (page_size - 1)) // page_size
    new_pages = (ends + (page_size - 1)) // page_size - first_new
    growing = new_pages.nonzero()[0]
    fault_rows, fault_pages, counts = rows[growing], first_new[growing], new_pages[growing]
    if (total := counts.sum()) > len(growing):  # some by several pages
        offsets = np.arange(total, dtype=np.int32) - (counts.cumsum() - counts).repeat(counts)
        fault_rows = fault_rows.repeat(counts)
        fault_pages = (fault_pages.repeat(counts) + offsets).astype(np.int32)
    exposed = tables.exposed[rows].nonzero()[0]
    if not len(exposed):
        return Faults(ends, fault_rows, fault_pages, empty_int32(), rows[:0])
    copy_rows, copy_pages, sources = _copies(tables, frames, rows[exposed], starts[exposed])
    fault_rows, fault_pages = np.concatenate((copy_rows, fault_rows)), np.concatenate((copy_pages, fault_pages))
    return Faults(ends, fault_rows, fault_pages, sources, rows[exposed])


def _faults_of_one(tables: PageTables, row: IndexArray, count: int) -> Faults:
    """`find_faults` for a row (1,) that is not exposed: a request that comes alone waits for this."""
    start = int(tables.lengths[row[0]])
    end, page_size = start + count, tables.page_size
    pages = np.arange(pages_for(start, page_size), pages_for(end, page_size), dtype=np.int32)
    return Faults(np.array([end], np.int32), row.repeat(len(pages)), pages, empty_int32(), row[:0])


def _copies(
    tables: PageTables, frames: FrameAllocator, rows: IndexArray, starts: Int32Array
) -> tuple[IndexArray, Int32Array, Int32Array]:
    """(rows, pages, frames), each (C,): the pages that must be copied before position starts[i] is written.

    Where every holder of a frame writes in this step, the last one keeps it. A sealed or pinned frame is kept by
    nobody: its content is wanted elsewhere (invariants 3, 7).
    """
    inside = (starts % tables.page_size).nonzero()[0]
    rows, pages = rows[inside], starts[inside] // tables.page_size
    written = tables.entries[rows, pages]
    is_wanted = frames.sealed[written] | (frames.pins[written] > 0)
    shared = ((frames.references[written] > 1) | is_wanted).nonzero()[0]
    distinct, last_from_end, count = np.unique(written[shared][::-1], return_index=True, return_counts=True)
    is_kept = (frames.references[distinct] == count) & ~frames.sealed[distinct] & (frames.pins[distinct] < 1)
    copied = np.delete(shared, len(shared) - 1 - last_from_end[is_kept])
    return rows[copied], pages[copied], written[copied]
