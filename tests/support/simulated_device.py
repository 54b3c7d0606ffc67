"""A device of numpy arrays that carries out mm's orders: its frames hold what is written, so that reads can be checked.

Frames that become free are filled with junk, so a stale reference shows at once.
"""

import numpy as np

from mm import MemoryManager, MemoryOrders

JUNK = -7


class SimulatedDevice:
    def __init__(self, memory: MemoryManager) -> None:
        self.memory = memory
        self.pool = np.full((memory.frames.total, memory.page_size), JUNK, np.int64)
        self.tables = np.full_like(memory.tables.entries, -1)  # the device's copy: changed by orders alone
        self.shared = np.zeros(self.tables.shape, np.bool_)  # its hints
        self.writes_to_shared = 0

    def carry_out(self, orders: MemoryOrders) -> None:
        sources, targets = orders.copies.sources, orders.copies.targets
        assert len(np.unique(targets)) == len(targets), "two copies into one frame"
        assert not np.intersect1d(sources, targets).size, "a copy reads what another one writes"
        self.pool[targets] = self.pool[sources]
        changes = orders.table_changes
        assert (changes.frames >= 0).all(), "an entry that names no frame"
        assert len(changes.shared) in (0, len(changes)), "some hints are missing"
        places = changes.rows.astype(np.int64) * self.tables.shape[1] + changes.pages
        assert len(np.unique(places)) == len(places), "an entry is changed twice"
        self.tables[changes.rows, changes.pages] = changes.frames
        self.shared[changes.rows, changes.pages] = changes.shared if len(changes.shared) else False

    def write(self, row: int, position: int, tokens: list[int]) -> None:
        """Write `tokens` at `position` ... of `row`, through the device's page table."""
        frames = self.memory.frames
        for offset, token in enumerate(tokens):
            page, slot = divmod(position + offset, self.memory.page_size)
            frame = self.tables[row, page]
            self.writes_to_shared += int(frames.references[frame] != 1 or frames.sealed[frame])
            self.pool[frame, slot] = token

    def read(self, row: int, length: int) -> list[int]:
        pages = -(-length // self.memory.page_size)
        return self.pool[self.tables[row, :pages]].reshape(-1)[:length].tolist()

    def poison_free_frames(self) -> None:
        self.pool[self.memory.frames.free_list] = JUNK
