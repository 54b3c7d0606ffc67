"""Frozen snapshots of memory. Unit of memory is the frame; everything here is a count that the audit can recompute."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryInformation:
    """Memory in total, at one moment between two steps. total = free + active."""

    total_frames: int
    free_frames: int
    active_frames: int  # held by at least one address space
    shared_frames: int  # held by several
    references: int  # page table entries that name a frame = sum of all reference counts
    rows: int  # address spaces
    tokens: int  # positions held, over all address spaces
    unused_tokens: int  # positions of mapped pages that hold nothing: the waste, in last pages only
    page_size: int  # token positions in a page


@dataclass(frozen=True, slots=True)
class EventCounters:
    """What has happened since the start, like /proc/vmstat. They only grow; readers take differences."""

    allocate: int
    free: int
    cow_fault: int
    fork: int
    truncate: int
