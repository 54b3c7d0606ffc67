"""Recounts all of memory from the ground up and lists every discrepancy: the page tables, the cache, the lists, the
swap map, the pins and the copies in flight are read, and every count and flag that is kept is compared with them.

It costs as much as memory is large, 0.1 s and more for a large pool whose pages are all cached: for tests after each
operation, for an idle engine, and for operators. So others can be let in between: `look_through` says None where it
has run for some milliseconds at most.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from mm.addresses import ABSENT, BoolArray, Int32Array, Int64Array, pages_for, slot_entry
from mm.lru import LruList

if TYPE_CHECKING:
    from mm.memory_manager import MemoryManager

MOST = 100
"""Discrepancies of one kind that are listed."""

ROWS_AT_ONCE, ENTRIES_AT_ONCE = 16, 1024
"""That are looked at, one by one, from one stop to the next."""


def look_through(memory: "MemoryManager") -> Iterator[str | None]:
    """Every discrepancy in words, with the last owner of the frame where it is about one; None at each stop.

    Memory must stay as it is to the end: who goes on after it has changed sees discrepancies that are none.
    """
    for part in (_page_tables, _frames, _slots, _cache, _lists, _pins, _tenants, _publisher, _promises):
        yield from part(memory)
        yield None


def _differences(memory: "MemoryManager", kept: Int32Array, counted: Int32Array, words: str) -> Iterator[str]:
    """A line for each frame whose kept number is not the counted one; `words` has a place for either."""
    for frame in np.flatnonzero(kept != counted)[:MOST].tolist():
        yield f"frame {frame}{_last_owner(memory, frame)}: " + words.format(kept[frame], counted[frame])


def _last_owner(memory: "MemoryManager", frame: int) -> str:
    owner = memory.last_owner(frame)
    return f" (last of {owner})" if owner else ""


def _page_tables(memory: "MemoryManager") -> Iterator[str | None]:
    """Invariants 4 and 6: what each row's entries may say."""
    tables, leaving = memory.tables, _leaving_per_row(memory)
    for row, owner in enumerate(tables.owners):
        if row % ROWS_AT_ONCE == 0:
            yield None
        pages = pages_for(int(tables.lengths[row]), memory.page_size)
        mapped = tables.entries[row, :pages]
        frames, slots = mapped[mapped >= 0], slot_entry(mapped[mapped < ABSENT])
        if owner is None and tables.lengths[row]:
            yield f"row {row} belongs to nobody and has {tables.lengths[row]} positions"
        if (mapped == ABSENT).any() or (frames >= memory.frames.total).any() or (slots >= memory.swap.total).any():
            yield f"row {row} ({owner}): a page is nowhere among {mapped.tolist()}"
        if len(np.unique(mapped)) < pages:
            yield f"row {row} ({owner}): a page stands twice in {mapped.tolist()}"
        if (tables.entries[row, pages:] != ABSENT).any():
            yield f"row {row} ({owner}): an entry past its {pages} pages"
        if pages * memory.page_size > tables.lengths[row] and mapped[-1] >= 0 and not tables.exposed[row]:
            last = mapped[-1]
            if memory.frames.references[last] > 1 or memory.frames.sealed[last]:
                yield f"row {row} ({owner}) would write into frame {last}, which is not its own"
        if tables.barred[row] != len(slots) + leaving[row]:
            yield f"row {row} ({owner}): barred {tables.barred[row]}, {len(slots)} in swap, {leaving[row]} leaving"


def _leaving_per_row(memory: "MemoryManager") -> Int32Array:
    counted = np.zeros(memory.tables.max_rows, np.int32)
    for transfer in memory.swapper.in_flight.values():
        if (leaving := transfer.leaving) is not None:
            current = memory.tables.epochs[leaving.rows] == leaving.epochs
            np.add.at(counted, leaving.rows[current], 1)
    for hold in memory.holds.held.values():
        if hold.fills and memory.tables.epochs[hold.row] == hold.epoch:
            counted[hold.row] += len(hold.entries)
    return counted


def _entries_in_use(memory: "MemoryManager") -> Int32Array:
    tables = memory.tables
    return np.concatenate([tables.mapped(row) for row in range(tables.max_rows)])


def _frames(memory: "MemoryManager") -> Iterator[str | None]:
    """Invariants 1, 2 and 4: every reference, and the free list."""
    frames, entries = memory.frames, _entries_in_use(memory)
    named = entries[(entries >= 0) & (entries < frames.total)]
    held_by_pins = [pin.frames for pin in memory.pins.held.values()]
    counted = np.bincount(np.concatenate((named, *held_by_pins)), minlength=frames.total)
    yield from _differences(memory, frames.references, counted.astype(np.int32), "{} references, {} holders")
    mapped = int(np.count_nonzero(counted))
    if (frames.mapped, frames.saved) != (mapped, int(counted.sum()) - mapped):
        yield f"{frames.mapped} frames mapped and {frames.saved} saved, counted {mapped} and {counted.sum() - mapped}"
    free = frames.free_list
    if len(np.unique(free)) < len(free):
        yield "a frame stands twice in the free list"
    is_free = np.zeros(frames.total, np.bool_)
    is_free[free] = True
    held = (frames.references > 0) | (frames.pins > 0) | (memory.cache.entries_of_frames != ABSENT)
    closed = np.arange(frames.total) >= frames.usable
    for frame in np.flatnonzero(closed & (held | is_free))[:MOST].tolist():
        yield f"frame {frame} is closed, and free or held"
    held |= closed
    for frame in np.flatnonzero(is_free == held)[:MOST].tolist():
        state = "free and held" if is_free[frame] else "neither free nor held: leaked"
        yield f"frame {frame}{_last_owner(memory, frame)} is {state}"
    sealed = (memory.cache.entries_of_frames != ABSENT) | (memory.swap.slots_of_frames != ABSENT)
    for frame in np.flatnonzero(frames.sealed != sealed)[:MOST].tolist():
        yield f"frame {frame}{_last_owner(memory, frame)}: sealed {frames.sealed[frame]}, should be {sealed[frame]}"


def _slots(memory: "MemoryManager") -> Iterator[str | None]:
    """Invariants 8 and 9: every reference to a slot, the twins, and the free list."""
    swap, entries = memory.swap, _entries_in_use(memory)
    slots = slot_entry(entries[entries < ABSENT])
    counted = np.bincount(slots[slots < swap.total], minlength=swap.total)
    kept = np.asarray(swap.references)
    for slot in np.flatnonzero(kept != counted)[:MOST].tolist():
        yield f"slot {slot}: {kept[slot]} references, {counted[slot]} holders"
    if swap.sequence_slots != np.count_nonzero(counted):
        yield f"{swap.sequence_slots} slots of Sequences, counted {np.count_nonzero(counted)}"
    promised = sum(len(t.orders.out_slots) for t in memory.swapper.in_flight.values() if t.leaving is not None)
    if swap.promised_slots != promised:
        yield f"{swap.promised_slots} slots promised, counted {promised}"
    twins, cached = np.asarray(swap.twin), np.asarray(swap.entry)
    for slot in np.flatnonzero((twins != ABSENT) & (swap.slots_of_frames[twins] != np.arange(swap.total)))[
        :MOST
    ].tolist():
        yield f"slot {slot}: its twin, frame {twins[slot]}, names slot {swap.slot_of_frame[twins[slot]]}"
    of_entries = np.flatnonzero(cached != ABSENT)
    entries = cached[of_entries]
    for slot in of_entries[memory.cache.slots[entries] != of_entries][:MOST].tolist():
        yield f"slot {slot}: its entry {cached[slot]} names slot {memory.cache.slot[cached[slot]]}"
    for slot in of_entries[memory.cache.frames[entries] != twins[of_entries]][:MOST].tolist():
        frame = memory.cache.frame[cached[slot]]
        yield f"slot {slot}: twin {twins[slot]}, but its entry {cached[slot]} is in frame {frame}"
    linked = np.flatnonzero(swap.slots_of_frames != ABSENT)
    for frame in linked[twins[swap.slots_of_frames[linked]] != linked][:MOST].tolist():
        yield f"frame {frame}: its slot {swap.slot_of_frame[frame]} does not name it"
    is_held = _is_slot_held(memory)
    free = swap.free_list
    if len(np.unique(free)) < len(free):
        yield "a slot stands twice in the free list"
    is_free = np.zeros(swap.total, np.bool_)
    is_free[free] = True
    for slot in np.flatnonzero(is_free[: swap.opened] == is_held[: swap.opened])[:MOST].tolist():
        yield f"slot {slot} is {'free and held' if is_free[slot] else 'neither free nor held: leaked'}"


def _is_slot_held(memory: "MemoryManager") -> BoolArray:
    swap = memory.swap
    held: BoolArray = np.asarray(swap.references) > 0
    held |= np.asarray(swap.pins) > 0
    held |= np.asarray(swap.entry) != ABSENT
    held |= np.asarray(swap.twin) != ABSENT
    return held


def _cache(memory: "MemoryManager") -> Iterator[str | None]:
    """Invariant 10: an entry is in the index, its place names it, and the numbers agree."""
    cache, swap = memory.cache, memory.swap
    used = np.flatnonzero(cache.in_use())
    if len(used) != len(cache.index):
        yield f"{len(used)} entries in use, {len(cache.index)} in the index"
    for first in range(0, len(used), ENTRIES_AT_ONCE):
        yield None
        for entry in used[first : first + ENTRIES_AT_ONCE].tolist():
            key = cache.keys[entry]
            if key is None or cache.index.get(key) != entry:
                yield f"entry {entry} is not in the index under its key"
            if len(cache.content[entry]) != 4 * memory.page_size:
                yield f"entry {entry} has {len(cache.content[entry])} bytes of content"
    yield None
    frames, slots = cache.frames[used], cache.slots[used]
    for entry in used[(frames == ABSENT) & (slots == ABSENT)][:MOST].tolist():
        yield f"entry {entry} is nowhere"
    for entry in used[(frames != ABSENT) & (cache.entries_of_frames[frames] != used)][:MOST].tolist():
        frame = cache.frame[entry]
        yield f"entry {entry}: its frame {frame} names entry {cache.entry_of_frame[frame]}"
    swapped = used[slots != ABSENT]
    for entry in swapped[np.asarray(swap.entry)[cache.slots[swapped]] != swapped][:MOST].tolist():
        yield f"entry {entry}: its slot {cache.slot[entry]} names entry {swap.entry[cache.slot[entry]]}"
    yield None
    named = np.flatnonzero(cache.entries_of_frames != ABSENT)
    entries = cache.entries_of_frames[named]
    for frame in named[cache.frames[entries] != named][:MOST].tolist():
        yield f"frame {frame}: its entry {cache.entry_of_frame[frame]} does not name it"
    for frame in named[swap.slots_of_frames[named] != cache.slots[entries]][:MOST].tolist():
        entry = cache.entry_of_frame[frame]
        yield f"frame {frame}: twin {swap.slot_of_frame[frame]}, but its entry {entry} has another slot"
    yield None
    yield from cache.discrepancies(ENTRIES_AT_ONCE, MOST)


def _lists(memory: "MemoryManager") -> Iterator[str | None]:
    """A page is on the list that its state says, and on no other."""
    lists, swap = memory.lru.lists, memory.swap
    should, on = _lists_by_state(memory), np.full(memory.cache.capacity, ABSENT, np.int32)
    walked = on.data
    for number in range(len(memory.tenants.names) * len(LruList)):
        count = 0
        for count, page in enumerate(lists.walk(number), 1):
            walked[page] = number
            if count % ENTRIES_AT_ONCE == 0:
                yield None
        if count != lists.sizes[number]:
            yield f"list {number} has {count} pages, counted {lists.sizes[number]}"
    marked = np.asarray(lists.on)
    for entry in np.flatnonzero((should != on) | (should != marked))[:MOST].tolist():
        yield (
            f"entry {entry} should be on list {should[entry]}, stands on {on[entry]}, and is marked {marked[entry]} "
            f"({ABSENT}: none)"
        )
    idle = int(np.count_nonzero((should != ABSENT) & (should % len(LruList) != LruList.SWAPPED)))
    if idle != memory.lru.idle_pages:
        yield f"{memory.lru.idle_pages} idle pages, counted {idle}"
    active = int(np.count_nonzero(memory.lru.actives[memory.cache.in_use()]))
    if active != memory.lru.active_pages or active != np.count_nonzero(memory.lru.actives):
        yield f"{memory.lru.active_pages} active pages, counted {active}"
    is_clean = (np.asarray(swap.twin) >= 0) & (np.asarray(swap.references) == 0) & (np.asarray(swap.pins) == 0)
    listed = sorted(swap.clean.members(0))
    if np.flatnonzero(is_clean).tolist() != listed or len(listed) != swap.clean.sizes[0]:
        yield f"clean slots are {np.flatnonzero(is_clean).tolist()}, the list has {listed} ({swap.clean.sizes[0]})"


def _lists_by_state(memory: "MemoryManager") -> Int32Array:
    """(capacity,) the list that each cached page should be on; ABSENT: none."""
    cache, swap, frames = memory.cache, memory.swap, memory.frames
    should: Int32Array = np.full(cache.capacity, ABSENT, np.int32)
    used = np.flatnonzero(cache.in_use())
    is_resident = cache.frames[used] != ABSENT
    entries = used[is_resident]
    places = cache.frames[entries]
    idle = (frames.references[places] == 0) & (frames.pins[places] == 0)
    entries, places = entries[idle], places[idle]
    should[entries] = memory.tenants.of_frame[places] * len(LruList) + memory.lru.actives[entries]
    entries = used[~is_resident]
    places = cache.slots[entries]
    idle = (np.asarray(swap.references)[places] == 0) & (np.asarray(swap.pins)[places] == 0)
    entries, places = entries[idle], places[idle]
    should[entries] = memory.tenants.of_slot[places] * len(LruList) + LruList.SWAPPED
    return should


def _pins(memory: "MemoryManager") -> Iterator[str | None]:
    """Invariant 7: pins are exactly the places of the copies in flight."""
    frames = np.zeros(memory.frames.total, np.int32)
    slots = np.zeros(memory.swap.total, np.int32)
    arriving = 0
    for transfer in memory.swapper.in_flight.values():
        orders = transfer.orders
        arriving += len(orders.out_frames)
        for places, counted in ((orders.out_frames, frames), (orders.in_frames, frames)):
            np.add.at(counted, places, 1)
        for places, counted in ((orders.out_slots, slots), (orders.in_slots, slots)):
            np.add.at(counted, places, 1)
    for hold in memory.holds.held.values():
        np.add.at(frames, hold.frames, 1)
        np.add.at(slots, hold.slots, 1)
    yield from _differences(memory, memory.frames.pins, frames, "{} pins, {} copies in flight")
    for slot in np.flatnonzero(np.asarray(memory.swap.pins) != slots)[:MOST].tolist():
        yield f"slot {slot}: {memory.swap.pins[slot]} pins, {slots[slot]} copies in flight"
    if arriving != memory.arriving_frames:
        yield f"{memory.arriving_frames} frames arriving, counted {arriving}"


def _tenants(memory: "MemoryManager") -> Iterator[str | None]:
    """Invariant 11: every held frame is charged once, a mapped one to a tenant that maps it."""
    tenants, frames = memory.tenants, memory.frames
    count = len(tenants.names)
    held = np.arange(frames.total) < frames.usable
    held[frames.free_list] = False
    usage = np.bincount(tenants.of_frame[held], minlength=count)
    used = np.arange(memory.swap.total) < memory.swap.opened
    used[memory.swap.free_list] = False
    swap_usage = np.bincount(tenants.of_slot[used], minlength=count)
    for tenant, name in enumerate(tenants.names):
        if usage[tenant] != tenants.usage[tenant]:
            yield f"tenant {name} is charged {tenants.usage[tenant]} frames, counted {usage[tenant]}"
        if swap_usage[tenant] != tenants.swap_usage[tenant]:
            yield f"tenant {name} is charged {tenants.swap_usage[tenant]} slots, counted {swap_usage[tenant]}"
    yield None
    mapped, tenants_of, references = _references_by_tenant(memory, count)
    is_home = tenants.of_frame[mapped] == tenants_of
    for frame in np.setdiff1d(np.flatnonzero(frames.references > 0), mapped[is_home])[:MOST].tolist():
        yield f"frame {frame} is charged to {tenants.names[tenants.of_frame[frame]]}, who does not map it"
    foreign: dict[int, dict[int, int]] = {}
    abroad = ~is_home
    for frame, tenant, times in zip(
        mapped[abroad].tolist(), tenants_of[abroad].tolist(), references[abroad].tolist(), strict=True
    ):
        foreign.setdefault(frame, {})[tenant] = times
    if foreign != tenants.foreign:
        yield f"foreign references are {tenants.foreign}, counted {foreign}"
    if set(np.flatnonzero(tenants.has_foreign).tolist()) != foreign.keys():
        yield f"frames marked foreign are {np.flatnonzero(tenants.has_foreign).tolist()}, counted {sorted(foreign)}"


def _references_by_tenant(memory: "MemoryManager", count: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """(N,) each: frames, tenants that have references to them, how many. A row has one of a frame."""
    tables, keys = memory.tables, [np.empty(0, np.int64)]
    for row in tables.rows_in_use().tolist():
        entries = tables.mapped(row).astype(np.int64)
        keys.append(entries[entries >= 0] * count + int(tables.tenants[row]))
    keys += [pin.frames.astype(np.int64) * count + memory.tenants.id(pin.tenant) for pin in memory.pins.held.values()]
    found, references = np.unique(np.concatenate(keys), return_counts=True)
    frames, tenants = np.divmod(found, count)
    return frames, tenants, references


def _promises(memory: "MemoryManager") -> Iterator[str | None]:
    """What is committed and pinned adds up."""
    if memory.ledger.committed != memory.ledger.charges.sum():
        yield f"{memory.ledger.committed} frames committed, counted {memory.ledger.charges.sum()}"
    pinned = sum(len(pin.frames) for pin in memory.pins.held.values())
    if memory.pins.pages != pinned:
        yield f"{memory.pins.pages} pages pinned, counted {pinned}"
    for row, owner in enumerate(memory.tables.owners):
        if owner is None and (memory.ledger.charges[row] or memory.scorer.adjustments[row] or memory.tables.cold[row]):
            yield f"row {row} belongs to nobody and has a charge, a score or a mark"


def _publisher(memory: "MemoryManager") -> Iterator[str | None]:
    """Every page being written has a writer that lives."""
    tables = memory.tables
    yield from (
        f"a page is being written by row {writer.row} of {writer.owner}, who is gone"
        for writer in memory.publisher.writing.values()
        if tables.epochs[writer.row] != writer.epoch or tables.owners[writer.row] is None
    )
