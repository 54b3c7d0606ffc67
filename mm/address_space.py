"""One Sequence's memory: a handle on a row of the page tables."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mm.addresses import Int32Array, Row
from mm.page_copies import MemoryOrders, SwapOrders

if TYPE_CHECKING:
    from mm.advice import Advice
    from mm.memory_manager import MemoryManager


@dataclass(frozen=True, slots=True, eq=False)
class AddressSpace:
    """All memory of one Sequence, until `release`. Made by `MemoryManager.create` and `fork`."""

    memory: "MemoryManager"
    row: Row
    owner: str

    @property
    def length(self) -> int:
        """Token positions held."""
        return int(self.memory.tables.lengths[self.row])

    @property
    def entries(self) -> Int32Array:
        """(pages,) int32: a copy of the page table entries, in page order (mm/addresses.py says how to read them)."""
        return self.memory.tables.mapped(self.row).copy()

    @property
    def is_resident(self) -> bool:
        """Whether it may run: no page is in swap or in a copy."""
        return not self.memory.tables.barred[self.row]

    def grow(self, tokens: int) -> MemoryOrders:
        """Make the next `tokens` positions writable. Raises OutOfFrames; then nothing has changed."""
        return self.memory.grow(np.array([self.row], np.int32), np.array([tokens], np.int32))

    def fork(self, owner: str, length: int | None = None) -> tuple["AddressSpace", MemoryOrders]:
        """A second address space over the same pages, or those of a beginning; only counts rise. Raises OutOfRows."""
        return self.memory.fork(self, owner, length)

    def advise(self, advice: "Advice") -> SwapOrders:
        """What will become of its pages: see mm/advice.py."""
        return self.memory.advise(self, advice)

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on, and release the pages that no position is left in."""
        self.memory.truncate(self, length)

    def release(self) -> None:
        """Give everything back. The handle must not be used afterwards."""
        self.memory.release(self)
