"""The two ports of a front end: open, answer, close. The same in the engine's process and in one of its own."""

import errno
import ssl
from collections.abc import Callable, Sequence

from aiohttp import web

from service.api import make_admin_app, make_app
from service.errors import ConfigurationError
from service.front_end import FrontEnd
from service.http_server import Address, addresses_of, listen, make_runner

FLUSH_S = 5.0
"""At the end, how long handlers may take to send what is ready: error events, the last text."""


def cannot_listen(error: OSError, host: str, port: int, flag: str) -> ConfigurationError:
    """What to tell the person who started the server. flag: of the port, without dashes."""
    where = f"{url_host(host, listening=True)}:{port}"
    if error.errno == errno.EADDRINUSE:
        return ConfigurationError(f"{where} is in use: stop what listens there, or choose another --{flag}")
    return ConfigurationError(f"cannot listen on {where}: {error.strerror or error}")


def url_host(address: str, *, listening: bool = False) -> str:
    """An address as it stands in a URL; one that means "all" is reached as localhost."""
    if address in ("0.0.0.0", "::") and not listening:
        return "127.0.0.1"
    return f"[{address}]" if ":" in address else address


class Doors:
    """Listens for one FrontEnd."""

    def __init__(
        self, front_end: FrontEnd, tls: ssl.SSLContext | None, *, on_connection: Callable[[], None] = lambda: None
    ) -> None:
        """tls: what the main port speaks; the admin port speaks plain HTTP. on_connection: called for each one that
        the main port accepts.
        """
        self.front_end = front_end
        self._on_connection = on_connection
        self._tls = tls
        self.port = self.admin_port = 0
        self._runners: list[web.AppRunner] = []

    async def open_at(self, host: str, port: int, admin_host: str, admin_port: int) -> None:
        """Answer on every address of two hosts. Raises ConfigurationError."""
        ports = []
        places = [(self._open, host, port, "port"), (self._open_admin, admin_host, admin_port, "admin-port")]
        for open_, where, number, flag in places:
            try:
                ports.append(await open_(await addresses_of(where, number), share=False))
            except OSError as error:
                raise cannot_listen(error, where, number, flag) from None
        self.port, self.admin_port = ports

    async def share(self, addresses: Sequence[Address], admin_addresses: Sequence[Address]) -> None:
        """Answer on addresses that other processes answer on too. Raises OSError."""
        self.port = await self._open(addresses, share=True)
        self.admin_port = await self._open_admin(admin_addresses, share=True)

    async def _open(self, addresses: Sequence[Address], *, share: bool) -> int:
        runner = await self._runner(make_app(self.front_end), self._on_connection)
        await listen(runner, addresses, share=share, tls=self._tls)
        return int(runner.addresses[0][1])

    async def _open_admin(self, addresses: Sequence[Address], *, share: bool) -> int:
        runner = await self._runner(make_admin_app(self.front_end))
        await listen(runner, addresses, share=share)
        return int(runner.addresses[0][1])

    async def _runner(self, app: web.Application, on_connection: Callable[[], None] = lambda: None) -> web.AppRunner:
        runner = make_runner(app, shutdown_timeout_s=FLUSH_S, on_connection=on_connection)
        await runner.setup()
        self._runners.append(runner)
        return runner

    async def close(self) -> None:
        """Accept nothing more. Handlers send what is left, for FLUSH_S at most. Idempotent."""
        if self.front_end.model is not None:
            self.front_end.model.grammars.close()  # compiling one may take longer, and nothing runs any more
        runners, self._runners = self._runners, []
        for runner in runners:
            await runner.cleanup()
