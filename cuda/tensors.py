"""What launchers ask of tensors: dtype, shape, layout. A mistake here is the caller's, so it raises ShapeMismatch at
once instead of letting a kernel read what is not there.
"""

import torch
from torch import Tensor

from cuda.errors import ShapeMismatch, UnsupportedDevice

ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "float"}
HEAD_SIZES = (64, 128)


def element_of(dtype: torch.dtype) -> str:
    """The kernels' name of a dtype."""
    if dtype not in ELEMENTS:
        raise UnsupportedDevice(f"no kernel for {dtype}; there are kernels for {', '.join(map(str, ELEMENTS))}")
    return ELEMENTS[dtype]


def check_head_size(head_dim: int) -> None:
    """Raises UnsupportedDevice unless the attention kernels know this head size."""
    if head_dim not in HEAD_SIZES:
        raise UnsupportedDevice(f"head size {head_dim}: the CUDA kernels know {' and '.join(map(str, HEAD_SIZES))}")


def check_tensor(name: str, tensor: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype) -> None:
    """Raises ShapeMismatch unless `tensor` is contiguous, with this shape (None: any size) and dtype."""
    fits = tensor.dim() == len(shape) and all(
        want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ShapeMismatch(
            f"{name} must be contiguous {shape} {dtype}; "
            f"it is {tuple(tensor.shape)} {tensor.dtype}, strides {tensor.stride()}"
        )


def check_rows(name: str, tensor: Tensor, width: int, dtype: torch.dtype) -> int:
    """Elements from one row of (T, width) to the next: rows may lie apart, each is contiguous and 16-byte aligned.

    Raises ShapeMismatch.
    """
    if tensor.dim() != 2 or tensor.shape[1] != width or tensor.dtype != dtype or tensor.stride(1) != 1:
        raise ShapeMismatch(
            f"{name} must be (T, {width}) {dtype} with contiguous rows; "
            f"it is {tuple(tensor.shape)} {tensor.dtype}, strides {tensor.stride()}"
        )
    stride = tensor.stride(0)
    step_bytes = stride * dtype.itemsize
    if tensor.data_ptr() % 16 or step_bytes % 16:
        raise ShapeMismatch(f"{name}: rows must begin at multiples of 16 bytes; they begin every {step_bytes} bytes")
    return stride


def check_parts(name: str, tensor: Tensor, width: int, dtype: torch.dtype) -> int:
    """What `load_summed` is told of a tensor: 0 for (T, width) of `dtype`; P for (P, T, width) float32, parts of a sum.

    Raises ShapeMismatch unless it is contiguous and one of the two.
    """
    if tensor.dim() == 3:
        check_tensor(name, tensor, (None, None, width), torch.float32)
        return len(tensor)
    check_tensor(name, tensor, (None, width), dtype)
    return 0
