"""The running Sequences as a struct of arrays, so that a step is a few numpy operations over all of them.

A row is a Sequence's place in the page tables, in the executor's persistent batch, and here. What the counts mean is
written at the top of scheduler.py, whose parts alone read and write them.
"""

import numpy as np

from mm.addresses import BoolArray, FloatArray, Int32Array, Int64Array
from service.request import Sequence

NO_TOKEN = -2  # pads the rows of end ids: no token has this id
NO_PRIORITY = -(2**31)  # of a row that nobody runs in: more urgent than any


class RunningRows:
    """The running Sequences as a struct of arrays, by row. A row that nobody runs in has remaining 0 and limit 0."""

    def __init__(self, rows: int, max_length: int) -> None:
        self.sequences: list[Sequence | None] = [None] * rows
        self.tokens: Int32Array = np.empty((rows, max_length), np.int32)  # takes memory when touched
        self.known: Int32Array = np.zeros(rows, np.int32)
        self.remaining: Int32Array = np.zeros(rows, np.int32)
        self.limit: Int32Array = np.zeros(rows, np.int32)
        self.prompt: Int32Array = np.zeros(rows, np.int32)
        self.arrival: Int64Array = np.zeros(rows, np.int64)
        self.priority: Int32Array = np.full(rows, NO_PRIORITY, np.int32)  # a higher number is less urgent
        self.epoch: Int64Array = np.zeros(rows, np.int64)  # grows each time a row changes hands
        self.front_end: Int32Array = np.zeros(rows, np.int32)
        self.sequence_id: Int64Array = np.zeros(rows, np.int64)
        self.last_step: Int64Array = np.zeros(rows, np.int64)  # but for steps of a steady decode, which note nothing
        self.last_token_s: FloatArray = np.full(rows, np.nan)
        self.end_ids: Int32Array = np.full((rows, 1), NO_TOKEN, np.int32)
        self.end_id_counts: Int32Array = np.zeros(rows, np.int32)
        self.logprobs: Int32Array = np.full(rows, -1, np.int32)  # likeliest tokens to report; -1: nothing
        self.is_constrained: BoolArray = np.zeros(rows, np.bool_)  # it samples under a mask of its grammar
        self.is_beam: BoolArray = np.zeros(rows, np.bool_)  # its next token is chosen by its group
        self.constrained = self.reporting = 0  # rows with a grammar; rows that report log-probabilities

    def enter(self, row: int, sequence: Sequence, arrival: int, computed: int) -> None:
        """`computed` tokens of the Sequence have keys and values already: they were in the page cache."""
        count = len(sequence.tokens)
        self.sequences[row] = sequence
        self.tokens[row, :count] = sequence.tokens
        self.known[row] = count
        self.remaining[row] = count - computed
        self.limit[row] = sequence.limit
        self.prompt[row] = sequence.prompt_tokens
        self.arrival[row] = arrival
        self.priority[row] = sequence.priority
        self.front_end[row] = sequence.front_end
        self.sequence_id[row] = sequence.sequence_id
        self.last_token_s[row] = np.nan
        self.last_step[row] = 0
        if sequence.sampling.logprobs >= 0:
            self.logprobs[row] = sequence.sampling.logprobs
            self.reporting += 1
        if sequence.matcher is not None:
            self.is_constrained[row] = True
            self.constrained += 1
        self.is_beam[row] = sequence.group is not None
        missing = len(sequence.end_ids) - self.end_ids.shape[1]
        if missing > 0:
            self.end_ids = np.pad(self.end_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.end_ids[row] = NO_TOKEN
        self.end_id_counts[row] = len(sequence.end_ids)
        self.end_ids[row, : len(sequence.end_ids)] = sequence.end_ids

    def leave(self, row: int) -> None:
        """The tokens known so far go back to the Sequence."""
        sequence = self.sequences[row]
        assert sequence is not None
        sequence.tokens = self.tokens[row, : self.known[row]].copy()
        self.sequences[row] = None
        self.known[row] = self.remaining[row] = self.limit[row] = 0
        if self.logprobs[row] >= 0:
            self.logprobs[row] = -1
            self.reporting -= 1
        if self.is_constrained[row]:
            self.is_constrained[row] = False
            self.constrained -= 1
        self.priority[row] = NO_PRIORITY
        self.epoch[row] += 1

    def append(self, row: int, token: int) -> None:
        """The next token of a beam: it is to be computed."""
        self.tokens[row, self.known[row]] = token
        self.known[row] += 1
        self.remaining[row] = 1

    def at(self, row: int) -> Sequence:
        """Who runs in `row`."""
        sequence = self.sequences[row]
        assert sequence is not None
        return sequence
