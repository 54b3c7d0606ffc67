"""Which of NVIDIA's libraries multiplies in a step's graph: cuBLAS, or cuBLASLt by its own choice of algorithms.

For tens to some two hundred tokens of a network of large matrices cuBLASLt's choice is 2 to 4 % of a whole step faster;
below and above, cuBLAS' is as fast or faster (measured on an H200: docs/decisions/0015). A graph keeps what was chosen
at its capture, so the choice of a size is the same from start to start. On Hopper the layers' products of up to 128
tokens are our own (cuda/batch_linear.py); the head's are chosen like this there, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from model.config import ModelConfig
from model.thin_layers import is_large

LT_TOKENS = range(29, 209)


def takes_lt(config: ModelConfig, tokens: int) -> bool:
    """Whether a graph of so many tokens should be captured with cuBLASLt."""
    return tokens in LT_TOKENS and is_large(config)


@contextmanager
def products_by_lt(*, wanted: bool) -> Iterator[None]:
    """What torch.mm launches inside; for the whole process, so nothing else may multiply meanwhile."""
    if not wanted:
        yield
        return
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)
