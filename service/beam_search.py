"""Beam search as transformers' `generate` does it: which beams go on, which are finished, and when it is over.

Pure: each step takes the likeliest next tokens of every beam and says which parent and token each new beam has. It
knows nothing of memory, rows or time. A beam's score is the sum of its log-probabilities; a hypothesis' score is that
over length ** length_penalty, where the length is that of its output, the end token included.

A step, with w = width:
  1. Of all (beam, token) pairs the best by score, ties by beam and then as they came (best first, lowest id first).
  2. Those that end (an end id, or max_tokens reached) and stand among the first w become hypotheses; the w best
     hypotheses are kept.
  3. The w best of the others are the next beams.
  4. It is over when max_tokens is reached, or w hypotheses are kept and
       early_stopping True      at once
       early_stopping False     the best beam, at its present length, is not better than the worst of them
       early_stopping "never"   the same; but with a positive length_penalty at the length max_tokens, where it is best

Sources: Wu 2016, §7 (length normalisation); the rules are those of transformers 5, `generation/utils.py`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mm.addresses import Int32Array
from model.step_plan import MAX_LOGPROBS, Float32Array
from service.engine_client import BeamSearch


class _Path(NamedTuple):
    """A run of output tokens, by its last one: beams share their beginnings here, too."""

    before: "_Path | None"
    token: int
    length: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One result of a search."""

    tokens: list[int]
    score: float
    is_ended: bool  # by an end id, which is its last token


@dataclass(frozen=True, slots=True)
class _Finished:
    path: _Path
    score: np.float32
    is_ended: bool


@dataclass(frozen=True, slots=True)
class NextBeams:
    """The beams that go on, best first: beam i is beam parents[i] of the step before, and tokens[i]."""

    parents: list[int]
    tokens: list[int]


class Search:
    """One beam search. It begins with a single beam, the prompt."""

    def __init__(self, options: BeamSearch, max_tokens: int, end_ids: list[int]) -> None:
        self.width = options.width
        self.is_over = False
        self._penalty = options.length_penalty
        self._early_stopping = options.early_stopping
        self._max_tokens = max_tokens
        self._end_ids = np.array(sorted(set(end_ids)), np.int32)
        self._beams: list[_Path | None] = [None]
        self._scores: Float32Array = np.zeros(1, np.float32)  # of the beams, falling
        self._finished: list[_Finished] = []  # best first

    @property
    def candidates(self) -> int:
        """Likeliest tokens of each beam that `advance` needs: `width` of them go on at most, beside all that end."""
        return min(MAX_LOGPROBS, self.width + max(self.width, len(self._end_ids)))

    @property
    def beams(self) -> int:
        return len(self._beams)

    @property
    def length(self) -> int:
        """Output tokens of each beam."""
        return self._beams[0].length if self._beams and self._beams[0] is not None else 0

    def advance(self, ids: Int32Array, values: Float32Array) -> NextBeams:
        """One step. ids, values (beams, K): the K likeliest next tokens of each beam and their log-probabilities.

        Nobody goes on once the search is over.
        """
        most = ids.shape[1]
        totals = (self._scores[:, None] + values.astype(np.float32)).reshape(-1)
        order = np.argsort(-totals, kind="stable")
        order = order[totals[order] > -np.inf]  # a token that cannot come is no candidate
        order = order[: self.width * (1 + max(1, len(self._end_ids)))]  # no more can end, or go on
        tokens = ids.reshape(-1)[order]
        length = self.length + 1
        at_end = np.isin(tokens, self._end_ids)
        is_last = length >= self._max_tokens
        beams, scores = self._beams, totals[order]
        paths = [
            _Path(beams[place // most], token, length)
            for place, token in zip(order.tolist(), tokens.tolist(), strict=True)
        ]
        self._finish(paths, scores, at_end, at_end | is_last, length)
        going = np.flatnonzero(~at_end)[: 0 if is_last else self.width]
        self._beams = [paths[i] for i in going.tolist()]
        self._scores = scores[going]
        self.is_over = not len(going) or self._is_settled(length)
        if self.is_over:
            return NextBeams([], [])
        return NextBeams((order[going] // most).tolist(), tokens[going].tolist())

    def _finish(
        self, paths: list[_Path], scores: Float32Array, at_end: np.ndarray, ends: np.ndarray, length: int
    ) -> None:
        """Rule 2, of candidates in order: those among the first `width` that end."""
        for i in np.flatnonzero(ends[: self.width]).tolist():
            self._finished.append(_Finished(paths[i], self._normalised(scores[i], length), bool(at_end[i])))
        self._finished.sort(key=lambda one: -one.score)  # stable: the earlier one first
        del self._finished[self.width :]

    def _is_settled(self, length: int) -> bool:
        """Rule 4, after a step that was not the last one possible."""
        if len(self._finished) < self.width:
            return False
        if self._early_stopping is True:
            return True
        at_best = self._max_tokens if self._early_stopping == "never" and self._penalty > 0 else length
        return bool(self._normalised(self._scores[0], at_best) <= self._finished[-1].score)

    def _normalised(self, score: np.float32, length: int) -> np.float32:
        return score / np.float32(float(length) ** self._penalty)

    def best(self, count: int) -> list[Hypothesis]:
        """The `count` best results, best first. Before it is over: of what is finished and of the beams as they are."""
        found = list(self._finished)
        if not self.is_over:
            for beam, score in zip(self._beams, self._scores, strict=True):
                if beam is not None:
                    found.append(_Finished(beam, self._normalised(score, beam.length), False))
            found.sort(key=lambda one: -one.score)
        return [Hypothesis(_tokens(one.path), float(one.score), one.is_ended) for one in found[:count]]


def _tokens(path: _Path | None) -> list[int]:
    tokens: list[int] = []
    while path is not None:
        tokens.append(path.token)
        path = path.before
    return tokens[::-1]
