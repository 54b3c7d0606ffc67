"""The CPU sampler over cases, some of which have a mask."""

import numpy as np
import torch
from slow_sampling import Case, packed_masks

from model.sampler import Sampled, sample
from model.sampling_rows import SamplingRows
from model.step_plan import RowSettings
from model.token_masks import TokenMasks


def sampled(cases: list[Case]) -> tuple[Sampled, torch.Tensor]:
    """What the sampler makes of rows, some of which are masked, and the logits that it leaves."""
    rows = np.arange(len(cases), dtype=np.int32)
    prompts = np.array([len(case.prompt) for case in cases], np.int32)
    table = SamplingRows.greedy(len(cases))
    table.store(RowSettings(rows, [case.parameters for case in cases], prompts, [case.history for case in cases]))
    logits = torch.from_numpy(np.stack([case.logits for case in cases]).astype(np.float32))
    places = np.array([i for i, case in enumerate(cases) if case.mask is not None], np.int64)
    masks = None
    if len(places):
        masks = TokenMasks(places, packed_masks([case.mask for case in cases if case.mask is not None]))
    return sample(logits, table.take(rows), np.array([len(case.tokens) for case in cases]), masks), logits
