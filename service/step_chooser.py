"""Chooses who runs in a step: decodes first, then running prefills, then who is admitted (rules of scheduler.py).

Where frames are short it preempts (victims.py), lets the youngest wait, or ends a search that nobody can make room for.
"""

import numpy as np

from mm import Lack, MemoryManager, OverTenantLimit, pages_for
from mm.addresses import Int32Array, Int64Array, empty_int32
from service.admission import Admission, Chunks, room_beside, rows_and_counts
from service.beams import Beams
from service.committed import Committed
from service.pace import Pace, StepBudget
from service.request import Sequence, State
from service.sequences import Sequences, row_of
from service.victims import Victims


class StepChooser:
    """Who runs in the next step, by what there is of memory, tokens and time."""

    def __init__(
        self,
        memory: MemoryManager,
        sequences: Sequences,
        beams: Beams,
        victims: Victims,
        admission: Admission,
        *,
        max_batched_tokens: int,
        pace: Pace | None,
    ) -> None:
        self._memory = memory
        self._sequences = sequences
        self._rows = sequences.rows
        self._beams = beams
        self._victims = victims
        self._admission = admission
        self._max_batched_tokens = max_batched_tokens
        self._pace = pace
        self.oom_ends = 0  # searches that ended for want of memory, since the start

    def choose(self, ended: Committed, now: float) -> tuple[Int32Array, Chunks]:
        """Rows that decode, and chunks (Sequence, tokens). Searches that end here are added to `ended`."""
        self._admission.make_way()
        self._admission.return_from_swap()
        if self._beams.groups:
            ended.extend(self._beams.go_on(now))  # who was not resident when its candidates came
        decodes, chunks = empty_int32(), Chunks()
        if self._sequences.running:
            decodes = self._choose_decodes(ended, now)
        budget = self._budget_beside(decodes)
        if self._sequences.running:
            decodes, chunks = self._choose_prefills(decodes, budget)
        return decodes, self._that_fit(decodes, chunks + self._admission.admit(decodes, budget, now))

    def _budget_beside(self, decodes: Int32Array) -> StepBudget:
        """What prompts may take of a step with these decodes."""
        tokens = self._max_batched_tokens - len(decodes)
        if self._pace is None:
            return StepBudget(tokens)
        keys = int(self._memory.tables.lengths[decodes].sum()) + len(decodes)
        return self._pace.budget(tokens, len(decodes), keys)

    def _choose_decodes(self, ended: Committed, now: float) -> Int32Array:
        """(N,) rows with one token to compute, and a frame for each: others are preempted, or wait a step (rule 2)."""
        state, lengths = self._rows, self._memory.tables.lengths
        rows: Int32Array = ((state.remaining == 1) & (lengths + 1 < state.limit)).nonzero()[0].astype(np.int32)
        if len(rows) <= self._memory.available_frames and not self._memory.tenants.is_limited:
            return rows
        while len(rows) and (lack := self._memory.room().lack_of_all(self._needs(rows))) is not None:
            oldest = self._sequences.oldest(lack.tenant)
            if lack.frames > self._memory.arriving_of(lack.tenant) and self._victims.preempt_for(oldest, lack):
                rows = rows[state.remaining[rows] > 0]
            elif self._is_alone_at_max(oldest, lack):
                assert oldest.group is not None
                self.oom_ends += 1
                self._beams.finish(oldest.group, "length", now, ended)
                rows = rows[state.remaining[rows] > 0]
            else:
                rows = self._hold_back(rows, lack)
        return rows

    def _is_alone_at_max(self, beam: Sequence, lack: Lack) -> bool:
        """Whether a search has all that its tenant may have, so that nobody's end will ever make room (rule 10)."""
        if lack.tenant is None or beam.group is None or lack.frames <= self._memory.arriving_of(lack.tenant):
            return False
        all_ = self._sequences
        theirs = [each for each in (*all_.running.values(), *all_.swapped.values()) if each.tenant == beam.tenant]
        return all(each.group is beam.group for each in theirs)

    def _hold_back(self, rows: Int32Array, lack: Lack) -> Int32Array:
        """Without the youngest that need the frames which are not there yet: those are on their way to swap."""
        theirs = rows if lack.tenant is None else rows[self._memory.tables.tenants[rows] == lack.tenant]
        one = np.ones(1, np.int32)
        needs = np.array([self._memory.frames_needed(theirs[i : i + 1], one) for i in range(len(theirs))], np.int32)
        theirs, needs = theirs[needs > 0], needs[needs > 0]
        youngest = np.argsort(-self._rows.arrival[theirs])
        count = int(np.searchsorted(np.cumsum(needs[youngest]), lack.frames)) + 1
        return rows[~np.isin(rows, theirs[youngest[:count]])]

    def _needs(self, decodes: Int32Array) -> Int64Array:
        """Frames for one token of each, by tenant."""
        return self._memory.needs(decodes, np.ones(len(decodes), np.int32))

    def _choose_prefills(self, decodes: Int32Array, budget: StepBudget) -> tuple[Int32Array, Chunks]:
        """Chunks (Sequence, tokens) of running prefills, oldest first, and the decodes that are left beside them."""
        state = self._rows
        prefilling = (state.remaining > 1).nonzero()[0]
        chunks: Chunks = []
        if not len(prefilling):
            return decodes, chunks
        room, tenants = room_beside(self._memory, decodes, chunks), self._memory.tenants
        passed_by: set[int] = set()
        for sequence in [self._rows.at(row) for row in prefilling[np.argsort(state.arrival[prefilling])].tolist()]:
            tenant = tenants.id(sequence.tenant)
            if sequence.state is not State.RUNNING or tenant in passed_by:
                continue  # preempted for an older one; or its tenant's older ones come first
            row = row_of(sequence)
            start = int(self._memory.tables.lengths[row])
            count = budget.grant(start, int(state.remaining[row]))
            if count <= 0:
                break
            frames = self._memory.frames_needed(np.array([row], np.int32), np.array([count], np.int32))
            while (lack := room.lack(tenant, frames)) is not None:
                if lack.frames <= self._memory.arriving_of(lack.tenant) or not self._victims.preempt_for(
                    sequence, lack
                ):
                    break  # they are on their way; or it is the youngest and waits: the older ones will end
                decodes = decodes[state.remaining[decodes] > 0]
                room = room_beside(self._memory, decodes, chunks)
            if lack is None:
                chunks.append((sequence, count))
                room.take(tenant, frames)
                budget.take(start, count)
            elif lack.tenant is None:
                break  # and so do all who are younger
            else:
                passed_by.add(tenant)
        return decodes, chunks

    def _that_fit(self, decodes: Int32Array, chunks: Chunks) -> Chunks:
        """Without the last chunks, if all together need more frames than there are.

        Each was counted when it was chosen, but pages that several of them share, or want to copy, are only known when
        all are chosen. Who is left out has its row, and goes on as a running prefill.
        """
        if self._fit_anyway(decodes, chunks):
            return chunks
        while chunks and (error := self._memory.shortage(*rows_and_counts(decodes, chunks))) is not None:
            last = len(chunks) - 1
            if isinstance(error, OverTenantLimit):
                theirs = [i for i, (sequence, _) in enumerate(chunks) if sequence.tenant == error.tenant]
                last = theirs[-1] if theirs else last
            chunks = chunks[:last] + chunks[last + 1 :]
        return chunks

    def _fit_anyway(self, decodes: Int32Array, chunks: Chunks) -> bool:
        """Whether there are frames for the most that they could need: its new pages each, a copy of a shared one."""
        memory = self._memory
        most = len(decodes) + sum(pages_for(count, memory.page_size) + 1 for _, count in chunks)
        return not memory.tenants.is_limited and most <= memory.available_frames
