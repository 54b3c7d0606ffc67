"""Sampling: from logits to token ids, the same ids whatever else is in the batch.

Greedy rows take the largest logit, the lowest id among equals. The others draw:

1. weight = exp((logit - max) / temperature) in float32, then **mass = floor(weight * 2**40)**, an integer. Integer
   sums are the same in any order, so neither the batch nor the device's way of adding can change a draw.
2. top-k keeps the k largest logits, top-p the fewest largest of those whose mass reaches its share. Among equal logits
   at the edge the lowest ids are kept.
3. One number per token: 64 bits r of Philox4x32-10 with key = seed and counter = (position, 0). The token is the
   first, in id order, whose running sum of kept mass exceeds floor(r * total / 2**64).

A row whose logits are not all finite is flagged; the id returned for it means nothing (but is a valid id).

Sources: Salmon 2011 (Philox, Random123); Holtzman 2020 (top-p).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mm.addresses import Int32Array, Int64Array
from model.step_plan import RowSettings

UInt64Array = npt.NDArray[np.uint64]

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: the second-best logit would have to be closer than 1e-4 to be drawn at all, and
equal logits would be drawn at random where a person who asks for temperature 1e-8 expects no chance at all."""

MASS_BITS = 40
"""2**40 for the likeliest token: the sum over 2**22 tokens still fits into 63 bits."""

FIRST_WIDTH = 256
"""Candidates that top-p looks at first. They nearly always hold its share; if not, the search widens."""


@dataclass(slots=True)
class SamplingRows:
    """The settings of some rows, as arrays (N,)."""

    temperature: npt.NDArray[np.float32]
    top_k: Int64Array  # 0: off
    top_p: npt.NDArray[np.float64]  # 1: off
    seed: UInt64Array

    @classmethod
    def greedy(cls, rows: int) -> "SamplingRows":
        return cls(np.zeros(rows, np.float32), np.zeros(rows, np.int64), np.ones(rows), np.zeros(rows, np.uint64))

    def store(self, settings: RowSettings) -> None:
        """Overwrite the rows that `settings` names."""
        for row, parameters in zip(settings.rows, settings.parameters, strict=True):
            self.temperature[row] = min(parameters.temperature, float(np.finfo(np.float32).max))
            self.top_k[row] = parameters.top_k
            self.top_p[row] = parameters.top_p
            self.seed[row] = parameters.seed

    def take(self, rows: Int32Array | Int64Array) -> "SamplingRows":
        return SamplingRows(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.seed[rows])


def sample(logits: Tensor, rows: SamplingRows, positions: Int64Array) -> tuple[Tensor, Tensor]:
    """Choose one token a row.

    logits (N, V) float32, on any device; positions (N,): where each new token will stand in its Sequence.
    Returns (tokens (N,) int64, failed (N,) bool: the row's logits were not finite).
    """
    drawn = np.flatnonzero(rows.temperature >= GREEDY_BELOW)
    highest = logits.amax(-1)
    failed = ~(highest.isfinite() & logits.amin(-1).isfinite())
    if len(drawn) == 0:
        return logits.argmax(-1), failed
    if len(drawn) == len(rows.temperature):
        return _draw(logits, highest, rows, positions), failed
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    greedy = _index(np.flatnonzero(rows.temperature < GREEDY_BELOW), logits)
    tokens[greedy] = logits[greedy].argmax(-1)
    index = _index(drawn, logits)
    tokens[index] = _draw(logits[index], highest[index], rows.take(drawn), positions[drawn])
    return tokens, failed


def _draw(logits: Tensor, highest: Tensor, rows: SamplingRows, positions: Int64Array) -> Tensor:
    """Tokens (N,) of rows that all draw."""
    vocabulary = logits.shape[1]
    temperature = torch.from_numpy(rows.temperature).to(logits.device)
    weights = ((logits - highest[:, None]) / temperature[:, None]).exp_()
    mass = weights.mul_(float(2**MASS_BITS)).to(torch.int64)  # a power of two: exact; the conversion rounds down
    limited = np.flatnonzero(((rows.top_k > 0) & (rows.top_k < vocabulary)) | (rows.top_p < 1.0))
    if len(limited):
        index = _index(limited, logits)
        mass[index] = _restricted(mass[index], logits[index], rows.top_k[limited], rows.top_p[limited])
    running = mass.cumsum(-1)
    threshold = _high_product(random_words(rows.seed, positions), running[:, -1:])
    tokens = torch.searchsorted(running, threshold, right=True).squeeze(-1)
    return tokens.clamp_(0, vocabulary - 1)  # only rows that failed can lie outside


def _restricted(mass: Tensor, logits: Tensor, top_k: Int64Array, top_p: npt.NDArray[np.float64]) -> Tensor:
    """`mass` (N, V), 0 for every token that top-k or top-p drops.

    Both keep the first n tokens in the order (larger logit, lower id). So n and the smallest kept logit say all.
    """
    vocabulary = logits.shape[1]
    counts = np.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary)
    counts_all = torch.from_numpy(counts).to(logits.device)[:, None]  # (N, 1) what top-k keeps
    shares = torch.from_numpy(top_p).to(logits.device)[:, None]
    width = int(max(counts[counts < vocabulary].max(initial=0), min(FIRST_WIDTH, vocabulary)))
    while True:
        values, ids = logits.topk(width, dim=-1)  # (N, width) falling; the order among equals does not matter here
        within = torch.arange(width, device=logits.device) < counts_all
        running = (mass.gather(1, ids) * within).cumsum(-1)
        total = torch.where(counts_all < vocabulary, running[:, -1:], mass.sum(-1, keepdim=True))
        wanted = (shares * total).ceil().to(torch.int64).clamp_(min=1)
        enough = (running[:, -1:] >= wanted) | (counts_all < vocabulary)
        if width == vocabulary or bool(enough.all()):
            break
        width = min(vocabulary, 8 * width)
    kept = ((running < wanted).sum(-1, keepdim=True) + 1).clamp_(max=width)  # the fewest that reach the share
    kept = torch.where(shares < 1, kept, counts_all)
    edge = values.gather(1, kept - 1)
    above = (values > edge).sum(-1, keepdim=True)
    equal = logits == edge
    keep = (logits > edge) | (equal & (equal.cumsum(-1) <= kept - above))
    return mass * keep


def _index(rows: Int64Array, like: Tensor) -> Tensor:
    return torch.from_numpy(rows).to(like.device)


# --- Random numbers --------------------------------------------------------------------------------------------------


def random_words(seeds: UInt64Array, positions: Int64Array) -> UInt64Array:
    """(N,) 64 random bits each: the first two words of Philox4x32-10, key = seed, counter = (position, 0)."""
    counter = np.zeros((len(seeds), 4), np.uint64)
    counter[:, 0] = positions.astype(np.uint64) & _LOW
    counter[:, 1] = positions.astype(np.uint64) >> _HALF
    words = philox(counter, np.stack((seeds & _LOW, seeds >> _HALF), axis=1))
    return words[:, 0] | (words[:, 1] << _HALF)


_LOW, _HALF = np.uint64(0xFFFF_FFFF), np.uint64(32)
_MULTIPLIERS = np.array([0xD251_1F53, 0xCD9E_8D57], np.uint64)
_WEYL = np.array([0x9E37_79B9, 0xBB67_AE85], np.uint64)  # golden ratio, sqrt(3) - 1


def philox(counter: UInt64Array, key: UInt64Array) -> UInt64Array:
    """Philox4x32-10 of counters (N, 4) and keys (N, 2): 32-bit words, each in a uint64. Returns (N, 4)."""
    words, key = counter.copy(), key.copy()
    for _ in range(10):
        product = words[:, [0, 2]] * _MULTIPLIERS  # 32 x 32 bits: exact in 64
        high, low = product >> _HALF, product & _LOW
        words = np.stack(
            (high[:, 1] ^ words[:, 1] ^ key[:, 0], low[:, 1], high[:, 0] ^ words[:, 3] ^ key[:, 1], low[:, 0]), axis=1
        )
        key = (key + _WEYL) & _LOW
    return words


def _high_product(random: UInt64Array, total: Tensor) -> Tensor:
    """floor(random * total / 2**64): uniform in [0, total). random (N,) uint64; total (N, 1) int64, not negative.

    By halves of 32 bits, because torch has no 128-bit product. Bit patterns of int64 are those of uint64, and shifting
    right is followed by a mask, so the sign never matters.
    """
    low32 = 0xFFFF_FFFF
    r_low = torch.from_numpy((random & _LOW).astype(np.int64)).to(total.device)[:, None]
    r_high = torch.from_numpy((random >> _HALF).astype(np.int64)).to(total.device)[:, None]
    t_low, t_high = total & low32, (total >> 32) & low32
    middle = r_high * t_low + ((r_low * t_low >> 32) & low32)
    middle_2 = r_low * t_high + (middle & low32)
    return r_high * t_high + ((middle >> 32) & low32) + ((middle_2 >> 32) & low32)
