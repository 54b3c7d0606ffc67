"""The plain types of memory: page numbers, frame numbers, swap slots, and what a page table entry says.

A *page* is `page_size` consecutive token positions of one Sequence, counted from 0 in it. A *frame* is the place on the
device that holds one page's keys and values, for all layers; a *swap slot* is such a place in host memory.

    page table entry     >= 0           the frame that holds the page
                         ABSENT = -1    the page is nowhere
                         <= -2          the page is in swap slot -2 - entry (`slot_entry` converts both ways)
"""

from typing import NewType, TypeVar

import numpy as np
import numpy.typing as npt

PageNumber = NewType("PageNumber", int)
FrameNumber = NewType("FrameNumber", int)
SwapSlot = NewType("SwapSlot", int)
Row = NewType("Row", int)

PAGE_SIZE = 16
"""Token positions in a page. The CUDA kernels take no other size; the CPU executor takes any."""

ABSENT = -1
"""The page table entry of a page that is nowhere. In other tables of page numbers: none."""

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
IndexArray = npt.NDArray[np.intp]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

SlotOrEntry = TypeVar("SlotOrEntry", int, Int32Array)


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that `tokens` positions need: the last one may be partly filled."""
    return -(-tokens // page_size)


def slot_entry(value: SlotOrEntry) -> SlotOrEntry:
    """The page table entry that names a swap slot, and back: the function is its own inverse."""
    return -2 - value


def index_of(rows: Int32Array | IndexArray) -> IndexArray | slice:
    """What numpy indexes fastest by, in place of `rows`. By the slice of a single one it gives a view, no copy."""
    if len(rows) == 1:
        row = rows.item()
        return slice(row, row + 1)
    return rows.astype(np.intp)


def empty_int32() -> Int32Array:
    return np.empty(0, np.int32)
