"""Copies beside the steps: swap orders, pages of checkpoints, and the memory behind swap slots as it comes.

The engine asks in each turn which have ended, and begins what its plan has made room for.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import structlog

from model.executor import Executor
from service.between_steps import BetweenSteps
from service.errors import EngineDead
from service.page_copying import PageCopying
from service.scheduler import Scheduler
from service.sequences import Fill

FIRST_SWAP_BYTES = 1 << 30
"""Swap memory that is taken at the start; then it doubles as it is used."""

log = structlog.get_logger("pagewalk.engine")


class Copies:
    """Those of one engine that have begun and not ended."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, between_steps: BetweenSteps, clock: Callable[[], float]
    ) -> None:
        self.pages = PageCopying(executor, between_steps)
        self._scheduler = scheduler
        self._executor = executor
        self._between_steps = between_steps
        self._clock = clock
        self._moving: dict[int, tuple[int, float]] = {}  # swap orders that are under way: pages, begun
        self._filling: set[asyncio.Task[None]] = set()
        self._ready_slots = self._wanted_slots = 0

    @property
    def are_swapping(self) -> bool:
        return bool(self._moving)

    @property
    def are_under_way(self) -> bool:
        """Also those of checkpoints."""
        return bool(self._moving or self.pages.jobs)

    def take_ended(self) -> bool:
        """Pages that have come or gone since the last turn, or could not. Whether there are any."""
        memory, ended = self._scheduler.memory, self._executor.ended()
        for number, succeeded in ended:
            if self.pages.take(number, succeeded=succeeded):
                continue
            pages, begun = self._moving.pop(number)
            if succeeded:
                memory.costs.observe_copy(pages, self._clock() - begun)
            else:
                log.warning("a swap copy has failed: its pages stay, or are computed again", pages=pages)
            self._scheduler.swap_ended(number, succeeded=succeeded)
        return bool(ended)

    def start(self) -> None:
        """What the plan of this turn has made room for, or needs next."""
        for orders in self._scheduler.take_swap_orders():
            self._moving[orders.ticket] = len(orders), self._clock()
            self._executor.start(orders)
        for fill in self._scheduler.take_fills():
            self._filling.add(filling := asyncio.create_task(self._fill(fill)))
            filling.add_done_callback(self._filling.discard)

    async def _fill(self, fill: Fill) -> None:
        """The pages of a restored Sequence, from its store."""
        frames, store = fill.hold.frames, fill.saved.store
        with suppress(EngineDead):
            places = np.arange(len(frames), dtype=np.int32)
            succeeded = await self.pages.copy(frames, places, store, is_out=False)
            await self._between_steps.run(lambda: self._scheduler.sequences.filled(fill, succeeded=succeeded))

    def open_slots(self) -> None:
        """Swap slots become usable as the memory behind them is there. More is asked for when half of what was asked
        for is in use: of what is there, while memory comes slowly, more than half is for long.
        """
        memory, executor = self._scheduler.memory, self._executor
        if self._ready_slots >= memory.swap.usable:
            return
        if (ready := executor.ready_slots) > self._ready_slots:
            self._ready_slots = ready
            memory.open_slots(ready)
        if 2 * memory.swap.used_slots >= self._wanted_slots:
            most = max(2 * self._wanted_slots, FIRST_SWAP_BYTES // executor.frame_bytes)
            self._wanted_slots = min(most, memory.swap.usable)  # more is not given: a larger area asks again
            executor.want_slots(self._wanted_slots)

    def resized(self, slots: int) -> None:
        """The swap area has another size: as many slots are open as there were, at most."""
        self._ready_slots, self._wanted_slots = min(self._ready_slots, slots), min(self._wanted_slots, slots)

    def stop(self) -> None:
        """No step will come any more."""
        self.pages.stop()
