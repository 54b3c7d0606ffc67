"""How long the queue takes: from how fast Sequences have left it for a row while others waited.

Time without a queue does not count, since then arrivals and not the server set the pace. What is long ago counts less:
after MEMORY_S a third. No clock is read here.
"""

import math
from dataclasses import dataclass

MEMORY_S = 30.0
LONGEST_S = 120
"""Clients honour a Retry-After up to this."""


@dataclass(slots=True)
class Admissions:
    """Sequences that have entered a row for the first time, and tokens of their prompts, since the start."""

    requests: int = 0
    tokens: int = 0


class QueueWait:
    """A running rate of admissions."""

    def __init__(self) -> None:
        self._last_s: float | None = None  # None: nobody waited when it was looked at last
        self._last = Admissions()
        self._seconds = self._requests = self._tokens = 0.0  # of the time that counts

    def observe(self, admissions: Admissions, now: float, *, waits: bool) -> None:
        """Called after each time that somebody could be admitted. waits: whether somebody still does."""
        if self._last_s is not None and (passed := now - self._last_s) > 0:
            fade = math.exp(-passed / MEMORY_S)
            self._seconds = fade * self._seconds + passed
            self._requests = fade * self._requests + admissions.requests - self._last.requests
            self._tokens = fade * self._tokens + admissions.tokens - self._last.tokens
        self._last_s = now if waits else None
        self._last = Admissions(admissions.requests, admissions.tokens)

    def seconds(self, requests: int, tokens: int) -> int:
        """How long so many take to leave the queue, 1 ... LONGEST_S whole seconds; 1 while nothing is known."""
        if not self._seconds:
            return 1
        waits = [
            ahead * self._seconds / left if left else math.inf
            for ahead, left in ((requests, self._requests), (tokens, self._tokens))
            if ahead
        ]
        return min(LONGEST_S, max(1, math.ceil(round(min(max(waits, default=0.0), LONGEST_S), 3))))
