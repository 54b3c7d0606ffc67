"""How many threads compute a step on the CPU, by its size, chosen by measuring real steps once at start.

A step of few tokens is bound by reading the weights, which one or a few cores can do alone, and by the barriers between
its operators, which grow with the threads. On two virtual cores of an EPYC 9004 one token of SmolLM2 takes torch's
kernels 29 ms with one thread and 31 to 34 with two, and the native ones 11.2 and 9.4. A prefill takes all the threads
that it can get: 512 tokens 630 ms and 330.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

FEW_TOKENS, SOME_TOKENS = 4, 64
"""Up to so many tokens a step counts as few, or as some; what is measured stands for them: 1 token and 32."""


@dataclass(frozen=True, slots=True)
class ThreadCounts:
    """Threads for steps of few, some and many tokens."""

    few: int
    some: int
    many: int

    def of(self, tokens: int) -> int:
        if tokens <= FEW_TOKENS:
            return self.few
        return self.some if tokens <= SOME_TOKENS else self.many


def choose_threads(cores: int, step_time: Callable[[int, int], float]) -> ThreadCounts:
    """step_time(threads, rows) -> seconds of a decode step.

    few: the fewest threads that are within a twentieth of the quickest (the rest serves the front end). some: the most
    that are within a tenth of the quickest; all cores up to four, where that has always held. many: all cores.
    """
    counts = [*takewhile(lambda count: count < cores, (1 << shift for shift in range(cores))), cores]
    if len(counts) == 1:
        return ThreadCounts(1, 1, 1)
    few = {count: step_time(count, 1) for count in counts}
    some = {count: step_time(count, 32) for count in counts if count >= 4} if cores > 4 else {cores: 0.0}
    return ThreadCounts(
        few=min(count for count, seconds in few.items() if seconds <= 1.05 * min(few.values())),
        some=max(count for count, seconds in some.items() if seconds <= 1.1 * min(some.values())),
        many=cores,
    )


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and the cgroup's quota (containers), at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, _, period = quota.read_text(encoding="utf-8").partition(" ")
        if limit != "max":
            cores = min(cores, math.ceil(int(limit) / int(period or 100_000)))
    return max(1, cores)
