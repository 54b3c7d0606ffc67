"""Finds which rows begin with the same frames: what attention may read once for all of them.

Rows share frames because they were forked from one another, or because the page cache gave them the same prefix. The
frames alone say so: nothing about prompts or requests is looked at. Sharing nests (a system prompt of all, and the
prompts of some); one level of it is chosen for each row, so that most pages are saved:

    rows 0 1 2 3    A B . .                      level 0: {0 1 2 3} share 1 page, saves 3
                    A B C .     A C D .          level 1: {0 1}, {2 3} share 2 and 3 pages, saves 2 + 3: chosen

Costs some 10 numpy operations a level and 32 pages; nothing where no first page is shared.
"""

from dataclasses import dataclass

import numpy as np

from mm.addresses import Int32Array, Int64Array

LEVELS = 3  # of nested sharing that are looked at
COLUMNS = 32  # pages that are compared at a time


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """N groups of rows, each with the number of pages that its members' page tables have in common at their beginning.

    All these pages are full and stay as they are while the rows do. An object belongs to one list of rows.
    """

    members: Int32Array  # (M,) places in the list of rows, group after group; each stands in one group at most
    starts: Int32Array  # (N + 1,) where each group's members begin
    pages: Int32Array  # (N,) at least 1

    def moved(self, places: Int32Array) -> "SharedPrefixes | None":
        """The groups that are left in another list of rows: places[i] is the new place of row i, -1 if it is gone."""
        members = places[self.members]
        is_left = members >= 0
        sizes = np.add.reduceat(is_left, self.starts[:-1], dtype=np.int32)
        keep = sizes > 1
        if not keep.any():
            return None
        members = members[is_left & np.repeat(keep, np.diff(self.starts))]
        starts = np.append(0, np.cumsum(sizes[keep])).astype(np.int32)
        return SharedPrefixes(members, starts, self.pages[keep])


@dataclass(slots=True)
class _Level:
    """The classes of rows that share at least one page more than the level before knows; two rows or more each."""

    places: Int32Array  # of their members, class after class
    starts: Int64Array  # (C + 1,)
    parents: Int64Array  # (C,) classes of the level before
    shared: Int64Array  # (C,) pages

    @property
    def saved(self) -> Int64Array:
        """(C,) page reads less, if a class reads what it shares once."""
        return (np.diff(self.starts) - 1) * self.shared


def find_shared_prefixes(
    entries: Int32Array, references: Int32Array, rows: Int32Array, full_pages: Int32Array
) -> SharedPrefixes | None:
    """Groups among `rows` (S,) of the page tables `entries`; None if there are none.

    references: of each frame; full_pages (S,): leading pages of each row that are full, all of them in frames.
    """
    if len(rows) < 2:
        return None
    places = (full_pages > 0).nonzero()[0].astype(np.int32)
    places = places[references[entries[rows[places], 0]] > 1]
    levels: list[_Level] = []
    keys = entries[rows[places], 0].astype(np.int64)
    parents = np.zeros(len(places), np.int64)
    while len(places) > 1 and len(levels) < LEVELS:
        level = _classes(places, keys, parents)
        if not len(level.parents):
            break
        level.shared = _common_pages(entries, rows[level.places], full_pages[level.places], level.starts)
        levels.append(level)
        # who goes on: rows with a page behind what their class shares
        parents = np.repeat(np.arange(len(level.parents)), np.diff(level.starts))
        goes_on = full_pages[level.places] > level.shared[parents]
        places, parents = level.places[goes_on], parents[goes_on]
        keys = entries[rows[places], level.shared[parents]].astype(np.int64)
    return _best(levels) if levels else None


def _classes(places: Int32Array, keys: Int64Array, parents: Int64Array) -> _Level:
    """Rows with the same key and parent, where there are two or more."""
    order = np.lexsort((keys, parents))
    places, keys, parents = places[order], keys[order], parents[order]
    is_first = np.ones(len(places), np.bool_)
    is_first[1:] = (keys[1:] != keys[:-1]) | (parents[1:] != parents[:-1])
    firsts = np.flatnonzero(is_first)
    sizes = np.diff(np.append(firsts, len(places)))
    keep = sizes > 1
    members = np.repeat(keep, sizes)
    starts = np.append(0, np.cumsum(sizes[keep]))
    return _Level(places[members], starts, parents[firsts[keep]], np.zeros(len(starts) - 1, np.int64))


def _common_pages(entries: Int32Array, rows: Int32Array, full: Int32Array, starts: Int64Array) -> Int64Array:
    """(C,) how many leading entries all rows of each class have in common, of their full pages."""
    common = np.zeros(len(starts) - 1, np.int64)
    going = np.arange(len(common))  # classes that agree so far
    for first in range(0, int(full.max()), COLUMNS):
        sizes = starts[going + 1] - starts[going]
        begins = np.cumsum(sizes) - sizes
        members = np.repeat(starts[going] - begins, sizes) + np.arange(int(sizes.sum()))
        table = entries[rows[members], first : first + COLUMNS]
        differs = table != np.repeat(table[begins], sizes, axis=0)
        differs |= np.arange(first, first + table.shape[1]) >= full[members, None]
        agreed = np.where(differs.any(axis=1), differs.argmax(axis=1), table.shape[1])
        of_class = np.minimum.reduceat(agreed, begins)
        common[going] += of_class
        going = going[of_class == COLUMNS]
        if not len(going):
            break
    return common


def _best(levels: list[_Level]) -> SharedPrefixes:
    """The classes, of all levels but disjoint, that save most."""
    best = [level.saved for level in levels]
    for i in range(len(levels) - 1, 0, -1):
        below = np.zeros(len(best[i - 1]), np.int64)
        np.add.at(below, levels[i].parents, best[i])
        best[i - 1] = np.maximum(best[i - 1], below)
    members: list[Int32Array] = []
    pages: list[int] = []
    taken = np.zeros(1, np.bool_)  # classes of the level before that were chosen, or lie in one that was
    for i, level in enumerate(levels):
        is_in_taken = taken[level.parents] if i else np.zeros(len(level.parents), np.bool_)
        chosen = ~is_in_taken & (level.saved == best[i])
        for c in np.flatnonzero(chosen).tolist():
            members.append(level.places[level.starts[c] : level.starts[c + 1]])
            pages.append(int(level.shared[c]))
        taken = is_in_taken | chosen
    starts = np.cumsum([0, *map(len, members)]).astype(np.int32)
    return SharedPrefixes(np.concatenate(members), starts, np.array(pages, np.int32))
