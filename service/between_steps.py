"""What is to be done between two steps, in the engine's process, when the scheduler and all memory may be changed."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from service.errors import EngineDead, PagewalkError

A = TypeVar("A")


class BetweenSteps:
    """A queue of functions. Truth: whether any waits."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: lets an idle engine take its next turn."""
        self._queue: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._wake = wake
        self._is_over = False

    def __bool__(self) -> bool:
        return bool(self._queue)

    async def run(self, action: Callable[[], A]) -> A:
        """Carry `action` out before the next step. Raises what it raises; EngineDead if there is none."""
        if self._is_over:
            raise EngineDead
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._queue.append((action, future))
        self._wake()
        return await future

    def carry_out(self) -> None:
        """The engine is between two steps. A refusal is for who asked; anything else that is raised is our mistake."""
        while self._queue:
            action, future = self._queue.popleft()
            if future.done():
                continue  # whoever asked has left
            try:
                future.set_result(action())
            except PagewalkError as refusal:
                future.set_exception(refusal)

    def end(self) -> None:
        """There is no next step."""
        self._is_over = True
        while self._queue:
            _, future = self._queue.popleft()
            if not future.done():
                future.set_exception(EngineDead())
