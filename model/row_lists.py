"""Lists of unequal length, one for each row, in one flat table: a step reads those of all its rows without a loop."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mm.addresses import Int32Array, Int64Array


@dataclass(slots=True)
class RowLists:
    """M entries of all rows together: entries[i] is in the list of rows[i]. The entries of a row keep their order."""

    rows: Int64Array  # (M,)
    entries: npt.NDArray[Any]  # (M, ...)

    @classmethod
    def empty(cls, like: npt.NDArray[Any]) -> "RowLists":
        """No entries yet, of the shape and dtype of like[0]."""
        return cls(np.empty(0, np.int64), like[:0])

    def __len__(self) -> int:
        return len(self.rows)

    def store(self, rows: Int32Array, lists: list[npt.NDArray[Any]]) -> None:
        """rows[i] has the list lists[i] from now on, and no other."""
        kept = ~np.isin(self.rows, rows)
        added = np.repeat(rows.astype(np.int64), [len(entries) for entries in lists])
        self.rows = np.concatenate((self.rows[kept], added))
        self.entries = np.concatenate((self.entries[kept], *lists))

    def take(self, rows: Int32Array | Int64Array) -> "RowLists":
        """The lists of `rows` (N,), distinct, as those of rows 0 ... N - 1."""
        if not len(self.rows):
            return self
        places = np.full(1 + max(int(self.rows.max()), int(rows.max(initial=0))), -1, np.int64)
        places[rows] = np.arange(len(rows))
        found = places[self.rows]
        return RowLists(found[found >= 0], self.entries[found >= 0])
