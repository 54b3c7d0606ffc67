"""What one committed step brought: tokens, their scores, and who ended."""

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

import numpy as np

from mm.addresses import FloatArray, IndexArray, Int32Array, Int64Array
from model.step_plan import StepResult
from service.engine_client import Ended, PromptScores, Scores
from service.request import Sequence


class Recipients:
    """Whose N tokens come: looked up once, for as many steps as they are for the same Sequences."""

    def __init__(self, front_ends: Int32Array, sequence_ids: Int64Array) -> None:
        self.front_ends, self.sequence_ids = front_ends, sequence_ids
        self.distinct = frozenset(front_ends.tolist())
        self._of: dict[int, tuple[IndexArray, list[int]]] = {}

    def of(self, front_end: int) -> tuple[IndexArray, list[int]]:
        """The places of one front end's tokens, and their Sequences. Not to be changed."""
        if front_end not in self._of:
            places = (self.front_ends == front_end).nonzero()[0]
            self._of[front_end] = places, self.sequence_ids[places].tolist()
        return self._of[front_end]


@dataclass(frozen=True, slots=True)
class Expected:
    """To whom a step's N tokens go if no row fails and nobody ends: known while it is computed."""

    places: IndexArray | slice  # (N,) of the plan's rows
    recipients: Recipients
    end_ids: Int32Array  # (N, E)
    no_gaps: FloatArray  # (N,) NaN
    changes: int  # Sequences.changes: as long as nothing has changed

    def brought_by(self, result: StepResult) -> "Committed | None":
        """The tokens, without gaps; None: a row has failed, or a token ends its Sequence."""
        if np.count_nonzero(result.failed):
            return None
        tokens = result.tokens[self.places]
        if np.count_nonzero(self.end_ids == tokens[:, None]):
            return None
        return Committed.to(self.recipients, tokens, self.no_gaps)


@dataclass(slots=True)
class Committed:
    """N tokens in all: tokens[i] goes to sequence_ids[i] of front_ends[i]. Then come those who ended.

    gaps_s (N,) float64: time since that Sequence's token before; NaN for its first.
    scores[i] belongs to tokens[i]. prompt_scores: with the number of the front end; they come before the tokens.
    """

    front_ends: Int32Array
    sequence_ids: Int64Array
    tokens: Int32Array
    gaps_s: FloatArray
    ended: list[tuple[Sequence, Ended]] = field(default_factory=list)
    scores: dict[int, Scores] = field(default_factory=dict)
    prompt_scores: list[tuple[int, PromptScores]] = field(default_factory=list)
    recipients: Recipients | None = None  # the same as front_ends and sequence_ids, if known

    @classmethod
    def to(cls, recipients: Recipients, tokens: Int32Array, gaps_s: FloatArray) -> "Committed":
        """One token for each of the recipients."""
        return cls(recipients.front_ends, recipients.sequence_ids, tokens, gaps_s, recipients=recipients)

    @classmethod
    def nothing(cls) -> "Committed":
        return cls(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0))

    @property
    def concerned(self) -> set[int]:
        """The front ends that are to be told something."""
        ended = {sequence.front_end for sequence, _ in self.ended}
        return ended.union(self._recipients().distinct, (whose for whose, _ in self.prompt_scores))

    def of(self, front_end: int) -> tuple[IndexArray, list[int]]:
        """Recipients.of."""
        return self._recipients().of(front_end)

    def _recipients(self) -> Recipients:
        if self.recipients is None:
            self.recipients = Recipients(self.front_ends, self.sequence_ids)
        return self.recipients

    def __bool__(self) -> bool:
        return bool(len(self.tokens) or self.ended or self.prompt_scores)

    def extend(self, other: "Committed") -> None:
        """Append all that another one has."""
        if not other:
            return
        before, self.recipients = len(self.tokens), None
        self.scores.update({before + i: scores for i, scores in other.scores.items()})
        self.front_ends = np.concatenate((self.front_ends, other.front_ends))
        self.sequence_ids = np.concatenate((self.sequence_ids, other.sequence_ids))
        self.tokens = np.concatenate((self.tokens, other.tokens))
        self.gaps_s = np.concatenate((self.gaps_s, other.gaps_s))
        self.ended += other.ended
        self.prompt_scores += other.prompt_scores

    def add(self, sequence: Sequence, tokens: Ids[int], scores: Scores | None = None) -> None:
        """Append tokens of one Sequence; `scores` are those of the first of them."""
        if scores is not None:
            self.scores[len(self.tokens)] = scores
        count, self.recipients = len(tokens), None
        self.front_ends = np.append(self.front_ends, np.full(count, sequence.front_end, np.int32))
        self.sequence_ids = np.append(self.sequence_ids, np.full(count, sequence.sequence_id, np.int64))
        self.tokens = np.append(self.tokens, np.array(tokens, np.int32))
        self.gaps_s = np.append(self.gaps_s, np.full(count, np.nan))
