"""An event loop that does not sleep while a request or its first token is about to come.

A loop that sleeps is woken by the system: 0.1 to 0.3 ms on virtual machines, perhaps on another core, and with caches
that are cold. As the engine does for its steps, a front end turns its loop instead.
"""

import asyncio
import time
from collections.abc import Callable

POLL_S = 0.02
"""After a connection was accepted, or a request submitted. Of a first token that takes longer, a wake-up is less than a
hundredth."""

FEW_STREAMS = 2
"""With more, something comes all the time, and a core is of more use to them."""


class BusyPoll:
    """Of the running event loop."""

    def __init__(self, open_streams: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        """open_streams: how many there are now. clock: seconds."""
        self._open_streams = open_streams
        self._clock = clock
        self._until_s = 0.0
        self._is_turning = False

    def begin(self) -> None:
        """Something is about to come: no sleep for POLL_S, as long as there are few streams."""
        self._until_s = self._clock() + POLL_S
        if not self._is_turning:
            self._turn()

    def _turn(self) -> None:
        self._is_turning = self._clock() < self._until_s and self._open_streams() <= FEW_STREAMS
        if self._is_turning:
            asyncio.get_running_loop().call_soon(self._turn)
