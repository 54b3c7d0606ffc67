"""Bodies of the actions under /admin/v1, and which action takes which. Memory in frames and slots."""

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

from service.engine_client import DEFAULT_TENANT
from service.errors import BadRequest
from service.field_checks import MAX_PRIORITY, check_request_id
from service.messages import ChatMessage
from service.schema import Body, StreamOptions
from service.tenant_settings import TENANT_NAME, is_tenant_name

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Meta(gt=0, le=31_536_000)]


class ActionBody(Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every action takes: nothing."""

    model: None = None  # one server, one model


class SetPriority(ActionBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lower runs earlier, as in requests."""

    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]


class OomScoreAdj(ActionBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How likely a victim it is: -1000 (never) to 1000."""

    oom_score_adj: Annotated[int, Meta(ge=-1000, le=1000)]


Advised = Literal["willneed", "cold", "pageout", "dontneed"]


class Madvise(ActionBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What will become of its pages (mm/advice.py)."""

    advice: Advised


class Prefix(ActionBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What prompts begin with, by its tokens or by the chat that begins with it."""

    tokens: list[Count] | None = None
    messages: list[ChatMessage] | None = None
    salt: str = ""
    tenant: str = DEFAULT_TENANT

    def check(self) -> None:
        super().check()
        if not is_tenant_name(self.tenant):
            raise BadRequest(f"tenant must be {TENANT_NAME}.", param="tenant")


class AdvisePrefix(Prefix, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What will become of its cached pages (mm/advice.py)."""

    advice: Advised

    def check(self) -> None:
        super().check()
        if (self.tokens is None) == (self.messages is None):
            raise BadRequest("exactly one of tokens and messages is needed.", param="tokens")


class PinPrefix(Prefix, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cached prefix; also by the hash of its last page."""

    owner: Annotated[str, Meta(min_length=1, max_length=128)]
    hash: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")] | None = None
    ttl_s: Seconds | None = None

    def check(self) -> None:
        super().check()
        if sum(given is not None for given in (self.tokens, self.messages, self.hash)) != 1:
            raise BadRequest("exactly one of tokens, messages and hash is needed.", param="tokens")


class Unpin(ActionBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pin by its number, or all of an owner."""

    pin: Count | None = None
    owner: str | None = None

    def check(self) -> None:
        super().check()
        if (self.pin is None) == (self.owner is None):
            raise BadRequest("exactly one of pin and owner is needed.", param="pin")


class DropCaches(ActionBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As drop_caches: 1 the cached pages that nobody maps; 2 the shadows of evicted ones; 3 both."""

    level: Literal[1, 2, 3]


class SetWatermarks(ActionBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """In free frames; what is left out stays."""

    min: Count | None = None
    low: Count | None = None
    high: Count | None = None


class Overcommit(ActionBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may be promised from now on."""

    mode: Literal["strict", "heuristic", "always"]


class SetLimits(ActionBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a tenant, as in mm/tenants.py; "max" is none; what is left out stays."""

    min: Count | None = None
    low: Count | None = None
    high: Count | Literal["max"] | None = None
    max: Count | Literal["max"] | None = None
    swap_max: Count | Literal["max"] | None = None
    weight: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    isolate: bool | None = None


class Resize(ActionBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the pool and of the swap area; what is left out stays."""

    frames: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    slots: Count | None = None


class Drain(ActionBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Admit nothing more; after timeout_s, end what still runs. None: it may run to its end."""

    timeout_s: Seconds | None = None


class SaveTo(ActionBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """sequences/{of}/checkpoint: the name of a file in the folder for checkpoints."""

    path: str


class RestoreFrom(ActionBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """restore: such a file, and how the rest of the answer is to be told."""

    path: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None  # None: as the request had it
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    def check(self) -> None:
        super().check()
        if self.request_id is not None:
            check_request_id(self.request_id)
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options is only allowed with stream: true.", param="stream_options")


BODIES: Mapping[str, type[ActionBody]] = {
    "sequences/{of}/abort": ActionBody,
    "sequences/{of}/pause": ActionBody,
    "sequences/{of}/resume": ActionBody,
    "sequences/{of}/priority": SetPriority,
    "sequences/{of}/oom_score_adj": OomScoreAdj,
    "sequences/{of}/madvise": Madvise,
    "sequences/{of}/swap_out": ActionBody,
    "sequences/{of}/swap_in": ActionBody,
    "page_cache/pin": PinPrefix,
    "page_cache/unpin": Unpin,
    "page_cache/madvise": AdvisePrefix,
    "page_cache/drop": DropCaches,
    "watermarks": SetWatermarks,
    "overcommit": Overcommit,
    "tenants/{of}": SetLimits,
    "resize": Resize,
    "drain": Drain,
}
"""Every action, by its path."""
