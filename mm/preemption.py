"""Scores who could be preempted, and chooses: the table can be read at any time, before it is used.

Preemption takes the frames of a Sequence that has begun. Only pages that nobody else maps become free by that, so a row
is worth what it frees. It costs time, later: its pages are copied out and back (swap), or released and computed again
(recompute), whichever is cheaper by what copies and prefills have cost so far, and swap only if there are slots.

    score = 1000 x frames freed for each second lost, relative to the best candidate (no frame beyond the need counts)
            - 250 for each time it was preempted before        so that it does not hit the same one again and again
            - 500 x the share of its output that is done       it will soon be out of the way by itself
            + its oom_score_adj (-1000 ... 1000; -1000: never)

Lower priority goes first, whatever the score. Where the best one frees too little, and a fork family as a whole frees
more than it (its members share their pages, so each alone is worth next to nothing), the family goes as one.

Progress is the caller's: it must leave out of the candidates whoever it preempts for, and all that came before that
one. Then the oldest always gets on, ends, and makes the next one the oldest.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from mm.addresses import ABSENT, BoolArray, FloatArray, Int32Array, Int64Array
from mm.page_table import PageTables
from mm.residency import Residency
from mm.swapper import Swapper

NEVER_PREEMPTED = -1000
"""The oom_score_adj that takes a row out of the candidates."""


class Action(StrEnum):
    """How a victim's frames are taken."""

    SWAP = "swap"
    RECOMPUTE = "recompute"


class CostEstimates:
    """What a page copy and a prefilled token cost: a running mean of what was measured, from a first guess on.

    The guesses are those of a large GPU (2 MiB pages at 50 GB/s, 20,000 prompt tokens a second), and wash out with the
    first measurements.
    """

    WEIGHT = 0.2  # of the newest measurement

    def __init__(self, copy_page_s: float = 40e-6, prefill_token_s: float = 50e-6) -> None:
        self.copy_page_s = copy_page_s
        self.prefill_token_s = prefill_token_s

    def observe_copy(self, pages: int, seconds: float) -> None:
        """`pages` were copied to or from swap in `seconds`."""
        if pages:
            self.copy_page_s += self.WEIGHT * (seconds / pages - self.copy_page_s)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """A step prefilled `tokens` prompt tokens in `seconds`."""
        if tokens:
            self.prefill_token_s += self.WEIGHT * (seconds / tokens - self.prefill_token_s)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Who could be preempted, as the scheduler knows them. Each field (R,)."""

    rows: Int32Array
    priorities: Int32Array  # higher is more important
    progress: FloatArray  # share of the output that is done, 0 ... 1
    preemptions: Int32Array  # so far

    @classmethod
    def equal(cls, rows: Int32Array) -> "Candidates":
        """All alike."""
        count = len(rows)
        return cls(rows, np.zeros(count, np.int32), np.zeros(count), np.zeros(count, np.int32))


@dataclass(frozen=True, slots=True)
class OomTable:
    """The score of each candidate, and what it comes from. Each array (R,)."""

    needed_frames: int
    candidates: Candidates
    owners: list[str]
    frames: Int32Array  # that become free
    pages_to_copy: Int32Array  # of these, dirty ones
    swap_s: FloatArray
    recompute_s: FloatArray
    can_swap: BoolArray
    adjustments: Int32Array
    scores: FloatArray  # -inf: not a candidate

    def action(self, index: int) -> Action:
        """How this one's frames would be taken."""
        is_cheaper = self.swap_s[index] < self.recompute_s[index]
        return Action.SWAP if is_cheaper and self.can_swap[index] else Action.RECOMPUTE


@dataclass(frozen=True, slots=True)
class Victim:
    """Whose frames to take: one row, or a fork family."""

    rows: Int32Array
    action: Action
    frames: int  # that become free
    table: OomTable


class Scorer:
    """Reads page tables, reference counts and swap; changes nothing."""

    def __init__(self, tables: PageTables, residency: Residency, swapper: Swapper, costs: CostEstimates) -> None:
        self.adjustments: Int32Array = np.zeros(tables.max_rows, np.int32)  # oom_score_adj; of a row, until its release
        self._tables = tables
        self._residency = residency
        self._swapper = swapper
        self._costs = costs

    def table(self, candidates: Candidates, needed_frames: int) -> OomTable:
        """Score every candidate. Costs in proportion to the pages that they map."""
        rows = candidates.rows
        row_of, _, frames = self._swapper.exclusive_to_each(rows)
        place_of_row = np.zeros(self._tables.max_rows, np.int64)
        place_of_row[rows] = np.arange(len(rows))
        groups = [rows[i : i + 1] for i in range(len(rows))]
        return self._score(candidates, needed_frames, place_of_row[row_of], frames, groups)

    def choose(self, table: OomTable) -> Victim | None:
        """The best candidate; or its fork family, or another one, where that frees more and one alone too little."""
        best = _best(table)
        if best is None or table.frames[best] < table.needed_frames:
            families = self._family_table(table)
            best_family = _best(families) if families is not None else None
            if families is not None and best_family is not None:
                gain = int(families.frames[best_family])
                if best is None or gain > table.frames[best]:
                    family = self._tables.families[families.candidates.rows[best_family]]
                    members = table.candidates.rows[self._tables.families[table.candidates.rows] == family]
                    return Victim(members, families.action(best_family), gain, table)
        if best is None:
            return None
        return Victim(table.candidates.rows[best : best + 1], table.action(best), int(table.frames[best]), table)

    def _family_table(self, table: OomTable) -> OomTable | None:
        """The same for fork families of which every member is a candidate: each stands under its first member."""
        rows, families = table.candidates.rows, self._tables.families
        everyone = families[self._tables.rows_in_use()]
        willing = rows[table.adjustments > NEVER_PREEMPTED]
        first: list[int] = []
        members: list[Int32Array] = []
        for family in np.unique(families[willing]).tolist():
            group = willing[families[willing] == family]
            if 1 < len(group) == np.count_nonzero(everyone == family):
                members.append(group)
                first.append(int(np.flatnonzero(rows == group[0])[0]))
        if not members:
            return None
        candidates = table.candidates
        picked = Candidates(
            rows[first],
            np.array([candidates.priorities[np.isin(rows, group)].max() for group in members], np.int32),
            np.array([candidates.progress[np.isin(rows, group)].mean() for group in members]),
            np.array([candidates.preemptions[np.isin(rows, group)].max() for group in members], np.int32),
        )
        held = [np.unique(self._swapper.exclusive(group)[2]) for group in members]
        places = np.repeat(np.arange(len(held)), [len(frames) for frames in held])
        return self._score(picked, table.needed_frames, places, np.concatenate(held), members)

    def _score(
        self,
        candidates: Candidates,
        needed: int,
        places: Int64Array,
        frames: Int32Array,
        groups: list[Int32Array],
    ) -> OomTable:
        """frames[i] becomes free with the group of candidate places[i]."""
        count, rows = len(candidates.rows), candidates.rows
        swap = self._residency.swap
        freed = np.bincount(places, minlength=count).astype(np.int32)
        is_dirty = swap.slots_of_frames[frames] == ABSENT
        dirty = np.bincount(places[is_dirty], minlength=count).astype(np.int32)
        held = np.array([int(self._tables.lengths[group].max()) for group in groups], np.int64)
        tokens = np.minimum(freed.astype(np.int64) * self._tables.page_size, held)
        swap_s: FloatArray = (freed + dirty).astype(np.float64) * self._costs.copy_page_s
        recompute_s: FloatArray = tokens.astype(np.float64) * self._costs.prefill_token_s
        clean: list[int] = (freed - dirty).tolist()
        tenants: list[int] = self._tables.tenants[rows].tolist()
        slots = [self._swapper.obtainable_slots(*pair) for pair in zip(tenants, clean, strict=True)]
        can_swap = dirty <= np.array(slots, np.int32)
        lost_s = np.where(can_swap, np.minimum(swap_s, recompute_s), recompute_s)
        worth = np.minimum(freed, max(1, needed)) / np.maximum(lost_s, 1e-9)
        adjustments = np.array([self.adjustments[group].min() for group in groups], np.int32)
        scores = 1000 * worth / max(worth.max(initial=0.0), 1e-9) - 250.0 * candidates.preemptions
        scores += adjustments - 500 * candidates.progress
        scores[(freed == 0) | (adjustments <= NEVER_PREEMPTED)] = -np.inf
        return OomTable(
            needed_frames=needed,
            candidates=candidates,
            owners=[self._tables.owners[row] or "" for row in rows.tolist()],
            frames=freed,
            pages_to_copy=dirty,
            swap_s=swap_s,
            recompute_s=recompute_s,
            can_swap=can_swap,
            adjustments=adjustments,
            scores=scores,
        )


def _best(table: OomTable) -> int | None:
    """The candidate of the lowest priority with the highest score; the last in order of `rows` among equals."""
    eligible = np.flatnonzero(table.scores > -np.inf)
    if not len(eligible):
        return None
    lowest = table.candidates.priorities[eligible].min()
    eligible = eligible[table.candidates.priorities[eligible] == lowest]
    scores = table.scores[eligible]
    return int(eligible[np.flatnonzero(scores == scores.max())[-1]])
