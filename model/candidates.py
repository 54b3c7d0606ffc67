"""The few tokens of each row that a choice can fall on, found without sorting the vocabulary; and their mass."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mm.addresses import BoolArray, Int64Array
from model.step_plan import Float32Array

MASS_BITS = 40
"""A weight of 1 has mass 2**40: the sum over 2**22 tokens still fits into 63 bits."""

ONE = float(2**MASS_BITS)

GROUPS_FOR_EACH = 16
"""Groups that the logits are dealt into, at least, for each large one that is wanted: then few groups hold two."""

GROUP_SIZE = 32
"""Logits of a group, unless more groups are needed. Their maxima take one pass, and are this many times fewer."""


def masses(weights: Tensor) -> Tensor:
    """floor(weight * 2**40) as int64. The product is exact in float32, for it is by a power of two."""
    return (weights * ONE).to(torch.int64)


@dataclass(slots=True)
class Candidates:
    """M tokens of N rows: rows ascending, and ids ascending within a row."""

    row_count: int
    rows: Int64Array  # (M,)
    ids: Int64Array  # (M,)
    logits: Float32Array  # (M,)
    mass: Int64Array  # (M,)

    @classmethod
    def found(cls, mask: Tensor, logits: Tensor, weights: Tensor) -> "Candidates":
        """Those that `mask` (N, V) names. logits and weights (N, V) float32."""
        places = np.flatnonzero(mask.numpy())
        rows = places // mask.shape[1]
        mass = (weights.numpy().ravel()[places] * np.float32(ONE)).astype(np.int64)
        return cls(len(mask), rows, places - rows * mask.shape[1], logits.numpy().ravel()[places], mass)

    def choose(self, kept: BoolArray) -> "Candidates":
        """Those where `kept` (M,) is true."""
        index = np.flatnonzero(kept)
        return Candidates(self.row_count, self.rows[index], self.ids[index], self.logits[index], self.mass[index])

    def starts(self) -> Int64Array:
        """(N,) where each row's tokens begin."""
        return np.searchsorted(self.rows, np.arange(self.row_count))

    def sums(self, values: npt.NDArray[Any]) -> Int64Array:
        """(N,) sums of integers (M,) over each row. Every row has a token at least."""
        return np.add.reduceat(values, self.starts(), dtype=np.int64)


def by_rows(rows: Int64Array, keys: Float32Array) -> Int64Array:
    """(M,) indices that order by row, then by key, then as they are."""
    return np.lexsort((keys, rows))


def ranks(rows: Int64Array) -> Int64Array:
    """(M,) the place of each in its row, from 0. rows (M,) ascending."""
    return np.arange(len(rows)) - np.searchsorted(rows, rows)


def sums_before(rows: Int64Array, values: Int64Array) -> Int64Array:
    """(M,) sum of the values of the same row that come before each. rows (M,) ascending.

    The sum over all rows may wrap around: its differences are right all the same.
    """
    before = np.cumsum(values) - values
    return before - before[np.searchsorted(rows, rows)]


def logits_reached_by(logits: Tensor, counts: Int64Array) -> Tensor:
    """(N,) float32 values that counts[i] logits of row i, or more, reach; about counts[i], if they are few.

    The k-th largest of the maxima of disjoint groups is such a value. Minus infinity where k is not much smaller than
    V. logits (N, V), no NaN; counts (N,) >= 1.
    """
    vocabulary = logits.shape[1]
    values = torch.full((len(logits),), -torch.inf)
    few = np.flatnonzero(counts * 2 * GROUPS_FOR_EACH <= vocabulary)
    if not len(few):
        return values
    most = int(counts[few].max())
    groups = max(vocabulary // GROUP_SIZE, GROUPS_FOR_EACH * most)
    size = vocabulary // groups  # the last few logits may be in no group: the values are reached without them
    index = torch.from_numpy(few)
    dealt = (logits if len(few) == len(logits) else logits[index])[:, : groups * size]
    largest = dealt.unflatten(1, (size, groups)).amax(1).topk(most, dim=-1).values
    values[index] = largest.gather(1, torch.from_numpy(counts[few])[:, None] - 1).squeeze(1)
    return values
