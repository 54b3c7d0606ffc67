"""What can still be had while a step is put together, on paper: the whole step is known to fit before it begins.

A `Room` is a copy of the few numbers that decide whether an allocation succeeds (`Reclaimer.shortage`). The scheduler
takes from it what each Sequence would need, and asks what the next one would lack.

    pool        frames that anybody can have: free, or in an idle page that nobody's memory.min keeps
    kept[t]     idle pages within tenant t's min: for t they are as good as free
    left[t]     frames that t can still be charged before it meets its max, its own idle pages taken back for it

Where no tenant has limits there is the pool alone, a single number.
"""

from dataclasses import dataclass

from mm.addresses import Int64Array


@dataclass(frozen=True, slots=True)
class Lack:
    """Why something does not fit."""

    frames: int  # that are missing
    tenant: int | None  # whose memory.max is met; None: the pool is too small


class Room:
    """Frames that can be had: `lack` asks, `take` takes. Changes nothing in memory."""

    __slots__ = ("is_limited", "kept", "left", "pool")

    def __init__(self, pool: int, kept: list[int] | None = None, left: list[int] | None = None) -> None:
        """kept, left: by tenant; None where no tenant has limits."""
        self.pool = pool
        self.kept = kept or []
        self.left = left or []
        self.is_limited = left is not None

    def pool_for(self, tenant: int) -> int:
        """Frames that `tenant` can have as far as the pool goes."""
        return self.pool + self.kept[tenant] if self.is_limited else self.pool

    def lack(self, tenant: int, frames: int) -> Lack | None:
        """What `frames` more for `tenant` would lack: its own limit is asked first."""
        if self.is_limited and frames > 0 and frames > self.left[tenant]:
            return Lack(frames - self.left[tenant], tenant)
        missing = frames - self.pool_for(tenant)
        return Lack(missing, None) if missing > 0 else None

    def lack_of_all(self, needs: Int64Array) -> Lack | None:
        """The same for needs[t] frames for each tenant t together."""
        if not self.is_limited:
            missing = int(needs.sum()) - self.pool
            return Lack(missing, None) if missing > 0 else None
        missing = -self.pool
        for tenant, frames in enumerate(needs.tolist()):
            if frames > 0 and frames > self.left[tenant]:
                return Lack(frames - self.left[tenant], tenant)
            missing += max(0, frames - self.kept[tenant])
        return Lack(missing, None) if missing > 0 else None

    def take(self, tenant: int, frames: int) -> None:
        """`frames` are for `tenant`; whether they are there is not asked."""
        if self.is_limited:
            self.left[tenant] -= frames
            own = min(frames, self.kept[tenant])
            self.kept[tenant] -= own
            frames -= own
        self.pool -= frames

    def take_all(self, needs: Int64Array) -> None:
        """needs[t] frames are for tenant t."""
        for tenant, frames in enumerate(needs.tolist()):
            if frames:
                self.take(tenant, frames)
