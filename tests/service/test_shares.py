"""Tenants that wait get tokens in proportion to their weights."""

from collections import Counter

import pytest
from scheduler_driver import Driver, make, prompt_of

from mm import TenantLimits


def saturated(driver: Driver, tenants: dict[str, tuple[int, int]], steps: int) -> Counter[str]:
    """Keep three of each tenant waiting, with its (prompt, output) lengths; the tokens that each has had."""
    tokens: Counter[str] = Counter()
    tenant_of: dict[int, str] = {}
    before = {sequence_id: len(output) for sequence_id, output in driver.output.items()}
    for step in range(steps):
        for tenant, (prompt, output) in tenants.items():
            waiting = [each for each in driver.scheduler.sequences.waiting if each.tenant == tenant]
            for i in range(3 - len(waiting)):
                sequence = driver.submit(prompt_of(prompt, 7 * step + i), output, tenant=tenant, prefix_cache=False)
                tenant_of[sequence.sequence_id] = tenant
        driver.step()
    for sequence_id, tenant in tenant_of.items():
        made = len(driver.output[sequence_id]) - before.get(sequence_id, 0)
        tokens[tenant] += made + (len(prompt_of(tenants[tenant][0])) if made else 0)
    return tokens


@pytest.mark.parametrize("other", [(6, 6), (2, 20), (20, 2)])
def test_weights_of_three_to_one_give_three_to_one_tokens(other: tuple[int, int]) -> None:
    """Whatever the requests of either look like."""
    driver = make(frames=200, rows=4, max_batched_tokens=64, tenants={"a": TenantLimits(weight=300)})
    tokens = saturated(driver, {"a": (6, 6), "b": other}, 1200)
    assert tokens["a"] / tokens["b"] == pytest.approx(3, rel=0.1)


def test_equal_tenants_get_equal_tokens_however_many_requests_one_sends() -> None:
    driver = make(frames=200, rows=4, max_batched_tokens=64)
    for salt in range(300):
        driver.submit(prompt_of(6, salt), 6, tenant="a", prefix_cache=False)
    first = driver.submit(prompt_of(6, 9), 6, tenant="b", prefix_cache=False)
    while first.admitted_s is None:
        driver.step()
    assert first.admitted_s - first.submitted_s <= 12, "the 300 before it do not hold it up"
    tokens = saturated(driver, {"b": (6, 6)}, 200)
    admitted = sum(output != [] for number, output in driver.output.items() if number < 300)
    assert admitted * 12 == pytest.approx(tokens["b"], rel=0.2)


def test_an_idle_tenant_earns_nothing() -> None:
    """After a long while without requests it gets its share, and not what it could have had."""
    driver = make(frames=200, rows=4, max_batched_tokens=64)
    saturated(driver, {"b": (6, 6)}, 20)
    driver.run()
    saturated(driver, {"a": (6, 6)}, 400)
    tokens = saturated(driver, {"a": (6, 6), "b": (6, 6)}, 300)
    assert tokens["a"] / tokens["b"] == pytest.approx(1, rel=0.15)


def test_a_single_tenant_is_served_in_order_of_arrival() -> None:
    driver = make(rows=2, frames=64)
    for salt in range(12):
        driver.submit(prompt_of(2 + 5 * (salt % 3), salt), 1 + salt % 4)
    order = []
    original = driver.scheduler.sequences._take_row

    def noted(sequence, space):  # type: ignore[no-untyped-def]
        order.append(sequence.sequence_id)
        original(sequence, space)

    driver.scheduler.sequences._take_row = noted  # type: ignore[method-assign]
    driver.run()
    assert order == list(range(12))
