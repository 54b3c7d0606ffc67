"""One choice of an answer: a Sequence's tokens become text here, and text stops are found here.

Streamed and whole answers both read their text from `Choice.read`, so they are equal by construction.

    tokens ──▶ Detokenizer (whole characters) ──▶ StopMatcher (holds back what may become a stop)
           ──▶ AnswerReader (chats with tools or reasoning: takes calls and reasoning out of the text) ──▶ Delta

An end token's own text is not part of the answer (unless include_stop_str_in_output asks for it), as with a stop
string. When a stop string is complete, the engine is told to finish there; tokens that it had made beyond are neither
sent nor counted. Stop strings that are complete within the first min_tokens tokens do not count. A choice also ends
with the last call that it may have, in the same way.

Log-probabilities: every token that counts has an entry, also an end token, and one whose text a stop string cuts off;
so there are as many entries as completion_tokens. An entry goes out with the event in which the text before its token
has been sent, which may be later than its token: until then a stop string may still take that text away. Its offset
points into the text as it was sent: those of tokens that were cut off point to its end.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from service.answer_parts import Content, Part, content_of, joined
from service.byte_detokenizer import IncrementalDecoder
from service.engine_client import Ended, Scores
from service.errors import Aborted, BadRequest, InternalError, QueueFull
from service.logprobs import ScoredToken
from service.prompts import Prompt
from service.stop_strings import StopMatcher
from service.token_stream import TokenStream

MERGE_ABOVE = 16
"""More tokens than this that wait for a slow reader become one event; a reader that keeps up gets one event a token
(or, with --stream-interval, for all that have come together)."""

PIECE_DELTAS = 256
"""Deltas that a whole answer gathers before they become one."""

FinishReason = Literal["stop", "length", "tool_calls"]

TIMEOUT = "timeout"
"""The stop_reason of a choice that timeout_s ended, with finish_reason length."""


class Delta(NamedTuple):
    """What one event carries. The last Delta of a choice has a finish_reason.

    parts: what the answer to a chat was taken apart into; `text` is its content then. Empty where nothing is.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    scored: tuple[ScoredToken, ...] = ()
    parts: tuple[Part, ...] = ()

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """What it says, in order, whether it was taken apart or not."""
        return self.parts or ((Content(self.text),) if self.text else ())


@dataclass(frozen=True, slots=True)
class TextRules:
    """How tokens become text: the same for all choices of a request."""

    matcher: StopMatcher | None = None  # of the request's stop strings; each choice takes a fresh one
    include_stop: bool = False
    stop_token_ids: frozenset[int] = frozenset()  # those that the client named, reported as stop_reason
    min_tokens: int = 0
    ends_complete: bool = False  # the last Delta waits for `ended`, as it is sent with numbers that come with it
    merge_above: int = MERGE_ABOVE
    is_echo_only: bool = False  # max_tokens is 0: what the engine makes, since it makes one token, is not the answer's


class Choice:
    """Reads one TokenStream."""

    __slots__ = (
        "_before",
        "_begins",
        "_detokenizer",
        "_finish",
        "_held",
        "_is_plain",
        "_matcher",
        "_reader",
        "_rules",
        "_sent",
        "_text",
        "_unsent",
        "completion_tokens",
        "ended",
        "finish_reason",
        "index",
        "prompt",
        "reasoning_tokens",
        "stop_reason",
        "stream",
    )

    def __init__(
        self,
        *,
        index: int,
        prompt: Prompt,
        stream: TokenStream,
        detokenizer: IncrementalDecoder,
        rules: TextRules,
        finish: Callable[[int], None],
    ) -> None:
        """finish(at) tells the engine to end the Sequence after `at` tokens; nothing happens if it has ended."""
        self.index = index
        self.prompt = prompt
        self.stream = stream
        self.completion_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.ended: Ended | None = None  # comes some steps after finish_reason when a stop string was found
        self._detokenizer = detokenizer
        self._matcher = None if rules.matcher is None else rules.matcher.fresh()
        self._rules = rules
        self._finish = finish
        self._reader = None if prompt.reading is None else prompt.reading.reader()
        self.reasoning_tokens = 0  # of the completion's; known once the reasoning has ended
        self._begins: list[int] = []  # of tokens, in characters, until that is known
        self._is_plain = rules.matcher is None and self._reader is None and not rules.is_echo_only
        self._before = 0  # characters that its reader had before its own
        self._held: Delta | None = None
        self._unsent: deque[ScoredToken] = deque()
        self._text = self._sent = len(prompt.echo)  # characters: decoded so far, and given out

    def follow(self, token_ids: Sequence[int], *, own: int = 0, min_tokens: int = 0) -> None:
        """It goes on after these tokens of an answer. What they began and left unfinished is this one's.

        own: so many at their end are of this very answer: a stop string may begin there, or be there; then the choice
        has nothing more to say. min_tokens: of all of them, those in which none counts.
        """
        texts = list(map(self._detokenizer.push, token_ids))
        if self._matcher is not None and (stop := cut_at_stop(texts, self._matcher, own, min_tokens)) is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        if self._reader is not None:
            text = "".join(texts)
            self._reader.push(text)
            self._before = len(text)
        if self.finish_reason is not None:
            last = Delta("", [], self.finish_reason, self.stop_reason)
            self._held = last if self._reader is None else self._taken_apart(last)
            self._finish(0)

    def read_text(self) -> str | None:
        """The text of one token, where that is all that `read` would bring; else None, and nothing is read.

        So it is with nearly all tokens of nearly all streams, and it takes a fraction of the time.
        """
        if not self._is_plain or (token := self.stream.take_one()) is None:
            return None
        return self._plain_text(token)

    def _plain_text(self, token: int) -> str:
        self.completion_tokens += 1
        text = self._detokenizer.push(token)
        self._text = self._sent = self._text + len(text)
        return text

    def read(self) -> list[Delta]:
        """What arrived since the last read: one Delta a token, or one for all of them when many have waited.

        Raises EngineDead, InternalError, QueueFull or ServiceUnavailable if the Sequence cannot go on.
        """
        tokens, ended, scores = self.stream.take()
        if ended is None and not scores and self._is_plain:
            return self._read_plain(tokens)
        if ended is not None:
            self.ended = ended
        if self.finish_reason is not None:
            return self._release_held()  # tokens past a stop string were never made
        if ended is not None:
            _check_end(ended)
        if self._rules.is_echo_only:
            tokens, scores = [], []
        end_token = ended.end_token if ended is not None and ended.reason == "stop" else -1
        deltas: list[Delta] = []
        for i, token in enumerate(tokens):
            self.completion_tokens += 1
            begin = self._text
            if token == end_token and i == len(tokens) - 1 and not self._rules.include_stop:
                delta = Delta("", [token])
            else:
                delta = self._delta(self._detokenizer.push(token), [token])
            if self._reader is not None:
                self._begins.append(self._before + begin - len(self.prompt.echo))
                delta = self._taken_apart(delta)
            deltas.append(self._with_scores(delta, token, scores[i], begin) if scores else delta)
            if self.finish_reason is not None:  # a stop string, or all calls that there may be
                self._finish(self.completion_tokens)
                break
        if ended is not None and self.finish_reason is None:
            deltas.append(self._last(deltas.pop() if deltas else Delta("", []), ended))
        if self._rules.ends_complete and self.finish_reason is not None and ended is None:
            self._held = deltas.pop()
        return [merged(deltas)] if len(deltas) > self._rules.merge_above else deltas

    def _read_plain(self, tokens: list[int]) -> list[Delta]:
        """`read` where nothing but the text of tokens is to be found: the same, for a tenth of the time."""
        if len(tokens) == 1:
            return [Delta(self._plain_text(tokens[0]), tokens)]
        texts = [self._plain_text(token) for token in tokens]
        if len(tokens) > self._rules.merge_above:
            texts, groups = ["".join(texts)], [tokens]
        else:
            groups = [[token] for token in tokens]
        return [Delta(text, group) for text, group in zip(texts, groups, strict=True)]

    def _release_held(self) -> list[Delta]:
        """The last Delta, if it was kept back until now."""
        if self._held is None or self.ended is None:
            return []
        held, self._held = self._held, None
        return [held]

    def _delta(self, text: str, token_ids: list[int]) -> Delta:
        """New text, up to a stop string if it completes one."""
        self._text += len(text)
        if self._matcher is None:
            self._sent += len(text)
            return Delta(text, token_ids)
        found = self._matcher.push(text, may_stop=self.completion_tokens > self._rules.min_tokens)
        self._sent += len(found.text)
        if not found.stopped:
            return Delta(found.text, token_ids)
        self.finish_reason, self.stop_reason = "stop", found.which
        return Delta(found.text, token_ids, self.finish_reason, self.stop_reason)

    def _last(self, delta: Delta, ended: Ended) -> Delta:
        """`delta` with all that was held back and the reason of the end."""
        tail = self._delta(self._detokenizer.flush(), [])
        if tail.finish_reason is None:
            if self._matcher is not None:
                held = self._matcher.flush()
                self._sent += len(held)
                tail = tail._replace(text=tail.text + held)
            self.finish_reason = "stop" if ended.reason == "stop" else "length"
            if ended.reason == "timeout":
                self.stop_reason = TIMEOUT
            elif ended.reason == "stop" and ended.end_token in self._rules.stop_token_ids:
                self.stop_reason = ended.end_token
        tail = tail._replace(finish_reason=self.finish_reason, stop_reason=self.stop_reason)
        if self._reader is not None:
            tail = self._taken_apart(tail)
        return merged([delta, tail._replace(scored=self._sendable())])

    def _taken_apart(self, delta: Delta) -> Delta:
        """`delta` with the parts of its text; the last of the choice if that makes all calls that there may be."""
        assert self._reader is not None
        reason = delta.finish_reason
        parts = self._reader.push(delta.text, is_last=reason is not None)
        if reason is None and self._reader.is_done:
            reason = "stop"
        if reason == "stop" and self._reader.has_calls:
            reason = "tool_calls"
        self.finish_reason = reason
        characters = self._reader.reasoning_characters
        if characters is not None:
            self._count_reasoning(characters)
        return Delta(content_of(parts), delta.token_ids, reason, delta.stop_reason, delta.scored, parts)

    def _count_reasoning(self, characters: int) -> None:
        """The reasoning is over: so many characters of the text were it. Then, without tools, all is plain text."""
        assert self._reader is not None
        self.reasoning_tokens += sum(begin < characters for begin in self._begins)
        self._begins.clear()
        if self._reader.is_through:
            self._reader = None
            self._is_plain = self._matcher is None

    def _with_scores(self, delta: Delta, token: int, scores: Scores, begin: int) -> Delta:
        """`delta` with the entries that its text lets go. `begin`: characters decoded before `token`."""
        self._unsent.append(ScoredToken(token, scores, begin))
        return delta._replace(scored=self._sendable())

    def _sendable(self) -> tuple[ScoredToken, ...]:
        """The entries whose offsets no stop string can move any more; at the end all, none of them past the text."""
        sendable = []
        while self._unsent and (self._unsent[0].offset <= self._sent or self.finish_reason is not None):
            entry = self._unsent.popleft()
            sendable.append(entry._replace(offset=min(entry.offset, self._sent)))
        return tuple(sendable)


def cut_at_stop(texts: list[str], matcher: StopMatcher, own: int, min_tokens: int) -> str | None:
    """Cut the texts of tokens where an answer ends that has only so many at their end, and say which stop it meets.

    What may become a stop with more text is cut off too, and held back by the matcher. min_tokens: of all of them,
    those in which no stop counts.
    """
    stop = None
    for at in range(len(texts) - own, len(texts)):
        texts[at], _, stop = matcher.push(texts[at], may_stop=at >= min_tokens)
    return stop


def merged(deltas: Sequence[Delta]) -> Delta:
    """Several events as one. Only the last can carry a reason."""
    text = "".join(delta.text for delta in deltas)
    token_ids = [token for delta in deltas for token in delta.token_ids]
    scored = tuple(entry for delta in deltas for entry in delta.scored)
    parts: tuple[Part, ...] = ()
    if any(delta.parts for delta in deltas):  # behind the reasoning there may be plain text
        parts = joined(part for delta in deltas for part in delta.all_parts)
    return Delta(text, token_ids, deltas[-1].finish_reason, deltas[-1].stop_reason, scored, parts)


class Said:
    """All that a choice has said, kept in few pieces: a Delta for each token takes hundreds of bytes."""

    def __init__(self) -> None:
        self._pieces: list[Delta] = []
        self._latest: list[Delta] = []

    def add(self, deltas: Sequence[Delta]) -> None:
        self._latest += deltas
        if len(self._latest) >= PIECE_DELTAS:
            self._pieces.append(merged(self._latest))
            self._latest = []

    def whole(self) -> Delta:
        """As one; there must be something."""
        return merged([*self._pieces, *self._latest])


def _check_end(ended: Ended) -> None:
    """Raises what tells the client that the server gave the Sequence up: a finish reason would look like an answer."""
    if ended.retry_after_s is not None:
        raise QueueFull(ended.message, retry_after_s=ended.retry_after_s)
    if ended.is_refused:
        raise BadRequest(ended.message)
    if ended.reason == "error":
        raise InternalError(ended.message or "The server failed while it worked on this request.")
    if ended.reason == "abort":
        raise Aborted(ended.message or "The server has aborted this request.")
