"""What operators do: what each changes, what it refuses, and that the books balance and all get on afterwards."""

import json
from contextlib import suppress
from typing import Any

import pytest
from simulated_executor import expected_output
from stepped_engine import PAGE, SteppedEngine

from mm import Advice
from service.engine_client import BeamSearch, Event, TokenBatch
from service.errors import BadRequest, NotFound
from service.operations import OPERATIONS, CopiesUnderWay


class Listener:
    """A front end that keeps what each Sequence got."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}

    def deliver(self, event: Event) -> None:
        assert isinstance(event, TokenBatch)
        for number, token in zip(event.sequence_ids, event.tokens, strict=True):
            self.tokens.setdefault(number, []).append(token)
        self.ended.update({each.sequence_id: each.reason for each in event.ended})


def house_with_ears(**more: Any) -> tuple[SteppedEngine, Listener]:
    house, ears = SteppedEngine(**more), Listener()
    house.engine.connect(0, ears)
    return house, ears


def state(house: SteppedEngine, of: str) -> Any:
    return json.loads(house.look("sequences/{of}/status", of))


async def steps(house: SteppedEngine, count: int) -> None:
    for _ in range(count):
        await house.step()


async def until_ended(house: SteppedEngine, ears: Listener, count: int) -> None:
    for _ in range(3000):
        if len(ears.ended) == count:
            return
        await house.step()
    raise AssertionError(f"{len(ears.ended)} of {count} have ended")


# ---------------------------------------------------------------- pausing


async def test_a_paused_sequence_stands_still_and_goes_on_with_the_same_tokens() -> None:
    house, ears = house_with_ears()
    number = house.submit([1, 2, 3], 20)
    await steps(house, 6)
    answer = house.do("sequences/{of}/pause", f"0.{number}")
    assert (answer["done"], answer["before"]["state"], answer["after"]["state"]) == (True, "decode", "paused")
    await steps(house, 3)
    had = len(ears.tokens[number])
    await steps(house, 10)
    assert len(ears.tokens[number]) == had < 20
    assert state(house, f"0.{number}")["wait_reason"] == "paused"
    assert answer["after"]["frames"] > 0, "its pages stay"
    assert house.do("sequences/{of}/pause", f"0.{number}")["after"]["state"] == "paused"
    house.do("sequences/{of}/resume", f"0.{number}")
    await until_ended(house, ears, 1)
    assert ears.tokens[number] == expected_output([1, 2, 3], 20)
    house.memory.check_invariants()


async def test_the_pages_of_a_paused_one_go_to_who_needs_them() -> None:
    """It holds up nobody: not for frames, not for rows."""
    house, ears = house_with_ears(frames=20, slots=0)
    first = house.submit([1] * 30, 40)
    await steps(house, 8)
    house.do("sequences/{of}/pause", f"0.{first}")
    others = [house.submit([2 + i] * 30, 40) for i in range(3)]
    await until_ended(house, ears, 3)
    assert [ears.tokens[number] for number in others] == [expected_output([2 + i] * 30, 40) for i in range(3)]
    house.do("sequences/{of}/resume", f"0.{first}")
    await until_ended(house, ears, 4)
    assert ears.tokens[first] == expected_output([1] * 30, 40)


async def test_all_rows_paused_is_no_dead_end() -> None:
    house, ears = house_with_ears()
    paused = [house.submit([i, i], 30) for i in range(12)]
    for _ in range(2):
        await steps(house, 6)
        for number in paused:
            house.do("sequences/{of}/pause", f"0.{number}")
    last = house.submit([40, 41], 10)
    await until_ended(house, ears, 1)
    assert ears.tokens[last] == expected_output([40, 41], 10)
    for number in paused:
        house.do("sequences/{of}/resume", f"0.{number}")
    await until_ended(house, ears, 13)
    for i, number in enumerate(paused):
        assert ears.tokens[number] == expected_output([i, i], 30)


@pytest.mark.parametrize("when", range(1, 9))
async def test_a_sibling_can_be_paused_at_any_step(when: int) -> None:
    """One that computes the prompt, or whom the others would fork, must not hold its relatives up."""
    house, ears = house_with_ears()
    first = house.submit(list(range(40)), 10, choices=3)
    await steps(house, when)
    house.do("sequences/{of}/pause", f"0.{first}")
    await until_ended(house, ears, 2)
    house.do("sequences/{of}/resume", f"0.{first}")
    await until_ended(house, ears, 3)
    for number in range(first, first + 3):
        assert ears.tokens[number] == expected_output(list(range(40)), 10)


@pytest.mark.parametrize("slots", [0, 24])
async def test_who_is_resumed_with_all_pages_in_frames_runs_again_at_once(slots: int) -> None:
    """And is said to: nothing of it is in swap, where there may be none at all."""
    house, ears = house_with_ears(slots=slots)
    number = house.submit([1, 2, 3], 20)
    await steps(house, 6)
    house.do("sequences/{of}/pause", f"0.{number}")
    await steps(house, 3)
    assert house.do("sequences/{of}/resume", f"0.{number}")["after"]["state"] == "decode"
    assert json.loads(house.look("scheduler"))["swapped"] == 0
    await until_ended(house, ears, 1)
    assert ears.tokens[number] == expected_output([1, 2, 3], 20)


async def test_who_is_resumed_with_pages_in_swap_is_swapped_until_they_are_back() -> None:
    house, ears = house_with_ears()
    house.executor.end_swaps = lambda ticket: True
    number = house.submit([1] * 20, 30)
    await steps(house, 6)
    house.do("sequences/{of}/swap_out", f"0.{number}")
    await steps(house, 10)
    assert house.do("sequences/{of}/resume", f"0.{number}")["after"]["state"] == "swapped"
    await until_ended(house, ears, 1)
    assert ears.tokens[number] == expected_output([1] * 20, 30)


@pytest.mark.parametrize("seed", range(4))
async def test_any_pause_resume_swap_and_abort_under_load(seed: int) -> None:
    """Whatever is done when: no token is lost or repeated, every page comes back, the books balance at each step."""
    house, ears = house_with_ears(seed=seed)
    prompts: dict[int, tuple[list[int], int]] = {}
    chance = house.chance
    for _ in range(150):
        if chance.random() < 0.4:
            prompt = [chance.randrange(50) for _ in range(chance.randrange(1, 30))]
            length = chance.randrange(1, 30)
            prompts[house.submit(prompt, length)] = prompt, length
        open_ones = [each["id"] for each in json.loads(house.look("sequences", limit=1000))["sequences"]]
        if open_ones and chance.random() < 0.7:
            actions = ["pause", "resume", "resume", "swap_out", "swap_in", "madvise", "oom_score_adj", "abort"]
            action = chance.choice(actions)
            body: dict[str, Any] = {}
            if action == "madvise":
                body = {"advice": chance.choice([str(each) for each in Advice])}
            elif action == "oom_score_adj":
                body = {"oom_score_adj": chance.randrange(-1000, 1001)}
            with suppress(BadRequest):  # no memory to move, or no slots for it
                house.do(f"sequences/{{of}}/{action}", chance.choice(open_ones), **body)
        await house.step()
        audit = json.loads(house.look("audit"))
        assert audit["balanced"], audit["discrepancies"]
        assert audit["proportional"] == pytest.approx(audit["active"], abs=1e-4)
    for each in json.loads(house.look("sequences", limit=1000))["sequences"]:
        house.do("sequences/{of}/resume", each["id"])
    await until_ended(house, ears, len(prompts))
    for number, (prompt, length) in prompts.items():
        expected = expected_output(prompt, length)
        got = ears.tokens.get(number, [])
        assert got == expected[: len(got)]
        assert ears.ended[number] == "abort" or got == expected
    assert house.memory.available_frames == house.memory.frames.total


async def test_an_aborted_sequence_ends_and_its_pages_come_back() -> None:
    house, ears = house_with_ears()
    number = house.submit([1, 2, 3], 60)
    await steps(house, 5)
    answer = house.do("sequences/{of}/abort", f"0.{number}")
    assert (answer["before"]["state"], answer["after"]["state"]) == ("decode", "ended")
    assert ears.ended == {number: "abort"}
    await steps(house, 3)
    assert house.memory.available_frames == house.memory.frames.total
    with pytest.raises(NotFound):
        house.do("sequences/{of}/abort", f"0.{number}")


async def test_a_paused_sequence_ends_at_its_deadline_though_nothing_runs() -> None:
    house, ears = house_with_ears()
    number = house.submit([1, 2, 3], 60, timeout_s=5.0)
    await steps(house, 5)
    house.do("sequences/{of}/pause", f"0.{number}")
    await steps(house, 5)
    assert not house.engine.scheduler.has_work
    assert house.engine.scheduler.next_deadline_s is not None
    house.now += 5
    assert house.engine.scheduler.is_due(house.now)
    await house.engine.step()
    assert ears.ended == {number: "timeout"}


async def test_beams_cannot_be_paused_but_their_search_aborted() -> None:
    house, ears = house_with_ears()
    number = house.submit([1, 2, 3], 20, beam_search=BeamSearch(2))
    await steps(house, 4)
    beams = [each["id"] for each in json.loads(house.look("sequences"))["sequences"] if each["is_beam"]]
    for of in (f"0.{number}", *beams):
        with pytest.raises(BadRequest, match="search"):
            house.do("sequences/{of}/pause", of)
    with pytest.raises(BadRequest, match="choices"):
        house.do("sequences/{of}/abort", beams[0])
    house.do("sequences/{of}/abort", f"0.{number}")
    assert ears.ended == {number: "abort"}
    assert house.memory.available_frames == house.memory.frames.total


# ---------------------------------------------------------------- swap, scores


async def test_what_is_swapped_out_stays_out_until_it_is_swapped_in() -> None:
    house, ears = house_with_ears()
    house.executor.end_swaps = lambda ticket: True
    number = house.submit([1] * 20, 30)
    await steps(house, 6)
    of = f"0.{number}"
    assert house.do("sequences/{of}/swap_out", of)["after"]["state"] == "paused"
    await steps(house, 10)
    there = house.do("sequences/{of}/pause", of)["after"]
    assert (there["frames"], there["swap"]) == (0, -(-(20 + len(ears.tokens[number]) - 1) // PAGE))
    house.do("sequences/{of}/swap_in", of)
    await until_ended(house, ears, 1)
    assert ears.tokens[number] == expected_output([1] * 20, 30)


async def test_without_slots_nothing_is_swapped_out() -> None:
    house, _ = house_with_ears(slots=0)
    number = house.submit([1] * 20, 30)
    await steps(house, 6)
    with pytest.raises(BadRequest, match="no swap area"):
        house.do("sequences/{of}/swap_out", f"0.{number}")
    assert state(house, f"0.{number}")["state"] == "decode"


async def test_who_may_never_be_preempted_is_not() -> None:
    house, ears = house_with_ears()
    numbers = [house.submit([i] * 20, 40) for i in range(4)]
    await steps(house, 4)
    kept = numbers[-1]  # the youngest goes first by itself
    assert house.do("sequences/{of}/oom_score_adj", f"0.{kept}", oom_score_adj=-1000)["after"]["oom_score_adj"] == -1000
    await steps(house, 30)
    assert house.engine.scheduler.preemptions > 0
    assert state(house, f"0.{kept}")["preemptions"] == 0
    await until_ended(house, ears, 4)


async def test_a_priority_moves_one_in_the_queue_and_among_those_that_run() -> None:
    house, ears = house_with_ears(ageing_s=10.0)
    running = house.submit([9] * 20, 50)
    await steps(house, 4)
    waiting = [house.submit([i] * 20, 20) for i in range(12)]
    await steps(house, 1)
    last = waiting[-1]
    assert json.loads(house.look("scheduler"))["queue"][0]["id"] != f"0.{last}"
    done = house.do("sequences/{of}/priority", f"0.{last}", priority=-5)
    assert (done["before"]["priority"], done["after"]["priority"]) == (0, -5)
    assert json.loads(house.look("scheduler"))["queue"][0]["id"] == f"0.{last}"
    house.do("sequences/{of}/priority", f"0.{running}", priority=5)
    house.memory.check_invariants()
    await until_ended(house, ears, 13)
    assert list(ears.ended).index(last) < list(ears.ended).index(running)
    without, _ = house_with_ears()
    number = without.submit([1], 5)
    await steps(without, 1)
    with pytest.raises(BadRequest, match="scheduling-policy"):
        without.do("sequences/{of}/priority", f"0.{number}", priority=1)


async def test_a_swap_out_while_swapping_rests_is_told_so() -> None:
    house, _ = house_with_ears(slots=40)
    house.executor.end_swaps = lambda ticket: False
    numbers = [house.submit([salt] * 10, 60) for salt in (1, 2)]
    await steps(house, 4)
    house.do("sequences/{of}/swap_out", f"0.{numbers[0]}")
    await steps(house, 4)
    with pytest.raises(BadRequest, match="a copy has failed"):
        house.do("sequences/{of}/swap_out", f"0.{numbers[1]}")


@pytest.mark.parametrize("action", ["swap_out", "madvise"])
@pytest.mark.parametrize("is_paused", [False, True])
async def test_a_swap_out_that_meets_swap_max_is_told_so(action: str, is_paused: bool) -> None:
    house, _ = house_with_ears(slots=40)
    house.do("tenants/{of}", "a", swap_max=0)
    number = house.submit([1] * 10, 60, tenant="a")
    await steps(house, 4)
    if is_paused and action == "swap_out":
        house.do("sequences/{of}/pause", f"0.{number}")
    body = {"advice": "pageout"} if action == "madvise" else {}
    with pytest.raises(BadRequest, match="swap_max of its tenant is 0 slots, and 0 of them are in use"):
        house.do(f"sequences/{{of}}/{action}", f"0.{number}", **body)


# ---------------------------------------------------------------- the page cache


async def test_a_pinned_prefix_stays_until_it_is_unpinned() -> None:
    house, ears = house_with_ears()
    prompt = list(range(16))
    house.submit(prompt, 2)
    await until_ended(house, ears, 1)
    done = house.do("page_cache/pin", tokens=prompt, owner="me", ttl_s=60)["after"]
    assert (done["tokens"], done["frames"], done["pinned_frames"]) == (16, 4, 4)
    house.do("page_cache/drop", level=1)
    assert len(house.memory.cache) == 4
    listed = json.loads(house.look("sequences"))["holders"]
    assert [(each["id"], each["rss"]) for each in listed] == [("transfer", 0), ("pin 1", 4)]
    hash_ = json.loads(house.look("page_cache"))["top"][0]["hash"]
    again = house.do("page_cache/pin", hash=hash_, owner="you")["after"]
    assert house.do("page_cache/unpin", owner="me")["after"]["ended"] == [1]
    assert house.do("page_cache/unpin", pin=again["pin"])["after"] == {"pinned_frames": 0, "ended": [2]}
    assert house.do("page_cache/drop", level=3)["after"] == {"cached_pages": 0, "shadows": 0}
    house.memory.check_invariants()


async def test_a_cached_prefix_goes_to_swap_and_back_and_is_forgotten_as_advised() -> None:
    house, ears = house_with_ears()
    house.executor.end_swaps = lambda ticket: True
    prompt = list(range(16))
    house.submit(prompt, 2)
    await until_ended(house, ears, 1)

    async def advised(advice: str) -> Any:
        answer = house.do("page_cache/madvise", tokens=prompt, advice=advice)
        await steps(house, 2)
        assert not house.memory.is_copying
        house.memory.check_invariants()
        return answer["after"]

    assert await advised("cold") == {"frames": 4, "swap_alone": 0, "advice": "cold"}
    await advised("pageout")
    slots = json.loads(house.look("frames/summary"))["slots"]
    assert slots["cached"] == 4, "the only copies are in swap"
    assert (await advised("willneed"))["swap_alone"] == 4, "so far"
    assert (await advised("cold"))["frames"] == 4
    house.submit(prompt, 2)
    await until_ended(house, ears, 2)
    assert ears.tokens[1] == ears.tokens[2]
    assert await advised("dontneed") == {"frames": 0, "swap_alone": 0, "advice": "dontneed"}
    with pytest.raises(BadRequest, match="nothing of this prefix"):
        house.do("page_cache/madvise", tokens=prompt, advice="cold")


async def test_what_is_not_cached_or_too_much_is_not_pinned() -> None:
    house, ears = house_with_ears()
    for body in ({"tokens": [1, 2, 3]}, {"hash": "0" * 16}, {"tokens": [10**6]}):
        with pytest.raises(BadRequest):
            house.do("page_cache/pin", owner="me", **body)
    house.submit([3] * 50, 1)
    await until_ended(house, ears, 1)
    with pytest.raises(BadRequest, match="quota"):
        house.do("page_cache/pin", owner="me", tokens=[3] * 50)
    assert house.memory.pins.pages == 0


async def test_a_pin_lowers_what_one_request_may_hold_and_never_strands_one() -> None:
    house, ears = house_with_ears(frames=24)
    house.submit(list(range(12)), 1)
    await until_ended(house, ears, 1)
    whole = house.submit([5] * 10, 70)  # 80 tokens: 20 of 24 frames
    await steps(house, 3)
    house.do("page_cache/pin", owner="me", tokens=list(range(12)))
    assert house.engine.limits.max_request_tokens == (24 - 3) * PAGE
    house.submit([6] * 16, 40)
    await until_ended(house, ears, 3)
    assert ears.ended[whole] == "length"


# ---------------------------------------------------------------- the whole


async def test_watermarks_overcommit_and_limits_take_effect() -> None:
    house, _ = house_with_ears()
    done = house.do("watermarks", low=6, high=9)
    assert done["after"] == {"min": 0, "low": 6, "high": 9}
    assert house.memory.reclaimer.watermarks.high == 9
    for wrong in ({"low": 10}, {"high": 41, "low": 1}):
        with pytest.raises(BadRequest):
            house.do("watermarks", **wrong)
    assert house.do("overcommit", mode="strict") | {"done": True} == {
        "done": True, "before": {"mode": "heuristic"}, "after": {"mode": "strict"},
    }  # fmt: skip
    done = house.do("tenants/{of}", "new", max=10, high=8, isolate=True)
    assert done["before"]["max"] == "max"
    assert (done["after"]["max"], done["after"]["isolate"]) == (10, True)
    assert house.engine.limits.pool_tokens("new") == 10 * PAGE
    assert house.do("tenants/{of}", "new", max="max", high="max")["after"]["max"] == "max"
    with pytest.raises(BadRequest, match="0 <= min <= low <= high <= max must hold, got min 0, low 3, high 2, max max"):
        house.do("tenants/{of}", "new", low=3, high=2)
    with pytest.raises(BadRequest, match="0 <= min <= low <= high must hold, got min 0, low 7, high 3"):
        house.do("watermarks", low=7, high=3)


@pytest.mark.parametrize(
    ("was", "given", "becomes"),
    [
        ({}, {"max": 5}, (0, 0, 5, 5)),
        ({"max": 5}, {"max": "max"}, (0, 0, "max", "max")),
        ({"high": 8, "max": 12}, {"max": 10}, (0, 0, 8, 10)),
        ({"high": 8, "max": 12}, {"max": 5}, (0, 0, 5, 5)),
        ({"min": 3, "low": 6}, {"max": 4}, (3, 4, 4, 4)),
        ({"max": 9}, {"min": 3}, (3, 3, 9, 9)),
    ],
)
async def test_limits_that_are_not_given_move_out_of_the_way(
    was: dict[str, Any], given: dict[str, Any], becomes: tuple[Any, ...]
) -> None:
    """As in a cgroup, where max counts whatever high is."""
    house, _ = house_with_ears()
    house.do("tenants/{of}", "new", **was)
    after = house.do("tenants/{of}", "new", **given)["after"]
    assert tuple(after[name] for name in ("min", "low", "high", "max")) == becomes


@pytest.mark.parametrize("given", [{"min": 12}, {"low": 12}, {"min": 5, "max": 4}])
async def test_protection_never_raises_a_limit(given: dict[str, Any]) -> None:
    house, _ = house_with_ears()
    before = house.do("tenants/{of}", "new", max=10)["after"]
    with pytest.raises(BadRequest, match="must hold"):
        house.do("tenants/{of}", "new", **given)
    assert house.do("tenants/{of}", "new", weight=100)["after"] == before


async def test_limits_that_would_strand_an_open_sequence_are_refused() -> None:
    house, ears = house_with_ears()
    number = house.submit([1] * 10, 60, tenant="a")
    await steps(house, 3)
    with pytest.raises(BadRequest, match=rf"0\.{number}"):
        house.do("tenants/{of}", "a", max=10, high=10)
    with pytest.raises(BadRequest):
        house.do("tenants/{of}", "b", min=30, low=30)
    assert house.memory.tenants.limits[house.memory.tenants.id("a")].max > 10
    await until_ended(house, ears, 1)
    house.do("tenants/{of}", "a", max=10, high=10)
    late = house.submit([1] * 10, 60, tenant="a")  # its front end had not heard of it
    await until_ended(house, ears, 2)
    assert ears.ended[late] == "error"


@pytest.mark.parametrize("name", ["", "a\0", "\x1b[31m", "a\nb", "\u202e", "a" * 129])
async def test_a_name_that_would_spoil_tables_is_no_tenant(name: str) -> None:
    house, _ = house_with_ears()
    with pytest.raises(BadRequest, match="1 to 128 printable characters"):
        house.do("tenants/{of}", name, weight=3)
    assert name not in house.memory.tenants.names


async def test_a_tenant_is_known_by_what_was_done_not_by_what_was_refused_or_looked_up() -> None:
    """There are places for some hundred tenants."""
    house, ears = house_with_ears()
    number, known = house.submit([1] * 10, 60), list(house.memory.tenants.names)
    await steps(house, 3)
    for refused in ({"min": 41, "low": 41}, {"min": 39, "low": 39}):
        with pytest.raises(BadRequest):
            house.do("tenants/{of}", "new", **refused)
    house.look("page_cache", "", prefix_of="1,2,3", tenant="other")
    with pytest.raises(BadRequest):
        house.do("page_cache/pin", owner="o", tokens=[9, 9], tenant="third")
    assert house.memory.tenants.names == known
    assert house.do("tenants/{of}", "new", max=10)["after"]["max"] == 10
    assert house.memory.tenants.names == [*known, "new"]
    await until_ended(house, ears, 1)
    assert ears.ended == {number: "length"}


async def test_a_drain_admits_nothing_and_ends_the_rest_in_time() -> None:
    house, ears = house_with_ears()
    house.engine.open()
    house.submit([1, 2], 60)
    await steps(house, 3)
    done = house.do("drain", timeout_s=7)
    assert (done["before"]["state"], done["after"]["state"]) == ("ready", "draining")
    ((seconds, end),) = house.later
    assert seconds == 7
    end()
    await steps(house, 2)
    assert list(ears.ended.values()) == ["abort"]


async def test_each_action_is_in_the_trace() -> None:
    house, _ = house_with_ears()
    number = house.submit([1, 2, 3], 60)
    await steps(house, 3)
    house.do("sequences/{of}/pause", f"0.{number}")
    house.do("overcommit", mode="always")
    facts = json.loads(house.look("trace", event="action"))
    assert [event["request"] for event in facts["events"]] == ["request 1", ""]
    assert [done["action"] for done in facts["actions"]] == ["sequences/0.1/pause", "overcommit"]
    assert facts["actions"][1]["after"] == {"mode": "always"}


def test_there_is_an_operation_for_each_action_that_is_not_another_s() -> None:
    assert {"sequences/{of}/abort", "page_cache/pin", "watermarks", "drain"} <= OPERATIONS.keys()


# ---------------------------------------------------------------- resizing


async def test_a_smaller_pool_and_a_larger_one_again() -> None:
    house, ears = house_with_ears()
    numbers = [house.submit([i] * 20, 30) for i in range(4)]
    await steps(house, 12)
    done = house.do("resize", frames=24, slots=4)
    assert (done["before"], done["after"]) == ({"frames": 40, "slots": 24}, {"frames": 24, "slots": 4})
    assert house.executor.resized == (24, 4)
    assert house.engine.limits.max_request_tokens == 24 * PAGE
    assert json.loads(house.look("frames", limit=1000))["total"] == 24
    assert len(house.inspector.map_frames().states) == 24
    await steps(house, 5)
    house.do("resize", frames=40)
    await until_ended(house, ears, 4)
    for i, number in enumerate(numbers):
        assert ears.tokens[number] == expected_output([i] * 20, 30)


@pytest.mark.parametrize("seed", range(4))
async def test_resizing_under_load_loses_no_token(seed: int) -> None:
    """Whatever runs, waits, is in swap, pinned or paused: it gets on, in other frames, with the same tokens."""
    house, ears = house_with_ears(seed=seed)
    chance, prompts, refused = house.chance, dict[int, tuple[list[int], int]](), 0
    for _ in range(150):
        if chance.random() < 0.4:
            prompt = [chance.randrange(50) for _ in range(chance.randrange(1, 20))]
            length = chance.randrange(1, 20)
            prompts[house.submit(prompt, length)] = prompt, length
        if chance.random() < 0.2:
            house.act_on_pins()
        if chance.random() < 0.3:
            try:
                house.do("resize", frames=chance.randrange(10, 41), slots=chance.randrange(0, 25))
            except (BadRequest, CopiesUnderWay):
                refused += 1
        await house.step()
        audit = json.loads(house.look("audit"))
        assert audit["balanced"], audit["discrepancies"]
        assert audit["total"] == audit["free"] + audit["cached"] + audit["active"] == house.memory.frames.usable
    for pin in list(house.memory.pins.held):
        house.memory.unpin(pin)
    await until_ended(house, ears, len(prompts))
    for number, (prompt, length) in prompts.items():
        assert ears.tokens[number] == expected_output(prompt, length)
    assert refused < 45


async def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    house, ears = house_with_ears()
    number = house.submit([1] * 10, 60)
    await steps(house, 3)
    for body in ({"frames": 41}, {"slots": 25}, {"frames": 10}):
        with pytest.raises(BadRequest):
            house.do("resize", **body)
    house.executor.resizes_frames = False
    with pytest.raises(BadRequest, match="kv-cache-max"):
        house.do("resize", frames=30)
    house.do("resize", slots=10)
    assert (house.memory.frames.usable, house.memory.swap.usable) == (40, 10)
    await until_ended(house, ears, 1)
    assert ears.ended == {number: "length"}
