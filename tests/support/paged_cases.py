"""Random paged keys and values, and what attention over them must give: the cases of the attention kernels' tests."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from cuda.frames import SHARED, FrameLayout, FramePool

PAGE = 16
ABSENT_FRAME = SHARED - 1
JUNK = 1e4  # finite and large: if a kernel lets it count, the result is far off


def marked(tables: Tensor, generator: torch.Generator) -> Tensor:
    """Page tables with SHARED in a random half of the entries: a hint, whatever the kernel."""
    hints = torch.randint(0, 2, tables.shape, generator=generator, dtype=tables.dtype)
    return tables | hints * SHARED


@dataclass
class PagedCase:
    """S sequences whose pages lie in random frames. Unused table entries name a frame that does not exist; a random
    half of all have the bit SHARED.
    """

    pool: FramePool
    page_tables: Tensor  # (R, P) int32
    rows: Tensor  # (S,) int32, -1 for sequences of length 0
    lengths: Tensor  # (S,) int32
    keys: list[Tensor]  # of each sequence, (length, KH, D) float64, as stored
    values: list[Tensor]


def paged_case(
    layout: FrameLayout,
    lengths: list[int],
    device: str,
    generator: torch.Generator,
    *,
    layer: int = 0,
    spare_rows: int = 3,
    loud: tuple[slice, float] = (slice(0), 1.0),
) -> PagedCase:
    """Sequences of the given lengths. Places past a sequence's end in its last page hold JUNK; unused frames hold JUNK
    too. loud: tokens of each sequence, and what their keys are multiplied with.
    """
    pages = [-(-length // PAGE) for length in lengths]
    frames = sum(pages) + 5
    order = torch.randperm(frames, generator=generator)
    pool = FramePool(layout, frames, device)
    pool.data.fill_(JUNK)
    rows_total = len(lengths) + spare_rows
    rows = torch.randperm(rows_total, generator=generator)[: len(lengths)]
    tables = torch.full((rows_total, max(max(pages), 1) + 2), ABSENT_FRAME)
    keys, values, used = [], [], 0
    for row, length, count in zip(rows.tolist(), lengths, pages, strict=True):
        mine = order[used : used + count]
        used += count
        tables[row, :count] = mine
        stored = torch.full((2, count * PAGE, layout.kv_heads, layout.head_dim), JUNK, dtype=layout.dtype)
        stored[:, :length] = torch.randn(2, length, layout.kv_heads, layout.head_dim, generator=generator).to(
            layout.dtype
        )
        tokens, factor = loud
        stored[0, :length][tokens] *= factor
        k, v = stored.unflatten(1, (count, PAGE)).transpose(2, 3).to(device)  # (count, KH, PAGE, D)
        if count:
            pool.write(mine.to(device), layer, k, v)
        keys.append(stored[0, :length].double())
        values.append(stored[1, :length].double())
    rows[torch.tensor(lengths) == 0] = -1
    return PagedCase(
        pool,
        marked(tables, generator).to(device, torch.int32),
        rows.to(device, torch.int32),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        keys,
        values,
    )


def attention(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """(n, H, D) float64: causal attention of the last n positions of a sequence, in float64.

    q (n, H, D); keys, values (length, KH, D), length >= n.
    """
    n, heads, dim = q.shape
    length, kv_heads, _ = keys.shape
    k = keys.repeat_interleave(heads // kv_heads, dim=1)
    v = values.repeat_interleave(heads // kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / math.sqrt(dim)
    hidden = torch.arange(length)[None, :] > torch.arange(length - n, length)[:, None]
    scores.masked_fill_(hidden, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def worst_error(result: Tensor, reference: Tensor) -> float:
    """Largest relative error of a token's head, ||result - reference|| / ||reference||: a sum over all would hide one
    broken row.

    result, reference (T, H, D). NaN in the result gives infinity.
    """
    if not len(result):
        return 0.0
    difference = (result.double().cpu() - reference).norm(dim=-1) / reference.norm(dim=-1)
    return math.inf if difference.isnan().any() else float(difference.max())


def either(on_all: list[Any], cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test: those in `on_all` run on every device, the others of `cases` on a GPU only."""
    return [case if case in on_all else pytest.param(*case, marks=pytest.mark.gpu) for case in cases]
