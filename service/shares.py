"""What each tenant has had for its weight, so that those that wait get tokens in proportion to their weights.

A tenant is charged the prompt tokens that an admitted Sequence must compute, and one token for each decode, divided by
its weight. Who has been charged least is next. So with weights of 3 to 1, two tenants that both always wait get 3 to 1
tokens, whatever their requests look like: the error is bounded by what runs at once.

Who asks again after nothing of it ran or waited begins where the last one that was admitted stood: time in which it
asked for nothing earns it nothing. (Start-time fair queueing, Goyal 1996; for tokens, Sheng 2024.)

With a single tenant nothing is counted.
"""

import numpy as np

from mm.addresses import FloatArray, Int32Array
from mm.tenants import MAX_TENANTS, Tenants


class Shares:
    """By the numbers that mm gives tenants."""

    def __init__(self, tenants: Tenants, of_row: Int32Array) -> None:
        """of_row (max_rows,): the tenant of each row."""
        self._tenants = tenants
        self._of_row = of_row
        self._had: FloatArray = np.zeros(MAX_TENANTS)
        self._reached = 0.0  # where whoever was admitted last stood
        self._rows: Int32Array | None = None  # the last decodes, ...
        self._decoded: FloatArray = self._had  # ... and what one token of each adds

    @property
    def counts(self) -> bool:
        return len(self._tenants.names) > 1

    def of(self, tenant: str) -> float:
        """What it has had for its weight."""
        return float(self._had[self._tenants.id(tenant)])

    def begin(self, tenant: str) -> None:
        """It asks for something, and nothing of it runs or waits."""
        number = self._tenants.id(tenant)
        self._had[number] = max(self._had[number], self._reached)

    def admit(self, tenant: str, tokens: int) -> None:
        """One of its Sequences enters a row for the first time, and has so many tokens to compute."""
        if self.counts:
            number = self._tenants.id(tenant)
            self._reached = max(self._reached, float(self._had[number]))
            self._had[number] += tokens / self._weight(number)

    def decode(self, rows: Int32Array) -> None:
        """Each of `rows` gets a token. The same array in steady decode, and then it is one addition."""
        if not self.counts:
            return
        if rows is not self._rows:
            weights = np.array([self._weight(number) for number in range(len(self._tenants.names))])
            tokens = np.bincount(self._of_row[rows], minlength=len(weights))
            self._rows, self._decoded = rows, tokens / weights
        self._had[: len(self._decoded)] += self._decoded

    def _weight(self, number: int) -> int:
        return self._tenants.limits[number].weight
