"""One Sequence's memory: a handle on a row of the page tables. And growth of many at once, which every step does.

A *fault* is resolved before the step that would meet it. `grow` finds all of them for all rows together:

    position written next     page it lies in           what grow does
    ─────────────────────     ──────────────────────    ─────────────────────────────────────────────────────────
    at a page edge            none yet                  minor fault: allocate a frame, set the entry
    inside a page             a frame held once         nothing
    inside a page             a frame held by several   copy-on-write: allocate a frame, order a copy, set the entry;
                                                        if all its holders write in this step, the last keeps it
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mm.addresses import Int32Array, Int64Array, Row
from mm.page_copies import MemoryOrders, TableChanges
from mm.page_table import PageTables

if TYPE_CHECKING:
    from mm.memory_manager import MemoryManager


@dataclass(frozen=True, slots=True)
class Faults:
    """What a growth needs, before anything is changed. new_pages (S,) int32: pages to add per row.

    copy_rows, copy_pages, copy_sources (N,): pages to copy before they are written.
    """

    ends: Int32Array  # (S,) the lengths after the growth
    first_new: Int32Array  # (S,) first page number to add
    new_pages: Int32Array
    copy_rows: Int32Array
    copy_pages: Int32Array
    copy_sources: Int32Array
    frames: int  # frames needed in all


def find_faults(tables: PageTables, references: Int32Array, rows: Int32Array, counts: Int32Array) -> Faults:
    """The faults of growing each of the distinct `rows` (S,) by `counts` (S,) >= 1 tokens. Changes nothing."""
    page_size = tables.page_size
    starts = tables.lengths[rows]
    ends = starts + counts
    first_new = -(-starts // page_size)
    new_pages = -(-ends // page_size) - first_new
    pages = starts // page_size
    inside = np.flatnonzero(first_new != pages)  # these write into a page that is there already
    written = tables.entries[rows[inside], pages[inside]]
    shared = inside[references[written] > 1]
    if len(shared):
        shared = _without_keepers(shared, tables.entries[rows[shared], pages[shared]], references)
    sources = tables.entries[rows[shared], pages[shared]]
    return Faults(ends, first_new, new_pages, rows[shared], pages[shared], sources, int(new_pages.sum()) + len(shared))


def _without_keepers(writers: Int64Array, frames: Int32Array, references: Int32Array) -> Int64Array:
    """Those of `writers` that must copy: where every holder of a frame writes in this step, the last one keeps it."""
    distinct, last_from_end, count = np.unique(frames[::-1], return_index=True, return_counts=True)
    all_write = references[distinct] == count
    keepers = len(frames) - 1 - last_from_end[all_write]
    return np.delete(writers, keepers)


def table_changes(tables: PageTables, rows: Int32Array, faults: Faults, frames: Int32Array) -> TableChanges:
    """The entries that `frames` (one per fault, copies first) go to."""
    copies = len(faults.copy_rows)
    if len(frames) == copies:
        return TableChanges(faults.copy_rows, faults.copy_pages, frames)
    growing = np.flatnonzero(faults.new_pages)
    counts = faults.new_pages[growing]
    first_of_row = np.repeat(np.cumsum(counts) - counts, counts)
    new = np.repeat(faults.first_new[growing], counts) + np.arange(len(frames) - copies, dtype=np.int32) - first_of_row
    return TableChanges(
        np.concatenate((faults.copy_rows, np.repeat(rows[growing], counts))),
        np.concatenate((faults.copy_pages, new.astype(np.int32))),
        frames,
    )


@dataclass(frozen=True, slots=True, eq=False)
class AddressSpace:
    """All memory of one Sequence, until `release`. Made by `MemoryManager.create` and `fork`."""

    memory: "MemoryManager"
    row: Row
    owner: str

    @property
    def length(self) -> int:
        """Token positions held."""
        return int(self.memory.tables.lengths[self.row])

    @property
    def frames(self) -> Int32Array:
        """(pages,) int32: a copy of the page table, in page order."""
        return self.memory.tables.frames(self.row).copy()

    def grow(self, tokens: int) -> MemoryOrders:
        """Make the next `tokens` positions writable. Raises OutOfFrames; then nothing has changed."""
        return self.memory.grow(np.array([self.row], np.int32), np.array([tokens], np.int32))

    def fork(self, owner: str) -> tuple["AddressSpace", MemoryOrders]:
        """A second address space over the same frames; only counts rise. Raises OutOfRows."""
        return self.memory.fork(self, owner)

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on, and release the pages that no position is left in."""
        self.memory.truncate(self, length)

    def release(self) -> None:
        """Give everything back. The handle must not be used afterwards."""
        self.memory.release(self)
