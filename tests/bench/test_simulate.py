"""Replays of the workloads against memory alone: what the paper claims for paging holds here, to the arithmetic."""

import pytest

from bench import workload
from bench.simulate import VOCABULARY, Replay, beam, replay
from mm import pages_for


def test_waste_is_what_arithmetic_says() -> None:
    """Each Sequence holds whole pages from its prompt to its end; nothing else is lost."""
    unused = held = 0
    for item in workload.load("chat-1000", VOCABULARY, 150):
        for length in range(len(item.prompt_ids), len(item.prompt_ids) + item.output_len):
            held += pages_for(length, 16) * 16
            unused += pages_for(length, 16) * 16 - length
    summary = replay("chat-1000", limit=150).summary("chat-1000")
    assert summary.waste_pct == pytest.approx(100 * unused / held, abs=0.1)
    assert summary.waste_pct < 4  # the paper's bound
    assert summary.used_of_contiguous_pct < summary.used_of_buddy_pct < summary.used_of_paged_pct


def test_parallel_samples_share_their_prompt() -> None:
    """Six of each run at once, and the pages of the prompt are held once: more than the paper's 6 to 10 %."""
    done = replay("parallel-n6-200", limit=60)
    summary = done.summary("parallel-n6-200")
    assert summary.saved_pct > 10
    assert summary.preemptions == 0
    assert done.memory.counters().fork == 5 * 60


def test_beams_share_more_than_their_prompt() -> None:
    assert beam("parallel-n6-200", width=4, limit=3) > 37


def test_a_shared_prefix_is_computed_once() -> None:
    """Twelve of 1,024 tokens each: everything but the first use of each is found."""
    summary = replay("shared-prefix-512", limit=200).summary("shared-prefix-512")
    rows = workload.load("shared-prefix-512", VOCABULARY, 200)
    prefixes = {tuple(item.prompt_ids[:1_024]) for item in rows}
    expected = 100 * (len(rows) - len(prefixes)) * 1_024 / sum(len(item.prompt_ids) for item in rows)
    assert summary.hit_pct == pytest.approx(expected, abs=1)


@pytest.mark.parametrize("slots", [0, 400])
def test_a_pool_that_is_far_too_small_runs_everything(slots: int) -> None:
    done: Replay = replay("chat-1000", limit=120, pool_share=0.15, slots=slots, rows=64)
    summary = done.summary("chat-1000")
    assert summary.preemptions > 0
    assert summary.peak_frames <= summary.frames
    assert (summary.swap_in_pages > 0) == (slots > 0)
    now = done.memory.information()
    assert now.free_frames + now.cached_frames + now.copying_frames == now.total_frames
    assert now.references == now.committed_frames == 0
