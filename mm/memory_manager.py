"""The facade that service calls: address spaces over one pool of frames, the audit, and the numbers.

It never touches keys or values: what must happen on the device is returned as orders (mm/page_copies.py), which the
caller hands to an executor in the order they were given.
"""

import numpy as np

from mm.address_space import AddressSpace, find_faults, table_changes
from mm.addresses import ABSENT, PAGE_SIZE, Int32Array, pages_for
from mm.errors import MemoryCorruption
from mm.frame_allocator import FrameAllocator
from mm.page_copies import MemoryOrders, PageCopies, TableChanges
from mm.page_table import PageTables
from mm.statistics import EventCounters, MemoryInformation


class MemoryManager:
    """`frames` frames of `page_size` tokens, shared by up to `max_rows` address spaces of up to `max_pages` pages."""

    def __init__(self, *, frames: int, max_rows: int, max_pages: int, page_size: int = PAGE_SIZE) -> None:
        self.page_size = page_size
        self.frames = FrameAllocator(frames)
        self.tables = PageTables(max_rows, max_pages, page_size)
        self._allocated = self._freed = self._cow_faults = self._forks = self._truncates = 0

    @property
    def free_frames(self) -> int:
        return self.frames.free_frames

    @property
    def max_tokens(self) -> int:
        """The most positions that one address space can ever hold."""
        return min(self.frames.total, self.tables.max_pages) * self.page_size

    def create(self, owner: str) -> AddressSpace:
        """An empty address space. Raises OutOfRows."""
        return AddressSpace(self, self.tables.allocate_row(owner), owner)

    def frames_needed(self, rows: Int32Array, counts: Int32Array) -> int:
        """Frames that `grow` would allocate for the same arguments. Changes nothing."""
        return find_faults(self.tables, self.frames.references, rows, counts).frames

    def grow(self, rows: Int32Array, counts: Int32Array) -> MemoryOrders:
        """Make the next counts[i] >= 1 positions of row rows[i] writable: allocate, and copy what others share.

        rows, counts (S,) int32, rows distinct. One call a step: the copies of one call are independent of each other.
        Raises OutOfFrames, and then nothing has changed (invariant 5); ValueError past max_pages.
        """
        faults = find_faults(self.tables, self.frames.references, rows, counts)
        if len(rows) and faults.ends.max() > self.tables.max_pages * self.page_size:
            raise ValueError(f"{faults.ends.max()} positions do not fit into {self.tables.max_pages} pages")
        if not faults.frames:
            self.tables.lengths[rows] = faults.ends
            return MemoryOrders()
        frames = self.frames.allocate(faults.frames)
        copies = len(faults.copy_rows)
        changes = table_changes(self.tables, rows, faults, frames)
        self.tables.entries[changes.rows, changes.pages] = frames
        self.tables.lengths[rows] = faults.ends
        self._allocated += len(frames)
        if not copies:
            return MemoryOrders(table_changes=changes)
        self._cow_faults += copies
        self._freed += len(self.frames.release(faults.copy_sources))
        return MemoryOrders(PageCopies(faults.copy_sources, frames[:copies]), changes)

    def fork(self, space: AddressSpace, owner: str) -> tuple[AddressSpace, MemoryOrders]:
        """A second address space over the frames of `space`: each frame gains a reference, no frame is allocated.

        Raises OutOfRows. O(pages), vectorised.
        """
        child = self.create(owner)
        frames = self.tables.frames(space.row)
        self.frames.share(frames)
        pages = len(frames)
        self.tables.entries[child.row, :pages] = frames
        self.tables.lengths[child.row] = self.tables.lengths[space.row]
        self._forks += 1
        changes = TableChanges(np.full(pages, child.row, np.int32), np.arange(pages, dtype=np.int32), frames.copy())
        return child, MemoryOrders(table_changes=changes)

    def truncate(self, space: AddressSpace, length: int) -> None:
        """Shorten `space` to `length` positions; pages with no position left are released."""
        before = int(self.tables.lengths[space.row])
        if not 0 <= length <= before:
            raise ValueError(f"cannot truncate {before} positions to {length}")
        keep, pages = pages_for(length, self.page_size), pages_for(before, self.page_size)
        dropped = self.tables.entries[space.row, keep:pages]
        self._freed += len(self.frames.release(dropped))
        dropped[:] = ABSENT
        self.tables.lengths[space.row] = length
        self._truncates += 1

    def release(self, space: AddressSpace) -> None:
        """Drop every reference of `space` and its row."""
        self._freed += len(self.frames.release(self.tables.frames(space.row)))
        self.tables.release_row(space.row)

    # --- looking at it

    def information(self) -> MemoryInformation:
        """Memory in total, now. Reads every count: for operators, not for a step."""
        references, rows = self.frames.references, self.tables.rows_in_use()
        tokens = int(self.tables.lengths[rows].sum())
        mapped = int(self.tables.pages(rows).sum())
        return MemoryInformation(
            total_frames=self.frames.total,
            free_frames=self.frames.free_frames,
            active_frames=int(np.count_nonzero(references)),
            shared_frames=int(np.count_nonzero(references > 1)),
            references=mapped,
            rows=len(rows),
            tokens=tokens,
            unused_tokens=mapped * self.page_size - tokens,
            page_size=self.page_size,
        )

    def counters(self) -> EventCounters:
        return EventCounters(self._allocated, self._freed, self._cow_faults, self._forks, self._truncates)

    def audit(self) -> list[str]:
        """Recompute every reference count from the page tables and list each discrepancy; empty when all is well."""
        found: list[str] = []
        entries, total = self.tables.entries, self.frames.total
        counted = np.zeros(total, np.int32)
        for row, owner in enumerate(self.tables.owners):
            pages = pages_for(int(self.tables.lengths[row]), self.page_size)
            if owner is None and self.tables.lengths[row]:
                found.append(f"row {row} belongs to nobody and has {self.tables.lengths[row]} positions")
            mapped = entries[row, :pages]
            present = mapped[(mapped >= 0) & (mapped < total)]
            if len(present) < pages:
                found.append(f"row {row} ({owner}): page without a frame among {mapped.tolist()}")
            if len(np.unique(present)) < len(present):
                found.append(f"row {row} ({owner}): a frame stands twice in {mapped.tolist()}")
            if (entries[row, pages:] != ABSENT).any():
                found.append(f"row {row} ({owner}): an entry past its {pages} pages")
            np.add.at(counted, present, 1)
        found += [
            f"frame {frame}: {self.frames.references[frame]} references, {counted[frame]} holders"
            for frame in np.flatnonzero(counted != self.frames.references)[:100]
        ]
        free = self.frames.free_list
        if len(np.unique(free)) < len(free):
            found.append("a frame stands twice in the free list")
        found += [
            f"frame {frame} is free and has {self.frames.references[frame]} references"
            for frame in free[self.frames.references[free] != 0][:100]
        ]
        held = int(np.count_nonzero(self.frames.references))
        if len(free) + held != total:
            found.append(f"{len(free)} free + {held} held frames are not {total}")
        return found

    def check_invariants(self) -> None:
        """Raise MemoryCorruption with everything that `audit` lists."""
        if found := self.audit():
            raise MemoryCorruption(found)
