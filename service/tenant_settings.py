"""The tenants of the settings file: whose memory is limited and protected, with the meaning of cgroup v2, and how much
each may ask. Whose requests are whose, keys say (auth.py).

    [tenants.batch]
    memory_max = "25%"          # of the pool; or a size: "4GiB"
    swap_max = "0"              # of the swap area
    weight = 50

    memory_min    never taken for others, neither idle pages nor by preemption
    memory_low    the same, while anything else can be found
    memory_high   above it nothing more is admitted while something of the tenant runs
    memory_max    above it only the tenant's own pages and Sequences make room
    swap_max      what its pages may fill of the swap area
    weight        its share of tokens while others wait too, and how long its idle pages are kept: 1 ... 10000; with 200
                  twice as much, and twice as long, as with 100, the default
    isolate       true: it finds no cached pages of others, and they none of its

    requests_per_minute, tokens_per_minute, max_concurrent_requests      more is refused (rate_limits.py)

A name that is not listed is a tenant without limits. Amounts are rounded down to whole frames and slots.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from mm import TenantLimits
from mm.tenants import MAX_TENANTS, UNLIMITED
from service.errors import ConfigurationError
from service.rate_limits import RateLimit
from service.setting_values import nearest, parse_share, parse_size

MOST_TENANTS = MAX_TENANTS - 2
"""That can be listed: mm keeps a place for `default`, and one for all names that it does not tell apart."""

MOST_RATE = 10**12
"""Requests or tokens a minute, at most."""

TENANT_NAME = "1 to 128 printable characters"
"""What its name may be: it is shown in tables and lines of log."""

RISING = ("memory_min", "memory_low", "memory_high", "memory_max")
"""Each of them must not be above the next."""


class Amount(msgspec.Struct, frozen=True):
    """A size in bytes, or a share (0 ... 1) of all there is; `text` is how it was written."""

    text: str
    size_bytes: int | None = None
    share: float | None = None

    def of(self, places: int, place_bytes: int) -> int:
        """Whole frames or slots: of `places` of them, with place_bytes each."""
        if self.share is not None:
            return int(self.share * places + 1e-9)
        assert self.size_bytes is not None
        return self.size_bytes // place_bytes

    def is_above(self, other: "Amount") -> bool:
        """Whether it is more, as far as that can be said before the size of the pool is known."""
        if self.size_bytes is not None and other.size_bytes is not None:
            return self.size_bytes > other.size_bytes
        return self.share is not None and other.share is not None and self.share > other.share


class TenantSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant. None: not limited, or not protected."""

    memory_min: Amount | None = None
    memory_low: Amount | None = None
    memory_high: Amount | None = None
    memory_max: Amount | None = None
    swap_max: Amount | None = None
    weight: int = 100
    isolate: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None

    @property
    def rate_limit(self) -> RateLimit:
        return RateLimit(**{key: getattr(self, key) for key in RATES})


RATES = RateLimit.__struct_fields__
KEYS = TenantSettings.__struct_fields__


def is_tenant_name(name: str) -> bool:
    return 0 < len(name) <= 128 and name.isprintable()


def read_tenants(table: Any) -> dict[str, TenantSettings]:
    """What a file has under `tenants`. Raises ValueError with one line that says which key is wrong, and what is right.

    What depends on the size of the pool is checked by `tenant_limits`.
    """
    if not isinstance(table, Mapping):
        raise ValueError("tenants: must be tables, one for each name: [tenants.NAME]")  # noqa: TRY004
    if len(table) > MOST_TENANTS:
        raise ValueError(f"tenants: {len(table)} are listed, and at most {MOST_TENANTS} can be")
    tenants = {}
    for name, values in table.items():
        if not isinstance(name, str) or not is_tenant_name(name):
            raise ValueError(f"tenants: a name must be {TENANT_NAME}, got {name!r:.200}")
        if not isinstance(values, Mapping):
            raise ValueError(f"tenants.{name}: must be a table: [tenants.{name}]")  # noqa: TRY004
        tenants[name] = _read_tenant(f"tenants.{name}", values)
    shares = [each.memory_min.share or 0.0 for each in tenants.values() if each.memory_min is not None]
    if sum(shares) > 1 + 1e-9:
        raise ValueError(f"tenants: memory_min of all together is {sum(shares):.0%}, and the pool is 100%")
    return tenants


def _read_tenant(where: str, values: Mapping[Any, Any]) -> TenantSettings:
    fields: dict[str, Any] = {}
    for key, value in values.items():
        if key not in KEYS:
            raise ValueError(f"{where}: {key} is no setting of a tenant{nearest(str(key), KEYS)}")
        try:
            fields[key] = _read_value(key, value)
        except ValueError as error:
            raise ValueError(f"{where}.{key}: {error}, got {value}") from None
    tenant = TenantSettings(**fields)
    given = [(key, getattr(tenant, key)) for key in RISING if getattr(tenant, key) is not None]
    for i, (lower, small) in enumerate(given):
        for upper, large in given[i + 1 :]:
            if small.is_above(large):
                raise ValueError(f"{where}: {lower} ({small.text}) is above {upper} ({large.text})")
    return tenant


def _read_value(key: str, value: Any) -> Any:
    """Raises ValueError."""
    if key == "isolate":
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value
    if key == "weight":
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 10_000:
            raise ValueError("must be a whole number from 1 to 10000")
        return value
    if key in RATES:
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_RATE:
            raise ValueError(f"must be a whole number from 1 to {MOST_RATE}")
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return Amount(str(value), size_bytes=value)
    if isinstance(value, str):
        if value.strip().endswith("%"):
            return Amount(value, share=parse_share(value))
        return Amount(value, size_bytes=parse_size(value))
    raise ValueError("must be a size such as 4GiB, or a share such as 25%")


def tenant_limits(
    tenants: Mapping[str, TenantSettings], frames: int, slots: int, frame_bytes: int
) -> dict[str, TenantLimits]:
    """The limits in frames and slots of a pool and a swap area of this size. Raises ConfigurationError."""
    limits = {}
    for name, tenant in tenants.items():
        least = _frames(tenant.memory_min, frames, frame_bytes, 0)
        low = max(least, _frames(tenant.memory_low, frames, frame_bytes, 0))
        most = _frames(tenant.memory_max, frames, frame_bytes, UNLIMITED)
        high = _frames(tenant.memory_high, frames, frame_bytes, most)
        where = f"tenants.{name}"
        if most < 1:
            assert tenant.memory_max is not None
            raise ConfigurationError(
                f"{where}: memory_max ({tenant.memory_max.text}) is less than one frame, {frame_bytes} bytes"
            )
        if not low <= high <= most:
            raise ConfigurationError(
                f"{where}: memory_min {least}, memory_low {low}, memory_high {high} and memory_max {most}, in frames "
                f"of {frame_bytes} bytes, must not fall"
            )
        swap_max = UNLIMITED if tenant.swap_max is None else tenant.swap_max.of(slots, frame_bytes)
        limits[name] = TenantLimits(least, low, high, most, swap_max, tenant.weight, tenant.isolate)
    promised = sum(each.min for each in limits.values())
    if promised >= frames:
        raise ConfigurationError(
            f"tenants: memory_min of all together is {promised} frames of {frame_bytes} bytes; the pool has {frames}, "
            "and one at least must be left"
        )
    return limits


def _frames(amount: Amount | None, frames: int, frame_bytes: int, default: int) -> int:
    return default if amount is None else amount.of(frames, frame_bytes)


def as_tables(tenants: Mapping[str, TenantSettings]) -> dict[str, dict[str, Any]]:
    """What `read_tenants` makes these of, without what is not set."""
    plain: dict[str, dict[str, Any]] = {}
    for name, tenant in tenants.items():
        values = {key: getattr(tenant, key) for key in KEYS}
        plain[name] = {
            key: value.text if isinstance(value, Amount) else value
            for key, value in values.items()
            if value is not None
        }
    return plain
