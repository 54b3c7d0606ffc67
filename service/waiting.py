"""The queue: whose turn it is among those that wait.

Each tenant has a queue of its own, in order of turns (`Sequence.turn_s`): that of arrival, or by priority with ageing.
Between tenants, whoever has had least for its weight is next (shares.py); at equal shares, whose place is first. So a
step that must pass by thousands of one tenant looks at none of them.

    place = (turn, number)      appended: the number grows; returned after preemption: negative, before its equals
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterator
from itertools import chain
from operator import attrgetter

from service.request import Key, Sequence

_place = attrgetter("place")


class WaitingQueue:
    """Sequences that wait, by key. Truth and length are those of all tenants together."""

    def __init__(self, share_of: Callable[[str], float] = lambda tenant: 0.0) -> None:
        """share_of(tenant): what it has had for its weight; the least is next."""
        self._by_tenant: dict[str, list[Sequence]] = {}  # in order of places; none is empty
        self._by_key: dict[Key, Sequence] = {}
        self._returned = self._appended = 0
        self._share_of = share_of
        self.prompt_tokens = 0  # of all; choices of one prompt share it

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.key in self._by_key

    def __iter__(self) -> Iterator[Sequence]:
        """All, by tenant."""
        return chain.from_iterable(self._by_tenant.values())

    def get(self, key: Key) -> Sequence | None:
        """Who waits under this key."""
        return self._by_key.get(key)

    def has_any_of(self, tenant: str) -> bool:
        return tenant in self._by_tenant

    def first_of(self, tenant: str) -> Sequence | None:
        """Whose turn it is within the tenant."""
        return next(iter(self._by_tenant.get(tenant, ())), None)

    def firsts(self) -> list[Sequence]:
        """The same of each tenant with any."""
        return [queue[0] for queue in self._by_tenant.values()]

    def append(self, sequence: Sequence) -> None:
        """A new one comes after all whose turn is not later."""
        self._appended += 1
        self._add(sequence, (sequence.turn_s, self._appended))

    def put_back(self, sequence: Sequence) -> None:
        """A preempted one comes before all whose turn is not earlier, and before other tenants."""
        self._returned += 1
        self._add(sequence, (sequence.turn_s, -self._returned))

    def put_first(self, sequence: Sequence) -> None:
        """Before all others, whatever its turn."""
        self._returned += 1
        self._add(sequence, (-math.inf, -self._returned))

    def remove(self, sequence: Sequence) -> None:
        """It must be there."""
        del self._by_key[sequence.key]
        self.prompt_tokens -= sequence.queue_tokens
        queue = self._by_tenant[sequence.tenant]
        del queue[bisect_left(queue, sequence.place, key=_place)]
        if not queue:
            del self._by_tenant[sequence.tenant]

    def in_order(
        self,
        most: int,
        passed_by: Container[str] = (),
        choose: Callable[[list[Sequence], int], int] | None = None,
    ) -> Iterator[Sequence]:
        """Up to `most` in order, without the tenants in `passed_by`, which may grow meanwhile.

        choose(queue, first): the place in a tenant's queue, from `first` on, of whom to give out before the others.
        Who has been given out may be removed before the next one is asked for; nobody may be added.
        """
        if most < 1:
            return
        looked_at: dict[str, list[Sequence]] = {}
        heads = [(*self._rank(queue[0]), tenant, 0) for tenant, queue in self._by_tenant.items()]
        heapq.heapify(heads)
        while heads and most:
            *_, tenant, number = heapq.heappop(heads)
            if tenant in passed_by:
                continue
            if number == 0:
                looked_at[tenant] = self._by_tenant[tenant][:most]
            queue = looked_at[tenant]
            if choose is not None and (chosen := choose(queue, number)) > number:
                queue.insert(number, queue.pop(chosen))
            yield queue[number]
            most -= 1
            if number + 1 < len(queue):
                heapq.heappush(heads, (*self._rank(queue[number + 1]), tenant, number + 1))

    def _rank(self, sequence: Sequence) -> tuple[bool, float, tuple[float, int]]:
        """Between tenants. Who was there before waits for no share."""
        is_new = sequence.place[1] > 0
        return is_new, self._share_of(sequence.tenant) if is_new else 0.0, sequence.place

    def _add(self, sequence: Sequence, place: tuple[float, int]) -> None:
        sequence.place = place
        self._by_key[sequence.key] = sequence
        self.prompt_tokens += sequence.queue_tokens
        queue = self._by_tenant.setdefault(sequence.tenant, [])
        if queue and place < queue[-1].place:
            insort(queue, sequence, key=_place)
        else:
            queue.append(sequence)
