"""Launcher of rms_norm.cu: residual addition and RMS normalization of rows."""

import torch
from torch import Tensor

from cuda.errors import UnsupportedDevice
from cuda.launch import KernelLoader, KernelSpec
from cuda.tensors import check_parts, check_tensor, element_of

MAX_THREADS = 512  # a thread may have 128 registers


class RmsNorm:
    """Normalizes rows of one width and dtype."""

    def __init__(self, loader: KernelLoader, dtype: torch.dtype, width: int, epsilon: float) -> None:
        chunk = 16 // dtype.itemsize
        per_thread = next((n for n in (1, 2, 4) if width <= n * chunk * MAX_THREADS), None)
        if width % chunk or per_thread is None:
            raise UnsupportedDevice(
                f"rows of {width} {dtype}: the kernel takes multiples of {chunk} up to {4 * chunk * MAX_THREADS}"
            )
        self.dtype, self.width, self.epsilon = dtype, width, epsilon
        threads = -(-width // (chunk * per_thread) // 32) * 32
        spec = KernelSpec(f"rms_norm<{element_of(dtype)}, {per_thread}>", "PPPPiif", threads, overlap=True)
        (self._kernel,) = loader.load("rms_norm.cu", [spec])

    def __call__(self, stream: int, x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor) -> None:
        """out = weight * sum / rms(sum), where sum = x + residual replaces residual (or is x, without one).

        x, residual, out (T, width), weight (width,). x may be what gives it in sum, (P, T, width) float32; if not, out
        may be x. float32 inside; the sum and the result are each rounded once.
        """
        parts = check_parts("x", x, self.width, self.dtype)
        tokens = x.shape[-2]
        check_tensor("out", out, (tokens, self.width), self.dtype)
        check_tensor("weight", weight, (self.width,), self.dtype)
        if residual is not None:
            check_tensor("residual", residual, (tokens, self.width), self.dtype)
        if tokens:
            self._kernel.launch(stream, tokens, x, residual, weight, out, self.width, parts, self.epsilon)
