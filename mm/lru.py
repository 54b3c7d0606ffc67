"""Owns the order in which unreferenced cached pages go: an active and an inactive list per tenant, and one for swap.

    first use ──▶ inactive ──second use──▶ active          A page is on a list only while nobody maps it. Those that
    reclaim ◀──── inactive ◀──demotion──── active          run are off the lists, so reclaim never has to skip them.
                                 │    ▲
                                 └────┘ second chance: used since the last look

* A page used once (computed, then released) waits on the inactive list; one pass over any number of one-time prompts
  moves through it and leaves the active list alone.
* A page used again is put on the active list when it is released next. If it is evicted all the same and comes back
  after fewer evictions than there are active pages, it would have stayed with their room: it goes straight to the
  active list (a refault, mm/refault.py), and an active page that nobody used lately makes room for it.
* Demotion: reclaim takes pages from the inactive list only. While that holds less than a quarter of both, the coldest
  active pages are demoted, except those used since the last look, which get a second chance.
* Cached pages that are in swap alone wait on the third list, in the order they came; the oldest goes first.

All lists live in two int32 arrays, so every operation is O(1) and nothing is allocated: node = page, and one sentinel
node per list. The newest page stands after the sentinel, the coldest before it.
"""

from collections.abc import Iterator
from enum import IntEnum

import numpy as np

from mm.addresses import ABSENT, BoolArray, IndexArray, Int32Array
from mm.tenants import MAX_TENANTS

ACTIVE_PER_INACTIVE = 3
"""Demotion begins when the active list is longer than this times the inactive list."""


class LruList(IntEnum):
    """The lists that each tenant has."""

    INACTIVE = 0
    ACTIVE = 1
    SWAPPED = 2


_SWAPPED = 2  # the same as a plain number, for where it is compared for every page


class PageLists:
    """`lists` doubly linked lists over `pages` pages; a page is on one list at most."""

    def __init__(self, pages: int, lists: int) -> None:
        nodes = np.arange(pages + lists, dtype=np.int32)  # a sentinel that points to itself is an empty list
        # Of each, a numpy array for batches and a memoryview of the same memory, which is twice as fast for one page.
        self._nexts, self._previouses = nodes.copy(), nodes
        self._next, self._previous = self._nexts.data, self._previouses.data
        self._lists_of_pages = np.full(pages, ABSENT, np.int32)
        self.on = self._lists_of_pages.data  # the list that each page is on, or ABSENT
        self.sizes = [0] * lists
        self._pages = pages

    def push(self, number: int, page: int) -> None:
        """Put a page that is on no list at the newest place of list `number`."""
        self._insert(number, page, self._pages + number)

    def push_all(self, number: int, pages: IndexArray) -> None:
        """`push` each of `pages` (N,), N > 0, in this order: the last of them is the newest."""
        sentinel = self._pages + number
        self._nexts[pages[1:]] = pages[:-1]
        self._previouses[pages[:-1]] = pages[1:]
        first, last, following = int(pages[0]), int(pages[-1]), self._next[sentinel]
        self._next[first], self._previous[following] = following, first
        self._next[sentinel], self._previous[last] = last, sentinel
        self._lists_of_pages[pages] = number
        self.sizes[number] += len(pages)

    def push_coldest(self, number: int, page: int) -> None:
        """Put a page that is on no list at the coldest place of list `number`."""
        self._insert(number, page, self._previous[self._pages + number])

    def _insert(self, number: int, page: int, after: int) -> None:
        assert self.on[page] == ABSENT
        following = self._next[after]
        self._next[after] = self._previous[following] = page
        self._previous[page], self._next[page] = after, following
        self.on[page] = number
        self.sizes[number] += 1

    def remove(self, page: int) -> None:
        """Take a page off the list it is on."""
        before, after = self._previous[page], self._next[page]
        self._next[before], self._previous[after] = after, before
        self.sizes[self.on[page]] -= 1
        self.on[page] = ABSENT

    def coldest(self, number: int) -> int:
        """The page that has waited longest on list `number`, or ABSENT."""
        page = self._previous[self._pages + number]
        return page if page < self._pages else ABSENT

    def walk(self, number: int) -> Iterator[int]:
        """All pages of a list, the coldest first: for audits and views. Ends where links go in a circle, too."""
        page = self._previous[self._pages + number]
        for _ in range(self._pages + 1):
            if page >= self._pages:
                return
            yield page
            page = self._previous[page]

    def members(self, number: int) -> list[int]:
        """The same, as they are now."""
        return list(self.walk(number))


class PageLru:
    """Active, inactive and swapped list of every tenant, over `pages` cached pages."""

    def __init__(self, pages: int) -> None:
        self.lists = PageLists(pages, MAX_TENANTS * len(LruList))
        self.actives: BoolArray = np.zeros(pages, np.bool_)  # used twice or more; also while it is mapped
        self.active = self.actives.data  # the same memory, for one page at a time
        self.referenced = np.zeros(pages, np.bool_).data  # used since it was last looked at
        self.active_pages = 0  # pages with `active` set
        self.idle_pages = 0  # on an active or inactive list: what reclaim could take
        self.activated = self.demoted = self.rotated = 0  # events since the start

    def size(self, tenant: int, kind: LruList) -> int:
        return self.lists.sizes[tenant * 3 + kind]

    def idle_of(self, tenant: int) -> int:
        return self.lists.sizes[tenant * 3] + self.lists.sizes[tenant * 3 + 1]

    def enter_active(self, page: int) -> None:
        """A page becomes cached, and is active from the start. (Every other one is not, and is on no list either.)"""
        self.active[page] = True
        self.active_pages += 1

    def leave(self, page: int) -> None:
        """A page stops being cached."""
        self.remove(page)
        if self.active[page]:
            self.active_pages -= 1
            self.active[page] = False
        self.referenced[page] = False

    def is_idle(self, page: int) -> bool:
        """Whether nobody maps the page and reclaim could take its frame."""
        number = self.lists.on[page]
        return number != ABSENT and number % 3 != LruList.SWAPPED

    def used(self, page: int) -> None:
        """A page is mapped by another Sequence: off the lists, and active from now on."""
        self.remove(page)
        self.referenced[page] = True
        if not self.active[page]:
            self.active[page] = True
            self.active_pages += 1
            self.activated += 1

    def rest(self, page: int, tenant: int, *, coldest: bool = False) -> None:
        """Nobody maps the page any more."""
        number = tenant * 3 + self.active[page]
        if coldest:
            self.lists.push_coldest(number, page)
        else:
            self.lists.push(number, page)
        self.idle_pages += 1

    def rest_all(self, pages: Int32Array, tenant: int) -> None:
        """`rest` each of `pages` (N,), in this order."""
        index, number = pages.astype(np.intp), tenant * 3
        active = self.actives[index]
        if np.count_nonzero(active):
            self.lists.push_all(number + 1, index[active])
            index = index[~active]
        if len(index):
            self.lists.push_all(number, index)
        self.idle_pages += len(pages)

    def rest_in_swap(self, page: int, tenant: int) -> None:
        """The page is in a swap slot alone, and no page table names it."""
        self.lists.push(tenant * 3 + LruList.SWAPPED, page)

    def remove(self, page: int) -> None:
        """Off whatever list it is on, if any."""
        number = self.lists.on[page]
        if number != ABSENT:
            self.lists.remove(page)
            if number % 3 != _SWAPPED:
                self.idle_pages -= 1

    def make_cold(self, page: int) -> None:
        """To the coldest place, and inactive: the next to go. Ignored for a page on no list or in swap alone."""
        number = self.lists.on[page]
        self.referenced[page] = False
        if self.active[page]:
            self.active[page] = False
            self.active_pages -= 1
        if number != ABSENT and number % 3 != LruList.SWAPPED:
            self.lists.remove(page)
            self.lists.push_coldest(number // 3 * 3, page)

    def victim(self, tenant: int) -> int:
        """The page of `tenant` that goes next, or ABSENT. It stays where it is."""
        inactive = tenant * 3
        sizes = self.lists.sizes
        if sizes[inactive + 1] > ACTIVE_PER_INACTIVE * sizes[inactive]:
            self.demote(tenant, sizes[inactive + 1] // (4 * (ACTIVE_PER_INACTIVE + 1)) + 1)
        return self.lists.coldest(inactive)

    def demote(self, tenant: int, count: int) -> None:
        """Move up to `count` of the coldest active pages to the inactive list; used ones get a second chance."""
        active = tenant * 3 + 1
        for _ in range(self.lists.sizes[active] + count):  # each turn demotes a page or takes its mark: amortised O(1)
            page = self.lists.coldest(active)
            if count == 0 or page == ABSENT:
                return
            self.lists.remove(page)
            if self.referenced[page]:
                self.referenced[page] = False
                self.lists.push(active, page)
                self.rotated += 1
                continue
            self.active[page] = False
            self.active_pages -= 1
            self.demoted += 1
            self.lists.push(active - 1, page)
            count -= 1
