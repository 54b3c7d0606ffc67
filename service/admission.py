"""Who enters a row: those who come back from swap, then those who wait, as far as frames, places and limits allow.

Rules are those of scheduler.py, by number.
"""

from collections.abc import Sized
from dataclasses import dataclass
from functools import partial

import numpy as np

from mm import Lack, MemoryManager, Namespace, OverCommit, PrefixMatch, Room, pages_for
from mm.addresses import Int32Array
from service.beams import Beams
from service.cache_order import FRESH_STEPS, overtake, preferred
from service.pace import LEAST_CHUNK, Pace, StepBudget
from service.request import Sequence, State
from service.sequences import Sequences, row_of, space_of
from service.victims import Victims

Chunks = list[tuple[Sequence, int]]
"""Sequences that prefill in a step, and how many tokens of each."""

LOOK_AHEAD = 32
"""Waiting Sequences that one step passes by, or counts as waiting: those in front may be waiting for pages that others
compute."""

LOOKED_AT = 1024
"""Waiting Sequences that one step looks at: those in front may be relatives of one that computes."""

MOST_ADMISSIONS = 128
"""Sequences that one step admits, however small they are: each costs some 50 us of the host."""

AWAIT_STEPS = 64
"""Steps that a Sequence waits at most for pages that others compute; then it computes them itself."""


@dataclass(frozen=True, slots=True)
class _Beginning:
    """How a Sequence would be admitted: by a fork of `relative`, or else with what is cached of its tokens."""

    frames: int  # until all its tokens are computed
    match: PrefixMatch | None = None
    relative: Sequence | None = None
    length: int = 0  # tokens that it has in common with `relative`


class Admission:
    """Lets Sequences enter rows. Whether they run in the same step, the budget says."""

    def __init__(
        self,
        memory: MemoryManager,
        sequences: Sequences,
        beams: Beams,
        victims: Victims,
        steps_under_way: Sized,
        *,
        max_running: int,
        prefix_caching: bool,
        pace: Pace | None,
        by_priority: bool = False,
        most_overtaken: int = 0,
    ) -> None:
        self._memory = memory
        self._sequences = sequences
        self._rows = sequences.rows
        self._beams = beams
        self._victims = victims
        self._steps_under_way = steps_under_way
        self._max_running = max_running
        self._prefix_caching = prefix_caching
        self._pace = pace
        self.stalls = 0  # times that a Sequence began to wait for frames, since the start
        self._by_priority = by_priority
        self._most_overtaken = most_overtaken if prefix_caching else 0
        self._looks = 0  # at the queue
        self._passed: list[Sequence] = []  # by the one that is looked at
        self._short: list[Sequence] = []  # whom the last look at the queue found short of frames
        self._held: set[str] = set()  # tenants with Sequences in swap that their limits do not let back

    # --- places and room

    @property
    def has_place(self) -> bool:
        """Whether one more Sequence may run, as far as others have not reserved its place."""
        return self._taken_places < self._max_running and self._memory.tables.free_rows > 0

    @property
    def _taken_places(self) -> int:
        return len(self._sequences.running) + len(self._sequences.swapped)

    def _places_lacking(self, sequence: Sequence) -> int:
        """Places that are missing for this one to run: a search needs one for each beam before the first one enters."""
        reserved = self._beams.reserved_places
        needed = 1
        if sequence.group is not None:
            needed, own = sequence.group.search.width, sequence.group.reserved_places
            if own:
                needed, reserved = 1, reserved - own
        free = min(self._max_running - self._taken_places, self._memory.tables.free_rows)
        return needed - (free - reserved)

    @property
    def _headroom(self) -> int:
        """Frames that are left free for those that run when another one comes (rule 4)."""
        if self._beams.groups and not self._steps_under_way and not self._rows.remaining.any():
            return 0  # beams that stand still for somebody who is to come back
        return max(self._memory.reclaimer.watermarks.min, len(self._sequences.running))

    # --- by priority

    @property
    def is_urgent(self) -> bool:
        """Whether somebody waits for whom a less urgent one of its tenant would have to give its place."""
        if not self._by_priority:
            return False
        least = int(self._rows.priority.max())
        return any(
            first.priority < least and bool(self._sequences.outranked(first))
            for first in self._sequences.waiting.firsts()
        )

    def make_way(self) -> None:
        """Preempt less urgent Sequences for those whose turn it is, and who have no place or no frames (rule 12)."""
        if not self._by_priority:
            return
        short, self._short = self._short, []
        short_of = {sequence.tenant: sequence for sequence in short}
        for whose in self._sequences.waiting.firsts():
            first = short_of.get(whose.tenant, whose)  # one of the same level may have overtaken it
            if first not in self._sequences.waiting or first.in_flight or self._stands_aside(first):
                continue
            lacking = self._places_lacking(first)
            if (lacking > 0 and self._victims.make_place_for(first, lacking)) or (
                lacking <= 0 and first.tenant in short_of and self._victims.make_room_for(first, first.missing_frames)
            ):
                first.blocked_at = first.held_at = -1
                self._sequences.waiting.remove(first)  # so that no other tenant's turn takes what it got
                self._sequences.waiting.put_first(first)

    def _gives_way(self, swapped: Sequence) -> bool:
        """Whether a swapped one stays there, since a more urgent one of its tenant waits, and others run meanwhile."""
        if not self._by_priority or not self._sequences.running:
            return False
        first = self._sequences.waiting.first_of(swapped.tenant)
        return first is not None and first.held_at < 0 and swapped in self._sequences.outranked(first)

    def _stands_aside(self, sequence: Sequence) -> bool:
        """Whether it waits for a relative that computes what it could fork (rule 9)."""
        family = sequence.family
        return family is not None and family.is_computing(sequence, self._rows, self._memory.tables.lengths)

    @property
    def is_short(self) -> bool:
        """Whether somebody did not enter when it was last asked, for want of frames."""
        return bool(self._short)

    # --- from swap

    def return_from_swap(self) -> None:
        """Let those run whose pages are back; order pages back as there is room, oldest first, before any admission."""
        all_ = self._sequences
        self._held.clear()
        has_room = True
        for sequence in sorted(all_.swapped.values(), key=lambda other: int(self._rows.arrival[row_of(other)])):
            if sequence.state is not State.SWAPPED:
                continue  # it gave up what it held for an older one
            if space_of(sequence).is_resident:
                all_.return_from_swap(sequence)
            elif has_room and not self._gives_way(sequence) and sequence.tenant not in self._held:
                lack = self._lack_of_return(sequence)
                if lack is None:
                    has_room = all_.bring_in(sequence)
                    continue
                if lack.tenant is None:
                    has_room = False
                else:
                    self._held.add(sequence.tenant)
                is_alone = not (all_.running if lack.tenant is None else all_.running_by_tenant[sequence.tenant])
                if is_alone and lack.frames > self._memory.arriving_of(lack.tenant):
                    # nobody's end would ever make room: younger ones in swap do
                    self._victims.preempt_for(sequence, lack)

    def _lack_of_return(self, sequence: Sequence) -> Lack | None:
        """What is missing to bring a SWAPPED one in and leave a frame to each that runs (rule 4)."""
        room, tenant = self._memory.room(), self._memory.tenants.id(sequence.tenant)
        pages = int(self._memory.tables.barred[row_of(sequence)])
        beside = self._sequences.running_by_tenant[sequence.tenant]
        if room.is_limited and (over := pages + beside - room.left[tenant]) > 0:
            return Lack(over, tenant)
        return room.lack(tenant, pages + (self._headroom if self._sequences.running else 0))

    # --- from the queue

    def admit(self, decodes: Int32Array, budget: StepBudget, now: float) -> Chunks:
        """First chunks of Sequences that enter a row now (rule 4)."""
        chunks: Chunks = []
        self._short = []
        if not self._sequences.waiting or budget.tokens <= 0 or not self._held.issuperset(self._tenants_in_swap()):
            return chunks
        tenants = self._memory.tenants
        room = self._room_beside_prompts(decodes)
        passed_by = set(self._held)
        awaiting = 0
        self._looks += 1
        for sequence in self._sequences.waiting.in_order(LOOKED_AT, passed_by, partial(self._choose, room)):
            tenant, family = tenants.id(sequence.tenant), sequence.family
            free = room.pool_for(tenant)
            if budget.grant(0, LEAST_CHUNK) <= 0 or len(chunks) == MOST_ADMISSIONS or sequence.in_flight:
                break  # rule 3
            if not self._keeps_pace_with(sequence):
                break  # rule 11
            if self._stands_aside(sequence):
                continue  # rule 9
            if self._places_lacking(sequence) > 0:
                break
            if family is None and self._sequences.running and free <= sequence.blocked_at:
                self._short.append(sequence)
                break  # no more is free than when it did not fit
            left = self._left_to(sequence, room) if room.is_limited else free
            if family is None and left <= sequence.held_at:
                self._short.append(sequence)
                passed_by.add(sequence.tenant)
                continue  # rule 7
            beginning = self._beginning(sequence, min(free, left))
            if beginning is None:
                awaiting += 1
                if awaiting == LOOK_AHEAD:
                    break
                continue  # rule 5
            if room.is_limited and beginning.frames > left:
                self._note_stall(sequence)
                sequence.held_at, sequence.missing_frames = left, beginning.frames - left
                self._short.append(sequence)
                passed_by.add(sequence.tenant)
                continue
            if self._sequences.running and beginning.frames + self._headroom > free:
                self._note_stall(sequence)
                sequence.blocked_at, sequence.missing_frames = free, beginning.frames + self._headroom - free
                self._short.append(sequence)
                break
            if sequence.saved is not None and beginning.frames > free:
                sequence.saved = None  # nobody runs, and who holds the rest does not: it computes, as it gets frames
            try:
                if beginning.relative is not None:
                    self._sequences.fork(sequence, beginning.relative, beginning.length, now)
                else:
                    self._sequences.enter(sequence, beginning.match, now)
            except OverCommit:  # strict mode: its whole length cannot be promised beside those of the others
                self._note_stall(sequence)
                sequence.blocked_at = free
                break
            overtake(self._passed)
            room.take(tenant, beginning.frames)
            if sequence.state is not State.RUNNING:
                passed_by.add(sequence.tenant)
                continue  # some of its pages are in swap: it runs when they are back
            start = sequence.cached_of_row
            if count := budget.grant(start, len(sequence.tokens) - start):
                chunks.append((sequence, count))
                budget.take(start, count)
        return chunks

    def _choose(self, room: Room, queue: list[Sequence], first: int) -> int:
        """Whom of a tenant's queue to look at next: while frames are short, by what is cached (rule 14)."""
        self._passed = []
        if not self._most_overtaken:
            return first
        whose = queue[first]
        pages = pages_for(len(whose.tokens), self._memory.page_size)
        if pages <= self._memory.free_frames or self._taken_places >= self._max_running:
            return first  # nothing would be evicted for it; or it is not its turn yet
        free = room.pool_for(self._memory.tenants.id(whose.tenant)) - self._headroom

        def share_of(sequence: Sequence) -> float:
            if not self._may_overtake(sequence) or sequence.priority != whose.priority:
                return -1.0
            if self._looks - sequence.share_known > FRESH_STEPS:
                match, sequence.needed_frames = self._what_fits(self._look_up(sequence), len(sequence.tokens), free)
                sequence.cached_share = 0.0 if match is None else match.cached_tokens / len(sequence.tokens)
                sequence.share_known = self._looks
            return sequence.cached_share if sequence is whose or sequence.needed_frames <= free else -1.0

        chosen = preferred(queue, first, share_of, self._most_overtaken)
        self._passed = queue[first:chosen]
        return chosen

    @staticmethod
    def _may_overtake(sequence: Sequence) -> bool:
        """Those that have run come first anyway, and relatives go one after the other."""
        is_new = sequence.place[1] > 0
        return is_new and sequence.family is None and sequence.group is None and not sequence.is_scoring

    def _note_stall(self, sequence: Sequence) -> None:
        if sequence.blocked_at < 0 and sequence.held_at < 0:
            self.stalls += 1

    def _keeps_pace_with(self, sequence: Sequence) -> bool:
        """Whether those that run would still get their tokens in time, if this one decoded beside them (rule 11)."""
        running = len(self._sequences.running)
        if self._pace is None or not running:
            return True
        keys = int(self._memory.tables.lengths.sum() + self._rows.remaining.sum())
        return self._pace.allows(running + 1, keys + len(sequence.tokens))

    def _beginning(self, sequence: Sequence, free: int) -> _Beginning | None:
        """What it would begin with, if so many frames are free; None if it waits for what others just compute."""
        tables, count = self._memory.tables, len(sequence.tokens)
        if sequence.saved is not None:
            return _Beginning(pages_for(count, tables.page_size))
        family, relative, length = sequence.family, None, -1
        if family is not None and family.with_row and not sequence.is_scoring:
            nearest = family.nearest(sequence, self._rows, tables.lengths)
            if nearest is not None:
                relative, length = nearest
            elif family.has_runner:
                return None
        match = self._look_up(sequence) if length < count - 1 else None
        if relative is not None and (match is None or match.cached_tokens <= length):
            frames = pages_for(count, tables.page_size) - length // tables.page_size
            return _Beginning(frames, relative=relative, length=length)
        if match is not None and self._should_await(sequence, match):
            return None
        match, frames = self._what_fits(match, count, free)
        return _Beginning(frames, match)

    def _tenants_in_swap(self) -> set[str]:
        return {each.tenant for each in self._sequences.swapped.values() if not self._gives_way(each)}

    def _room_beside_prompts(self, decodes: Int32Array) -> Room:
        """What is left when `decodes` have their frames, and the running prefills all that they still need (rule 4)."""
        room, tables = room_beside(self._memory, decodes, []), self._memory.tables
        if not self._sequences.running:
            return room
        prefilling = (self._rows.remaining > 1).nonzero()[0].astype(np.int32)
        if len(prefilling):
            totals = tables.lengths[prefilling] + self._rows.remaining[prefilling]
            promised = -(-totals // tables.page_size) - tables.pages(prefilling)
            promised += tables.exposed[prefilling]  # a copy of the page that it shares in part
            room.take_all(np.bincount(tables.tenants[prefilling], weights=promised).astype(np.int64))
        return room

    def _left_to(self, sequence: Sequence, room: Room) -> int:
        """Frames that a tenant's limits leave to one more Sequence (rule 7).

        While it has others running: up to high, and a frame below max for each of them; else up to max.
        """
        number = self._memory.tenants.id(sequence.tenant)
        limits, left = self._memory.tenants.limits[number], room.left[number]
        beside = self._sequences.running_by_tenant[sequence.tenant]
        if sequence.group is not None:  # its own beams stand still until it is back
            beside -= sum(beam.state is State.RUNNING for beam in sequence.group.beams)
        if beside:
            return left - max(beside, limits.max - limits.high)
        return left

    def _what_fits(self, match: PrefixMatch | None, tokens: int, free: int) -> tuple[PrefixMatch | None, int]:
        """The match to begin with, and the frames that are not available any more once its prompt is computed.

        Alone it may fit, but not beside a cached page of which it needs a copy too: then without that page.
        """
        page_size = self._memory.page_size
        if match is None:
            return None, pages_for(tokens, page_size)
        frames = match.frames_for(tokens, page_size) + match.idle_frames
        if frames > free:
            match = match.whole_pages(page_size)
            frames = match.frames_for(tokens, page_size) + match.idle_frames
        return match, frames

    def _look_up(self, sequence: Sequence) -> PrefixMatch | None:
        """What of its tokens is cached; None if it does not use the cache."""
        if not (sequence.uses_cache and self._prefix_caching):
            return None
        if sequence.chain is None:
            sequence.chain = self._memory.chain(sequence.tokens, Namespace(salt=sequence.cache_salt), sequence.tenant)
        match = self._memory.lookup(sequence.chain)
        return match.unread() if sequence.is_scoring else match

    def _should_await(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """Whether another Sequence is just computing what this one needs next (rule 5)."""
        if match.awaited is None or sequence.awaited_steps >= AWAIT_STEPS:
            return False
        writer = self._rows.sequences[match.awaited.writer.row]
        if writer is None or writer.state is not State.RUNNING:  # it may be in swap for long
            return False
        sequence.awaited_steps += 1
        return self._memory.is_being_written(match.awaited)


def room_beside(memory: MemoryManager, decodes: Int32Array, chunks: Chunks) -> Room:
    """What is left when these have what they need."""
    room = memory.room()
    if len(decodes) or chunks:
        room.take_all(memory.needs(*rows_and_counts(decodes, chunks)))
    return room


def rows_and_counts(decodes: Int32Array, chunks: Chunks) -> tuple[Int32Array, Int32Array]:
    """The rows of a step and how many tokens each computes, both (S,) int32: decodes, then chunks."""
    chunk_rows = np.array([row_of(sequence) for sequence, _ in chunks], np.int32)
    counts = np.ones(len(decodes) + len(chunks), np.int32)
    counts[len(decodes) :] = [count for _, count in chunks]
    return np.concatenate((decodes, chunk_rows)), counts
