"""The states of a Sequence. What they mean, and how it moves between them: sequences.py."""

from enum import Enum, auto


class State(Enum):
    WAITING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    PAUSED = auto()  # an operator has stopped it: nothing runs it until it is resumed
    CHOICE = auto()  # of a beam search: it holds nothing itself, the beams do
    ENDED = auto()
