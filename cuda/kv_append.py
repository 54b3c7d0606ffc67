"""Launcher of kv_append.cu: QK-norm, rotation, and the write of keys and values into their frames, in one pass."""

import torch
from torch import Tensor

from cuda.frames import FramePool
from cuda.launch import KernelLoader, KernelSpec
from cuda.tensors import check_parts, check_rows, check_tensor, element_of

THREADS = 256


class KvAppend:
    """For one model and pool. cosines, sines (P, D / 2) float32, by position, with any factor of the rotation in
    them.
    """

    def __init__(
        self, loader: KernelLoader, pool: FramePool, query_heads: int, cosines: Tensor, sines: Tensor, epsilon: float
    ) -> None:
        layout = pool.layout
        self.pool, self.query_heads, self.epsilon = pool, query_heads, epsilon
        self.heads = query_heads + 2 * layout.kv_heads
        for name, table in (("cosines", cosines), ("sines", sines)):
            check_tensor(name, table, (None, layout.head_dim // 2), torch.float32)
        self._cosines, self._sines = cosines, sines
        # a lane has 16 bytes twice
        self._heads_per_block = THREADS * 2 * 16 // layout.dtype.itemsize // layout.head_dim
        instance = f"kv_append<{element_of(layout.dtype)}, {layout.head_dim}>"
        (self._kernel,) = loader.load(
            "kv_append.cu", [KernelSpec(instance, "PPPPPPPPPPPiiiiiqqqf", THREADS, overlap=True)]
        )

    def __call__(
        self,
        stream: int,
        layer: int,
        qkv: Tensor,
        q_out: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        rows: Tensor,
        positions: Tensor,
        page_tables: Tensor,
        failed: Tensor,
    ) -> None:
        """Rotate the queries of T tokens into q_out, write their keys and values of `layer` into the pool.

        qkv (T, (H + 2 KH) D), or what gives it in sum, (P, T, (H + 2 KH) D) float32; q_out (T, H D), may be the
        queries' own columns of a qkv that is no sum; norms: weights (D,) of the
        queries' and the keys' norm, or None; rows, positions (T,) int32, row -1: padding, nothing of it is touched;
        page_tables (R, P) int32; failed (R,) int32: set to 1 for a row with a number that is not finite, or a page that
        is not there.
        """
        layout, tokens, width = self.pool.layout, qkv.shape[-2], self.heads * self.pool.layout.head_dim
        parts, qkv_stride = 0, width
        if qkv.dim() == 3:
            parts = check_parts("qkv", qkv, width, layout.dtype)
        else:
            qkv_stride = check_rows("qkv", qkv, width, layout.dtype)
        q_stride = check_rows("q_out", q_out, self.query_heads * layout.head_dim, layout.dtype)
        check_tensor("rows", rows, (tokens,), torch.int32)
        check_tensor("positions", positions, (tokens,), torch.int32)
        check_tensor("page_tables", page_tables, (None, None), torch.int32)
        check_tensor("failed", failed, (len(page_tables),), torch.int32)
        q_weight, k_weight = norms or (None, None)
        for weight in norms or ():
            check_tensor("norm", weight, (layout.head_dim,), layout.dtype)
        if tokens == 0:
            return
        grid = -(-tokens * self.heads // self._heads_per_block)
        self._kernel.launch(
            stream, grid, qkv, q_out, q_weight, k_weight, self._cosines, self._sines,
            rows, positions, page_tables, self.pool.layer_address(layer), failed,
            tokens, self.query_heads, layout.kv_heads, page_tables.shape[1], parts, qkv_stride, q_stride,
            layout.frame_bytes, self.epsilon,
        )  # fmt: skip
