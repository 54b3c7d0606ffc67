"""Which tokens top-k, top-p, min-p and typical-p keep: step D of model/sampler.py, for rows that ask for any of them.

Sorting the vocabulary would cost more than the network. So each row's first filter gives a floor, below which it keeps
nothing for sure, and all filters look at the few tokens above it only:

    top_k      a logit that k tokens reach
    top_p      what is lighter than (1 - p) / V of the total is less than 1 - p of it together: the heavier ones suffice
    min_p      its own threshold
    typical_p  as top_p, where the lighter ones are also less typical than the likeliest token; else a mass of 1
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mm.addresses import BoolArray, FloatArray, Int64Array
from model.candidates import ONE, Candidates, by_rows, logits_reached_by, masses, ranks, sums_before
from model.sampling_rows import SamplingRows
from model.step_plan import Float32Array

FAR = 32.0
"""A distance at which nothing has mass: exp(-32) < 2**-40."""

MORE_THAN_ANY = 2**62
"""No total reaches it."""

BINS = 256
"""That a row's tokens are dealt into by their order, so that only those of one bin need be sorted."""


def kept_tokens(logits: Tensor, weights: Tensor, highest: Tensor, rows: SamplingRows) -> Candidates:
    """What the filters keep of N rows. Every row has one filter at least.

    logits (N, V) float32, minus infinity allowed; weights (N, V) float32 = exp((logits - highest) / temperature);
    highest (N,).
    """
    top, has_k = highest.numpy(), rows.have_top_k(logits.shape[1])
    floors = _floors(logits, weights, highest, rows)
    left = Candidates.found(floors.reached(logits, weights), logits, weights)
    total = floors.total
    if has_k.any():
        left = left.choose(_largest(left, np.where(has_k, rows.top_k, MORE_THAN_ANY)))
        total = np.where(has_k, left.sums(left.mass), total)
    if (rows.top_p < 1.0).any():
        distances = _distances(top[left.rows], left.logits, rows.temperature[left.rows])
        left = left.choose(_fewest(left, distances, -left.logits, rows.top_p, total))
    if rows.min_mass.any():
        left = left.choose((left.mass >= rows.min_mass[left.rows]) | (left.logits == top[left.rows]))
    if (rows.typical_p < 1.0).any():
        distances = _distances(top[left.rows], left.logits, rows.temperature[left.rows])
        total = np.where(floors.is_typical, floors.total, left.sums(left.mass))
        mean = np.where(floors.is_typical, floors.mean, _quotients(left.sums(_surprises(left.mass, distances)), total))
        deviations = np.abs(distances - mean[left.rows])
        left = left.choose(_fewest(left, deviations, deviations, rows.typical_p, total))
    return left


def _largest(left: Candidates, counts: Int64Array) -> BoolArray:
    """(M,) whether a token is among the counts[i] largest of its row."""
    order = by_rows(left.rows, -left.logits)
    keeps = np.empty(len(order), np.bool_)
    keeps[order] = ranks(left.rows) < counts[left.rows]
    return keeps


def _fewest(
    left: Candidates, distances: Float32Array, keys: Float32Array, shares: FloatArray, total: Int64Array
) -> BoolArray:
    """(M,) whether a token is among the first of its row whose mass reaches shares[i] of total[i]; all, for a share of
    1. The order is by `keys` (M,), smaller first; distances (M,) >= 0 never fall in that order.
    """
    wanted = np.maximum(np.ceil(shares * total), 1.0).astype(np.int64)
    wanted = np.where(shares < 1.0, wanted, MORE_THAN_ANY)
    bins = _bins(left, distances)
    mass = _exact_sums(left.rows * BINS + bins, left.mass, left.row_count * BINS).reshape(-1, BINS)
    running = mass.cumsum(axis=1)
    edge = (running < wanted[:, None]).sum(axis=1)  # the bin that reaches the share; BINS: none does
    before = np.where(edge > 0, running[np.arange(len(edge)), edge - 1], 0)
    keeps = bins < edge[left.rows]
    at_edge = np.flatnonzero(bins == edge[left.rows])
    at_edge = at_edge[by_rows(left.rows[at_edge], keys[at_edge])]
    rows = left.rows[at_edge]
    keeps[at_edge] = before[rows] + sums_before(rows, left.mass[at_edge]) < wanted[rows]
    return keeps


def _bins(left: Candidates, distances: Float32Array) -> Int64Array:
    """(M,) 0 ... BINS - 1, never falling with the distance."""
    furthest = np.maximum(np.maximum.reduceat(distances, left.starts()), np.float32(1e-30))
    return (distances * (np.float32(BINS - 1) / furthest)[left.rows]).astype(np.int64)


def _exact_sums(places: Int64Array, mass: Int64Array, count: int) -> Int64Array:
    """(count,) mass at each place. numpy sums by place in float64 alone: halves of 26 bits stay exact."""
    low = np.bincount(places, mass & (2**26 - 1), count).astype(np.int64)
    return low + (np.bincount(places, mass >> 26, count).astype(np.int64) << 26)


def _distances(highest: Float32Array, logits: Float32Array, temperature: Float32Array) -> Float32Array:
    """How far below the highest logit, in units of the temperature; FAR, if it is further."""
    with np.errstate(over="ignore"):
        return np.minimum((highest - logits) / temperature, np.float32(FAR))


def _surprises(mass: Int64Array, distances: Float32Array) -> Int64Array:
    """What each token adds to the entropy, as an integer."""
    return (mass.astype(np.float32) * distances).astype(np.int64)


def _quotients(sums: Int64Array, total: Int64Array) -> Float32Array:
    return (sums / total).astype(np.float32)


@dataclass(frozen=True, slots=True)
class _Floors:
    """Which tokens of N rows the filters must look at, and what they must know of the others."""

    lightest: FloatArray  # (N,) weights that are lighter are not kept
    lowest: Tensor | None  # (N,) logits that are lower are not kept; None: there is no such bound
    total: Int64Array  # (N,) mass of all tokens, of rows whose first filter is top_p or typical_p; else 0
    is_typical: BoolArray  # (N,) the only filter is typical_p
    mean: Float32Array  # (N,) its mean

    def reached(self, logits: Tensor, weights: Tensor) -> Tensor:
        """(N, V) bool."""
        lightest = (self.lightest * (1 - 2**-20)).astype(np.float32)  # whichever way it is rounded, not too large
        reached = weights >= torch.from_numpy(lightest)[:, None]
        return reached if self.lowest is None else reached.logical_and_(logits >= self.lowest[:, None])


def _floors(logits: Tensor, weights: Tensor, highest: Tensor, rows: SamplingRows) -> _Floors:
    count, vocabulary = logits.shape
    has_k = rows.have_top_k(vocabulary)
    has_p = ~has_k & (rows.top_p < 1.0)
    is_typical = ~has_k & ~has_p & (rows.min_mass == 0) & (rows.typical_p < 1.0)
    lightest = np.where(has_k, 0.0, np.maximum(rows.min_mass, 1) / ONE)
    lowest = None
    total, mean = np.zeros(count, np.int64), np.zeros(count, np.float32)
    if has_k.any():
        lowest = torch.full((count,), -torch.inf)
        lowest[has_k] = logits_reached_by(logits[has_k], rows.top_k[has_k])
    if has_p.any():
        total[has_p] = masses(weights[has_p]).sum(-1).numpy()
        lightest[has_p] = _lightest_needed(rows.top_p[has_p], total[has_p], vocabulary)
    if is_typical.any():
        mass = masses(weights[is_typical]).numpy()
        top, temperature = highest[is_typical, None].numpy(), rows.temperature[is_typical, None]
        distances = _distances(top, logits[is_typical].numpy(), temperature)
        total[is_typical] = mass.sum(-1)
        mean[is_typical] = _quotients(_surprises(mass, distances).sum(-1), total[is_typical])
        needed = _lightest_needed(rows.typical_p[is_typical], total[is_typical], vocabulary)
        # Lighter tokens are further from the mean than the likeliest one, by 1: that is room for every rounding.
        suffices = -np.log(needed) - mean[is_typical] > mean[is_typical] + 1.0
        lightest[is_typical] = np.where(suffices, needed, 1 / ONE)
    return _Floors(lightest, lowest, total, is_typical, mean)


def _lightest_needed(shares: FloatArray, total: Int64Array, vocabulary: int) -> FloatArray:
    """(N,) weights such that all heavier tokens together have more than their share of the total."""
    return np.maximum((1.0 - shares) * total / ONE / vocabulary / 2, 1 / ONE)  # half, for rounding's sake
