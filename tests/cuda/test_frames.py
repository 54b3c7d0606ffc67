"""The layout of pages, and copies of frames."""

import numpy as np
import pytest
import torch

from cuda.errors import ShapeMismatch, UnsupportedDevice
from cuda.frames import FrameLayout, FramePool, blob_order, from_blobs, to_blobs
from cuda.page_copy import PageCopy


@pytest.mark.parametrize("head_dim", [64, 128])
def test_blobs_are_a_permutation_of_chunks(head_dim) -> None:
    """Every 16-byte chunk has one place, and to_blobs and from_blobs are inverse."""
    assert sorted(blob_order(head_dim).tolist()) == list(range(16 * head_dim // 8))
    pages = torch.randn(3, 2, 16, head_dim).bfloat16()
    assert torch.equal(from_blobs(to_blobs(pages), head_dim), pages)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_blob_has_no_bank_conflicts(head_dim) -> None:
    """The 8 rows that ldmatrix reads at a time, one chunk of 8 tokens, lie in 8 different groups of 4 banks."""
    order = blob_order(head_dim).view(16, -1)
    for first in (0, 8):
        for chunk in range(order.shape[1]):
            assert len(set((order[first : first + 8, chunk] % 8).tolist())) == 8


def test_the_formula_of_the_document() -> None:
    """docs/kv-layout.md: token 3, dims 72 ... 79 of a 128-dim page lie at byte 1 KB + 3 * 128 + (1 ^ 3) * 16."""
    assert blob_order(128).view(16, -1)[3, 9].item() * 16 == 1024 + 3 * 128 + (1 ^ 3) * 16


def test_float32_pages_are_plain() -> None:
    """The exact kernels read pages as they are."""
    pages = torch.randn(2, 16, 64)
    assert torch.equal(to_blobs(pages), pages.view(2, -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pool_reads_back_what_was_written(dtype) -> None:
    """By frame and layer, and nothing else changes: a frame of all layers is one run of bytes."""
    layout = FrameLayout(layers=3, kv_heads=2, head_dim=64, dtype=dtype)
    pool = FramePool(layout, 4, "cpu")
    keys, values = torch.randn(2, 2, 2, 16, 64).to(dtype)
    pool.write(torch.tensor([3, 1]), 1, keys, values)
    read_keys, read_values = pool.read(torch.tensor([3, 1]), 1)
    assert torch.equal(read_keys, keys)
    assert torch.equal(read_values, values)
    assert not pool.data[:, [0, 2]].any()
    assert not pool.data[[0, 2]].any()
    assert pool.data[0].nbytes == layout.frame_bytes
    assert pool.layer_address(1) - pool.layer_address(0) == layout.layer_bytes


def test_pool_refuses_other_shapes() -> None:
    """A mistake in a caller must not become a page of the wrong head."""
    pool = FramePool(FrameLayout(1, 2, 64, torch.bfloat16), 2, "cpu")
    with pytest.raises(ShapeMismatch):
        pool.write(torch.tensor([0]), 0, torch.zeros(1, 1, 16, 64), torch.zeros(1, 1, 16, 64))


def test_head_sizes_without_kernels_are_refused() -> None:
    """Better at start than as garbage."""
    with pytest.raises(UnsupportedDevice, match="96"):
        FrameLayout(1, 1, 96, torch.bfloat16)


@pytest.mark.parametrize(("layers", "head_dim"), [(1, 64), (25, 128)])
def test_page_copy(device, generator, layers, head_dim) -> None:
    """Targets become their sources, all bytes; every other frame stays. A large frame takes a block several rounds."""
    pool = FramePool(FrameLayout(layers, 3, head_dim, torch.bfloat16), 9, device.name)
    pool.data.copy_(torch.randn(pool.data.shape, generator=generator))
    expected = pool.data.clone()
    sources, targets = np.array([4, 4, 0], np.int32), np.array([1, 8, 5], np.int32)
    expected[torch.from_numpy(targets).long()] = expected[torch.from_numpy(sources).long()]
    PageCopy(device.loader, pool)(
        device.stream, torch.from_numpy(sources).to(device.name), torch.from_numpy(targets).to(device.name)
    )
    device.synchronize()
    assert torch.equal(pool.data, expected)
