"""Owns the free list, and what holds each frame: references, pins, and whether a copy of it exists elsewhere.

    free ──allocate──▶ held (1) ──share──▶ held (n) ──release──▶ … ──last release──▶ free, unless pinned or sealed

    references   page table entries (and prefix pins) that name the frame
    pins         copies in flight from it or to it: until they end it is neither freed nor reused
    sealed       the page cache or a swap slot has this very content: it is never written in place, and its last
                 release hands it to `Residency`, which knows what becomes of it

Frames from `usable` on are closed: they are neither free nor held, and have no memory behind them (mm/resizing.py).

Invariants (numbers of mm/__init__.py): 1 (free + held = usable), 2 (counts are exact), 5 (all or nothing), 7 (pins).
Every operation costs in proportion to the frames it is given, never to the size of the pool.
"""

import numpy as np

from mm.addresses import BoolArray, IndexArray, Int32Array, Int64Array, empty_int32
from mm.errors import FrameNotHeld, OutOfFrames
from mm.tenants import Tenants


class FrameAllocator:
    """The frames 0 ... total - 1. The most recently freed frame is handed out first."""

    def __init__(self, total: int, tenants: Tenants) -> None:
        if total < 1:
            raise ValueError(f"a pool needs at least one frame, got {total}")
        self.total = total  # what there is a place for in every array; those below `usable` are in use
        self.usable = total
        self.allocated = self.freed = 0  # events since the start
        self.mapped = 0  # frames with a reference
        self.most_held = 0  # since the start
        self.saved = 0  # references beyond the first of each frame: frames that are not needed, thanks to sharing
        self.references: Int32Array = np.zeros(total, np.int32)  # read by others, written only here
        self.pins: Int32Array = np.zeros(total, np.int32)
        self.pinned = 0  # pins in all
        self.pin_count = self.pins.data  # the same memory, for one frame at a time
        self.reference_count = self.references.data
        self.sealed: BoolArray = np.zeros(total, np.bool_)  # written by Residency
        self.last_owner: Int64Array = np.zeros(total, np.int64)  # serial of the address space it was allocated for
        self.owner_serial = self.last_owner.data
        self._tenants = tenants
        self._stack: Int32Array = np.arange(total - 1, -1, -1, dtype=np.int32)  # free frames, the next one last
        self._stack_view = self._stack.data
        self._free = total

    @property
    def free_frames(self) -> int:
        return self._free

    @property
    def free_list(self) -> Int32Array:
        """(free_frames,) the free frames, for audits."""
        return self._stack[: self._free].copy()

    def close(self, first: int) -> None:
        """Frames from `first` on are not handed out any more. All of them must be free."""
        stack = self._stack[: self._free]
        kept = stack[stack < first]
        if self._free - len(kept) != self.usable - first:
            raise FrameNotHeld(f"closed a frame that is held, of those from {first} on")
        self._stack[: len(kept)] = kept
        self._free, self.usable = len(kept), first

    def open(self, end: int) -> None:
        """Frames below `end` can be handed out from now on, the free ones before the new."""
        new = np.arange(end - 1, self.usable - 1, -1, dtype=np.int32)
        self._stack[len(new) : len(new) + self._free] = self._stack[: self._free].copy()
        self._stack[: len(new)] = new
        self._free, self.usable = self._free + len(new), end

    def allocate(self, tenants: Int32Array, *, references: int = 1) -> Int32Array:
        """Take one frame for each of `tenants` (N,), with `references` references (0 or 1): (N,) int32.

        Raises OutOfFrames and takes none (invariant 5).
        """
        count = len(tenants)
        if count > self._free:
            raise OutOfFrames(count, self._free)
        frames = self._stack[self._free - count : self._free][::-1].copy()
        self._free -= count
        self.allocated += count
        self.most_held = max(self.most_held, self.usable - self._free)
        self.references[frames] = references
        self.mapped += count if references else 0
        self._tenants.charge(frames, tenants)
        return frames

    def share(self, frames: Int32Array) -> None:
        """Add one reference per entry of `frames`, which must be distinct. Raises FrameNotHeld if one is free.

        A frame without references is not free while it is sealed or pinned.
        """
        index = frames.astype(np.intp)  # numpy indexes fastest by it
        counts = self.references[index]
        first = 0
        if len(frames) and counts.min() < 1:
            unmapped = counts < 1
            unheld = unmapped & ~self.sealed[index] & (self.pins[index] < 1)
            if unheld.any():
                raise FrameNotHeld(f"shared a free frame: {frames[unheld].tolist()}")
            first = int(np.count_nonzero(unmapped))
        self.references[index] = counts + 1
        self.mapped += first
        self.saved += len(frames) - first

    def release(self, frames: Int32Array) -> Int32Array:
        """Drop one reference per entry of `frames`, where a frame may stand several times.

        The last reference frees a frame (in tests the device then poisons it) unless it is pinned or sealed: those
        are returned, in the order given. Raises FrameNotHeld, and drops nothing, if a frame would lose more
        references than it has.
        """
        if not len(frames):
            return empty_int32()
        if frames.min() < 0:
            raise FrameNotHeld(f"no such frame: {int(frames.min())}")
        np.subtract.at(self.references, frames, 1)
        after = self.references[frames]
        if after.min() < 0:
            np.add.at(self.references, frames, 1)
            raise FrameNotHeld(f"released without a reference: {sorted(set(frames[after < 0].tolist()))}")
        idle: Int32Array = frames[after == 0]
        if len(idle) > 1:
            idle = idle[np.sort(np.unique(idle, return_index=True)[1])]
        self.mapped -= len(idle)
        self.saved -= len(frames) - len(idle)
        is_kept = self.sealed[idle] | (self.pins[idle] > 0)
        self.free(idle[~is_kept])
        kept: Int32Array = idle[is_kept]
        return kept

    def release_row(self, frames: IndexArray) -> IndexArray:
        """Drop one reference of each of the distinct `frames`. Frees nothing: returns those without any now, in order.

        Raises FrameNotHeld, and drops nothing, if one has none.
        """
        after = self.references[frames]
        after -= 1
        if np.count_nonzero(after < 0):
            raise FrameNotHeld(f"released without a reference: {sorted(frames[after < 0].tolist())}")
        self.references[frames] = after
        shared = int(np.count_nonzero(after))
        self.saved -= shared
        self.mapped -= len(frames) - shared
        return frames[after == 0] if shared else frames

    def free(self, frames: Int32Array | IndexArray) -> None:
        """Put distinct frames that nothing holds any more on the free list."""
        count = len(frames)
        self._stack[self._free : self._free + count] = frames[::-1]
        self._free += count
        self.freed += count
        self._tenants.uncharge(frames)

    def free_one(self, frame: int) -> None:
        """The same for one frame, at a fraction of the cost."""
        self._stack_view[self._free] = frame
        self._free += 1
        self.freed += 1
        self._tenants.uncharge_one(frame)

    def pin(self, frames: Int32Array) -> None:
        """Bar the distinct `frames` from being freed or reused until `unpin`."""
        self.pins[frames] += 1
        self.pinned += len(frames)

    def unpin(self, frames: Int32Array) -> Int32Array:
        """End what `pin` began. Returns the frames that no pin and no reference holds any more."""
        self.pins[frames] -= 1
        self.pinned -= len(frames)
        unheld: Int32Array = frames[(self.pins[frames] == 0) & (self.references[frames] == 0)]
        return unheld
