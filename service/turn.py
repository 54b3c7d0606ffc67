"""Calls that wait for the next turn of the event loop, together."""

import asyncio
from collections.abc import Callable


class Turn:
    """Of one front end. A step has news for many streams: they share one entry in the loop's queue."""

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []

    def add(self, call: Callable[[], None]) -> None:
        """`call` must not raise."""
        if not self._calls:
            asyncio.get_running_loop().call_soon(self._run)
        self._calls.append(call)

    def _run(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            call()
