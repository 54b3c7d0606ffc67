"""Takes the snapshots of mm/statistics.py from a memory manager. For operators: some read every count there is."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mm.addresses import ABSENT, slot_entry
from mm.flight_recorder import EventKind
from mm.lru import LruList
from mm.statistics import Event, EventCounters, MappedRun, MemoryInformation, SequenceMemory, TenantMemory, WorkingSet

if TYPE_CHECKING:
    from mm.memory_manager import MemoryManager

OF_FRAMES = (EventKind.ALLOCATE, EventKind.COPY, EventKind.DROP, EventKind.EVICT)
"""Events whose place is a frame."""


def information(memory: "MemoryManager") -> MemoryInformation:
    """Memory in total."""
    references, rows = memory.frames.references, memory.tables.rows_in_use()
    tokens = int(memory.tables.lengths[rows].sum())
    mapped = int(memory.tables.pages(rows).sum())
    active = int(np.count_nonzero(references))
    tenants = range(len(memory.tenants.names))
    return MemoryInformation(
        total_frames=memory.frames.usable,
        free_frames=memory.frames.free_frames,
        active_frames=active,
        shared_frames=int(np.count_nonzero(references > 1)),
        references=int(references.sum()),
        rows=len(rows),
        tokens=tokens,
        unused_tokens=mapped * memory.page_size - tokens,
        page_size=memory.page_size,
        cached_frames=memory.lru.idle_pages,
        copying_frames=memory.frames.usable - memory.frames.free_frames - active - memory.lru.idle_pages,
        pinned_frames=memory.pins.count_frames(),
        available_frames=memory.available_frames,
        committed_frames=memory.ledger.committed,
        commit_limit=memory.ledger.limit(memory.pins.pages),
        cached_pages=len(memory.cache),
        active_pages=memory.lru.active_pages,
        inactive_frames=sum(memory.lru.size(tenant, LruList.INACTIVE) for tenant in tenants),
        total_slots=memory.swap.usable,
        free_slots=memory.swap.usable - memory.swap.used_slots,
        sequence_slots=memory.swap.sequence_slots,
        cached_slots=sum(memory.lru.size(tenant, LruList.SWAPPED) for tenant in tenants),
        reserved_frames=memory.frames.total - memory.frames.usable,
        saved_frames=memory.frames.saved,
    )


def counters(memory: "MemoryManager") -> EventCounters:
    """What has happened since the start."""
    return EventCounters(
        allocate=memory.frames.allocated,
        free=memory.frames.freed,
        cow_fault=memory.growth.cow_faults,
        fork=memory.forks,
        truncate=memory.truncates,
        prefix_query=memory.queried_tokens,
        prefix_hit=memory.hit_tokens,
        prefix_return=memory.returned_tokens,
        prefix_recover=memory.recovered_tokens,
        evict=memory.shadows.evictions,
        evict_age_ms=round(1000 * memory.residency.evicted_age_s),
        refault=memory.shadows.refaults,
        direct_reclaim=memory.reclaimer.direct,
        background_reclaim=memory.reclaimer.background,
        scan=memory.reclaimer.scanned,
        activate=memory.lru.activated,
        demote=memory.lru.demoted,
        rotate=memory.lru.rotated,
        swap_out=memory.swapper.swapped_out,
        swap_in=memory.swapper.swapped_in,
        swap_failed=memory.swapper.failed,
        collision=memory.cache.collisions,
        deny=memory.growth.denials,
        preempt_swap=memory.swap_preemptions,
        preempt_recompute=memory.recompute_preemptions,
        mapped_frame_turns=memory.mapped_frame_turns,
        saved_frame_turns=memory.saved_frame_turns,
    )


def sequence_memory(memory: "MemoryManager", row: int) -> SequenceMemory:
    """Memory of one address space."""
    tables, entries = memory.tables, memory.tables.mapped(row)
    frames = entries[entries >= 0]
    references = memory.frames.references[frames]
    private = int(np.count_nonzero(references == 1))
    swapped = len(entries) - len(frames)
    return SequenceMemory(
        owner=tables.owners[row] or "",
        tenant=memory.tenants.names[tables.tenants[row]],
        tokens=int(tables.lengths[row]),
        resident=len(frames),
        proportional=float((1 / references).sum()) if len(frames) else 0.0,
        private=private,
        shared=len(frames) - private,
        cached=int(np.count_nonzero(memory.cache.entries_of_frames[frames] != ABSENT)),
        clean=int(np.count_nonzero(memory.swap.slots_of_frames[frames] != ABSENT)),
        swap=swapped,
        moving=int(tables.barred[row]) - swapped,
        unused_tokens=len(entries) * memory.page_size - int(tables.lengths[row]),
        committed=int(memory.ledger.charges[row]),
        oom_score_adj=int(memory.scorer.adjustments[row]),
    )


def maps(memory: "MemoryManager", row: int) -> list[MappedRun]:
    """The pages of one address space, in runs of equal kind."""
    entries = memory.tables.mapped(row)
    is_frame = entries >= 0
    frames = np.where(is_frame, entries, 0)
    slots = np.where(is_frame, 0, slot_entry(entries))
    slot_references = np.asarray(memory.swap.references)
    shared_in_swap = slot_references[slots] > 1 if memory.swap.total else np.zeros(len(entries), np.bool_)
    is_shared = np.where(is_frame, memory.frames.references[frames] > 1, shared_in_swap)
    is_cached = is_frame & (memory.cache.entries_of_frames[frames] != ABSENT)
    is_writable = is_frame & ~is_shared & ~memory.frames.sealed[frames]
    kinds = np.stack((is_frame, is_shared, is_cached, is_writable))
    borders = np.flatnonzero((kinds[:, 1:] != kinds[:, :-1]).any(axis=0)) + 1
    starts = [0, *borders.tolist()] if len(entries) else []
    ends = [*starts[1:], len(entries)]
    return [
        MappedRun(
            first_page=start,
            pages=end - start,
            place="frame" if is_frame[start] else "swap",
            is_shared=bool(is_shared[start]),
            is_cached=bool(is_cached[start]),
            is_writable=bool(is_writable[start]),
        )
        for start, end in zip(starts, ends, strict=False)
    ]


def tenant_memory(memory: "MemoryManager", tenant: int, now: float) -> TenantMemory:
    """One tenant, at a time of the engine's clock."""
    tenants = memory.tenants
    return TenantMemory(
        name=tenants.names[tenant],
        current=int(tenants.usage[tenant]),
        peak=int(tenants.peak[tenant]),
        cached=memory.lru.idle_of(tenant),
        swap=int(tenants.swap_usage[tenant]),
        limits=tenants.limits[tenant],
        events=replace(tenants.events[tenant]),
        pressure=memory.pressure_of(tenants.names[tenant]).read(now),
    )


def working_set(memory: "MemoryManager") -> WorkingSet:
    """Whether memory is large enough for what comes back."""
    shadows = memory.shadows
    return WorkingSet(
        active_pages=memory.lru.active_pages,
        evictions=shadows.evictions,
        refaults=shadows.refaults,
        distances=tuple(shadows.distances),
        frames_to_avoid_half=shadows.frames_to_avoid(0.5),
        frames_to_avoid_most=shadows.frames_to_avoid(0.9),
    )


def find_events(
    memory: "MemoryManager",
    most: int,
    *,
    after: int = -1,
    kind: EventKind | None = None,
    tenant: str | None = None,
    owner: str | None = None,
) -> list[Event]:
    """The last `most` kept events after number `after` that agree with all that is asked for, oldest first."""
    serials = None if owner is None else np.array(memory.tables.serials_of(owner), np.int64)
    number = None
    if tenant is not None:
        number = memory.tenants.names.index(tenant) if tenant in memory.tenants.names else len(memory.tenants.names)
    found = memory.recorder.find(after=after, kind=kind, tenant=number, serials=serials)
    return [_event(memory, each) for each in found[-most:].tolist()]


def events_of_frame(memory: "MemoryManager", frame: int, most: int) -> list[Event]:
    """The last kept events whose place is this frame, oldest first."""
    found = [memory.recorder.find(kind=kind, place=frame) for kind in OF_FRAMES]
    return [_event(memory, number) for number in np.sort(np.concatenate(found))[-most:].tolist()]


def _event(memory: "MemoryManager", number: int) -> Event:
    now, (step, kind, serial, tenant, place, count) = memory.recorder.at(number)
    name = memory.tables.name(serial) if serial else ""
    return Event(number, now, step, EventKind(kind).name.lower(), name, memory.tenants.names[tenant], place, count)
