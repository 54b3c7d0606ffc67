"""Memory that runs out, as torch says it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from model.batch import ForwardBatch
from model.cpu_executor import CpuExecutor


def no_memory() -> None:
    """More than any machine has."""
    torch.empty(1 << 55)


def short_of_memory(
    executor: CpuExecutor, is_short: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Runs of the network over so many tokens find none. Returns how many tokens each run had, as they come."""
    compute, sizes = executor._kernels.compute, []

    def compute_or_fail(batch: ForwardBatch, scored: int = 0) -> Any:
        sizes.append(len(batch.token_ids))
        if is_short(sizes[-1]):
            no_memory()
        return compute(batch, scored)

    monkeypatch.setattr(executor._kernels, "compute", compute_or_fail)
    return sizes
