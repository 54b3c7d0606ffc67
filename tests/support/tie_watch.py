"""Notices near ties (near_ties.py) in what an executor samples, and in beam searches."""

from typing import Any

import numpy as np
import pytest
import torch
from near_ties import OWN_NEAR_TIE
from torch import Tensor

from mm.addresses import Int64Array
from model.cpu_executor import CpuExecutor
from model.sampler import Sampled, sample
from model.sampling_rows import SamplingRows
from model.step_plan import StepPlan
from model.token_masks import TokenMasks
from service.beam_search import Search


def are_near_ties(logits: Tensor, rows: SamplingRows, positions: Int64Array, masks: TokenMasks | None) -> bool:
    """Whether a row would choose another token by logits that are nowhere OWN_NEAR_TIE / 2 away from these.

    Arguments as of model.sampler.sample, which is asked; nothing is overwritten. Tried are the shifts that move a draw
    furthest to either side, the one that is worst for the token chosen, and a few random ones for the edges of filters.
    """
    chosen = sample(logits.clone(), rows, positions, masks).tokens
    ids = torch.arange(logits.shape[1])
    generator = torch.Generator().manual_seed(0)
    shifts = [
        torch.where(ids < chosen[:, None], 1.0, -1.0),
        torch.where(ids <= chosen[:, None], -1.0, 1.0),
        torch.where(ids == chosen[:, None], -1.0, 1.0),
        *(torch.randint(2, logits.shape, generator=generator) * 2.0 - 1.0 for _ in range(4)),
    ]
    return any(
        not torch.equal(sample(logits + shift * (OWN_NEAR_TIE / 2), rows, positions, masks).tokens, chosen)
        for shift in shifts
    )


class NearTies:
    """Watches what one executor samples, and all searches of this process."""

    def __init__(self, executor: CpuExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found = False  # since it was last set to this
        self._executor = executor
        self._sample = executor._sample
        monkeypatch.setattr(executor, "_sample", self._look_and_sample)
        advance = Search.advance

        def look_and_advance(search: Search, ids: Any, values: Any) -> Any:
            totals = -np.sort(-(search._scores[:, None] + values).reshape(-1))
            self._compare(totals[: 2 * search.width + 1])
            after = advance(search, ids, values)
            beams = [search._normalised(score, search.length) for score in search._scores]
            self._compare(sorted([*beams, *(each.score for each in search._finished)], reverse=True), 1 / search.width)
            return after

        monkeypatch.setattr(Search, "advance", look_and_advance)

    def _look_and_sample(self, plan: StepPlan, scores: Tensor, masks: TokenMasks | None) -> Sampled:
        settings = self._executor._settings.take(plan.rows[plan.samples])
        self.found |= are_near_ties(scores, settings, plan.lengths[plan.samples].astype(np.int64), masks)
        return self._sample(plan, scores, masks)

    def _compare(self, falling: Any, share: float = 1.0) -> None:
        """Scores of which the order decides. Those of whole hypotheses are divided by their lengths: a share of it."""
        gaps = -np.diff(np.array(falling))
        self.found |= bool((gaps < OWN_NEAR_TIE * share).any())
