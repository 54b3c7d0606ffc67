"""Sampling: from logits to token ids, the same ids whatever else is in the batch. This is the definition; the CUDA
kernels follow it to the bit, as far as exp does.

A row has logits x (V) float32 and the parameters of `model.step_plan.SamplingParameters`: top_p, min_p and typical_p
are float64, the others count as float32 and are held within its finite, normal numbers. In this order:

A. Adjust, only for rows that ask, in float32. Results of 1 to 3 are held within its finite numbers.
   1. repetition_penalty r: each token in prompt or output: x / r if x > 0, else x * r.
   2. each token that the output has c > 0 times: x -= frequency_penalty * c + presence_penalty.
   3. logit_bias: x += value.
   4. minus infinity for what must not come: tokens that the row's mask (model.token_masks) leaves out; tokens outside
      of allowed_token_ids; barred_ids while the output has fewer than min_tokens; the last token of a bad word whose
      other tokens are the row's last ones, over prompt and output.
B. Log-probabilities, for rows that ask: of the adjusted logits, before temperature and truncation (model/log_probs.py).
C. Temperatures below 1e-5 are greedy: the largest adjusted logit, the lowest id among equals.
D. The others draw. With d = (max - x) / temperature >= 0 in float32, a token's weight is exp(-d) in float32, and its
   **mass = floor(weight * 2**40)**, an integer: integer sums are the same in any order, so neither the batch nor the
   device's way of adding can change a draw. Four filters follow; each sees what the one before left. At each edge the
   lowest ids are kept among equals.
   1. top_k: the k largest logits.
   2. top_p: the fewest largest logits whose mass reaches max(1, ceil(top_p * total)), total = mass of what is left.
   3. min_p: mass >= floor(min_p * 2**40), and the largest logit.
   4. typical_p: with p = mass / total the entropy is H = ln(total / 2**40) + mean, where
      **mean = sum of floor(float32(mass) * d) / total**, an integer sum again, its quotient in float64, then float32.
      So |-ln p - H| = |d - mean| in float32. The fewest tokens with the smallest of these whose mass reaches
      max(1, ceil(typical_p * total)). Tokens without mass change nothing.
   One number per token: 64 bits r of Philox4x32-10 with key = seed and counter = (position, 0). The token is the first,
   in id order, whose running sum of kept mass exceeds floor(r * total / 2**64).

A row fails if a logit is not finite as the network gives it, or if nothing is left after A: it is flagged, and the id
returned for it means nothing (but is a valid id).

Sources: Keskar 2019 (repetition penalty); Holtzman 2020 (top-p); Nguyen 2024 (min-p); Meister 2022 (typical); Salmon
2011 (Philox).
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mm.addresses import Int32Array, Int64Array
from model.candidates import masses, sums_before
from model.log_probs import joined, log_probs
from model.out_of_memory import in_parts
from model.philox import below, random_words
from model.sampling_rows import SamplingRows
from model.step_plan import LogProbs
from model.token_masks import TokenMasks
from model.truncation import kept_tokens

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: the second-best logit would have to be closer than 1e-4 to be drawn at all, and
equal logits would be drawn at random where a person who asks for temperature 1e-8 expects no chance at all."""


class Sampled(NamedTuple):
    """What N rows sampled."""

    tokens: Tensor  # (N,) int64
    failed: Tensor  # (N,) bool
    logprobs: LogProbs | None  # of the rows that ask, in order; None if nobody does


def sample(logits: Tensor, rows: SamplingRows, positions: Int64Array, masks: TokenMasks | None = None) -> Sampled:
    """Choose one token a row.

    logits (N, V) float32, on the CPU: overwritten by the adjusted ones. positions (N,): where each new token will stand
    in its Sequence. masks: of some of the rows. `rows` does not learn what was sampled: SamplingRows.add.
    """
    highest = logits.amax(-1)
    failed = ~(highest.isfinite() & logits.amin(-1).isfinite())
    _flatten(logits, highest, failed)
    adjusted = rows.adjustments.apply(logits, positions)
    if masks is not None:
        masks.apply(logits)
        adjusted = np.union1d(adjusted, masks.places)
    if len(adjusted):
        for row in adjusted.tolist():  # a copy of these rows would take ten times as long
            highest[row] = logits[row].amax()
        nothing_left = highest == -torch.inf
        _flatten(logits, highest, nothing_left)
        failed |= nothing_left
    tokens = _choose_in_parts(logits, highest, rows, positions)
    return Sampled(tokens, failed, _report(logits, tokens, rows.logprobs))


def _report(logits: Tensor, tokens: Tensor, likeliest: Int32Array) -> LogProbs | None:
    asking = np.flatnonzero(likeliest >= 0)
    if not len(asking):
        return None
    most = int(likeliest[asking].max())

    def report(part: slice) -> LogProbs:
        return log_probs(_rows_of(logits, asking[part]), _rows_of(tokens, asking[part]), most)

    return joined(in_parts(report, 0, len(asking)))


def _flatten(logits: Tensor, highest: Tensor, failed: Tensor) -> None:
    """Zeros in place of the logits of rows that failed: no step after this has to think of them."""
    if failed.any():
        logits[failed] = 0.0
        highest[failed] = 0.0


def _choose_in_parts(logits: Tensor, highest: Tensor, rows: SamplingRows, positions: Int64Array) -> Tensor:
    """`_choose`, for fewer rows at a time where memory is short."""

    def choose(part: slice) -> Tensor:
        theirs = rows if part == slice(0, len(logits)) else rows.take_adjusted(np.arange(part.start, part.stop))
        return _choose(logits[part], highest[part], theirs, positions[part])

    return torch.cat(in_parts(choose, 0, len(logits)))


def _choose(logits: Tensor, highest: Tensor, rows: SamplingRows, positions: Int64Array) -> Tensor:
    """Tokens (N,) of adjusted logits: steps C and D."""
    is_drawn = rows.temperature >= GREEDY_BELOW
    if not is_drawn.any():
        return _greatest(logits, highest, rows, positions)
    is_limited = rows.are_limited(logits.shape[1])
    tokens = torch.empty(len(logits), dtype=torch.int64)
    for choose, chosen in (
        (_greatest, ~is_drawn),
        (_draw, is_drawn & ~is_limited),
        (_draw_limited, is_drawn & is_limited),
    ):
        places = np.flatnonzero(chosen)
        if len(places):
            theirs = rows if len(places) == len(logits) else rows.take_adjusted(places)
            found = choose(_rows_of(logits, places), _rows_of(highest, places), theirs, positions[places])
            tokens[torch.from_numpy(places)] = found
    return tokens


def _greatest(logits: Tensor, highest: Tensor, rows: SamplingRows, positions: Int64Array) -> Tensor:
    """Tokens (N,) of greedy rows. numpy's argmax is ten times as fast as torch's, and takes the first among equals."""
    return torch.from_numpy(logits.numpy().argmax(-1))


def _draw(logits: Tensor, highest: Tensor, rows: SamplingRows, positions: Int64Array) -> Tensor:
    """Tokens (N,) of rows that draw among all tokens."""
    running = masses(_weights(logits, highest, rows)).cumsum(-1)
    threshold = below(running[:, -1].numpy(), random_words(rows.seed, positions))
    return torch.searchsorted(running, torch.from_numpy(threshold)[:, None], right=True).squeeze(-1)


def _draw_limited(logits: Tensor, highest: Tensor, rows: SamplingRows, positions: Int64Array) -> Tensor:
    """Tokens (N,) of rows that draw among the tokens that their filters keep."""
    kept = kept_tokens(logits, _weights(logits, highest, rows), highest, rows)
    threshold = below(kept.sums(kept.mass), random_words(rows.seed, positions))
    running = sums_before(kept.rows, kept.mass) + kept.mass
    passed = kept.sums(running <= threshold[kept.rows])
    return torch.from_numpy(kept.ids[kept.starts() + passed])


def _weights(logits: Tensor, highest: Tensor, rows: SamplingRows) -> Tensor:
    """(N, V) float32, 1 for the likeliest token."""
    temperature = torch.from_numpy(rows.temperature)
    return logits.sub(highest[:, None]).div_(temperature[:, None]).exp_()


def _rows_of(values: Tensor, places: Int64Array) -> Tensor:
    """values[places], ascending; no copy, if that is all of them."""
    return values if len(places) == len(values) else values[torch.from_numpy(places)]
