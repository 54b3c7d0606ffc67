"""Who begins in a turn of the event loop: a burst of requests leaves room in it for probes and for open streams.

To begin, a request is read, checked and brought to the engine, which takes most of a millisecond. Connections are
accepted far faster than that: without a bound one turn would begin all that came, and everybody else wait for its end.
"""

import asyncio
from collections import deque

BEGIN_PER_TURN = 16
"""Some ten milliseconds of a turn."""


class Turnstile:
    """Of one process. Requests pass in the order in which they came."""

    def __init__(self, per_turn: int = BEGIN_PER_TURN) -> None:
        self._per_turn = per_turn
        self._passed = 0  # in this turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Requests that have come and may not begin yet; some of them may have left meanwhile."""
        return len(self._waiting)

    async def enter(self) -> None:
        """Return once this request may begin: at once, unless as many others began in this turn."""
        loop = asyncio.get_running_loop()
        if self._passed < self._per_turn:
            if self._passed == 0:
                loop.call_soon(self._turn)
            self._passed += 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place  # whoever leaves meanwhile cancels it

    def _turn(self) -> None:
        self._passed = 0
        while self._waiting and self._passed < self._per_turn:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                self._passed += 1
        if self._passed:
            self._passed = self._per_turn  # those let in wake in the next turn: nobody who comes now is before them
            asyncio.get_running_loop().call_soon(self._turn)
