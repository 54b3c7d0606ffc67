"""Single operators of either CPU implementation, over a pool of shuffled frames, with arguments that a test chooses."""

import ctypes

import numpy as np
import torch
from torch import Tensor

from mm.addresses import BoolArray, pages_for
from mm.page_copies import MemoryOrders
from model.batch import ForwardBatch, forward_batch
from model.config import ModelConfig, parse_config
from model.cpu_kernels import CpuKernels, failed_rows
from model.kv_pool import KvPool
from model.native_kernels import NativeKernels
from model.parameters import Linear
from model.step_plan import StepPlan

LAYERS = 3


def config(heads: int = 6, kv_heads: int = 2, head_dim: int = 16, hidden: int = 32) -> ModelConfig:
    sizes = {"vocab_size": 9, "hidden_size": hidden, "intermediate_size": 9, "num_hidden_layers": LAYERS}
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    return parse_config({"architectures": ["LlamaForCausalLM"], **sizes, **shape})


class Case:
    """A pool with random contents in the frames of some rows, and large junk in all others.

    native: the compiled kernels, None for torch's. The methods compute at once, whichever it is.
    """

    def __init__(
        self,
        native: ctypes.CDLL | None,
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
        self.torch = CpuKernels(self.config, self.pool)
        self.native = None if native is None else NativeKernels(self.config, self.pool, native)
        self.failed_tokens = np.zeros(sum(queries), np.bool_)
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
        self.step = self.torch.step(self.batch())

    def batch(self) -> ForwardBatch:
        return forward_batch(self.plan, self.tables, np.zeros(len(self.tables), np.int32), self.pool.page_size)

    def queries(self) -> Tensor:
        shape = (len(self.plan.token_ids), self.config.heads, self.config.head_dim)
        return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(self.pool.data.dtype)

    def attention(self, q: Tensor, layer: int) -> Tensor:
        if self.native is None:
            return self.torch.attention(q, layer, self.step)
        return self._run(lambda kernels: kernels.attention(q, layer, None))

    def append(self, qkv: Tensor, layer: int, q_norm: Tensor | None = None, k_norm: Tensor | None = None) -> Tensor:
        if self.native is None:
            return self.torch.append(qkv, layer, q_norm, k_norm, self.step)
        q = self._run(lambda kernels: kernels.append(qkv, layer, q_norm, k_norm, None))
        return q.view(len(qkv), self.config.heads, self.config.head_dim)

    def rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        if self.native is None:
            return self.torch.rms_norm(x, residual, weight)
        sums: list[Tensor] = []

        def record(kernels: NativeKernels) -> Tensor:
            normed, total = kernels.rms_norm(x, residual, weight)
            sums.append(total)
            return normed

        return self._run(record), sums[0]

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        if self.native is None:
            return self.torch.silu_mul(gate_up)
        return self._run(lambda kernels: kernels.silu_mul(gate_up))

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """The native kernels only: `linear.weight` is plain."""
        assert self.native is not None
        packed = Linear(linear.weight, linear.bias)
        self.native.pack([packed])
        return self._run(lambda kernels: kernels.linear(x, packed))

    def failed(self, hidden: Tensor) -> BoolArray:
        """(S,) what the appends so far and these last hidden states say of the rows."""
        if self.native is None:
            return failed_rows(self.step, hidden)
        self._run(lambda kernels: kernels.check(hidden))
        return np.logical_or.reduceat(self.failed_tokens, self.plan.query_starts[:-1])

    def _run(self, record) -> Tensor:
        """Record one operator and run it."""
        assert self.native is not None
        results: list[Tensor] = []
        batch = self.batch()
        tokens = len(batch.token_ids)
        program = self.native.record(lambda: results.append(record(self.native)), tokens)
        self.failed_tokens |= self.native.run(program, batch)
        return results[0]
