"""The map of frames and the streams: what a page gets that watches, and when a stream ends."""

import json
import random
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import pytest
from http_house import Start
from real_house import RealHouse, real_house
from stepped_engine import SteppedEngine
from tiny_model import write_tiny_model

from mm.frame_views import frame_map
from service.admin_streams import Pace, changes, whole
from service.questions import FrameBytes


class Map:
    """What a page does with the events: docs/admin.md tells how."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}
        self.kinds: list[str] = []

    def take(self, event: dict[str, Any]) -> None:
        self.kinds.append(event["kind"])
        bytes_of = {
            name: np.frombuffer(b64decode(text), np.uint8)
            for name, text in event.items()
            if type(text) is str and name != "kind"
        }
        if event["kind"] == "whole":
            self.parts = {name: found.copy() for name, found in bytes_of.items()}
            return
        at, slots_at = bytes_of["at"].view("<u4"), bytes_of["slots_at"].view("<u4")
        self.parts["states"][at] = bytes_of["states"]
        self.parts["shares"][at] = bytes_of["shares"]
        self.parts["slot_states"][slots_at] = bytes_of["slot_states"]

    def is_like(self, found: FrameBytes) -> bool:
        have = [self.parts[name].tobytes() for name in ("states", "shares", "slot_states")]
        return have == [found.states, found.shares, found.slots]


async def test_changes_lead_from_one_map_to_the_next() -> None:
    house, page = SteppedEngine(5), Map()
    sent: FrameBytes | None = None
    for _ in range(200):
        for _ in range(house.chance.randrange(3)):
            house.act()
            await house.step()
        found = house.inspector.map_frames()
        event = whole(found) if sent is None else changes(sent, found)
        if event is not None:
            page.take(json.loads(json.dumps(event)))
        sent = found
        assert page.is_like(found)
    assert {"whole", "delta"} <= set(page.kinds)


def frame_bytes(states: bytes, slots: bytes = b"") -> FrameBytes:
    return FrameBytes(0.0, 0, 0.0, states, states, slots, 0.0)


def test_a_map_of_a_hundred_thousand_frames_changes_by_a_few_bytes() -> None:
    states = bytearray(random.Random(1).randbytes(100_000))
    before = frame_bytes(bytes(states), bytes(1000))
    states[70_000] ^= 1
    event = changes(before, frame_bytes(bytes(states), bytes(1000)))
    assert event is not None
    assert len(json.dumps(event)) < 300
    assert changes(before, before) is None
    assert event["at"] == b64encode(np.array([70_000], "<u4").tobytes()).decode()


def test_a_pool_of_another_size_is_sent_whole() -> None:
    event = changes(frame_bytes(bytes(10)), frame_bytes(bytes(11)))
    assert event is not None
    assert (event["kind"], event["frames"]) == ("whole", 11)


def test_a_dear_map_is_asked_for_less_often() -> None:
    pace = Pace(0.5)
    assert pace.seconds == 0.5
    pace.last_cost_s = 0.01
    assert pace.seconds == 2.0


# ---------------------------------------------------------------- over HTTP


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealHouse]:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    async with real_house(monkeypatch, folder, max_model_len=200) as house:
        yield house


def admin_url(house: RealHouse, path: str) -> str:
    return f"http://127.0.0.1:{house.server.admin_port}/admin/v1/{path}"


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


async def test_the_stream_of_frames_ends_at_what_is_there(house: RealHouse) -> None:
    page, memory = Map(), house.engine.scheduler.memory
    async with house.session.get(admin_url(house, "frames/stream?interval=0.1")) as response:
        assert response.content_type == "text/event-stream"
        coming = events(response)
        page.take(await anext(coming))
        await house.post("/v1/completions", {"prompt": list(range(2, 60)), "max_tokens": 20})
        while True:
            found = frame_map(memory)
            if np.array_equal(page.parts["states"], found.states):
                break
            page.take(await anext(coming))
    async with house.session.get(admin_url(house, "frames/map")) as response:
        again = Map()
        again.take(await response.json())
    assert np.array_equal(again.parts["states"], page.parts["states"])
    assert page.kinds[0] == "whole"
    assert (found.states & 0x0F).any()


async def test_pulses_come_and_counters_grow(house: RealHouse) -> None:
    async with house.session.get(admin_url(house, "pulse"), headers={"Accept": "text/event-stream"}) as response:
        coming = events(response)
        first = await anext(coming)
        await house.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 20, "ignore_eos": True})
        later = await anext(coming)
        while later["counters"]["generated_tokens"] == first["counters"]["generated_tokens"]:
            later = await anext(coming)
    assert later["counters"]["generated_tokens"] == first["counters"]["generated_tokens"] + 20
    assert later["counters"]["ttft_count"] == first["counters"]["ttft_count"] + 1
    assert later["frames"]["total"] == sum(later["frames"][state] for state in ("free", "cached", "active"))


async def test_steps_and_events_come_once_each(house: RealHouse) -> None:
    for view, kept, number in (("steps", "steps", "step"), ("trace", "events", "number")):
        async with house.session.get(admin_url(house, f"{view}/stream?interval=0.1")) as response:
            seen: list[int] = []
            coming = events(response)
            while len(seen) < 6:
                await house.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True})
                seen += [each[number] for each in (await anext(coming))[kept]]
        assert seen == sorted(set(seen)), view


async def test_an_open_stream_does_not_hold_the_server_up(house: RealHouse) -> None:
    """The stream ends by itself, and in full: a handler that had to be cancelled would leave it cut off."""
    response = await house.session.get(admin_url(house, "frames/stream?interval=60"))
    await anext(events(response))
    assert house.server.doors is not None
    await house.server.doors.close()
    await response.content.read()


async def test_wrong_intervals_and_too_many_streams(monkeypatch: pytest.MonkeyPatch, house: RealHouse) -> None:
    for wrong in ("0", "x", "61", "nan", "-1"):
        async with house.session.get(admin_url(house, f"frames/stream?interval={wrong}")) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, "interval")
    monkeypatch.setattr("service.admin_streams.MOST_STREAMS", 1)
    async with house.session.get(admin_url(house, "pulse/stream")) as first:
        await anext(events(first))
        async with house.session.get(admin_url(house, "pulse/stream")) as second:
            assert second.status == 429
    async with house.session.head(admin_url(house, "pulse/stream")) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")


async def test_before_the_model_there_is_nothing_to_stream(start: Start) -> None:
    server = await start(is_loaded=False)
    for path in ("frames/map", "frames/stream", "pulse/stream"):
        async with server.session.get(f"http://127.0.0.1:{server.admin_port}/admin/v1/{path}") as response:
            assert response.status == 503
