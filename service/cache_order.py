"""Whom of those next in turn to admit while frames are short: who finds most of its prompt in the page cache.

If the first in turn were admitted, pages would be evicted that others behind it wait for. So one of the next few may
overtake it, but nobody is overtaken more than `most` times: then it is the first to go, whoever is behind it. So the
order of arrival bends by that much and no more, whatever comes.

What a step costs is bounded by WINDOW, not by the queue, and is a fraction of it: what a prompt finds is looked up when
it comes into the window, and again every FRESH_STEPS.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

WINDOW = 32
"""Waiting ones that are compared."""

FRESH_STEPS = 16
"""Looks at the queue for which what a prompt finds is taken to be still true."""

LEAST_GAIN = 0.1
"""Of a prompt: how much more must be cached of the one that overtakes."""


class Overtakable(Protocol):
    """Who may be overtaken."""

    overtaken: int  # times


W = TypeVar("W", bound=Overtakable)


def preferred(queue: Sequence[W], first: int, share_of: Callable[[W], float], most: int) -> int:
    """The place in `queue`, `first` or behind it, of the one to admit next.

    share_of: how much of its prompt is cached, 0 ... 1; negative for who does not overtake, or would not fit. Those
    that are passed have to be counted once they have been (`overtake`).
    """
    best, share = first, share_of(queue[first])
    if share < 0:
        return first
    for place in range(first + 1, min(first + WINDOW, len(queue))):
        if queue[place - 1].overtaken >= most:
            break
        other = share_of(queue[place])
        if other > share + LEAST_GAIN:
            best, share = place, other
    return best


def overtake(passed: Sequence[Overtakable]) -> None:
    """One behind all of these was admitted before them."""
    for each in passed:
        each.overtaken += 1
