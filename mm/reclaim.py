"""Finds frames: watermarks, whose idle cached pages go, and the allocation that falls back on them.

    free frames   high ─────────────── background reclaim stops here
                  low  ─────────────── and starts here: ahead of need, so that an allocation rarely has to
                  min  ─────────────── admissions leave these to those that run
                  0    ─────────────── an allocation reclaims by itself (direct reclaim)

Victims are idle cached pages only, the coldest first: pages that run are never touched here, taking those is preemption
(mm/preemption.py). Direct reclaim drops what it takes, since it cannot wait for a copy. Background reclaim first drops
clean pages, then has dirty ones swapped out; without swap it drops them too.

Whose page goes, with several tenants: of those above `high`, else above `low`, else above `min`, the one whose coldest
page has been idle longest for its weight. What a tenant has within `min` goes for that tenant's own needs alone.
"""

from dataclasses import dataclass

import numpy as np

from mm.addresses import ABSENT, Int32Array, Int64Array, empty_int32
from mm.errors import OutOfFrames, OverTenantLimit
from mm.residency import Residency
from mm.room import Room

BACKGROUND_BATCH = 256
"""Frames that one call of background reclaim takes at most, so that a turn of the engine stays short."""


@dataclass(frozen=True, slots=True)
class Watermarks:
    """In free frames."""

    min: int
    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.low <= self.high:
            raise ValueError(f"0 <= min <= low <= high must hold, got min {self.min}, low {self.low}, high {self.high}")

    @classmethod
    def from_shares(cls, frames: int, min: float = 0.01, low: float = 0.02, high: float = 0.04) -> "Watermarks":
        """Shares of the pool; each at least one frame apart where the pool is large enough for that."""
        return cls(min=int(frames * min), low=int(frames * low), high=int(frames * high))


class Reclaimer:
    """Allocates frames, reclaiming idle cached pages where the free ones do not suffice."""

    def __init__(self, residency: Residency, watermarks: Watermarks) -> None:
        self.is_reclaiming = False  # in the background: from under low until over high
        self.direct = self.background = self.scanned = 0  # pages since the start
        self._residency = residency
        self._frames = residency.frames
        self._lru = residency.lru
        self._tenants = residency.tenants
        self.watermarks = watermarks

    @property
    def watermarks(self) -> Watermarks:
        return self._watermarks

    @watermarks.setter
    def watermarks(self, marks: Watermarks) -> None:
        self._watermarks = marks
        self._set = marks, self._frames.usable

    def rescale(self) -> None:
        """The pool has another size: the watermarks are the same shares of it as those that were set, of what it had
        then.
        """
        marks, frames = self._set
        scaled = (mark * self._frames.usable // frames for mark in (marks.min, marks.low, marks.high))
        self._watermarks = Watermarks(*scaled)

    # --- asking

    @property
    def available_frames(self) -> int:
        """Free, or idle and not kept for one tenant's own needs."""
        if not self._tenants.is_limited:
            return self._frames.free_frames + self._lru.idle_pages
        usage, idle = self._usage_and_idle()
        return self._frames.free_frames + int((idle - self._kept(usage, idle)).sum())

    def shortage(self, needs: Int64Array, mapping: Int32Array | None = None, by: int = 0) -> OutOfFrames | None:
        """Why needs[t] more frames for tenant t cannot be had, or None. Changes nothing.

        mapping: distinct frames that tenant `by` is about to map, before the others are allocated. Those that nobody
        maps so far are charged to it then, and what of them is idle cannot be reclaimed.
        """
        total, free = int(needs.sum()), self._frames.free_frames
        unmapped = empty_int32() if mapping is None else mapping[self._frames.references[mapping] == 0]
        idle_ones = unmapped[self._frames.pins[unmapped] == 0]
        if not self._tenants.is_limited:
            reclaimable = self._lru.idle_pages - len(idle_ones)
            return None if total <= free + reclaimable else OutOfFrames(total, free, reclaimable)
        usage, idle = self._usage_and_idle()
        if len(unmapped):
            usage, idle = usage - self._charges_of(unmapped), idle - self._charges_of(idle_ones)
            usage[by] += len(unmapped)
        for tenant in np.flatnonzero(needs).tolist():
            limit, used, need = self._tenants.limits[tenant].max, int(usage[tenant]), int(needs[tenant])
            if used + need - limit > idle[tenant]:
                return OverTenantLimit(self._tenants.names[tenant], need, used, limit, int(idle[tenant]))
        kept = self._kept(usage, idle)
        reclaimable = int((idle - kept).sum())
        if int(np.maximum(0, needs - kept).sum()) > free + reclaimable:
            return OutOfFrames(total, free, reclaimable)
        return None

    def room(self) -> Room:
        """What can be had now, tenant by tenant."""
        if not self._tenants.is_limited:
            return Room(self.available_frames)
        usage, idle = self._usage_and_idle()
        kept = self._kept(usage, idle)
        most = np.array([limits.max for limits in self._tenants.limits], np.int64)
        pool = self._frames.free_frames + int((idle - kept).sum())
        return Room(pool, kept.tolist(), (most - usage + idle).tolist())

    def _charges_of(self, frames: Int32Array) -> Int64Array:
        """Per tenant: how many of these are charged to it."""
        return np.bincount(self._tenants.of_frame[frames], minlength=len(self._tenants.names)).astype(np.int64)

    def _usage_and_idle(self) -> tuple[Int64Array, Int64Array]:
        """Per tenant: frames charged, and how many of these are idle."""
        count = len(self._tenants.names)
        return self._tenants.usage[:count], np.array([self._lru.idle_of(each) for each in range(count)], np.int64)

    def _kept(self, usage: Int64Array, idle: Int64Array) -> Int64Array:
        """Per tenant: the idle pages that lie within its min, and so are kept for its own needs."""
        floors = np.array([limits.min for limits in self._tenants.limits], np.int64)
        kept: Int64Array = np.clip(floors - (usage - idle), 0, idle)
        return kept

    # --- allocating

    def allocate(self, tenants: Int32Array, now: float, needed_for: str, *, references: int = 1) -> Int32Array:
        """One frame for each of `tenants` (N,): (N,) int32. Raises OutOfFrames, and then nothing has changed."""
        if self._tenants.is_limited or len(tenants) > self._frames.free_frames:
            self._make_room(tenants, now, needed_for)
        return self._frames.allocate(tenants, references=references)

    def _make_room(self, tenants: Int32Array, now: float, needed_for: str) -> None:
        """Direct reclaim, until len(tenants) frames are free and nobody will be over its max."""
        count = len(self._tenants.names)
        needs = np.bincount(tenants, minlength=count).astype(np.int64)
        if error := self.shortage(needs):
            if isinstance(error, OverTenantLimit):
                events = self._tenants.events[self._tenants.id(error.tenant)]
                events.max += 1
                events.refused += 1
            raise error
        for tenant in np.flatnonzero(needs).tolist():
            over = int(self._tenants.usage[tenant] + needs[tenant]) - self._tenants.limits[tenant].max
            if over > 0:
                self._tenants.events[tenant].max += 1
                for _ in range(over):
                    self._take(self._lru.victim(tenant), now, needed_for)
        while self._frames.free_frames < len(tenants) and (tenant := self._whose_page_goes(now)) != ABSENT:
            self._take(self._lru.victim(tenant), now, needed_for)
        if self._frames.free_frames < len(tenants):  # what is left is kept for tenants that need it themselves
            own = np.minimum(self._kept(*self._usage_and_idle()), needs)
            for tenant in np.repeat(np.arange(count), own)[: len(tenants) - self._frames.free_frames].tolist():
                self._take(self._lru.victim(tenant), now, needed_for)

    def _take(self, entry: int, now: float, needed_for: str) -> None:
        self._residency.reclaim(entry, now, needed_for)
        self.direct += 1

    def _whose_page_goes(self, now: float) -> int:
        """The tenant whose coldest page goes next, or ABSENT if all idle pages are kept for their own tenants."""
        tenants, best, best_rank = self._tenants, ABSENT, (0, -1.0)
        if len(tenants.names) == 1:
            return 0 if self._lru.idle_pages and tenants.usage[0] > tenants.limits[0].min else ABSENT
        for tenant, limits in enumerate(tenants.limits):
            if not self._lru.idle_of(tenant):
                continue
            tier = tenants.tier(tenant)
            if tier == 0:
                continue
            idle_s = now - self._residency.cache.used_s[self._lru.victim(tenant)]
            rank = (tier, idle_s * 100 / limits.weight)
            if rank > best_rank:
                best, best_rank = tenant, rank
        if best != ABSENT and best_rank[0] == 1:
            tenants.events[best].low += 1
        return best

    # --- in the background

    def background_victims(self, arriving: int, now: float) -> list[int]:
        """Idle pages to be reclaimed now, coldest first; empty unless free frames are low or a tenant is above high.

        arriving: frames that become free when the swap-outs in flight end.
        """
        victims: list[int] = []
        if self._tenants.is_limited:
            for tenant, limits in enumerate(self._tenants.limits):
                over = min(int(self._tenants.usage[tenant]) - limits.high, self._lru.idle_of(tenant), BACKGROUND_BATCH)
                if over > 0:
                    self._tenants.events[tenant].high += 1
                    victims += self._detach(tenant, over)
        free = self._frames.free_frames + arriving + len(victims)
        if free < self.watermarks.low:
            self.is_reclaiming = True
        elif free >= self.watermarks.high:
            self.is_reclaiming = False
        if self.is_reclaiming:
            goal = min(self.watermarks.high - free, BACKGROUND_BATCH)
            while goal > 0 and (tenant := self._whose_page_goes(now)) != ABSENT:
                some = self._detach(tenant, min(goal, 16))
                assert some
                victims += some
                goal -= len(some)
        self.background += len(victims)
        return victims

    def _detach(self, tenant: int, count: int) -> list[int]:
        """Take up to `count` victims of `tenant` off the lists, clean ones first among the coldest."""
        count = min(count, self._lru.idle_of(tenant))
        window: list[int] = []
        while len(window) < 2 * count and (entry := self._lru.victim(tenant)) != ABSENT:
            self._lru.remove(entry)
            window.append(entry)
        self.scanned += len(window)
        slot = self._residency.cache.slot
        chosen = sorted(window, key=lambda entry: slot[entry] == ABSENT)[:count]  # stable: coldest first in each kind
        taken = set(chosen)
        for entry in reversed(window):
            if entry not in taken:
                self._lru.rest(entry, tenant, coldest=True)
        return chosen
