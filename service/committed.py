"""What one committed step brought: tokens, their scores, and who ended."""

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

import numpy as np

from mm.addresses import FloatArray, Int32Array, Int64Array
from service.engine_client import Ended, PromptScores, Scores
from service.request import Sequence


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

    @classmethod
    def nothing(cls) -> "Committed":
        return cls(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0))

    def __bool__(self) -> bool:
        return bool(len(self.tokens) or self.ended or self.prompt_scores)

    def extend(self, other: "Committed") -> None:
        """Append all that another one has."""
        if not other:
            return
        before = len(self.tokens)
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
        count = len(tokens)
        self.front_ends = np.append(self.front_ends, np.full(count, sequence.front_end, np.int32))
        self.sequence_ids = np.append(self.sequence_ids, np.full(count, sequence.sequence_id, np.int64))
        self.tokens = np.append(self.tokens, np.array(tokens, np.int32))
        self.gaps_s = np.append(self.gaps_s, np.full(count, np.nan))
