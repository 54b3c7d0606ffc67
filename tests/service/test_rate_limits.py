"""How much a tenant may ask: requests and tokens a minute, requests at a time; and what is said to who asks more."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from http_house import Server, Start

from service.engine_client import OpenRequest, OpenSequence
from service.errors import RateLimited
from service.front_end import ApiSettings
from service.questions import AbortRequest, AnyQuestion, Enter, Leave, ListRequests, Spend
from service.rate_limits import RateLimit, RateLimits


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def limits(clock: Clock, **fields: int) -> RateLimits:
    return RateLimits({"batch": RateLimit(**fields), "free": RateLimit()}, clock)


def comes_in(rates: RateLimits, front_end: int = 0) -> bool:
    try:
        rates.enter("batch", front_end)
    except RateLimited:
        return False
    return True


def wait_of(rates: RateLimits, front_end: int = 0) -> int:
    """Of a request that is refused."""
    with pytest.raises(RateLimited) as refused:
        rates.enter("batch", front_end)
    return refused.value.retry_after_s


def test_requests_refill_with_time() -> None:
    """A minute's worth at once, then one each 60 / 6 seconds; what is told to wait for is enough."""
    clock = Clock()
    rates = limits(clock, requests_per_minute=6)
    for _ in range(6):
        assert comes_in(rates)
    assert wait_of(rates) == 10
    clock.now += 4
    assert wait_of(rates) == 6
    clock.now += 6
    assert comes_in(rates)
    assert wait_of(rates) == 10
    clock.now += 3600
    assert [comes_in(rates) for _ in range(7)] == [True] * 6 + [False]


def test_a_refused_request_counts_for_nothing() -> None:
    clock = Clock()
    rates = limits(clock, requests_per_minute=1, max_concurrent_requests=1)
    assert comes_in(rates)
    for _ in range(5):
        assert not comes_in(rates)
    rates.leave("batch", 0)
    clock.now += 60
    assert comes_in(rates)


def test_tokens_may_leave_a_debt_that_holds_up_the_next() -> None:
    clock = Clock()
    rates = limits(clock, tokens_per_minute=600)
    assert comes_in(rates)
    rates.spend("batch", 900)
    assert wait_of(rates) == 31  # 300 of debt, and one token, at ten a second
    clock.now += 31
    assert comes_in(rates)


def test_front_ends_count_together_and_one_that_dies_gives_its_places_back() -> None:
    rates = limits(Clock(), max_concurrent_requests=2)
    assert comes_in(rates)
    assert comes_in(rates, 1)
    assert wait_of(rates, 2) == 1
    rates.forget(1)
    assert comes_in(rates, 2)
    assert not comes_in(rates)
    rates.leave("batch", 2)
    assert comes_in(rates)


def test_only_tenants_with_limits_are_counted() -> None:
    rates = limits(Clock(), requests_per_minute=1)
    assert rates.tenants == {"batch"}
    for tenant in ("free", "unheard of"):
        for _ in range(100):
            rates.enter(tenant, 0)
            rates.spend(tenant, 10**9)
            rates.leave(tenant, 0)
    assert set(rates._open) == {"batch"}


def test_questions_and_settings_survive_the_way_to_another_process() -> None:
    questions = [Enter("a"), Spend("a", 5), Leave("a"), ListRequests("o"), AbortRequest("o", ["x", "y"])]
    for question in questions:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(question), type=AnyQuestion) == question
    settings = ApiSettings(version="1", api_key_file="f", tls_cert="c", tls_key="k", cors_allow_origins=("*",))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(settings), type=ApiSettings) == settings
    requests = [OpenRequest("x", 1.5, [OpenSequence("decode", 1, 0, 2, 9, 0)])]
    kind = ListRequests.answer_type()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(requests), type=kind) == requests


# ---------------------------------------------------------------- over HTTP


async def limited(start: Start, clock: Clock | None = None, **fields: int) -> Server:
    rates = RateLimits({"default": RateLimit(**fields)}, clock or Clock())
    return await start(engine={"is_manual": True, "rates": rates}, limits={"rated_tenants": rates.tenants})


def check_refused(answer: Any, seconds: int) -> None:
    assert (answer.status, answer.error["type"]) == (429, "RateLimitError")
    assert answer.headers["Retry-After"] == str(seconds)


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_at_a_time(start: Start, stream: bool) -> None:
    server = await limited(start, max_concurrent_requests=2)
    running = [asyncio.create_task(server.complete(stream=stream)) for _ in range(2)]
    await server.until(lambda: len(server.engine.lines) == 2)
    check_refused(await server.chat(), 1)
    check_refused(await server.post("/v1/responses", {"input": "a"}), 1)
    answer = await server.post("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]})
    assert (answer.status, answer.json["error"]["type"]) == (429, "rate_limit_error")
    assert (await server.get("/v1/models")).status == 200, "looking is free"
    while server.engine.lines:
        server.engine.tick()
    await asyncio.gather(*running)
    server.engine.is_manual = False
    assert (await server.complete()).status == 200


async def test_a_client_that_leaves_gives_its_place_back(start: Start) -> None:
    server = await limited(start, max_concurrent_requests=1)
    running = asyncio.create_task(server.complete(stream=True))
    await server.until(lambda: len(server.engine.lines) == 1)
    running.cancel()
    await server.until(lambda: server.engine.rates._open["default"].total() == 0)


async def test_a_refused_request_is_not_even_read(start: Start) -> None:
    """Requests a minute count also those that turn out to be wrong; a refused one costs no work."""
    server = await limited(start, requests_per_minute=2)
    for _ in range(2):
        assert (await server.post("/v1/completions", b"{")).status == 400
    check_refused(await server.post("/v1/completions", b"{"), 30)
    check_refused(await server.post("/tokenize", {"prompt": "a"}), 30)
    assert server.engine.submitted == []


async def test_tokens_of_prompt_and_output_are_counted(start: Start) -> None:
    clock = Clock()
    server = await limited(start, clock, tokens_per_minute=60)
    server.engine.is_manual = False
    answer = await server.complete(prompt=[5] * 70, max_tokens=2, ignore_eos=True)
    assert answer.json["usage"]["total_tokens"] == 72
    check_refused(await server.complete(), 13)  # 12 of debt, and one
    clock.now += 13
    assert (await server.complete()).status == 200


async def test_a_tenants_limits_hold_up_itself_alone(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("mine\n")
    rates = RateLimits({"other": RateLimit(requests_per_minute=1)}, Clock())
    server = await start(
        engine={"rates": rates}, limits={"rated_tenants": rates.tenants}, settings={"api_key_file": str(file)}
    )
    for _ in range(5):
        answer = await server.post("/v1/completions", {"prompt": "a"}, headers={"Authorization": "Bearer mine"})
        assert answer.status == 200
