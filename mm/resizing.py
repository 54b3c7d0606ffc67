"""Makes the pool and the swap area smaller or larger while they are in use, as memory of a machine is taken out.

Every array has a place for the most frames and slots that there may ever be. Those in use are the first ones, so it is
the end that goes or comes:

    0 ......................... usable ............ total
    free, mapped, idle, copying | closed: neither free nor held, no memory behind them

To go, a frame must be free. Idle cached pages beyond the new end are reclaimed like others. What is mapped there by a
Sequence is the caller's: it preempts those (`Beyond.rows`), who come back to other frames; what a pin or a copy holds
stands in the way.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mm.addresses import ABSENT, Int32Array, slot_entry
from mm.pins import PrefixPins

if TYPE_CHECKING:
    from mm.memory_manager import MemoryManager


@dataclass(frozen=True, slots=True)
class Beyond:
    """What lies beyond a new end."""

    rows: Int32Array  # (N,) that map frames or name slots there: their Sequences must let go
    pins: list[int]  # numbers of prefix pins with frames there
    is_copying: bool  # copies to or from there are under way: later there may be none


def beyond(memory: "MemoryManager", frames: int, slots: int) -> Beyond:
    """See `MemoryManager.beyond`."""
    tables, rows = memory.tables, memory.tables.rows_in_use()
    found = []
    for row in rows.tolist():
        entries = tables.mapped(row)
        if (entries >= frames).any() or (slot_entry(entries[entries < ABSENT]) >= slots).any():
            found.append(row)
    pins = [pin.number for pin in memory.pins.held.values() if (pin.frames >= frames).any()]
    copying = (memory.frames.pins[frames:] > 0).any() or (np.asarray(memory.swap.pins)[slots:] > 0).any()
    return Beyond(np.array(found, np.int32), pins, bool(copying))


def resize(memory: "MemoryManager", frames: int, slots: int) -> None:
    """See `MemoryManager.resize`."""
    if not 1 <= frames <= memory.frames.total or not 0 <= slots <= memory.swap.total:
        raise ValueError(f"{frames} frames and {slots} slots, of {memory.frames.total} and {memory.swap.total} at most")
    found = beyond(memory, frames, slots)
    if len(found.rows) or found.pins or found.is_copying:
        raise ValueError(f"rows {found.rows.tolist()} or pins {found.pins} hold what is to go, or copies are under way")
    before = memory.frames.usable
    if slots < memory.swap.usable:
        _empty_slots(memory, slots)
    if frames < before:
        _empty_frames(memory, frames)
        memory.frames.close(frames)
    elif frames > before:
        memory.frames.open(frames)
    if slots != memory.swap.usable:
        memory.swap.resize(slots)
    memory.ledger.total_frames = frames
    memory.reclaimer.rescale()
    memory.pins.quota, memory.pins.limit = PrefixPins.shares_of(frames)


def _empty_frames(memory: "MemoryManager", first: int) -> None:
    """Reclaim the idle cached pages in frames from `first` on."""
    entries = memory.cache.entries_of_frames[first : memory.frames.usable]
    for entry in entries[entries != ABSENT].tolist():
        memory.residency.reclaim(entry, memory.now, "resize")


def _empty_slots(memory: "MemoryManager", first: int) -> None:
    """Free the slots from `first` on: cached pages that are nowhere else are lost, others are not clean any more."""
    swap, residency = memory.swap, memory.residency
    for slot in range(first, swap.opened):
        entry, twin = swap.entry[slot], swap.twin[slot]
        if twin == ABSENT:
            if entry != ABSENT:
                residency.evict(entry, memory.now, "resize")
            continue
        if entry != ABSENT:
            memory.cache.slot[entry] = ABSENT
            swap.entry[slot] = ABSENT
        residency.unlink(twin)  # which frees the slot: nothing else holds it
