"""Owns the swap slots: frame-sized places in host memory, reference counted like frames.

What may hold a slot:

    references   page table entries that name it (pages of Sequences that were swapped out)
    entry        a page of the page cache that has a copy here
    twin         a frame with the identical content: the frame is *clean* and can be dropped for free
    pins         copies in flight from it or to it: until they end it is neither freed nor reused

A slot that only its twin holds, or a cached page that is resident too, can be taken back at no cost: such slots stand
on the clean list, oldest first. The two uses have a bound each: pages of Sequences, and everything else (the second
tier of the page cache), so that neither can crowd out the other.
"""

from dataclasses import dataclass

import numpy as np

from mm.addresses import ABSENT, Int32Array
from mm.lru import PageLists
from mm.tenants import Tenants


@dataclass(frozen=True, slots=True)
class SwapBounds:
    """Slots that each use may fill at most; their sum may exceed the total."""

    sequences: int
    cache: int

    @classmethod
    def for_slots(cls, total: int) -> "SwapBounds":
        """Sequences may fill it all: their pages cannot be dropped. The cache may fill half."""
        return cls(sequences=total, cache=total // 2)


class SwapSpace:
    """The slots 0 ... total - 1, each for one page, all layers. Those below `opened` have memory behind them."""

    def __init__(
        self, total: int, opened: int, frames: int, tenants: Tenants, bounds: SwapBounds | None = None
    ) -> None:
        self.total = total  # what there is a place for in every array; those below `usable` are in use
        self.usable = total
        self.opened = opened
        self.bounds = bounds or SwapBounds.for_slots(total)
        self.sequence_slots = 0  # slots with references
        self.promised_slots = 0  # slots that pages of Sequences are being copied to
        self.references = np.zeros(total, np.int32).data
        self.pins = np.zeros(total, np.int32).data
        self.entry = np.full(total, ABSENT, np.int32).data  # written by PageCache's users
        self.twin = np.full(total, ABSENT, np.int32).data  # the frame with the same content
        self.slots_of_frames: Int32Array = np.full(frames, ABSENT, np.int32)
        self.slot_of_frame = self.slots_of_frames.data
        self.clean = PageLists(total, 1)
        self._tenants = tenants
        self._free: list[int] = list(range(opened - 1, -1, -1))

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def used_slots(self) -> int:
        return self.opened - len(self._free)

    @property
    def cache_slots(self) -> int:
        """Slots in use, but not by a Sequence, nor soon."""
        return self.used_slots - self.sequence_slots - self.promised_slots

    @property
    def free_list(self) -> list[int]:
        """The free slots, for audits."""
        return list(self._free)

    def open(self, slots: int) -> None:
        """The first `slots` slots have memory behind them from now on: never fewer than before."""
        slots = min(slots, self.usable)
        self._free[:0] = range(slots - 1, self.opened - 1, -1)
        self.opened = max(slots, self.opened)

    def resize(self, slots: int) -> None:
        """Slots from `slots` on are not handed out any more, and must be free; others can be opened again."""
        kept = [slot for slot in self._free if slot < slots]
        assert len(self._free) - len(kept) == max(0, self.opened - slots)
        self._free, self.usable, self.opened = kept, slots, min(self.opened, slots)
        self.bounds = SwapBounds.for_slots(slots)

    def allocate(self, tenant: int, count: int) -> list[int]:
        """Take free slots, each pinned once and charged to `tenant`. There must be enough."""
        slots = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        for slot in slots:
            self.pins[slot] = 1
        self._tenants.of_slot[slots] = tenant
        self._tenants.swap_usage[tenant] += count
        return slots

    def free(self, slot: int) -> None:
        """Put back a slot that nothing holds any more."""
        assert not self.references[slot]
        assert not self.pins[slot]
        assert self.entry[slot] == ABSENT
        assert self.twin[slot] == ABSENT
        self._tenants.swap_usage[self._tenants.of_slot[slot]] -= 1
        self._free.append(slot)

    def add_reference(self, slot: int) -> None:
        """A page table entry names the slot."""
        self.sequence_slots += not self.references[slot]
        self.references[slot] += 1

    def drop_reference(self, slot: int) -> None:
        """A page table entry does not name it any more. The caller settles what becomes of it."""
        assert self.references[slot] > 0
        self.references[slot] -= 1
        self.sequence_slots -= not self.references[slot]

    def link(self, slot: int, frame: int) -> None:
        """Slot and frame have the same content from now on."""
        assert self.twin[slot] == ABSENT
        assert self.slot_of_frame[frame] == ABSENT
        self.twin[slot] = frame
        self.slot_of_frame[frame] = slot

    def unlink(self, slot: int) -> None:
        """The frame of a linked slot is about to be dropped or written."""
        self.slot_of_frame[self.twin[slot]] = ABSENT
        self.twin[slot] = ABSENT
