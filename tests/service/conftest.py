"""Fixtures of the HTTP tests: servers that are started for one test (tests/support/http_house.py)."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from http_house import Server, Start, running_server


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A server with the defaults of the tests."""
    async with running_server() as started:
        yield started


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts servers with changes: `await start(settings={...})`."""
    async with AsyncExitStack() as stack:

        async def start_one(**changes: Any) -> Server:
            return await stack.enter_async_context(running_server(**changes))

        yield start_one
