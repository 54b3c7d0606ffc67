"""Pages that are copied between the pool and memory of somebody else's, such as a file's: held while that lasts.

    pin       the pages of a row, wherever they are: neither frames nor slots are freed or reused until `let_go`. What a
              row has written is final, so it may go on meanwhile, be swapped, or end; a fork of an earlier position of
              its last page, which may write there, gets a copy (mm/growth.py)
    fill      new frames for the first pages of an empty row, to be written from elsewhere. The row is barred until
              `let_go`, and publishes nothing: what comes from elsewhere is nobody else's
    let_go    the copies are over, or will not be made

Who copies says when each has ended (`MemoryManager.complete` is for swap orders alone).
"""

from dataclasses import dataclass

import numpy as np

from mm.addresses import ABSENT, Int32Array, pages_for, slot_entry
from mm.flight_recorder import EventKind
from mm.page_table import PageTables
from mm.reclaim import Reclaimer
from mm.residency import Residency


@dataclass(frozen=True, slots=True)
class Hold:
    """Pages 0 ... N - 1 of a row, as its page table named them."""

    number: int
    row: int
    epoch: int
    entries: Int32Array  # (N,) frames, or slots as page tables name them
    fills: bool  # the row waits for it

    @property
    def frames(self) -> Int32Array:
        """The frames among them, in page order."""
        return self.entries[self.entries >= 0]

    @property
    def slots(self) -> Int32Array:
        """The swap slots among them, in page order."""
        return slot_entry(self.entries[self.entries < ABSENT])


class Holds:
    """All that last, by number."""

    def __init__(self, tables: PageTables, residency: Residency, reclaimer: Reclaimer) -> None:
        self.held: dict[int, Hold] = {}
        self._last_number = 0
        self._tables = tables
        self._residency = residency
        self._reclaimer = reclaimer

    def pin(self, row: int, length: int) -> Hold:
        """The pages of the first `length` positions of `row`."""
        entries = self._tables.entries[row, : pages_for(length, self._tables.page_size)].copy()
        return self._keep(row, entries, fills=False)

    def fill(self, row: int, length: int, now: float, owner: str) -> Hold:
        """Frames for the first `length` positions of `row`, which has none.

        Raises OutOfFrames, and then nothing has changed.
        """
        tables, recorder, pages = self._tables, self._residency.recorder, pages_for(length, self._tables.page_size)
        tenants = np.full(pages, tables.tenants[row], np.int32)
        frames = self._reclaimer.allocate(tenants, now, owner)
        serials = np.full(pages, tables.serials[row], np.int64)
        self._residency.frames.last_owner[frames] = serials
        recorder.record_frames(EventKind.ALLOCATE, serials, tenants, frames)
        tables.entries[row, :pages] = frames
        tables.lengths[row] = length
        tables.barred[row] = pages
        tables.note(row, np.arange(pages, dtype=np.int32))
        return self._keep(row, frames, fills=True)

    def let_go(self, hold: Hold) -> None:
        """Once for each hold. Frames and slots that nobody has any more are free, or rest in the page cache."""
        del self.held[hold.number]
        frames, swap = self._residency.frames, self._residency.swap
        if hold.fills and self._tables.epochs[hold.row] == hold.epoch:
            self._tables.barred[hold.row] -= len(hold.entries)
        for frame in frames.unpin(hold.frames).tolist():
            self._residency.settle_frame(frame)
        for slot in hold.slots.tolist():
            swap.pins[slot] -= 1
            self._residency.settle_slot(slot)

    def _keep(self, row: int, entries: Int32Array, *, fills: bool) -> Hold:
        self._last_number += 1
        hold = Hold(self._last_number, row, int(self._tables.epochs[row]), entries, fills)
        self._residency.frames.pin(hold.frames)
        for slot in hold.slots.tolist():
            self._residency.swap.pins[slot] += 1
        self.held[hold.number] = hold
        return hold
