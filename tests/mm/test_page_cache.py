"""What is found in the page cache, what is not and why, and that what is found is right."""

import numpy as np
import pytest
from memory_house import Guest, House, values

from mm import MemoryManager, MissReason, TenantLimits, content

P = 4  # page size of the house


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1_000, count).tolist()


@pytest.mark.parametrize("length", [1, P - 1, P, P + 1, 2 * P - 1, 2 * P, 2 * P + 1, 5 * P])
def test_a_repeated_prompt_is_served_but_for_its_last_token(length: int) -> None:
    """C11: at every length around the page edges, three times in a row, with the content of the first time."""
    house, prompt, output = House(), tokens(length), tokens(2 * P + 1, seed=1)
    house.run(prompt, output)
    for _ in range(2):
        match = house.run(prompt, output)
        assert match.cached_tokens == length - 1
        assert match.miss.reason is MissReason.LAST_TOKEN


def test_two_equal_prompts_in_one_step_compute_it_twice_and_cache_it_once() -> None:
    """C11: neither can find what the other is just writing; afterwards one copy is cached, and both read right."""
    house, prompt = House(), tokens(3 * P)
    first, second = house.admit(prompt), house.admit(prompt)
    house.prefill(first)
    house.prefill(second)
    house.check(first, second)
    assert len(house.memory.cache) == 3
    assert not set(first.frames) & set(second.frames)


@pytest.mark.parametrize("chunk", [1, P - 1, P, P + 1, 3 * P])
@pytest.mark.parametrize("tail", [1, P - 1, P, P + 1, 9 * P])
def test_prefill_in_chunks_on_a_cached_prefix_writes_the_same(tail: int, chunk: int) -> None:
    """C22: whatever the chunks and the length of the tail."""
    house, prefix = House(), tokens(5 * P)
    house.run([*prefix, 7])
    guest = house.admit(prefix + tokens(tail, seed=2))
    assert guest.space.length >= 5 * P - 1
    house.prefill(guest, chunk)
    house.check(guest)


def test_the_device_is_told_which_pages_of_a_hit_others_have_too() -> None:
    """A hint: of those found in the cache alone, and of those in swap, it says no."""
    house, prompt = House(slots=8), tokens(3 * P)
    house.run([*prompt, 7])
    first, second = house.admit([*prompt, 1]), house.admit([*prompt[: 2 * P], 2])
    house.prefill(first)
    house.prefill(second)
    assert house.device.shared[first.row, :4].tolist() == [True, True, False, False]
    assert house.device.shared[second.row, :3].tolist() == [True, True, False]
    for guest in (first, second):
        guest.space.release()
    alone = house.start([*prompt, 5, 6])
    assert not house.device.shared[alone.row, :4].any()


# --- what a page is tied to


def test_a_page_is_tied_to_all_that_precedes_it() -> None:
    """C12 a: the same three pages after another beginning are other pages."""
    house, same = House(), tokens(3 * P)
    house.run([1, *tokens(P - 1, seed=5), *same])
    match = house.run([2, *tokens(P - 1, seed=5), *same])
    assert match.cached_tokens == 0
    assert match.miss.reason is MissReason.NEVER_COMPUTED


def test_a_page_is_tied_to_its_position() -> None:
    """C12 b: three equal pages in a row are three pages, and do not serve a prompt where they stand elsewhere."""
    house, same = House(), tokens(P)
    house.run(same * 4)
    assert len(house.memory.cache) == 4
    match = house.run(tokens(P, seed=3) + same * 3)
    assert match.cached_tokens == 0


def test_adapters_share_nothing() -> None:
    """C12 c: the same tokens have other keys and values under another adapter."""
    house, prompt = House(), tokens(3 * P)
    house.run(prompt, adapter="x")
    assert house.run(prompt).cached_tokens == 0
    assert house.run(prompt, adapter="x").cached_tokens == 3 * P - 1


@pytest.mark.parametrize("collide", [lambda before, page: bytes(32), lambda before, page: bytes([page[0] & 1]) * 32])
def test_answers_are_right_with_a_hash_that_collides(collide: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """C12 d: a worthless hash costs misses, never a wrong page. (`House.start` reads every token back.)"""
    monkeypatch.setattr(content, "digest_page", collide)
    house = House(frames=64)
    for seed in range(12):
        prompt = tokens(2 * P, seed=seed % 3) + tokens(2 * P, seed=seed % 4)
        for adapter in ("", "x"):
            house.run(prompt, tokens(3, seed=seed), adapter=adapter)
    assert house.memory.counters().collision > 0


def test_a_client_cannot_know_where_the_chain_begins() -> None:
    """Each process names its pages by a secret of its own."""
    prompt = np.arange(P, dtype=np.int32)
    keys = {MemoryManager(frames=4, max_rows=1, max_pages=1).chain(np.tile(prompt, 4)).key(0) for _ in range(3)}
    assert len(keys) == 3


def test_salts_share_among_equals_only() -> None:
    """A salted prompt is served by the same salt, and neither by another nor by none."""
    house, prompt = House(), tokens(3 * P)
    house.run(prompt, salt="mine")
    assert house.run(prompt, salt="mine").cached_tokens == 3 * P - 1
    for other in ("yours", ""):
        match = house.lookup(prompt, salt=other)
        assert (match.cached_tokens, match.miss.reason) == (0, MissReason.OTHER_SALT)


def test_an_isolated_tenant_shares_with_nobody() -> None:
    """By default tenants share; `isolate` ends that for its own prompts, in both directions."""
    house, prompt = House(), tokens(3 * P)
    house.memory.tenants.set_limits("alone", TenantLimits(isolate=True))
    house.run(prompt, tenant="a")
    assert house.run(prompt, tenant="b").cached_tokens == 3 * P - 1
    assert house.run(prompt, tenant="alone").cached_tokens == 0
    assert house.run(prompt, tenant="alone").cached_tokens == 3 * P - 1


# --- sharing


def test_a_hit_maps_the_same_frames() -> None:
    """Whole cached pages are shared in place: no frame is allocated for them."""
    house, prefix = House(), tokens(4 * P)
    first = house.start([*prefix, 1, 2])
    second = house.start([*prefix, 3, 4])
    assert second.frames[:4] == first.frames[:4]
    assert second.frames[4] != first.frames[4]
    house.check(first, second)


def test_a_partly_matching_page_is_copied_before_it_is_written() -> None:
    """The rows that match are taken over by one page copy; the cached page stays as it was."""
    house, prefix = House(), tokens(2 * P)
    first = house.start([*prefix, 1, 2, 3, 4, 5])
    guest = house.admit([*prefix, 1, 2, 9, 9, 9])
    assert guest.space.length == 2 * P + 2
    assert guest.frames[2] == first.frames[2]
    before = house.memory.counters().cow_fault
    house.prefill(guest)
    assert house.memory.counters().cow_fault == before + 1
    assert guest.frames[2] != first.frames[2]
    house.check(first, guest)


def test_the_closest_of_several_cached_pages_is_taken() -> None:
    """Of all pages that follow the same beginning, the one that agrees longest."""
    house, prefix = House(), tokens(P)
    for tail in ([1, 9, 9, 9], [1, 2, 9, 9], [1, 2, 3, 9], [4, 4, 4, 4]):
        house.run(prefix + tail + [0])
    assert house.lookup([*prefix, 1, 2, 3, 4, 5]).cached_tokens == P + 3


def test_generated_pages_serve_the_next_turn() -> None:
    """A chat's next prompt finds the answer that was generated for the last one."""
    house, prompt, answer = House(), tokens(2 * P), tokens(2 * P + 1, seed=1)
    house.run(prompt, answer)
    match = house.lookup(prompt + answer + tokens(P, seed=2))
    assert match.cached_tokens == 4 * P


def test_a_cached_page_is_never_written_in_place() -> None:
    """Its only holder goes back into it and writes on: it gets a copy, and the cache keeps what was there."""
    house, prompt = House(), tokens(2 * P)
    guest = house.start(prompt)
    guest.space.truncate(P + 1)
    guest.tokens = guest.tokens[: P + 1]
    house.step(guest, [999, 998])
    house.check(guest)
    guest.space.release()
    assert house.run(prompt).cached_tokens == 2 * P - 1


def test_pages_of_a_step_that_was_not_good_are_never_found() -> None:
    """A page enters the cache at commit, and a step whose numbers were not finite is not committed."""
    house, prompt = House(), tokens(2 * P)
    guest = house.admit(prompt)
    house.step(guest, prompt, is_good=False)
    assert house.lookup(prompt).cached_tokens == 0
    guest.space.release()
    assert house.lookup(prompt).cached_tokens == 0
    assert house.memory.free_frames == 32


def test_a_sequence_without_the_cache_neither_reads_nor_fills_it() -> None:
    """Created without a match (prefix_cache: false), all it held is free at its end."""
    house, prompt = House(), tokens(3 * P)
    space = house.memory.create("no cache")
    guest = Guest(space, None, prompt, "")
    house.prefill(guest)
    space.release()
    assert house.memory.free_frames == 32
    assert not len(house.memory.cache)


def test_a_match_that_is_out_of_date_is_looked_up_again() -> None:
    """Between look-up and create its pages were evicted: what is mapped is what there is."""
    house, prompt = House(), tokens(3 * P)
    house.run(prompt)
    match = house.lookup([*prompt, 1])
    house.memory.drop_caches()
    space = house.memory.create("late", match=match)
    assert space.length == 0
    house.check()


def test_whole_pages_of_a_match_need_no_frame_twice() -> None:
    """Without its partly matching page, a prompt as large as the pool fits beside what it finds."""
    house = House(frames=4)
    house.run(tokens(4 * P))
    match = house.lookup([*tokens(4 * P - 1), 1001])
    assert (match.frames_for(4 * P, P), match.idle_frames) == (1, 4)
    whole = match.whole_pages(P)
    assert (whole.cached_tokens, whole.frames_for(4 * P, P), whole.idle_frames) == (3 * P, 1, 3)


# --- why the next page was not served


def test_a_miss_says_that_the_rest_is_shorter_than_a_page() -> None:
    house, prompt = House(), tokens(2 * P)
    house.run(prompt)
    miss = house.lookup([*prompt, 1, 2]).miss
    assert (miss.reason, miss.position) == (MissReason.TAIL_SHORTER_THAN_PAGE, 2 * P)


def test_a_miss_says_at_which_token_the_prompt_differs() -> None:
    house, prompt = House(), tokens(3 * P)
    house.run(prompt)
    other = list(prompt)
    other[P + 2] = 5_000
    miss = house.lookup(other).miss
    assert (miss.reason, miss.position) == (MissReason.TOKEN_DIFFERS, P + 2)


def test_a_miss_says_that_nobody_computed_it() -> None:
    house = House()
    house.run(tokens(2 * P))
    miss = house.lookup(tokens(2 * P) + tokens(P, seed=8)).miss
    assert (miss.reason, miss.position) == (MissReason.NEVER_COMPUTED, 2 * P)


def test_a_miss_says_when_the_page_was_evicted_and_for_whom() -> None:
    house, prompt = House(frames=4), tokens(2 * P)
    house.run(prompt)
    house.memory.turn(12.5, 1)
    house.start(tokens(3 * P, seed=9))
    miss = house.lookup(prompt).miss
    assert (miss.reason, miss.position) == (MissReason.EVICTED, P)
    assert (miss.evicted_s, miss.evicted_for) == (12.5, "request 2")


def test_a_miss_says_that_the_page_is_in_swap() -> None:
    """Where only resident pages are asked for; else the page counts as found."""
    house, prompt = House(slots=8), tokens(3 * P)
    house.run(prompt)
    chain = house.memory.chain(np.array([*prompt, 1], np.int32))
    house.finish(house.memory.advise_prefix(chain, "pageout"))  # type: ignore[arg-type]
    miss = house.memory.lookup(chain, resident_only=True).miss
    assert (miss.reason, miss.position) == (MissReason.SWAPPED, 0)
    assert house.memory.lookup(chain).swapped_pages == 3


# --- pages that are being written


def test_hundreds_of_requests_with_one_new_prompt_compute_it_once() -> None:
    """All but the first find it being written, wait, and share every page of it."""
    house, prompt = House(rows=300, frames=400), tokens(5 * P)
    first = house.admit([*prompt, 0])
    waiting = [house.lookup([*prompt, i]) for i in range(1, 300)]
    assert {match.miss.reason for match in waiting} == {MissReason.BEING_WRITTEN}
    assert {match.miss.writer for match in waiting} == {"request 1"}
    house.prefill(first, chunk=P)
    assert not any(house.memory.is_being_written(match.awaited) for match in waiting if match.awaited)
    allocated = house.memory.counters().allocate
    guests = [house.start([*prompt, i]) for i in range(1, 300)]
    assert house.memory.counters().allocate - allocated == 299
    house.check(first, *guests)


def test_a_writer_that_ends_is_not_awaited_any_more() -> None:
    """It is released before it has written the page: whoever waits computes it."""
    house, prompt = House(), tokens(3 * P)
    first = house.admit(prompt)
    awaited = house.lookup(prompt).awaited
    assert awaited is not None
    assert house.memory.is_being_written(awaited)
    first.space.release()
    assert not house.memory.is_being_written(awaited)
    assert house.lookup(prompt).miss.reason is MissReason.NEVER_COMPUTED


def test_only_the_pages_in_common_are_awaited() -> None:
    """A prompt that goes its own way after two pages waits for two, not for all of the writer's."""
    house, prompt = House(), tokens(6 * P)
    first = house.admit(prompt)
    awaited = house.lookup(prompt[: 2 * P] + tokens(3 * P, seed=4)).awaited
    assert awaited is not None
    first.rest, rest = first.rest[: 2 * P], first.rest[2 * P :]
    house.prefill(first)
    assert not house.memory.is_being_written(awaited)
    first.rest = rest
    house.prefill(first)
    house.check(first)


# --- the forest


def test_pages_below_an_evicted_one_are_replaced_when_it_comes_back() -> None:
    """A page whose beginning is gone cannot be found; computed again with its beginning, it is found again."""
    house, prompt = House(), tokens(3 * P)
    house.run(prompt)
    first = house.memory.cache.walk(house.memory.chain(np.array(prompt, np.int32)), 1)[0]
    house.memory.residency.uncache(first)
    assert house.lookup(prompt).cached_tokens == 0
    house.run(prompt)
    assert house.run(prompt).cached_tokens == 3 * P - 1
    assert len(house.memory.cache) == 3
    house.check()


def test_a_row_goes_on_publishing_below_a_page_that_was_evicted_meanwhile() -> None:
    """Two compute the same; the one that is not in the cache goes on alone after the other's pages are gone."""
    house, prompt = House(), tokens(2 * P)
    first, second = house.admit(prompt), house.admit(prompt)
    house.prefill(first)
    house.prefill(second)
    first.space.release()
    house.memory.drop_caches()
    for token in tokens(P + 1, seed=3):
        house.step(second, [token])
    assert house.lookup([*second.tokens, 1]).cached_tokens == 3 * P
    house.check(second)


def test_a_truncated_row_publishes_what_it_writes_anew() -> None:
    """After a rollback the pages are named by what stands in them now."""
    house, prompt = House(), tokens(2 * P)
    guest = house.start(prompt, tokens(2 * P, seed=1))
    guest.space.truncate(3 * P)
    guest.tokens = guest.tokens[: 3 * P]
    for token in tokens(P, seed=2):
        house.step(guest, [token])
    house.check(guest)
    assert house.lookup([*guest.tokens, 1]).cached_tokens == 4 * P
    assert house.lookup(prompt + tokens(2 * P, seed=1) + [1]).cached_tokens == 4 * P


def test_content_depends_on_the_whole_beginning() -> None:
    """The simulation itself: equal tokens after different beginnings are different content."""
    assert values("", [1, 2])[1] != values("", [3, 2])[1]
    assert values("", [1])[0] != values("x", [1])[0]


def test_a_row_that_loses_its_parent_to_another_row_of_the_same_step_publishes_anew() -> None:
    """The page before is unreachable, and gives way to the same page of a row that is published first."""
    house = House()
    prompt = tokens(2 * P, 1)
    old = house.start(prompt)
    first = house.memory.cache.entry_of_frame[old.frames[0]]
    house.memory.residency.uncache(first)  # the second page cannot be reached any more
    new = house.admit(prompt)
    house.step(new, prompt, is_good=False)
    house.step(old, tokens(P, 2), is_good=False)
    rows = np.array([new.row, old.row], np.int32)
    for _ in range(2):  # what could not be named yet is named at the next commit
        house.memory.publish(rows, np.array([2 * P, 3 * P], np.int32), house.ids)
        house.check(old, new)
    assert house.lookup([*old.tokens, 1]).cached_tokens == 3 * P
