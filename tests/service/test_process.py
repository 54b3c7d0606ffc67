"""What every process asks of the system."""

import asyncio
import threading
from contextlib import suppress

import uvloop

from service.process import UnjoinedThreads


def test_the_end_of_a_loop_waits_for_no_thread() -> None:
    """One that hangs, as a write to a broken disk does, and one that has not begun."""
    goes_on, began = threading.Event(), threading.Event()
    ran: list[int] = []

    def hang() -> None:
        began.set()
        goes_on.wait(60)
        ran.append(1)

    async def leave() -> None:
        task = asyncio.ensure_future(asyncio.to_thread(hang))
        later = asyncio.ensure_future(asyncio.to_thread(ran.append, 2))
        while not began.is_set():  # noqa: ASYNC110 - set in the thread
            await asyncio.sleep(0.001)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(task), 0.01)
        later.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.get_loop().set_default_executor(UnjoinedThreads(1))
        runner.run(leave())
    assert ran == []
    goes_on.set()
