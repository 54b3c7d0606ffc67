"""One Sequence's memory: a handle on a row of the page tables. And growth of many at once, which every step does.

A *fault* is resolved before the step that would meet it. `grow` finds all of them for all rows together:

    position written next   page it lies in               what grow does
    ─────────────────────   ──────────────────────────    ───────────────────────────────────────────────────────
    at a page edge          none yet                      minor fault: allocate a frame, set the entry
    inside a page           a frame held once             nothing
    inside a page           a frame held by several       copy-on-write: allocate a frame, order a copy, set the
                                                          entry; if all holders write in this step, the last keeps it
    inside a page           a sealed frame: the cache or  copy-on-write, also for the only holder
                            a swap slot has its content

Only a row that is *exposed* can write into a page that is shared or sealed: `fork`, `truncate` and a partly matching
cached page expose it, and its next growth ends that. So a step that nobody enters exposed looks at no page at all.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mm.addresses import IndexArray, Int32Array, Row, empty_int32
from mm.frame_allocator import FrameAllocator
from mm.page_copies import MemoryOrders, SwapOrders
from mm.page_table import PageTables

if TYPE_CHECKING:
    from mm.advice import Advice
    from mm.memory_manager import MemoryManager

_NONE = empty_int32()


@dataclass(frozen=True, slots=True)
class Faults:
    """What a growth needs, before anything is changed. Rows are intp, as numpy indexes fastest by it."""

    ends: Int32Array  # (S,) the lengths after the growth
    rows: IndexArray  # (N,) page table entries that get a new frame: first those that are copied, then new pages
    pages: Int32Array  # (N,)
    copy_sources: Int32Array  # (C,) the frames that the first C of them name now
    exposed: IndexArray  # (E,) rows whose last page is private once the faults are resolved


def find_faults(tables: PageTables, frames: FrameAllocator, rows: IndexArray, counts: Int32Array) -> Faults:
    """The faults of growing each of the distinct `rows` (S,) by `counts` (S,) >= 1 tokens. Changes nothing."""
    page_size = tables.page_size
    starts = tables.lengths[rows]
    ends = starts + counts
    first_new = (starts + (page_size - 1)) // page_size
    new_pages = (ends + (page_size - 1)) // page_size - first_new
    growing = new_pages.nonzero()[0]
    fault_rows, fault_pages, counts = rows[growing], first_new[growing], new_pages[growing]
    if counts.sum() > len(growing):  # some by several pages
        offsets = np.arange(counts.sum(), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
        fault_rows = np.repeat(fault_rows, counts)
        fault_pages = (np.repeat(fault_pages, counts) + offsets).astype(np.int32)
    exposed = tables.exposed[rows].nonzero()[0]
    if not len(exposed):
        return Faults(ends, fault_rows, fault_pages, _NONE, rows[:0])
    copy_rows, copy_pages, sources = _copies(tables, frames, rows[exposed], starts[exposed])
    fault_rows, fault_pages = np.concatenate((copy_rows, fault_rows)), np.concatenate((copy_pages, fault_pages))
    return Faults(ends, fault_rows, fault_pages, sources, rows[exposed])


def _copies(
    tables: PageTables, frames: FrameAllocator, rows: IndexArray, starts: Int32Array
) -> tuple[IndexArray, Int32Array, Int32Array]:
    """(rows, pages, frames), each (C,): the pages that must be copied before position starts[i] is written.

    Where every holder of a frame writes in this step, the last one keeps it. A sealed frame is kept by nobody: its
    content is wanted elsewhere (invariant 3).
    """
    inside = (starts % tables.page_size).nonzero()[0]
    rows, pages = rows[inside], starts[inside] // tables.page_size
    written = tables.entries[rows, pages]
    shared = ((frames.references[written] > 1) | frames.sealed[written]).nonzero()[0]
    distinct, last_from_end, count = np.unique(written[shared][::-1], return_index=True, return_counts=True)
    is_kept = (frames.references[distinct] == count) & ~frames.sealed[distinct]
    copied = np.delete(shared, len(shared) - 1 - last_from_end[is_kept])
    return rows[copied], pages[copied], written[copied]


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
    def entries(self) -> Int32Array:
        """(pages,) int32: a copy of the page table entries, in page order (mm/addresses.py says how to read them)."""
        return self.memory.tables.mapped(self.row).copy()

    @property
    def is_resident(self) -> bool:
        """Whether it may run: no page is in swap or in a copy."""
        return not self.memory.tables.barred[self.row]

    def grow(self, tokens: int) -> MemoryOrders:
        """Make the next `tokens` positions writable. Raises OutOfFrames; then nothing has changed."""
        return self.memory.grow(np.array([self.row], np.int32), np.array([tokens], np.int32))

    def fork(self, owner: str, length: int | None = None) -> tuple["AddressSpace", MemoryOrders]:
        """A second address space over the same pages, or those of a beginning; only counts rise. Raises OutOfRows."""
        return self.memory.fork(self, owner, length)

    def advise(self, advice: "Advice") -> SwapOrders:
        """What will become of its pages: see mm/advice.py."""
        return self.memory.advise(self, advice)

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on, and release the pages that no position is left in."""
        self.memory.truncate(self, length)

    def release(self) -> None:
        """Give everything back. The handle must not be used afterwards."""
        self.memory.release(self)
