"""One choice of an answer: a Sequence's tokens become text here, and text stops are found here.

Streamed and whole answers both read their text from `Choice.read`, so they are equal by construction.

    tokens ──▶ Detokenizer (whole characters) ──▶ StopMatcher (holds back what may become a stop) ──▶ Delta

An end token's own text is not part of the answer (unless include_stop_str_in_output asks for it), as with a stop
string. When a stop string is complete, the engine is told to finish there; tokens that it had made beyond are neither
sent nor counted.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from service.engine_client import Ended
from service.errors import InternalError, ServiceUnavailable
from service.token_stream import TokenStream
from service.tokenization import Detokenizer, StopMatcher

MERGE_ABOVE = 16
"""More tokens than this that wait for a slow reader become one event; a reader that keeps up gets one event a token."""

FinishReason = Literal["stop", "length"]


class Delta(NamedTuple):
    """What one event carries. The last Delta of a choice has a finish_reason."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Choice:
    """Reads one TokenStream."""

    __slots__ = (
        "_detokenizer",
        "_ends_complete",
        "_finish",
        "_held",
        "_include_stop",
        "_matcher",
        "_stop_token_ids",
        "completion_tokens",
        "ended",
        "finish_reason",
        "index",
        "prompt_ids",
        "stop_reason",
        "stream",
    )

    def __init__(
        self,
        *,
        index: int,
        prompt_ids: list[int],
        stream: TokenStream,
        detokenizer: Detokenizer,
        matcher: StopMatcher | None,
        include_stop: bool,
        stop_token_ids: frozenset[int],
        finish: Callable[[int], None],
        ends_complete: bool = False,
    ) -> None:
        """stop_token_ids: those that the client named, reported as stop_reason.

        finish(at) tells the engine to end the Sequence after `at` tokens; nothing happens if it has ended.
        ends_complete: the last Delta waits for `ended`, as it is sent with numbers that come with it.
        """
        self.index = index
        self.prompt_ids = prompt_ids
        self.stream = stream
        self.completion_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.ended: Ended | None = None  # comes some steps after finish_reason when a stop string was found
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._include_stop = include_stop
        self._stop_token_ids = stop_token_ids
        self._finish = finish
        self._ends_complete = ends_complete
        self._held: Delta | None = None

    def read(self) -> list[Delta]:
        """What arrived since the last read: one Delta a token, or one for all of them when many have waited.

        Raises EngineDead, InternalError or ServiceUnavailable if the Sequence cannot go on.
        """
        tokens, ended = self.stream.take()
        if ended is not None:
            self.ended = ended
        if self.finish_reason is not None:
            return self._release_held()  # tokens past a stop string were never made
        if ended is not None:
            _check_end(ended)
        end_token = ended.end_token if ended is not None and ended.reason == "stop" else -1
        deltas: list[Delta] = []
        for i, token in enumerate(tokens):
            self.completion_tokens += 1
            if token == end_token and i == len(tokens) - 1 and not self._include_stop:
                deltas.append(Delta("", [token]))
            else:
                deltas.append(self._delta(self._detokenizer.push(token), [token]))
            if self.finish_reason is not None:  # a stop string
                self._finish(self.completion_tokens)
                break
        if ended is not None and self.finish_reason is None:
            deltas.append(self._last(deltas.pop() if deltas else Delta("", []), ended))
        if self._ends_complete and self.finish_reason is not None and ended is None:
            self._held = deltas.pop()
        return [_merged(deltas)] if len(deltas) > MERGE_ABOVE else deltas

    def _release_held(self) -> list[Delta]:
        """The last Delta, if it was kept back until now."""
        if self._held is None or self.ended is None:
            return []
        held, self._held = self._held, None
        return [held]

    def _delta(self, text: str, token_ids: list[int]) -> Delta:
        """New text, up to a stop string if it completes one."""
        if self._matcher is None:
            return Delta(text, token_ids)
        found = self._matcher.push(text)
        if not found.stopped:
            return Delta(found.text, token_ids)
        self.finish_reason, self.stop_reason = "stop", found.which
        return Delta(found.text, token_ids, self.finish_reason, self.stop_reason)

    def _last(self, delta: Delta, ended: Ended) -> Delta:
        """`delta` with all text that was held back and the reason of the end."""
        tail = self._delta(self._detokenizer.flush(), [])
        text = delta.text + tail.text
        if tail.finish_reason is None:
            if self._matcher is not None:
                text += self._matcher.flush()
            self.finish_reason = "stop" if ended.reason == "stop" else "length"
            if ended.reason == "stop" and ended.end_token in self._stop_token_ids:
                self.stop_reason = ended.end_token
        return Delta(text, delta.token_ids, self.finish_reason, self.stop_reason)


def _merged(deltas: list[Delta]) -> Delta:
    """Several events as one. Only the last can carry a reason."""
    text = "".join(delta.text for delta in deltas)
    token_ids = [token for delta in deltas for token in delta.token_ids]
    return Delta(text, token_ids, deltas[-1].finish_reason, deltas[-1].stop_reason)


def _check_end(ended: Ended) -> None:
    """Raises what tells the client that the server gave the Sequence up: a finish reason would look like an answer."""
    if ended.reason == "error":
        raise InternalError(ended.message or "The server failed while it worked on this request.")
    if ended.reason == "abort":
        raise ServiceUnavailable(ended.message or "The server has aborted this request.")
