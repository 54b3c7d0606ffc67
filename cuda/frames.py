"""The pool of frames on the device, and how a page lies in it (docs/kv-layout.md).

    pool     [frame][layer][kv head][K, V][page]      frame-major: a frame, all layers, is one run of bytes, so that a
    swap
                                                      or a copy-on-write is one copy
    page     16 tokens x D. In float32 plain: [token][dim]. In 16 bits a *blob*: the bytes as the tensor cores want them
    in
             shared memory, so that a page is fetched by one linear copy and read without bank conflicts

Invariant (the NaN rule): every byte of the pool is a finite number at all times. It is zero at allocation, and only
kv_append and page copies write it.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from cuda.errors import ShapeMismatch
from cuda.growing_memory import GrowingMemory
from cuda.tensors import check_head_size, element_of
from mm.addresses import PAGE_SIZE

SHARED = 1 << 30
"""Bit of an entry in the device's page tables, beside the frame: several sequences have the page (common.cuh)."""

CHUNK = 8  # numbers of 16 bits in the 16 bytes that move together


def blob_order(head_dim: int) -> Tensor:
    """(16 * D / 8,) int64: where each 16-byte chunk of a plain page [token][dim] goes in the blob, counted in chunks.

    byte(token r, chunk c) = (r >> 3) * 16 D + (c >> 3) * 1024 + (r & 7) * 128 + (((c & 7) ^ (r & 7)) << 4): atoms of
    8 tokens x 64 dims, 1 KB each, in which token r's chunks are permuted by r. The same formula as `blob_offset` in
    common.cuh.
    """
    r = torch.arange(PAGE_SIZE)[:, None]
    c = torch.arange(head_dim // CHUNK)[None, :]
    offsets = (r >> 3) * (16 * head_dim) + (c >> 3) * 1024 + (r & 7) * 128 + (((c & 7) ^ (r & 7)) << 4)
    return (offsets // 16).flatten()


def to_blobs(pages: Tensor) -> Tensor:
    """Plain pages (..., 16, D) of a 16-bit dtype to blobs, (..., 16 * D). float32 pages stay as they are, flattened."""
    flat = pages.reshape(*pages.shape[:-2], PAGE_SIZE * pages.shape[-1])
    if pages.dtype == torch.float32:
        return flat
    chunks = flat.unflatten(-1, (-1, CHUNK))
    blobs = torch.empty_like(chunks)
    blobs[..., blob_order(pages.shape[-1]).to(pages.device), :] = chunks
    return blobs.flatten(-2)


def from_blobs(blobs: Tensor, head_dim: int) -> Tensor:
    """The inverse of `to_blobs`: (..., 16 * D) to (..., 16, D)."""
    if blobs.dtype != torch.float32:
        blobs = blobs.unflatten(-1, (-1, CHUNK))[..., blob_order(head_dim).to(blobs.device), :].flatten(-2)
    return blobs.unflatten(-1, (PAGE_SIZE, head_dim))


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """Sizes of a frame. kv_heads, layers and head_dim as in the model; dtype of keys and values."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        check_head_size(self.head_dim)
        element_of(self.dtype)

    @property
    def page_bytes(self) -> int:
        """One head's keys, or values, of one page."""
        return PAGE_SIZE * self.head_dim * self.dtype.itemsize

    @property
    def layer_bytes(self) -> int:
        return self.kv_heads * 2 * self.page_bytes

    @property
    def frame_bytes(self) -> int:
        return self.layers * self.layer_bytes


def plain_pages(raw: Tensor, layout: FrameLayout) -> Tensor:
    """Whole frames (N, layout.frame_bytes) uint8 in plain form: (N, layers, K | V, kv heads, 16, D)."""
    pages = raw.view(layout.dtype).view(-1, layout.layers, layout.kv_heads, 2, PAGE_SIZE * layout.head_dim)
    return from_blobs(pages, layout.head_dim).transpose(2, 3).contiguous()


def raw_pages(pages: Tensor, layout: FrameLayout) -> Tensor:
    """The inverse of `plain_pages`. Raises ShapeMismatch."""
    shape = (layout.layers, 2, layout.kv_heads, PAGE_SIZE, layout.head_dim)
    if pages.shape[1:] != shape or pages.dtype != layout.dtype:
        raise ShapeMismatch(
            f"pages must be {shape} of {layout.dtype}; they are {tuple(pages.shape[1:])}, {pages.dtype}"
        )
    blobs = to_blobs(pages.transpose(2, 3).contiguous())
    return blobs.contiguous().view(torch.uint8).view(len(pages), layout.frame_bytes)


class FramePool:
    """The memory of all frames, zeroed. `usable` of them have memory: all, but in a GrowingFramePool."""

    def __init__(self, layout: FrameLayout, frames: int, device: str | torch.device) -> None:
        """Raises ShapeMismatch if a table entry has no room for the last frame's number."""
        if frames > SHARED:
            raise ShapeMismatch(f"a pool of {frames} frames: at most {SHARED}")
        self.layout = layout
        self.frames = self.usable = frames
        shape = (frames, layout.layers, layout.kv_heads, 2, PAGE_SIZE * layout.head_dim)
        self.data = self._memory(shape, torch.device(device))
        self._base = self.data.data_ptr()

    def _memory(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        return torch.zeros(shape, dtype=self.layout.dtype, device=device)

    def layer_address(self, layer: int) -> int:
        """Where `layer`'s part of frame 0 begins. The part of frame f lies f * layout.frame_bytes further."""
        return self._base + layer * self.layout.layer_bytes

    def read(self, frames: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of some frames in plain form: both (len(frames), kv head, 16, D). For tests and
        checkpoints.
        """
        pages = from_blobs(self.data[frames.long(), layer], self.layout.head_dim)
        return pages[:, :, 0], pages[:, :, 1]

    def write(self, frames: Tensor, layer: int, keys: Tensor, values: Tensor) -> None:
        """The inverse of `read`. Raises ShapeMismatch."""
        shape = (len(frames), self.layout.kv_heads, PAGE_SIZE, self.layout.head_dim)
        if keys.shape != shape or values.shape != shape:
            raise ShapeMismatch(
                f"keys and values must be {shape}; they are {tuple(keys.shape)} and {tuple(values.shape)}"
            )
        self.data[frames.long(), layer] = to_blobs(torch.stack((keys, values), dim=2).to(self.layout.dtype))


class GrowingFramePool(FramePool):
    """A pool with addresses for `most` frames, of which the first `usable` have memory."""

    def __init__(self, layout: FrameLayout, frames: int, most: int, device: str | torch.device) -> None:
        """Raises DriverError if there is no memory for `frames`."""
        self._first = frames
        super().__init__(layout, most, device)
        self.usable = frames

    def _memory(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        index = device.index if device.index is not None else torch.cuda.current_device()
        size_bytes = shape[0] * self.layout.frame_bytes
        self._index = index
        torch.cuda.synchronize(index)  # makes the device's context this thread's: the driver's calls want one
        self._growing = GrowingMemory(load_driver(), index, size_bytes)
        self._growing.resize(self._first * self.layout.frame_bytes)
        flat = torch.as_tensor(_DeviceBytes(self._growing.address, size_bytes), device=torch.device("cuda", index))
        return flat.view(self.layout.dtype).view(shape)

    def resize(self, frames: int) -> None:
        """Have memory for the first `frames` frames, zeroed where it is new. It waits until nothing enqueued can use
        those that go; nothing may use them any more.

        Raises DriverError if there is not enough; then nothing has changed.
        """
        torch.cuda.synchronize(self._index)  # besides, it makes the context this thread's, which may be another
        self._growing.resize(frames * self.layout.frame_bytes)
        self.usable = frames

    def close(self) -> None:
        """Give all memory and addresses back: nothing may use the pool any more. Idempotent."""
        torch.cuda.synchronize(self._index)  # besides, it makes the context this thread's
        self._growing.close()

    @property
    def mapped_bytes(self) -> int:
        """What it has of the device's memory."""
        return self._growing.mapped_bytes


def load_driver() -> Any:
    """The CUDA driver's functions, as Python has them."""
    return import_module("cuda.bindings.driver")


@dataclass(frozen=True, slots=True)
class _DeviceBytes:
    """Bytes at an address of the device, as torch takes memory that it does not own."""

    address: int
    size: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}
