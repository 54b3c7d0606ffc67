"""The queue between the engine's client and one HTTP handler.

A handler makes one Inbox and, for every Sequence of its request, one TokenStream that reports to it. The client of the
engine fills streams (`put`, `end`, `fail`); the handler waits on the Inbox and takes from the streams that have
something. Closing a stream that has not ended cancels its Sequence, so a handler that leaves for whatever reason leaves
nothing running.

Everything here happens on one event loop, in one thread: no locks. A slow reader costs memory only for ids of tokens,
and the engine makes at most `max_tokens` of them per Sequence; what waits is taken at once.

    client ── put/end/fail ──▶ TokenStream ──(first news)──▶ Inbox ── next_ready ──▶ handler ── take ──▶ tokens, ended

While a handler has nothing to do but to pass tokens on, it lends its place to a plain function (`read_with`), which is
called once for all news of a step: that saves the switch to the handler's task for each token.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from service.engine_client import Ended, Scores
from service.errors import EngineDead
from service.turn import Turn


class TokenChunk(NamedTuple):
    """What a stream held when it was read: the tokens since the last read, and the end if that was it.

    scores: one for each token, or none at all.
    """

    tokens: list[int]
    ended: Ended | None
    scores: list[Scores]


class Inbox:
    """What one handler waits on: which of its streams have news."""

    __slots__ = ("_is_called", "_reader", "_ready", "_turn", "_waiter")

    def __init__(self, turn: Turn | None = None) -> None:
        """turn: shared by all inboxes of a front end; None: its own."""
        self._turn = Turn() if turn is None else turn
        self._ready: list[TokenStream] = []
        self._waiter: asyncio.Future[None] | None = None
        self._reader: Callable[[list[TokenStream]], bool] | None = None
        self._is_called = False  # the reader is about to be

    def wake(self) -> None:
        """Let `next_ready` return, with an empty list if no stream has news; `read_with` returns, too."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def add(self, stream: "TokenStream") -> None:
        """Called by a stream with its first news since it was read."""
        self._ready.append(stream)
        if self._reader is None:
            self.wake()
        elif not self._is_called:
            self._is_called = True
            self._turn.add(self._call)  # not now: a step may have more news for this handler

    async def read_with(self, reader: "Callable[[list[TokenStream]], bool]") -> None:
        """Call `reader` with the streams that have news, until it returns False, or `wake` is called.

        Raises what the reader raises.
        """
        self._waiter = asyncio.get_running_loop().create_future()
        self._reader = reader
        try:
            if self._ready:
                self._call()
            await self._waiter
        finally:
            self._reader = self._waiter = None

    def _call(self) -> None:
        self._is_called = False
        if self._reader is None or self._waiter is None or self._waiter.done():
            return  # what has come waits for next_ready
        ready, self._ready = self._ready, []
        try:
            goes_on = self._reader(ready)
        except Exception as error:  # noqa: BLE001 - raised again where the handler waits
            self._waiter.set_exception(error)
        else:
            if not goes_on:
                self._waiter.set_result(None)

    async def next_ready(self) -> "list[TokenStream]":
        """The streams with news, in order of arrival. Waits for some, or for `wake`. One reader at a time."""
        if not self._ready:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        ready, self._ready = self._ready, []
        return ready


class TokenStream:
    """The tokens of one Sequence on their way to one handler.

    `end` comes in the same turn of the event loop as the `put` of the last token: whoever reads that token also reads
    how the Sequence ended, and knows an end token when it sees one.
    """

    __slots__ = (
        "_cancel",
        "_due",
        "_ended",
        "_failure",
        "_inbox",
        "_interval",
        "_is_listed",
        "_is_over",
        "_prompt_scores",
        "_scores",
        "_tokens",
    )

    def __init__(
        self,
        cancel: Callable[[], None] | None = None,
        inbox: Inbox | None = None,
        prompt_scores: list[Scores] | None = None,
        interval: int = 1,
    ) -> None:
        """`cancel` is called once, by `close`, if the Sequence has not ended by then.

        prompt_scores: where those of the prompt go. All choices of a prompt show them, whichever is read first.
        interval: after the first token, so many make news; fewer wait, until the end at the latest.
        """
        self._interval = interval
        self._due = 1  # tokens that are news
        self._cancel = cancel
        self._inbox = Inbox() if inbox is None else inbox
        self._tokens: list[int] = []
        self._scores: list[Scores] = []
        self._prompt_scores = prompt_scores
        self._ended: Ended | None = None
        self._failure: str | None = None
        self._is_listed = False  # in the inbox, not read yet
        self._is_over = False  # ended, failed or closed: nothing is left to cancel

    # -- the engine's client

    def put(self, tokens: int | list[int], scores: Scores | None = None) -> None:
        """Add tokens; a single one may have scores. What arrives after the end or after `close` is dropped."""
        if self._is_over:
            return
        if scores is not None:
            self._scores.append(scores)
        if isinstance(tokens, int):
            self._tokens.append(tokens)
        else:
            self._tokens.extend(tokens)
        if not self._is_listed and len(self._tokens) >= self._due:
            self._is_listed = True  # _report, without the call: this is done for every token
            self._inbox.add(self)

    def put_prompt_scores(self, scores: list[Scores]) -> None:
        """Scores of the prompt's next tokens: no news by themselves, since they come before the first token."""
        if not self._is_over and self._prompt_scores is not None:
            self._prompt_scores += scores

    def end(self, ended: Ended) -> None:
        """The Sequence ended. Dropped after `close`."""
        if self._is_over:
            return
        self._ended = ended
        self._is_over = True
        self._report()

    def fail(self, message: str) -> None:
        """The engine is gone, and the Sequence with it. `message` is for the client."""
        if self._is_over:
            return
        self._failure = message
        self._is_over = True
        self._report()

    def _report(self) -> None:
        if not self._is_listed:
            self._is_listed = True
            self._inbox.add(self)

    # -- the handler

    def take_one(self) -> int | None:
        """The one token that waits, if it has no scores and nothing else waits; else None, and nothing is taken."""
        if self._is_over or self._scores or len(self._tokens) != 1:
            return None
        self._is_listed = False
        self._due = self._interval
        return self._tokens.pop()

    def take(self) -> TokenChunk:
        """Everything that waits. Raises EngineDead once the tokens before a failure have been taken."""
        self._is_listed = False
        tokens, self._tokens = self._tokens, []
        if tokens:
            self._due = self._interval
        scores, self._scores = self._scores, []
        if self._failure is not None:
            if not tokens:
                raise EngineDead(self._failure)
            self._report()  # the failure is the next news
            return TokenChunk(tokens, None, scores)
        return TokenChunk(tokens, self._ended, scores)

    async def __aiter__(self) -> AsyncIterator[TokenChunk]:
        """Chunks until the end, for a stream with an inbox of its own. Raises EngineDead."""
        while True:
            for stream in await self._inbox.next_ready():
                chunk = stream.take()
                yield chunk
                if chunk.ended is not None:
                    return

    def close(self) -> None:
        """Nobody reads any more: cancel the Sequence unless it is over. Idempotent."""
        if not self._is_over:
            self._is_over = True
            if self._cancel is not None:
                self._cancel()
