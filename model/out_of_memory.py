"""What every allocator says when it has no memory, in one place; and how work is made smaller where that helps.

    torch, CPU     RuntimeError, by its words           torch, GPU    torch.OutOfMemoryError
    numpy, Python  MemoryError (CuPy's is one, too)     cuBLAS        RuntimeError, by its words (more: below)
    the driver     cuda.errors.OutOfDriverMemory, a MemoryError; asked by torch or CuPy: RuntimeError, by its words

Such a refusal leaves the device and the process as they were, unlike any other error of theirs: whoever asked for less
may get it. Where nothing smaller can be asked for, the requests concerned end, and the server lives.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

WORDS = ("allocate memory", "bad_alloc", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
UNLOADED = ("CUBLAS_STATUS_NOT_INITIALIZED", "CUBLAS_STATUS_INTERNAL_ERROR", "CUBLAS_STATUS_EXECUTION_FAILED")
"""What cuBLAS says when it could not load a kernel onto a full device. It says so of a broken device, too: then what is
launched next raises what is wrong with it, so whoever tries something else finds out."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator, of the host or of a device, has said that there is no memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in WORDS + UNLOADED)


def in_parts(work: Callable[[slice], T], begin: int, end: int) -> list[T]:
    """The results of `work` for all of begin ... end - 1; where there is no memory for that: for the halves of it, in
    order, and for halves of those. `work` must have changed nothing when it raises. Raises what one item alone raises.
    """
    try:
        return [work(slice(begin, end))]
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error) or end - begin <= 1:
            raise
    middle = (begin + end) // 2  # outside of the handler: what the failed try holds is let go of
    return in_parts(work, begin, middle) + in_parts(work, middle, end)
