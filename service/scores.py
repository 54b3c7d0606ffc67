"""Log-probabilities on their way from a step's result to messages, and which tokens of prompts a step scores.

Scores of a prompt are given out in order, each once. What a step scored is kept as (Sequence, positions), not as a row:
a Sequence that was preempted while the step was on its way gets its scores all the same, and what it then computes
again is not given out again.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from mm.addresses import Int32Array
from model.step_plan import LogProbs, ScoredTokens
from service.engine_client import PromptScores, Scores
from service.request import Sequence, State


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """Prompt tokens `first` ... `first + count - 1` of a Sequence; `place` is where the plan's rows have its chunk."""

    sequence: Sequence
    place: int
    first: int
    count: int


def scores_of(found: LogProbs, likeliest: list[int]) -> list[Scores]:
    """One entry for each of the N places of `found`, with likeliest[i] of the likeliest tokens."""
    lines = zip(
        found.chosen.tolist(), found.ranks.tolist(), found.ids.tolist(), found.values.tolist(), likeliest, strict=True
    )
    return [Scores(chosen, rank, ids[:most], values[:most]) for chosen, rank, ids, values, most in lines]


def scored_tokens(
    chunks: list[tuple[Sequence, int]], before: int, starts: Int32Array, query_starts: Int32Array
) -> tuple[ScoredTokens | None, list[ScoredChunk]]:
    """What is to be scored in a step of `before` decodes and then `chunks`: the prompt tokens that follow its own.

    starts (S,) and query_starts (S + 1,): those of the plan.
    """
    scored: list[ScoredChunk] = []
    places: list[Int32Array] = []
    targets: list[Int32Array] = []
    for place, (sequence, count) in enumerate(chunks, before):
        start = int(starts[place])
        first = max(start + 1, sequence.scores_due)
        last = min(start + count, sequence.prompt_tokens - 1)
        if first > last:
            continue
        scored.append(ScoredChunk(sequence, place, first, last - first + 1))
        places.append(np.arange(first, last + 1, dtype=np.int32) - 1 - start + query_starts[place])
        targets.append(sequence.prompt_ids[first : last + 1])
    if not scored:
        return None, scored
    most = max(chunk.sequence.prompt_logprobs for chunk in scored)
    return ScoredTokens(np.concatenate(places), np.concatenate(targets), most), scored


def prompt_scores(
    scored: Collection[ScoredChunk], found: LogProbs, failed: list[bool]
) -> list[tuple[int, PromptScores]]:
    """(front end, message) for each chunk that brought something new. failed[i]: the chunk's numbers mean nothing."""
    likeliest = [chunk.sequence.prompt_logprobs for chunk in scored for _ in range(chunk.count)]
    scores = scores_of(found, likeliest)
    messages: list[tuple[int, PromptScores]] = []
    for chunk, is_bad in zip(scored, failed, strict=True):
        mine, scores = scores[: chunk.count], scores[chunk.count :]
        sequence = chunk.sequence
        given = sequence.scores_due - chunk.first
        if sequence.state is State.ENDED or is_bad or given >= chunk.count:
            continue
        first, mine = sequence.scores_due, mine[given:]
        messages.append((sequence.front_end, PromptScores(sequence.sequence_id, first, mine)))
        sequence.scores_due += len(mine)
    return messages
