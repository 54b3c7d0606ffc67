"""A Sequence as the engine sees it: what was asked, where it stands, and its times.

Its states and how it moves between them: sequences.py. While it has a row, its tokens lie in the arrays of rows.py;
while it waits, in `tokens`.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from mm import AddressSpace, ContentChain
from mm.addresses import Int32Array, empty_int32
from model.step_plan import Float32Array, SamplingParameters
from service.constraint import Constraint
from service.engine_client import AnswerForm, MissInfo, Submit, TextWishes
from service.family import Family
from service.states import State

if TYPE_CHECKING:
    from mm.backing_store import BackingStore
    from service.beams import BeamGroup
    from service.grammars import Grammar, Matcher

__all__ = ["Key", "Sequence", "State", "choices_of"]

Key = tuple[int, int]
"""(front end, sequence id): what tells a Sequence from all others."""

PageOrigin = Literal["own", "prefix", "parent"]
"""Computed by the Sequence itself (or saved in its checkpoint), found in the page cache, or a relative's by a fork."""


@dataclass(frozen=True, slots=True)
class SavedPages:
    """Keys and values of a Sequence that was restored, until it enters a row."""

    store: "BackingStore"  # a page in each slot, in order
    positions: int  # tokens, from the first on, that they hold


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of one prompt."""

    # what was asked; never written again
    front_end: int
    sequence_id: int
    request_id: str
    tenant: str
    owner: str  # whose key sent it
    client: str  # the address that it came from
    uses_cache: bool  # reads and fills the page cache
    cache_salt: str  # shares cached pages with equal salts only
    prompt_tokens: int
    max_tokens: int
    sampling: SamplingParameters
    end_ids: list[int]
    submitted_s: float
    prompt_ids: Int32Array
    prompt_logprobs: int = -1  # likeliest tokens to report at each place of the prompt; -1: nothing is reported
    deadline_s: float | None = None  # then it ends with what it has
    constraint: Constraint | None = None  # of its output
    priority: int = 0  # lower runs earlier
    turn_s: float = 0.0  # whose is earlier goes first: by priority and arrival, or the same for all (scheduler.py)
    family: Family | None = None  # whose pages it may share by a fork
    form: AnswerForm = "completion"
    text: TextWishes = TextWishes()  # noqa: RUF009 (frozen); how its front end makes text of it
    choice: int = 0  # its number in the answer
    inherited_tokens: int = 0  # at the end of its prompt: the answer so far, of what it was forked or restored from
    restored_tokens: int = 0  # of these, the last ones that are its very own answer: of a checkpoint
    is_sibling: bool = False  # its prompt came with another choice
    group: "BeamGroup | None" = None  # the beam search that it is a beam or a choice of

    # written by the engine, before the commit of each of its tokens
    matcher: "Matcher | None" = None  # where it stands in the grammar of its constraint; None without one

    # written by the scheduler
    tokens: Int32Array = field(default_factory=empty_int32)  # prompt and output, as of the last time it did not run
    state: State = State.WAITING
    space: AddressSpace | None = None
    in_flight: int = 0  # sampled tokens of steps that were submitted before it was preempted and are not committed yet
    chain: ContentChain | None = None  # names of its pages, while it waits
    awaited_steps: int = 0  # steps it waited for pages that others computed
    place: tuple[float, int] = (0.0, 0)  # in the queue, while it waits (waiting.py)
    blocked_at: int = -1  # frames of the pool that it could have when it last did not fit
    held_at: int = -1  # frames that its tenant's limits left it when it last did not fit into these
    overtaken: int = 0  # times that one behind it was admitted first, for what that had in the page cache
    cached_share: float = 0.0  # of its tokens, when it was last looked up for that ...
    needed_frames: int = 0  # to admit it, likewise
    share_known: int = -(1 << 30)  # ... which was this look at the queue (cache_order.py)
    missing_frames: int = 0  # how many more it needed in either case
    cached_of_row: int = 0  # tokens whose pages were there when it last entered a row, ...
    origin_of_row: PageOrigin = "own"  # ... and where those came from
    cached_tokens: int = 0  # the same, the first time: what the client is told
    miss: MissInfo | None = None  # why no more was cached, the first time
    remaining: int = 0  # tokens to compute when it returns from swap, or from a pause
    oom_score_adj: int = 0  # makes it a likelier victim (up to 1000) or a less likely one (-1000: never)
    preemptions: int = 0
    saved: SavedPages | None = None  # of one that was restored, before it enters a row
    scores_due: int = 0  # the next prompt token whose scores are to be given out; prompt_tokens if none is
    candidates: tuple[Int32Array, Float32Array] | None = None  # a beam's likeliest next tokens, until its group goes on
    admitted_s: float | None = None  # the first time
    first_token_s: float | None = None

    @classmethod
    def from_submit(cls, message: Submit, front_end: int, now: float) -> "Sequence":
        """The first choice of a request."""
        prompt_ids = np.array(message.prompt_ids, np.int32)
        return cls(
            front_end=front_end,
            sequence_id=message.sequence_id,
            request_id=message.request_id,
            tenant=message.tenant,
            owner=message.owner,
            client=message.client,
            uses_cache=message.prefix_cache,
            cache_salt=message.cache_salt,
            prompt_tokens=len(prompt_ids),
            max_tokens=message.max_tokens,
            sampling=message.sampling,
            end_ids=message.end_ids,
            submitted_s=now,
            prompt_ids=prompt_ids,
            prompt_logprobs=message.prompt_logprobs,
            deadline_s=None if message.timeout_s is None else now + message.timeout_s,
            constraint=message.constraint,
            priority=message.priority,
            form=message.form,
            text=message.text,
            choice=message.first_choice,
            tokens=prompt_ids,
            scores_due=1 if message.prompt_logprobs >= 0 else len(prompt_ids),
        )

    def continued(self, tokens: list[int], now: float) -> Submit:
        """What would begin a Sequence that goes on from `tokens`, its prompt and output so far; without a number."""
        return Submit(
            sequence_id=0,
            request_id=self.request_id,
            prompt_ids=tokens,
            max_tokens=self.limit - len(tokens),
            sampling=self.sampling,
            end_ids=self.end_ids,
            tenant=self.tenant,
            owner=self.owner,
            form=self.form,
            text=self.text,
            constraint=self.constraint,
            prefix_cache=self.uses_cache,
            cache_salt=self.cache_salt,
            priority=self.priority,
            timeout_s=None if self.deadline_s is None else max(0.0, self.deadline_s - now),
        )

    @property
    def is_scoring(self) -> bool:
        """Whether scores of its prompt are still to be made: then no token of it may come from elsewhere."""
        return self.scores_due < self.prompt_tokens

    @property
    def answer_begin(self) -> int:
        """Where its answer begins: of a fork, with what it was forked from. Penalties on output look back to here."""
        return self.prompt_tokens - self.inherited_tokens

    @property
    def text_begin(self) -> int:
        """Where the text of its answer begins: of a fork, after what it was forked from."""
        return self.prompt_tokens - self.restored_tokens

    @property
    def queue_tokens(self) -> int:
        """What it adds to the prompt tokens in the queue: a prompt counts once, with the first choice."""
        return 0 if self.is_sibling else self.prompt_tokens

    @property
    def limit(self) -> int:
        """Tokens, prompt and output, at which it ends."""
        return self.prompt_tokens + self.max_tokens

    @property
    def key(self) -> Key:
        """What tells it from all others: sequence ids are unique in one front end only."""
        return self.front_end, self.sequence_id


def choices_of(message: Submit, front_end: int, now: float, grammar: "Grammar | None" = None) -> list[Sequence]:
    """All choices of a request: the first, and its siblings, which differ in id and seed. They are one family.

    grammar: the message's constraint, compiled.
    """
    first = Sequence.from_submit(message, front_end, now)
    choices = [first]
    if message.siblings:
        first.family = Family(first.prompt_tokens)
        choices += (
            replace(
                first,
                sequence_id=sibling.sequence_id,
                choice=message.first_choice + number,
                sampling=msgspec.structs.replace(first.sampling, seed=sibling.seed),
                is_sibling=True,
                prompt_logprobs=-1,
                scores_due=first.prompt_tokens,
            )
            for number, sibling in enumerate(message.siblings, 1)
        )
    if grammar is not None:
        for choice in choices:
            choice.matcher = grammar.start(choice.end_ids)
    return choices
