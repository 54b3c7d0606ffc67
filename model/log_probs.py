"""Log-probabilities of tokens: steps B and E of the definition in model/sampler.py.

The sum over the vocabulary is of integers, floor(exp(x - max) * 2**40): it is the same in any order, so equal logits
give equal log-probabilities whatever else is computed beside them. What is cut off is less than V / 2**40 of the sum,
1.4e-7 for 152k tokens.
"""

import numpy as np
import torch
from torch import Tensor

from mm.addresses import Int64Array
from model.candidates import ONE, Candidates, by_rows, logits_reached_by, masses, ranks
from model.step_plan import LogProbs


def log_probs(logits: Tensor, chosen: Tensor, likeliest: int) -> LogProbs:
    """Log-softmax of N places: of the chosen tokens, and of the likeliest (of all, if V is less).

    logits (N, V) float32, minus infinity allowed; chosen (N,) int64. Each value is
    float32(x - max - ln(sum)), computed in float64: a chosen token has the very same value as in the list.
    """
    highest = logits.amax(-1, keepdim=True)
    meaningless = ~highest.isfinite()  # NaN, or plus infinity, or nothing but minus infinity
    if meaningless.any():
        logits, highest = logits.masked_fill(meaningless, 0.0), highest.masked_fill(meaningless, 0.0)
    weights = (logits - highest).exp_()
    norm = highest.double() + (masses(weights).sum(-1, keepdim=True).double() / ONE).log_()
    own = logits.gather(1, chosen[:, None])
    count = min(likeliest, logits.shape[1])
    ids, values = _largest(logits, weights, count) if count else (np.empty((len(logits), 0), np.int64), own[:, :0])
    return LogProbs(
        chosen=(own.double() - norm).float().squeeze(1).numpy(),
        ranks=((logits > own).sum(-1) + 1).to(torch.int32).numpy(),
        ids=ids.astype(np.int32),
        values=(values.double() - norm).float().numpy(),
    )


def _largest(logits: Tensor, weights: Tensor, count: int) -> tuple[Int64Array, Tensor]:
    """(ids, logits), (N, count) each, of the largest logits of each row: falling, the lowest ids first among equals."""
    floors = logits_reached_by(logits, np.full(len(logits), count))
    found = Candidates.found(logits >= floors[:, None], logits, weights)
    order = by_rows(found.rows, -found.logits)[ranks(found.rows) < count]
    return found.ids[order].reshape(-1, count), torch.from_numpy(found.logits[order].reshape(-1, count))


def joined(parts: list[LogProbs]) -> LogProbs:
    """Those of all places, in order."""
    return LogProbs(
        chosen=np.concatenate([part.chosen for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
        ids=np.concatenate([part.ids for part in parts]),
        values=np.concatenate([part.values for part in parts]),
    )
