"""Frozen snapshots of memory. Unit of memory is the frame; everything here is a count that the audit can recompute."""

from dataclasses import dataclass

from mm.pressure import Pressure
from mm.tenants import TenantEvents, TenantLimits


@dataclass(frozen=True, slots=True)
class MemoryInformation:
    """Memory in total, at one moment between two steps. total = free + cached + active + copying."""

    total_frames: int
    free_frames: int
    active_frames: int  # mapped by at least one address space or pin
    shared_frames: int  # mapped by several
    references: int  # page table entries and prefix pins that name a frame = sum of all reference counts
    rows: int  # address spaces
    tokens: int  # positions held, over all address spaces
    unused_tokens: int  # positions of mapped pages that hold nothing: the waste, in last pages only
    page_size: int  # token positions in a page
    cached_frames: int = 0  # idle: mapped by nobody, kept to be found, reclaimable
    copying_frames: int = 0  # mapped by nobody, in a copy to or from swap
    pinned_frames: int = 0  # held by prefix pins; part of active
    available_frames: int = 0  # free, or reclaimable for anybody
    committed_frames: int = 0  # promised: what every Sequence would come to own at its limit
    commit_limit: int = 0  # what strict overcommit would promise at most
    cached_pages: int = 0  # pages that can be found by content, mapped or not, resident or in swap
    active_pages: int = 0  # of these, used twice or more: the working set
    inactive_frames: int = 0  # of the cached frames, those on the inactive lists
    total_slots: int = 0
    free_slots: int = 0  # also those that have no memory behind them yet: it is taken as they are used
    sequence_slots: int = 0  # slots that page tables name; the other used ones hold copies of cached and clean pages
    cached_slots: int = 0  # slots of cached pages that are nowhere else
    reserved_frames: int = 0  # closed: there are addresses for them and no memory; not in the total
    saved_frames: int = 0  # references - active: so many more frames would be in use if nothing were shared


@dataclass(frozen=True, slots=True)
class EventCounters:
    """What has happened since the start, like /proc/vmstat. They only grow; readers take differences."""

    allocate: int
    free: int
    cow_fault: int
    fork: int
    truncate: int
    prefix_query: int = 0  # tokens of prompts that were looked up and admitted
    prefix_hit: int = 0  # of these, tokens served from the cache
    prefix_return: int = 0  # tokens looked up for Sequences that came back after preemption, which are no queries
    prefix_recover: int = 0  # of these, tokens that were still cached
    evict: int = 0  # cached pages lost for want of memory
    evict_age_ms: int = 0  # the time since each of these was used last, added up
    refault: int = 0  # of these, pages computed again while that was remembered
    direct_reclaim: int = 0  # pages that an allocation reclaimed itself
    background_reclaim: int = 0  # pages reclaimed ahead of need
    scan: int = 0  # pages that background reclaim looked at
    activate: int = 0  # pages used a second time
    demote: int = 0  # pages that lost their place on the active list
    rotate: int = 0  # active pages that got a second chance
    swap_out: int = 0  # pages copied to a slot
    swap_in: int = 0  # pages copied back
    swap_failed: int = 0  # pages of orders that failed
    collision: int = 0  # pages not cached because another page has their key
    deny: int = 0  # allocations that were refused
    preempt_swap: int = 0  # victims whose pages were to be swapped out
    preempt_recompute: int = 0  # victims that compute their pages again
    mapped_frame_turns: int = 0  # frames in use, added up over the turns of the engine, ...
    saved_frame_turns: int = 0  # ... and frames that sharing saved: of both together, the share saved over time


@dataclass(frozen=True, slots=True)
class SequenceMemory:
    """Memory of one address space, like /proc/PID/smaps_rollup. In pages, of which there are resident + swap."""

    owner: str
    tenant: str
    tokens: int
    resident: int  # RSS
    proportional: float  # PSS: each resident page divided by its holders; over all holders it adds up to active frames
    private: int  # USS: held by nobody else
    shared: int  # resident - private
    cached: int  # resident and to be found by content
    clean: int  # resident, and a slot has the same content
    swap: int  # in a slot
    moving: int  # resident, and being swapped out
    unused_tokens: int  # positions of its last page that hold nothing
    committed: int  # commit charge
    oom_score_adj: int


@dataclass(frozen=True, slots=True)
class MappedRun:
    """A run of equal pages of one address space, like a line of /proc/PID/maps."""

    first_page: int
    pages: int
    place: str  # "frame", "swap"
    is_shared: bool
    is_cached: bool
    is_writable: bool  # in place: private, and of no use to anybody else


@dataclass(frozen=True, slots=True)
class TenantMemory:
    """One tenant, like a cgroup's memory.* files. In frames and slots."""

    name: str
    current: int
    peak: int
    cached: int  # of current, idle
    swap: int
    limits: TenantLimits
    events: TenantEvents  # a copy
    pressure: Pressure


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """Whether memory is large enough for what comes back."""

    active_pages: int
    evictions: int
    refaults: int
    distances: tuple[int, ...]  # [i] counts refaults with a distance below 2**i, not below 2**(i - 1)
    frames_to_avoid_half: int  # of the refaults: so many more frames would have avoided them, to a power of two
    frames_to_avoid_most: int  # 90 % of them


@dataclass(frozen=True, slots=True)
class Event:
    """One event of the flight recorder. `kind` is the name of an `EventKind`, which says what place and count are.

    owner: the address space it happened to or for; "" for none, or one that is long gone.
    """

    number: int
    now: float
    step: int
    kind: str
    owner: str
    tenant: str
    place: int
    count: int
