"""Moves pages between frames and swap slots: which, in what order, and what a copy that ended means.

    swap_out    the pages that only the given rows map, and idle cached pages; entries change when the copy is complete
    swap_in     the pages of one row that are in swap, and cached pages that somebody will want
    complete    page table entries change, frames become free, pages come back
    fail        everything is as before the order: a page table entry never names a place that the page is not in. What
                was cached in swap alone and could not be read is cached no more

A row with pages in swap or in a copy is *barred*: it must not run (`PageTables.barred` counts those pages). Whatever
may happen to it meanwhile (release, truncate, fork) is safe: an entry is changed only if it still says what it said.

    entry says frame f, f is dirty   copy f to a slot; complete: entry := slot, f freed
    entry says frame f, f is clean   entry := its slot at once, f freed, nothing is copied
    entry says slot s, s has a twin  entry := the twin at once (a minor fault)
    entry says slot s                copy s to a new frame; complete: entry := frame; a full page stays clean
    entry says slot s, s is coming   join the copy that another row has ordered

After a copy that failed nothing is copied out for a second, after the next one for two, and so on up to a minute; one
that succeeds ends that. Meanwhile victims are computed again, and dirty cached pages dropped: each try costs its
Sequence time.
"""

from dataclasses import dataclass, field

import numpy as np

from mm.addresses import ABSENT, Int32Array, Int64Array, slot_entry
from mm.errors import OutOfSwapSlots
from mm.flight_recorder import EventKind
from mm.lru import LruList
from mm.page_copies import SwapOrders
from mm.page_table import PageTables
from mm.reclaim import Reclaimer
from mm.residency import Residency

FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0
"""How long nothing is copied out after a copy that failed: it doubles."""


@dataclass(frozen=True, slots=True)
class _Leaving:
    """Page table entries to change when a swap-out ends, if the row is still in its epoch and the entry the same."""

    rows: Int32Array
    pages: Int32Array
    epochs: Int64Array
    frames: Int32Array


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A page table entry to change when a swap-in ends, on the same conditions."""

    row: int
    page: int
    epoch: int
    slot: int


@dataclass(slots=True)
class Transfer:
    """One order in flight."""

    orders: SwapOrders
    leaving: _Leaving | None = None
    waiting: dict[_Waiting, None] = field(default_factory=dict)  # a set that keeps its order


class Swapper:
    """Gives swap orders and takes reports of them."""

    def __init__(self, tables: PageTables, residency: Residency, reclaimer: Reclaimer) -> None:
        self.in_flight: dict[int, Transfer] = {}
        self.arriving_frames = 0  # frames that swap-outs in flight will free
        self.swapped_out = self.swapped_in = self.failed = 0  # pages since the start
        self._rest_s, self._rests_until_s = 0.0, -np.inf  # after copies that failed
        self._coming: dict[int, Transfer] = {}  # slot -> the transfer that brings it in
        self._last_ticket = 0
        self._tables = tables
        self._residency = residency
        self._reclaimer = reclaimer
        self._swap = residency.swap
        self._frames = residency.frames
        self._cache = residency.cache

    def arriving_of(self, tenant: int) -> int:
        """`arriving_frames` that are charged to `tenant` now."""
        charged = self._residency.tenants.of_frame
        leaving = (transfer.orders.out_frames for transfer in self.in_flight.values())
        return sum(int(np.count_nonzero(charged[frames] == tenant)) for frames in leaving)

    # --- slots

    @property
    def rests(self) -> bool:
        """Whether nothing dirty is copied out now, since a copy has failed."""
        return self._residency.recorder.now < self._rests_until_s

    def obtainable_slots(self, tenant: int, clean: int = 0) -> int:
        """Slots that dirty pages of a Sequence of `tenant` could get now, while `clean` clean ones keep theirs.

        Free slots, and those that the cache would give up. Negative: not even the clean ones could go.
        """
        swap, tenants = self._swap, self._residency.tenants
        takeable = swap.free_slots + swap.clean.sizes[0] + self._swapped_pages() - clean
        bound = swap.bounds.sequences - swap.sequence_slots - swap.promised_slots - clean
        own = tenants.limits[tenant].swap_max - int(tenants.swap_usage[tenant])
        return min(takeable, bound, 0 if self.rests else max(0, own))

    def _swapped_pages(self) -> int:
        lru = self._residency.lru
        return sum(lru.size(tenant, LruList.SWAPPED) for tenant in range(len(self._residency.tenants.names)))

    def _take_slots(self, tenant: int, count: int, now: float) -> list[int]:
        """Pinned slots for `tenant`: free ones, else the oldest clean pages', else the oldest cached pages'."""
        for _ in range(count - self._swap.free_slots):
            self._recycle_slot(now)
        return self._swap.allocate(tenant, count)

    def _recycle_slot(self, now: float) -> None:
        """Free one slot that no page table names. There must be one."""
        swap, residency = self._swap, self._residency
        slot = swap.clean.coldest(0)
        if slot == ABSENT:
            residency.evict(self._oldest_swapped(), now, "swap space")
            return
        entry, frame = swap.entry[slot], swap.twin[slot]
        if entry != ABSENT:
            self._cache.slot[entry] = ABSENT
            swap.entry[slot] = ABSENT
        residency.unlink(frame)  # which frees the slot: nothing else held it

    def _oldest_swapped(self) -> int:
        lru = self._residency.lru
        tenants = range(len(self._residency.tenants.names))
        coldest = [lru.lists.coldest(tenant * len(LruList) + LruList.SWAPPED) for tenant in tenants]
        return min((entry for entry in coldest if entry != ABSENT), key=lambda entry: self._cache.used_s[entry])

    def _slot_for_cache(self, tenant: int, now: float) -> int:
        """A pinned slot for a cached page, within the bounds of the cache and of `tenant`; or ABSENT."""
        swap, tenants = self._swap, self._residency.tenants
        if self.rests:
            return ABSENT
        if tenants.swap_usage[tenant] >= tenants.limits[tenant].swap_max or swap.bounds.cache < 1:
            return ABSENT
        if swap.cache_slots >= swap.bounds.cache or not swap.free_slots:
            if not swap.clean.sizes[0] and not self._swapped_pages():
                return ABSENT
            self._recycle_slot(now)
            if swap.cache_slots >= swap.bounds.cache:
                return ABSENT
        return swap.allocate(tenant, 1)[0]

    # --- out

    def exclusive(self, rows: Int32Array) -> tuple[Int32Array, Int32Array, Int32Array]:
        """(rows, pages, frames), each (N,): the entries of `rows` whose frame nobody outside them maps or copies."""
        row_of, page_of, frames = self.resident(rows)
        _, inverse, held = np.unique(frames, return_inverse=True, return_counts=True)
        mine = (self._frames.references[frames] == held[inverse]) & (self._frames.pins[frames] == 0)
        return row_of[mine], page_of[mine], frames[mine]

    def exclusive_to_each(self, rows: Int32Array) -> tuple[Int32Array, Int32Array, Int32Array]:
        """The same for each row by itself: the entries whose frame no other row maps."""
        row_of, page_of, frames = self.resident(rows)
        mine = (self._frames.references[frames] == 1) & (self._frames.pins[frames] == 0)
        return row_of[mine], page_of[mine], frames[mine]

    def resident(self, rows: Int32Array) -> tuple[Int32Array, Int32Array, Int32Array]:
        """(rows, pages, frames), each (N,): the entries of `rows` that name a frame."""
        tables = self._tables
        counts = tables.pages(rows)
        row_of = np.repeat(rows, counts)
        page_of = (np.arange(len(row_of)) - np.repeat(np.cumsum(counts) - counts, counts)).astype(np.int32)
        entries = tables.entries[row_of, page_of]
        here = entries >= 0
        return row_of[here], page_of[here], entries[here]

    def swap_out(self, rows: Int32Array, now: float) -> SwapOrders:
        """Order the exclusive pages of `rows` (distinct; a fork family goes as one) out.

        Raises OutOfSwapSlots, and then nothing has changed.
        """
        row_of, page_of, frames = self.exclusive(rows)
        slots = self._swap.slots_of_frames[frames]
        is_dirty = slots == ABSENT
        dirty = np.unique(frames[is_dirty])
        tenant = int(self._tables.tenants[rows[0]])
        # Clean pages keep their slots, which become those of a Sequence unless they are already.
        clean = sum(not self._swap.references[slot] for slot in np.unique(slots[~is_dirty]).tolist())
        obtainable = self.obtainable_slots(tenant, clean)
        if len(frames) and obtainable < len(dirty):
            raise OutOfSwapSlots(len(dirty) + clean, max(0, obtainable + clean))
        np.add.at(self._tables.barred, row_of, 1)
        self._name_slots(row_of[~is_dirty], page_of[~is_dirty], frames[~is_dirty], slots[~is_dirty])
        if not len(dirty):
            return SwapOrders()
        rows_left, pages_left = row_of[is_dirty], page_of[is_dirty]
        leaving = _Leaving(rows_left, pages_left, self._tables.epochs[rows_left], frames[is_dirty])
        self._swap.promised_slots += len(dirty)
        return self._order_out(dirty, self._take_slots(tenant, len(dirty), now), leaving)

    def swap_out_cached(self, entries: list[int], now: float, needed_for: str) -> SwapOrders:
        """Free the frames of idle cached pages that are off the lists: drop clean ones, order dirty ones out.

        Where no slot can be had, the page is dropped.
        """
        frames: list[int] = []
        slots: list[int] = []
        for entry in entries:
            frame = self._cache.frame[entry]
            slot = ABSENT
            if self._cache.slot[entry] == ABSENT:
                slot = self._slot_for_cache(int(self._residency.tenants.of_frame[frame]), now)
            if slot == ABSENT:
                self._residency.reclaim(entry, now, needed_for)
            else:
                frames.append(frame)
                slots.append(slot)
        return self._order_out(np.array(frames, np.int32), slots, None) if frames else SwapOrders()

    def _order_out(self, frames: Int32Array, slots: list[int], leaving: _Leaving | None) -> SwapOrders:
        self._frames.pin(frames)
        self.arriving_frames += len(frames)
        orders = SwapOrders(self._next_ticket(), out_frames=frames, out_slots=np.array(slots, np.int32))
        self.in_flight[orders.ticket] = Transfer(orders, leaving)
        self._record(EventKind.SWAP_OUT, int(leaving.rows[0]) if leaving is not None else ABSENT, orders)
        return orders

    def _name_slots(self, rows: Int32Array, pages: Int32Array, frames: Int32Array, slots: Int32Array) -> None:
        """Entries that name frames[i] name slots[i] from now on; frames that nobody maps any more become free.

        The caller has counted the pages in `barred`.
        """
        self._tables.entries[rows, pages] = slot_entry(slots)
        for slot in slots.tolist():
            self._swap.add_reference(slot)
            self._residency.settle_slot(slot)
        self._residency.unmap(frames, self._tables.tenants[rows])
        entry_of_frame = self._cache.entry_of_frame
        for frame in frames[(self._frames.references[frames] == 0) & (self._frames.pins[frames] == 0)].tolist():
            if (entry := entry_of_frame[frame]) != ABSENT:
                self._residency.drop_clean(entry)

    # --- in

    def frames_to_swap_in(self, row: int) -> int:
        """Frames that `swap_in` would allocate."""
        return sum(self._swap.twin[slot] == ABSENT and slot not in self._coming for slot in self._slots_of(row)[1])

    def _slots_of(self, row: int) -> tuple[Int32Array, list[int]]:
        """The pages of `row` that are in swap, and their slots."""
        entries = self._tables.mapped(row)
        pages = np.flatnonzero(entries < ABSENT).astype(np.int32)
        slots: list[int] = slot_entry(entries[pages]).tolist()
        return pages, slots

    def swap_in(self, row: int, now: float, needed_for: str) -> SwapOrders:
        """Order every page of `row` that is in swap in. It may run once it is not barred any more.

        An empty order can still mean waiting: for copies that others ordered, or for the row's own swap-out, after
        which it is to be called again. Raises OutOfFrames, and then nothing has changed.
        """
        tenant, epoch = int(self._tables.tenants[row]), int(self._tables.epochs[row])
        pages, slots = self._slots_of(row)
        twins = np.array([self._swap.twin[slot] for slot in slots], np.int32)
        missing = [slot for slot, twin in zip(slots, twins, strict=True) if twin == ABSENT and slot not in self._coming]
        here = twins[twins != ABSENT]
        self._check_room([tenant] * len(missing), here, tenant)
        if len(here):
            for entry in self._cache.entries_of_frames[here].tolist():
                if entry != ABSENT:
                    self._residency.lru.remove(entry)
            self._name_frames(row, pages[twins != ABSENT], here)
        orders = self._order_in(missing, [tenant] * len(missing), now, needed_for, row)
        for page, slot in zip(pages.tolist(), slots, strict=True):
            if (transfer := self._coming.get(slot)) is not None:
                transfer.waiting[_Waiting(row, page, epoch, slot)] = None
        return orders

    def swap_in_cached(self, entries: list[int], now: float, needed_for: str) -> SwapOrders:
        """Order cached pages that are in swap alone in, before anybody maps them. Raises OutOfFrames."""
        slots = [self._cache.slot[entry] for entry in entries if self._cache.frame[entry] == ABSENT]
        missing = [slot for slot in slots if slot not in self._coming]
        tenants = [int(self._residency.tenants.of_slot[slot]) for slot in missing]
        self._check_room(tenants)
        return self._order_in(missing, tenants, now, needed_for, ABSENT)

    def _check_room(self, tenants: list[int], mapping: Int32Array | None = None, by: int = 0) -> None:
        """Raises OutOfFrames if one frame for each of `tenants` cannot be had; see `Reclaimer.shortage`."""
        needs = np.bincount(np.array(tenants, np.int64), minlength=len(self._residency.tenants.names)).astype(np.int64)
        if error := self._reclaimer.shortage(needs, mapping, by):
            raise error

    def _order_in(self, slots: list[int], tenants: list[int], now: float, needed_for: str, row: int) -> SwapOrders:
        """Copy `slots`, which are not coming yet, into new frames, one for each of `tenants`."""
        if not slots:
            return SwapOrders()
        for slot in slots:
            self._swap.pins[slot] += 1  # before any reclaim: it must not take these slots
            if (entry := self._swap.entry[slot]) != ABSENT:
                self._residency.lru.remove(entry)
        frames = self._reclaimer.allocate(np.array(tenants, np.int32), now, needed_for, references=0)
        self._frames.pin(frames)
        orders = SwapOrders(self._next_ticket(), in_slots=np.array(slots, np.int32), in_frames=frames)
        transfer = self.in_flight[orders.ticket] = Transfer(orders)
        self._coming.update(dict.fromkeys(slots, transfer))
        self._record(EventKind.SWAP_IN, row, orders)
        return orders

    def _record(self, kind: EventKind, row: int, orders: SwapOrders) -> None:
        """An event about an order; row ABSENT: for nobody in particular."""
        serial, tenant = (int(self._tables.serials[row]), int(self._tables.tenants[row])) if row != ABSENT else (0, 0)
        self._residency.recorder.record(kind, serial, tenant, orders.ticket, len(orders))

    def _name_frames(self, row: int, pages: Int32Array, frames: Int32Array) -> None:
        """Entries of `row` that name slots name frames[i], which have the same content, from now on."""
        slots = slot_entry(self._tables.entries[row, pages])
        self._residency.map(frames, int(self._tables.tenants[row]))
        self._tables.entries[row, pages] = frames
        self._tables.barred[row] -= len(pages)
        self._tables.note(row, pages)
        for slot in slots.tolist():
            self._residency.unmap_slot(slot)

    # --- the ends of copies

    def _next_ticket(self) -> int:
        self._last_ticket += 1
        return self._last_ticket

    def complete(self, ticket: int) -> None:
        """Every copy of the order has been made."""
        transfer = self.in_flight.pop(ticket)
        self._rest_s, self._rests_until_s = 0.0, -np.inf
        if len(transfer.orders.out_frames):
            self._complete_out(transfer)
        if len(transfer.orders.in_frames):
            self._complete_in(transfer)
        self._record(EventKind.COMPLETE, ABSENT, transfer.orders)

    def _complete_out(self, transfer: Transfer) -> None:
        """SWAPPING OUT -> IN SWAP, for each page that nobody has mapped meanwhile."""
        swap, cache, residency = self._swap, self._cache, self._residency
        slot_of = dict(zip(transfer.orders.out_frames.tolist(), transfer.orders.out_slots.tolist(), strict=True))
        self.swapped_out += len(slot_of)
        idle = self._end_out(transfer)
        for frame, slot in slot_of.items():
            if (entry := cache.entry_of_frame[frame]) != ABSENT:
                swap.entry[slot] = entry
                cache.slot[entry] = slot
                residency.link(slot, frame)
        if (leaving := transfer.leaving) is not None:
            still = self._tables.epochs[leaving.rows] == leaving.epochs
            same = still & (self._tables.entries[leaving.rows, leaving.pages] == leaving.frames)
            np.subtract.at(self._tables.barred, leaving.rows[still & ~same], 1)
            frames = leaving.frames[same]
            slots = np.array([slot_of[frame] for frame in frames.tolist()], np.int32)
            self._name_slots(leaving.rows[same], leaving.pages[same], frames, slots)
        for slot in slot_of.values():
            residency.settle_slot(slot)
        for frame in idle.tolist():
            if (entry := cache.entry_of_frame[frame]) != ABSENT:
                residency.drop_clean(entry)
            else:
                residency.settle_frame(frame)  # released while it was copied

    def _end_out(self, transfer: Transfer) -> Int32Array:
        """Frames and slots of a swap-out are not pinned any more. Returns the frames that nobody maps."""
        orders = transfer.orders
        for slot in orders.out_slots.tolist():
            self._swap.pins[slot] -= 1
        self.arriving_frames -= len(orders.out_frames)
        if transfer.leaving is not None:
            self._swap.promised_slots -= len(orders.out_frames)
        return self._frames.unpin(orders.out_frames)

    def _complete_in(self, transfer: Transfer) -> None:
        """SWAPPING IN -> MAPPED by those who waited, or IDLE if a cached page came unasked."""
        tables, residency = self._tables, self._residency
        frame_of = dict(zip(transfer.orders.in_slots.tolist(), transfer.orders.in_frames.tolist(), strict=True))
        self.swapped_in += len(frame_of)
        self._end_in(transfer)
        for slot, frame in frame_of.items():
            if (entry := self._swap.entry[slot]) != ABSENT:
                residency.reside(entry, frame)
            else:
                residency.settle_slot(slot)
        by_row: dict[int, list[_Waiting]] = {}
        for waiting in transfer.waiting:
            is_current = tables.epochs[waiting.row] == waiting.epoch
            if is_current and tables.entries[waiting.row, waiting.page] == slot_entry(waiting.slot):
                by_row.setdefault(waiting.row, []).append(waiting)
        for row, entries in by_row.items():
            for waiting in entries:
                is_full = (waiting.page + 1) * tables.page_size <= tables.lengths[row]
                if is_full and self._swap.twin[waiting.slot] == ABSENT:
                    residency.link(waiting.slot, frame_of[waiting.slot])  # a full page never changes: it stays clean
            pages = np.array([waiting.page for waiting in entries], np.int32)
            self._name_frames(row, pages, np.array([frame_of[waiting.slot] for waiting in entries], np.int32))
        for frame in self._frames.unpin(transfer.orders.in_frames).tolist():
            residency.settle_frame(frame)

    def _end_in(self, transfer: Transfer) -> None:
        """Nobody waits for these slots any more, and they are not pinned."""
        for slot in transfer.orders.in_slots.tolist():
            del self._coming[slot]
            self._swap.pins[slot] -= 1

    def fail(self, ticket: int, now: float) -> list[int]:
        """Not every copy of the order could be made: none counts, and nothing has moved. Returns the rows that waited
        for pages that it should have brought in.
        """
        transfer = self.in_flight.pop(ticket)
        orders, residency = transfer.orders, self._residency
        self.failed += len(orders)
        self._rest_s = min(LONGEST_REST_S, max(FIRST_REST_S, 2 * self._rest_s))
        self._rests_until_s = now + self._rest_s
        for frame in self._end_out(transfer).tolist():
            residency.settle_frame(frame, coldest=True)
        if (leaving := transfer.leaving) is not None:
            still = self._tables.epochs[leaving.rows] == leaving.epochs
            np.subtract.at(self._tables.barred, leaving.rows[still], 1)
        self._end_in(transfer)
        for frame in self._frames.unpin(orders.in_frames).tolist():
            residency.settle_frame(frame)
        for slot in (*orders.out_slots.tolist(), *orders.in_slots.tolist()):
            residency.settle_slot(slot)
        for slot in orders.in_slots.tolist():
            if (entry := self._swap.entry[slot]) != ABSENT and self._cache.frame[entry] == ABSENT:
                residency.evict(entry, now, "swap failure")
        self._record(EventKind.FAIL, ABSENT, orders)
        waiting = {each.row for each in transfer.waiting if self._tables.epochs[each.row] == each.epoch}
        return sorted(waiting)
