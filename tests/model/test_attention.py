"""CpuKernels against the float64 reference: shuffled frames, page edges, and nothing written or read outside."""

import numpy as np
import pytest
import torch

from mm.addresses import pages_for
from mm.page_copies import MemoryOrders, PageCopies
from model import reference
from model.batch import ForwardBatch, forward_batch
from model.config import ModelConfig, parse_config
from model.cpu_kernels import CpuKernels, failed_rows
from model.kv_pool import KvPool, frame_bytes
from model.step_plan import StepPlan

LAYERS = 3


def config(heads: int = 6, kv_heads: int = 2, head_dim: int = 16) -> ModelConfig:
    sizes = {"vocab_size": 9, "hidden_size": 32, "intermediate_size": 9, "num_hidden_layers": LAYERS}
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    return parse_config({"architectures": ["LlamaForCausalLM"], **sizes, **shape})


class Case:
    """A pool with random contents in the frames of some rows, and large junk in all others."""

    def __init__(
        self,
        lengths: list[int],
        queries: list[int],
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        **shape: int,
    ) -> None:
        self.config = config(**shape)
        draw = np.random.default_rng(1)
        pages = pages_for(max(lengths), page_size)
        self.pool = KvPool(self.config, dtype, frames=len(lengths) * pages + 5, page_size=page_size)
        self.pool.data.normal_(generator=torch.Generator().manual_seed(2))
        frames = draw.permutation(self.pool.frames)[: len(lengths) * pages]
        self.tables = frames.reshape(len(lengths), pages).astype(np.int32)
        for row, length in enumerate(lengths):
            self.tables[row, pages_for(length, page_size) :] = -1  # past the row: never read
        self.kernels = CpuKernels(self.config, self.pool)
        self.plan = StepPlan(
            step=0,
            orders=MemoryOrders(),
            settings=None,
            rows=np.arange(len(lengths), dtype=np.int32),
            starts=np.array(lengths, np.int32) - np.array(queries, np.int32),
            query_starts=np.cumsum([0, *queries]).astype(np.int32),
            token_ids=np.zeros(sum(queries), np.int32),
            samples=np.ones(len(lengths), np.bool_),
            decodes=next((i for i, q in enumerate(queries) if q > 1), len(queries)),
        )

    def batch(self) -> ForwardBatch:
        return forward_batch(self.plan, self.tables, np.zeros(len(self.tables), np.int32), self.pool.page_size)

    def queries(self) -> torch.Tensor:
        shape = (len(self.plan.token_ids), self.config.heads, self.config.head_dim)
        return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(self.pool.data.dtype)


CASES = [
    ([1], [1]),
    ([15, 16, 17, 1], [1, 1, 1, 1]),
    ([300, 2, 33], [1, 1, 1]),
    ([16], [16]),
    ([33], [17]),
    ([40, 7, 64, 31, 17], [1, 1, 64, 15, 16]),
]


@pytest.mark.parametrize(("lengths", "queries"), CASES)
@pytest.mark.parametrize("shape", [(6, 2, 16), (9, 3, 64), (8, 1, 80), (4, 4, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_equals_the_reference(
    lengths: list[int], queries: list[int], shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Decodes and chunks, at page edges. float32 to 1e-5, bfloat16 to its 8 bits. Other frames hold NaN: never read."""
    heads, kv_heads, head_dim = shape
    case = Case(lengths, queries, dtype=dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    used = np.unique(case.tables[case.tables >= 0])
    others = np.setdiff1d(np.arange(case.pool.frames), used)
    case.pool.data[others] = float("nan")
    q = case.queries()
    ours = case.kernels.attention(q, 1, case.kernels.step(case.batch()))
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
def test_append_writes_its_places_and_no_others(page_size: int) -> None:
    """Keys (rotated) and values of one layer land where the page tables say; all else is as before."""
    case = Case([40, 7, 33], [1, 1, 20], page_size=page_size)
    c, before = case.config, case.pool.data.clone()
    qkv = torch.randn(22, (c.heads + 2 * c.kv_heads) * c.head_dim)
    step = case.kernels.step(case.batch())
    q = case.kernels.append(qkv, 2, None, None, step)
    heads = qkv.view(22, c.heads + 2 * c.kv_heads, c.head_dim)
    expected = before.clone()
    for place, row in enumerate([0, 1, *[2] * 20]):
        position = int(step.batch.positions[place])
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
def test_what_is_not_finite_stays_out_of_the_pool_and_raises_the_flag(bad: float) -> None:
    """C38: one bad value marks its row, and only it; the pool stays finite."""
    case = Case([9, 12, 30], [1, 1, 8])
    c = case.config
    qkv = torch.randn(10, (c.heads + 2 * c.kv_heads) * c.head_dim)
    qkv[4, -1] = bad  # a value of the third row's third token
    step = case.kernels.step(case.batch())
    case.kernels.append(qkv, 0, None, None, step)
    assert bool(case.pool.data.isfinite().all())
    assert failed_rows(step, torch.zeros(10, 4)).tolist() == [False, False, True]
    hidden = torch.zeros(10, 4)
    hidden[1, 2] = bad
    assert failed_rows(case.kernels.step(case.batch()), hidden).tolist() == [False, True, False]


def test_copies_move_whole_frames() -> None:
    case = Case([20], [1])
    before = case.pool.data.clone()
    case.pool.copy(PageCopies(np.array([0, 3], np.int32), np.array([2, 1], np.int32)))
    expected = before.clone()
    expected[2], expected[1] = before[0], before[3]
    assert torch.equal(case.pool.data, expected)


def test_a_new_pool_is_zero_and_has_the_promised_size() -> None:
    pool = KvPool(config(), torch.bfloat16, frames=7, page_size=16)
    assert not bool(pool.data.any())
    assert pool.data.numel() * 2 == 7 * frame_bytes(config(), torch.bfloat16, 16)


def test_rms_norm_equals_the_reference() -> None:
    case = Case([1], [1])
    x, residual, weight = torch.randn(5, 32), torch.randn(5, 32), torch.randn(32)
    normed, total = case.kernels.rms_norm(x, residual, weight)
    expected = reference.rms_norm((x + residual).double().numpy(), weight.double().numpy(), case.config.norm_eps)
    torch.testing.assert_close(normed.double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(total, x + residual)
