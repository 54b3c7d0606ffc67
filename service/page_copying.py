"""Copies of pages between frames and memory of their own, for checkpoints: a portion before each step, no more.

So that no row waits for long: on the CPU a portion is copied between two steps, on a GPU beside them. The frames are
held meanwhile (mm/holds.py).
"""

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mm import SwapOrders
from mm.addresses import Int32Array
from model.executor import Executor
from service.between_steps import BetweenSteps

if TYPE_CHECKING:
    from mm.backing_store import BackingStore

PORTION_BYTES = 16 << 20
"""Some 5 ms of a CPU's memory, 0.4 ms of a GPU's copy engine; one page at least."""


class PageCopying:
    """The copies under way. `jobs`: how many have begun and not ended, also while none of their portions is."""

    def __init__(self, executor: Executor, between_steps: BetweenSteps) -> None:
        self.jobs = 0
        self._executor = executor
        self._between_steps = between_steps
        self._waiting: dict[int, asyncio.Future[bool]] = {}
        self._last_ticket = 0  # negative ones: mm counts up

    async def copy(self, frames: Int32Array, places: Int32Array, store: "BackingStore", *, is_out: bool) -> bool:
        """Copy frames[i] to slot places[i] of `store`, or the other way round. Whether all went well.

        Raises EngineDead.
        """
        portion = max(1, PORTION_BYTES // self._executor.frame_bytes)
        self.jobs += 1
        try:
            for first in range(0, len(frames), portion):
                part = slice(first, first + portion)
                start = partial(self._start, frames[part], places[part], store, is_out)
                ended = await self._between_steps.run(start)
                if not await ended:
                    return False
            return True
        finally:
            self.jobs -= 1

    def take(self, ticket: int, *, succeeded: bool) -> bool:
        """A copy has ended. Whether it is one of these."""
        future: asyncio.Future[Any] | None = self._waiting.pop(ticket, None)
        if future is None:
            return False
        if not future.done():
            future.set_result(succeeded)
        return True

    def stop(self) -> None:
        """No step will come any more."""
        for future in self._waiting.values():
            if not future.done():
                future.set_result(False)
        self._waiting.clear()

    def _start(
        self, frames: Int32Array, places: Int32Array, store: "BackingStore", is_out: bool
    ) -> "asyncio.Future[bool]":
        self._last_ticket -= 1
        numbers = np.ascontiguousarray(frames), np.ascontiguousarray(places)
        if is_out:
            orders = SwapOrders(self._last_ticket, out_frames=numbers[0], out_slots=numbers[1])
        else:
            orders = SwapOrders(self._last_ticket, in_frames=numbers[0], in_slots=numbers[1])
        future = self._waiting[orders.ticket] = asyncio.get_running_loop().create_future()
        self._executor.start(orders, store)
        return future
