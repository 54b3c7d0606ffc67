"""Sequences of tokens that must not come: the last token of one is banned where the others are a row's last tokens.

A row remembers as many of its last tokens as the longest word needs.
"""

import numpy as np

from mm.addresses import Int32Array, Int64Array
from model.row_lists import RowLists

ANY = -1  # pads short words on the left: each token fits
NO_TOKEN = -2  # pads short rows: fits nothing else


class BadWords:
    """Of N rows."""

    def __init__(self, rows: int) -> None:
        self._tails: Int32Array = np.empty((rows, 0), np.int32)  # (N, W) the last W tokens of each row
        self._words = RowLists.empty(np.empty((0, 1), np.int32))  # entries (M, W + 1)

    def store(self, rows: Int32Array, words: list[list[list[int]]], histories: list[Int32Array]) -> None:
        """rows[i] has the bad words words[i] from now on, and the tokens histories[i] so far."""
        self._lengthen(max((len(word) for of_row in words for word in of_row), default=1))
        length = self._tails.shape[1] + 1
        padded = [
            np.array([[ANY] * (length - len(word)) + word for word in of_row], np.int32).reshape(-1, length)
            for of_row in words
        ]
        self._words.store(rows, padded)
        self._tails[rows] = NO_TOKEN
        for row, history in zip(rows.tolist(), histories, strict=True):
            if tail := min(len(history), length - 1):
                self._tails[row, -tail:] = history[-tail:]

    def add(self, rows: Int32Array, tokens: Int32Array) -> None:
        """tokens[i] follows the last token of rows[i]."""
        if self._tails.shape[1]:
            self._tails[rows, :-1] = self._tails[rows, 1:]
            self._tails[rows, -1] = tokens

    def take(self, rows: Int32Array | Int64Array) -> "BadWords":
        """A copy of `rows`, distinct, in this order."""
        taken = BadWords(0)
        taken._tails, taken._words = self._tails[rows], self._words.take(rows)
        return taken

    def banned(self) -> tuple[Int64Array, Int32Array]:
        """(rows, ids), (M,) each, of tokens that would complete a word."""
        before, last = self._words.entries[:, :-1], self._words.entries[:, -1]
        fits = ((before == ANY) | (before == self._tails[self._words.rows])).all(axis=1)
        return self._words.rows[fits], last[fits]

    def _lengthen(self, length: int) -> None:
        """Make room for words of so many tokens. The tails of rows whose words are shorter need not be longer."""
        more = length - 1 - self._tails.shape[1]
        if more > 0:
            self._tails = np.pad(self._tails, ((0, 0), (more, 0)), constant_values=NO_TOKEN)
            padded = np.pad(self._words.entries, ((0, 0), (more, 0)), constant_values=ANY)
            self._words = RowLists(self._words.rows, padded)
