"""Launcher of paged_attention_f32.cu: plain attention in float32, decode and prefill alike. Exact, not fast."""

import math

import torch
from torch import Tensor

from cuda.errors import ShapeMismatch
from cuda.frames import FramePool
from cuda.launch import KernelLoader, KernelSpec
from cuda.tensors import check_rows, check_tensor

WARPS = 4


class PagedAttentionF32:
    """For one model and a float32 pool."""

    def __init__(self, loader: KernelLoader, pool: FramePool, query_heads: int) -> None:
        layout = pool.layout
        if layout.dtype != torch.float32 or query_heads % layout.kv_heads:
            raise ShapeMismatch(
                f"{layout.dtype}, {query_heads} query and {layout.kv_heads} kv heads: this takes float32, even groups"
            )
        self.pool, self.query_heads = pool, query_heads
        self._scale = 1 / math.sqrt(layout.head_dim)
        spec = KernelSpec(f"paged_attention_f32<{layout.head_dim}>", "PPPPPPfiiiiqqq", WARPS * 32)
        (self._kernel,) = loader.load("paged_attention_f32.cu", [spec])

    def __call__(
        self,
        stream: int,
        layer: int,
        q: Tensor,
        out: Tensor,
        page_tables: Tensor,
        token_rows: Tensor,
        positions: Tensor,
    ) -> None:
        """out[t] = attention of q[t] over keys 0 ... positions[t] of row token_rows[t] in `layer`.

        q, out (T, H D) float32; page_tables (R, P), token_rows (T,), -1 for padding (not written), positions (T,)
        int32.
        """
        layout, width = self.pool.layout, self.query_heads * self.pool.layout.head_dim
        q_stride = check_rows("q", q, width, layout.dtype)
        out_stride = check_rows("out", out, width, layout.dtype)
        check_tensor("page_tables", page_tables, (None, None), torch.int32)
        check_tensor("token_rows", token_rows, (len(q),), torch.int32)
        check_tensor("positions", positions, (len(q),), torch.int32)
        if len(q) == 0:
            return
        self._kernel.launch(
            stream, -(-len(q) * self.query_heads // WARPS), q, out, self.pool.layer_address(layer), page_tables,
            token_rows, positions, self._scale, len(q), self.query_heads, self.query_heads // layout.kv_heads,
            page_tables.shape[1], q_stride, out_stride, layout.frame_bytes,
        )  # fmt: skip
