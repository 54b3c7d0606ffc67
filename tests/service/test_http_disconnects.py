"""C08: a client that leaves takes its request with it, whatever state that was in."""

import asyncio
import json
import random
from typing import Any

import pytest
from http_house import Server, Start, says

LONG = says(" a b c d e f g h i j k l m n o p q r s t u v w x y z" * 4)


async def send(server: Server, body: dict[str, Any], path: str = "/v1/completions") -> tuple[Any, asyncio.StreamWriter]:
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ticks", [0, 3])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_leaving_cancels(start: Start, stream: bool, ticks: int, path: str) -> None:
    """Before the first token and amid the answer, streamed and whole. Through the start-up code of production."""
    server = await start(engine={"is_manual": True, "script": LONG})
    prompt: dict[str, Any] = (
        {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    )
    reader, writer = await send(server, prompt | {"stream": stream, "max_tokens": 99}, path)
    await server.until(lambda: len(server.engine.lines) == 1)
    for _ in range(ticks):
        server.engine.tick()
        await asyncio.sleep(0.005)
    if stream and ticks:
        await reader.readuntil(b"data: ")
    writer.close()
    await server.until(lambda: server.engine.lines == {})
    assert server.engine.cancelled == [server.engine.submitted[0].sequence_id]
    await server.until(lambda: len(server.log) == 1)
    assert server.log[0]["status"] == 499
    assert server.metrics.ended == {(path, "POST", 499): 1}


async def test_leaving_cancels_every_prompt_that_has_not_ended(start: Start) -> None:
    server = await start(engine={"is_manual": True})
    server.engine.script = lambda submit: [5] * 30 if submit.prompt_ids == [7] else [5, 2]
    _, writer = await send(server, {"prompt": [[6], [7], [7]], "stream": True})
    await server.until(lambda: len(server.engine.lines) == 3)
    server.engine.tick()
    server.engine.tick()  # the first has ended
    writer.close()
    await server.until(lambda: server.engine.lines == {})
    assert sorted(server.engine.cancelled) == [submit.sequence_id for submit in server.engine.submitted[1:]]


async def test_leaving_while_the_body_is_sent(server: Server) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"prompt":')
    await server.until(lambda: server.metrics.inflight == 1)
    writer.close()
    await server.until(lambda: server.metrics.inflight == 0)
    assert server.engine.submitted == []


async def test_leaving_after_a_text_stop_before_the_engine_has_ended_it(start: Start) -> None:
    """The Finish is out and its Ended has not come: cancelling then must not disturb anything."""
    server = await start(engine={"is_manual": True, "script": LONG})
    reader, writer = await send(server, {"prompt": "a", "stream": True, "stop": "b", "max_tokens": 50})
    await server.until(lambda: len(server.engine.lines) == 1)
    server.engine.tick()
    server.engine.tick()
    await reader.readuntil(b'"stop_reason":"b"')
    writer.close()
    await server.until(lambda: server.metrics.inflight == 0)
    assert server.engine.lines == {}


async def test_two_hundred_random_disconnects_leave_nothing(start: Start) -> None:
    server = await start(engine={"script": LONG, "step_s": 0.0005})
    rng = random.Random(8)

    async def one(number: int) -> None:
        body = {"prompt": ["a"] * rng.randint(1, 3), "max_tokens": rng.randint(1, 60), "ignore_eos": True}
        body |= {"stream": rng.random() < 0.7, "stop": [] if number % 3 else "g"}
        reader, writer = await send(server, body)
        await asyncio.sleep(rng.random() * 0.05)
        if number % 2:
            writer.close()
        else:
            writer.transport.abort()  # a reset, not a goodbye
        del reader

    for begin in range(0, 200, 40):
        await asyncio.gather(*(one(begin + i) for i in range(40)))
    await server.until(lambda: server.metrics.inflight == 0)
    assert server.engine.lines == {}
    assert server.engine.client.open_sequences == 0
    assert server.front_end.generating == 0
    ended = server.metrics.ended
    assert sum(ended.values()) <= 200
    assert ended["/v1/completions", "POST", 499] > 50
    server.engine.script = says(" fox")
    assert (await server.complete()).json["choices"][0]["text"] == " fox"
