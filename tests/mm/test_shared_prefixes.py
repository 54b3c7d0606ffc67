"""Which rows begin with the same frames."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mm import MemoryManager, SharedPrefixes
from mm.shared_prefixes import find_shared_prefixes


def found(tables: list[list[int]], full: list[int] | None = None) -> list[tuple[list[int], int]]:
    """(members, pages) of the groups among rows with these tables; all pages are full unless `full` says otherwise."""
    width = max(map(len, tables)) + 1
    entries = np.full((len(tables), width), -1, np.int32)
    references = np.zeros(1000, np.int32)
    for row, frames in enumerate(tables):
        entries[row, : len(frames)] = frames
        references[frames] += 1
    lengths = np.array([len(frames) for frames in tables] if full is None else full, np.int32)
    return groups_of(find_shared_prefixes(entries, references, np.arange(len(tables), dtype=np.int32), lengths))


def groups_of(shared: SharedPrefixes | None) -> list[tuple[list[int], int]]:
    if shared is None:
        return []
    bounds = pairwise(shared.starts.tolist())
    return [(shared.members[a:b].tolist(), p) for (a, b), p in zip(bounds, shared.pages.tolist(), strict=True)]


def test_no_shared_frame_no_group() -> None:
    assert found([[1, 2], [3, 4], [5]]) == []


def test_equal_beginnings_are_a_group() -> None:
    assert found([[1, 2, 3], [9], [1, 2, 4], [1, 2]]) == [([0, 2, 3], 2)]


def test_a_page_that_is_not_full_is_not_shared() -> None:
    """The last page of a fork: who writes to it first gets a copy."""
    assert found([[1, 2], [1, 2]], full=[1, 2]) == [([0, 1], 1)]
    assert found([[1], [1]], full=[0, 0]) == []


def test_equal_frames_behind_different_ones_do_not_count() -> None:
    """Prefixes only: such a page was computed after another history, or found by the same key after a copy."""
    assert found([[1, 2, 3], [1, 4, 3]]) == [([0, 1], 1)]


def test_of_nested_sharing_the_level_that_saves_most_is_chosen() -> None:
    system = [1]
    assert found([[*system, 2, 3], [*system, 2, 3], [*system, 4, 5], [*system, 4, 5]]) == [([0, 1], 3), ([2, 3], 3)]
    system = [1, 6, 7]
    assert found([[*system, 2], [*system, 2], [*system, 4], [*system, 4]]) == [([0, 1, 2, 3], 3)]


def test_long_prefixes_are_compared_to_their_end() -> None:
    long = list(range(100, 200))
    assert found([[*long, 1], [*long, 2], [*long[:40], 3]], full=[101, 101, 41]) == [([0, 1], 100)]
    assert found([long, long, long], full=[32, 33, 64]) == [([0, 1, 2], 32)]


def test_groups_outlive_members_that_leave() -> None:
    """Two of a group are enough, one is none; the others move to their new places."""
    shared = SharedPrefixes(*(np.array(part, np.int32) for part in ([4, 0, 2, 1, 3, 5], [0, 3, 5, 6], [7, 8, 9])))
    gone = np.array([0, -1, 1, 2, 3, 4], np.int32)
    assert groups_of(shared.moved(gone)) == [([3, 0, 1], 7)]
    assert shared.moved(np.array([0, -1, -1, 1, -1, 2], np.int32)) is None


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=6), st.integers(0, 6)), min_size=1, max_size=12)
)
def test_groups_are_disjoint_and_share_what_they_say(rows: list[tuple[list[int], int]]) -> None:
    """Tables of a tree: a row's frame at depth d is named by its path to there. No better single page is missed."""
    names: dict[tuple[int, ...], int] = {}
    tables = [[names.setdefault(tuple(path[: d + 1]), len(names)) for d in range(len(path))] for path, _ in rows]
    full = [min(f, len(path)) for path, f in rows]
    groups = found(tables, full)
    members = [member for group, _ in groups for member in group]
    assert len(set(members)) == len(members)
    saved = 0
    for group, pages in groups:
        assert len(group) > 1
        assert pages <= min(full[m] for m in group)
        assert len({tuple(tables[m][:pages]) for m in group}) == 1
        saved += (len(group) - 1) * pages
    for depth in range(1, 3):  # every level of sharing that is looked at could have been chosen
        first = [m for m in range(len(rows)) if full[m] >= depth and tables[m][:depth] == tables[0][:depth]]
        if depth == 1 and len(first) > 1 and full[0] >= 1:
            assert saved >= len(first) - 1


def test_forks_share_what_is_full() -> None:
    """Through the memory manager: the page that both may still write to is not named."""
    memory = MemoryManager(frames=20, max_rows=4, max_pages=8, page_size=4)
    space = memory.create("a")
    rows = np.array([space.row], np.int32)
    memory.grow(rows, np.array([10], np.int32))
    child, _ = memory.fork(space, "b")
    rows = np.array([child.row, space.row], np.int32)
    assert groups_of(memory.shared_prefixes(rows, memory.tables.lengths[rows])) == [([0, 1], 2)]
    child.release()
    rows = rows[1:]
    assert memory.shared_prefixes(rows, memory.tables.lengths[rows]) is None
