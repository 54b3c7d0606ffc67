"""What the HTTP handlers of one front end share: its settings, the model once it is there, who may come in, counts.

A front end answers from the first moment (`/live`), long before the model is loaded: `FrontEnd.model` is None until
then. It may share the engine's process or be one of several processes (docs/decisions/0016): what concerns the whole
server it asks (`engine`).
"""

import hashlib
import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from aiohttp import web

from service.decoding import UnknownFields
from service.engine_client import EngineState
from service.errors import Draining, EngineDead, Loading, QueueFull
from service.generation import PromptNumbers
from service.questions import Answerer
from service.served_model import ServedModel


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that the HTTP side needs."""

    version: str
    api_keys: tuple[str, ...] = ()  # none: any Authorization header or none is accepted
    admin_api_key: str | None = None  # opens /admin/v1 on the main port, and is asked for on the admin port too
    body_limit_bytes: int = 32 * 2**20  # prompts as token ids need about 7 bytes a token
    sse_keep_alive_s: float = 15.0
    unknown_fields: UnknownFields = "refuse"
    max_logprobs: int = 20  # likeliest tokens that a client may ask for at each place
    max_generating: int | None = None  # requests that generate or wait: each holds a socket, and files are bounded


class HttpMetrics(Protocol):
    """Who counts requests (http_counts.py)."""

    def http_started(self) -> None:
        """A request has arrived."""
        ...

    def http_ended(self, route: str, method: str, status: int) -> None:
        """It was answered, or its client has left (status 499). `route` is a path template: a bounded set."""
        ...

    def prompt_ended(self, numbers: PromptNumbers) -> None:
        """A prompt with all its choices is over, however it ended."""
        ...


class KeyRing:
    """Secrets that open a door. Only digests are kept, and every comparison takes the same time."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [self._digest(key) for key in keys]

    @staticmethod
    def _digest(key: str) -> bytes:
        # surrogateescape: header bytes that are not UTF-8 arrive so, and must be hashed like any other wrong key
        return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

    def __bool__(self) -> bool:
        return bool(self._digests)

    def holds(self, key: str) -> bool:
        """Whether `key` is one of them."""
        digest, found = self._digest(key), False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return found


@dataclass(slots=True)
class FrontEnd:
    """One per process that serves HTTP."""

    settings: ApiSettings
    metrics: HttpMetrics
    log_request: Callable[..., None]  # one call per request, with its numbers as keyword arguments
    engine: Answerer  # knows what concerns the whole server; there before the model is
    model: ServedModel | None = None  # set once, when the weights are loaded
    generating: int = 0  # requests that generate now
    api_keys: KeyRing = field(init=False)
    admin_keys: KeyRing = field(init=False)

    def __post_init__(self) -> None:
        self.api_keys = KeyRing(self.settings.api_keys)
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
        limit = self.settings.max_generating
        if limit is not None and self.generating >= limit:
            raise QueueFull(
                f"{self.generating} requests are open, the limit is {limit}: try again later", retry_after_s=1
            )

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


FRONT_END = web.AppKey("front_end", FrontEnd)
