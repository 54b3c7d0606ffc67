"""The kernels of the CPU, in C++ and in torch, against the float64 reference: shuffled frames, page edges, and nothing
written or read outside.
"""

import ctypes

import numpy as np
import pytest
import torch
from cpu_cases import Case, config

from mm.page_copies import PageCopies
from model import reference
from model.kv_pool import KvPool, frame_bytes

Native = ctypes.CDLL | None

CASES = [
    ([1], [1]),
    ([15, 16, 17, 1], [1, 1, 1, 1]),
    ([300, 2, 33], [1, 1, 1]),
    ([16], [16]),
    ([33], [17]),
    ([40, 7, 64, 31, 17], [1, 1, 64, 15, 16]),
]


@pytest.mark.parametrize(("lengths", "queries"), CASES)
@pytest.mark.parametrize("shape", [(6, 2, 16), (9, 3, 64), (8, 1, 80), (4, 4, 256), (8, 2, 128), (7, 1, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_equals_the_reference(
    cpu_kernels: Native, lengths: list[int], queries: list[int], shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Decodes and chunks, at page edges. float32 to 1e-5, bfloat16 to its 8 bits. Other frames hold NaN: never read."""
    heads, kv_heads, head_dim = shape
    case = Case(cpu_kernels, lengths, queries, dtype=dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    used = np.unique(case.tables[case.tables >= 0])
    others = np.setdiff1d(np.arange(case.pool.frames), used)
    case.pool.data[others] = float("nan")
    q = case.queries()
    ours = case.attention(q, 1)
    theirs = reference.paged_attention(
        q.double().numpy(),
        case.pool.data[:, 1].double().numpy(),
        case.tables,
        case.plan.query_starts,
        case.plan.lengths,
    )
    exact = dtype == torch.float32
    close = {"rtol": 1e-5, "atol": 1e-5} if exact else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(ours.double().view(theirs.shape), torch.from_numpy(theirs), **close)


@pytest.mark.parametrize("page_size", [4, 16, 32])
def test_append_writes_its_places_and_no_others(cpu_kernels: Native, page_size: int) -> None:
    """Keys (rotated) and values of one layer land where the page tables say; all else is as before."""
    case = Case(cpu_kernels, [40, 7, 33], [1, 1, 20], page_size=page_size)
    c, before = case.config, case.pool.data.clone()
    qkv = torch.randn(22, (c.heads + 2 * c.kv_heads) * c.head_dim)
    q = case.append(qkv, 2)
    heads = qkv.view(22, c.heads + 2 * c.kv_heads, c.head_dim)
    expected = before.clone()
    for place, row in enumerate([0, 1, *[2] * 20]):
        position = int(case.batch().positions[place])
        frame, offset = case.tables[row, position // page_size], position % page_size
        angle = position * 10_000.0 ** (-torch.arange(0, c.head_dim, 2) / c.head_dim)
        first, second = heads[place].chunk(2, dim=-1)
        turned = torch.cat(
            (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), dim=-1
        )
        torch.testing.assert_close(q[place], turned[: c.heads])
        expected[frame, 2, 0, :, offset] = turned[c.heads : c.heads + c.kv_heads]
        expected[frame, 2, 1, :, offset] = heads[place, c.heads + c.kv_heads :]
    torch.testing.assert_close(case.pool.data, expected)
    assert torch.equal(case.pool.data[:, :2], before[:, :2])
    assert int((case.pool.data != before).sum()) == 22 * 2 * c.kv_heads * c.head_dim


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_out_of_the_pool_and_raises_the_flag(cpu_kernels: Native, bad: float) -> None:
    """C38: one bad value marks its row, and only it; the pool stays finite."""
    case = Case(cpu_kernels, [9, 12, 30], [1, 1, 8])
    c = case.config
    qkv = torch.randn(10, (c.heads + 2 * c.kv_heads) * c.head_dim)
    qkv[4, -1] = bad  # a value of the third row's third token
    case.append(qkv, 0)
    assert bool(case.pool.data.isfinite().all())
    assert case.failed(torch.zeros(10, 4)).tolist() == [False, False, True]
    hidden = torch.zeros(10, 4)
    hidden[1, 2] = bad
    assert Case(cpu_kernels, [9, 12, 30], [1, 1, 8]).failed(hidden).tolist() == [False, True, False]


def test_copies_move_whole_frames() -> None:
    case = Case(None, [20], [1])
    before = case.pool.data.clone()
    case.pool.copy(PageCopies(np.array([0, 3], np.int32), np.array([2, 1], np.int32)))
    expected = before.clone()
    expected[2], expected[1] = before[0], before[3]
    assert torch.equal(case.pool.data, expected)


def test_a_new_pool_is_zero_and_has_the_promised_size() -> None:
    pool = KvPool(config(), torch.bfloat16, frames=7, page_size=16)
    assert not bool(pool.data.any())
    assert pool.data.numel() * 2 == 7 * frame_bytes(config(), torch.bfloat16, 16)


def test_rms_norm_equals_the_reference(cpu_kernels: Native) -> None:
    case = Case(cpu_kernels, [5], [5])
    x, residual, weight = torch.randn(5, 32), torch.randn(5, 32), torch.randn(32)
    wanted = x + residual
    normed, total = case.rms_norm(x, residual, weight)
    expected = reference.rms_norm(wanted.double().numpy(), weight.double().numpy(), case.config.norm_eps)
    torch.testing.assert_close(normed.double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(total, wanted)
