"""Owns the states of a page and every change between them. All that frees, caches or drops a page goes through here.

    FREE ──allocate──▶ MAPPED ──publish──▶ MAPPED + CACHED ──last release──▶ IDLE (cached, on an LRU list)
     ▲                   │ ▲                   ▲     │                         │    │    │
     │◀───last release───┘ │                   └─────┼──────────map────────────┘    │    │
     │                     │                         │                              │    │
     │◀────────────────────┼─────────────────────────┼────── evict (dirty: a shadow is left)
     │                     │                         │                              │
     │               IN SWAP ◀──complete── SWAPPING OUT (pinned) ◀──swap out────────┘  drop (clean) ──▶ IN SWAP
     │                  │   ──swap in──▶ SWAPPING IN (pinned) ──complete──▶ MAPPED, IDLE
     └──slot reclaimed──┘

What may be trusted: a MAPPED frame with one reference, neither cached nor clean, may be written in place; every other
content is final. A pinned frame or slot is not reused whatever else happens to it (invariant 7).

Two functions decide what becomes of a place that lost a holder: `settle_frame` and `settle_slot`.
"""

import numpy as np

from mm.addresses import ABSENT, Int32Array
from mm.flight_recorder import EventKind, FlightRecorder
from mm.frame_allocator import FrameAllocator
from mm.lru import PageLru
from mm.page_cache import PageCache
from mm.refault import Shadows
from mm.swap_space import SwapSpace
from mm.tenants import Tenants


class Residency:
    """Keeps frames, slots, cache, lists and charges consistent with each other."""

    def __init__(
        self,
        frames: FrameAllocator,
        swap: SwapSpace,
        cache: PageCache,
        lru: PageLru,
        shadows: Shadows,
        tenants: Tenants,
        recorder: FlightRecorder,
    ) -> None:
        self.frames = frames
        self.swap = swap
        self.cache = cache
        self.lru = lru
        self.shadows = shadows
        self.tenants = tenants
        self.recorder = recorder
        self.evicted_age_s = 0.0  # of the pages lost since the start, the time since each was used last, added up

    # --- references of page tables and pins

    def map(self, frames: Int32Array, tenant: int) -> None:
        """A row or pin of `tenant` gains a reference to each of the distinct `frames`."""
        self.frames.share(frames)
        self.tenants.mapped(frames, tenant, self.frames.references)

    def unmap(self, frames: Int32Array, tenants: Int32Array, *, coldest: bool = False) -> None:
        """A row or pin of tenants[i] drops its reference to frames[i]; a frame may stand several times.

        Frames that nobody maps any more are freed, or rest on an LRU list if cached: the last of `frames` goes first,
        and with `coldest` all of them before any other page.
        """
        idle = self.frames.release(frames)
        self.tenants.unmapped(frames, tenants, self.frames.references)
        for frame in idle.tolist() if coldest else idle[::-1].tolist():
            self.settle_frame(frame, coldest=coldest)

    def unmap_row(self, frames: Int32Array, tenant: int) -> None:
        """A row of `tenant` drops its reference to each of the distinct `frames`, in page order; the last goes first.

        What `unmap` does page by page, for all at once: this is what the end of every Sequence costs.
        """
        idle = self.frames.release_row(frames.astype(np.intp))
        tenants = self.tenants
        if tenants.foreign:
            tenants.unmapped(frames, np.full(len(frames), tenant, np.int32), self.frames.references)
        entries = self.cache.entries_of_frames[idle]
        is_free = entries < 0
        free = idle[is_free]
        is_plain = not self.frames.pinned and not np.count_nonzero(self.frames.sealed[free])
        if not is_plain or (len(tenants.names) > 1 and np.count_nonzero(tenants.of_frame[idle] != tenant)):
            for frame in idle[::-1].tolist():
                self.settle_frame(frame)
            return
        if len(free):
            self.frames.free(free)
            entries = entries[~is_free]
        if len(entries):
            self.lru.rest_all(entries[::-1], tenant)

    def unmap_slot(self, slot: int) -> None:
        """A page table entry does not name `slot` any more."""
        self.swap.drop_reference(slot)
        self.settle_slot(slot)

    def settle_frame(self, frame: int, *, coldest: bool = False) -> None:
        """Free an unreferenced frame, or let it rest if it is cached; nothing while it is pinned."""
        if self.frames.pin_count[frame]:
            return
        entry = self.cache.entry_of_frame[frame]
        if entry != ABSENT:
            self.lru.rest(entry, self.tenants.charged[frame], coldest=coldest)
            return
        self.unlink(frame)
        self.frames.free_one(frame)

    def settle_slot(self, slot: int) -> None:
        """Free a slot that nothing holds, or put it where it can be taken back from; nothing while it is pinned."""
        swap = self.swap
        if swap.clean.on[slot] != ABSENT:
            swap.clean.remove(slot)
        if swap.pins[slot] or swap.references[slot]:
            return
        entry = swap.entry[slot]
        if swap.twin[slot] != ABSENT:
            swap.clean.push(0, slot)
        elif entry != ABSENT:
            self.lru.rest_in_swap(entry, int(self.tenants.of_slot[slot]))
        else:
            swap.free(slot)

    # --- the page cache

    def cached(self, entry: int, frame: int, *, active: bool) -> None:
        """`entry` was made for the content of a frame that somebody maps, and that the caller seals."""
        if active:
            self.lru.enter_active(entry)
        slot = self.swap.slot_of_frame[frame]
        if slot != ABSENT:  # it is clean already
            self.swap.entry[slot] = entry
            self.cache.slot[entry] = slot

    def used(self, entries: list[int], now: float) -> None:
        """These cached pages are mapped by one more Sequence."""
        hits, used_s, used = self.cache.hits, self.cache.used_s, self.lru.used
        for entry in entries:
            used(entry)
            hits[entry] += 1
            used_s[entry] = now

    def adopt(self, entry: int, frame: int) -> None:
        """A row has computed a cached page that is in swap alone: its frame serves, unless either is in a copy."""
        if not self.swap.pins[self.cache.slot[entry]] and not self.frames.pin_count[frame]:
            self.reside(entry, frame)

    def reside(self, entry: int, frame: int) -> None:
        """A cached page that was in swap alone has a frame again, which is a twin of its slot."""
        slot = self.cache.slot[entry]
        self.lru.remove(entry)
        self.cache.frame[entry] = frame
        self.cache.entry_of_frame[frame] = entry
        if self.swap.slot_of_frame[frame] != slot:
            self.unlink(frame)
            self.swap.link(slot, frame)
        self.frames.sealed[frame] = True
        self.settle_slot(slot)

    def reclaim(self, entry: int, now: float, needed_for: str) -> None:
        """Free the frame of an idle cached page. A clean page lives on in its slot, a dirty one is lost."""
        if self.cache.slot[entry] != ABSENT:
            self.drop_clean(entry)
            return
        # What `evict` does, without what does not concern an idle page: this is all that a saturated pool does.
        frame = self.cache.frame[entry]
        self._record(EventKind.EVICT, frame)
        self.evicted_age_s += now - self.cache.used_s[entry]
        self.lru.leave(entry)
        self.shadows.add(self.cache.remove(entry), now, needed_for)
        self.frames.sealed[frame] = False
        self.frames.free_one(frame)

    def drop_clean(self, entry: int) -> None:
        """Free the frame of an idle cached page that has a slot, too: IDLE -> IN SWAP."""
        frame = self.cache.frame[entry]
        self._record(EventKind.DROP, frame)
        self.lru.remove(entry)
        self.cache.frame[entry] = ABSENT
        self.cache.entry_of_frame[frame] = ABSENT
        self.unlink(frame)
        self.frames.free_one(frame)

    def evict(self, entry: int, now: float, needed_for: str) -> None:
        """A cached page is lost for want of memory: a shadow is left."""
        self._record(EventKind.EVICT, self.cache.frame[entry])
        self.evicted_age_s += now - self.cache.used_s[entry]
        self.shadows.add(self.uncache(entry), now, needed_for)

    def uncache(self, entry: int) -> bytes:
        """Stop caching a page. Its frame and slot are freed unless something else holds them. Returns its key."""
        frame, slot = self.cache.frame[entry], self.cache.slot[entry]
        self.lru.leave(entry)
        key = self.cache.remove(entry)
        if slot != ABSENT:
            self.swap.entry[slot] = ABSENT
            self.settle_slot(slot)
        if frame != ABSENT:
            self.frames.sealed[frame] = self.swap.slot_of_frame[frame] != ABSENT
            if not self.frames.reference_count[frame]:
                self.settle_frame(frame)
        return key

    def _record(self, kind: EventKind, frame: int) -> None:
        """An event of the one whom the frame was last allocated for; frame ABSENT: of nobody."""
        serial = self.frames.owner_serial[frame] if frame != ABSENT else 0
        self.recorder.record(kind, serial, self.tenants.charged[frame] if frame != ABSENT else 0, frame, 1)

    # --- frames and slots with the same content

    def link(self, slot: int, frame: int) -> None:
        """`frame` is clean from now on."""
        self.swap.link(slot, frame)
        self.frames.sealed[frame] = True

    def unlink(self, frame: int) -> None:
        """`frame` is not clean any more: its slot, if it has one, loses a holder."""
        slot = self.swap.slot_of_frame[frame]
        if slot != ABSENT:
            self.swap.unlink(slot)
            self.frames.sealed[frame] = self.cache.entry_of_frame[frame] != ABSENT
            self.settle_slot(slot)
