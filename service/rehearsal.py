"""Keeps the way of a request to the device in the processor's caches, while an engine polls for one.

A request that comes alone waits for the host: hundreds of small calls, each of which takes two to three times as long
when its code has not run for a while. So an engine that polls anyway takes a made-up request through a scheduler of its
own, over a memory that no device has.
"""

import numpy as np

from mm import MemoryManager
from mm.addresses import PAGE_SIZE, pages_for
from model.step_plan import SamplingParameters, StepResult
from service.engine_client import Submit
from service.scheduler import Scheduler, SchedulerSettings

PROMPT_TOKENS = 128


class Rehearsal:
    """Of an engine with these settings."""

    def __init__(self, settings: SchedulerSettings) -> None:
        length = PROMPT_TOKENS + 1
        pages = pages_for(length, PAGE_SIZE)
        bounds = SchedulerSettings(
            max_running=1,
            max_batched_tokens=length,
            max_length=length,
            finds_shared_prefixes=settings.finds_shared_prefixes,
            prefix_caching=settings.prefix_caching,
        )
        self.scheduler = Scheduler(MemoryManager(frames=2 * pages, max_rows=1, max_pages=pages), bounds)
        self._message = Submit(1, "rehearsal", [0] * PROMPT_TOKENS, 1, SamplingParameters(temperature=0.0), [])
        self._result = StepResult(np.zeros(1, np.int32), np.zeros(1, np.bool_))

    def run(self, now: float) -> None:
        """A request comes, is computed, and ends. Nothing of it is left but cached pages."""
        self.scheduler.submit(self._message, 0, now)
        self.scheduler.schedule(now)
        self.scheduler.commit(self._result, now)
