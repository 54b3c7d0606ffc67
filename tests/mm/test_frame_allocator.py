"""Counts that cannot go wrong unnoticed: what nobody holds cannot be shared or released."""

import numpy as np
import pytest
from memory_house import House

from mm import FrameNotHeld, OutOfFrames
from mm.frame_allocator import FrameAllocator
from mm.tenants import Tenants

NOBODY = np.zeros(3, np.int32)


def allocator(frames: int) -> FrameAllocator:
    return FrameAllocator(frames, Tenants(frames, 0))


def test_a_pool_has_at_least_one_frame() -> None:
    with pytest.raises(ValueError, match="at least one frame"):
        allocator(0)


def test_the_frame_freed_last_is_handed_out_first() -> None:
    pool = allocator(8)
    frames = pool.allocate(NOBODY)
    pool.release(frames[1:2])
    assert pool.allocate(NOBODY[:1]).tolist() == [frames[1]]


def test_a_refused_allocation_takes_nothing() -> None:
    pool = allocator(2)
    with pytest.raises(OutOfFrames, match="needs 3 frames: 2 free"):
        pool.allocate(NOBODY)
    assert pool.free_frames == 2


def test_releasing_more_than_is_held_drops_nothing() -> None:
    pool = allocator(4)
    frames = pool.allocate(NOBODY)
    pool.share(frames[:1])
    with pytest.raises(FrameNotHeld, match=r"released without a reference: \[1\]"):
        pool.release(np.array([0, 0, 1, 1], np.int32))
    assert pool.references.tolist() == [2, 1, 1, 0]
    with pytest.raises(FrameNotHeld, match="no such frame: -1"):
        pool.release(np.array([-1], np.int32))


def test_a_free_frame_cannot_be_shared() -> None:
    pool = allocator(4)
    with pytest.raises(FrameNotHeld, match=r"shared a free frame: \[2\]"):
        pool.share(np.array([2], np.int32))


def test_a_frame_released_several_times_at_once_is_freed_once() -> None:
    pool = allocator(4)
    frames = pool.allocate(NOBODY[:1])
    pool.share(frames)
    assert len(pool.release(np.repeat(frames, 2))) == 0
    assert pool.free_frames == 4
    assert len(set(pool.free_list.tolist())) == 4


def test_positions_past_the_page_table_are_refused() -> None:
    house = House(pages=2)
    guest = house.start([1, 2, 3])
    with pytest.raises(ValueError, match="9 positions do not fit into 2 pages"):
        guest.space.grow(6)
    with pytest.raises(ValueError, match="cannot truncate 3 positions to 4"):
        guest.space.truncate(4)
    house.check(guest)
