"""Beam searches over Sequences: the page work. Which beams go on, beam_search.py says.

A beam is a Sequence like any other: it has a row, is preempted, swapped and admitted again as others are, and shares
pages with its family. What is special is its next token, which depends on all beams: it computes its last token, its
row is asked for the likeliest next ones, and then it stands still until its group goes on. The group goes on when every
beam has its candidates and runs. Then, by page tables alone:

    a parent of several     is forked, once for each further child: only reference counts rise
    a parent of one         keeps its address space
    a parent of none        is released

and each child has one token to compute. What is written next into a page that several share is copied first
(copy-on-write); no other key or value moves.

The choices of the request hold nothing (State.CHOICE). They get the best hypotheses, best first, when the search is
over. A group takes as many places as it is wide from the first beam on, so that two groups never wait for each other's.
"""

from dataclasses import dataclass, replace

import msgspec
import numpy as np

from mm.addresses import pages_for
from model.step_plan import LogProbs
from service.beam_search import Search
from service.committed import Committed
from service.engine_client import BeamSearch, Ended, EndReason
from service.family import Family
from service.request import Key, Sequence, State
from service.sequences import Sequences

BEAM = -1
"""The front end of beams: nobody listens there."""


@dataclass(slots=True, eq=False)
class BeamGroup:
    """One search: its beams in the order of `search`, and the choices that wait for its results, best first."""

    search: Search
    choices: list[Sequence]
    family: Family
    beams: list[Sequence]

    @property
    def is_ready(self) -> bool:
        """Whether every beam runs and has its candidates."""
        return all(beam.candidates is not None and beam.state is State.RUNNING for beam in self.beams)

    @property
    def reserved_places(self) -> int:
        """Places that it will take beside those that it has, once its first beam has one."""
        taken = len(self.family.with_row)
        return self.search.width - taken if taken else 0

    def extra_pages(self, page_size: int) -> int:
        """Pages that the other beams may come to own beside the first, which has the whole prompt."""
        limit, prompt = self.choices[0].limit, self.choices[0].prompt_tokens
        return (self.search.width - 1) * (pages_for(limit, page_size) - prompt // page_size)


class Beams:
    """All searches that are not over."""

    def __init__(self, sequences: Sequences) -> None:
        self.groups: list[BeamGroup] = []
        self.choices: dict[Key, Sequence] = {}
        self._sequences = sequences
        self._rows = sequences.rows
        self._last_id = 0

    @property
    def reserved_places(self) -> int:
        return sum(group.reserved_places for group in self.groups)

    def add(self, choices: list[Sequence], options: BeamSearch) -> None:
        """Queue a search whose results are for `choices`, all of one request."""
        first = choices[0]
        search = Search(options, first.max_tokens, first.end_ids)
        sampling = msgspec.structs.replace(first.sampling, temperature=0.0, logprobs=search.candidates)
        family = Family(first.prompt_tokens)
        beam = replace(first, front_end=BEAM, sequence_id=self._next_id(), sampling=sampling, family=family)
        beam.end_ids = []  # an end is a candidate like others
        group = beam.group = BeamGroup(search, choices, family, [beam])
        for choice in choices:
            choice.group, choice.state = group, State.CHOICE
            self.choices[choice.key] = choice
        self.groups.append(group)
        self._sequences.add(beam)

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    # --- going on

    def take(self, beam: Sequence, found: LogProbs, place: int) -> None:
        """A step brought the candidates of a beam."""
        most = beam.sampling.logprobs
        beam.candidates = found.ids[place, :most], found.values[place, :most]

    def go_on(self, now: float) -> Committed:
        """Every group that is ready takes its next step; those that are over give their results."""
        committed = Committed.nothing()
        for group in [group for group in self.groups if group.is_ready]:
            candidates = [beam.candidates for beam in group.beams if beam.candidates is not None]
            step = group.search.advance(np.stack([ids for ids, _ in candidates]), np.stack([v for _, v in candidates]))
            if group.search.is_over:
                self.finish(group, None, now, committed)
            else:
                self._reorder(group, step.parents, step.tokens)
        return committed

    def _reorder(self, group: BeamGroup, parents: list[int], tokens: list[int]) -> None:
        """Beam i of the next step continues beam parents[i] with tokens[i]."""
        children: dict[int, list[int]] = {}
        for place, parent in enumerate(parents):
            children.setdefault(parent, []).append(place)
        for number, beam in enumerate(group.beams):
            if number not in children:
                self._sequences.drop(beam)
        by_place: dict[int, Sequence] = {}
        for parent, places in children.items():
            beam = group.beams[parent]
            for place in places[1:]:
                by_place[place] = self._sequences.split(beam, self._next_id())
            by_place[places[0]] = beam
        group.beams = [by_place[place] for place in range(len(parents))]
        for beam, token in zip(group.beams, tokens, strict=True):
            self._sequences.choose(beam, token)

    # --- ending

    def finish(self, group: BeamGroup, reason: EndReason | None, now: float, committed: Committed) -> None:
        """Give the choices the best there is, and release everything. reason: None if the search itself is over."""
        results = group.search.best(len(group.choices))
        self._note_times(group)
        for number, choice in enumerate(group.choices):
            if choice.state is State.ENDED:
                continue
            result = results[number] if number < len(results) else None  # fewer: its vocabulary was too small
            tokens = [] if result is None else result.tokens
            if tokens and choice.first_token_s is None:
                choice.first_token_s = now
            is_ended = reason is None and result is not None and result.is_ended
            ended = self._end_choice(
                choice,
                reason or ("stop" if is_ended else "length"),
                now,
                end_token=tokens[-1] if is_ended else -1,
                output=len(tokens),
                beam_score=None if result is None else result.score,
            )
            committed.add(choice, tokens)
            committed.ended.append((choice, ended))
        self._release(group)

    def fail(self, group: BeamGroup, message: str, now: float, committed: Committed) -> None:
        """Every choice ends with an error."""
        self._note_times(group)
        for choice in group.choices:
            if choice.state is not State.ENDED:
                ended = self._end_choice(choice, "error", now, message=message, output=0)
                committed.ended.append((choice, ended))
        self._release(group)

    def end_choice(self, choice: Sequence, reason: EndReason, now: float, output: int) -> Ended:
        """One choice is not wanted any more; with the last of them the search ends."""
        group = choice.group
        assert group is not None
        self._note_times(group)
        ended = self._end_choice(choice, reason, now, output=output)
        if all(other.state is State.ENDED for other in group.choices):
            self._release(group)
        return ended

    def _end_choice(
        self,
        choice: Sequence,
        reason: EndReason,
        now: float,
        *,
        output: int,
        message: str = "",
        end_token: int = -1,
        beam_score: float | None = None,
    ) -> Ended:
        del self.choices[choice.key]
        return self._sequences.end(
            choice, reason, now, message=message, end_token=end_token, output=output, beam_score=beam_score
        )

    def _note_times(self, group: BeamGroup) -> None:
        """What happened to the beams is told of the choices."""
        beam = group.beams[0]  # the others began with its numbers
        for choice in group.choices:
            choice.admitted_s, choice.miss = beam.admitted_s, beam.miss
            choice.cached_tokens = beam.cached_tokens if choice is group.choices[0] else 0
            choice.preemptions = max(beam.preemptions for beam in group.beams)

    def _release(self, group: BeamGroup) -> None:
        for beam in group.beams:
            self._sequences.drop(beam)
        self.groups.remove(group)
