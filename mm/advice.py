"""Carries out hints, as madvise takes them: on the pages of one address space, or on a cached prefix.

            an address space                                   a cached prefix
WILLNEED    is brought in now                                  is brought in now
COLD        its cached pages go first once it has ended        its idle pages go first
PAGEOUT     its exclusive pages are ordered out; it must not   its idle pages are ordered out, or dropped where they
            run then                                           are clean or no slot can be had
DONTNEED    nothing of it is kept, now or at its end           what nobody maps is forgotten
"""

from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from mm.addresses import ABSENT
from mm.content import ContentChain
from mm.lru import LruList
from mm.page_copies import SwapOrders

if TYPE_CHECKING:
    from mm.memory_manager import MemoryManager


class Advice(StrEnum):
    WILLNEED = "willneed"
    COLD = "cold"
    PAGEOUT = "pageout"
    DONTNEED = "dontneed"


def advise_space(memory: "MemoryManager", row: int, advice: Advice) -> SwapOrders:
    """For one address space. Raises OutOfFrames (WILLNEED), OutOfSwapSlots (PAGEOUT); then nothing has changed."""
    rows = np.array([row], np.int32)
    match advice:
        case Advice.WILLNEED:
            orders = memory.swapper.swap_in(row, memory.now, memory.tables.owners[row] or "")
            memory.tables.cold[row] = False
            return orders
        case Advice.PAGEOUT:
            return memory.swapper.swap_out(rows, memory.now)
        case Advice.COLD:
            memory.tables.cold[row] = True
        case Advice.DONTNEED:
            memory.publisher.end(row)
            entries = memory.cache.entries_of_frames[memory.swapper.exclusive_to_each(rows)[2]]
            for entry in entries[entries != ABSENT].tolist():
                memory.residency.uncache(entry)
    return SwapOrders()


def advise_prefix(memory: "MemoryManager", chain: ContentChain, advice: Advice) -> SwapOrders:
    """For the cached pages that `chain` begins with. Raises OutOfFrames (WILLNEED), and then nothing has changed."""
    entries = memory.cache.walk(chain, chain.tokens // memory.page_size)
    match advice:
        case Advice.WILLNEED:
            return memory.swapper.swap_in_cached(entries, memory.now, "advice")
        case Advice.COLD:
            for entry in entries:
                memory.lru.make_cold(entry)  # one by one before all others, so the last page goes first
        case Advice.PAGEOUT:
            idle = [entry for entry in reversed(entries) if memory.lru.is_idle(entry)]  # the last page is the coldest
            for entry in idle:
                memory.lru.remove(entry)
            return memory.swapper.swap_out_cached(idle, memory.now, "advice")
        case Advice.DONTNEED:
            for entry in reversed(entries):
                if memory.lru.lists.on[entry] != ABSENT:
                    memory.residency.uncache(entry)
    return SwapOrders()


def drop_caches(memory: "MemoryManager") -> int:
    """Forget every cached page that nobody maps and no copy holds. Returns how many."""
    pages = [
        entry
        for number in range(len(memory.tenants.names) * len(LruList))
        for entry in memory.lru.lists.members(number)
    ]
    for entry in pages:
        memory.residency.uncache(entry)
    return len(pages)
