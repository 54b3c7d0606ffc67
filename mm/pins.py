"""Owns the prefixes that are held in memory by hand: who holds what, for how long, and how much anybody may hold.

A pin is a holder like an address space that never runs: each of its frames has a reference of it, so that neither
reclaim nor preemption can touch them. It covers whole resident pages only.
"""

from dataclasses import dataclass

import numpy as np

from mm.addresses import Int32Array
from mm.errors import QuotaExceeded
from mm.residency import Residency


@dataclass(frozen=True, slots=True)
class Pin:
    """One held prefix. `frames` (P,) in page order."""

    number: int
    owner: str
    tenant: str
    tokens: int
    frames: Int32Array
    expires_s: float | None  # by the engine's clock


class PrefixPins:
    """All pins, by number. `quota`: pages that one owner may hold; `limit`: pages that all may hold together."""

    def __init__(self, residency: Residency, quota: int, limit: int) -> None:
        self.quota = quota
        self.limit = limit
        self.held: dict[int, Pin] = {}
        self.pages = 0
        self._next_expiry_s = float("inf")
        self._last_number = 0
        self._residency = residency

    @staticmethod
    def shares_of(frames: int) -> tuple[int, int]:
        """(quota, limit) of a pool."""
        return frames // 8, frames // 4

    def pin(self, owner: str, tenant: str, entries: list[int], tokens: int, now: float, expires_s: float | None) -> Pin:
        """Hold the resident pages of these cached entries. Raises QuotaExceeded, and then holds nothing."""
        held = self.pages_of(owner)
        if held + len(entries) > self.quota:
            raise QuotaExceeded(owner, len(entries), held, self.quota)
        if self.pages + len(entries) > self.limit:
            raise QuotaExceeded("all owners", len(entries), self.pages, self.limit)
        residency = self._residency
        frames = residency.cache.frames[np.array(entries, np.int32)]
        residency.used(entries, now)
        residency.map(frames, residency.tenants.id(tenant))
        self._last_number += 1
        pin = self.held[self._last_number] = Pin(self._last_number, owner, tenant, tokens, frames, expires_s)
        self.pages += len(frames)
        if expires_s is not None:
            self._next_expiry_s = min(self._next_expiry_s, expires_s)
        return pin

    def unpin(self, number: int) -> Pin | None:
        """End a pin; its pages stay cached as long as there is room. None if there is no such pin (any more)."""
        pin = self.held.pop(number, None)
        if pin is not None:
            self.pages -= len(pin.frames)
            tenant = self._residency.tenants.id(pin.tenant)
            self._residency.unmap(pin.frames, np.full(len(pin.frames), tenant, np.int32))
        return pin

    def expire(self, now: float) -> list[Pin]:
        """End the pins whose time is over. Costs nothing while none is due."""
        if now < self._next_expiry_s:
            return []
        due = [number for number, pin in self.held.items() if pin.expires_s is not None and pin.expires_s <= now]
        ended = [pin for number in due if (pin := self.unpin(number)) is not None]
        left = [pin.expires_s for pin in self.held.values() if pin.expires_s is not None]
        self._next_expiry_s = min(left, default=float("inf"))
        return ended

    def count_frames(self) -> int:
        """Frames that are pinned, however many pins each has."""
        frames = [pin.frames for pin in self.held.values()]
        return len(np.unique(np.concatenate(frames))) if frames else 0

    def pages_of(self, owner: str) -> int:
        """Pages that `owner` holds, each counted once for each of its pins."""
        return sum(len(pin.frames) for pin in self.held.values() if pin.owner == owner)
