"""The orders that mm gives and an executor carries out. mm decides, and never touches keys or values itself.

Order of one step, on one stream: copies, then page table changes, then the step's own writes. The targets of the copies
of one step are distinct, and none of them is a source.

Swap orders go beside the steps, on a stream of their own where there is one. They start after the page copies of the
plan they are handed over with (without a plan: after all steps submitted so far), since a frame they read was written
by an earlier step, and a frame they write may have been read by one. Within one order swap-outs and swap-ins do not
touch the same frame or slot. The executor reports each ticket once, completed or failed, in any order; until then
nothing else touches the frames and slots that it names.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from mm.addresses import BoolArray, Int32Array

_NONE, _NOTHING = np.empty(0, np.int32), np.empty(0, np.bool_)


def _empty() -> Int32Array:
    return _NONE


def _nothing() -> BoolArray:
    return _NOTHING


@dataclass(frozen=True, slots=True)
class PageCopies:
    """Whole frames to copy, all layers: frame sources[i] to frame targets[i]. Both (N,) int32."""

    sources: Int32Array = field(default_factory=_empty)
    targets: Int32Array = field(default_factory=_empty)

    def __len__(self) -> int:
        return len(self.sources)


@dataclass(frozen=True, slots=True)
class TableChanges:
    """Page table entries to set: table[rows[i], pages[i]] = frames[i]. All (N,) int32; each (row, page) at most once.

    Entries past a row's length are never cleared: nobody reads them (kernels stop at the length).

    shared (N,) bool, or empty where it is True for none: whether others had the page, too, when the order was given. A
    hint for the device's caches; it is not taken back when they go.
    """

    rows: Int32Array = field(default_factory=_empty)
    pages: Int32Array = field(default_factory=_empty)
    frames: Int32Array = field(default_factory=_empty)
    shared: BoolArray = field(default_factory=_nothing)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class MemoryOrders:
    """All that mm orders for one step."""

    copies: PageCopies = field(default_factory=PageCopies)
    table_changes: TableChanges = field(default_factory=TableChanges)


@dataclass(frozen=True, slots=True)
class SwapOrders:
    """Whole frames to copy to host memory and back: frame out_frames[i] to slot out_slots[i], and slot in_slots[i] to
    frame in_frames[i]. All (N,) int32.

    `ticket` names the order in `MemoryManager.complete` and `fail`. An empty order (len 0) has nothing to report.
    """

    ticket: int = 0
    out_frames: Int32Array = field(default_factory=_empty)
    out_slots: Int32Array = field(default_factory=_empty)
    in_slots: Int32Array = field(default_factory=_empty)
    in_frames: Int32Array = field(default_factory=_empty)

    def __len__(self) -> int:
        return len(self.out_frames) + len(self.in_slots)


NO_SWAPS = SwapOrders()


class PageMover(Protocol):
    """What carries swap orders out: an executor, or the tests' simulated one."""

    def start(self, orders: SwapOrders) -> None:
        """Enqueue the copies and return at once."""
        ...

    def ended(self) -> list[tuple[int, bool]]:
        """Tickets that ended since the last call, and whether all their copies succeeded. Never blocks."""
        ...
