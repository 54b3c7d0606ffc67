"""Frozen snapshots of memory. Unit of memory is the frame; everything here is a count that the audit can recompute."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryInformation:
    """Memory in total, at one moment between two steps. total = free + cached + active + copying."""

    total_frames: int
    free_frames: int
    active_frames: int  # mapped by at least one address space
    shared_frames: int  # mapped by several
    references: int  # page table entries and prefix pins that name a frame = sum of all reference counts
    rows: int  # address spaces
    tokens: int  # positions held, over all address spaces
    unused_tokens: int  # positions of mapped pages that hold nothing: the waste, in last pages only
    page_size: int  # token positions in a page
    cached_frames: int = 0  # idle: mapped by nobody, kept to be found, reclaimable
    copying_frames: int = 0  # mapped by nobody, in a copy to or from swap
    available_frames: int = 0  # free, or reclaimable for anybody
    cached_pages: int = 0  # pages that can be found by content, mapped or not, resident or in swap
    total_slots: int = 0
    free_slots: int = 0
    sequence_slots: int = 0  # slots that page tables name; the other used ones hold copies of cached and clean pages


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
    evict: int = 0  # cached pages lost for want of memory
    refault: int = 0  # of these, pages computed again while that was remembered
    direct_reclaim: int = 0  # pages that an allocation reclaimed itself
    background_reclaim: int = 0  # pages reclaimed ahead of need
    scan: int = 0  # pages that background reclaim looked at
    activate: int = 0  # pages used a second time
    demote: int = 0  # pages that lost their place on the active list
    swap_out: int = 0  # pages copied to a slot
    swap_in: int = 0  # pages copied back
    swap_failed: int = 0  # pages of orders that failed
    collision: int = 0  # pages not cached because another page has their key
