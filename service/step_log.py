"""The last steps of the engine, for operators: a ring of plain tuples, half a microsecond a step."""

from collections import deque
from typing import NamedTuple

STEPS_KEPT = 1000


class StepEntry(NamedTuple):
    """One committed step. Frames, Sequences and evictions are as of its commit."""

    step: int
    now: float  # the engine's clock at its commit
    seconds: float  # since the commit before, or since it was submitted
    prefill_tokens: int
    decode_tokens: int
    sampled_tokens: int
    batch: int  # rows
    running: int
    swapped: int
    waiting: int
    mapped_frames: int
    free_frames: int
    evictions: int  # since the start


class StepLog(deque[StepEntry]):
    """The last STEPS_KEPT steps, oldest first."""

    def __init__(self) -> None:
        super().__init__(maxlen=STEPS_KEPT)
