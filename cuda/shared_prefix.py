"""Launcher of shared_prefix (paged_prefill_hopper.cu): attention of groups of decoding sequences over the frames that
all members begin with, read once for the whole group (a cascade). paged_decode goes on from its parts.

    host     SharedPrefixes ──pack──▶ words ──one copy, when groups change──▶ state
    device   every layer: shared_prefix (work, members) ──parts──▶ paged_decode (prefixes, own pages)

The work does not change from step to step, so it is listed on the host, once for a set of groups: an item is a block of
128 rows (member * query heads of a kv head) of a group, and a range of its pages; the ranges are made so that the items
of all kv heads fill the multiprocessors evenly.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cuda.errors import ShapeMismatch
from cuda.frames import FramePool
from cuda.launch import KernelLoader, KernelSpec
from cuda.paged_prefill import BLOCK_ROWS, HOPPER, HOPPER_TILE_PAGES, hopper_shared_bytes
from cuda.tensors import check_rows, check_tensor, element_of
from mm.addresses import PAGE_SIZE, Int32Array, Int64Array
from mm.shared_prefixes import SharedPrefixes

MAX_PARTS = 2048  # members * parts of each, of all groups: 36 MB of workspace at 32 heads of 128
MAX_ITEMS = 2048
ITEM_WORDS, WORK_HEADER = 8, 4
PART_PADDING = 8  # floats after each part's row: maximum, sum, and unused ones up to a sector

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # of the longest group, that are tried

# What a launch costs, in microseconds on an H200, fitted to "shared beginnings" of `pagewalk bench kernels`. `dims` is
# head_dim / 128
LAUNCH_US = 3.0
ITEM_US = 0.2, 0.6  # an item of a multiprocessor: fixed, and times dims
TILE_US = 0.2, 2.0  # a tile, likewise
PART_US = 0.15  # to write a part and go on from it, of one member and kv head; a multiprocessor's share of all these

LEAST_PAGES = 4
"""A group that shares less decodes as it would alone: a tile costs as much however few of its pages are there."""

STREAM_BYTES_PER_US, L2_BYTES_PER_US = 4.5e6, 8.5e6  # that plain decode reads: from memory, and again from the L2
L2_BYTES = 60e6
LOCKSTEP_PAGES = 32
"""Plain decode finds shared pages in the L2 if another member has just read them: if all of a layer's shared pages fit,
or if sequences are so short that they are begun together. Otherwise every member reads them from memory."""
OWN_TOKENS = 256
"""What a member is taken to hold behind the shared pages: groups last for many steps, in which it grows. It counts
because plain decode reads from the L2 while it waits for memory anyway."""


class SharedPrefix:
    """For one model and pool. Holds the groups and the parts, so one object serves one stream at a time."""

    def __init__(
        self,
        loader: KernelLoader,
        pool: FramePool,
        query_heads: int,
        max_sequences: int,
        *,
        least_pages: int = LEAST_PAGES,
        always: bool = False,
    ) -> None:
        """max_sequences: of a batch. always: also where it does not pay, for tests and measurements. Needs a device
        for which `is_possible`.
        """
        layout = pool.layout
        if query_heads % layout.kv_heads:
            raise ShapeMismatch(f"{query_heads} query heads do not share {layout.kv_heads} kv heads evenly")
        if max_sequences > MAX_PARTS:
            raise ShapeMismatch(f"{max_sequences} sequences: at most {MAX_PARTS}, one part each")
        self.pool, self.query_heads = pool, query_heads
        self.group = query_heads // layout.kv_heads
        self._least_pages, self._always = least_pages, always
        self._max_sequences = max_sequences
        self._scale = math.log2(math.e) / math.sqrt(layout.head_dim)
        self._multiprocessors = loader.multiprocessors
        instance = f"shared_prefix<{element_of(layout.dtype)}, {layout.head_dim}>"
        spec = KernelSpec(instance, "PPPPPPfiiiqq", 384, hopper_shared_bytes(layout), overlap=True)
        (self._kernel,) = loader.load("paged_prefill_hopper.cu", [spec])
        device = pool.data.device
        self.words = 5 * max_sequences + WORK_HEADER + ITEM_WORDS * MAX_ITEMS
        self.state = torch.zeros(self.words, dtype=torch.int32, device=device)
        self.prefixes = self.state[: 4 * max_sequences].view(max_sequences, 4)  # what decode_plan reads
        self._members = self.state[4 * max_sequences : 5 * max_sequences]
        self._work = self.state[5 * max_sequences :]
        self.parts = torch.empty(part_floats(query_heads, layout.head_dim), dtype=torch.float32, device=device)

    @staticmethod
    def is_possible(loader: KernelLoader, dtype: torch.dtype) -> bool:
        """Elsewhere every sequence decodes alone, to the same result."""
        return loader.capability == HOPPER and dtype != torch.float32

    def pack(self, shared: SharedPrefixes, rows: Int32Array, words: Int32Array) -> int:
        """Write what `state` must hold for these groups into `words`. Returns how many words it took: what is to be
        copied to the beginning of `state`; 0 if the pass would not pay.

        rows (B,) int32: of the page tables, of the batch whose places `shared.members` are.
        """
        sizes, pages = np.diff(shared.starts).astype(np.int64), shared.pages.astype(np.int64)
        keep = np.flatnonzero(pages >= self._least_pages)
        if not len(keep):
            return 0
        sizes, pages = sizes[keep], pages[keep]
        splits, cost_us = self._splits(sizes, pages)
        if not self._always and self._saved_us(sizes, pages) < cost_us:
            return 0
        members = np.concatenate([shared.members[shared.starts[g] : shared.starts[g + 1]] for g in keep.tolist()])
        member_starts = np.cumsum(sizes) - sizes
        part_starts = np.cumsum(sizes * splits) - sizes * splits
        items = _items(pages, self._blocks(sizes), splits)
        of = items.group
        work = np.stack(
            (
                rows[members[member_starts[of]]], items.first_page, items.pages, member_starts[of],
                sizes[of], items.block, part_starts[of] + items.split, splits[of],
            ),
            axis=1,
        )  # fmt: skip

        all_ = self._max_sequences
        used = 5 * all_ + WORK_HEADER + work.size
        words[: 4 * all_] = 0
        prefixes = words[: 4 * all_].reshape(all_, 4)
        of_member = np.repeat(np.arange(len(sizes)), sizes)
        within = np.arange(len(members)) - member_starts[of_member]
        prefixes[members, 0] = pages[of_member]
        prefixes[members, 1] = part_starts[of_member] + within * splits[of_member]
        prefixes[members, 2] = splits[of_member]
        words[4 * all_ : 4 * all_ + len(members)] = members
        words[5 * all_ : 5 * all_ + WORK_HEADER] = (len(work), 0, 0, 0)
        words[5 * all_ + WORK_HEADER : used] = work.ravel()
        return used

    def __call__(self, stream: int, layer: int, q: Tensor, page_tables: Tensor) -> None:
        """Compute the parts of one layer, of the groups that `state` holds.

        q (B or more, H D); page_tables (R, P) int32. The kernel before may be the one that writes q. Error as of
        PagedPrefill: probabilities are rounded to the dtype. Source: Juravsky 2024, section 3.
        """
        layout = self.pool.layout
        q_stride = check_rows("q", q, self.query_heads * layout.head_dim, layout.dtype)
        check_tensor("page_tables", page_tables, (None, None), torch.int32)
        self._kernel.launch(
            stream, self._multiprocessors, q, self.parts, self.pool.layer_address(layer), page_tables,
            self._work, self._members, self._scale, self.group, layout.kv_heads, page_tables.shape[1],
            q_stride, layout.frame_bytes,
        )  # fmt: skip

    def _blocks(self, sizes: Int64Array) -> Int64Array:
        return -(-sizes * self.group // BLOCK_ROWS)

    def _saved_us(self, sizes: Int64Array, pages: Int64Array) -> float:
        """What plain decode would take for reading the shared pages more than once."""
        page = self.pool.layout.layer_bytes
        saved = (sizes - 1) * pages * page
        is_read_again = (pages > LOCKSTEP_PAGES) & (pages.sum() * page > L2_BYTES)
        if is_read_again.any():
            return float(saved[is_read_again].sum()) / STREAM_BYTES_PER_US
        own = int(sizes.sum()) * OWN_TOKENS / PAGE_SIZE * page
        return float(saved.sum()) / L2_BYTES_PER_US - own * (1 / STREAM_BYTES_PER_US - 1 / L2_BYTES_PER_US)

    def _splits(self, sizes: Int64Array, pages: Int64Array) -> tuple[Int64Array, float]:
        """(N,) into how many ranges of pages each group's work is cut: those that cost least; and that, in us."""
        tiles, blocks = -(-pages // HOPPER_TILE_PAGES), self._blocks(sizes)
        heads, best, least = self.pool.layout.kv_heads, np.ones(len(sizes), np.int64), math.inf
        dims = self.pool.layout.head_dim / 128
        item_us, tile_us = (fixed + dims * rest for fixed, rest in (ITEM_US, TILE_US))
        for count in SPLITS:
            splits = -(-tiles // -(-int(tiles.max()) // count))
            total, parts = int((blocks * splits).sum()), int((sizes * splits).sum())
            if count > 1 and (total * heads > 2 * self._multiprocessors or total > MAX_ITEMS or parts > MAX_PARTS):
                break
            costs = -(-_items(pages, blocks, splits).pages // HOPPER_TILE_PAGES) * tile_us + item_us
            turns = np.arange(total * heads) % self._multiprocessors
            longest = float(np.bincount(turns, weights=np.tile(costs, heads)).max())
            cost = longest + parts * heads / self._multiprocessors * PART_US
            if cost < least:
                best, least = splits, cost
            elif total * heads > self._multiprocessors:
                break
        return best, LAUNCH_US + least


@dataclass(frozen=True, slots=True)
class _Items:
    """The work of all groups for one kv head, (I,) each, the longest first."""

    group: Int64Array
    block: Int64Array  # of 128 rows
    split: Int64Array
    first_page: Int64Array
    pages: Int64Array


def _items(pages: Int64Array, blocks: Int64Array, splits: Int64Array) -> _Items:
    """N groups' items: each of a group's blocks with each of its ranges of pages: whole tiles, but for the last."""
    counts = blocks * splits
    group = np.repeat(np.arange(len(pages)), counts)
    number = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
    block, split = np.divmod(number, splits[group])
    tiles = -(-pages // HOPPER_TILE_PAGES)[group]
    first, end = (tiles * i // splits[group] * HOPPER_TILE_PAGES for i in (split, split + 1))
    mine = np.minimum(end, pages[group]) - first
    order = np.argsort(-mine, kind="stable")
    return _Items(group[order], block[order], split[order], first[order], mine[order])


def part_floats(query_heads: int, head_dim: int) -> int:
    """float32 numbers in the workspace of a SharedPrefix."""
    return MAX_PARTS * query_heads * (head_dim + PART_PADDING)
