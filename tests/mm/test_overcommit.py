"""What may be promised, and what a request would meet if it came now."""

import numpy as np
import pytest
from memory_house import House

from mm import OverCommit, OvercommitMode, TenantLimits, WouldRun

P = 4


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 100_000, count).tolist()


def test_strict_promises_no_more_than_there_is() -> None:
    house = House(frames=10)
    house.memory.ledger.mode = OvercommitMode.STRICT
    first = house.memory.create("first", max_tokens=6 * P)
    with pytest.raises(OverCommit, match="promising 5 frames on top of 6 exceeds the commit limit of 10"):
        house.memory.create("second", max_tokens=5 * P)
    house.memory.create("third", max_tokens=4 * P)
    assert house.memory.information().committed_frames == 10
    first.release()
    house.memory.create("second", max_tokens=5 * P)


def test_heuristic_refuses_only_what_can_never_fit_and_always_refuses_nothing() -> None:
    house = House(frames=10)
    for name in ("a", "b", "c"):
        house.memory.create(name, max_tokens=10 * P)
    with pytest.raises(OverCommit):
        house.memory.create("d", max_tokens=11 * P)
    house.memory.ledger.mode = OvercommitMode.ALWAYS
    house.memory.create("d", max_tokens=11 * P)
    assert house.memory.information().committed_frames == 41


def test_shared_pages_are_promised_once() -> None:
    house, prompt = House(), tokens(4 * P, 1)
    house.run(prompt)
    match = house.lookup([*prompt, 1])
    house.memory.create("sharing", match=match, max_tokens=6 * P)
    assert house.memory.information().committed_frames == 2


def test_a_fork_promises_what_it_may_come_to_own() -> None:
    house = House(frames=10)
    house.memory.ledger.mode = OvercommitMode.STRICT
    space = house.memory.create("parent", max_tokens=5 * P)
    house.device.carry_out(space.grow(2 * P + 1))
    space.fork("child")
    assert house.memory.information().committed_frames == 5 + 3
    with pytest.raises(OverCommit):
        space.fork("one too many")


def test_pinned_frames_cannot_be_promised() -> None:
    house, prompt = House(frames=16), tokens(2 * P, 1)
    house.run(prompt)
    house.memory.pin(house.memory.chain(np.array(prompt, np.int32)), "admin")
    house.memory.ledger.mode = OvercommitMode.STRICT
    with pytest.raises(OverCommit, match="commit limit of 14"):
        house.memory.create("all of it", max_tokens=15 * P)


def test_a_dry_run_says_what_would_be_needed_reused_and_evicted() -> None:
    house, prompt = House(frames=8), tokens(3 * P, 1)
    house.run(prompt)
    house.run(tokens(3 * P, 2))
    chain = house.memory.chain(np.array([*prompt, *tokens(3 * P, 3)], np.int32))
    before = house.memory.information()
    forecast = house.memory.would_run(chain, 8 * P)
    assert (forecast.verdict, forecast.limit) == (WouldRun.NOW, None)
    assert (forecast.pages, forecast.pages_at_limit, forecast.reusable_pages) == (6, 8, 3)
    assert (forecast.frames_needed, forecast.would_evict) == (3, 1)
    assert house.memory.information() == before


def test_a_dry_run_names_the_limit_that_is_met() -> None:
    house = House(frames=8, rows=2)
    guest = house.start(tokens(5 * P, 1))
    chain = house.memory.chain(np.array(tokens(4 * P, 2), np.int32), tenant="a")
    waiting = house.memory.would_run(chain, 5 * P, "a")
    assert (waiting.verdict, waiting.limit) == (WouldRun.WAIT, "needs 4 frames: 3 free, 0 reclaimable")
    never = house.memory.would_run(chain, 9 * P, "a")
    assert (never.verdict, never.limit) == (WouldRun.NEVER, "36 tokens, and one Sequence can hold 32")
    house.memory.tenants.set_limits("a", TenantLimits(max=3, high=3))
    assert house.memory.would_run(chain, 5 * P, "a").verdict is WouldRun.NEVER
    house.memory.tenants.set_limits("a", TenantLimits())
    house.memory.ledger.mode = OvercommitMode.STRICT
    house.memory.create("promise", max_tokens=7 * P)
    limit = house.memory.would_run(chain, 5 * P, "a").limit
    assert limit == "all 2 page table rows are taken"
    guest.space.release()
    limit = house.memory.would_run(chain, 5 * P, "a").limit
    assert limit == "promising 5 frames on top of 7 exceeds the commit limit of 8"
