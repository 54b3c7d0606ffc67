"""The queue: in order of arrival over all tenants, and past those whose turn it is not."""

from model.step_plan import SamplingParameters
from service.engine_client import Submit
from service.request import Sequence
from service.waiting import WaitingQueue


def sequence(number: int, tenant: str) -> Sequence:
    message = Submit(number, "r", [1], 1, SamplingParameters(temperature=0.0), [], tenant=tenant)
    return Sequence.from_submit(message, 0, 0.0)


def filled(tenants: str) -> tuple[WaitingQueue, list[Sequence]]:
    queue, all_ = WaitingQueue(), [sequence(number, tenant) for number, tenant in enumerate(tenants)]
    for each in all_:
        queue.append(each)
    return queue, all_


def numbers(queue: WaitingQueue, most: int = 100, passed_by: set[str] | None = None) -> list[int]:
    return [each.sequence_id for each in queue.in_order(most, passed_by or set())]


def test_order_of_arrival_over_all_tenants() -> None:
    queue, all_ = filled("abacba")
    assert numbers(queue) == [0, 1, 2, 3, 4, 5]
    assert numbers(queue, most=3) == [0, 1, 2]
    assert numbers(queue, passed_by={"a"}) == [1, 3, 4]
    assert len(queue) == 6
    assert queue.get((0, 3)) is all_[3]


def test_a_preempted_one_comes_first_and_the_last_one_preempted_before_it() -> None:
    queue, all_ = filled("aab")
    for each in (all_[1], all_[2]):
        queue.remove(each)
        queue.put_back(each)
    assert numbers(queue) == [2, 1, 0]


def test_order_of_turns_within_a_tenant_and_of_arrival_within_a_turn() -> None:
    queue, all_ = WaitingQueue(), [sequence(number, "a") for number in range(6)]
    for each, turn_s in zip(all_, (5.0, 3.0, 5.0, -1.0, 3.0, 9.0), strict=True):
        each.turn_s = turn_s
        queue.append(each)
    assert numbers(queue) == [3, 1, 4, 0, 2, 5]
    for each in (all_[2], all_[5]):
        queue.remove(each)
        queue.put_back(each)
    assert numbers(queue) == [3, 1, 4, 2, 0, 5], "before its own turn's, and no others"
    queue.remove(all_[0])
    queue.put_first(all_[0])
    assert numbers(queue) == [0, 3, 1, 4, 2, 5]
    assert [each.sequence_id for each in queue.firsts()] == [0]


def test_between_tenants_the_least_share_is_next_but_who_was_there_before_waits_for_none() -> None:
    shares = {"a": 2.0, "b": 1.0, "c": 1.0}
    queue = WaitingQueue(shares.__getitem__)
    all_ = [sequence(number, tenant) for number, tenant in enumerate("aabcb")]
    for each in all_:
        queue.append(each)
    assert numbers(queue) == [2, 3, 4, 0, 1]
    queue.remove(all_[1])
    queue.put_back(all_[1])
    assert numbers(queue) == [1, 2, 3, 4, 0]
    seen = []
    for each in queue.in_order(100):
        seen.append(each.sequence_id)
        shares[each.tenant] += 1.5
    assert seen == [1, 2, 3, 4, 0], "what was charged meanwhile counts"


def test_a_look_at_the_first_of_many_copies_no_queue_but_theirs() -> None:
    """C21: what a step costs does not grow with what waits behind, nor with who waits beside."""
    queue, _ = filled("".join("abcde"[number % 5] for number in range(5000)))
    copied = []

    class Noted(list):  # type: ignore[type-arg]
        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            found = super().__getitem__(index)
            copied.append(len(found) if isinstance(index, slice) else 1)
            return found

    queue._by_tenant = {tenant: Noted(each) for tenant, each in queue._by_tenant.items()}
    first = next(queue.in_order(32))
    assert first.sequence_id == 0
    assert sum(copied) <= 5 + 32


def test_prompt_tokens_of_those_that_wait_are_counted() -> None:
    queue, all_ = filled("aab")
    assert queue.prompt_tokens == 3
    queue.remove(all_[1])
    assert queue.prompt_tokens == 2


def test_who_was_given_out_may_leave_and_a_tenant_may_be_passed_by_from_then_on() -> None:
    queue, _ = filled("aabab")
    seen, passed_by = [], set[str]()
    for each in queue.in_order(100, passed_by):
        seen.append(each.sequence_id)
        queue.remove(each)
        if each.sequence_id == 1:
            passed_by.add("a")
    assert seen == [0, 1, 2, 4]
    assert numbers(queue) == [3]
    assert queue.get((0, 0)) is None
