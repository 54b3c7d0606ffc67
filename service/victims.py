"""Who gives way when frames run out: the choice among younger Sequences, and what becomes of the chosen.

Rules are those of scheduler.py, by number.
"""

from collections.abc import Mapping

import numpy as np

from mm import Action, Candidates, Lack, MemoryManager
from service.request import Key, Sequence, State
from service.sequences import Sequences, row_of


class Victims:
    """Preempts Sequences for older ones."""

    def __init__(self, memory: MemoryManager, sequences: Sequences) -> None:
        self._memory = memory
        self._sequences = sequences
        self._rows = sequences.rows

    def preempt_for(self, sequence: Sequence, lack: Lack) -> bool:
        """Preempt a younger one to get what `sequence` lacks: whom, and by swap or recomputation, mm's score says."""
        if self.take_from_paused(lack):
            return True
        younger = self._who_may_go(sequence, self._sequences.running, lack)
        if younger:
            self._preempt_one_of(younger, lack.frames)
            return True
        swapped = self._who_may_go(sequence, self._sequences.swapped, lack)
        if swapped:  # they still hold what they share among each other
            self._sequences.recompute(swapped[-1])
        return bool(swapped)

    def make_place_for(self, sequence: Sequence, places: int) -> bool:
        """Preempt less urgent ones of its tenant until so many rows are free, or none if all together are too few.

        By recomputation: in swap they would keep their rows.
        """
        outranked = self._sequences.outranked(sequence)
        if len(outranked) < places:
            return False
        outranked.sort(key=lambda other: (other.priority, int(self._rows.arrival[row_of(other)])))
        freed = 0
        for victim in reversed(outranked):
            if freed >= places:
                break
            for each in [victim] if victim.group is None else victim.group.beams:  # rule 10
                if each.space is not None:
                    self._sequences.recompute(each)
                    freed += 1
        return True

    def make_room_for(self, sequence: Sequence, frames: int) -> bool:
        """Preempt a less urgent one of its tenant, if all of them together hold so many frames. Whether one was."""
        running = [each for each in self._sequences.outranked(sequence) if each.state is State.RUNNING]
        rows = np.array([row_of(each) for each in running], np.int32)
        if not running or int(self._memory.tables.pages(rows).sum()) < frames:
            return False
        self._preempt_one_of(running, frames)
        return True

    def _preempt_one_of(self, candidates: list[Sequence], frames: int) -> None:
        """Of these that run, oldest first: whom, and by swap or recomputation, mm's score says."""
        victim = self._memory.choose_victim(self.candidates(candidates), frames)
        if victim is None:  # nobody frees anything alone: what the youngest shares is freed when all who share it go
            for sequence in self._with_beams([candidates[-1]]):
                self._sequences.recompute(sequence)
            return
        victims = self._with_beams([self._rows.at(row) for row in victim.rows.tolist()])
        if victim.action is not Action.SWAP or not self._sequences.swap_out(victims):
            for sequence in victims:
                self._sequences.recompute(sequence)

    def take_from_paused(self, lack: Lack | None = None) -> bool:
        """Release what one of those holds that operators have paused; `lack`: one whose end would help with it."""
        tenants = self._memory.tenants
        for paused in self._sequences.paused_with_row:
            if lack is None or lack.tenant is None or tenants.id(paused.tenant) == lack.tenant:
                self._sequences.recompute(paused)
                return True
        return False

    def _who_may_go(self, sequence: Sequence, among: Mapping[Key, Sequence], lack: Lack) -> list[Sequence]:
        """Who of `among` may be preempted for `sequence`, oldest first (rules 2, 7 and 8)."""
        younger = self._sequences.younger_than(sequence, among)
        tenants = self._memory.tenants
        if not tenants.is_limited or not younger:
            return younger
        if lack.tenant is not None:
            return [other for other in younger if tenants.id(other.tenant) == lack.tenant]
        tiers = [tenants.tier(tenants.id(other.tenant)) for other in younger]
        best = max(
            (tier for other, tier in zip(younger, tiers, strict=True) if tier or other.tenant == sequence.tenant),
            default=-1,
        )
        chosen = [other for other, tier in zip(younger, tiers, strict=True) if tier == best]
        return chosen if best else [other for other in chosen if other.tenant == sequence.tenant]

    def _with_beams(self, victims: list[Sequence]) -> list[Sequence]:
        """And all that run of the searches whose beams are among them: none gets on without the others (rule 10)."""
        groups = {id(victim.group): victim.group for victim in victims if victim.group is not None}
        beams = [beam for group in groups.values() for beam in group.beams if beam.state is State.RUNNING]
        return [victim for victim in victims if victim.group is None] + beams

    def candidates(self, sequences: list[Sequence]) -> Candidates:
        """Those who could be preempted, as mm's score wants to know them. The last one goes first among equals."""
        rows = np.array([row_of(sequence) for sequence in sequences], np.int32)
        state = self._rows
        done = (state.known[rows] - state.prompt[rows]) / np.maximum(state.limit[rows] - state.prompt[rows], 1)
        preemptions = np.array([sequence.preemptions for sequence in sequences], np.int32)
        return Candidates(rows, -state.priority[rows], done.astype(np.float64), preemptions)
