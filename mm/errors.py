"""What can go wrong in memory.

PagingError                  anything below
├── OutOfFrames              too few frames are free or reclaimable: nothing was changed, ask again after a release
│   └── OverTenantLimit      the pool has room, but the tenant's memory.max has not
├── OutOfSwapSlots           too few swap slots: nothing was changed
├── OutOfRows                every page table row is taken
├── OverCommit               strict overcommit, and the promise would exceed what there is
├── QuotaExceeded            an owner's pins would exceed the quota
├── PageNotResident          a row was to run that has pages in swap or in a copy: a bug of the caller
├── FrameNotHeld             a reference was dropped that nobody held: a bug of the caller
└── MemoryCorruption         the books do not balance: a bug of ours, the engine must stop
"""


class PagingError(Exception):
    """Root of the package's errors."""


class OutOfFrames(PagingError):
    """An allocation needs more frames than are free and can be reclaimed. No state was changed."""

    def __init__(self, needed: int, free: int, reclaimable: int = 0) -> None:
        super().__init__(f"needs {needed} frames: {free} free, {reclaimable} reclaimable")
        self.needed = needed
        self.free = free
        self.reclaimable = reclaimable


class OverTenantLimit(OutOfFrames):
    """A tenant would hold more frames than its memory.max, even with all its unused cached pages reclaimed."""

    def __init__(self, tenant: str, needed: int, usage: int, limit: int, reclaimable: int) -> None:
        PagingError.__init__(
            self, f"tenant {tenant!r} needs {needed} frames, uses {usage} of {limit}, {reclaimable} reclaimable"
        )
        self.tenant = tenant
        self.needed = needed
        self.free = max(0, limit - usage)
        self.reclaimable = reclaimable


class OutOfSwapSlots(PagingError):
    """A swap-out needs more slots than are free and can be taken back. No state was changed."""

    def __init__(self, needed: int, obtainable: int) -> None:
        super().__init__(f"needs {needed} swap slots: {obtainable} obtainable")
        self.needed = needed
        self.obtainable = obtainable


class OutOfRows(PagingError):
    """An address space was asked for while every row of the page tables is taken."""

    def __init__(self, rows: int) -> None:
        super().__init__(f"all {rows} page table rows are taken")


class OverCommit(PagingError):
    """Overcommit is strict, and what would be promised does not exist. No state was changed."""

    def __init__(self, asked: int, committed: int, limit: int) -> None:
        super().__init__(f"promising {asked} frames on top of {committed} exceeds the commit limit of {limit}")
        self.asked = asked
        self.committed = committed
        self.limit = limit


class QuotaExceeded(PagingError):
    """An owner's pinned pages would exceed the quota. Nothing was pinned."""

    def __init__(self, owner: str, asked: int, pinned: int, quota: int) -> None:
        super().__init__(f"{owner!r} asks to pin {asked} pages, has {pinned} pinned, and the quota is {quota}")
        self.asked = asked
        self.pinned = pinned
        self.quota = quota


class PageNotResident(PagingError):
    """A row was given to a step while pages of it are in swap or in a copy. No state was changed."""


class FrameNotHeld(PagingError):
    """A frame was shared or released that has no reference, or fewer than were dropped. No state was changed."""


class MemoryCorruption(PagingError):
    """The audit found discrepancies; `discrepancies` lists them all."""

    def __init__(self, discrepancies: list[str]) -> None:
        super().__init__("; ".join(discrepancies[:10]) + (" …" if len(discrepancies) > 10 else ""))
        self.discrepancies = discrepancies
