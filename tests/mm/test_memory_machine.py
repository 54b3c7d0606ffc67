"""Any history of create, grow, fork, write, truncate and release leaves exact counts and every Sequence's own tokens.

After each rule every reference is recounted (the audit) and every Sequence is read back through the device's page table.
`PLANTED` lists bugs that this machine must find; each is planted once and must be found within seconds.
"""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mm import AddressSpace, MemoryManager, OutOfFrames, OutOfRows
from mm import address_space, memory_manager
from mm.frame_allocator import FrameAllocator
from simulated_device import SimulatedDevice


class MemoryMachine(RuleBasedStateMachine):
    """Small pool, small pages: faults, copies and exhaustion all happen within a few steps."""

    def __init__(self) -> None:
        super().__init__()
        self.content: dict[int, list[int]] = {}  # row -> the tokens it must hold
        self.spaces: dict[int, AddressSpace] = {}
        self.next_token = 0

    @initialize(frames=st.integers(1, 24), page_size=st.sampled_from([1, 2, 4]))
    def start(self, frames: int, page_size: int) -> None:
        self.memory = MemoryManager(frames=frames, max_rows=6, max_pages=12, page_size=page_size)
        self.device = SimulatedDevice(self.memory)

    def tokens(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def add(self, space: AddressSpace, content: list[int]) -> None:
        self.spaces[space.row] = space
        self.content[space.row] = content

    @rule()
    def create(self) -> None:
        if self.memory.tables.free_rows:
            self.add(self.memory.create(f"owner {self.next_token}"), [])
        else:
            with pytest.raises(OutOfRows):
                self.memory.create("one too many")

    @precondition(lambda self: self.spaces)
    @rule(data=st.data())
    def grow_some(self, data: st.DataObject) -> None:
        """One step: any set of rows grows together, as a batch does."""
        rows = data.draw(st.lists(st.sampled_from(sorted(self.spaces)), unique=True, min_size=1))
        limit = self.memory.tables.max_pages * self.memory.page_size
        counts = [data.draw(st.integers(1, 9)) for _ in rows]
        counts = [min(count, limit - len(self.content[row])) for row, count in zip(rows, counts, strict=True)]
        if min(counts) < 1:
            return
        before = self.snapshot()
        array, sizes = np.array(rows, np.int32), np.array(counts, np.int32)
        needed = self.memory.frames_needed(array, sizes)
        try:
            orders = self.memory.grow(array, sizes)
        except OutOfFrames as error:
            assert error.needed == needed > error.free
            assert self.snapshot() == before
            return
        assert needed <= before["free"]
        self.device.carry_out(orders)
        for row, count in zip(rows, counts, strict=True):
            new = self.tokens(count)
            self.device.write(row, len(self.content[row]), new)
            self.content[row] = self.content[row] + new

    @precondition(lambda self: self.spaces)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.spaces)))
        if not self.memory.tables.free_rows:
            return
        free = self.memory.free_frames
        child, orders = self.spaces[row].fork(f"child {self.next_token}")
        assert self.memory.free_frames == free
        self.device.carry_out(orders)
        self.add(child, list(self.content[row]))

    @precondition(lambda self: self.spaces)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.spaces)))
        length = data.draw(st.integers(0, len(self.content[row])))
        self.spaces[row].truncate(length)
        self.content[row] = self.content[row][:length]

    @precondition(lambda self: self.spaces)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.spaces)))
        self.spaces.pop(row).release()
        del self.content[row]

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "memory"):
            return
        self.memory.check_invariants()
        assert self.device.writes_to_shared == 0
        self.device.poison_free_frames()
        for row, content in self.content.items():
            assert self.spaces[row].length == len(content)
            assert self.device.read(row, len(content)) == content
        information = self.memory.information()
        assert information.free_frames + information.active_frames == information.total_frames
        assert information.unused_tokens < max(1, information.rows) * self.memory.page_size
        if not self.spaces:
            assert self.memory.free_frames == self.memory.frames.total

    def snapshot(self) -> dict[str, object]:
        return {
            "free": self.memory.free_frames,
            "references": self.memory.frames.references.tolist(),
            "entries": self.memory.tables.entries.tolist(),
            "lengths": self.memory.tables.lengths.tolist(),
            "counters": self.memory.counters(),
        }


RUN = settings(max_examples=400, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


def test_any_history_keeps_the_books_and_the_tokens() -> None:
    """The heart: thousands of random operations, the full audit and every token checked after each."""
    run_state_machine_as_test(MemoryMachine, settings=RUN)


def fork_forgets_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrameAllocator, "share", lambda self, frames: None)


def write_without_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_space, "_without_keepers", lambda writers, frames, references: writers[:0])


def everyone_copies_but_the_last_of_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_space, "_without_keepers", lambda writers, frames, references: writers[:-1])


def source_released_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    original = MemoryManager.grow

    def grow(self: MemoryManager, rows: object, counts: object) -> object:
        orders = original(self, rows, counts)  # type: ignore[arg-type]
        shared = orders.copies.sources[self.frames.references[orders.copies.sources] > 0]
        self.frames.release(shared)
        return orders

    monkeypatch.setattr(MemoryManager, "grow", grow)


def truncate_keeps_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def truncate(self: MemoryManager, space: AddressSpace, length: int) -> None:
        self.tables.lengths[space.row] = length

    monkeypatch.setattr(MemoryManager, "truncate", truncate)


def failed_allocation_changes_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    original = memory_manager.find_faults

    def find(tables: object, references: object, rows: object, counts: object) -> object:
        faults = original(tables, references, rows, counts)  # type: ignore[arg-type]
        if faults.frames > np.count_nonzero(references == 0):  # type: ignore[arg-type]
            tables.lengths[rows] = faults.ends  # type: ignore[attr-defined]
        return faults

    monkeypatch.setattr(memory_manager, "find_faults", find)


PLANTED: list[Callable[[pytest.MonkeyPatch], None]] = [
    fork_forgets_to_count,
    write_without_copy,
    everyone_copies_but_the_last_of_too_many,
    source_released_twice,
    truncate_keeps_frames,
    failed_allocation_changes_lengths,
]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bug that the machine is there for makes it fail, so the test above can fail."""
    plant(monkeypatch)
    with pytest.raises(Exception) as failure:  # noqa: PT011  (AssertionError, MemoryCorruption, FrameNotHeld or a group)
        run_state_machine_as_test(MemoryMachine, settings=settings(RUN, phases=[Phase.generate], print_blob=False))
    assert failure.value is not None
