"""The plain types of memory: page numbers, frame numbers, and the arithmetic between a position and its page.

A *page* is `page_size` consecutive token positions of one Sequence, counted from 0 in it. A *frame* is the place on the
device that holds one page's keys and values, for all layers. A page table entry is a frame number, or `ABSENT`.
"""

from typing import NewType

import numpy as np
import numpy.typing as npt

PageNumber = NewType("PageNumber", int)
FrameNumber = NewType("FrameNumber", int)
Row = NewType("Row", int)

PAGE_SIZE = 16
"""Token positions in a page. The CUDA kernels take no other size; the CPU executor takes any."""

ABSENT = -1
"""The page table entry of a page that is nowhere."""

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that `tokens` positions need: the last one may be partly filled."""
    return -(-tokens // page_size)
