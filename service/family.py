"""Sequences that begin alike: the choices of one request, the beams of one search, a request and its forks (forks.py).
They share pages by forks.

One of them computes the prompt. The others wait meanwhile, and then each enters by a fork of a relative's address
space, as far as both have the same tokens: no frame is allocated and nothing is computed twice, but for a last page
that is partly filled (copy-on-write) and the last token. So each samples its own first token, and all are equals from
then on. If the relative has gone by then, the next one becomes the first.
"""

from typing import TYPE_CHECKING

import numpy as np

from mm.addresses import Int32Array
from service.states import State

if TYPE_CHECKING:
    from service.request import Sequence
    from service.rows import RunningRows


class Family:
    """Who of them has a row now (RUNNING or SWAPPED), oldest first."""

    def __init__(self, common: int) -> None:
        """common: tokens that all of them begin with: a prompt."""
        self._common = common
        self.with_row: dict[tuple[int, int], Sequence] = {}

    def is_computing(self, sequence: "Sequence", rows: "RunningRows", lengths: Int32Array) -> bool:
        """Whether others have rows, and are just computing what `sequence` could fork: then it should wait."""
        return self.has_runner and self.nearest(sequence, rows, lengths) is None

    @property
    def has_runner(self) -> bool:
        """Whether somebody has a row and will get on: not one that an operator has paused."""
        return any(relative.state is not State.PAUSED for relative in self.with_row.values())

    def nearest(self, sequence: "Sequence", rows: "RunningRows", lengths: Int32Array) -> "tuple[Sequence, int] | None":
        """Whom `sequence`, which waits, can fork, and how many tokens they share: the whole prompt that all begin with
        but for its last token, or more. None if nobody has computed that much.

        lengths (max_rows,): positions that each row holds.
        """
        best: tuple[Sequence, int] | None = None
        most = len(sequence.tokens) - 1  # the last token is computed anew: its logits are wanted
        for relative in self.with_row.values():
            space = relative.space
            assert space is not None
            shared = min(int(lengths[space.row]), int(rows.known[space.row]), most)
            if shared < self._common - 1 or not space.is_resident:
                continue
            if shared > self._common:
                output = slice(self._common, shared)
                differs = rows.tokens[space.row, output] != sequence.tokens[output]
                shared = self._common + int(np.argmax(differs)) if differs.any() else shared
            if best is None or shared > best[1]:
                best = relative, shared
            if shared == most:
                break
        return best
