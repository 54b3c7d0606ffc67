"""Launcher of paged_prefill.cu and paged_prefill_hopper.cu: causal attention of chunks of new tokens, with the list of
work that all layers share.
"""

import math

import torch
from torch import Tensor

from cuda.errors import ShapeMismatch
from cuda.frames import FrameLayout, FramePool
from cuda.launch import KernelLoader, KernelSpec
from cuda.tensors import check_rows, check_tensor, element_of

MAX_SEQUENCES = 1024
BLOCK_ROWS = 128  # query tokens * heads of a group
TILE_PAGES = 4
HOPPER_TILE_PAGES = 8
HOPPER_TILES = 5  # on their way: 3 of keys, 2 of values
HOPPER = 90  # the compute capability: later ones have no wgmma


def hopper_shared_bytes(layout: FrameLayout) -> int:
    """Of a block of paged_prefill_hopper.cu: queries, tiles of keys and values, and room to begin at a multiple of
    1024.
    """
    return 2 * BLOCK_ROWS * layout.head_dim * 2 + HOPPER_TILES * HOPPER_TILE_PAGES * layout.page_bytes + 1024


class PagedPrefill:
    """For one model and pool. Holds the list of work, so one object serves one stream at a time."""

    def __init__(
        self, loader: KernelLoader, pool: FramePool, query_heads: int, max_tokens: int, *, portable: bool = False
    ) -> None:
        """max_tokens: query tokens of one step, at most; portable: not the kernel for Hopper, for comparisons."""
        layout = pool.layout
        if query_heads % layout.kv_heads:
            raise ShapeMismatch(f"{query_heads} query heads do not share {layout.kv_heads} kv heads evenly")
        if query_heads // layout.kv_heads > BLOCK_ROWS:
            raise ShapeMismatch(f"{query_heads // layout.kv_heads} query heads a kv head: at most {BLOCK_ROWS}")
        self.pool, self.query_heads = pool, query_heads
        self.group = query_heads // layout.kv_heads
        self._scale = math.log2(math.e) / math.sqrt(layout.head_dim)
        self._takes_turns = loader.capability == HOPPER and not portable
        self._multiprocessors = loader.multiprocessors
        types = f"<{element_of(layout.dtype)}, {layout.head_dim}>"
        plan = KernelSpec("prefill_plan", "PPiiPPiiiP", 1024)
        if self._takes_turns:
            (self._plan_kernel,) = loader.load("paged_prefill.cu", [plan])
            shared = hopper_shared_bytes(layout)
            spec = KernelSpec(f"paged_prefill_hopper{types}", "PPPPPPPPPPPPfiiiqqq", 384, shared, overlap=True)
            (self._kernel,) = loader.load("paged_prefill_hopper.cu", [spec])
        else:
            spec = KernelSpec(f"paged_prefill{types}", "PPPPPPPPfiiqqq", 256, 2 * TILE_PAGES * 2 * layout.page_bytes)
            self._plan_kernel, self._kernel = loader.load("paged_prefill.cu", [plan, spec])
        self._work = torch.empty(
            self.max_blocks(max_tokens, MAX_SEQUENCES), 2, dtype=torch.int32, device=pool.data.device
        )
        self._work_count = torch.zeros(1, dtype=torch.int32, device=pool.data.device)
        blocks = self._multiprocessors if self._takes_turns else 0
        self._pieces = torch.zeros(4 + 2 * blocks, dtype=torch.int32, device=pool.data.device)
        self._parts = torch.empty(blocks, 256, layout.head_dim // 2 + 4, device=pool.data.device)
        self._counters = torch.zeros(2 + 8 * blocks, dtype=torch.int32, device=pool.data.device)

    def max_blocks(self, tokens: int, sequences: int) -> int:
        """Enough work items for `tokens` query tokens, however they spread over `sequences`: what a graph launches."""
        return tokens * self.group // BLOCK_ROWS + sequences

    def plan(self, stream: int, tokens: Tensor, lengths: Tensor, blocks: int) -> None:
        """List the work of one step: once a step, before the first layer. On Hopper a layer's kernel begins before the
        one in front of it has ended, and reads the list at once: between the two calls lies a launch that waits.

        tokens (S,) int32: query tokens of each sequence, 0 for those that do not prefill; lengths (S,) int32: keys
        after this chunk; blocks: work items to list and to launch, sum(ceil(tokens * H / KH / 128)) or more
        (`max_blocks`); more costs a little, fewer would lose work.
        """
        check_tensor("tokens", tokens, (None,), torch.int32)
        check_tensor("lengths", lengths, (len(tokens),), torch.int32)
        if len(tokens) > MAX_SEQUENCES or blocks > len(self._work):
            raise ShapeMismatch(f"{len(tokens)} sequences, {blocks} blocks: at most {MAX_SEQUENCES}, {len(self._work)}")
        self._plan_kernel.launch(
            stream, 1, tokens, lengths, len(tokens), self.group,
            self._work, self._work_count, blocks, self.pool.layout.kv_heads, self._multiprocessors,
            self._pieces if self._takes_turns else None,
        )  # fmt: skip

    def __call__(
        self,
        stream: int,
        layer: int,
        q: Tensor,
        out: Tensor,
        page_tables: Tensor,
        rows: Tensor,
        lengths: Tensor,
        query_starts: Tensor,
        blocks: int,
    ) -> None:
        """out = causal attention of the query tokens over all keys and values of their sequences in `layer`, own ones
        included. What is read while the kernel in front may still run: rows, lengths, query_starts, page_tables. Only
        q, keys and values may be its.

        q, out (T, H D), packed; page_tables (R, P), rows (S,), lengths (S,) keys after this chunk, query_starts (S +
        1,), all int32; blocks as given to `plan`. Rows of other sequences are not written. float32 inside;
        probabilities are rounded to the dtype before they meet the values. Sources: Dao 2023, section 3; Kwon 2023,
        section 4.1.
        """
        layout, sequences, width = self.pool.layout, len(lengths), self.query_heads * self.pool.layout.head_dim
        q_stride = check_rows("q", q, width, layout.dtype)
        out_stride = check_rows("out", out, width, layout.dtype)
        check_tensor("page_tables", page_tables, (None, None), torch.int32)
        for name, tensor, size in (
            ("rows", rows, sequences),
            ("lengths", lengths, sequences),
            ("query_starts", query_starts, sequences + 1),
        ):
            check_tensor(name, tensor, (size,), torch.int32)
        if blocks == 0:
            return
        arrays = (q, out, self.pool.layer_address(layer), page_tables, rows, lengths, query_starts, self._work)
        strides = (page_tables.shape[1], q_stride, out_stride, layout.frame_bytes)
        if self._takes_turns:
            self._kernel.launch(
                stream, self._multiprocessors, *arrays, self._work_count, self._pieces, self._parts,
                self._counters, self._scale, self.group, layout.kv_heads, *strides,
            )  # fmt: skip
        else:
            self._kernel.launch(stream, (blocks, layout.kv_heads), *arrays, self._scale, self.group, *strides)

    def work(self) -> Tensor:
        """(blocks of the list, 2) int32: sequence, block. For tests."""
        return self._work[: int(self._work_count[0])]

    def pieces(self) -> Tensor:
        """(4 + 2 multiprocessors,) int32: items that are not cut, pieces of the others, by how many tiles the last is
        larger than an even share, tiles of all; then each piece's item and its tiles in pieces before. For tests.
        """
        return self._pieces

    def counters(self) -> Tensor:
        """What must be zero between launches. For tests."""
        return self._counters
