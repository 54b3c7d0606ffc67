"""How much a tenant may ask: requests a minute, tokens a minute, requests at a time.

Kept in the engine's process, so that all front ends count together. Only tenants with limits are counted, so the tables
are bounded by the settings. The clock is the caller's.

Requests and tokens are buckets: full at the start, filled at the rate of the limit, never above one minute's worth. A
request takes one from its bucket when it comes in. Its tokens are taken when they are known, prompt first and output at
the end, and may leave a debt: then nothing more comes in until the bucket is above zero again. So no request is too
large for a limit, and no work is done for one that is refused.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from service.errors import RateLimited


class RateLimit(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's limits. None: not limited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None

    @property
    def is_limited(self) -> bool:
        return any(getattr(self, name) is not None for name in self.__struct_fields__)


@dataclass(slots=True)
class _Bucket:
    per_minute: int
    level: float
    filled_s: float

    def wait_s(self, now: float) -> float:
        """Seconds until one may be taken; 0 for now."""
        self.level = min(self.per_minute, self.level + (now - self.filled_s) * self.per_minute / 60)
        self.filled_s = now
        return max(0.0, (1 - self.level) * 60 / self.per_minute)


class RateLimits:
    """The counts of all tenants that have limits."""

    def __init__(self, limits: Mapping[str, RateLimit], clock: Callable[[], float]) -> None:
        self._limits = {tenant: limit for tenant, limit in limits.items() if limit.is_limited}
        self._clock = clock
        self._open: dict[str, Counter[int]] = {tenant: Counter() for tenant in self._limits}  # by front end
        self._requests = self._buckets(lambda limit: limit.requests_per_minute)
        self._tokens = self._buckets(lambda limit: limit.tokens_per_minute)

    def _buckets(self, rate: Callable[[RateLimit], int | None]) -> dict[str, _Bucket]:
        rates = {tenant: rate(limit) for tenant, limit in self._limits.items()}
        now = self._clock()
        return {tenant: _Bucket(each, each, now) for tenant, each in rates.items() if each is not None}

    @property
    def tenants(self) -> frozenset[str]:
        """Who has limits: nobody else needs to ask."""
        return frozenset(self._limits)

    def enter(self, tenant: str, front_end: int) -> None:
        """One more request comes in, and must `leave`. Raises RateLimited, and then it counts for nothing."""
        limit = self._limits.get(tenant)
        if limit is None:
            return
        most = limit.max_concurrent_requests
        if most is not None and self._open[tenant].total() >= most:
            raise RateLimited(f"You have {most} requests open, the limit of your key: try again when one has ended.")
        now = self._clock()
        for buckets, what in ((self._requests, "requests"), (self._tokens, "tokens")):
            if (bucket := buckets.get(tenant)) is not None and (wait_s := bucket.wait_s(now)) > 0:
                seconds = math.ceil(wait_s)
                words = f"The limit of your key is {bucket.per_minute} {what} a minute: try again in {seconds} s."
                raise RateLimited(words, retry_after_s=seconds)
        if tenant in self._requests:
            self._requests[tenant].level -= 1
        self._open[tenant][front_end] += 1

    def spend(self, tenant: str, tokens: int) -> None:
        """Tokens of a request that came in."""
        if (bucket := self._tokens.get(tenant)) is not None:
            bucket.wait_s(self._clock())  # what was refilled up to now is not lost at the top
            bucket.level -= tokens

    def leave(self, tenant: str, front_end: int) -> None:
        """A request that came in has been answered, or its client has left."""
        if tenant in self._open:
            self._open[tenant][front_end] -= 1

    def forget(self, front_end: int) -> None:
        """A front end is gone, and its requests with it."""
        for counts in self._open.values():
            del counts[front_end]
