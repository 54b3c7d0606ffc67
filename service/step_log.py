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
    graph_hit: bool | None  # None where there are no graphs


class StepLog(deque[StepEntry]):
    """The last STEPS_KEPT steps, oldest first."""

    def __init__(self) -> None:
        super().__init__(maxlen=STEPS_KEPT)
        self.graph_hits = 0  # steps that there was a graph for, since the start, ...
        self.graph_misses = 0  # ... and those that were launched kernel by kernel

    def append(self, entry: StepEntry) -> None:
        super().append(entry)
        self.graph_hits += entry.graph_hit is True
        self.graph_misses += entry.graph_hit is False
