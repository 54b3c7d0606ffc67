"""Every Sequence that has not ended, and how one moves between its states. Each transition is a method.

WAITING ──enter, fork──▶ RUNNING ◀──return_from_swap── SWAPPED
   ▲                      │   │                          ▲
   └──────recompute───────┴───┴─────────swap_out─────────┘          any ──end, drop──▶ ENDED


WAITING, RUNNING, SWAPPED ──pause──▶ PAUSED ──resume──▶ WAITING; where it has a row RUNNING, or SWAPPED

WAITING    holds nothing; its tokens lie in `Sequence.tokens`. Who was preempted by recomputation waits before the rest
RUNNING    has a row and frames
SWAPPED    has a row, which no step runs; its pages are in swap, on their way there, or on their way back
PAUSED     is looked at by nobody. It keeps its row and pages until somebody else needs them
CHOICE     stands for a result of a beam search: it holds nothing, and the beams are Sequences beside it (beams.py)
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from mm import AddressSpace, MemoryManager, Miss, MissReason, OutOfFrames, OutOfSwapSlots, PrefixMatch, SwapOrders
from mm.addresses import Int32Array
from mm.holds import Hold
from service.engine_client import Ended, EndReason, MissInfo
from service.family import Family
from service.queue_wait import Admissions
from service.request import Key, SavedPages, Sequence, State
from service.rows import RunningRows
from service.shares import Shares
from service.waiting import WaitingQueue

MISSES_KEPT = 256
"""The latest prefix misses, which operators can look at."""


@dataclass(frozen=True, slots=True)
class Missed:
    """A prompt that was not served from the page cache in full, and why. For operators."""

    admitted_s: float  # by the engine's clock
    sequence: Key
    request_id: str
    tenant: str
    prompt_tokens: int
    cached_tokens: int
    miss: Miss


@dataclass(frozen=True, slots=True)
class Fill:
    """Frames that wait for the pages of a Sequence that was restored."""

    sequence: Sequence
    hold: Hold
    saved: SavedPages


class Sequences:
    """The states of all Sequences over the rows of one MemoryManager. Policy is the scheduler's."""

    def __init__(self, memory: MemoryManager, max_length: int) -> None:
        self.memory = memory
        self.rows = RunningRows(memory.tables.max_rows, max_length)
        self.shares = Shares(memory.tenants, memory.tables.tenants)
        self.waiting = WaitingQueue(self.shares.of)
        self.running: OrderedDict[Key, Sequence] = OrderedDict()
        self.swapped: OrderedDict[Key, Sequence] = OrderedDict()
        self.paused: OrderedDict[Key, Sequence] = OrderedDict()
        self.running_by_tenant: Counter[str] = Counter()
        self.changes = 0  # grows whenever a row is taken, given up, or stops running
        self.preemptions = 0
        self.admissions = Admissions()
        self.misses: deque[Missed] = deque(maxlen=MISSES_KEPT)
        self.entered: list[Sequence] = []  # whose sampling parameters no plan has carried yet
        self.swap_orders: list[SwapOrders] = []  # given by mm, not handed to the executor yet
        self.fills: list[Fill] = []  # whose copies have not been begun yet
        self._bereft: dict[tuple[int, int], Sequence] = {}  # (row, epoch) -> preempted with a token in flight
        self._arrivals = 0

    def add(self, sequence: Sequence) -> None:
        self.memory.tenants.id(sequence.tenant)  # has a number, and so a place in every Room, from now on
        if not self._asks(sequence.tenant):
            self.shares.begin(sequence.tenant)
        self.waiting.append(sequence)

    def _asks(self, tenant: str) -> bool:
        """Whether anything of it waits or runs."""
        if self.waiting.has_any_of(tenant) or self.running_by_tenant[tenant]:
            return True
        return any(sequence.tenant == tenant for sequence in self.swapped.values())

    def put_first(self, sequences: list[Sequence]) -> bool:
        """Those of them that wait go to the head of the queue. False if they were there, or none waits."""
        waiting = [sequence for sequence in sequences if sequence.state is State.WAITING]
        before = list(self.waiting.in_order(len(waiting)))
        for sequence in reversed(waiting):
            self.waiting.remove(sequence)
            self.waiting.put_first(sequence)
        return {sequence.key for sequence in before} != {sequence.key for sequence in waiting}

    def find(self, key: Key) -> Sequence | None:
        return self.running.get(key) or self.waiting.get(key) or self.swapped.get(key) or self.paused.get(key)

    def younger_than(self, sequence: Sequence, among: Mapping[Key, Sequence]) -> list[Sequence]:
        """Who of `among` (running or swapped) arrived after it, oldest first."""
        arrival = self.rows.arrival
        younger = [other for other in among.values() if arrival[row_of(other)] > arrival[row_of(sequence)]]
        return sorted(younger, key=lambda other: int(arrival[row_of(other)]))

    def oldest(self, tenant: int | None = None) -> Sequence:
        """Of those that run, or of one tenant's (its number in mm). There must be one."""
        tenants = self.memory.tables.tenants
        running = (each for each in self.running.values() if tenant is None or tenants[row_of(each)] == tenant)
        return min(running, key=lambda sequence: int(self.rows.arrival[row_of(sequence)]))

    def known(self, sequence: Sequence) -> int:
        """How many tokens the host knows of one that has not ended."""
        return len(sequence.tokens) if sequence.space is None else int(self.rows.known[row_of(sequence)])

    def tokens_of(self, sequence: Sequence) -> Int32Array:
        """All that the host knows of one that has not ended: a copy."""
        if sequence.space is None:
            return sequence.tokens.copy()
        row = row_of(sequence)
        return self.rows.tokens[row, : self.rows.known[row]].copy()

    def family_of(self, sequence: Sequence) -> Family:
        """That of one that has not ended; a new one if it was alone."""
        if sequence.family is None:
            sequence.family = Family(sequence.prompt_tokens)
            if sequence.space is not None:
                sequence.family.with_row[sequence.key] = sequence
        return sequence.family

    def outranked(self, sequence: Sequence) -> list[Sequence]:
        """Who of its tenant has a row, is less urgent than `sequence`, and came too late to have become as urgent."""
        state, number = self.rows, self.memory.tenants.id(sequence.tenant)
        lower = (state.priority > sequence.priority) & (state.arrival >= _turn(sequence) + (1 << ARRIVAL_BITS))
        rows = np.flatnonzero(lower & (self.memory.tables.tenants == number))
        return [state.at(row) for row in rows[np.argsort(state.arrival[rows])].tolist()]

    # --- transitions

    def enter(self, sequence: Sequence, match: PrefixMatch | None, now: float) -> None:
        """WAITING -> RUNNING, with what is cached of its tokens; -> SWAPPED while part of that is being brought in, or
        what was saved of it is.

        Raises OverCommit, and then nothing has changed.
        """
        limit, extra_pages = sequence.limit, 0
        if sequence.group is not None:  # the first of the beams answers for all
            is_first = not sequence.group.family.with_row
            limit, extra_pages = (limit, sequence.group.extra_pages(self.memory.page_size)) if is_first else (0, 0)
        space = self.memory.create(
            sequence.request_id,
            tenant=sequence.tenant,
            match=match,
            max_tokens=limit,
            extra_pages=extra_pages,
            is_back=sequence.admitted_s is not None,
        )
        sequence.origin_of_row = "prefix"
        if (saved := sequence.saved) is not None:
            sequence.origin_of_row = "own"
            self.fills.append(Fill(sequence, self.memory.fill(space, saved.positions), saved))
            sequence.saved = None  # who is preempted later computes
        self.waiting.remove(sequence)
        if sequence.admitted_s is None:
            self._note_admission(sequence, space.length, now)
            sequence.cached_tokens = space.length
            miss = Miss(MissReason.DISABLED, 0) if match is None else match.miss
            sequence.miss = MissInfo(str(miss.reason), miss.position, miss.evicted_s)
            request_id, tenant = sequence.request_id, sequence.tenant
            tokens = sequence.prompt_tokens, space.length
            self.misses.append(Missed(now, sequence.key, request_id, tenant, *tokens, miss))
        self._take_row(sequence, space)
        if not space.is_resident:
            self._stop_running(sequence)
            self.bring_in(sequence)

    def fork(self, sequence: Sequence, relative: Sequence, length: int, now: float) -> None:
        """WAITING -> RUNNING, with the first `length` tokens of a running relative, which it has in common.

        Raises OverCommit, and then nothing has changed.
        """
        space = self._fork_space(relative, length, 0 if sequence.group is not None else sequence.limit)
        self.waiting.remove(sequence)
        if sequence.admitted_s is None:
            self._note_admission(sequence, length, now)
            if sequence.inherited_tokens:
                sequence.cached_tokens = length
        sequence.origin_of_row = "parent"
        self._take_row(sequence, space)

    def split(self, beam: Sequence, sequence_id: int) -> Sequence:
        """One more beam, RUNNING, with all tokens and pages of `beam`, which runs and has computed all its tokens."""
        row = row_of(beam)
        known = int(self.rows.known[row])
        child = replace(beam, sequence_id=sequence_id, tokens=self.rows.tokens[row, :known], origin_of_row="parent")
        self._take_row(child, self._fork_space(beam, known, 0))
        return child

    def choose(self, beam: Sequence, token: int) -> None:
        """The next token of a running beam."""
        self.rows.append(row_of(beam), token)
        beam.candidates = None
        self.changes += 1
        if beam.sampling.needs_history and beam not in self.entered:
            self.entered.append(beam)  # the executor has noted the token that it sampled itself

    def recompute(self, sequence: Sequence) -> None:
        """RUNNING or SWAPPED -> WAITING, before the rest of the queue: its tokens are computed again, if not cached.

        PAUSED stays so, without a row.
        """
        row = row_of(sequence)
        remaining = int(self.rows.remaining[row]) if sequence.state is State.RUNNING else sequence.remaining
        sequence.in_flight = int(self.memory.tables.lengths[row]) + remaining - int(self.rows.known[row])
        if sequence.in_flight:
            self._bereft[row, int(self.rows.epoch[row])] = sequence
        is_paused = sequence.state is State.PAUSED
        self._leave(sequence)
        self._count_preemption(sequence)
        if is_paused:
            self.paused[sequence.key] = sequence
            return
        sequence.state = State.WAITING
        self.waiting.put_back(sequence)

    def swap_out(self, victims: list[Sequence]) -> bool:
        """RUNNING -> SWAPPED, together: what they share with each other moves too. False: no slots, nothing done."""
        try:
            orders = self.memory.swap_out([space_of(victim) for victim in victims])
        except OutOfSwapSlots:
            return False
        self.swap_orders.append(orders)
        for victim in victims:
            self._stop_running(victim)
            self._count_preemption(victim)
        return True

    def bring_in(self, sequence: Sequence) -> bool:
        """Order what a SWAPPED one has in swap; False if there are no frames for it now.

        -> RUNNING at once where nothing has to be copied: its pages are in frames again, for others.
        """
        try:
            self.swap_orders.append(self.memory.swap_in(space_of(sequence)))
        except OutOfFrames:
            return False
        if space_of(sequence).is_resident:
            self.return_from_swap(sequence)
        return True

    def filled(self, fill: Fill, *, succeeded: bool) -> None:
        """The copies of a Fill have ended: the Sequence may run, or has to compute its tokens after all."""
        sequence, row = fill.sequence, fill.hold.row
        self.memory.let_go(fill.hold)
        is_there = sequence.space is not None and self.memory.tables.epochs[row] == fill.hold.epoch
        if is_there and not succeeded:
            self.recompute(sequence)

    def return_from_swap(self, sequence: Sequence) -> None:
        """SWAPPED -> RUNNING: all its pages are resident."""
        del self.swapped[sequence.key]
        self._start_running(sequence)
        self.rows.remaining[row_of(sequence)] = sequence.remaining

    def pause(self, sequence: Sequence) -> None:
        """WAITING, RUNNING or SWAPPED -> PAUSED. Who computes a prompt gives its pages up: others may wait for them."""
        if sequence.state is State.RUNNING and sequence.first_token_s is None:
            self.recompute(sequence)
        match sequence.state:
            case State.WAITING:
                self.waiting.remove(sequence)
            case State.RUNNING:
                self._stop_running(sequence)
        self.swapped.pop(sequence.key, None)
        self.paused[sequence.key] = sequence
        sequence.state = State.PAUSED
        self.changes += 1

    def resume(self, sequence: Sequence) -> None:
        """PAUSED -> RUNNING with all its pages in frames; -> SWAPPED, until they are; without a row -> WAITING."""
        del self.paused[sequence.key]
        if sequence.space is None:
            sequence.state = State.WAITING
            self.waiting.put_back(sequence)
        else:
            sequence.state = State.SWAPPED
            self.swapped[sequence.key] = sequence
            if space_of(sequence).is_resident:
                self.return_from_swap(sequence)
        self.changes += 1

    @property
    def paused_with_row(self) -> list[Sequence]:
        """Those whose pages could go, the one that was paused last first."""
        return [sequence for sequence in reversed(self.paused.values()) if sequence.space is not None]

    def set_priority(self, sequence: Sequence, priority: int, ageing_s: float) -> None:
        """Its turn is as if it had come with this priority. A level counts as `ageing_s` of waiting."""
        sequence.turn_s += (priority - sequence.priority) * ageing_s
        sequence.priority = priority
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
            put = self.waiting.append if sequence.admitted_s is None else self.waiting.put_back
            put(sequence)
        elif sequence.space is not None:
            row = row_of(sequence)
            self.rows.priority[row] = priority
            self.rows.arrival[row] = _turn(sequence) + self.rows.arrival[row] % (1 << ARRIVAL_BITS)
        self.changes += 1

    def set_oom_score_adj(self, sequence: Sequence, adjustment: int) -> None:
        """-1000 ... 1000, until it ends."""
        sequence.oom_score_adj = adjustment
        if sequence.space is not None:
            self.memory.set_oom_score_adj(sequence.space, adjustment)

    def end(
        self,
        sequence: Sequence,
        reason: EndReason,
        now: float,
        *,
        message: str = "",
        is_refused: bool = False,
        end_token: int = -1,
        output: int | None = None,
        beam_score: float | None = None,
    ) -> Ended:
        """-> ENDED: release all that it holds, at once. Its frames may be reused by later steps, which run later."""
        self.drop(sequence)
        admitted, first = sequence.admitted_s, sequence.first_token_s
        return Ended(
            sequence_id=sequence.sequence_id,
            reason=reason,
            message=message,
            is_refused=is_refused,
            end_token=end_token if reason == "stop" else -1,
            output_tokens=len(sequence.tokens) - sequence.prompt_tokens if output is None else output,
            cached_tokens=sequence.cached_tokens,
            miss=sequence.miss,
            preemptions=sequence.preemptions,
            queue_s=(now if admitted is None else admitted) - sequence.submitted_s,
            ttft_s=(now if first is None else first) - sequence.submitted_s,
            beam_score=beam_score,
        )

    def drop(self, sequence: Sequence) -> None:
        """The same, where nobody is told: of a beam that was pruned."""
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.space is not None:
            self._leave(sequence)
        self.paused.pop(sequence.key, None)
        sequence.state = State.ENDED

    # --- tokens that arrive after their Sequence was preempted

    def claim(self, row: int, epoch: int) -> Sequence | None:
        """Who ran in `row` when a step was submitted and waits for its token now; None if the token is nobody's."""
        sequence = self._bereft.pop((row, epoch), None)
        if sequence is None or sequence.state is State.ENDED:
            return None
        sequence.in_flight -= 1
        return sequence

    def give(self, sequence: Sequence, token: int, now: float) -> EndReason | None:
        """A WAITING one gets its token. Returns the reason if it ends by that."""
        sequence.tokens = np.append(sequence.tokens, np.int32(token))
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        if token in sequence.end_ids or (sequence.matcher is not None and sequence.matcher.is_complete):
            return "stop"
        return "length" if len(sequence.tokens) == sequence.limit else None

    # --- inside

    def _note_admission(self, sequence: Sequence, computed: int, now: float) -> None:
        """computed: tokens that are there already."""
        sequence.admitted_s = now
        self.shares.admit(sequence.tenant, len(sequence.tokens) - computed)
        self.admissions.requests += 1
        self.admissions.tokens += sequence.queue_tokens

    def _take_row(self, sequence: Sequence, space: AddressSpace) -> None:
        """-> RUNNING in a new address space, which holds the beginning of its tokens."""
        sequence.space = space
        sequence.chain = None  # a preempted one has more tokens when it returns
        sequence.blocked_at = sequence.held_at = -1
        sequence.cached_of_row = space.length
        self.rows.enter(space.row, sequence, self._arrival_of(sequence), space.length)
        if sequence.oom_score_adj:
            self.memory.set_oom_score_adj(space, sequence.oom_score_adj)
        if sequence.family is not None:
            sequence.family.with_row[sequence.key] = sequence
        self._start_running(sequence)
        self.entered.append(sequence)

    def _arrival_of(self, sequence: Sequence) -> int:
        """By turns; of those with the same turn, later than all others. That of a beam is that of its relatives: none
        of a search is older or younger than the rest.
        """
        if sequence.group is not None and sequence.group.family.with_row:
            return int(self.rows.arrival[row_of(next(iter(sequence.group.family.with_row.values())))])
        self._arrivals += 1
        return _turn(sequence) + self._arrivals

    def _fork_space(self, relative: Sequence, length: int, limit: int) -> AddressSpace:
        space, orders = self.memory.fork(space_of(relative), relative.request_id, length, max_tokens=limit)
        self.memory.tables.note(space.row, orders.table_changes.pages)  # the device learns of it at the next growth
        return space

    def _leave(self, sequence: Sequence) -> None:
        """The row and all frames are free again."""
        self.rows.leave(row_of(sequence))
        if sequence.family is not None:
            del sequence.family.with_row[sequence.key]
            if sequence.group is not None and sequence.family.with_row:  # what was promised to the search goes on
                self.memory.pass_promise(space_of(sequence), space_of(next(iter(sequence.family.with_row.values()))))
        space_of(sequence).release()
        sequence.space = None
        sequence.candidates = None  # of a beam: it has to compute its last token again
        if self.running.pop(sequence.key, None) is not None:
            self.running_by_tenant[sequence.tenant] -= 1
        self.swapped.pop(sequence.key, None)
        self.paused.pop(sequence.key, None)
        if sequence in self.entered:
            self.entered.remove(sequence)
        self.changes += 1

    def _start_running(self, sequence: Sequence) -> None:
        self.running[sequence.key] = sequence
        self.running_by_tenant[sequence.tenant] += 1
        sequence.state = State.RUNNING
        self.changes += 1

    def _stop_running(self, sequence: Sequence) -> None:
        """RUNNING -> SWAPPED: with nothing remaining, no step takes the row."""
        row = row_of(sequence)
        sequence.remaining = int(self.rows.remaining[row])
        self.rows.remaining[row] = 0
        del self.running[sequence.key]
        self.running_by_tenant[sequence.tenant] -= 1
        self.swapped[sequence.key] = sequence
        sequence.state = State.SWAPPED
        self.changes += 1

    def _count_preemption(self, sequence: Sequence) -> None:
        sequence.preemptions += 1
        self.preemptions += 1


ARRIVAL_BITS = 31
"""Of an arrival, those that count; the others are tenths of a second of the turn. 2**31 enter a row in a year."""


def _turn(sequence: Sequence) -> int:
    return int(10 * sequence.turn_s) << ARRIVAL_BITS


def row_of(sequence: Sequence) -> int:
    """The row of a Sequence that has one."""
    assert sequence.space is not None
    return sequence.space.row


def space_of(sequence: Sequence) -> AddressSpace:
    """The memory of a Sequence that has some."""
    assert sequence.space is not None
    return sequence.space
