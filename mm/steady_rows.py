"""Rows that all grow by one token a step while nothing else about them changes: what a step would look up for each of
them is known ahead, since all reach the next page edge by counting.
"""

import numpy as np

from mm.addresses import IndexArray, Int32Array

_NOBODY = np.empty(0, np.intp)


class PageEdges:
    """When each of some rows is at a page edge, if all grow alike."""

    def __init__(self, lengths: Int32Array, page_size: int) -> None:
        """lengths (S,) int32: S > 0 positions, from which all grow by the same number."""
        offsets = lengths % page_size
        order = np.argsort(offsets, kind="stable")
        bounds = np.searchsorted(offsets[order], np.arange(1, page_size))
        self._places: list[IndexArray] = np.split(order, bounds)
        self._first = int(lengths[0])

    def at(self, lengths: Int32Array) -> IndexArray:
        """(N,) ascending places of the rows whose length is a multiple of the page size now. lengths (S,) int32."""
        return self._places[(self._first - int(lengths[0])) % len(self._places)]


class SteadyRows:
    """S > 0 distinct rows, and their lengths. Valid while none of them changes hands or grows in another way."""

    def __init__(self, rows: Int32Array, lengths: Int32Array, page_size: int) -> None:
        self.rows = rows
        self.lengths = lengths  # (S,) int32; a new array with each growth
        self.edges = PageEdges(lengths, page_size)
        self._index = rows.astype(np.intp)
        first, last = int(rows[0]), int(rows[-1])
        is_slice = last - first + 1 == len(rows) and bool((np.diff(rows) == 1).all())
        self.index: IndexArray | slice = slice(first, last + 1) if is_slice else self._index
        """The rows, in whichever form numpy indexes fastest by."""

    def growing(self) -> tuple[IndexArray, IndexArray]:
        """(rows, places), (N,) each: those whose next position lies in a new page."""
        places = self.edges.at(self.lengths)
        return (self._index[places], places) if len(places) else (_NOBODY, places)
