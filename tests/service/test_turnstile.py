"""A burst of requests leaves room in each turn of the event loop."""

import asyncio
from typing import Any

import pytest

from service.errors import QueueFull
from service.front_end import MOST_WAITING, ApiSettings, FrontEnd
from service.turnstile import Turnstile


async def begun_by_turn(turnstile: Turnstile, tasks: int, turns: int) -> list[list[int]]:
    """Which of so many requests, that all come at once, began in each turn."""
    begun: list[int] = []

    async def request(number: int) -> None:
        await turnstile.enter()
        begun.append(number)

    running = [asyncio.create_task(request(number)) for number in range(tasks)]
    seen: list[list[int]] = []
    for _ in range(turns):
        await asyncio.sleep(0)
        seen.append(begun[sum(map(len, seen)) :])
    await asyncio.gather(*running)
    return seen


async def test_a_burst_begins_a_few_a_turn_in_order() -> None:
    seen = await begun_by_turn(Turnstile(3), tasks=10, turns=12)
    assert max(map(len, seen)) == 3
    assert [number for turn in seen for number in turn] == list(range(10))


@pytest.mark.parametrize("first", range(1, 8))
async def test_who_comes_later_does_not_overtake_those_who_may_just_begin(first: int) -> None:
    """Those who waited wake a turn after they were let in; meanwhile the next may come, in any turn."""
    turnstile = Turnstile(3)
    begun: list[int] = []

    async def request(number: int) -> None:
        await turnstile.enter()
        begun.append(number)

    running = [asyncio.create_task(request(number)) for number in range(first)]
    for number in range(first, 20):  # one more in each turn
        await asyncio.sleep(0)
        running.append(asyncio.create_task(request(number)))
    await asyncio.gather(*running)
    assert begun == list(range(20))


async def test_few_begin_at_once() -> None:
    assert (await begun_by_turn(Turnstile(3), tasks=3, turns=1)) == [[0, 1, 2]]


async def test_who_leaves_while_waiting_takes_nobodys_place() -> None:
    turnstile = Turnstile(1)
    begun: list[int] = []

    async def request(number: int) -> None:
        await turnstile.enter()
        begun.append(number)

    running = [asyncio.create_task(request(number)) for number in range(4)]
    await asyncio.sleep(0)
    running[1].cancel()
    running[2].cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert begun == [0, 3]


async def test_a_turn_without_requests_leaves_nothing_to_run() -> None:
    """It is no timer: a server without requests is idle."""
    turnstile = Turnstile(2)
    for _ in range(2):  # and it begins anew
        await turnstile.enter()
        for _ in range(3):
            await asyncio.sleep(0)
        assert turnstile._passed == 0


async def test_who_waits_holds_a_socket_so_no_more_wait_than_there_are_files_for() -> None:
    nobody: Any = None
    limit = 3
    settings = ApiSettings(version="test", max_generating=limit)
    front_end = FrontEnd(settings, nobody, nobody, nobody, generating=1, turnstile=Turnstile(1))
    waiting = [asyncio.create_task(front_end.enter()) for _ in range(MOST_WAITING + limit)]
    asked = asyncio.create_task(front_end.enter())
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="requests are open"):
        await asked
    await asyncio.gather(*waiting)
    await front_end.enter()  # and when they have begun there is room again
