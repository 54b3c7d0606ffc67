"""Launcher of silu_mul.cu: silu(gate) * up."""

import torch
from torch import Tensor

from cuda.errors import UnsupportedDevice
from cuda.launch import KernelLoader, KernelSpec
from cuda.tensors import check_tensor, element_of

THREADS = 256


class SiluMul:
    """The gate of the feed-forward network, for one width (of the result) and dtype."""

    def __init__(self, loader: KernelLoader, dtype: torch.dtype, width: int) -> None:
        self.dtype, self.width = dtype, width
        self._chunk = 16 // dtype.itemsize
        if width % self._chunk:
            raise UnsupportedDevice(f"rows of {width} numbers of {dtype}: the kernel takes multiples of {self._chunk}")
        (self._kernel,) = loader.load(
            "silu_mul.cu", [KernelSpec(f"silu_mul<{element_of(dtype)}>", "PPii", THREADS, overlap=True)]
        )

    def __call__(self, stream: int, gate_up: Tensor, out: Tensor) -> None:
        """gate_up (T, 2 width): gate, then up; out (T, width). float32 inside, rounded once."""
        check_tensor("gate_up", gate_up, (None, 2 * self.width), self.dtype)
        check_tensor("out", out, (len(gate_up), self.width), self.dtype)
        chunks = len(out) * self.width // self._chunk
        if chunks:
            self._kernel.launch(stream, -(-chunks // THREADS), gate_up, out, self.width, chunks)
