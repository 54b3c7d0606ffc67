"""Rows that sample together: stored in a table in another order, beside rows of others, as an executor does."""

import numpy as np
import torch
from slow_sampling import Case

from model.sampler import Sampled, sample
from model.sampling_rows import SamplingRows
from model.step_plan import RowSettings, SamplingParameters


def stored(cases: list[Case], rows: np.ndarray) -> SamplingRows:
    """A table with some rows to spare, where case i is row rows[i]."""
    table = SamplingRows.greedy(int(rows.max(initial=0)) + 3)
    prompts = np.array([len(case.prompt) for case in cases], np.int32)
    table.store(RowSettings(rows, [case.parameters for case in cases], prompts, [case.history for case in cases]))
    return table


def sampled(cases: list[Case]) -> Sampled:
    """What each case samples, beside the others."""
    rows = np.random.default_rng(len(cases)).permutation(len(cases) + 2)[: len(cases)].astype(np.int32)
    logits = torch.from_numpy(np.stack([case.logits for case in cases]).astype(np.float32))
    positions = np.array([len(case.tokens) for case in cases], np.int64)
    return sample(logits, stored(cases, rows).take(rows), positions)


def tokens_of(cases: list[Case]) -> list[int]:
    """The same, of cases that do not fail."""
    outcome = sampled(cases)
    assert not outcome.failed.any()
    return outcome.tokens.tolist()


def kept_ids(logits: list[float] | np.ndarray, draws: int = 2000, **parameters: float) -> set[int]:
    """Tokens that come out over many seeds."""
    return set(np.flatnonzero(counts_of(logits, draws, **parameters)).tolist())


def counts_of(logits: list[float] | np.ndarray, draws: int = 2000, **parameters: float) -> np.ndarray:
    """(V,) how often each token comes out, over the seeds 0 ... draws - 1."""
    row = np.array(logits, np.float32)
    cases = [Case(row, SamplingParameters(seed=seed, **parameters)) for seed in range(draws)]
    return np.bincount(tokens_of(cases), minlength=len(row))
