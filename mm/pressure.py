"""Pressure stall information: the share of time in which requests stood still for want of pages.

    some    at least one Sequence waited for memory: in the queue, preempted, or for a swap-in
    full    and none made progress meanwhile

As in the kernel, each has averages over 10, 60 and 300 seconds and a total. Between two reports a state lasts; an
average moves towards it as exp(-t / window), so it does not matter how often is reported.
"""

from dataclasses import dataclass, field
from math import exp

WINDOWS_S = (10.0, 60.0, 300.0)


@dataclass(frozen=True, slots=True)
class Stall:
    """One line of /proc/pressure/memory: averages in percent, the total in microseconds."""

    avg10: float
    avg60: float
    avg300: float
    total_us: int


@dataclass(frozen=True, slots=True)
class Pressure:
    """Pressure on memory, of the system or of one tenant."""

    some: Stall
    full: Stall


@dataclass(slots=True)
class _Line:
    averages: list[float] = field(default_factory=lambda: [0.0] * len(WINDOWS_S))  # shares, 0 ... 1
    total_s: float = 0.0
    is_stalled: bool = False

    def advance(self, seconds: float) -> None:
        target = float(self.is_stalled)
        self.total_s += seconds * target
        for i, window_s in enumerate(WINDOWS_S):
            self.averages[i] = target + (self.averages[i] - target) * exp(-seconds / window_s)

    def read(self) -> Stall:
        avg10, avg60, avg300 = (100 * average for average in self.averages)
        return Stall(avg10, avg60, avg300, round(self.total_s * 1e6))


class PressureMeter:
    """Turns reports of who waits and who gets on into averages."""

    def __init__(self) -> None:
        self._some = _Line()
        self._full = _Line()
        self._since_s: float | None = None

    def report(self, now: float, *, waiting: int, progressing: int) -> None:
        """From now on `waiting` Sequences stand still for want of pages, and `progressing` get on."""
        some, full = waiting > 0, waiting > 0 and progressing == 0
        if (some, full) == (self._some.is_stalled, self._full.is_stalled) and self._since_s is not None:
            return  # a state lasts until the next: nothing to compute
        self._advance(now)
        self._some.is_stalled, self._full.is_stalled = some, full

    def read(self, now: float) -> Pressure:
        """Averages and totals up to now."""
        self._advance(now)
        return Pressure(self._some.read(), self._full.read())

    def _advance(self, now: float) -> None:
        if self._since_s is not None and now > self._since_s:
            self._some.advance(now - self._since_s)
            self._full.advance(now - self._since_s)
        self._since_s = now
