"""The memory manager: the KV cache run as an operating system runs RAM. It decides; executors carry its orders out.

Invariants, cited by number where they are upheld, recomputed by `MemoryManager.audit`:
  1. free + held frames = total.
  2. A frame's reference count is the number of page table entries that name it.
  3. A frame with several references is never written: who wants to write gets a copy first.
  4. A page table entry never names a free frame.
  5. A failed allocation changes nothing.
  6. Only the last page of an address space may be partly filled.
"""

from mm.address_space import AddressSpace
from mm.addresses import ABSENT, PAGE_SIZE, FrameNumber, PageNumber, Row, pages_for
from mm.errors import FrameNotHeld, MemoryCorruption, OutOfFrames, OutOfRows, PagingError
from mm.memory_manager import MemoryManager
from mm.page_copies import MemoryOrders, PageCopies, TableChanges
from mm.statistics import EventCounters, MemoryInformation

__all__ = [
    "ABSENT",
    "PAGE_SIZE",
    "AddressSpace",
    "EventCounters",
    "FrameNotHeld",
    "FrameNumber",
    "MemoryCorruption",
    "MemoryInformation",
    "MemoryManager",
    "MemoryOrders",
    "OutOfFrames",
    "OutOfRows",
    "PageCopies",
    "PageNumber",
    "PagingError",
    "Row",
    "TableChanges",
    "pages_for",
]
