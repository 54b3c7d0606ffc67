"""Owns the shadows of evicted pages: when each went and for whom, and how soon those that came back did.

A shadow is what is left of a page when its frame is reused: its key, and the count of evictions at that moment. If the
page is computed again, the evictions in between are its *refault distance*: with that many more frames it would still
have been there. The histogram of distances therefore says what more memory would bring, which no hit rate does.
Shadows are kept in order of eviction and bounded; the oldest is forgotten first.
"""

from collections import OrderedDict
from typing import NamedTuple

MAX_SHADOWS = 131_072


class Shadow(NamedTuple):
    """An evicted page."""

    evictions: int  # the count when it went
    evicted_s: float  # the engine's clock when it went
    evicted_for: str  # who needed the frame


class Shadows:
    """Up to min(`pages`, MAX_SHADOWS) shadows, by page key."""

    def __init__(self, pages: int) -> None:
        self.capacity = min(pages, MAX_SHADOWS)
        self.evictions = 0  # pages lost from the cache since the start
        self.refaults = 0  # of these, computed again while their shadow was known
        self.distances: list[int] = [0] * 32  # [i] counts refaults with a distance below 2**i, not below 2**(i - 1)
        self._shadows: OrderedDict[bytes, Shadow] = OrderedDict()

    def __len__(self) -> int:
        return len(self._shadows)

    def add(self, key: bytes, now: float, evicted_for: str) -> None:
        """A page is evicted: its content is nowhere any more."""
        self.evictions += 1
        shadows = self._shadows
        shadows.pop(key, None)  # a new one is the newest
        shadows[key] = Shadow(self.evictions, now, evicted_for)
        if len(shadows) > self.capacity:
            shadows.popitem(last=False)

    def clear(self) -> None:
        """Forget all of them."""
        self._shadows.clear()

    def find(self, key: bytes) -> Shadow | None:
        return self._shadows.get(key)

    def take(self, key: bytes) -> int | None:
        """The page is back: its refault distance in pages, counted; None if it was never evicted or is forgotten."""
        shadow = self._shadows.pop(key, None) if self._shadows else None
        if shadow is None:
            return None
        distance = self.evictions - shadow.evictions
        self.refaults += 1
        self.distances[min(distance.bit_length(), 31)] += 1
        return distance

    def frames_to_avoid(self, share: float) -> int:
        """How many more frames would have avoided `share` of the refaults so far, rounded up to a power of two."""
        wanted, seen = share * self.refaults, 0
        for bits, count in enumerate(self.distances):
            seen += count
            if count and seen >= wanted:
                return 1 << bits
        return 0
