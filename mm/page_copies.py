"""The orders that mm gives and an executor carries out. mm decides, and never touches keys or values itself.

Order of one step, on one stream: copies, then page table changes, then the step's own writes. The targets of the copies
of one step are distinct, and none of them is a source.
"""

from dataclasses import dataclass, field

import numpy as np

from mm.addresses import Int32Array


def _empty() -> Int32Array:
    return np.empty(0, np.int32)


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
    """

    rows: Int32Array = field(default_factory=_empty)
    pages: Int32Array = field(default_factory=_empty)
    frames: Int32Array = field(default_factory=_empty)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class MemoryOrders:
    """All that mm orders for one step."""

    copies: PageCopies = field(default_factory=PageCopies)
    table_changes: TableChanges = field(default_factory=TableChanges)
