"""The errors of the service and their HTTP form.

    PagewalkError                500  InternalServerError
    ├── BadRequest               400  BadRequestError          malformed, out of range, can never fit
    ├── NotImplementedYet        400  NotImplementedError      known to the API, not served by this version
    ├── AuthenticationError      401  AuthenticationError
    ├── PermissionDenied         403  PermissionDeniedError
    ├── NotFound                 404  NotFoundError
    ├── MethodNotAllowed         405  MethodNotAllowed         with the Allow header
    ├── NotStarted               409  ConflictError            try again
    ├── PayloadTooLarge          413  PayloadTooLarge
    ├── UnsupportedMediaType     415  UnsupportedMediaType
    ├── ExpectationFailed        417  ExpectationFailed
    ├── QueueFull                429  RateLimitError           with Retry-After
    ├── RateLimited              429  RateLimitError           with Retry-After
    ├── InternalError            500  InternalServerError
    └── ServiceUnavailable       503  ServiceUnavailableError  with Retry-After
        ├── Loading                   the weights are not there yet
        ├── Draining                  the server is about to stop
        ├── Aborted                   its owner, or an operator, has ended the request
        └── EngineDead                the engine has stopped for good

A message is written for the client: it carries the numbers, never a Python name or a traceback, is at most 1,000
characters long and echoes at most 200 characters of the client's input (`quoted`). `str(error)` is that message.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, Literal

import msgspec

MESSAGE_LIMIT = 1000
ECHO_LIMIT = 200


def quoted(value: object, limit: int = ECHO_LIMIT) -> str:
    """A client's value as it may stand in a message: JSON form, cut at `limit` characters, one line."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= limit else text[:limit] + "…"


def _text(message: str) -> str:
    """Headers may bring bytes that are no text; JSON has no place for them."""
    return message.encode("utf-8", "replace").decode()


class ErrorObject(msgspec.Struct, frozen=True):
    """The `error` object on the wire."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer with a status of 400 or more."""

    error: ErrorObject


class PagewalkError(Exception):
    """Something that is told to a client. `param` is the field of the request that is to blame, if one is."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "InternalServerError"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(_text(message if len(message) <= MESSAGE_LIMIT else f"{message[: MESSAGE_LIMIT - 1]}…"))
        self.param = None if param is None else _text(param)

    @property
    def headers(self) -> dict[str, str]:
        """Headers that go with the status."""
        return {}

    def body(self) -> bytes:
        """The JSON body, one line."""
        return msgspec.json.encode(ErrorBody(ErrorObject(str(self), self.type, self.param, self.status)))


class BadRequest(PagewalkError):
    """The request is malformed or asks for what can never be done. Trying again cannot help."""

    status = 400
    type = "BadRequestError"


class NotImplementedYet(PagewalkError):
    """The API names this field or route, but this version does not serve it; clients are told not to retry."""

    status = 400
    type = "NotImplementedError"

    @property
    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "false"}


class AuthenticationError(PagewalkError):
    """No key, or one that nobody has."""

    status = 401
    type = "AuthenticationError"

    @property
    def headers(self) -> dict[str, str]:
        return {"WWW-Authenticate": "Bearer"}


class PermissionDenied(PagewalkError):
    """A good key that does not open this door."""

    status = 403
    type = "PermissionDeniedError"


class NotFound(PagewalkError):
    """Unknown path or model."""

    status = 404
    type = "NotFoundError"


class MethodNotAllowed(PagewalkError):
    """The path exists; the method does not."""

    status = 405
    type = "MethodNotAllowed"

    def __init__(self, message: str, *, allow: Sequence[str]) -> None:
        super().__init__(message)
        self.allow = tuple(sorted(allow))

    @property
    def headers(self) -> dict[str, str]:
        return {"Allow": ", ".join(self.allow)}


class NotStarted(PagewalkError):
    """What is asked of a request needs its first token, which has not come yet. Clients try again by themselves."""

    status = 409
    type = "ConflictError"


class PayloadTooLarge(PagewalkError):
    """The body is over the limit, and was not read to its end."""

    status = 413
    type = "PayloadTooLarge"


class UnsupportedMediaType(PagewalkError):
    """The body is not JSON in UTF-8."""

    status = 415
    type = "UnsupportedMediaType"


class ExpectationFailed(PagewalkError):
    """An Expect header other than 100-continue."""

    status = 417
    type = "ExpectationFailed"


RefusalReason = Literal["queue_requests", "queue_tokens", "open_requests", "rate_limit"]


class QueueFull(PagewalkError):
    """As many requests wait as may wait. `reason` says which bound was met, for the counters."""

    status = 429
    type = "RateLimitError"

    def __init__(self, message: str, *, retry_after_s: int = 1, reason: RefusalReason = "queue_requests") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason: RefusalReason = reason

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self.retry_after_s)}


class RateLimited(QueueFull):
    """As many requests or tokens as the tenant may have, now or this minute."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message, retry_after_s=retry_after_s, reason="rate_limit")


class InternalError(PagewalkError):
    """A fault of this server."""


class ServiceUnavailable(PagewalkError):
    """Nothing is wrong with the request; the server cannot take it now."""

    status = 503
    type = "ServiceUnavailableError"

    def __init__(self, message: str, *, retry_after_s: int = 5) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self.retry_after_s)}


class Loading(ServiceUnavailable):
    """The model is being loaded or warmed up."""

    def __init__(self, message: str = "The model is still loading.", *, retry_after_s: int = 5) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


class Draining(ServiceUnavailable):
    """The server finishes what runs, admits nothing more and then stops."""

    def __init__(self, message: str = "The server is shutting down.", *, retry_after_s: int = 10) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


class Aborted(ServiceUnavailable):
    """The request was ended on purpose: trying again would only make work for whoever ended it."""

    @property
    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "false"}


class EngineDead(ServiceUnavailable):
    """The engine has stopped for good; the process will be replaced."""

    def __init__(self, message: str = "The engine has stopped.", *, retry_after_s: int = 10) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


@contextmanager
def told_as(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors about fields name them as this route does: `names` has ours -> its."""
    try:
        yield
    except (BadRequest, NotImplementedYet) as error:
        if error.param is None or error.param not in names:
            raise
        ours, told = error.param, names[error.param]
        words = str(error)
        if words.startswith(f"{ours} "):
            words = told + words.removeprefix(ours)
        words = words.replace(f"`$.{ours}", f"`$.{told}")
        raise type(error)(words, param=told) from None


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_body(error: PagewalkError, request_id: str | None = None) -> bytes:
    """The same error in the form of the Anthropic API, one line. Statuses are those of the common form."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    body = {"type": "error", "error": {"type": kind, "message": str(error)}, "request_id": request_id}
    return msgspec.json.encode(body)


class ConfigurationError(Exception):
    """Settings that cannot work, alone or with this model or device: exit code 2, never on the wire."""
