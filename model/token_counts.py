"""Which tokens rows have in prompt or output, and how often in the output: all that penalties depend on.

A row's table is as long as it has different tokens, so it never exceeds the vocabulary nor the longest Sequence, and a
step costs as much as its rows have different tokens.
"""

import numpy as np

from mm.addresses import BoolArray, Int32Array, Int64Array

FREE = -1

FIRST_WIDTH = 64


class TokenCounts:
    """Tables of N rows, of one width: row r has distinct[r] tokens, in the first places."""

    def __init__(self, rows: int) -> None:
        self.is_counted: BoolArray = np.zeros(rows, np.bool_)
        self._ids: Int32Array = np.empty((rows, 0), np.int32)
        self._counts: Int32Array = np.empty((rows, 0), np.int32)
        self._distinct: Int32Array = np.zeros(rows, np.int32)

    def store(self, row: int, history: Int32Array, prompt: int) -> None:
        """Count `row` from now on: it has the tokens `history`, of which the first `prompt` are the prompt."""
        ids, places = np.unique(history, return_inverse=True)
        self.forget(row)
        self._widen(len(ids))
        self.is_counted[row] = True
        self._distinct[row] = len(ids)
        self._ids[row, : len(ids)] = ids
        self._counts[row, : len(ids)] = np.bincount(places[prompt:], minlength=len(ids))

    def forget(self, rows: Int32Array | int) -> None:
        """Count them no more."""
        self.is_counted[rows] = False
        self._distinct[rows] = 0
        self._ids[rows] = FREE

    def add(self, rows: Int32Array, tokens: Int32Array) -> None:
        """rows[i] has tokens[i] once more in its output. Rows that are not counted are passed over."""
        counted = self.is_counted[rows]
        rows, tokens = rows[counted], tokens[counted]
        if not len(rows):
            return
        distinct = self._distinct[rows]
        self._widen(int(distinct.max()) + 1)
        is_same = self._ids[rows, : int(distinct.max()) + 1] == tokens[:, None]
        is_new = ~is_same.any(axis=1)
        places = np.where(is_new, distinct, is_same.argmax(axis=1))
        self._ids[rows, places] = tokens
        self._counts[rows, places] = np.where(is_new, 1, self._counts[rows, places] + 1)
        self._distinct[rows] += is_new

    def take(self, rows: Int32Array | Int64Array) -> "TokenCounts":
        """A copy of `rows`, in this order."""
        taken = TokenCounts(0)
        taken.is_counted, taken._distinct = self.is_counted[rows], self._distinct[rows]
        width = int(taken._distinct.max(initial=0))
        taken._ids, taken._counts = self._ids[rows, :width], self._counts[rows, :width]
        return taken

    def entries(self) -> tuple[Int64Array, Int32Array, Int32Array]:
        """(rows, ids, counts), (M,) each: every token of every row once, with how often the output has it."""
        rows, places = np.nonzero(self._ids != FREE)
        return rows, self._ids[rows, places], self._counts[rows, places]

    def _widen(self, width: int) -> None:
        """Make room for so many tokens in every row."""
        if width > self._ids.shape[1]:
            more = max(FIRST_WIDTH, 1 << (width - 1).bit_length()) - self._ids.shape[1]
            self._ids = np.pad(self._ids, ((0, 0), (0, more)), constant_values=FREE)
            self._counts = np.pad(self._counts, ((0, 0), (0, more)))
