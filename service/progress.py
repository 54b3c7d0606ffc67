"""A start, for people who wait for it: progress of what is long on stderr, and what each phase took.

Progress is a bar on a terminal; elsewhere a log line each tenth, at most one a second.
"""

import sys
import threading
import time
from collections.abc import Callable

import structlog

log = structlog.get_logger("pagewalk.progress")

WIDTH = 40

UNITS: dict[str, tuple[str, float]] = {"weights": ("MB", 1e6), "kernels": ("files", 1)}
"""What is counted, in words, and how many of Progress's units it has. Of others: just numbers."""


class Progress:
    """Call it with done and total, in any unit and from any thread."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._logged_s = clock()
        self._lock = threading.Lock()
        self._unit, self._units = UNITS.get(what, ("", 1))
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
                of_all = f"of {total / self._units:,.0f} {self._unit}"
                sys.stderr.write(f"\r{self._what:<10} [{'#' * steps:<{WIDTH}}] {share:4.0%} {of_all} ")
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


class StartProgress:
    """model.start_report.StartReport: a Progress for each thing that is long, and the seconds of each phase."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._began_s = clock()
        self._shown: dict[str, Progress] = {}

    def progress(self, what: str, done: int, total: int) -> None:
        """So much is done."""
        self._shown.setdefault(what, Progress(what, self._clock))(done, total)

    def ended(self, phase: str) -> None:
        """Since the phase before it."""
        now = self._clock()
        self.seconds[phase] = round(now - self._began_s, 3)
        self._began_s = now
        self.close()

    def close(self) -> None:
        """End the lines of all bars. Idempotent."""
        for progress in self._shown.values():
            progress.close()
