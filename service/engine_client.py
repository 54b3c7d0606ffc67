"""The only way to the engine: submit, cancel, finish; and one token batch a step back. All are msgspec messages.

Front ends and engine share one process or are different ones (engine_link.py), so nothing but these messages passes
between them: no object is shared, and every message survives an encode and decode (a test holds that). What is not
about the Sequences of one front end is asked (questions.py).

A *front end* numbers its Sequences itself (`sequence_id`, unique in that front end).
"""

from typing import Literal, Protocol

import msgspec

from mm import EventCounters, MemoryInformation, MissReason, Pressure
from model.executor import DeviceMemory
from model.step_plan import SamplingParameters
from service.constraint import Constraint
from service.errors import BadRequest, Draining, EngineDead, Loading, QueueFull, quoted
from service.turn import Turn

DEFAULT_TENANT = "default"
"""Whose requests are those that name no tenant."""

EndReason = Literal["stop", "length", "timeout", "abort", "error"]


AnswerForm = Literal["completion", "chat", "thinking", "hidden_thinking", "tools"]
"""How a request is answered: as text; as a message; as one whose reasoning is split off; the same, with the reasoning
left out; as one that may call tools.
"""


class TextWishes(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens become text. The engine keeps it for when the request is restored from a checkpoint."""

    stops: list[str] = []
    include_stop: bool = False
    stop_token_ids: list[int] = []  # those of end_ids that the client named
    skip_special_tokens: bool = True


class Sibling(msgspec.Struct, frozen=True, array_like=True):
    """One more choice of a Submit: the same prompt and parameters, with a seed of its own."""

    sequence_id: int
    seed: int


class BeamSearch(msgspec.Struct, frozen=True):
    """Beam search as transformers' `generate` does it (num_beams, length_penalty, early_stopping)."""

    width: int  # 2 ... 16 beams
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Run one prompt: one Sequence, and one more for each sibling. What can never fit has been refused before, by the
    front end (`Limits`).

    With beam_search the 1 + len(siblings) choices are the best beams, best first. Their tokens come all at once, each
    choice's before its Ended.
    """

    sequence_id: int
    request_id: str
    prompt_ids: list[int]
    max_tokens: int
    sampling: SamplingParameters
    end_ids: list[int]  # the Sequence ends after any of these; empty with ignore_eos
    tenant: str = DEFAULT_TENANT
    owner: str = ""  # whose request it is: what the requests of one key have in common (auth.py)
    client: str = ""  # the address that it came from, for operators
    form: AnswerForm = "completion"  # for a request that is forked from it
    text: TextWishes = TextWishes()
    first_choice: int = 0  # its number in the answer; siblings follow
    prefix_cache: bool = True  # read and fill the page cache
    cache_salt: str = ""  # cached pages are shared among equal salts only
    siblings: list[Sibling] = []
    beam_search: BeamSearch | None = None
    prompt_logprobs: int = -1  # likeliest tokens to report at each prompt position; -1: nothing is reported
    priority: int = 0  # lower runs earlier, where the scheduler goes by it
    timeout_s: float | None = None  # from now; then each choice ends with what it has, reason "timeout"
    constraint: Constraint | None = None  # of each choice's output; not with beam_search

    @property
    def sequence_ids(self) -> list[int]:
        """Its own, then those of its siblings."""
        return [self.sequence_id, *(sibling.sequence_id for sibling in self.siblings)]


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The client has left, or the request was aborted: release everything. Ignored if it has ended."""

    sequence_id: int


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Its owner wants it no more: it ends with reason "abort", and whoever waits for it is told."""

    sequence_id: int


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """The front end found a text stop: the Sequence ends after its first `at` tokens; later ones were never made."""

    sequence_id: int
    at: int


Message = Submit | Cancel | Abort | Finish


class MissInfo(msgspec.Struct, frozen=True):
    """Why the prompt's tokens from `position` on were not served from the page cache (mm.lookup.MissReason).

    Who else is concerned (who writes the page, for whom it went) stays in mm, for operators.
    """

    reason: str
    position: int
    evicted_s: float | None = None  # EVICTED: the engine's clock when it went

    @property
    def told_reason(self) -> str:
        """The reason as its client may know it: not that others, under another salt, have asked the same."""
        return str(MissReason.NEVER_COMPUTED) if self.reason == MissReason.OTHER_SALT else self.reason


class Scores(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of one token and of the likeliest at its place, best first (model.step_plan.LogProbs)."""

    chosen: float
    rank: int
    ids: list[int]
    values: list[float]


class PromptScores(msgspec.Struct, frozen=True, array_like=True):
    """Scores of consecutive prompt tokens of a Sequence (of the first choice only), from position `first` on.

    The token at position 0 follows nothing and has none: the first chunk begins at 1.
    """

    sequence_id: int
    first: int
    scores: list[Scores]


class Ended(msgspec.Struct, frozen=True):
    """A Sequence ended, with its numbers. Times are seconds of the engine's monotonic clock."""

    sequence_id: int
    reason: EndReason
    message: str = ""  # for reason "error": what to tell the client
    retry_after_s: int | None = None  # it has never begun, because the queue is full: when to try again
    is_refused: bool = False  # for reason "error": what was asked cannot be done, and the server is not to blame
    end_token: int = -1  # the end id that was sampled, for reason "stop"
    output_tokens: int = 0
    cached_tokens: int = 0
    miss: MissInfo | None = None  # None if it never ran
    preemptions: int = 0
    queue_s: float = 0.0
    ttft_s: float = 0.0
    beam_score: float | None = None  # beam search: the summed log-probability over length ** length_penalty


class TokenBatch(msgspec.Struct, frozen=True, tag="tokens"):
    """What one step brought to one front end: sequence_ids[i] got the token tokens[i]; then `ended`.

    scores[i] belongs to tokens[i]; only tokens whose Sequence asked for log-probabilities have an entry. prompt_scores
    of a Sequence come before its first token.
    """

    step: int
    sequence_ids: list[int]
    tokens: list[int]
    ended: list[Ended] = []
    scores: dict[int, Scores] = {}
    prompt_scores: list[PromptScores] = []


class EngineDied(msgspec.Struct, frozen=True, tag="died"):
    """The engine has stopped for good: every open Sequence is lost."""

    message: str


Event = TokenBatch | EngineDied
EngineState = Literal["loading", "ready", "draining", "dead"]


class Limits(msgspec.Struct, frozen=True):
    """What a front end checks before it submits."""

    max_model_len: int  # prompt + output of one Sequence
    max_request_tokens: int  # of one request, its beams together, that the whole KV pool can hold
    max_queue_requests: int  # choices that may wait; more are refused with QueueFull
    vocabulary: int  # ids a prompt may use: 0 ... vocabulary - 1
    max_running: int = 1 << 30  # Sequences that run at once: a beam search takes a place for each beam
    tenant_request_tokens: dict[str, int] = {}  # max_request_tokens of each tenant that has limits
    rated_tenants: frozenset[str] = frozenset()  # whose requests must Enter (questions.py)
    takes_priority: bool = False  # whether requests may say how urgent they are
    max_queue_tokens: int | None = None  # of prompts that wait, if others wait too; None: as many as come

    def pool_tokens(self, tenant: str) -> int:
        """Tokens of one request of `tenant`, its beams together, that can be held."""
        return self.tenant_request_tokens.get(tenant, self.max_request_tokens)

    def request_tokens(self, tenant: str) -> int:
        """Prompt + output of one Sequence of `tenant` that can run."""
        return min(self.max_model_len, self.pool_tokens(tenant))

    def exceeded(self, needed: int, tenant: str) -> str:
        """In words, the limit that a Sequence of `needed` tokens exceeds: the context length, or else the memory."""
        if needed > self.max_model_len:
            return f"This model's maximum context length is {self.max_model_len} tokens."
        pool = self.pool_tokens(tenant)
        is_share = pool < self.max_request_tokens
        whose = "The share of this server's KV memory that is yours" if is_share else "This server's KV memory"
        return f"{whose} holds {pool} tokens of one request."

    def check_fits(self, prompt_tokens: int, output_tokens: int, tenant: str) -> None:
        """Raises BadRequest for a Sequence that could not run alone on an empty server; it has the true numbers."""
        needed = prompt_tokens + output_tokens
        if needed > self.request_tokens(tenant):
            raise BadRequest(
                f"{self.exceeded(needed, tenant)} However, you requested {quoted(needed, 32)} tokens ({prompt_tokens} "
                f"in the prompt, {quoted(output_tokens, 32)} for the output). Please shorten one of them.",
                param="max_tokens",
            )

    def check_queue(self, queue: "QueueState", choices: int, prompt_tokens: int) -> None:
        """Raises QueueFull if so much more may not wait. Who would wait alone is not refused for its tokens."""
        waiting = f"A place in the queue takes about {queue.wait_s} s to come free: try again then."
        if queue.requests + choices > self.max_queue_requests:
            words = f"{queue.requests} requests are waiting, the limit is {self.max_queue_requests}. {waiting}"
            raise QueueFull(words, retry_after_s=queue.wait_s)
        most = self.max_queue_tokens
        if most is not None and queue.requests and queue.tokens + prompt_tokens > most:
            words = f"Requests with {queue.tokens} prompt tokens are waiting, the limit is {most}. {waiting}"
            raise QueueFull(words, retry_after_s=queue.wait_s, reason="queue_tokens")


class QueueState(msgspec.Struct, frozen=True, array_like=True):
    """What waits for its turn, also what the engine has not read yet."""

    requests: int = 0  # each choice counts
    tokens: int = 0  # of their prompts; choices of one prompt share it
    wait_s: int = 1  # until all of it runs, by how fast others have left the queue lately (queue_wait.py)

    def with_more(self, requests: int, tokens: int) -> "QueueState":
        """And what is on its way."""
        return QueueState(self.requests + requests, self.tokens + tokens, self.wait_s)


class EngineSnapshot(msgspec.Struct, frozen=True):
    """The engine between two steps."""

    state: EngineState
    step: int
    uptime_s: float
    running: int
    swapped: int
    queue: QueueState
    preemptions: int
    memory: MemoryInformation
    counters: EventCounters
    pressure: Pressure
    frame_bytes: int
    device_memory: DeviceMemory | None = None  # beside weights and pool; None where it is the host's
    graph_hits: int = 0  # steps that there was a graph for, ...
    graph_misses: int = 0  # ... and others
    stalls: int = 0  # times that a Sequence began to wait for frames
    oom_ends: int = 0  # searches that ended for want of memory


SequenceState = Literal["queued", "prefill", "decode", "preempted", "swapped", "paused"]


class OpenSequence(msgspec.Struct, frozen=True):
    """One choice of a request that has not ended."""

    state: SequenceState
    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the page cache
    output_tokens: int
    max_tokens: int
    preemptions: int


class OpenRequest(msgspec.Struct, frozen=True):
    """A request, with its choices that have not ended."""

    id: str
    age_s: float
    sequences: list[OpenSequence]


class EnginePort(Protocol):
    """What a client sees of the engine: the engine itself in one process, else the link to it (engine_link.py)."""

    @property
    def limits(self) -> Limits: ...
    @property
    def state(self) -> EngineState: ...
    @property
    def is_alive(self) -> bool: ...
    @property
    def queue(self) -> QueueState: ...
    def post(self, front_end: int, message: Message) -> None: ...


class TokenSink(Protocol):
    """Where a client puts what arrives for one Sequence (token_stream.py)."""

    def put(self, tokens: int | list[int], scores: Scores | None = None) -> None: ...
    def put_prompt_scores(self, scores: list[Scores]) -> None: ...
    def end(self, ended: Ended) -> None: ...
    def fail(self, message: str) -> None: ...


class EngineClient:
    """What handlers submit to, in the event loop of their front end. The same whether the engine shares it or not."""

    def __init__(self, engine: EnginePort, front_end: int = 0) -> None:
        self._engine = engine
        self._front_end = front_end
        self.turn = Turn()
        self._sinks: dict[int, TokenSink] = {}
        self._last_id = 0

    @property
    def limits(self) -> Limits:
        return self._engine.limits

    @property
    def state(self) -> EngineState:
        return self._engine.state

    @property
    def is_alive(self) -> bool:
        """Whether the engine completes steps, or is idle and able to."""
        return self._engine.is_alive

    @property
    def open_sequences(self) -> int:
        return len(self._sinks)

    def next_sequence_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def check_admission(self, choices: int, prompt_tokens: int = 0) -> None:
        """Raise Loading, Draining, EngineDead or QueueFull if so much more would not be admitted now.

        By what was heard of the queue last, so the engine may still refuse (Ended.retry_after_s).
        """
        match self.state:
            case "loading":
                raise Loading("the model is loading")
            case "draining":
                raise Draining("the server is about to stop")
            case "dead":
                raise EngineDead("the engine has stopped")
        self.limits.check_queue(self._engine.queue, choices, prompt_tokens)

    def submit(self, message: Submit, *sinks: TokenSink) -> None:
        """Start a Sequence and its siblings; their tokens go to `sinks`, one each in this order, until they end.

        Raises BadRequest for one that can never fit, and what `check_admission` raises.
        """
        self.limits.check_fits(len(message.prompt_ids), message.max_tokens, message.tenant)
        self.check_admission(len(sinks), len(message.prompt_ids))
        self._sinks.update(zip(message.sequence_ids, sinks, strict=True))
        self._engine.post(self._front_end, message)

    def expect(self, sequence_id: int, sink: TokenSink) -> None:
        """A question is about to begin this Sequence: its tokens go to `sink`. If it is refused, `cancel`."""
        self._sinks[sequence_id] = sink

    def cancel(self, sequence_id: int) -> None:
        """Give up a Sequence. Nothing reaches its sink any more. Idempotent."""
        if self._sinks.pop(sequence_id, None) is not None:
            self._engine.post(self._front_end, Cancel(sequence_id))

    def finish(self, sequence_id: int, at: int) -> None:
        """End a Sequence after its first `at` tokens: a text stop was found. Its sink still gets `end`."""
        if sequence_id in self._sinks:
            self._engine.post(self._front_end, Finish(sequence_id, at))

    def deliver(self, event: Event) -> None:
        """What the engine has sent (engine.FrontEnd)."""
        if isinstance(event, EngineDied):
            sinks, self._sinks = self._sinks, {}
            for lost in sinks.values():
                lost.fail(event.message)
            return
        for prompt in event.prompt_scores:
            if (sink := self._sinks.get(prompt.sequence_id)) is not None:
                sink.put_prompt_scores(prompt.scores)
        sinks, scores = self._sinks, event.scores
        for i, (sequence_id, token) in enumerate(zip(event.sequence_ids, event.tokens, strict=True)):
            if (sink := sinks.get(sequence_id)) is not None:
                sink.put(token, scores.get(i) if scores else None)
        for ended in event.ended:
            if (sink := self._sinks.pop(ended.sequence_id, None)) is not None:
                sink.end(ended)
