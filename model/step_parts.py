"""A step that does not fit into memory, carried out in parts: halves of its tokens, and halves of those.

Orders and settings are carried out once, before; only the network runs by parts. A row may be cut amid its chunk: its
second part finds in the pool what the first has written, as it would in a later step.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mm.addresses import BoolArray
from mm.page_copies import MemoryOrders
from model.log_probs import joined
from model.step_plan import LogProbs, ScoredTokens, StepPlan


@dataclass(frozen=True, slots=True)
class Computed:
    """What the network made of the tokens of a plan."""

    logits: Tensor  # (N, V) float32, of the rows that sample
    failed: BoolArray  # (S,)
    scored: LogProbs | None  # of the plan's scored tokens, where they have been scored already


def halves(plan: StepPlan) -> tuple[StepPlan, StepPlan]:
    """The first and the second half of a plan's tokens (at least two), each without orders and settings.

    A row that is cut is in both; it samples in the second.
    """
    cut = len(plan.token_ids) // 2
    row = int(np.searchsorted(plan.query_starts, cut, side="right")) - 1  # whose token is the second half's first
    taken = cut - int(plan.query_starts[row])
    rows = row + (taken > 0)
    samples = plan.samples[:rows].copy()
    samples[row:] = False
    starts = plan.starts[row:].copy()
    starts[0] += taken
    first = StepPlan(
        step=plan.step,
        orders=MemoryOrders(),
        settings=None,
        rows=plan.rows[:rows],
        starts=plan.starts[:rows],
        query_starts=np.minimum(plan.query_starts[: rows + 1], cut),
        token_ids=plan.token_ids[:cut],
        samples=samples,
        decodes=min(plan.decodes, row),
        scored=_scored_between(plan.scored, 0, cut),
    )
    second = StepPlan(
        step=plan.step,
        orders=MemoryOrders(),
        settings=None,
        rows=plan.rows[row:],
        starts=starts,
        query_starts=np.maximum(plan.query_starts[row:], cut) - cut,
        token_ids=plan.token_ids[cut:],
        samples=plan.samples[row:],
        decodes=max(plan.decodes - row, 0),
        scored=_scored_between(plan.scored, cut, len(plan.token_ids)),
    )
    return first, second


def _scored_between(scored: ScoredTokens | None, begin: int, end: int) -> ScoredTokens | None:
    """Those of the tokens `begin` ... `end` - 1, by their places there."""
    if scored is None:
        return None
    mine = (scored.places >= begin) & (scored.places < end)
    return ScoredTokens(scored.places[mine] - begin, scored.targets[mine], scored.likeliest) if mine.any() else None


def rejoined(plan: StepPlan, first: Computed, second: Computed) -> Computed:
    """What has been computed of the `halves` of a plan."""
    failed = np.zeros(len(plan.rows), np.bool_)
    failed[: len(first.failed)] |= first.failed
    failed[len(plan.rows) - len(second.failed) :] |= second.failed
    scores = [part.scored for part in (first, second) if part.scored is not None]
    return Computed(torch.cat((first.logits, second.logits)), failed, joined(scores) if scores else None)
