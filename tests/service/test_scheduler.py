"""What each step does, without time, threads or a network: a simulated executor shows whether every token is right."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_driver import make, prompt_of
from simulated_executor import expected_output

from mm import OvercommitMode, Watermarks
from model.step_plan import FED_BACK
from service.request import Sequence, State


def test_one_sequence_ends_at_its_limit_with_its_own_tokens() -> None:
    driver = make()
    driver.submit(prompt_of(5), 7)
    driver.run()
    assert driver.output[0] == expected_output(prompt_of(5), 7)
    assert driver.ended[0].reason == "length"
    assert driver.ended[0].output_tokens == 7


def test_plans_name_who_begins_with_the_same_frames() -> None:
    """One object while the same rows decode, so that an executor prepares once; another when one of them ends."""
    driver = make()
    for tail, max_tokens in ((1, 8), (2, 12), (3, 12)):
        driver.submit([*prompt_of(9), tail], max_tokens)
    driver.submit(prompt_of(9, salt=1), 12)
    driver.run()
    groups = [plan.groups for plan in driver.executor.plans if plan.decodes == len(plan.rows) == 4]
    assert groups[0] is not None
    assert groups[0].pages.tolist() == [2]  # pages of 4 tokens; the third has each one's own
    assert len(groups[0].members) == 3
    assert all(other is groups[0] for other in groups)
    later = [plan.groups for plan in driver.executor.plans if plan.decodes == len(plan.rows) == 3]
    assert len(later[0].members) == 2
    assert driver.executor.plans[-1].groups is None or len(driver.executor.plans[-1].rows) > 1


def test_an_end_token_ends_it_and_the_step_in_flight_leaves_no_trace() -> None:
    full = expected_output(prompt_of(5), 40)
    end = full[10]
    driver = make()
    driver.submit(prompt_of(5), 40, end_ids=(end,))
    driver.run()
    assert driver.output[0] == full[: full.index(end) + 1]
    assert (driver.ended[0].reason, driver.ended[0].end_token) == ("stop", end)


def test_what_a_step_will_bring_is_known_before_its_commit_unless_something_ends() -> None:
    """The driver compares the two at each commit, here and in all tests below."""
    driver = make()
    driver.submit(prompt_of(3), 3)
    driver.submit(prompt_of(2), 1)  # its end comes with the first token of the other
    driver.run()
    assert driver.early_tokens == 1


def test_a_steady_decode_feeds_tokens_back_on_the_device() -> None:
    """The host is one step behind, so a decode row's newest token is not in the plan."""
    driver = make()
    driver.submit(prompt_of(3), 10)
    driver.run()
    decodes = [plan for plan in driver.executor.plans if plan.decodes]
    assert len(decodes) == 9
    assert all(plan.token_ids.tolist() == [FED_BACK] for plan in decodes)


def test_steps_number_the_tokens_and_no_more() -> None:
    """A Sequence that ends by its limit costs no step in vain: the limit is known ahead."""
    driver = make()
    driver.submit(prompt_of(3), 10)
    driver.run()
    assert len(driver.executor.plans) == 10


def test_a_long_prompt_is_prefilled_in_chunks_beside_decodes() -> None:
    driver = make(max_batched_tokens=16)
    driver.submit(prompt_of(3), 30)
    driver.step()
    driver.submit(prompt_of(60, 1), 3)
    driver.run()
    mixed = [plan for plan in driver.executor.plans if plan.decodes == 1 and len(plan.rows) == 2]
    assert [len(plan.token_ids) for plan in mixed[:4]] == [16, 16, 16, 16]  # 1 decode + 15 of the prompt
    assert driver.output[0] == expected_output(prompt_of(3), 30)
    assert driver.output[1] == expected_output(prompt_of(60, 1), 3)


def test_a_running_stream_gets_a_token_in_every_step_while_a_long_prompt_comes_in() -> None:
    """C18: decodes come first, so the gap is one step, however long the prompt is."""
    driver = make(max_batched_tokens=16, frames=64)
    driver.submit(prompt_of(3), 20)
    driver.step()
    driver.submit(prompt_of(150, 1), 2)
    before = len(driver.executor.plans)
    driver.run()
    assert all(plan.decodes >= 1 for plan in driver.executor.plans[before : before + 18])


def test_when_frames_run_out_the_youngest_is_preempted_and_comes_back_whole() -> None:
    driver = make(frames=12, page_size=4, rows=4)
    sequences = [driver.submit(prompt_of(6, salt), 30) for salt in range(3)]
    driver.run()
    assert driver.scheduler.preemptions > 0
    assert sequences[0].preemptions == 0
    for salt in range(3):
        assert driver.output[salt] == expected_output(prompt_of(6, salt), 30)
        assert driver.ended[salt].output_tokens == 30


def test_a_sequence_that_fills_the_whole_pool_runs_alone() -> None:
    driver = make(frames=10, page_size=4, rows=4, max_length=40)
    driver.submit(prompt_of(20), 20)
    driver.submit(prompt_of(4, 1), 4)
    driver.run()
    assert driver.output[0] == expected_output(prompt_of(20), 20)
    assert driver.output[1] == expected_output(prompt_of(4, 1), 4)


def test_a_preempted_sequence_waits_for_its_token_in_flight() -> None:
    """Rule 3: the token of the step that was on its way is neither lost nor made twice."""
    driver = make(frames=64)
    sequence = driver.submit(prompt_of(5), 12)
    for _ in range(4):
        driver.step()
    driver.scheduler.sequences.recompute(sequence)
    assert sequence.in_flight == 1
    assert driver.scheduler.schedule(driver.now) is None
    driver.commit()
    assert sequence.in_flight == 0
    driver.run()
    assert driver.output[0] == expected_output(prompt_of(5), 12)


def test_a_preempted_sequence_whose_token_in_flight_is_its_last_ends_there() -> None:
    driver = make()
    sequence = driver.submit(prompt_of(5), 3)
    for _ in range(3):
        driver.step()
    driver.scheduler.sequences.recompute(sequence)
    driver.run()
    assert driver.output[0] == expected_output(prompt_of(5), 3)
    assert driver.ended[0].reason == "length"


def test_cancelled_in_the_queue_never_starts() -> None:
    """C08: what died in the queue costs nothing."""
    driver = make(rows=2)
    first = [driver.submit(prompt_of(4, salt), 10) for salt in range(2)]
    queued = [driver.submit(prompt_of(4, salt), 10) for salt in range(2, 12)]
    driver.step()
    for sequence in queued:
        driver.scheduler.end(sequence, "abort", driver.now)
    driver.run()
    assert all(not driver.output[sequence.sequence_id] for sequence in queued)
    assert all(len(driver.output[sequence.sequence_id]) == 10 for sequence in first)


def test_cancelled_while_preempted_with_a_token_in_flight_is_gone() -> None:
    driver = make()
    sequence = driver.submit(prompt_of(5), 12)
    for _ in range(4):
        driver.step()
    driver.scheduler.sequences.recompute(sequence)
    driver.scheduler.end(sequence, "abort", driver.now)
    output = list(driver.output[0])
    driver.run()
    assert driver.output[0] == output


def test_a_row_whose_logits_are_not_finite_ends_with_an_error_and_spoils_nobody() -> None:
    """C38: the neighbour's tokens are its own, and the failed row's token is never given out."""
    driver = make()
    driver.submit(prompt_of(5), 12)
    driver.submit(prompt_of(6, 1), 12)
    driver.executor.fail_rows = lambda plan: [0] if plan.step == 5 else []
    driver.run()
    assert driver.ended[0].reason == "error"
    assert driver.output[0] == expected_output(prompt_of(5), 12)[: len(driver.output[0])]
    assert len(driver.output[0]) < 12
    assert driver.output[1] == expected_output(prompt_of(6, 1), 12)


def test_first_come_first_served() -> None:
    driver = make(rows=1, max_batched_tokens=8)
    for salt in range(5):
        driver.submit(prompt_of(4, salt), 3)
    driver.run()
    assert list(driver.ended) == [0, 1, 2, 3, 4]


def test_admission_leaves_room_for_the_rest_of_running_prompts() -> None:
    """Rule 4: two long prompts that do not fit together are not started together, only to be preempted."""
    driver = make(frames=20, page_size=4, max_batched_tokens=8, rows=4)
    driver.submit(prompt_of(50), 2)
    driver.submit(prompt_of(50, 1), 2)
    driver.run()
    assert driver.scheduler.preemptions == 0


def test_a_step_too_small_for_its_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold one of each"):
        make(rows=8, max_batched_tokens=7)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_mix_under_any_pressure_gives_every_sequence_its_own_tokens(data: st.DataObject) -> None:
    """Random prompts, limits, end ids, arrivals and cancels over small pools: exact outputs, empty pool at the end."""
    page_size = data.draw(st.sampled_from([1, 2, 4]), "page_size")
    frames = data.draw(st.integers(12, 40), "frames")
    rows = data.draw(st.integers(1, 6), "rows")
    max_length = min(60, frames * page_size)
    driver = make(
        frames=frames,
        rows=rows,
        page_size=page_size,
        max_batched_tokens=data.draw(st.integers(rows, 24), "budget"),
        max_length=max_length,
        slots=data.draw(st.sampled_from([0, 0, 5, 40]), "slots"),
    )
    swaps = random.Random(data.draw(st.integers(0, 3), "swaps"))
    driver.executor.end_swaps = lambda ticket: swaps.choice([None, None, True, True, True, False])
    asked: list[tuple[Sequence, list[int], int, tuple[int, ...]]] = []
    cancelled: set[int] = set()
    for _ in range(data.draw(st.integers(1, 10), "requests")):
        length = data.draw(st.integers(1, max_length - 1))
        limit = data.draw(st.integers(1, max_length - length))
        end_ids = data.draw(st.sampled_from([(), (3,), (1, 2, 3, 4, 5)]))
        prompt = prompt_of(length, data.draw(st.integers(0, 3)))
        asked.append((driver.submit(prompt, limit, end_ids), prompt, limit, end_ids))
        for _ in range(data.draw(st.integers(0, 6))):
            driver.step()
        if data.draw(st.integers(0, 5)) == 0:
            victim = asked[data.draw(st.integers(0, len(asked) - 1))][0]
            if victim.state is not State.ENDED:
                driver.scheduler.end(victim, "abort", driver.now)
                cancelled.add(victim.sequence_id)
    driver.run()
    for sequence, prompt, limit, end_ids in asked:
        expected = expected_output(prompt, limit, end_ids)
        output = driver.output[sequence.sequence_id]
        if sequence.sequence_id in cancelled:
            assert output == expected[: len(output)]
        else:
            assert output == expected
            assert driver.ended[sequence.sequence_id].reason == ("stop" if expected[-1] in end_ids else "length")


def test_the_oldest_is_never_preempted() -> None:
    """Rule 2 under steady pressure: each Sequence ends in its turn, however many come after it."""
    driver = make(frames=14, page_size=4, rows=6, max_batched_tokens=12)
    sequences = [driver.submit(prompt_of(8, salt), 24) for salt in range(12)]
    oldest_preemptions = []
    while driver.scheduler.has_work:
        oldest = next((s for s in sequences if s.state is not State.ENDED), None)
        before = oldest.preemptions if oldest else 0
        driver.step()
        if oldest:
            oldest_preemptions.append(oldest.preemptions - before)
    assert driver.scheduler.preemptions > 0
    assert sum(oldest_preemptions) == 0
    assert all(driver.output[i] == expected_output(prompt_of(8, i), 24) for i in range(12))


def test_token_gaps_are_measured_per_sequence() -> None:
    driver = make()
    driver.submit(prompt_of(3), 3)
    gaps = []
    original = driver.scheduler.commit

    def commit(result, now):  # type: ignore[no-untyped-def]
        committed = original(result, now)
        gaps.extend(committed.gaps_s.tolist())
        return committed

    driver.scheduler.commit = commit  # type: ignore[method-assign]
    driver.run()
    assert np.isnan(gaps[0])
    assert gaps[1:] == [1.0, 1.0]


# --- the page cache in the request path


def test_a_repeated_prompt_is_cached_but_for_its_last_token() -> None:
    """C11: at least one token is computed anew, and the cached run is the same as the first one."""
    for length in (1, 3, 4, 5, 7, 8, 9, 20):
        driver = make(page_size=4)
        for _ in range(3):
            driver.submit(prompt_of(length), 9)
            driver.run()
        assert driver.output[0] == driver.output[1] == driver.output[2] == expected_output(prompt_of(length), 9)
        assert driver.ended[0].cached_tokens == 0
        assert (
            driver.ended[1].cached_tokens == driver.ended[2].cached_tokens == length - 1
        )  # its answer filled the pages


def test_a_second_turn_finds_the_pages_of_the_answer() -> None:
    """Pages of generated tokens are cached too: a chat that goes on computes its new tokens only."""
    driver = make(page_size=4)
    driver.submit(prompt_of(10), 14)
    driver.run()
    turn = prompt_of(10) + driver.output[0] + [1, 2, 3]
    driver.submit(turn, 5)
    driver.run()
    assert driver.ended[1].cached_tokens == 20  # 23 tokens were computed (not the last one sampled): 5 whole pages
    assert driver.output[1] == expected_output(turn, 5)


def test_prompts_that_part_inside_a_page_share_its_matching_tokens_by_copy() -> None:
    driver = make(page_size=4)
    driver.submit(prompt_of(12), 3)
    driver.run()
    other = [*prompt_of(12)[:10], 49, 48, 47]
    driver.submit(other, 6)
    driver.run()
    assert driver.ended[1].cached_tokens == 10
    assert driver.scheduler.memory.counters().cow_fault == 1
    assert driver.output[1] == expected_output(other, 6)


def test_who_needs_pages_that_another_computes_waits_for_them() -> None:
    """Rule 5: twenty requests with one new system prompt compute it once."""
    driver = make(frames=200, page_size=4, rows=20, max_batched_tokens=32)
    system = prompt_of(60)
    for i in range(20):
        driver.submit([*system, i, i + 1], 4)
    driver.run()
    computed = sum(int((np.diff(plan.query_starts)[plan.decodes :]).sum()) for plan in driver.executor.plans)
    assert computed < 62 + 20 * 4  # the first prompt whole, of the others their own tail
    for i in range(20):
        assert driver.output[i] == expected_output([*system, i, i + 1], 4)


def test_others_go_ahead_of_those_who_wait_for_pages() -> None:
    driver = make(page_size=4, max_batched_tokens=16)
    driver.submit(prompt_of(60), 2)
    driver.step()
    driver.submit(prompt_of(60), 2)  # waits for the first one's pages
    driver.submit([9, 9, 9], 2)  # has nothing to wait for
    driver.run()
    assert list(driver.ended).index(2) < list(driver.ended).index(1)
    assert driver.ended[1].cached_tokens == 59


def test_waiting_for_pages_ends_when_their_writer_leaves() -> None:
    driver = make(page_size=4, max_batched_tokens=8)
    writer = driver.submit(prompt_of(60), 2)
    driver.step()
    driver.submit(prompt_of(60), 2)
    driver.step()
    driver.scheduler.end(writer, "abort", driver.now)
    driver.run()
    assert driver.output[1] == expected_output(prompt_of(60), 2)


def test_salts_and_opting_out_share_nothing() -> None:
    """C12: other salts get no hit; a request that does not use the cache neither reads nor fills it."""
    driver = make(page_size=4)
    for options in ({"cache_salt": "a"}, {"cache_salt": "b"}, {"prefix_cache": False}, {"cache_salt": "a"}, {}):
        driver.submit(prompt_of(20), 3, **options)
        driver.run()
    assert [driver.ended[i].cached_tokens for i in range(5)] == [0, 0, 0, 19, 0]
    assert driver.ended[1].miss is not None
    assert driver.ended[1].miss.reason == "other_salt"
    assert driver.ended[2].miss is not None
    assert driver.ended[2].miss.reason == "disabled"


def test_with_the_page_cache_off_nothing_is_found_or_kept() -> None:
    driver = make(page_size=4, prefix_caching=False)
    for _ in range(2):
        driver.submit(prompt_of(20), 3)
        driver.run()
    for ended in driver.ended.values():
        assert ended.cached_tokens == 0
        assert ended.miss is not None
        assert (ended.miss.reason, ended.miss.position) == ("disabled", 0)
    assert driver.scheduler.memory.information().cached_pages == 0
    assert driver.scheduler.memory.free_frames == 64


def test_who_comes_back_after_preemption_is_no_hit_of_the_cache() -> None:
    """Its own pages are found again, but no prompt has been served from the cache: that is counted apart."""
    driver = make(frames=64, page_size=4)
    sequence = driver.submit(prompt_of(30), 12)
    for _ in range(6):
        driver.step()
    driver.scheduler.sequences.recompute(sequence)
    driver.run()
    counters = driver.scheduler.memory.counters()
    assert (counters.prefix_query, counters.prefix_hit) == (30, 0)
    assert counters.prefix_return > 30
    assert 28 <= counters.prefix_recover < counters.prefix_return


@pytest.mark.parametrize(("least", "state"), [(4, State.RUNNING), (5, State.WAITING)])
def test_admissions_leave_the_min_watermark_to_those_that_run(least: int, state: State) -> None:
    driver = make(frames=40, page_size=4, rows=4, max_batched_tokens=200)
    driver.scheduler.memory.reclaimer.watermarks = Watermarks(least, least, least)
    driver.submit(prompt_of(60), 20)  # 15 pages, and one for its next token
    driver.step()
    second = driver.submit(prompt_of(80, 1), 4)  # 20 pages, which leaves 4
    driver.step()
    assert second.state is state
    driver.run()


def test_pages_of_a_failed_step_are_not_cached() -> None:
    """C38: what came out of a step with NaN is never shared."""
    driver = make(page_size=4)
    driver.executor.fail_rows = lambda plan: [0] if plan.step == 1 else []
    driver.submit(prompt_of(12), 3)
    driver.run()
    driver.submit(prompt_of(12), 3)
    driver.run()
    assert driver.ended[0].reason == "error"
    assert driver.ended[1].cached_tokens == 0


def test_cached_pages_give_way_to_running_sequences() -> None:
    """A pool full of cached pages is as good as an empty one."""
    driver = make(frames=20, page_size=4)
    for salt in range(4):
        driver.submit(prompt_of(30, salt), 5)
        driver.run()
    assert driver.scheduler.preemptions == 0
    assert driver.scheduler.memory.counters().evict > 0
    driver.submit(prompt_of(60, 7), 15)
    driver.run()
    assert driver.output[4] == expected_output(prompt_of(60, 7), 15)


def test_a_preempted_sequence_finds_its_own_pages_again() -> None:
    driver = make(frames=64, page_size=4)
    sequence = driver.submit(prompt_of(30), 12)
    for _ in range(6):
        driver.step()
    driver.scheduler.sequences.recompute(sequence)
    before = len(driver.executor.plans)
    driver.run()
    again = driver.executor.plans[before]
    assert len(again.token_ids) <= 5  # what is past its last whole page
    assert driver.output[0] == expected_output(prompt_of(30), 12)
    assert driver.ended[0].cached_tokens == 0  # what the client is told is about its prompt


def test_a_prompt_as_large_as_the_pool_that_shares_part_of_a_page_still_runs() -> None:
    """The shared page and its copy would be one frame too many: it runs without the cache."""
    driver = make(frames=13, page_size=4, max_length=52)
    driver.submit(prompt_of(10), 2)
    driver.run()
    large = [*prompt_of(10)[:6], *prompt_of(44, 5)]
    driver.submit(large, 2)
    driver.run(limit=100)
    assert driver.output[1] == expected_output(large, 2)


# --- preemption by swap


def test_a_swapped_sequence_comes_back_and_computes_nothing_twice() -> None:
    driver = make(frames=12, page_size=4, rows=4, slots=40)
    for salt in range(3):
        driver.submit(prompt_of(6, salt), 30)
    driver.run()
    counters = driver.scheduler.memory.counters()
    assert counters.swap_out > 0
    assert counters.swap_in > 0
    computed = sum(len(plan.token_ids) for plan in driver.executor.plans)
    assert computed == 3 * (6 + 29)  # every token once
    for salt in range(3):
        assert driver.output[salt] == expected_output(prompt_of(6, salt), 30)


def test_slow_copies_hold_up_their_own_sequence_only() -> None:
    """The frames of a victim come late: who needs none meanwhile goes on, and all end well."""
    driver = make(frames=14, page_size=4, rows=4, slots=40)
    ages: dict[int, int] = {}

    def end(ticket: int) -> bool | None:
        ages[ticket] = ages.get(ticket, 0) + 1
        return True if ages[ticket] > 5 else None

    driver.executor.end_swaps = end
    for salt in range(4):
        driver.submit(prompt_of(6, salt), 30)
    driver.run()
    assert driver.scheduler.memory.counters().swap_out > 0
    for salt in range(4):
        assert driver.output[salt] == expected_output(prompt_of(6, salt), 30)


def test_swaps_that_all_fail_lose_nothing_and_are_tried_ever_less() -> None:
    driver = make(frames=12, page_size=4, rows=4, slots=40)
    tried: list[float] = []
    driver.executor.end_swaps = lambda ticket: bool(tried.append(driver.now))
    for salt in range(12):
        driver.submit(prompt_of(6, salt), 30)
    driver.run()
    counters = driver.scheduler.memory.counters()
    assert counters.swap_out == 0
    assert counters.swap_failed > 0
    assert len(tried) > 2
    rests = np.diff(tried)
    assert all(rest >= least for rest, least in zip(rests, (1, 2, 4, 8, 16, 32, 60, 60), strict=False))
    for salt in range(12):
        assert driver.output[salt] == expected_output(prompt_of(6, salt), 30)


def test_one_swap_that_fails_does_not_end_swapping() -> None:
    """Its victim is computed again; later ones are copied."""
    driver = make(frames=12, page_size=4, rows=4, slots=40)
    ended: list[int] = []

    def end(ticket: int) -> bool:
        ended.append(ticket)
        return len(ended) > 1

    driver.executor.end_swaps = end
    for salt in range(6):
        driver.submit(prompt_of(6, salt), 30)
    driver.run()
    counters = driver.scheduler.memory.counters()
    assert counters.swap_failed > 0
    assert counters.swap_out > 0
    assert counters.swap_in > 0
    for salt in range(6):
        assert driver.output[salt] == expected_output(prompt_of(6, salt), 30)


@pytest.mark.parametrize("cached", [False, True])
def test_pages_that_never_come_back_from_swap_are_computed_again(*, cached: bool) -> None:
    """Whoever waits for them gets on, also where they are found in the page cache."""
    driver = make(frames=12, page_size=4, rows=4, slots=40)
    mover = driver.executor.mover
    driver.executor.end_swaps = lambda ticket: not len(mover.in_flight[ticket].in_slots)
    for _ in range(3 if cached else 1):
        first = len(driver.output)
        for salt in range(4):
            driver.submit(prompt_of(6, salt), 30)
        driver.run()
        for salt in range(4):
            assert driver.output[first + salt] == expected_output(prompt_of(6, salt), 30)
    counters = driver.scheduler.memory.counters()
    assert counters.swap_out > 0
    assert counters.swap_in == 0
    assert counters.swap_failed > 0


def test_a_full_swap_area_falls_back_to_recomputation() -> None:
    """C13."""
    for slots in (0, 3):
        driver = make(frames=12, page_size=4, rows=4, slots=slots)
        for salt in range(6):
            driver.submit(prompt_of(6, salt), 30)
        driver.run()
        assert driver.scheduler.preemptions > 0
        for salt in range(6):
            assert driver.output[salt] == expected_output(prompt_of(6, salt), 30)


def test_cancelled_while_swapped_frees_its_slots() -> None:
    driver = make(frames=12, page_size=4, rows=4, slots=40)
    sequences = [driver.submit(prompt_of(6, salt), 30) for salt in range(3)]
    while not driver.scheduler.sequences.swapped:
        driver.step()
    victim = next(iter(driver.scheduler.sequences.swapped.values()))
    driver.scheduler.end(victim, "abort", driver.now)
    driver.run()
    information = driver.scheduler.memory.information()
    assert information.sequence_slots == 0
    assert [s.state for s in sequences] == [State.ENDED] * 3


def test_strict_overcommit_runs_only_what_can_reach_its_limit() -> None:
    """Each promise is kept: nobody is preempted, and who cannot be promised its whole length waits."""
    driver = make(frames=12, page_size=4, rows=4)
    driver.scheduler.memory.ledger.mode = OvercommitMode.STRICT
    for salt in range(4):
        driver.submit(prompt_of(6, salt), 14)  # 5 pages each: two at a time
    most = 0
    while driver.scheduler.has_work:
        driver.step()
        most = max(most, len(driver.scheduler.sequences.running))
    assert most == 2
    assert driver.scheduler.preemptions == 0
    assert all(driver.output[salt] == expected_output(prompt_of(6, salt), 14) for salt in range(4))


def test_a_prefill_that_had_to_wait_for_frames_goes_on_beside_steady_decode() -> None:
    """Its frames were on their way to swap when it was passed by; the end of the copy must be noticed."""
    driver = make(frames=48, max_batched_tokens=32, max_length=400, slots=64)
    memory, executor = driver.scheduler.memory, driver.executor
    memory.reclaimer.watermarks = Watermarks(0, 10, 20)
    decoding = driver.submit(prompt_of(5, 1), 60)
    for _ in range(3):
        driver.step()
    for salt in range(2, 5):  # they leave pages in the cache
        driver.submit([salt] * 3 + prompt_of(37, salt), 2)
    for _ in range(10):
        driver.step()
    begun: dict[int, float] = {}

    def ended() -> list[tuple[int, bool]]:
        for ticket in list(executor.mover.in_flight):  # a copy takes four steps
            if driver.now - begun.setdefault(ticket, driver.now) >= 4:
                executor.mover.end(ticket, succeeds=True)
        return executor.mover.ended()

    executor.ended = ended  # type: ignore[method-assign]
    late = driver.submit(prompt_of(110, 9), 2)
    steps = 0
    while late.state is not State.ENDED:
        driver.step()
        steps += 1
        assert decoding.state is not State.ENDED, "it waited for the other one's end"
    assert steps < 30
    driver.run()
