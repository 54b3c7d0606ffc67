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
        queue.put_first(each)
    assert numbers(queue) == [2, 1, 0]


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
