"""TokenStream and Inbox: what a handler sees of what the engine's client puts in."""

import asyncio

import pytest

from service.engine_client import Ended, Scores
from service.errors import EngineDead
from service.token_stream import Inbox, TokenStream


async def test_all_that_waits_is_taken_at_once() -> None:
    stream = TokenStream()
    stream.put(1)
    stream.put([2, 3])
    stream.end(Ended(7, "length"))
    chunks = [chunk async for chunk in stream]
    assert chunks == [([1, 2, 3], Ended(7, "length"), [])]


async def test_a_reader_that_waits_is_woken_by_each_put() -> None:
    stream = TokenStream()

    async def read() -> list[tuple[list[int], Ended | None]]:
        return [(chunk.tokens, chunk.ended) async for chunk in stream]

    reader = asyncio.create_task(read())
    for token in (1, 2):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        stream.put(token)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    stream.end(Ended(7, "stop"))
    assert await reader == [([1], None), ([2], None), ([], Ended(7, "stop"))]


async def test_streams_of_one_inbox_report_in_order_of_news() -> None:
    inbox = Inbox()
    first, second = TokenStream(inbox=inbox), TokenStream(inbox=inbox)
    second.put(1)
    first.put(2)
    second.put(3)
    assert await inbox.next_ready() == [second, first]
    assert second.take().tokens == [1, 3]
    assert first.take().tokens == [2]


async def test_wake_returns_without_news() -> None:
    inbox = Inbox()
    waiting = asyncio.create_task(inbox.next_ready())
    await asyncio.sleep(0)
    inbox.wake()
    inbox.wake()
    assert await waiting == []


async def test_a_cancelled_wait_loses_nothing() -> None:
    inbox = Inbox()
    stream = TokenStream(inbox=inbox)
    waiting = asyncio.create_task(inbox.next_ready())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    stream.put(5)
    assert await inbox.next_ready() == [stream]


async def test_tokens_before_a_failure_are_read_first() -> None:
    stream = TokenStream()
    stream.put([1, 2])
    stream.fail("the engine has stopped")
    chunks = aiter(stream)
    assert (await anext(chunks)).tokens == [1, 2]
    with pytest.raises(EngineDead, match="the engine has stopped"):
        await anext(chunks)


async def test_closing_cancels_once_and_only_what_has_not_ended() -> None:
    cancelled: list[str] = []
    open_stream = TokenStream(lambda: cancelled.append("open"))
    ended_stream = TokenStream(lambda: cancelled.append("ended"))
    failed_stream = TokenStream(lambda: cancelled.append("failed"))
    ended_stream.end(Ended(1, "stop"))
    failed_stream.fail("gone")
    for stream in (open_stream, ended_stream, failed_stream):
        stream.close()
        stream.close()
    assert cancelled == ["open"]


async def test_nothing_arrives_after_close() -> None:
    inbox = Inbox()
    stream = TokenStream(inbox=inbox)
    stream.close()
    stream.put(1)
    stream.end(Ended(1, "abort"))
    inbox.wake()
    waiting = asyncio.create_task(inbox.next_ready())
    await asyncio.sleep(0)
    inbox.wake()
    assert await waiting == []


async def test_scores_come_with_their_tokens_and_those_of_the_prompt_go_where_it_is_kept() -> None:
    """The prompt's are no news by themselves: they come before the first token."""
    of_prompt: list[Scores] = []
    inbox = Inbox()
    stream = TokenStream(inbox=inbox, prompt_scores=of_prompt)
    first, second = Scores(-1.0, 1, [], []), Scores(-2.0, 2, [3], [-1.5])
    stream.put_prompt_scores([first, second])
    stream.put_prompt_scores([first])
    stream.put(7, second)
    stream.put(8, first)
    assert await inbox.next_ready() == [stream]
    assert stream.take() == ([7, 8], None, [second, first])
    assert stream.take() == ([], None, [])
    assert of_prompt == [first, second, first]
    stream.close()
    stream.put_prompt_scores([first])
    assert len(of_prompt) == 3
