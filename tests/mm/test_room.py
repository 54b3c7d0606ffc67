"""What a step can have, on paper: it must be what an allocation then really gets."""

from random import Random

import numpy as np
import pytest
from memory_house import House

from mm import OverTenantLimit, TenantLimits

P = 4


@pytest.mark.parametrize("seed", range(30))
def test_a_room_says_what_an_allocation_would_say(seed: int) -> None:
    """For any limits, use and needs: the same verdict, the same limit to blame, and taking in parts adds up."""
    draw, house = Random(seed), House(frames=24)
    tenants = house.memory.tenants
    names = ["a", "b", "c"]
    for name in names:
        least, most = draw.randint(0, 5), draw.choice([6, 9, 2**31 - 1])
        tenants.set_limits(name, TenantLimits(min=least, low=least, high=most, max=most))
    for _ in range(draw.randint(0, 6)):
        prompt = [draw.randrange(3), *draw.choices(range(100), k=draw.randint(1, 2 * P))]
        name = draw.choice(names)
        if house.memory.room().lack(tenants.id(name), 4) is None:
            (house.run if draw.random() < 0.6 else house.start)(prompt, tenant=name)
    for _ in range(30):
        needs = np.array([draw.choice([0, 0, draw.randint(0, 12)]) for _ in tenants.names], np.int64)
        error, room = house.memory.reclaimer.shortage(needs), house.memory.room()
        lack = room.lack_of_all(needs)
        assert (lack is None) == (error is None)
        if lack is not None:
            assert (lack.tenant is not None) == isinstance(error, OverTenantLimit)
        one_by_one = [
            room.lack(number, int(frames)) or room.take(number, int(frames)) for number, frames in enumerate(needs)
        ]
        assert (lack is None) == all(each is None for each in one_by_one)


def test_without_limits_there_is_the_pool_alone() -> None:
    house = House(frames=10)
    house.memory.tenants.id("a")
    room = house.memory.room()
    room.take(1, 7)
    assert room.lack(0, 3) is None
    lack = room.lack(0, 5)
    assert lack is not None
    assert (lack.frames, lack.tenant) == (2, None)
