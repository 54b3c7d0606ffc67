"""Scores who could be preempted, and chooses: the table can be read at any time, before it is used.

Preemption takes the frames of a Sequence that has begun. Only pages that nobody else maps become free by that, so a row
is worth what it frees. It costs time, later: its pages are copied out and back (swap), or released and computed again
(recompute), whichever is cheaper by what copies and prefills have cost so far, and swap only if there are slots.

    score = 1000 x frames freed for each second lost, relative to the best candidate (no frame beyond the need counts)
            - 250 for each time it was preempted before        so that it does not hit the same one again and again
            - 500 x the share of its output that is done       it will soon be out of the way by itself
            + its oom_score_adj (-1000 ... 1000; -1000: never)

Lower priority goes first, whatever the score. Where the best one frees too little, and a family as a whole frees more
than it, the family goes as one: those that share their first page, since they are forks or begin with the same prompt.
Each alone is worth next to nothing, because the others go on mapping its pages, also from swap.

Progress is the caller's: it must leave out of the candidates whoever it preempts for, and all that came before that
one; and it must let the oldest preempt those in swap, too, which may still map frames. Then the oldest always gets on,
ends, and makes the next one the oldest.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from mm.addresses import ABSENT, BoolArray, FloatArray, Int32Array, Int64Array, slot_entry
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
    """Who could be preempted, as the scheduler knows them, in order of arrival. Each field (R,)."""

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
    """Whose frames to take: one row, or a family that shares its beginning."""

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
        """The best candidate; or a family of them, where one alone frees too little and together they free more."""
        best, families = _best(table), None
        if best is None or table.frames[best] < table.needed_frames:
            families = self._families(table)
        if families is not None:
            members, together = families
            first = _best(together)
            if first is not None and (best is None or together.frames[first] > table.frames[best]):
                return Victim(members[first], together.action(first), int(together.frames[first]), table)
        if best is None:
            return None
        return Victim(table.candidates.rows[best : best + 1], table.action(best), int(table.frames[best]), table)

    def _families(self, table: OomTable) -> tuple[list[Int32Array], OomTable] | None:
        """Candidates that share their first page, two or more: the rows of each family, and its line of a table."""
        rows = table.candidates.rows
        places = np.flatnonzero(table.adjustments > NEVER_PREEMPTED)
        first_pages = self._first_pages(rows[places])
        groups = [places[first_pages == page] for page in np.unique(first_pages).tolist() if page != ABSENT]
        groups = [group for group in groups if len(group) > 1]
        if not groups:
            return None
        candidates = table.candidates
        picked = Candidates(
            np.array([rows[group[0]] for group in groups], np.int32),
            np.array([candidates.priorities[group].max() for group in groups], np.int32),
            np.array([candidates.progress[group].mean() for group in groups]),
            np.array([candidates.preemptions[group].max() for group in groups], np.int32),
        )
        members = [rows[group] for group in groups]
        held = [np.unique(self._swapper.exclusive(family)[2]) for family in members]
        index = np.repeat(np.arange(len(held)), [len(frames) for frames in held])
        return members, self._score(picked, table.needed_frames, index, np.concatenate(held), members)

    def _first_pages(self, rows: Int32Array) -> Int32Array:
        """(R,) what tells whether rows share their first page: its entry, a slot that has a twin as that frame."""
        entries: Int32Array = self._tables.entries[rows, 0]
        twin = self._residency.swap.twin
        for i in np.flatnonzero(entries < ABSENT).tolist():
            frame = twin[slot_entry(int(entries[i]))]
            entries[i] = entries[i] if frame == ABSENT else frame
        return entries

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
    """The candidate of the lowest priority with the highest score; among equals the youngest."""
    eligible = np.flatnonzero(table.scores > -np.inf)
    if not len(eligible):
        return None
    lowest = table.candidates.priorities[eligible].min()
    eligible = eligible[table.candidates.priorities[eligible] == lowest]
    scores = table.scores[eligible]
    return int(eligible[np.flatnonzero(scores == scores.max())[-1]])
