"""Device memory whose end is mapped and unmapped: against a driver that keeps the rules; on a GPU, the real one."""

from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cuda.errors import DriverError
from cuda.frames import FrameLayout, GrowingFramePool
from cuda.growing_memory import PIECE_GRANULES, GrowingMemory

GRANULE = 1 << 21
BASE = 1 << 40


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class FakeDriver:
    """The calls that are used, with the driver's own rules: what breaks one fails the test, or returns an error."""

    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def __init__(self, memory_bytes: int = 1 << 40) -> None:
        self.memory_bytes = memory_bytes
        self.reserved: dict[int, int] = {}
        self.handles: dict[int, int] = {}  # bytes
        self.mapped: dict[int, tuple[int, int]] = {}  # address -> bytes, handle
        self.accessible: set[int] = set()
        self.zeroed: set[int] = set()
        self.synchronized = 0
        self.failing = ""

    def CUmemAllocationProp(self) -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace())

    def CUmemAccessDesc(self) -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace())

    def cuMemGetAllocationGranularity(self, properties: Any, flags: int) -> tuple[Result, int]:
        assert (properties.type, properties.location.type, properties.location.id, flags) == (1, 1, 3, 0)
        return Result.CUDA_SUCCESS, GRANULE

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[Result, int]:
        assert size % GRANULE == 0
        self.reserved[BASE] = size
        return Result.CUDA_SUCCESS, BASE

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Result]:
        assert not self.mapped
        assert self.reserved.pop(address) == size
        return (Result.CUDA_SUCCESS,)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Result, int]:
        assert size > 0
        assert size % GRANULE == 0
        if sum(self.handles.values()) + size > self.memory_bytes:
            return Result.CUDA_ERROR_OUT_OF_MEMORY, 0
        handle = max(self.handles, default=0) + 1
        self.handles[handle] = size
        return Result.CUDA_SUCCESS, handle

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Result]:
        if self.failing == "cuMemMap":
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        assert BASE <= address <= address + size <= BASE + self.reserved[BASE]
        assert self.handles[handle] == size
        assert all(address + size <= other or other + length <= address for other, (length, _) in self.mapped.items())
        self.mapped[address] = size, handle
        return (Result.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[Result]:
        if self.failing == "cuMemSetAccess":
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        assert self.mapped[address][0] == size
        assert [(each.location.id, each.flags) for each in access] == [(3, 3)]
        assert count == 1
        self.accessible.add(address)
        return (Result.CUDA_SUCCESS,)

    def cuMemsetD8(self, address: int, value: int, size: int) -> tuple[Result]:
        assert address in self.accessible
        assert (value, self.mapped[address][0]) == (0, size)
        self.zeroed.add(address)
        return (Result.CUDA_SUCCESS,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Result]:
        assert self.mapped.pop(address)[0] == size
        self.accessible.discard(address)
        self.zeroed.discard(address)
        return (Result.CUDA_SUCCESS,)

    def cuMemRelease(self, handle: int) -> tuple[Result]:
        del self.handles[handle]
        return (Result.CUDA_SUCCESS,)

    def cuCtxSynchronize(self) -> tuple[Result]:
        self.synchronized += 1
        return (Result.CUDA_SUCCESS,)

    def check(self, least_bytes: int) -> None:
        """A beginning of the range is mapped without gaps, every byte of it accessible and zeroed; nothing is lost."""
        end = BASE
        for address in sorted(self.mapped):
            assert address == end
            end += self.mapped[address][0]
        assert end - BASE >= least_bytes
        assert self.accessible == self.zeroed == self.mapped.keys()
        assert sorted(self.handles) == sorted(handle for _, handle in self.mapped.values())


def test_a_beginning_is_mapped_whatever_sizes_come() -> None:
    driver = FakeDriver()
    memory = GrowingMemory(driver, 3, 100 * GRANULE - 5)
    assert memory.most_bytes == 100 * GRANULE
    for size in (0, 1, GRANULE, 40 * GRANULE + 1, 100 * GRANULE, 33 * GRANULE, 70 * GRANULE, 0, 5):
        memory.resize(size)
        driver.check(size)
        assert memory.mapped_bytes - size < PIECE_GRANULES * GRANULE
    memory.close()
    memory.close()
    assert not driver.mapped
    assert not driver.handles
    assert not driver.reserved


def test_new_memory_is_zero_before_anybody_comes() -> None:
    driver = FakeDriver()
    memory = GrowingMemory(driver, 3, 100 * GRANULE)
    memory.resize(GRANULE)
    memory.resize(GRANULE)
    assert driver.synchronized == 1, "only where something was mapped"


def test_more_than_was_reserved_is_a_mistake() -> None:
    memory = GrowingMemory(FakeDriver(), 3, GRANULE)
    with pytest.raises(ValueError, match="bytes of"):
        memory.resize(GRANULE + 1)


def test_without_memory_all_stays_as_it_was() -> None:
    driver = FakeDriver(memory_bytes=50 * GRANULE)
    memory = GrowingMemory(driver, 3, 100 * GRANULE)
    memory.resize(10 * GRANULE)
    with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
        memory.resize(90 * GRANULE)
    driver.check(10 * GRANULE)
    assert memory.mapped_bytes == 10 * GRANULE
    memory.resize(20 * GRANULE)
    driver.check(20 * GRANULE)


@pytest.mark.parametrize("call", ["cuMemMap", "cuMemSetAccess"])
def test_a_call_that_fails_leaves_nothing_behind(call: str) -> None:
    driver = FakeDriver()
    memory = GrowingMemory(driver, 3, 100 * GRANULE)
    memory.resize(GRANULE)
    driver.failing = call
    with pytest.raises(DriverError, match=call):
        memory.resize(50 * GRANULE)
    driver.check(GRANULE)


@pytest.mark.gpu
def test_a_pool_grows_and_shrinks_in_place() -> None:
    """Frames keep content and address; those that come back are zero. (Neighbours change what the device has free.)"""
    layout = FrameLayout(layers=8, kv_heads=4, head_dim=64, dtype=torch.bfloat16)
    frames = (512 << 20) // layout.frame_bytes
    pool = GrowingFramePool(layout, frames // 4, frames, "cuda")
    address, before = pool.layer_address(0), pool.mapped_bytes
    pool.data[0].fill_(1)
    pool.data[frames // 4 - 1].fill_(2)
    pool.resize(frames)
    assert pool.mapped_bytes - before >= 300 << 20
    assert pool.layer_address(0) == address == pool.data.data_ptr()
    pool.data[frames - 1].fill_(3)
    torch.cuda.synchronize()
    assert [float(pool.data[i].float().mean()) for i in (0, frames // 4 - 1, frames // 2, frames - 1)] == [1, 2, 0, 3]
    pool.resize(frames // 4)
    assert pool.mapped_bytes - before <= 64 << 20
    pool.resize(frames)
    torch.cuda.synchronize()
    assert float(pool.data[frames - 1].float().abs().max()) == 0
    assert float(pool.data[0].float().mean()) == 1
    pool.close()
    pool.close()
    assert pool.mapped_bytes == 0
