"""What operators have done lately: for the trace."""

from collections import deque
from typing import NamedTuple

ACTIONS_KEPT = 256


class Done(NamedTuple):
    """An action that was carried out."""

    number: int
    now: float  # the engine's clock
    step: int
    action: str  # its path
    by: str  # whose key; "" where none was asked for
    before: dict[str, object]
    after: dict[str, object]


class ActionLog(deque[Done]):
    """The last ACTIONS_KEPT, oldest first."""

    def __init__(self) -> None:
        super().__init__(maxlen=ACTIONS_KEPT)

    @property
    def next_number(self) -> int:
        return self[-1].number + 1 if self else 1
