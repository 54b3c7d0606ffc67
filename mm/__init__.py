"""The memory manager: the KV cache run as an operating system runs RAM. It decides; executors carry its orders out.

Invariants, cited by number where they are upheld, recomputed by `MemoryManager.audit`:
  1. free + held frames = usable ones.
  2. A frame's reference count is the number of page table entries and prefix pins that name it.
  3. A frame with several references, or whose content the page cache or a swap slot has, is never written: who wants to
     write gets a copy first.
  4. A page table entry never names a free frame or slot.
  5. A failed allocation changes nothing.
  6. Only the last page of an address space may be partly filled.
  7. A frame or slot with a copy in flight is pinned: it is neither freed nor reused until the copy's end is reported,
     nor is written over what the copy reads.
  8. A slot's reference count is the number of page table entries that name it.
  9. A frame and a slot that are twins have the same content, and each names the other.
 10. A cached page is found only by its own tokens after its own predecessor, whatever its key is worth.
 11. A held frame is charged to one tenant: to one that maps it, or to the last that did.
"""

from mm.address_space import AddressSpace
from mm.addresses import ABSENT, PAGE_SIZE, FrameNumber, PageNumber, Row, SwapSlot, pages_for
from mm.advice import Advice
from mm.content import ContentChain, Namespace
from mm.dry_run import DryRun, WouldRun
from mm.errors import (
    FrameNotHeld,
    MemoryCorruption,
    OutOfFrames,
    OutOfRows,
    OutOfSwapSlots,
    OverCommit,
    OverTenantLimit,
    PageNotResident,
    PagingError,
    QuotaExceeded,
)
from mm.flight_recorder import EventKind
from mm.lookup import Awaited, Miss, MissReason, PrefixMatch
from mm.memory_manager import MemoryManager
from mm.overcommit import OvercommitMode
from mm.page_copies import MemoryOrders, PageCopies, PageMover, SwapOrders, TableChanges
from mm.pins import Pin
from mm.preemption import Action, Candidates, CostEstimates, OomTable, Victim
from mm.pressure import Pressure, Stall
from mm.reclaim import Watermarks
from mm.room import Lack, Room
from mm.shared_prefixes import SharedPrefixes
from mm.statistics import Event, EventCounters, MappedRun, MemoryInformation, SequenceMemory, TenantMemory, WorkingSet
from mm.steady_rows import SteadyRows
from mm.swap_space import SwapBounds
from mm.tenants import TenantEvents, TenantLimits

__all__ = [
    "ABSENT",
    "PAGE_SIZE",
    "Action",
    "AddressSpace",
    "Advice",
    "Awaited",
    "Candidates",
    "ContentChain",
    "CostEstimates",
    "DryRun",
    "Event",
    "EventCounters",
    "EventKind",
    "FrameNotHeld",
    "FrameNumber",
    "Lack",
    "MappedRun",
    "MemoryCorruption",
    "MemoryInformation",
    "MemoryManager",
    "MemoryOrders",
    "Miss",
    "MissReason",
    "Namespace",
    "OomTable",
    "OutOfFrames",
    "OutOfRows",
    "OutOfSwapSlots",
    "OverCommit",
    "OverTenantLimit",
    "OvercommitMode",
    "PageCopies",
    "PageMover",
    "PageNotResident",
    "PageNumber",
    "PagingError",
    "Pin",
    "PrefixMatch",
    "Pressure",
    "QuotaExceeded",
    "Room",
    "Row",
    "SequenceMemory",
    "SharedPrefixes",
    "Stall",
    "SteadyRows",
    "SwapBounds",
    "SwapOrders",
    "SwapSlot",
    "TableChanges",
    "TenantEvents",
    "TenantLimits",
    "TenantMemory",
    "Victim",
    "Watermarks",
    "WorkingSet",
    "WouldRun",
    "pages_for",
]
