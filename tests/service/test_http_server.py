"""How connections come in: the part of the server below HTTP, on the event loop of production."""

import asyncio
import socket
import sys
from pathlib import Path

import pytest
import uvloop
from aiohttp import web
from http_house import CountingMetrics

from service.doors import Doors
from service.front_end import ApiSettings, FrontEnd
from service.http_server import ACCEPTS_PER_TURN, addresses_of, listen, make_runner
from service.process import SPARE_FILES
from service.questions import Answers


def test_a_burst_of_connections_is_accepted_in_a_few_turns_of_the_loop() -> None:
    """One a turn would keep a probe waiting behind each of them, for as long as a turn takes under load."""
    clients = [socket.socket() for _ in range(320)]

    async def turns_until_accepted() -> int:
        runner = make_runner(web.Application())
        await runner.setup()
        try:
            await listen(runner, await addresses_of("127.0.0.1", 0))
            assert runner.server is not None
            for client in clients:
                client.setblocking(False)
                client.connect_ex(runner.addresses[0])
            turns = 0
            while len(runner.server.connections) < len(clients):
                turns += 1
                assert turns < 1000, "some are never accepted"
                await asyncio.sleep(0)
            return turns
        finally:
            await runner.cleanup()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            assert loop.run(turns_until_accepted()) < 4 * len(clients) / ACCEPTS_PER_TURN
    finally:
        for client in clients:
            client.close()


async def test_an_address_has_one_listening_socket() -> None:
    """Each further one would be woken by every connection, only to find that there is none left."""
    runner = make_runner(web.Application())
    await runner.setup()
    try:
        await listen(runner, await addresses_of("127.0.0.1", 0))
        assert len(runner.addresses) == 1
    finally:
        await runner.cleanup()


@pytest.fixture
async def two_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What any host has, as `localhost` may."""

    async def addresses(*_: object, **__: object) -> list[tuple[object, ...]]:
        kind = socket.AF_INET, socket.SOCK_STREAM, 6, ""
        return [(*kind, ("127.0.0.1", 0)), (*kind, ("127.0.0.2", 0)), (*kind, ("127.0.0.1", 0))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", addresses)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_most_spare_files_are_left_by_what_listens(two_addresses: None) -> None:
    doors = Doors(FrontEnd(ApiSettings(version="1"), CountingMetrics(), lambda **_: None, Answers()), None)
    before = open_files()
    await doors.open_at("somewhere", 0, "somewhere", 0)
    try:
        assert open_files() - before < SPARE_FILES / 2
    finally:
        await doors.close()


async def test_every_address_of_a_host_is_listened_on(two_addresses: None) -> None:
    runner = make_runner(web.Application())
    await runner.setup()
    try:
        await listen(runner, await addresses_of("somewhere", 0))
        assert {host for host, _ in runner.addresses} == {"127.0.0.1", "127.0.0.2"}
        for address in runner.addresses:
            _, writer = await asyncio.open_connection(*address)
            writer.close()
    finally:
        await runner.cleanup()
