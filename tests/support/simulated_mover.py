"""A page mover whose copies take as long as the test wants, end in any order, and may fail.

It is the worst mover that the contract of mm/page_copies.py allows: what a copy writes is junk from its start to its
end, what it reads is read at the very end, and a copy that fails leaves junk.
"""

from collections.abc import Sequence

import numpy as np
from simulated_device import JUNK, SimulatedDevice

from mm import SwapOrders
from mm.addresses import Int32Array


class SimulatedMover:
    """Host slots beside a SimulatedDevice. `start` and `ended` are those of mm.PageMover; a test ends the copies."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.slots = np.full((device.memory.swap.total, device.memory.page_size), JUNK, np.int64)
        self.in_flight: dict[int, SwapOrders] = {}
        self.moved_pages = 0
        self._ended: list[tuple[int, bool]] = []

    def start(self, orders: SwapOrders) -> None:
        if not len(orders):
            return
        for name in ("frames", "slots"):
            mine = np.concatenate((getattr(orders, f"out_{name}"), getattr(orders, f"in_{name}")))
            assert len(np.unique(mine)) == len(mine), f"an order names one of its {name} twice"
            for other in self.in_flight.values():
                theirs = np.concatenate((getattr(other, f"out_{name}"), getattr(other, f"in_{name}")))
                assert not np.intersect1d(mine, theirs).size, f"two orders in flight name the same {name}"
        self.slots[orders.out_slots] = JUNK
        self.device.pool[orders.in_frames] = JUNK
        self.in_flight[orders.ticket] = orders

    def end(self, ticket: int, *, succeeds: bool) -> None:
        orders = self.in_flight.pop(ticket)
        if succeeds:
            self.slots[orders.out_slots] = self.device.pool[orders.out_frames]
            self.device.pool[orders.in_frames] = self.slots[orders.in_slots]
            self.moved_pages += len(orders)
        else:
            self.slots[orders.out_slots] = JUNK
            self.device.pool[orders.in_frames] = JUNK
        self._ended.append((ticket, succeeds))

    def ended(self) -> Sequence[tuple[int, bool]]:
        ended, self._ended = self._ended, []
        return ended

    def poison_free_slots(self) -> None:
        self.slots[self.device.memory.swap.free_list] = JUNK

    def read(self, row: int, length: int) -> list[int]:
        """The content of a row, wherever its pages are, through mm's own page table."""
        return self.content(self.device.memory.tables.mapped(row), length)

    def content(self, entries: Int32Array, length: int) -> list[int]:
        """Of the first `length` positions of pages that lie where these page table entries say."""
        pages = [self.device.pool[entry] if entry >= 0 else self.slots[-2 - entry] for entry in entries.tolist()]
        return np.array(pages, np.int64).reshape(-1)[:length].tolist()
