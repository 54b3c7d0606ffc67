"""The memory behind swap slots comes in chunks, and ends where the system says so."""

import gc
import sys
from pathlib import Path

import pytest
import torch

from mm.backing_store import BackingStore


def filled(store: BackingStore, slots: int) -> BackingStore:
    store.want(slots)
    store.wait()
    return store


def test_every_slot_has_its_own_memory() -> None:
    store = filled(BackingStore(7, 16, page_locked=False, chunk_bytes=48), 7)
    assert store.ready_slots == 7
    for number in range(7):
        store.slot(number).fill_(number)
    for number in range(7):
        assert store.slot(number).tolist() == [number] * 16
        assert store.address(number) == store.slot(number).data_ptr()
    neighbours = [store.address(n + 1) == store.address(n) + 16 for n in range(6) if store.are_neighbours(n)]
    assert neighbours
    assert all(neighbours)


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: out of memory\nmore"), MemoryError()])
def test_a_chunk_that_cannot_be_had_ends_the_area(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    original, made = torch.empty, []

    def empty(*args, **kwargs):  # type: ignore[no-untyped-def]
        if len(made) == 2:
            raise error
        made.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr("mm.backing_store.torch.empty", empty)
    store = filled(BackingStore(10, 16, page_locked=False, chunk_bytes=32), 10)
    assert store.ready_slots == 4


def test_no_slots_cost_nothing() -> None:
    store = BackingStore(0, 16, page_locked=True)
    assert store.ready_slots == 0
    store.close()


def test_memory_is_taken_only_as_far_as_it_is_asked_for() -> None:
    store = filled(BackingStore(100, 16, page_locked=False, chunk_bytes=32), 5)
    store.close()
    assert store.ready_slots == 6  # whole chunks
    store.want(50)
    assert store.ready_slots == 6


def test_a_smaller_area_gives_whole_chunks_back_and_can_be_as_large_again() -> None:
    store = filled(BackingStore(10, 16, page_locked=False, chunk_bytes=64), 10)
    store.slot(3).fill_(7)
    store.resize(5)
    assert store.ready_slots == 5
    store.want(9)
    store.wait()
    assert store.ready_slots == 5
    store.resize(10)
    assert store.ready_slots == 8, "a chunk holds what it holds"
    store = filled(store, 10)
    assert store.ready_slots == 10
    assert store.slot(3).tolist() == [7] * 16
    assert len(store.slot(9)) == 16
    store.close()


def is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


class FakeRuntime:
    """Of CUDA, as far as memory is locked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}  # bytes, by address
        self.pages_were_there: list[bool] = []  # of what was unlocked
        self.most = 99

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if len(self.locked) == self.most:
            return 2
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        if sys.platform == "linux":
            self.pages_were_there.append(is_mapped(address))
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr("mm.backing_store._runtime", lambda: fake)
    return fake


def test_every_chunk_is_locked_as_long_as_anybody_uses_it(runtime: FakeRuntime) -> None:
    store = filled(BackingStore(5, 16, page_locked=True, chunk_bytes=32), 5)
    assert runtime.locked == {store.address(0): 32, store.address(2): 32, store.address(4): 16}
    page = store.slot(3)
    page.fill_(7)
    store.resize(2)
    gc.collect()
    assert runtime.locked.keys() == {store.address(0), page.data_ptr() - 16}
    assert page.tolist() == [7] * 16
    del page
    store.close()
    store.resize(0)
    gc.collect()
    assert not runtime.locked


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_chunk_is_unlocked_before_its_pages_go(runtime: FakeRuntime) -> None:
    """Else another chunk may have got their place, and be unlocked instead."""
    store = filled(BackingStore(2, 16, page_locked=True, chunk_bytes=32), 2)
    store.close()
    store.resize(0)
    gc.collect()
    assert runtime.pages_were_there == [True]


def test_what_cannot_be_locked_ends_the_area(runtime: FakeRuntime, caplog: pytest.LogCaptureFixture) -> None:
    runtime.most = 2
    store = filled(BackingStore(10, 16, page_locked=True, chunk_bytes=32), 10)
    assert store.ready_slots == 4
    assert "4 of 10 slots: 32 bytes cannot be page-locked" in caplog.text
    store.close()
