"""C08: a client that leaves takes its request with it, whatever state that was in. Scripted, then the real engine."""

import asyncio
import json
import random
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from http_house import Server, Start, says
from real_house import RealHouse, real_house
from tiny_model import write_tiny_model

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
    line = server.log[0]
    assert (line["status"], line["finish_reasons"], line["completion_tokens"]) == (499, ["abort"], ticks)
    assert line["queue_ms"] is None, "the engine says so with the end only"
    assert (line["ttft_ms"] is None) == (ticks == 0)
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


async def test_how_each_choice_ended_is_logged(start: Start) -> None:
    """Some ended, some were left behind; an engine that fails is no client that leaves."""
    server = await start(
        engine={"is_manual": True, "script": lambda submit: [5] * 30 if submit.prompt_ids == [7] else [5, 2]}
    )
    _, writer = await send(server, {"prompt": [[6], [7]]})
    await server.until(lambda: len(server.engine.lines) == 2)
    server.engine.tick()
    server.engine.tick()
    writer.close()
    await server.until(lambda: len(server.log) == 1)
    assert server.log[0]["finish_reasons"] == ["abort", "stop"]

    server.engine.fail_after, server.engine.is_manual = 0, False
    assert (await server.complete()).status == 500
    assert (server.log[1]["finish_reasons"], server.log[1]["ttft_ms"]) == (["error"], None)

    server.engine.is_manual, server.engine.fail_after = True, None
    asking = asyncio.create_task(server.complete(prompt=["a", "b"]))
    await server.until(lambda: len(server.engine.lines) == 2)
    server.engine.die()
    assert (await asking).status == 503
    assert (server.log[2]["finish_reasons"], server.log[2]["ttft_ms"]) == (["error"], None)


@pytest.mark.skipif(sys.platform != "linux", reason="the option of the socket is Linux's")
async def test_a_client_that_never_reads_does_not_stay(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold a socket, and a place among the open requests, for as long as it likes."""
    monkeypatch.setattr("service.http_server.UNREAD_S", 0.3)
    server = await start(
        limits={"max_model_len": 10**6, "max_request_tokens": 10**6},
        engine={"script": lambda submit: [5] * submit.max_tokens},
    )
    sender = socket.socket()
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sender.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sender, ("127.0.0.1", server.port))
    body = {"prompt": "a", "stream": True, "max_tokens": 30_000, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    await asyncio.get_running_loop().sock_sendall(sender, head + data)
    await server.until(lambda: server.metrics.inflight == 1)
    async with asyncio.timeout(30):
        while server.metrics.inflight:  # noqa: ASYNC110 - the system ends it
            await asyncio.sleep(0.05)
    assert server.front_end.generating == 0
    assert server.metrics.ended == {("/v1/completions", "POST", 499): 1}
    sender.close()


async def test_a_client_that_closes_its_side_has_left(start: Start) -> None:
    """A half-closed connection: nothing tells it from one whose client is gone."""
    server = await start(engine={"is_manual": True, "script": LONG})
    reader, writer = await send(server, {"prompt": "a", "max_tokens": 99})
    await server.until(lambda: len(server.engine.lines) == 1)
    writer.write_eof()
    await server.until(lambda: server.engine.lines == {})
    assert await reader.read() == b""
    writer.close()


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


# ---------------------------------------------------------------- the real engine


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealHouse]:
    """Two Sequences at once. All memory is available at the end, or the fixture fails."""
    pool = {"kv_cache_memory_bytes": 16 << 20}  # room for an endless one also where keys and values are float32
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    async with real_house(monkeypatch, folder, max_num_seqs=2, **pool) as house:
        yield house


async def until(house: RealHouse, **gauges: float) -> dict[str, float]:
    """Wait until the named vllm gauges have these values."""
    async with asyncio.timeout(20):
        while True:
            found = await house.metrics()
            if all(found[f"vllm:num_requests_{name}"] == value for name, value in gauges.items()):
                return found


def endless(number: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": [5 + number] * 40, "max_tokens": 90_000, "ignore_eos": True, "temperature": 0} | fields


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_frees_what_a_running_request_held(house: RealHouse, stream: bool) -> None:
    before = await house.metrics()
    reader, writer = await house.open("/v1/completions", endless(0, stream=stream))
    running = await until(house, running=1, waiting=0)
    assert running["vllm:kv_cache_usage_perc"] > 0
    if stream:
        await reader.readuntil(b"data: ")
    writer.close()
    after = await until(house, running=0, waiting=0)
    assert after['pagewalk_kv_frames{state="active"}'] == 0
    assert (await house.meminfo())["active"] == 0
    aborts = 'vllm:request_success_total{finished_reason="abort"}'
    assert after[aborts] - before[aborts] == 1
    async with asyncio.timeout(20):
        await house.engine.drained()  # a step may have been on its way
    step = house.engine.snapshot().step
    await asyncio.sleep(0.05)
    assert house.engine.snapshot().step == step, "the engine goes on working for nobody"


async def test_dead_requests_in_the_queue_never_start(house: RealHouse) -> None:
    before = await house.metrics()
    places = [await house.open("/v1/completions", endless(i, stream=bool(i))) for i in range(2)]
    await until(house, running=2, waiting=0)
    queued = [await house.open("/v1/completions", endless(2 + i, stream=bool(i % 2))) for i in range(20)]
    await until(house, running=2, waiting=20)
    for _, writer in queued:
        writer.close()
    after = await until(house, running=2, waiting=0)
    grown = {name: count - before.get(name, 0) for name, count in after.items()}
    assert grown['vllm:request_success_total{finished_reason="abort"}'] == 20
    for _, writer in places:
        writer.close()
    after = await until(house, running=0, waiting=0)
    grown = {name: count - before.get(name, 0) for name, count in after.items()}
    assert grown['vllm:request_success_total{finished_reason="abort"}'] == 22
    assert grown["vllm:request_queue_time_seconds_count"] == 2, "more than the first two have entered a step"
    assert after['pagewalk_kv_frames{state="active"}'] == 0
    answer = await house.post("/v1/completions", {"prompt": "the", "max_tokens": 3, "ignore_eos": True})
    assert answer["usage"]["completion_tokens"] == 3
