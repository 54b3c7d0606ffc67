"""The golden prompts through the executor alone: no scheduler, no memory manager."""

import ctypes
from pathlib import Path

import pytest
import torch
from plan_driver import PlanDriver

from model.config import read_config
from model.cpu_executor import CpuExecutor
from model.loader import load_parameters


@pytest.mark.slow
def test_golden_prompts(smollm2_folder: Path, golden, cpu_kernels: ctypes.CDLL | None) -> None:
    """22 prompts of 1 to 1,500 tokens on SmolLM2 in float32, joining one by one, in chunks beside the others' decodes:
    the greedy tokens of transformers' `generate`. Of the longest each implementation has one; the engine has them all.
    """
    longest = 1500 if cpu_kernels is None else 777
    golden = [entry for entry in golden if len(entry.prompt) <= 600 or len(entry.prompt) == longest]
    assert len(golden) == 22
    config = read_config(smollm2_folder)
    parameters = load_parameters(smollm2_folder, config, torch.float32)
    executor = CpuExecutor(config, parameters, frames=700, max_rows=24, max_pages=100, threads=1, native=cpu_kernels)
    made = PlanDriver(executor).generate(
        [entry.prompt for entry in golden], [len(entry.tokens) for entry in golden], budget=64, arrive=1
    )
    executor.close()
    for entry, sequence in zip(golden, made, strict=True):
        entry.check(sequence.output)
