"""`pagewalk ps | meminfo | maps ID | trace | audit | top`: a server's admin endpoint on a terminal, here or elsewhere.

Which server: --url, or PAGEWALK_ADMIN_URL, or this machine's port 8001. With which key: --key, or the variables that a
server takes it from. Exit codes: 0 well; 1 the audit has found something, or the server refuses or does not answer;
2 the command is wrong.
"""

import http.client
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import Request, urlopen

from service import admin_text
from service.errors import ConfigurationError
from service.settings import SettingsError
from service.settings_sources import ADMIN_KEY_FILE, ADMIN_URL, PREFIX, Parser, admin_key

COMMANDS: Mapping[str, str] = {
    "ps": "who runs, who waits, and who else holds memory",
    "meminfo": "memory in total",
    "maps": "the pages of one sequence",
    "trace": "what has happened to memory lately; --follow: and happens",
    "audit": "make every count anew, and say what does not add up",
    "top": "sequences, memory and pressure as they change",
}

ANSWER_S = 10.0
LEAST_INTERVAL_S, MOST_INTERVAL_S = 0.1, 3600.0
EXIT_OK, EXIT_TROUBLE, EXIT_USAGE = 0, 1, 2


class Unreachable(Exception):
    """The server does not answer, or refuses. One line."""


class AdminClient:
    """One server's admin endpoint."""

    def __init__(self, url: str, key: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigurationError(f"--url {url}: it must begin with http:// or https://")
        try:
            urlsplit(url).port  # noqa: B018 - looks at it
        except ValueError as error:
            raise ConfigurationError(f"--url {url}: {error}") from None
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ConfigurationError("the key must be printable ASCII")
        self._base = url.rstrip("/").removesuffix("/admin/v1") + "/admin/v1/"
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def facts(self, view: str, **query: Any) -> dict[str, Any]:
        """A view. Raises Unreachable."""
        with self._open(view, query, ANSWER_S) as response, self._reading():
            found: Any = json.load(response)
        if not isinstance(found, dict) or "ts" not in found:
            raise Unreachable(f"{self._base} is not the admin endpoint of a Pagewalk server")
        return found

    def text(self, view: str, **query: Any) -> str:
        """A view as text. Raises Unreachable."""
        with self._open(f"{view}.txt", query, ANSWER_S) as response, self._reading():
            found: str = response.read().decode()
            return found

    def events(self, view: str, **query: Any) -> Iterator[dict[str, Any]]:
        """The events of a stream, until the server ends it. Raises Unreachable."""
        with self._open(f"{view}/stream", query, None) as response, self._reading():
            for line in response:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])

    def act(self, action: str, **body: Any) -> dict[str, Any]:
        """An action. Raises Unreachable."""
        headers = self._headers | {"Content-Type": "application/json"}
        request = Request(self._base + action, json.dumps(body).encode(), headers)
        with self._send(request, ANSWER_S) as response, self._reading():
            found: dict[str, Any] = json.load(response)
            return found

    def _open(self, path: str, query: Mapping[str, Any], timeout_s: float | None) -> http.client.HTTPResponse:
        given = urlencode({name: value for name, value in query.items() if value is not None})
        return self._send(Request(f"{self._base}{path}{'?' if given else ''}{given}", headers=self._headers), timeout_s)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """While an answer is read: one that breaks off, or is no JSON, is Unreachable."""
        try:
            yield
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unreachable(f"{self._base} broke off its answer: {error}") from None

    def _send(self, request: Request, timeout_s: float | None) -> http.client.HTTPResponse:
        try:
            response: http.client.HTTPResponse = urlopen(request, timeout=timeout_s)
            return response
        except HTTPError as error:
            with error:
                raise Unreachable(_reason(error.read(), f"{error.code} {error.reason}")) from None
        except (URLError, OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, URLError) else error
            raise Unreachable(f"{self._base} does not answer: {reason}") from None


def _reason(body: bytes, otherwise: str) -> str:
    """What an error's body says."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return otherwise


# ---------------------------------------------------------------- commands


def main(arguments: list[str]) -> int:
    """Carry one out; returns the exit code."""
    try:
        given = _parser().parse_args(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_USAGE
    try:
        key = given.key or admin_key(os.environ)
        client = AdminClient(given.url or os.environ.get(ADMIN_URL) or f"http://127.0.0.1:{_port()}", key)
        return _RUN[given.command](client, given)
    except (SettingsError, ConfigurationError) as error:
        code = EXIT_USAGE
        print(f"pagewalk: error: {error}", file=sys.stderr)
    except Unreachable as error:
        code = EXIT_TROUBLE
        print(f"pagewalk: error: {error}", file=sys.stderr)
    except BrokenPipeError:  # as of `pagewalk trace | head`
        code = EXIT_OK
    except KeyboardInterrupt:
        code = 130
    return code


def _port() -> str:
    return os.environ.get(f"{PREFIX}ADMIN_PORT") or "8001"


def _parser() -> Parser:
    parser = Parser(prog="pagewalk", description="Look at a running server.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text.capitalize() + ".")
        command.add_argument("--url", help=f"of the admin endpoint (default: ${ADMIN_URL}, or http://127.0.0.1:8001)")
        command.add_argument("--key", help=f"admin key (default: ${PREFIX}ADMIN_API_KEY, or ${ADMIN_KEY_FILE})")
        if name != "top":
            command.add_argument("--json", action="store_true", help="the same facts as JSON")
        if name == "maps":
            command.add_argument("id", help="of a sequence, as ps shows it, or of its request")
        if name in ("ps", "trace"):
            command.add_argument("--limit", type=int, help="lines at most (default: 100)")
            command.add_argument("--tenant", help="of this tenant only")
        if name == "trace":
            command.add_argument("--follow", action="store_true", help="go on as things happen")
            command.add_argument("--event", help="of this kind only, such as preempt")
            command.add_argument("--request", help="of this request only")
        if name == "top":
            command.add_argument("--interval", type=float, default=1.0, help="seconds between two (default: 1)")
            command.add_argument("--once", action="store_true", help="print one picture, and end")
    return parser


def _show(client: AdminClient, given: Any, view: str, **query: Any) -> int:
    if given.json:
        print(json.dumps(client.facts(view, **query), indent=2))
    else:
        sys.stdout.write(client.text(view, **query))
    return EXIT_OK


def _ps(client: AdminClient, given: Any) -> int:
    return _show(client, given, "sequences", limit=given.limit, tenant=given.tenant)


def _meminfo(client: AdminClient, given: Any) -> int:
    return _show(client, given, "meminfo")


def _maps(client: AdminClient, given: Any) -> int:
    return _show(client, given, f"sequences/{quote(given.id, safe='')}/maps")


def _trace(client: AdminClient, given: Any) -> int:
    query = {"event": given.event, "request": given.request, "tenant": given.tenant, "limit": given.limit}
    if not given.follow:
        return _show(client, given, "trace", **query)
    for facts in client.events("trace", **query):
        if "error" in facts:
            raise Unreachable(facts["error"]["message"])
        for event in facts["events"]:
            print(json.dumps(event) if given.json else admin_text.trace_line(event), flush=True)
    return EXIT_OK


def _audit(client: AdminClient, given: Any) -> int:
    facts = client.facts("audit")
    if given.json:
        print(json.dumps(facts, indent=2))
    else:
        sys.stdout.write(admin_text.audit(facts))
    return EXIT_OK if facts["balanced"] else EXIT_TROUBLE


def _top(client: AdminClient, given: Any) -> int:
    from service import top  # curses: not on every system

    if not LEAST_INTERVAL_S <= given.interval <= MOST_INTERVAL_S:
        limits = f"{LEAST_INTERVAL_S:g} to {MOST_INTERVAL_S:g} seconds"
        raise ConfigurationError(f"--interval {given.interval:g}: {limits}")
    if given.once or not sys.stdout.isatty():
        before = client.facts("pulse")
        time.sleep(given.interval)
        picture = top.Picture(before, client.facts("pulse"), client.facts("sequences", limit=top.MOST_LINES))
        print("\n".join(picture.lines(shutil.get_terminal_size((200, 0)).columns)))
        return EXIT_OK
    return top.run(client, given.interval)


_RUN: Mapping[str, Callable[[AdminClient, Any], int]] = {
    "ps": _ps,
    "meminfo": _meminfo,
    "maps": _maps,
    "trace": _trace,
    "audit": _audit,
    "top": _top,
}
