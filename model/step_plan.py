"""What one step does, as plain numpy: the message from the scheduler to an executor, and the answer that comes back.

Nothing here knows torch or CUDA. A plan is complete: an executor needs no other knowledge of Sequences than the plans
so far. A *row* is a running Sequence's place in the persistent batch, in the page tables and in the sampling settings.
"""

from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from mm.addresses import BoolArray, IndexArray, Int32Array
from mm.page_copies import MemoryOrders
from mm.shared_prefixes import SharedPrefixes

Float32Array = npt.NDArray[np.float32]

FED_BACK = -1
"""A token id that the host does not know yet: the token that this row sampled last, which is still on the device."""


class SamplingParameters(msgspec.Struct, frozen=True):
    """How one Sequence draws its tokens, by the definition of model/sampler.py. Every default changes nothing."""

    temperature: float = 1.0  # 0: greedy (ties: the lowest id)
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0  # of tokens in prompt or output
    presence_penalty: float = 0.0  # of tokens in the output
    frequency_penalty: float = 0.0  # the same, times how often
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] = []  # empty: all
    bad_words: list[list[int]] = []  # never the last token of one straight after the others
    min_tokens: int = 0  # output tokens before any of barred_ids may be sampled
    barred_ids: list[int] = []
    logprobs: int = -1  # likeliest tokens to report with each sampled one; 0: the sampled one alone; -1: nothing
    seed: int = 0  # 0 ... 2**64 - 1

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def bars_tokens(self) -> bool:
        """Whether some tokens may not come."""
        return bool(self.allowed_token_ids or self.bad_words or (self.min_tokens and self.barred_ids))

    @property
    def needs_history(self) -> bool:
        """Whether the draw depends on the tokens before."""
        return self.has_penalties or any(len(word) > 1 for word in self.bad_words)


MAX_LOGPROBS = 32
"""The likeliest tokens that a step can report for a row: twice the beams of the widest beam search."""


@dataclass(frozen=True, slots=True)
class RowSettings:
    """What to store for N rows before the step runs: row rows[i] samples by parameters[i] from now on.

    histories[i] is all tokens of the row so far, of which the first prompts[i] are the prompt; the executor itself adds
    what the row samples. It is empty unless parameters[i].needs_history. Both may be left out where no row needs one.
    """

    rows: Int32Array  # (N,)
    parameters: list[SamplingParameters]
    prompts: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))  # (N,)
    histories: list[Int32Array] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """N places of a step's T tokens, for each of which log-probabilities of the token that follows are wanted.

    They are of the logits as they are, without any row's sampling parameters: what a prompt is scored with.
    """

    places: Int32Array  # (N,) into token_ids
    targets: Int32Array  # (N,) the token that follows in the Sequence
    likeliest: int  # how many of the likeliest are wanted beside it, 0 ... MAX_LOGPROBS


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step over S Sequences with T query tokens in all, decodes (one query token each) before prefill chunks.

    The executor carries out: orders, settings, then the forward pass over the T tokens (writing their keys and
    values at positions starts[i] ... of row rows[i]), then sampling for the rows where `samples` is set.
    """

    step: int
    orders: MemoryOrders
    settings: RowSettings | None
    rows: Int32Array  # (S,) distinct
    starts: Int32Array  # (S,) keys and values that the row holds before this step = position of its first query token
    query_starts: Int32Array  # (S + 1,) where each row's tokens begin in token_ids; the last entry is T
    token_ids: Int32Array  # (T,) FED_BACK where the row's last sampled token is to be taken on the device
    samples: BoolArray  # (S,) the chunk ends at the row's last token, so a new token is sampled after it
    decodes: int  # the first `decodes` rows have one query token each and sample
    scored: ScoredTokens | None = None
    masked: Int32Array | None = None
    """Places of rows that sample under a mask of tokens which is not known yet (ascending, not empty): the step is
    carried out up to its sampling, which waits for `Executor.sample`. None: nobody does."""
    groups: SharedPrefixes | None = None
    """Which decodes (places 0 ... decodes - 1 of `rows`) begin with the same frames: an executor may compute attention
    over those once for all, or ignore it (as the CPU's does). Results are the same but for rounding. Every shared page
    was full before this step. Plans with the very same object have the same rows: what was prepared for it is valid."""

    @property
    def prefill_tokens(self) -> int:
        """Query tokens of prefill chunks."""
        return len(self.token_ids) - self.decodes

    @property
    def lengths(self) -> Int32Array:
        """(S,) keys and values that each row holds after this step."""
        return self.starts + self.query_starts[1:] - self.query_starts[:-1]


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Natural log-probabilities at N places: of one token each, and of the K likeliest (ties: lowest id first).

    A token that cannot come has minus infinity. Places whose logits are not finite mean nothing.
    """

    chosen: Float32Array  # (N,)
    ranks: Int32Array  # (N,) of the chosen token: 1 + how many have a larger logit
    ids: Int32Array  # (N, K) falling by value
    values: Float32Array  # (N, K)

    def take(self, places: IndexArray) -> "LogProbs":
        """Those of some places."""
        return LogProbs(self.chosen[places], self.ranks[places], self.ids[places], self.values[places])


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came back. tokens (S,) int32: the sampled token, -1 where the row did not sample.

    failed (S,) bool: the row's logits were not finite. Its token means nothing, and its pages must not be shared.
    logprobs: of the rows that sampled and whose parameters ask for them, in the plan's order; K is the most that any of
    them asks for. None if nobody does. scored: of the plan's scored tokens.
    starved (S,) bool: of those that failed, for want of memory; None: nobody. Where all did, there are no
    log-probabilities.
    """

    tokens: Int32Array
    failed: BoolArray
    logprobs: LogProbs | None = None
    scored: LogProbs | None = None
    starved: BoolArray | None = None

    @classmethod
    def without_memory(cls, plan: StepPlan) -> "StepResult":
        """Of a step that could not be computed."""
        everyone = np.ones(len(plan.rows), np.bool_)
        return cls(np.full(len(plan.rows), -1, np.int32), everyone, starved=everyone)

    @property
    def lacks_memory(self) -> bool:
        """Whether there was none for any row."""
        return self.starved is not None and bool(self.starved.all())

    def is_starved(self, place: int) -> bool:
        """Whether this row has failed for want of memory."""
        return self.starved is not None and bool(self.starved[place])


class Ticket(Protocol):
    """A submitted step."""

    step: int

    @property
    def graph_hit(self) -> bool | None:
        """Whether it was there as a graph, and not launched kernel by kernel; None where nothing is."""
        ...

    def is_done(self) -> bool:
        """Whether `wait` would return at once. Costs next to nothing: it is polled."""
        ...

    def wait(self) -> StepResult:
        """Block until the step is done. Raises what made the step fail."""
        ...
