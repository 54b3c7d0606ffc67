"""The keys and values of all frames: one tensor, frame-major, so that a frame (all layers) is one run of bytes.

    pool[frame, layer, 0 | 1, kv head, token in page, dim]        0: keys (rotated), 1: values

NaN rule. A masked position still enters the arithmetic of a kernel, as 0 * value, and 0 * NaN is NaN. So every byte of
the pool must be finite at all times: it is zero at allocation, and whoever writes keys or values writes finite ones
(NaN becomes 0, infinities the largest number) and raises the row's `failed` flag instead.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

from mm.page_copies import PageCopies
from model.config import ModelConfig


def frame_bytes(config: ModelConfig, dtype: torch.dtype, page_size: int) -> int:
    """Bytes of one frame: keys and values of one page, all layers."""
    return config.layers * 2 * config.kv_heads * page_size * config.head_dim * dtype.itemsize


class KvPool:
    """The CPU's pool. `data` (F, layers, 2, KH, page_size, D), contiguous."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, frames: int, page_size: int) -> None:
        shape = (frames, config.layers, 2, config.kv_heads, page_size, config.head_dim)
        self.frames = frames
        self.page_size = page_size
        self.layers = config.layers
        self.kv_heads = config.kv_heads
        # The system gives zero pages, which cost nothing until written, and takes them back. torch.zeros writes them
        # all: 2 GiB would be 2.5 s of start, and resident before the first request.
        self._frame_bytes = frame_bytes(config, dtype, page_size)
        self._memory = mmap.mmap(-1, frames * self._frame_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.data = torch.frombuffer(self._memory, dtype=torch.uint8).view(dtype).view(shape)

    def give_back(self, first: int) -> None:
        """Frames from `first` on give their memory to the system, as far as it has whole pages; they are zero then."""
        start = -(-first * self._frame_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if start < len(self._memory) and hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED, start, len(self._memory) - start)

    def frame(self, number: int) -> Tensor:
        """(frame_bytes,) uint8: one frame, all layers, as bytes."""
        return self.data[number].view(torch.uint8).view(-1)

    @property
    def vectors(self) -> Tensor:
        """(F * layers * 2 * KH * page_size, D): row ((frame * layers + layer) * 2 + kind) * KH + head) * page_size +
        token.
        """
        return self.data.view(-1, self.data.shape[-1])

    @property
    def head_pages(self) -> Tensor:
        """(F * layers * 2 * KH, page_size * D): one head's keys, or values, of one page a row."""
        return self.data.view(-1, self.page_size * self.data.shape[-1])

    def copy(self, copies: PageCopies) -> None:
        """Carry out mm's copies: whole frames. Targets are distinct, and none of them is a source."""
        if len(copies):
            targets, sources = torch.from_numpy(copies.targets).long(), torch.from_numpy(copies.sources).long()
            self.data.index_copy_(0, targets, self.data.index_select(0, sources))
