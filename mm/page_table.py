"""Owns the page tables of all address spaces: rows of ONE int32 array, so that a step over all of them is vectorised.

A row belongs to one address space from `allocate_row` to `release_row`. Its first pages_for(length) entries name
frames, the rest is ABSENT: no page is without a position, so waste is bounded by one page a row (invariant 6).
"""

import numpy as np

from mm.addresses import ABSENT, Int32Array, Row
from mm.errors import OutOfRows


class PageTables:
    """entries (max_rows, max_pages) int32: a frame or ABSENT; lengths (max_rows,) int32: token positions held."""

    def __init__(self, max_rows: int, max_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.entries: Int32Array = np.full((max_rows, max_pages), ABSENT, np.int32)
        self.lengths: Int32Array = np.zeros(max_rows, np.int32)
        self.owners: list[str | None] = [None] * max_rows
        self._free_rows: list[int] = list(range(max_rows - 1, -1, -1))

    @property
    def max_rows(self) -> int:
        return int(self.entries.shape[0])

    @property
    def max_pages(self) -> int:
        return int(self.entries.shape[1])

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    def rows_in_use(self) -> Int32Array:
        """(N,) the taken rows, for audits and views."""
        return np.array([row for row, owner in enumerate(self.owners) if owner is not None], np.int32)

    def pages(self, rows: Int32Array) -> Int32Array:
        """(N,) pages that each row maps."""
        return -(-self.lengths[rows] // self.page_size)

    def frames(self, row: int) -> Int32Array:
        """(pages,) the frames of one row, in page order; a view, valid until the row changes."""
        return self.entries[row, : -(-int(self.lengths[row]) // self.page_size)]

    def allocate_row(self, owner: str) -> Row:
        """Take an empty row for `owner`. Raises OutOfRows."""
        if not self._free_rows:
            raise OutOfRows(self.max_rows)
        row = Row(self._free_rows.pop())
        self.owners[row] = owner
        return row

    def release_row(self, row: Row) -> None:
        """Give a row back. Its frames must have been released before."""
        self.entries[row, : -(-int(self.lengths[row]) // self.page_size)] = ABSENT
        self.lengths[row] = 0
        self.owners[row] = None
        self._free_rows.append(row)
