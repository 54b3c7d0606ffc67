"""Penalties, biases and bans by row: step A of the definition in model/sampler.py, and the memory that it needs.

What a row remembers of its tokens is how often it has each (`TokenCounts`) and its last few (`BadWords`), never the
whole history.
"""

import numpy as np
from torch import Tensor

from mm.addresses import BoolArray, Int32Array, Int64Array
from model.bad_words import BadWords
from model.row_lists import RowLists
from model.step_plan import Float32Array, RowSettings, SamplingParameters
from model.token_counts import TokenCounts

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)

BIAS = np.dtype([("id", np.int64), ("value", np.float32)])
NO_TOKENS = np.empty(0, np.int32)


class Adjustments:
    """Of N rows. Rows that ask for nothing cost a glance at `asks`."""

    def __init__(self, rows: int) -> None:
        self.asks: BoolArray = np.zeros(rows, np.bool_)
        self.penalties: Float32Array = np.zeros((3, rows), np.float32)  # repetition, presence, frequency
        self.prompts: Int32Array = np.zeros(rows, np.int32)
        self.min_tokens: Int32Array = np.zeros(rows, np.int32)
        self.counts = TokenCounts(rows)
        self.words = BadWords(rows)
        self.biases = RowLists.empty(np.empty(0, BIAS))
        self.allowed = RowLists.empty(np.empty(0, np.int64))
        self.barred = RowLists.empty(np.empty(0, np.int64))

    def store(self, settings: RowSettings) -> None:
        """Overwrite the rows that `settings` names. Raises ValueError if it has not what a row must look back at."""
        rows, parameters = settings.rows, settings.parameters
        asks = [_asks(p) for p in parameters]
        if not any(asks) and not self.asks[rows].any():
            return
        if any(_looks_back(p) for p in parameters) and not len(rows) == len(settings.prompts) == len(
            settings.histories
        ):
            raise ValueError("rows with penalties, bad words or min_tokens need their prompts and histories")
        self.asks[rows] = asks
        self.prompts[rows] = settings.prompts if len(settings.prompts) else 0
        self.min_tokens[rows] = [p.min_tokens for p in parameters]
        self.biases.store(rows, [_biases(p) for p in parameters])
        self.allowed.store(rows, [np.array(p.allowed_token_ids, np.int64) for p in parameters])
        self.barred.store(rows, [np.array(p.barred_ids, np.int64) for p in parameters])
        histories = settings.histories or [NO_TOKENS] * len(rows)
        self.words.store(rows, [p.bad_words for p in parameters], histories)
        self.counts.forget(rows)
        for row, p, history in zip(rows.tolist(), parameters, histories, strict=True):
            if p.has_penalties:
                repetition = min(max(p.repetition_penalty, SMALLEST), LARGEST)
                self.penalties[:, row] = repetition, p.presence_penalty, p.frequency_penalty
                self.counts.store(row, history, int(self.prompts[row]))

    def add(self, rows: Int32Array, tokens: Int32Array) -> None:
        """rows[i] has sampled tokens[i]."""
        asks = self.asks[rows]
        if asks.any():
            self.counts.add(rows[asks], tokens[asks])
            self.words.add(rows[asks], tokens[asks])

    def take(self, rows: Int32Array | Int64Array) -> "Adjustments":
        """A copy of `rows` (N,), distinct, in this order; NOBODY if none of them asks."""
        asks = self.asks[rows]
        if not asks.any():
            return NOBODY
        taken = Adjustments(0)
        taken.asks, taken.penalties = asks, self.penalties[:, rows]
        taken.prompts, taken.min_tokens = self.prompts[rows], self.min_tokens[rows]
        taken.counts, taken.words = self.counts.take(rows), self.words.take(rows)
        taken.biases, taken.allowed, taken.barred = (
            lists.take(rows) for lists in (self.biases, self.allowed, self.barred)
        )
        return taken

    def apply(self, logits: Tensor, positions: Int64Array) -> Int64Array:
        """Adjust the logits (N, V) of these N rows in place, on the CPU. Returns the rows that were.

        positions (N,): where each row's new token will stand.
        """
        asking = np.flatnonzero(self.asks)
        if len(asking):
            values = logits.numpy()
            with np.errstate(over="ignore"):  # it is held at the largest number
                self._penalize(values)
                self._add_biases(values)
            self._ban(values, positions)
        return asking

    def _penalize(self, logits: Float32Array) -> None:
        rows, ids, counts = self.counts.entries()
        repetition, presence, frequency = self.penalties[:, rows]
        x = logits[rows, ids]
        x = np.where(x > 0, x / repetition, x * repetition)
        x -= np.where(counts > 0, frequency * counts.astype(np.float32) + presence, np.float32(0))
        logits[rows, ids] = np.clip(x, -LARGEST, LARGEST)

    def _add_biases(self, logits: Float32Array) -> None:
        rows, ids = self.biases.rows, self.biases.entries["id"]
        logits[rows, ids] = np.clip(logits[rows, ids] + self.biases.entries["value"], -LARGEST, LARGEST)

    def _ban(self, logits: Float32Array, positions: Int64Array) -> None:
        if len(self.allowed):
            rows, ids = self.allowed.rows, self.allowed.entries
            kept = logits[rows, ids]
            logits[np.unique(rows)] = -np.inf
            logits[rows, ids] = kept
        is_short = positions - self.prompts < self.min_tokens
        bars = is_short[self.barred.rows]
        logits[self.barred.rows[bars], self.barred.entries[bars]] = -np.inf
        logits[self.words.banned()] = -np.inf


NOBODY = Adjustments(0)
"""Rows of which none asks for anything: never written."""


def _looks_back(parameters: SamplingParameters) -> bool:
    return parameters.needs_history or (parameters.min_tokens > 0 and bool(parameters.barred_ids))


def _asks(parameters: SamplingParameters) -> bool:
    """Whether any logit may change."""
    p = parameters
    return bool(_looks_back(p) or p.logit_bias or p.allowed_token_ids or p.bad_words)


def _biases(parameters: SamplingParameters) -> "np.ndarray[tuple[int], np.dtype[np.void]]":
    held = [(token, min(max(value, -LARGEST), LARGEST)) for token, value in parameters.logit_bias.items()]
    return np.array(held, BIAS)
