"""A rehearsal runs what a request runs, and leaves nothing behind."""

import pytest

from service.rehearsal import PROMPT_TOKENS, Rehearsal
from service.scheduler import SchedulerSettings


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_each_rehearsal_ends_with_all_that_it_began_with(prefix_caching: bool) -> None:
    settings = SchedulerSettings(8, 64, 64, finds_shared_prefixes=True, prefix_caching=prefix_caching)
    rehearsal = Rehearsal(settings)
    scheduler, memory = rehearsal.scheduler, rehearsal.scheduler.memory
    for turn in range(50):
        rehearsal.run(float(turn))
        assert not scheduler.has_work
        assert memory.frames.mapped == 0
        assert memory.available_frames == memory.frames.usable
    memory.check_invariants()
    assert scheduler.sequences.admissions.requests == 50
    assert scheduler.sequences.admissions.tokens == 50 * PROMPT_TOKENS
