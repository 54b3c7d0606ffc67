"""What the HTTP handlers of one front end share: its settings, the model once it is there, who may come in, counts.

A front end answers from the first moment (`/live`), long before the model is loaded: `FrontEnd.model` is None until
then. It may share the engine's process or be one of several processes (docs/decisions/0016): what concerns the whole
server it asks (`engine`).
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
from aiohttp import web

from service.auth import KeyRing
from service.decoding import UnknownFields
from service.engine_client import EngineState
from service.errors import Draining, EngineDead, Loading, QueueFull, RefusalReason, ServiceUnavailable
from service.generation import PromptNumbers
from service.questions import Answerer, Spend
from service.served_model import ServedModel
from service.turnstile import Turnstile


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that the HTTP side needs."""

    version: str
    api_keys: tuple[str, ...] = ()  # none, and no file: any Authorization header or none is accepted
    api_key_file: str | None = None  # more of them, with tenants (auth.py)
    admin_api_key: str | None = None  # opens /admin/v1 on the main port, and is asked for on the admin port too
    body_limit_bytes: int = 32 * 2**20  # prompts as token ids need about 7 bytes a token
    tls_cert: str | None = None  # files in PEM; both or neither
    tls_key: str | None = None
    cors_allow_origins: tuple[str, ...] = ()  # web pages that may use this server; "*": all
    sse_keep_alive_s: float = 15.0
    stream_interval: int = 1  # tokens of a choice that a stream's event carries, but for the first and the last
    unknown_fields: UnknownFields = "refuse"
    max_logprobs: int = 20  # likeliest tokens that a client may ask for at each place
    max_generating: int | None = None  # requests that generate or wait: each holds a socket, and files are bounded

    def key_ring(self) -> KeyRing:
        """The API keys. Raises ValueError for a file that cannot be used."""
        return KeyRing(self.api_keys, None if self.api_key_file is None else Path(self.api_key_file))


MOST_WAITING = 256
"""Requests that may wait for their turn beyond those that may generate: a third of the spare files (process.py)."""


class HttpMetrics(Protocol):
    """Who counts requests (http_counts.py)."""

    def http_started(self) -> None:
        """A request has arrived."""
        ...

    def http_ended(self, route: str, method: str, status: int) -> None:
        """It was answered, or its client has left (status 499). `route` is a path template: a bounded set."""
        ...

    def refused(self, reason: RefusalReason) -> None:
        """It was answered 429."""
        ...

    def prompt_ended(self, numbers: PromptNumbers) -> None:
        """A prompt with all its choices is over, however it ended."""
        ...


@dataclass(slots=True)
class FrontEnd:
    """One per process that serves HTTP."""

    settings: ApiSettings
    metrics: HttpMetrics
    log_request: Callable[..., None]  # one call per request, with its numbers as keyword arguments
    engine: Answerer  # knows what concerns the whole server; there before the model is
    model: ServedModel | None = None  # set once, when the weights are loaded
    generating: int = 0  # requests that generate now
    turnstile: Turnstile = field(default_factory=Turnstile)
    large_bodies: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while one is decoded
    known_keys: InitVar[Mapping[str, str] | None] = None  # in place of those of the settings (KeyRing.known)
    api_keys: KeyRing = field(init=False)
    admin_keys: KeyRing = field(init=False)

    def __post_init__(self, known_keys: Mapping[str, str] | None) -> None:
        self.api_keys = self.settings.key_ring() if known_keys is None else KeyRing.of(known_keys)
        admin_key = self.settings.admin_api_key
        self.admin_keys = KeyRing(() if admin_key is None else (admin_key,))

    @property
    def state(self) -> EngineState:
        """loading until there is a model, then what its engine says."""
        return "loading" if self.model is None else self.model.client.state

    @property
    def is_alive(self) -> bool:
        """Whether nothing is wrong with the engine, as far as there is one."""
        return self.model is None or self.model.client.is_alive

    def check_room(self) -> None:
        """Raise QueueFull if one more open request would take the sockets that probes and refusals need."""
        self._check_open(self.generating)

    async def enter(self) -> None:
        """Wait until a new request may begin. Raises QueueFull, at once, if so many wait that sockets run out.

        Requests that do not generate, such as aborts, may wait also where no further one may generate.
        """
        self._check_open(self.generating + self.turnstile.waiting, spare=MOST_WAITING)
        await self.turnstile.enter()

    def _check_open(self, held: int, spare: int = 0) -> None:
        if self.settings.max_generating is None:
            return
        limit = self.settings.max_generating + spare
        if held >= limit:
            raise QueueFull(f"{held} requests are open, the limit is {limit}: try again later", reason="open_requests")

    def has_rate(self, tenant: str) -> bool:
        """Whether somebody counts the requests and tokens of a tenant."""
        return self.model is not None and tenant in self.model.client.limits.rated_tenants

    async def spend(self, tenant: str, tokens: int) -> None:
        """Count tokens of a tenant's request that was let in, if anybody counts them."""
        if self.has_rate(tenant):
            with suppress(ServiceUnavailable):  # the engine is gone, and its counts with it
                await self.engine.ask(Spend(tenant, tokens))

    def loaded(self) -> ServedModel:
        """The model. Raises Loading."""
        if self.model is None:
            raise Loading
        return self.model

    def ready(self) -> ServedModel:
        """The model of an engine that takes requests. Raises Loading, Draining or EngineDead."""
        model = self.loaded()
        match model.client.state:
            case "loading":
                raise Loading
            case "draining":
                raise Draining
            case "dead":
                raise EngineDead
        return model

    def ready_for_more(self) -> ServedModel:
        """`ready`, of an engine that would take one more request. Raises QueueFull, too.

        Asked before a request is read: in a flood most of them are refused, and cost little then.
        """
        model = self.ready()
        self.check_room()
        model.client.check_admission(1)
        return model


FRONT_END = web.AppKey("front_end", FrontEnd)
