"""Owns the page tables of all address spaces: rows of ONE int32 array, so that a step over all of them is vectorised.

A row belongs to one address space from `allocate_row` to `release_row`. Its first pages_for(length) entries name
frames or swap slots (mm/addresses.py), the rest is ABSENT: no page is without a position, so waste is bounded by one
page a row (invariant 6).
"""

import numpy as np

from mm.addresses import ABSENT, BoolArray, Int32Array, Int64Array, Row
from mm.errors import OutOfRows

REMEMBERED_OWNERS = 65_536
"""Address spaces whose owners' names are known after their end, the latest ones."""


class PageTables:
    """entries (max_rows, max_pages) int32; lengths (max_rows,) int32: positions held; and facts about each row."""

    def __init__(self, max_rows: int, max_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.entries: Int32Array = np.full((max_rows, max_pages), ABSENT, np.int32)
        self.lengths: Int32Array = np.zeros(max_rows, np.int32)
        self.barred: Int32Array = np.zeros(max_rows, np.int32)  # entries that name a slot + pages in a copy
        self.exposed: BoolArray = np.zeros(max_rows, np.bool_)  # the last page may be shared or sealed
        self.cold: BoolArray = np.zeros(max_rows, np.bool_)  # its cached pages go first once it has ended
        self.tenants: Int32Array = np.zeros(max_rows, np.int32)
        self.epochs: Int64Array = np.zeros(max_rows, np.int64)  # grows each time a row is released
        self.serials: Int64Array = np.zeros(max_rows, np.int64)  # of the address space: never used again
        self.owners: list[str | None] = [None] * max_rows
        self.sent_as_shared = [0] * max_rows  # so many of its first pages: the device knows that a fork has them, too
        self._names: list[tuple[int, str]] = [(0, "")] * REMEMBERED_OWNERS
        self._last_serial = 0
        self._unsent: list[tuple[int, Int32Array]] = []  # (row, pages) that were mapped outside a step
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
        """(N,) pages that each row has."""
        return -(-self.lengths[rows] // self.page_size)

    def mapped(self, row: int) -> Int32Array:
        """(pages,) the entries of one row, in page order; a view, valid until the row changes."""
        return self.entries[row, : -(-int(self.lengths[row]) // self.page_size)]

    def note(self, row: int, pages: Int32Array) -> None:
        """The entries of these pages changed outside a step: the device has to learn them before the next one."""
        self._unsent.append((row, pages))

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def take_unsent(self) -> tuple[Int32Array, Int32Array]:
        """(rows, pages) noted since the last call, without those that do not name a frame any more; may repeat.

        There must be some.
        """
        rows = np.concatenate([np.full(len(pages), row, np.int32) for row, pages in self._unsent])
        pages = np.concatenate([pages for _, pages in self._unsent])
        self._unsent.clear()
        is_frame = self.entries[rows, pages] >= 0
        return rows[is_frame], pages[is_frame]

    def allocate_row(self, owner: str, tenant: int = 0) -> Row:
        """Take an empty row for `owner`. Raises OutOfRows."""
        if not self._free_rows:
            raise OutOfRows(self.max_rows)
        row = Row(self._free_rows.pop())
        self._last_serial += 1
        self.serials[row] = self._last_serial
        self._names[self._last_serial % REMEMBERED_OWNERS] = (self._last_serial, owner)
        self.owners[row] = owner
        self.tenants[row] = tenant
        return row

    def name(self, serial: int) -> str:
        """The owner of the address space with this serial, also after its end; "" if that is long ago."""
        number, owner = self._names[serial % REMEMBERED_OWNERS]
        return owner if number == serial else ""

    def serials_of(self, owner: str) -> list[int]:
        """The address spaces of an owner, as far as its name is known."""
        return [serial for serial, name in self._names if serial and name == owner]

    def release_row(self, row: Row) -> None:
        """Give a row back. What its entries name must have been released before."""
        self.entries[row, : -(-int(self.lengths[row]) // self.page_size)] = ABSENT
        self.lengths[row] = self.barred[row] = self.tenants[row] = self.sent_as_shared[row] = 0
        self.exposed[row] = self.cold[row] = False
        self.epochs[row] += 1
        self.owners[row] = None
        self._free_rows.append(row)
