"""Launcher of paged_decode.cu: attention of one new token a sequence, by the plan of decode_plan.cu."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cuda.errors import ShapeMismatch
from cuda.frames import FramePool
from cuda.launch import KernelLoader, KernelSpec
from cuda.tensors import check_rows, check_tensor, element_of

MAX_SEQUENCES = 1024  # the plan kernel is one block with one thread a sequence
MAX_BLOCKS = 1024  # that it can give work to
LEAST_PAGES = 8  # a block: shorter ranges cost more in merging than they gain
SNAP_PAGES = 32
"""A block's range begins at the edge of an item that is at most so far from where an even cut would have it. Measured
on an H200 (8B shape, microseconds with 16 / 32): 64 x 2,048 125.0 / 124.1, 256 x 1,024 248.9 / 247.3, 8 x 8,192 63.9 /
64.3; with 0 / 8 (blocks of half the size): 64 x 300 24.0 / 21.3."""
UNEVEN_PAGES = 24  # of 128 dims; twice as many of 64
"""An item may be so much longer than an even range, and still be left to one block. Measured likewise: 56 pages more (1
x 1,024) cost 1.8 us, 30 (4 x 600) nothing; with 64 dims, 30 pages gain 0.8 us and 52 (8 x 1,024) 0.1."""
EVEN_PERCENT = 12
"""Where every item can have blocks of its own, their ranges may be so much longer than even ones. Measured likewise, 4
/ 12 / 30: 3 x 8,192 26.4 / 25.9 / 25.9, 30,000 + 20,000 49.8 / 50.3 / 50.9, five of 400 ... 10,000 29.8 / 29.7 / 29.1.
"""
UNWRITTEN = -1  # the bits of a number that no block has handed to another
PART_PADDING = 4  # floats after each part's row: maximum, sum, and two unused


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """How the kernel fills a multiprocessor. Chosen by measurement: with 64 dims, few items want many warps for each,
    many want many blocks.
    """

    warps: int
    stages: int  # pages of 128 dims on their way a warp; twice as many of 64 dims
    blocks_per_multiprocessor: int


WIDE = DecodeShape(8, 3, 1)  # heads of 128 dims
FEW_NARROW = DecodeShape(8, 2, 1)  # of 64 dims
MANY_NARROW = DecodeShape(4, 2, 3)
BEFORE_HOPPER = DecodeShape(4, 2, 1)  # 99 KB of shared memory a block at most (Ada)
MAX_FEW_ITEMS = 128  # sequences * kv heads


class PagedDecode:
    """For one model and pool. Holds workspace, so one object serves one stream at a time."""

    def __init__(
        self, loader: KernelLoader, pool: FramePool, query_heads: int, *, shape: DecodeShape | None = None
    ) -> None:
        """shape: for measurements; None chooses by the number of sequences."""
        layout = pool.layout
        if query_heads % layout.kv_heads:
            raise ShapeMismatch(f"{query_heads} query heads do not share {layout.kv_heads} kv heads evenly")
        self.pool, self.query_heads = pool, query_heads
        self.group = query_heads // layout.kv_heads
        self.splits = -(-self.group // 8)  # the tensor cores' rows that one item uses hold 8 query heads
        self.items = layout.kv_heads * self.splits
        self.per_item = -(-self.group // self.splits)
        self._part_rows = 4 if self.per_item <= 4 else 8
        self._scale = math.log2(math.e) / math.sqrt(layout.head_dim)
        self._multiprocessors = loader.multiprocessors
        narrow = 128 // layout.head_dim
        self._uneven_pages = UNEVEN_PAGES * narrow
        if shape is not None:
            self._shapes = [(MAX_SEQUENCES * self.items, shape)]
        elif loader.capability < 90:
            self._shapes = [(MAX_SEQUENCES * self.items, BEFORE_HOPPER)]
        elif layout.head_dim > 64:
            self._shapes = [(MAX_SEQUENCES * self.items, WIDE)]
        else:
            self._shapes = [(MAX_FEW_ITEMS, FEW_NARROW), (MAX_SEQUENCES * self.items, MANY_NARROW)]
        (self._plan_kernel,) = loader.load("decode_plan.cu", [KernelSpec("decode_plan", "PPPiiiiiiiiiPPP", 1024)])
        kernels = loader.load("paged_decode.cu", [self._spec(shape) for _, shape in self._shapes])
        self._kernels = {shape: kernel for (_, shape), kernel in zip(self._shapes, kernels, strict=True)}

        device = pool.data.device
        blocks = max(self._blocks(shape) for _, shape in self._shapes)
        assert blocks <= MAX_BLOCKS
        warps = max(self._blocks(shape) * shape.warps for _, shape in self._shapes)
        self._starts = torch.zeros(2 * warps, 4, dtype=torch.int32, device=device)
        self._first_parts = torch.zeros(blocks, dtype=torch.int32, device=device)
        self._sequences = torch.zeros(MAX_SEQUENCES, 4, dtype=torch.int32, device=device)
        self._parts = torch.full(
            (2 * blocks, self._part_rows, layout.head_dim + PART_PADDING), UNWRITTEN, dtype=torch.int32, device=device
        )

    def plan(
        self, stream: int, page_tables: Tensor, rows: Tensor, lengths: Tensor, *, prefixes: Tensor | None = None
    ) -> None:
        """Divide the work of one step among thread blocks: once a step, before the first layer.

        page_tables (R, P) int32; rows (B,) int32, of them; lengths (B,) int32: keys of each sequence, its new token
        counted, 0 for padding. prefixes: SharedPrefix.prefixes, if the step's layers are given its parts.
        """
        check_tensor("page_tables", page_tables, (None, None), torch.int32)
        check_tensor("lengths", lengths, (None,), torch.int32)
        check_tensor("rows", rows, (len(lengths),), torch.int32)
        if len(lengths) > MAX_SEQUENCES:
            raise ShapeMismatch(f"{len(lengths)} sequences in one decode: at most {MAX_SEQUENCES}")
        if page_tables.numel() >= 1 << 31:
            raise ShapeMismatch(f"page tables of {page_tables.numel()} entries: a place in them must fit into 31 bits")
        if prefixes is not None:
            check_tensor("prefixes", prefixes, (None, 4), torch.int32)
            if len(prefixes) < len(lengths):
                raise ShapeMismatch(f"{len(lengths)} sequences, but {len(prefixes)} prefixes")
        shape = self._shape(len(lengths))
        self._plan_kernel.launch(
            stream, 1, lengths, rows, prefixes, len(lengths), self.items, self._blocks(shape), shape.warps,
            LEAST_PAGES, EVEN_PERCENT, self._uneven_pages, SNAP_PAGES, page_tables.shape[1],
            self._starts, self._first_parts, self._sequences,
        )  # fmt: skip

    def __call__(
        self,
        stream: int,
        layer: int,
        q: Tensor,
        out: Tensor,
        page_tables: Tensor,
        sequences: int,
        *,
        prefix_parts: Tensor | None = None,
    ) -> None:
        """out[b] = attention of q[b] over the keys and values of sequence b in `layer`, for b < sequences.

        q, out (B or more, H D), row b of sequence b; page_tables and the number of sequences as given to `plan`.
        prefix_parts: this layer's SharedPrefix.parts, if the plan has prefixes. Rows of out whose length is 0 are not
        written. Softmax and sums in float32; error to float64 in the tests. Sources: Dao 2022 (online softmax);
        Kwon 2023, section 4.1 (pages); Osama 2023 (stream-K); Juravsky 2024 (shared prefixes).
        """
        layout, width = self.pool.layout, self.query_heads * self.pool.layout.head_dim
        q_stride = check_rows("q", q, width, layout.dtype)
        out_stride = check_rows("out", out, width, layout.dtype)
        check_tensor("page_tables", page_tables, (None, None), torch.int32)
        if len(q) < sequences or len(out) < sequences:
            raise ShapeMismatch(f"{sequences} sequences, but {len(q)} queries and {len(out)} rows for results")
        if sequences == 0:
            return
        shape = self._shape(sequences)
        self._kernels[shape].launch(
            stream, self._blocks(shape), q, out, self.pool.layer_address(layer), page_tables,
            self._starts, self._first_parts, self._sequences, prefix_parts, self._parts,
            self._scale, layout.kv_heads, self.splits, self.group, self.per_item,
            q_stride, out_stride, layout.frame_bytes,
        )  # fmt: skip

    def is_at_rest(self) -> bool:
        """Whether no part lies in the workspace: so it must be between launches. For tests."""
        return bool((self._parts == UNWRITTEN).all())

    def _shape(self, sequences: int) -> DecodeShape:
        return next(shape for limit, shape in self._shapes if sequences * self.items <= limit)

    def _blocks(self, shape: DecodeShape) -> int:
        return self._multiprocessors * shape.blocks_per_multiprocessor

    def _spec(self, shape: DecodeShape) -> KernelSpec:
        layout = self.pool.layout
        stages = shape.stages * 128 // layout.head_dim
        rings = shape.warps * stages * 2 * layout.page_bytes
        parts = shape.warps * self._part_rows * (layout.head_dim + PART_PADDING) * 4
        instance = (
            f"paged_decode<{element_of(layout.dtype)}, {layout.head_dim}, {self._part_rows}, {shape.warps}, {stages}, "
            f"{shape.blocks_per_multiprocessor}>"
        )
        return KernelSpec(instance, "PPPPPPPPPfiiiiqqq", shape.warps * 32, rings + parts, overlap=True)
