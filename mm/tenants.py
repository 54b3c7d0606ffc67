"""Owns who is charged for which frame and slot, and the limits of each tenant, with the meaning of cgroup v2.

A *tenant* is a name that requests are submitted under. Each held frame is charged to exactly one tenant:

    allocate            to the tenant of the row it is for: the first toucher
    map by another      stays; the foreign references are counted by tenant
    last reference of   passes to a remaining holder; if nobody holds it any more, it stays with the last holder while
    the charged one     the page is cached, until it is evicted
    map a cached page   passes to the one who maps it, if the charged tenant does not map it itself

so a mapped frame is charged to a tenant that maps it, and a cached one to the last that did (invariant 11).

    min     frames that others can never have: neither by reclaim of idle pages nor by preemption
    low     the same, as long as unprotected pages can be found elsewhere
    high    above it the tenant's own cached pages are reclaimed first, and it is admitted nothing more while it runs
    max     above it nothing is allocated: its own cached pages are reclaimed for it, then its own Sequences preempted
    swap_max    slots its pages may fill
    weight  how long its idle pages are kept: with twice the weight, twice as long
    isolate its pages are found by its own requests alone
"""

from dataclasses import dataclass

import numpy as np

from mm.addresses import BoolArray, IndexArray, Int32Array, Int64Array

MAX_TENANTS = 256
"""Tenants that are told apart; later names share the last one. Bounds every table that has a place per tenant."""

UNLIMITED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """In frames, but swap_max in slots and weight in parts of 100. The defaults limit and protect nothing."""

    min: int = 0
    low: int = 0
    high: int = UNLIMITED
    max: int = UNLIMITED
    swap_max: int = UNLIMITED
    weight: int = 100
    isolate: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.low <= self.high <= self.max:
            given = ((name, getattr(self, name)) for name in ("min", "low", "high", "max"))
            told = ", ".join(f"{name} {'max' if value == UNLIMITED else value}" for name, value in given)
            raise ValueError(f"0 <= min <= low <= high <= max must hold, got {told}")
        if not 1 <= self.weight <= 10_000:
            raise ValueError(f"weight {self.weight} is not in 1 ... 10000")
        if self.swap_max < 0:
            raise ValueError(f"swap_max {self.swap_max} is negative")


@dataclass(slots=True)
class TenantEvents:
    """cgroup's memory.events: how often a limit took effect. They only grow."""

    low: int = 0  # a protected page was reclaimed because nothing else was left
    high: int = 0  # background reclaim found the tenant above high
    max: int = 0  # an allocation met max: own pages were reclaimed for it, or it was refused
    refused: int = 0  # ... and it was refused
    preempt: int = 0  # a Sequence was preempted


class Tenants:
    """Names, limits and charges. Ids are dense and small: 0 is `default`."""

    def __init__(self, frames: int, slots: int) -> None:
        self.names: list[str] = []
        self.limits: list[TenantLimits] = []
        self.events: list[TenantEvents] = []
        self._ids: dict[str, int] = {}
        self.of_frame: Int32Array = np.zeros(frames, np.int32)  # who is charged; means nothing for a free frame
        self.charged = self.of_frame.data  # the same memory, for one frame at a time
        self.of_slot: Int32Array = np.zeros(slots, np.int32)
        self.usage: Int64Array = np.zeros(MAX_TENANTS, np.int64)  # frames charged
        self._usage = self.usage.data
        self.peak: Int64Array = np.zeros(MAX_TENANTS, np.int64)
        self._peak = self.peak.data
        self.swap_usage: Int64Array = np.zeros(MAX_TENANTS, np.int64)  # slots charged
        self.is_limited = False  # whether any tenant has a min, low, high or max
        self.foreign: dict[int, dict[int, int]] = {}  # frame -> tenant other than the charged one -> its references
        self.has_foreign: BoolArray = np.zeros(frames, np.bool_)
        self.id("default")

    def id(self, name: str) -> int:
        """The id of a tenant, which is known from then on. Past MAX_TENANTS, names share one id."""
        found = self._ids.get(name)
        if found is not None:
            return found
        if len(self.names) == MAX_TENANTS:
            return MAX_TENANTS - 1
        number = self._ids[name] = len(self.names)
        self.names.append(name if number < MAX_TENANTS - 1 else "others")
        self.limits.append(TenantLimits())
        self.events.append(TenantEvents())
        return number

    def isolates(self, name: str) -> bool:
        """Whether it finds its own pages alone. Does not make it known."""
        found = self._ids.get(name)
        return found is not None and self.limits[found].isolate

    def forget(self, name: str) -> None:
        """The one that became known last, and has had nothing yet, is not known any more."""
        assert self._ids[name] == len(self.names) - 1, "others have come after it"
        del self._ids[name], self.names[-1], self.limits[-1], self.events[-1]

    def set_limits(self, name: str, limits: TenantLimits) -> None:
        """Takes effect with the next allocation and the next reclaim."""
        self.limits[self.id(name)] = limits
        default = TenantLimits()
        self.is_limited = any(
            (each.min, each.low, each.high, each.max) != (default.min, default.low, default.high, default.max)
            for each in self.limits
        )

    def tier(self, tenant: int) -> int:
        """How well its memory is protected: 3 above high, 2 above low, 1 above min, 0 within min.

        Highest first, others take from it: its idle pages in reclaim, its Sequences in preemption; at 0 they do not.
        """
        limits, usage = self.limits[tenant], self._usage[tenant]
        return (usage > limits.high) + (usage > limits.low) + (usage > limits.min)

    # --- charging frames

    def charge(self, frames: Int32Array, tenants: Int32Array) -> None:
        """frames[i] was allocated for tenants[i]."""
        count = len(self.names)
        self.of_frame[frames] = tenants
        if count == 1:
            self._usage[0] += len(frames)
            self._peak[0] = max(self._peak[0], self._usage[0])
        else:
            self.usage[:count] += np.bincount(tenants, minlength=count)
            np.maximum(self.peak[:count], self.usage[:count], out=self.peak[:count])

    def uncharge(self, frames: Int32Array | IndexArray) -> None:
        """The frames became free."""
        count = len(self.names)
        if count == 1:
            self._usage[0] -= len(frames)
        else:
            self.usage[:count] -= np.bincount(self.of_frame[frames], minlength=count)

    def uncharge_one(self, frame: int) -> None:
        self._usage[self.charged[frame]] -= 1

    def mapped(self, frames: Int32Array, tenant: int, references: Int32Array) -> None:
        """A row of `tenant` gained one reference to each of the distinct `frames`, counted in `references` already."""
        if len(self.names) == 1:
            return
        others = frames[self.of_frame[frames] != tenant]
        for frame in others.tolist():
            holders = self.foreign.get(frame, {})
            home = int(references[frame]) - 1 - sum(holders.values())
            if home == 0:
                self._pass(frame, tenant)  # whatever this tenant holds besides is home now
                continue
            holders[tenant] = holders.get(tenant, 0) + 1
            self.foreign[frame] = holders
            self.has_foreign[frame] = True

    def unmapped(self, frames: Int32Array, tenants: Int32Array, references: Int32Array) -> None:
        """A row of tenants[i] dropped one reference to frames[i], all counted in `references` already."""
        if not self.foreign:
            return
        some = self.has_foreign[frames]
        pairs = list(zip(frames[some].tolist(), tenants[some].tolist(), strict=True))
        for frame, tenant in pairs:
            if self.of_frame[frame] != tenant:
                self.foreign[frame][tenant] -= 1
        for frame in dict.fromkeys(frame for frame, _ in pairs):
            holders = {tenant: count for tenant, count in self.foreign[frame].items() if count}
            self._keep_or_drop(frame, holders)
            if references[frame] == sum(holders.values()) > 0:
                self._pass(frame, next(iter(holders)))

    def _pass(self, frame: int, heir: int) -> None:
        """The charge of `frame` goes to `heir`, whose references are home from now on."""
        before = int(self.of_frame[frame])
        self.usage[before] -= 1
        self.usage[heir] += 1
        self.peak[heir] = max(self.peak[heir], self.usage[heir])
        self.of_frame[frame] = heir
        holders = self.foreign.get(frame, {})
        holders.pop(heir, None)
        self._keep_or_drop(frame, holders)

    def _keep_or_drop(self, frame: int, holders: dict[int, int]) -> None:
        if holders:
            self.foreign[frame] = holders
        else:
            self.foreign.pop(frame, None)
        self.has_foreign[frame] = bool(holders)
