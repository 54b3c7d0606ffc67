"""What can go wrong in memory.

PagingError                  anything below
├── OutOfFrames              the pool has too few free frames: nothing was changed, ask again after a release
├── OutOfRows                every page table row is taken
├── FrameNotHeld             a reference was dropped that nobody held: a bug of the caller
└── MemoryCorruption         the books do not balance: a bug of ours, the engine must stop
"""


class PagingError(Exception):
    """Root of the package's errors."""


class OutOfFrames(PagingError):
    """An allocation needs more frames than are free. No state was changed."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"needs {needed} frames: {free} free")
        self.needed = needed
        self.free = free


class OutOfRows(PagingError):
    """An address space was asked for while every row of the page tables is taken."""

    def __init__(self, rows: int) -> None:
        super().__init__(f"all {rows} page table rows are taken")


class FrameNotHeld(PagingError):
    """A frame was shared or released that has no reference, or fewer than were dropped. No state was changed."""


class MemoryCorruption(PagingError):
    """The audit found discrepancies; `discrepancies` lists them all."""

    def __init__(self, discrepancies: list[str]) -> None:
        super().__init__("; ".join(discrepancies[:10]) + (" …" if len(discrepancies) > 10 else ""))
        self.discrepancies = discrepancies
