"""Progress of something long, on stderr: a bar on a terminal; elsewhere a log line each tenth, at most one a second."""

import sys
import threading
import time
from collections.abc import Callable

import structlog

log = structlog.get_logger("pagewalk.progress")

WIDTH = 40


class Progress:
    """Call it with done and total, in any unit and from any thread."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._logged_s = clock()
        self._lock = threading.Lock()
        self._shown = 0  # tenths or columns
        self._has_bar = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        share = done / total if total else 1.0
        with self._lock:
            steps = int(share * (WIDTH if self._has_bar else 10))
            if steps <= self._shown:
                return
            self._shown = steps
            if self._has_bar:
                sys.stderr.write(f"\r{self._what:<10} [{'#' * steps:<{WIDTH}}] {share:4.0%} of {total / 1e6:,.0f} MB ")
                sys.stderr.flush()
            elif self._clock() - self._logged_s >= 1.0:
                self._logged_s = self._clock()
                log.info("progress", what=self._what, percent=steps * 10)

    def close(self) -> None:
        """End the line of the bar. Idempotent."""
        with self._lock:
            if self._has_bar and self._shown:
                sys.stderr.write("\n")
                self._shown = 0
