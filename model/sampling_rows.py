"""How rows sample, as a struct of arrays: a step takes its rows out of it by a few numpy operations."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mm.addresses import BoolArray, FloatArray, Int32Array, Int64Array
from model.adjustments import NOBODY, Adjustments
from model.candidates import ONE
from model.philox import UInt64Array
from model.step_plan import RowSettings


@dataclass(slots=True)
class SamplingRows:
    """The settings of some rows, as arrays (N,)."""

    temperature: npt.NDArray[np.float32]
    top_k: Int64Array  # 0: off
    top_p: FloatArray  # 1: off
    min_mass: Int64Array  # floor(min_p * 2**40); 0: off
    typical_p: FloatArray  # 1: off
    seed: UInt64Array
    logprobs: Int32Array  # likeliest tokens to report; -1: nothing at all
    adjustments: Adjustments

    @classmethod
    def greedy(cls, rows: int) -> "SamplingRows":
        return cls(
            temperature=np.zeros(rows, np.float32),
            top_k=np.zeros(rows, np.int64),
            top_p=np.ones(rows),
            min_mass=np.zeros(rows, np.int64),
            typical_p=np.ones(rows),
            seed=np.zeros(rows, np.uint64),
            logprobs=np.full(rows, -1, np.int32),
            adjustments=Adjustments(rows),
        )

    def store(self, settings: RowSettings) -> None:
        """Overwrite the rows that `settings` names, with all that they remember."""
        for row, parameters in zip(settings.rows.tolist(), settings.parameters, strict=True):
            self.temperature[row] = min(parameters.temperature, float(np.finfo(np.float32).max))
            self.top_k[row] = parameters.top_k
            self.top_p[row] = parameters.top_p
            self.min_mass[row] = int(min(parameters.min_p, 1.0) * ONE)
            self.typical_p[row] = parameters.typical_p
            self.seed[row] = parameters.seed
            self.logprobs[row] = parameters.logprobs
        self.adjustments.store(settings)

    def add(self, rows: Int32Array, tokens: Int32Array) -> None:
        """rows[i] has sampled tokens[i]: a part of its output from now on."""
        self.adjustments.add(rows, tokens)

    def take(self, rows: Int32Array | Int64Array) -> "SamplingRows":
        """A copy of `rows` (N,), distinct, in this order."""
        return self._taken(rows, self.adjustments.take(rows))

    def take_adjusted(self, rows: Int32Array | Int64Array) -> "SamplingRows":
        """The same for logits that have been adjusted: nobody asks for adjustments any more."""
        return self._taken(rows, NOBODY)

    def _taken(self, rows: Int32Array | Int64Array, adjustments: Adjustments) -> "SamplingRows":
        return SamplingRows(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_mass=self.min_mass[rows],
            typical_p=self.typical_p[rows],
            seed=self.seed[rows],
            logprobs=self.logprobs[rows],
            adjustments=adjustments,
        )

    def have_top_k(self, vocabulary: int) -> BoolArray:
        """(N,) whether top_k drops anything."""
        return (self.top_k > 0) & (self.top_k < vocabulary)

    def are_limited(self, vocabulary: int) -> BoolArray:
        """(N,) whether a draw is among fewer than all tokens."""
        return self.have_top_k(vocabulary) | (self.top_p < 1.0) | (self.min_mass > 0) | (self.typical_p < 1.0)
