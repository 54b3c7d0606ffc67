"""TokenStream and Inbox: what a handler sees of what the engine's client puts in."""

import asyncio

import pytest

from service.engine_client import Ended, Scores
from service.errors import EngineDead
from service.token_stream import Inbox, TokenStream
from service.turn import Turn


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


async def test_an_interval_lets_tokens_wait_but_for_the_first_and_the_end() -> None:
    stream = TokenStream(interval=3)

    async def read() -> list[tuple[list[int], Ended | None]]:
        return [(chunk.tokens, chunk.ended) async for chunk in stream]

    reader = asyncio.create_task(read())
    for token in range(8):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        stream.put(token)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    stream.end(Ended(1, "length"))
    assert await reader == [([0], None), ([1, 2, 3], None), ([4, 5, 6], None), ([7], Ended(1, "length"))]


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


# ---------------------------------------------------------------- a function in the handler's place


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_reader_is_called_once_for_all_news_of_a_step() -> None:
    inbox = Inbox()
    first, second = TokenStream(inbox=inbox), TokenStream(inbox=inbox)
    calls: list[list[list[int]]] = []

    def reader(ready: list[TokenStream]) -> bool:
        calls.append([stream.take().tokens for stream in ready])
        return len(calls) < 3

    first.put(1)  # before it reads
    reading = asyncio.create_task(inbox.read_with(reader))
    await turns()
    first.put(2)
    second.put(3)
    first.put(4)
    assert calls == [[[1]]], "not amid a step"
    await turns()
    assert calls == [[[1]], [[2, 4], [3]]]
    second.put(5)
    await reading
    assert calls[2:] == [[[5]]]
    second.put(6)
    assert [stream.take().tokens for stream in await inbox.next_ready()] == [[6]], "the handler reads again"


async def test_wake_ends_the_reading_and_loses_nothing() -> None:
    """Also if news and the wake come in one turn of the loop."""
    inbox = Inbox()
    stream = TokenStream(inbox=inbox)
    calls: list[list[int]] = []

    def reader(ready: list[TokenStream]) -> bool:
        calls.extend(stream.take().tokens for stream in ready)
        return True

    for token in (1, 2):
        reading = asyncio.create_task(inbox.read_with(reader))
        await turns()
        inbox.wake()
        stream.put(token)
        await reading
    assert calls == [[1]]
    assert [stream.take().tokens for stream in await inbox.next_ready()] == [[2]]


async def test_what_a_reader_raises_is_raised_in_the_handler() -> None:
    """And not in whoever brings the news: the others get theirs."""
    turn = Turn()
    broken, other = Inbox(turn), Inbox(turn)
    seen: list[list[TokenStream]] = []

    def read(ready: list[TokenStream]) -> bool:
        seen.append(ready)
        return False

    def fail(ready: list[TokenStream]) -> bool:
        raise EngineDead("gone")

    failing, reading = asyncio.create_task(broken.read_with(fail)), asyncio.create_task(other.read_with(read))
    await turns()
    streams = [TokenStream(inbox=inbox) for inbox in (broken, other)]
    for stream in streams:
        stream.put(1)
    with pytest.raises(EngineDead):
        await failing
    await reading
    assert seen == [[streams[1]]]


async def test_a_cancelled_handler_is_not_called_any_more() -> None:
    inbox = Inbox()
    stream = TokenStream(inbox=inbox)
    reading = asyncio.create_task(inbox.read_with(lambda ready: pytest.fail("nobody is there")))
    await turns()
    stream.put(1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await turns()
    assert await inbox.next_ready() == [stream]


def test_one_token_is_taken_only_where_nothing_else_waits() -> None:
    """Then `take` brings what waits, as if nobody had asked."""
    stream = TokenStream()
    assert stream.take_one() is None
    stream.put(1)
    assert (stream.take_one(), stream.take_one()) == (1, None)
    stream.put([2, 3])
    assert (stream.take_one(), stream.take()) == (None, ([2, 3], None, []))
    stream.put(4, Scores(-1.0, 1, [], []))
    assert (stream.take_one(), stream.take().tokens) == (None, [4])
    stream.put(5)
    ended = Ended(1, "length")
    stream.end(ended)
    assert (stream.take_one(), stream.take()) == (None, ([5], ended, []))


async def test_one_token_that_was_taken_makes_the_next_one_news() -> None:
    inbox = Inbox()
    stream = TokenStream(inbox=inbox, interval=2)
    stream.put(1)
    assert await inbox.next_ready() == [stream]
    assert stream.take_one() == 1
    for token in (2, 3):  # from the second on, two at a time
        waiting = asyncio.ensure_future(inbox.next_ready())
        await turns()
        assert not waiting.done()
        stream.put(token)
    assert await waiting == [stream]
