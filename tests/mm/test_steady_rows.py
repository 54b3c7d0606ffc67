"""Rows that grow by a token a step: the same orders as `grow` gives, without looking at every row."""

import numpy as np
import pytest

from mm import MemoryManager, MemoryOrders, OutOfFrames, PageNotResident, SteadyRows
from mm.steady_rows import PageEdges

P = 4


def manager(frames: int = 200, slots: int = 0) -> MemoryManager:
    return MemoryManager(frames=frames, max_rows=12, max_pages=10, page_size=P, slots=slots)


def start(memory: MemoryManager, lengths: list[int]) -> np.ndarray:
    """Address spaces of these lengths; their rows, ascending."""
    spaces = [memory.create(f"sequence {i}") for i in range(len(lengths))]
    rows = np.array([space.row for space in spaces], np.int32)
    memory.grow(rows, np.array(lengths, np.int32))
    return rows


def steady_of(memory: MemoryManager, rows: np.ndarray) -> SteadyRows:
    return SteadyRows(rows, memory.tables.lengths[rows], P)


def words(orders: MemoryOrders) -> list[list[int]]:
    copies, changes = orders.copies, orders.table_changes
    parts = (copies.sources, copies.targets, changes.rows, changes.pages, changes.frames)
    return [part.tolist() for part in parts]


@pytest.mark.parametrize("chosen", [slice(None), slice(1, None, 3), slice(2, 3)], ids=["all", "some", "one"])
def test_steady_growth_gives_the_orders_of_growth(chosen: slice) -> None:
    lengths = [1, 4, 5, 7, 8, 2, 3, 4, 6]
    plain, steady = manager(), manager()
    rows = start(plain, lengths)[chosen]
    start(steady, lengths)
    going = steady_of(steady, rows)
    for _ in range(3 * P):
        wanted = plain.grow(rows, np.ones(len(rows), np.int32))
        assert words(steady.grow_steadily(going)) == words(wanted)
        assert going.lengths.tolist() == plain.tables.lengths[rows].tolist()
        assert (steady.tables.entries == plain.tables.entries).all()
        assert (steady.tables.lengths == plain.tables.lengths).all()
    steady.check_invariants()


def test_a_row_that_is_forked_meanwhile_copies_before_it_writes() -> None:
    memory = manager()
    space = memory.create("parent")
    space.grow(6)
    going = steady_of(memory, np.array([space.row], np.int32))
    memory.grow_steadily(going)
    space.fork("child")
    copies = memory.grow_steadily(going).copies
    assert len(copies) == 1
    assert copies.targets[0] == space.entries[1]
    assert going.lengths.tolist() == [8]
    assert len(memory.grow_steadily(going).copies) == 0
    memory.check_invariants()


def test_steady_growth_that_fails_changes_nothing() -> None:
    memory = manager(frames=4)
    rows = start(memory, [3, 4, 8])
    going = steady_of(memory, rows)
    with pytest.raises(OutOfFrames):
        memory.grow_steadily(going)
    assert going.lengths.tolist() == memory.tables.lengths[rows].tolist() == [3, 4, 8]
    memory.check_invariants()


def test_steady_growth_ends_at_the_last_page() -> None:
    memory = manager()
    going = steady_of(memory, start(memory, [10 * P - 1]))
    memory.grow_steadily(going)
    with pytest.raises(ValueError, match="10"):
        memory.grow_steadily(going)


def test_a_row_with_pages_in_swap_does_not_grow_steadily() -> None:
    memory = manager(slots=20)
    space = memory.create("sequence")
    space.grow(6)
    going = steady_of(memory, np.array([space.row], np.int32))
    memory.complete(memory.swap_out([space]).ticket)
    with pytest.raises(PageNotResident):
        memory.grow_steadily(going)


def test_page_edges_are_met_by_counting() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 30).astype(np.int32)
    edges = PageEdges(lengths, P)
    for more in range(3 * P):
        assert edges.at(lengths + more).tolist() == np.flatnonzero((lengths + more) % P == 0).tolist()
