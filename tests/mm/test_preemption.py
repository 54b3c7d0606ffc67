"""Whom the score picks, and how its frames are taken."""

import numpy as np
import pytest
from memory_house import Guest, House

from mm import Action, Candidates, CostEstimates

P = 4


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 100_000, count).tolist()


def candidates(*guests: Guest, priorities: list[int] | None = None, preemptions: list[int] | None = None) -> Candidates:
    equal = Candidates.equal(np.array([guest.row for guest in guests], np.int32))
    return Candidates(
        equal.rows,
        equal.priorities if priorities is None else np.array(priorities, np.int32),
        equal.progress,
        equal.preemptions if preemptions is None else np.array(preemptions, np.int32),
    )


def test_equals_go_youngest_first() -> None:
    house = House()
    guests = [house.start(tokens(2 * P, seed)) for seed in range(3)]
    victim = house.memory.choose_victim(candidates(*guests), 1)
    assert victim is not None
    assert victim.rows.tolist() == [guests[2].row]


def test_lower_priority_goes_first_whatever_it_frees() -> None:
    house = House()
    large, small = house.start(tokens(6 * P, 1)), house.start(tokens(P, 2))
    victim = house.memory.choose_victim(candidates(large, small, priorities=[1, 0]), 6)
    assert victim is not None
    assert victim.rows.tolist() == [small.row]


def test_the_one_that_frees_enough_for_least_work_is_chosen() -> None:
    """What it frees beyond the need does not count, what is lost does."""
    house = House()
    large, small = house.start(tokens(8 * P, 1)), house.start(tokens(2 * P, 2))
    table = house.memory.oom_table(candidates(large, small), 2)
    assert table.frames.tolist() == [8, 2]
    assert table.scores[1] == 1000
    assert table.scores[0] == 250
    assert table.owners == ["request 1", "request 2"]


def test_who_was_preempted_before_is_spared() -> None:
    house = House()
    first, second = house.start(tokens(2 * P, 1)), house.start(tokens(2 * P, 2))
    victim = house.memory.choose_victim(candidates(first, second, preemptions=[0, 2]), 1)
    assert victim is not None
    assert victim.rows.tolist() == [first.row]


def test_oom_score_adj_bars_and_invites() -> None:
    house = House()
    first, second = house.start(tokens(2 * P, 1)), house.start(tokens(2 * P, 2))
    house.memory.set_oom_score_adj(second.space, -1000)
    for _ in range(2):
        victim = house.memory.choose_victim(candidates(first, second), 1)
        assert victim is not None
        assert victim.rows.tolist() == [first.row]
        house.memory.set_oom_score_adj(second.space, 0)
        house.memory.set_oom_score_adj(first.space, 500)
    with pytest.raises(ValueError, match="not in -1000"):
        house.memory.set_oom_score_adj(first.space, 1001)


def test_shared_pages_are_worth_nothing_alone() -> None:
    """Of two with the same prefix, each frees only its own tail."""
    house, prefix = House(), tokens(5 * P, 1)
    first, second = house.start([*prefix, 1]), house.start([*prefix, 2])
    table = house.memory.oom_table(candidates(first, second), 6)
    assert table.frames.tolist() == [1, 1]


def test_a_fork_family_goes_as_one_where_one_alone_frees_too_little() -> None:
    house = House(slots=32)
    single = house.start(tokens(2 * P, 3))
    parent = house.start(tokens(5 * P, 1))
    family = [parent, house.fork(parent), house.fork(parent)]
    alone = house.memory.choose_victim(candidates(single, *family), 2)
    assert alone is not None
    assert alone.rows.tolist() == [single.row]
    together = house.memory.choose_victim(candidates(single, *family), 4)
    assert together is not None
    assert sorted(together.rows.tolist()) == sorted(guest.row for guest in family)
    assert together.frames == 5
    house.finish(house.memory.swap_out([guest.space for guest in family]))
    assert house.memory.free_frames == 32 - 2
    house.check(single, *family)


def test_swap_or_recompute_is_chosen_by_what_they_cost() -> None:
    for costs, expected in (
        (CostEstimates(copy_page_s=1e-6, prefill_token_s=1e-3), Action.SWAP),
        (CostEstimates(copy_page_s=1.0, prefill_token_s=1e-6), Action.RECOMPUTE),
    ):
        house = House(slots=8, costs=costs)
        guest = house.start(tokens(3 * P, 1))
        victim = house.memory.choose_victim(candidates(guest), 1)
        assert victim is not None
        assert victim.action is expected
    assert house.memory.counters().preempt_recompute == 1


def test_without_slots_the_victim_computes_its_pages_again() -> None:
    house = House(slots=2, costs=CostEstimates(copy_page_s=1e-9, prefill_token_s=1.0))
    guest = house.start(tokens(3 * P, 1))
    victim = house.memory.choose_victim(candidates(guest), 1)
    assert victim is not None
    assert victim.action is Action.RECOMPUTE


def test_costs_follow_what_is_measured() -> None:
    costs = CostEstimates(copy_page_s=1.0, prefill_token_s=1.0)
    for _ in range(40):
        costs.observe_copy(pages=10, seconds=0.01)
        costs.observe_prefill(tokens=100, seconds=0.2)
    costs.observe_copy(pages=0, seconds=5.0)
    assert costs.copy_page_s == pytest.approx(0.001, rel=0.2)
    assert costs.prefill_token_s == pytest.approx(0.002, rel=0.1)


def test_nobody_is_chosen_where_nobody_frees_anything() -> None:
    house = House()
    guest = house.admit(tokens(2 * P, 1))
    assert house.memory.choose_victim(candidates(guest), 1) is None


def test_every_decision_is_kept_with_its_table() -> None:
    house = House()
    guest = house.start(tokens(2 * P, 1))
    house.memory.turn(3.0, 17)
    house.memory.choose_victim(candidates(guest), 1)
    ((step, victim),) = house.memory.victims
    assert step == 17
    assert victim.table.needed_frames == 1
    assert victim.table.recompute_s[0] == pytest.approx(8 * 50e-6)
    assert house.memory.tenant_memory()[0].events.preempt == 1
