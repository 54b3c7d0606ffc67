"""Submits whose grammar is being compiled: what is known of them meanwhile, and how they end."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from real_house import RealHouse, real_house
from tiny_model import write_tiny_model

from model.step_plan import SamplingParameters
from service.constraint import Constraint
from service.engine_client import Cancel, Ended, EngineDied, Event, Sibling, Submit
from service.grammars import Grammars

OWN = 7  # the number of this test's front end


class Receiver:
    """What the engine tells this front end."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, Ended] = {}

    def deliver(self, event: Event) -> None:
        if isinstance(event, EngineDied):
            return  # the house is closed
        for sequence_id, token in zip(event.sequence_ids, event.tokens, strict=True):
            self.tokens.setdefault(sequence_id, []).append(token)
        self.ended |= {ended.sequence_id: ended for ended in event.ended}

    async def until(self, *sequence_ids: int) -> None:
        async with asyncio.timeout(20):
            while not self.ended.keys() >= set(sequence_ids):  # noqa: ASYNC110 - batches announce nothing
                await asyncio.sleep(0.001)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The compiler waits for it."""
    gate, compile_ = threading.Event(), Grammars._compile

    def slow(self: Grammars, constraint: Constraint) -> Any:
        gate.wait(20)
        return compile_(self, constraint)

    monkeypatch.setattr(Grammars, "_compile", slow)
    yield gate
    gate.set()


@pytest_asyncio.fixture
async def house(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[RealHouse]:
    async with real_house(monkeypatch, write_tiny_model(tmp_path), max_num_seqs=8) as running:
        yield running


def submit(sequence_id: int, constraint: Constraint | None, *, siblings: int = 0, **fields: Any) -> Submit:
    return Submit(
        sequence_id,
        f"r{sequence_id}",
        [5, 6, 7],
        20,
        SamplingParameters(temperature=0.0),
        [2],
        owner="me",
        constraint=constraint,
        siblings=[Sibling(sequence_id + i, i) for i in range(1, siblings + 1)],
        **fields,
    )


async def test_others_run_meanwhile_and_the_held_one_then(house: RealHouse, gate: threading.Event) -> None:
    receiver = Receiver()
    house.engine.connect(OWN, receiver)
    house.engine.post(OWN, submit(1, Constraint("regex", "[a-f]{4}"), siblings=1))
    house.engine.post(OWN, submit(10, None))
    await receiver.until(10)
    assert not receiver.ended.keys() & {1, 2}
    (request,) = house.engine.open_requests("me")
    assert (request.id, [each.state for each in request.sequences]) == ("r1", ["queued", "queued"])
    assert house.engine.queue.requests == 2
    gate.set()
    await receiver.until(1, 2)
    assert [len(receiver.tokens[i]) for i in (1, 2)] == [4, 4]
    assert {receiver.ended[i].reason for i in (1, 2)} == {"stop"}
    assert (house.engine.queue.requests, len(house.engine.held)) == (0, 0)


async def test_who_leaves_meanwhile_never_runs(house: RealHouse, gate: threading.Event) -> None:
    """One choice is cancelled, one request aborted; their siblings and others are not."""
    receiver = Receiver()
    house.engine.connect(OWN, receiver)
    house.engine.post(OWN, submit(1, Constraint("regex", "[a-f]{4}"), siblings=2))
    house.engine.post(OWN, submit(10, Constraint("regex", "[a-f]{5}")))
    await asyncio.sleep(0.05)
    house.engine.post(OWN, Cancel(2))
    assert house.engine.abort("me", ["r10"]) == 1
    assert house.engine.abort("you", ["r1"]) == 0
    await asyncio.sleep(0.05)
    assert not receiver.ended
    gate.set()
    await receiver.until(1, 2, 3, 10)
    assert {i: receiver.ended[i].reason for i in (1, 2, 3, 10)} == {1: "stop", 2: "abort", 3: "stop", 10: "abort"}
    assert receiver.tokens.keys() == {1, 3}


async def test_what_cannot_be_compiled_ends_with_the_reason_and_nothing_is_left(house: RealHouse) -> None:
    receiver = Receiver()
    house.engine.connect(OWN, receiver)
    house.engine.post(OWN, submit(1, Constraint("regex", "(["), siblings=1))
    await receiver.until(1, 2)
    for i in (1, 2):
        assert receiver.ended[i].reason == "error"
        assert receiver.ended[i].is_refused
        assert "unclosed" in receiver.ended[i].message
    assert (house.engine.queue.requests, len(house.engine.held)) == (0, 0)


@pytest.mark.parametrize("fault", [ZeroDivisionError, BaseException])
async def test_a_compiler_that_breaks_ends_the_request_as_a_fault_of_ours(
    house: RealHouse, monkeypatch: pytest.MonkeyPatch, fault: type[BaseException]
) -> None:
    def broken(self: Grammars, constraint: Constraint) -> Any:
        raise fault

    receiver = Receiver()
    house.engine.connect(OWN, receiver)
    with monkeypatch.context() as patched:
        patched.setattr(Grammars, "_compile", broken)
        house.engine.post(OWN, submit(1, Constraint("regex", "[a-f]{4}"), siblings=1))
        await receiver.until(1, 2)
    for i in (1, 2):
        assert (receiver.ended[i].reason, receiver.ended[i].is_refused) == ("error", False)
    assert (house.engine.queue.requests, len(house.engine.held)) == (0, 0)
    house.engine.post(OWN, submit(5, Constraint("regex", "[a-f]{4}")))
    await receiver.until(5)
    assert receiver.ended[5].reason == "stop"


async def test_a_drain_waits_for_what_is_held(house: RealHouse, gate: threading.Event) -> None:
    receiver = Receiver()
    house.engine.connect(OWN, receiver)
    house.engine.post(OWN, submit(1, Constraint("regex", "[a-f]{4}")))
    drained = asyncio.ensure_future(house.engine.drained())
    await asyncio.sleep(0.05)
    assert not drained.done()
    gate.set()
    await receiver.until(1)
    await asyncio.wait_for(drained, 20)


async def test_the_deadline_counts_from_when_it_came(house: RealHouse, gate: threading.Event) -> None:
    receiver = Receiver()
    house.engine.connect(OWN, receiver)
    house.engine.post(OWN, submit(1, Constraint("regex", "[a-f]{4}"), timeout_s=0.01))
    await asyncio.sleep(0.05)
    gate.set()
    await receiver.until(1)
    assert receiver.ended[1].reason == "timeout"
