"""Launcher of page_copy.cu: whole frames, all layers, inside the pool."""

import torch
from torch import Tensor

from cuda.frames import FramePool
from cuda.launch import KernelLoader, KernelSpec
from cuda.tensors import check_tensor

PIECE_BYTES = 16 * 1024  # what a block copies at a time
SLICES = 32  # blocks a frame, at most: enough for one frame to be copied at full speed


class PageCopy:
    """Carries out mm's copies in one pool."""

    def __init__(self, loader: KernelLoader, pool: FramePool) -> None:
        self.pool = pool
        (self._kernel,) = loader.load("page_copy.cu", [KernelSpec("page_copy", "PPPq", 256)])

    def __call__(self, stream: int, sources: Tensor, targets: Tensor) -> None:
        """Frame targets[i] becomes a copy of frame sources[i]; both (N,) int32 on the device. Targets are distinct,
        none is a source.
        """
        check_tensor("sources", sources, (None,), torch.int32)
        check_tensor("targets", targets, (len(sources),), torch.int32)
        size = self.pool.layout.frame_bytes
        if len(sources):
            grid = (len(sources), min(-(-size // PIECE_BYTES), SLICES))
            self._kernel.launch(stream, grid, self.pool.layer_address(0), sources, targets, size)
