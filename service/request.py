"""A Sequence as the engine sees it: what was asked, where it stands, and its times.

    WAITING ──admit──▶ RUNNING ──end token, limit, text stop, cancel, error──▶ ENDED
       ▲                  │
       └─────preempt──────┘        its frames are released; its tokens are kept and computed again on return

While it runs, its tokens lie in the scheduler's row arrays; while it waits, in `tokens`.
"""

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from mm import AddressSpace
from mm.addresses import Int32Array
from model.step_plan import SamplingParameters
from service.engine_client import Submit


class State(Enum):
    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of one prompt."""

    # what was asked; never written again
    front_end: int
    sequence_id: int
    request_id: str
    tenant: str
    prompt_tokens: int
    max_tokens: int
    sampling: SamplingParameters
    end_ids: list[int]
    submitted_s: float

    # written by the scheduler
    tokens: Int32Array  # prompt and output so far, as of the last time it did not run
    state: State = State.WAITING
    space: AddressSpace | None = None
    in_flight: int = 0  # sampled tokens of steps that were submitted before it was preempted and are not committed yet
    preemptions: int = 0
    admitted_s: float | None = None  # the first time
    first_token_s: float | None = None

    @classmethod
    def from_submit(cls, message: Submit, front_end: int, now: float) -> "Sequence":
        return cls(
            front_end=front_end,
            sequence_id=message.sequence_id,
            request_id=message.request_id,
            tenant=message.tenant,
            prompt_tokens=len(message.prompt_ids),
            max_tokens=message.max_tokens,
            sampling=message.sampling,
            end_ids=message.end_ids,
            submitted_s=now,
            tokens=np.array(message.prompt_ids, np.int32),
        )

    @property
    def limit(self) -> int:
        """Tokens, prompt and output, at which it ends."""
        return self.prompt_tokens + self.max_tokens

    @property
    def key(self) -> tuple[int, int]:
        """What tells it from all others: sequence ids are unique in one front end only."""
        return self.front_end, self.sequence_id
