"""ForwardBatch: every tensor that one step's forward pass reads, apart from weights and pool. An argument, never a
global.

Letters as everywhere: T query tokens of S Sequences, packed row after row, decodes (one token each) first; P page table
entries of the longest row.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mm.addresses import Int32Array, pages_for
from model.step_plan import FED_BACK, StepPlan


@dataclass(slots=True)
class ForwardBatch:
    """One step. The numpy fields are for launching: sizes are taken from here, never from a device."""

    token_ids: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64, from 0 in each Sequence
    frames: Tensor  # (T,) int64, where each token's keys and values go: the frame,
    offsets: Tensor  # (T,) int64, and the place in its page
    page_tables: Int32Array  # (S, P) frame of each page; entries past a row's last page are meaningless
    starts: Int32Array  # (S,) keys before this step
    lengths: Int32Array  # (S,) keys after this step
    query_starts: Int32Array  # (S + 1,)
    decodes: int  # rows [0, decodes) have one query token
    sampled: Tensor  # (N,) int64: the last query token of every row that samples, in row order


def forward_batch(plan: StepPlan, tables: Int32Array, last_tokens: Int32Array, page_size: int) -> ForwardBatch:
    """The batch of a plan, on the CPU. tables (max_rows, max_pages) and last_tokens (max_rows,) are the executor's
    state, after the plan's table changes and after the step before.
    """
    counts = np.diff(plan.query_starts)
    lengths = plan.lengths
    index = np.repeat(np.arange(len(plan.rows)), counts)  # (T,) the row of each token, by its place in the plan
    positions = (plan.starts - plan.query_starts[:-1])[index] + np.arange(len(plan.token_ids))
    token_rows = plan.rows[index]
    token_ids = np.where(plan.token_ids == FED_BACK, last_tokens[token_rows], plan.token_ids)
    pages = pages_for(int(lengths.max(initial=0)), page_size)
    return ForwardBatch(
        token_ids=torch.from_numpy(token_ids.astype(np.int64)),
        positions=torch.from_numpy(positions.astype(np.int64)),
        frames=torch.from_numpy(tables[token_rows, positions // page_size].astype(np.int64)),
        offsets=torch.from_numpy((positions % page_size).astype(np.int64)),
        page_tables=tables[plan.rows, :pages],
        starts=plan.starts,
        lengths=lengths,
        query_starts=plan.query_starts,
        decodes=plan.decodes,
        sampled=torch.from_numpy((plan.query_starts[1:][plan.samples] - 1).astype(np.int64)),
    )
