"""Set-up of structlog: one form for everything that is logged, to stderr.

A console renderer on a terminal, one JSON object a line elsewhere. What other libraries log through Python's `logging`
takes the same way. An error that repeats is written a few times a minute, and then counted: one fault must not fill a
disk. No prompt or output text is ever logged.
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor

REPEATS = 5
REPEATS_WINDOW_S = 60.0
REMEMBERED_EVENTS = 1000

ACCESS = "pagewalk.access"
"""The logger of the lines per request, which are never left out."""

Format = Literal["auto", "console", "json"]


def configure(
    level: str = "info",
    format: Format = "auto",
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Send everything from `level` on to `stream` (stderr). May be called again: the last call counts."""
    stream = sys.stderr if stream is None else stream
    is_console = format == "console" or (format == "auto" and stream.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    final: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if is_console:
        final.append(
            structlog.dev.ConsoleRenderer(
                colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_event_to=24
            )
        )
    else:
        final += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_to_json)]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=final))
    handler.addFilter(_Repeats(clock))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("asyncio", "huggingface_hub", "httpx", "urllib3", "filelock"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)


def log_request(**numbers: Any) -> None:
    """The access line: one for each request, with its numbers. Our own failures are errors, everything else is not.

    What structlog's processors and Python's logger would make of it is made here: they take as long as a fifth of all
    that a refused request costs, most of it for the caller's name and place, which no line has.
    """
    name, level = ("error", logging.ERROR) if numbers.get("status", 0) in (500, 501) else ("info", logging.INFO)
    log = logging.getLogger(ACCESS)
    if not log.isEnabledFor(level):
        return
    timestamp = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    event = {"timestamp": timestamp, "level": name, "event": "request", "logger": ACCESS, **numbers}
    record = logging.LogRecord(ACCESS, level, "", 0, event, None, None)
    record._logger, record._name = None, name  # as structlog marks what is its own
    log.handle(record)


class _Repeats(logging.Filter):
    """Lets an equal warning or error through `REPEATS` times in a window; the next one tells what was left out."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}  # (logger, event) -> window's start, count

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or record.name == ACCESS:
            return True
        event = record.msg if isinstance(record.msg, dict) else {"event": record.msg}  # structlog's, or a library's
        key, now = (record.name, str(event["event"])), self._clock()
        began, count = self._seen.get(key, (now, 0))
        if now - began >= REPEATS_WINDOW_S:
            if count > REPEATS:
                event["left_out"] = count - REPEATS
            began, count = now, 0
        if len(self._seen) >= REMEMBERED_EVENTS:
            self._seen.clear()
        self._seen[key] = began, count + 1
        return count < REPEATS


def _to_json(event: EventDict, **_: Any) -> str:
    """Keys in the order that people look for them. Values that JSON does not know are written as text."""
    first = {key: event.pop(key) for key in ("timestamp", "level", "event", "logger") if key in event}
    try:
        return msgspec.json.encode({**first, **event}, enc_hook=str).decode()
    except UnicodeEncodeError:  # bytes of a client that are no text
        return json.dumps({**first, **event}, default=str)
