"""Owns the free list and the reference count of every frame.

    free ──allocate──▶ held (1) ──share──▶ held (n) ──release──▶ … ──last release──▶ free

Invariants (numbers of mm/__init__.py): 1 (free + held = total), 2 (counts are exact), 5 (all or nothing).
Every operation costs in proportion to the frames it is given, never to the size of the pool.
"""

import numpy as np

from mm.addresses import Int32Array
from mm.errors import FrameNotHeld, OutOfFrames


class FrameAllocator:
    """The frames 0 ... total - 1. The most recently freed frame is handed out first."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a pool needs at least one frame, got {total}")
        self.total = total
        self.references: Int32Array = np.zeros(total, np.int32)  # read by others, written only here
        self._stack: Int32Array = np.arange(total - 1, -1, -1, dtype=np.int32)  # free frames, the next one last
        self._free = total

    @property
    def free_frames(self) -> int:
        return self._free

    @property
    def free_list(self) -> Int32Array:
        """(free_frames,) the free frames, for audits."""
        return self._stack[: self._free].copy()

    def allocate(self, count: int) -> Int32Array:
        """Take `count` frames with one reference each: (count,) int32. Raises OutOfFrames and takes none (rule 5)."""
        if count > self._free:
            raise OutOfFrames(count, self._free)
        frames = self._stack[self._free - count : self._free][::-1].copy()
        self._free -= count
        self.references[frames] = 1
        return frames

    def share(self, frames: Int32Array) -> None:
        """Add one reference per entry of `frames`, which must be distinct. Raises FrameNotHeld if one is free."""
        if len(frames) and self.references[frames].min() < 1:
            raise FrameNotHeld(f"shared a free frame: {frames[self.references[frames] < 1].tolist()}")
        self.references[frames] += 1

    def release(self, frames: Int32Array) -> Int32Array:
        """Drop one reference per entry of `frames`, where a frame may stand several times.

        The last reference frees a frame (in tests the executor then poisons it). Returns the freed frames. Raises
        FrameNotHeld, and drops nothing, if a frame would lose more references than it has.
        """
        if not len(frames):
            return frames
        if frames.min() < 0:
            raise FrameNotHeld(f"no such frame: {int(frames.min())}")
        np.subtract.at(self.references, frames, 1)
        after = self.references[frames]
        if after.min() < 0:
            np.add.at(self.references, frames, 1)
            raise FrameNotHeld(f"released without a reference: {sorted(set(frames[after < 0].tolist()))}")
        freed = np.unique(frames[after == 0])
        self._stack[self._free : self._free + len(freed)] = freed[::-1]
        self._free += len(freed)
        return freed
