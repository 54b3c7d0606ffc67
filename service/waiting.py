"""The queue: in order of arrival, but a tenant whose turn it is not can be passed by at no cost.

Each tenant has a queue of its own, and each Sequence a place in the order of all. So a step that must pass by thousands
of one tenant looks at none of them.
"""

import heapq
from collections import OrderedDict
from collections.abc import Container, Iterator
from itertools import chain, islice

from service.request import Key, Sequence


class WaitingQueue:
    """Sequences that wait, by key. Truth and length are those of all tenants together."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, OrderedDict[Key, Sequence]] = {}  # none is empty
        self._tenants: dict[Key, str] = {}
        self._first = self._last = 0  # places taken so far, at either end
        self.prompt_tokens = 0  # of all; choices of one prompt share it

    def __len__(self) -> int:
        return len(self._tenants)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.key in self._tenants

    def __iter__(self) -> Iterator[Sequence]:
        """All, by tenant."""
        return chain.from_iterable(queue.values() for queue in self._by_tenant.values())

    def get(self, key: Key) -> Sequence | None:
        """Who waits under this key."""
        tenant = self._tenants.get(key)
        return None if tenant is None else self._by_tenant[tenant][key]

    def append(self, sequence: Sequence) -> None:
        """A new one comes last."""
        self._last += 1
        sequence.place = self._last
        self._tenants[sequence.key] = sequence.tenant
        self.prompt_tokens += sequence.queue_tokens
        self._by_tenant.setdefault(sequence.tenant, OrderedDict())[sequence.key] = sequence

    def put_first(self, sequence: Sequence) -> None:
        """A preempted one comes before all others."""
        self.append(sequence)
        self._first -= 1
        sequence.place = self._first
        self._by_tenant[sequence.tenant].move_to_end(sequence.key, last=False)

    def remove(self, sequence: Sequence) -> None:
        """It must be there."""
        tenant = self._tenants.pop(sequence.key)
        queue = self._by_tenant[tenant]
        del queue[sequence.key]
        self.prompt_tokens -= sequence.queue_tokens
        if not queue:
            del self._by_tenant[tenant]

    def in_order(self, most: int, passed_by: Container[str] = ()) -> Iterator[Sequence]:
        """Up to `most` in order, without the tenants in `passed_by`, which may grow meanwhile.

        Who has been given out may be removed before the next one is asked for; nobody may be added.
        """
        heads = [(next(iter(queue.values())).place, tenant, 0) for tenant, queue in self._by_tenant.items()]
        heapq.heapify(heads)
        looked_at: dict[str, list[Sequence]] = {}
        while heads and most > 0:
            _, tenant, number = heapq.heappop(heads)
            if tenant in passed_by:
                continue
            if number == 0:
                looked_at[tenant] = list(islice(self._by_tenant[tenant].values(), most))
            queue = looked_at[tenant]
            yield queue[number]
            most -= 1
            if number + 1 < len(queue):
                heapq.heappush(heads, (queue[number + 1].place, tenant, number + 1))
