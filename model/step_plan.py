"""What one step does, as plain numpy: the message from the scheduler to an executor, and the answer that comes back.

Nothing here knows torch or CUDA. A plan is complete: an executor needs no other knowledge of Sequences than the plans
so far. A *row* is a running Sequence's place in the persistent batch, in the page tables and in the sampling settings.
"""

from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from mm.addresses import BoolArray, Int32Array
from mm.page_copies import MemoryOrders

FED_BACK = -1
"""A token id that the host does not know yet: the token that this row sampled last, which is still on the device."""


class SamplingParameters(msgspec.Struct, frozen=True):
    """How one Sequence draws its tokens.

    temperature 0 is greedy (ties: the lowest id). top_k 0 is off. top_p 1 is off. The draw for the token at absolute
    position p uses one number: Philox4x32-10 with key = seed and counter = (p, 0), so equal seeds draw equal numbers
    whatever runs beside them, also after a preemption.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0  # 0 ... 2**64 - 1

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Sampling parameters to store for rows, before the step runs: row rows[i] samples by parameters[i] from now on."""

    rows: Int32Array  # (N,)
    parameters: list[SamplingParameters]


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

    @property
    def lengths(self) -> Int32Array:
        """(S,) keys and values that each row holds after this step."""
        return self.starts + np.diff(self.query_starts)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came back. tokens (S,) int32: the sampled token, -1 where the row did not sample.

    failed (S,) bool: the row's logits were not finite. Its token means nothing, and its pages must not be shared.
    """

    tokens: Int32Array
    failed: BoolArray


class Ticket(Protocol):
    """A submitted step."""

    step: int

    def is_done(self) -> bool:
        """Whether `wait` would return at once. Costs next to nothing: it is polled."""
        ...

    def wait(self) -> StepResult:
        """Block until the step is done. Raises what made the step fail."""
        ...
