"""Keeps what has been promised: the pages that every Sequence would come to own if it ran to its limit.

    strict      a promise beyond the frames that can be promised is refused: nobody is ever preempted for want of memory
    heuristic   refused is only what can never fit (the default): most answers end long before their limit
    always      nothing is refused here; what does not fit fails when it grows

A Sequence's commit charge is the pages up to its limit, without the frames that it shares at the start: these exist.
"""

from enum import StrEnum

import numpy as np

from mm.addresses import Int32Array
from mm.errors import OverCommit


class OvercommitMode(StrEnum):
    STRICT = "strict"
    HEURISTIC = "heuristic"
    ALWAYS = "always"


class CommitLedger:
    """The commit charge of each row. `mode` may be changed at any time; it is looked at when something is promised."""

    def __init__(self, rows: int, total_frames: int) -> None:
        self.mode = OvercommitMode.HEURISTIC
        self.committed = 0
        self.charges: Int32Array = np.zeros(rows, np.int32)
        self.total_frames = total_frames  # written when the pool is resized

    def limit(self, pinned_frames: int) -> int:
        """Frames that can be promised: all but those that are held by hand."""
        return self.total_frames - pinned_frames

    def check(self, pages: int, pinned_frames: int) -> None:
        """Raises OverCommit if `pages` more may not be promised in this mode."""
        limit = self.limit(pinned_frames)
        if self.mode is OvercommitMode.STRICT and pages and self.committed + pages > limit:
            raise OverCommit(pages, self.committed, limit)
        if self.mode is OvercommitMode.HEURISTIC and pages > self.total_frames:
            raise OverCommit(pages, 0, self.total_frames)

    def promise(self, row: int, pages: int) -> None:
        self.charges[row] = pages
        self.committed += pages

    def move(self, row: int, heir: int) -> None:
        """The promise of `row` is that of `heir` from now on, beside its own."""
        self.charges[heir] += self.charges[row]
        self.charges[row] = 0

    def end(self, row: int) -> None:
        """The row's promise is over."""
        self.committed -= int(self.charges[row])
        self.charges[row] = 0
