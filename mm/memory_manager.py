"""The facade that service calls: address spaces over one pool of frames, and everything that can be asked about it.

It never touches keys or values: what must happen on the device is returned as orders (mm/page_copies.py), which the
caller hands to an executor in the order they were given. It reads no clock: `turn` tells the time.

    chain, lookup, create        a prompt, what of it is cached, an address space that begins with that
    grow, grow_steadily          every step, for all rows that run in it
    shared_prefixes              which rows begin with the same frames, when the rows of a step change
    publish                      at commit: the pages that became full can be found from now on
    fork, truncate, release      of one address space
    swap_out, swap_in,           of pages that are not needed now; `complete` and `fail` report what became of it
    background_reclaim
    hold, fill, let_go           of pages that are copied to a file, or from one (mm/holds.py)
    oom_table, choose_victim     whom to preempt, and how
    pin, advise, drop_caches     what an operator or a client knows better
    would_run                    what would become of a request, without running it
    information ... audit        snapshots, and whether the books balance
"""

import secrets
from collections import deque
from collections.abc import Iterator, Mapping

import numpy as np

from mm import accounting
from mm.address_space import AddressSpace
from mm.addresses import ABSENT, PAGE_SIZE, Int32Array, Int64Array, pages_for
from mm.advice import Advice, advise_prefix, advise_space, drop_caches
from mm.audit import look_through
from mm.content import ContentChain, Namespace
from mm.dry_run import DryRun, would_run
from mm.errors import MemoryCorruption, OutOfFrames
from mm.flight_recorder import EventKind, FlightRecorder
from mm.frame_allocator import FrameAllocator
from mm.growth import Growth
from mm.holds import Hold, Holds
from mm.lookup import Awaited, Lookup, MissReason, PrefixMatch
from mm.lru import PageLru
from mm.mapping import PageMapping
from mm.overcommit import CommitLedger
from mm.page_cache import PageCache
from mm.page_copies import NO_SWAPS, MemoryOrders, SwapOrders
from mm.page_table import PageTables
from mm.pins import Pin, PrefixPins
from mm.preemption import Action, Candidates, CostEstimates, OomTable, Scorer, Victim
from mm.pressure import PressureMeter
from mm.publisher import Publisher
from mm.reclaim import Reclaimer, Watermarks
from mm.refault import Shadows
from mm.residency import Residency
from mm.resizing import Beyond, beyond, resize
from mm.room import Room
from mm.shared_prefixes import SharedPrefixes, find_shared_prefixes
from mm.statistics import Event, EventCounters, MappedRun, MemoryInformation, SequenceMemory, TenantMemory, WorkingSet
from mm.steady_rows import SteadyRows
from mm.swap_space import SwapBounds, SwapSpace
from mm.swapper import Swapper
from mm.tenants import TenantLimits, Tenants


class MemoryManager:
    """`frames` frames of `page_size` tokens, shared by up to `max_rows` address spaces of up to `max_pages` pages."""

    def __init__(
        self,
        *,
        frames: int,
        max_rows: int,
        max_pages: int,
        page_size: int = PAGE_SIZE,
        slots: int = 0,
        opened_slots: int | None = None,
        watermarks: Watermarks | None = None,
        swap_bounds: SwapBounds | None = None,
        secret: bytes | None = None,
        costs: CostEstimates | None = None,
    ) -> None:
        self.page_size = page_size
        self.recorder = FlightRecorder()
        self.tenants = Tenants(frames, slots)
        self.frames = FrameAllocator(frames, self.tenants)
        self.tables = PageTables(max_rows, max_pages, page_size)
        self.swap = SwapSpace(slots, slots if opened_slots is None else opened_slots, frames, self.tenants, swap_bounds)
        self.cache = PageCache(frames + slots, frames, page_size)
        self.lru = PageLru(frames + slots)
        self.shadows = Shadows(frames + slots)
        self.residency = Residency(
            self.frames, self.swap, self.cache, self.lru, self.shadows, self.tenants, self.recorder
        )
        self.reclaimer = Reclaimer(self.residency, watermarks or Watermarks.from_shares(frames))
        self.swapper = Swapper(self.tables, self.residency, self.reclaimer)
        self.holds = Holds(self.tables, self.residency, self.reclaimer)
        self.growth = Growth(self.tables, self.residency, self.reclaimer)
        self.mapping = PageMapping(self.tables, self.residency)
        self.publisher = Publisher(self.tables, self.residency)
        self._lookup = Lookup(self.residency, self.publisher, page_size)
        self._secret = secrets.token_bytes(32) if secret is None else secret  # a client cannot know a digest
        self.costs = costs or CostEstimates()
        self.scorer = Scorer(self.tables, self.residency, self.swapper, self.costs)
        self.victims: deque[tuple[int, Victim]] = deque(maxlen=64)  # (step, who was chosen and from which table)
        self.ledger = CommitLedger(max_rows, frames)
        self._limits: Int32Array = np.zeros(max_rows, np.int32)  # tokens at which each row will end, 0: not promised
        self.pins = PrefixPins(self.residency, *PrefixPins.shares_of(frames))
        self.pressure = PressureMeter()
        self._tenant_pressure: dict[str, PressureMeter] = {}
        # events since the start
        self.forks = self.truncates = self.queried_tokens = self.hit_tokens = 0
        self.returned_tokens = self.recovered_tokens = 0
        self.swap_preemptions = self.recompute_preemptions = 0
        self.mapped_frame_turns = self.saved_frame_turns = 0

    def turn(self, now: float, step: int) -> None:
        """A turn of the engine begins: its time and its step stamp all that happens until the next."""
        self.recorder.now, self.recorder.step = now, step
        self.mapped_frame_turns += self.frames.mapped
        self.saved_frame_turns += self.frames.saved
        for pin in self.pins.expire(now):
            self._record(EventKind.UNPIN, ABSENT, pin.number, len(pin.frames))

    @property
    def now(self) -> float:
        """The time of this turn, seconds of the engine's clock."""
        return self.recorder.now

    def _record(self, kind: EventKind, row: int, place: int, count: int) -> None:
        """An event of a row, or of nobody (row ABSENT)."""
        serial, tenant = (int(self.tables.serials[row]), int(self.tables.tenants[row])) if row != ABSENT else (0, 0)
        self.recorder.record(kind, serial, tenant, place, count)

    # --- how much there is

    @property
    def free_frames(self) -> int:
        return self.frames.free_frames

    @property
    def available_frames(self) -> int:
        """Frames that an allocation can have: free, or in an idle cached page."""
        return self.reclaimer.available_frames

    @property
    def arriving_frames(self) -> int:
        """Frames that become free when the swap-outs in flight end: a reason to wait rather than to preempt."""
        return self.swapper.arriving_frames

    @property
    def max_tokens(self) -> int:
        """The most positions that one address space can ever hold."""
        return min(self.frames.usable, self.tables.max_pages) * self.page_size

    def max_tokens_of(self, tenant: str | None) -> int:
        """Positions that one request of `tenant` can hold in all its address spaces together, whatever others do: up to
        its max, and what their min and the pins leave. None: a tenant without limits.
        """
        names, limits = self.tenants.names, self.tenants.limits
        others = sum(each.min for name, each in zip(names, limits, strict=True) if name != tenant)
        most = limits[names.index(tenant)].max if tenant in names else self.frames.usable
        return max(0, min(self.frames.usable - others - self.pins.pages, most)) * self.page_size

    @property
    def limited_tenants(self) -> list[str]:
        """Those that have limits of their own."""
        names, limits = self.tenants.names, self.tenants.limits
        return [name for name, each in zip(names, limits, strict=True) if each != TenantLimits()]

    @property
    def is_copying(self) -> bool:
        """Whether a swap order is under way, or pages are held for a copy of somebody else's."""
        return bool(self.swapper.in_flight or self.holds.held)

    def frames_needed(self, rows: Int32Array, counts: Int32Array) -> int:
        """Frames that `grow` would allocate for the same arguments. Changes nothing. Raises PageNotResident."""
        return len(self.growth.needed(rows, counts))

    def needs(self, rows: Int32Array, counts: Int32Array) -> Int64Array:
        """The same by tenant: (tenants,) int64."""
        return np.bincount(self.growth.needed(rows, counts), minlength=len(self.tenants.names)).astype(np.int64)

    def room(self) -> Room:
        """What an allocation can have now, on paper: to put a step together (mm/room.py)."""
        return self.reclaimer.room()

    def arriving_of(self, tenant: int | None) -> int:
        """`arriving_frames` that are charged to `tenant`; None: all."""
        return self.arriving_frames if tenant is None else self.swapper.arriving_of(tenant)

    def shortage(self, rows: Int32Array, counts: Int32Array) -> OutOfFrames | None:
        """What `grow` would raise for the same arguments: of the pool, or of one tenant. Changes nothing."""
        return self.reclaimer.shortage(self.needs(rows, counts))

    # --- the prefix cache

    def chain(self, tokens: Int32Array, namespace: Namespace = Namespace(), tenant: str = "default") -> ContentChain:  # noqa: B008  (frozen)
        """The pages of a prompt (its token ids), as they are named in the cache. Made once per Sequence."""
        if self.tenants.isolates(tenant):
            namespace = Namespace(namespace.adapter, namespace.salt, tenant)
        return ContentChain(self._secret, namespace, tokens, self.page_size)

    def lookup(self, chain: ContentChain, *, resident_only: bool = False) -> PrefixMatch:
        """What of the prompt is cached, and why the next page is not. Changes nothing; 2 us a page.

        resident_only: leave pages in swap alone, as if they were not cached.
        """
        return self._lookup.find(chain, resident_only=resident_only)

    def is_being_written(self, awaited: Awaited) -> bool:
        """Whether it is still worth waiting: the page that the match awaits is not published, and its writer lives."""
        return self.publisher.is_being_written(awaited.key, awaited.writer)

    def create(
        self,
        owner: str,
        *,
        tenant: str = "default",
        match: PrefixMatch | None = None,
        max_tokens: int = 0,
        is_back: bool = False,
        extra_pages: int = 0,
    ) -> AddressSpace:
        """An address space: empty, or beginning with the pages of `match`. Raises OutOfRows, OverCommit.

        Its length is then what was found; its further pages are published under match.chain. If the match is out of
        date, it is looked up again. If it has pages in swap, the space is not resident until `swap_in` is complete.
        max_tokens: the length at which it will end, for the commit charge; 0 promises nothing. extra_pages: promised
        besides, for forks that will be made without a promise of their own; together never more than there is.
        is_back: it had an address space before and was preempted: what it finds, its own pages perhaps, is no hit.
        """
        if match is not None and len(match.entries) and not self.cache.is_current(match.entries, match.serials):
            match = self.lookup(match.chain)
        shared = match.frames_saved if match is not None else 0
        promised = max(0, pages_for(max_tokens, self.page_size) - max(0, shared))
        if extra_pages:
            promised = min(promised + extra_pages, self.ledger.limit(self.pins.pages))
        self.ledger.check(promised, self.pins.pages)
        number = self.tenants.id(tenant)
        row = self.tables.allocate_row(owner, number)
        self.ledger.promise(row, promised)
        self._limits[row] = max_tokens
        if match is not None:
            self.mapping.begin(row, match, self.now)
            whole = match.cached_tokens // self.page_size
            self.publisher.begin(row, owner, match.chain, match.entries[:whole].tolist())
            if match.miss.reason is MissReason.DISABLED:
                pass  # it read nothing, and so neither hit nor missed
            elif is_back:
                self.returned_tokens += match.chain.tokens
                self.recovered_tokens += match.cached_tokens
            else:
                self.queried_tokens += match.chain.tokens
                self.hit_tokens += match.cached_tokens
        return AddressSpace(self, row, owner)

    def publish(self, rows: Int32Array, lengths: Int32Array, tokens: Int32Array) -> None:
        """The first lengths[i] positions of row rows[i] are known to be good: cache the pages that became full.

        rows, lengths (S,) int32; tokens (max_rows, any) int32: the token ids of every row, from its first on.
        """
        self.publisher.publish(rows.astype(np.intp), lengths, tokens, self.now)

    # --- growing, forking, ending

    def grow(self, rows: Int32Array, counts: Int32Array) -> MemoryOrders:
        """Make the next counts[i] >= 1 positions of row rows[i] writable: allocate, and copy what others share.

        rows, counts (S,) int32, rows distinct. One call a step: the copies of one call are independent of each other,
        and the device learns of all that was mapped since the call before. Idle cached pages are reclaimed as needed.
        Raises OutOfFrames, and then nothing has changed (invariant 5); ValueError past max_pages; PageNotResident.
        """
        return self.growth.grow(rows, counts)

    def grow_steadily(self, steady: SteadyRows) -> MemoryOrders:
        """`grow` by one token each, for rows that do so step after step: it looks only at those that need a page."""
        return self.growth.grow_steadily(steady)

    def shared_prefixes(self, rows: Int32Array, lengths: Int32Array) -> SharedPrefixes | None:
        """Which of `rows` (S,) begin with the same frames, as far as the pages that their first lengths[i] positions
        fill; None if none do. True until one of the rows is released, swapped out or forked over. Changes nothing.
        """
        return find_shared_prefixes(self.tables.entries, self.frames.references, rows, lengths // self.page_size)

    def fork(
        self, space: AddressSpace, owner: str, length: int | None = None, *, max_tokens: int | None = None
    ) -> tuple[AddressSpace, MemoryOrders]:
        """A second address space over the first `length` positions of `space` (None: over all of them).

        Each of their pages gains a reference, no frame is allocated. max_tokens: the length at which it will end, for
        the commit charge; 0 promises nothing, None: as `space` will. Raises OutOfRows, OverCommit; ValueError if there
        are fewer positions. O(pages), vectorised.
        """
        tables, row, held = self.tables, space.row, space.length
        length = held if length is None else length
        if not 0 <= length <= held:
            raise ValueError(f"cannot fork {length} of {held} positions")
        limit = int(self._limits[row]) if max_tokens is None else max_tokens
        promised = max(0, pages_for(limit, self.page_size) - length // self.page_size) if limit else 0
        self.ledger.check(promised, self.pins.pages)
        tenant = int(tables.tenants[row])
        child = tables.allocate_row(owner, tenant)
        self.ledger.promise(child, promised)
        self._limits[child] = limit
        changes = self.mapping.fork(row, child, length)
        self.publisher.fork(row, child, length)
        self.forks += 1
        return AddressSpace(self, child, owner), MemoryOrders(table_changes=changes)

    def pass_promise(self, space: AddressSpace, heir: AddressSpace) -> None:
        """What was promised to `space` is promised to `heir` from now on."""
        self.ledger.move(space.row, heir.row)

    def truncate(self, space: AddressSpace, length: int) -> None:
        """Shorten `space` to `length` positions; pages with no position left are released."""
        before = int(self.tables.lengths[space.row])
        if not 0 <= length <= before:
            raise ValueError(f"cannot truncate {before} positions to {length}")
        self.mapping.drop(space.row, pages_for(length, self.page_size))
        self.tables.lengths[space.row] = length
        self.tables.exposed[space.row] = True
        self.publisher.truncate(space.row, length)
        self.truncates += 1

    def release(self, space: AddressSpace) -> None:
        """Drop every reference of `space` and its row. Cached pages stay, as long as there is room."""
        row = space.row
        self._record(EventKind.RELEASE, row, row, len(self.tables.mapped(row)))
        self.publisher.end(row)
        self.mapping.drop(row, 0)
        self.ledger.end(row)
        self.scorer.adjustments[row] = 0
        self.tables.release_row(row)

    # --- swap

    def swap_out(self, spaces: list[AddressSpace]) -> SwapOrders:
        """Order the pages that only these spaces map out (a fork family together). None of them may run in a step.

        Their frames become free when the order is complete, clean ones at once. Raises OutOfSwapSlots.
        """
        return self.swapper.swap_out(np.array([space.row for space in spaces], np.int32), self.now)

    def swap_in(self, space: AddressSpace) -> SwapOrders:
        """Order the pages of `space` that are in swap in; it may run when `space.is_resident`. Raises OutOfFrames.

        An empty order may still mean waiting for copies under way. After the end of the space's own swap-out, or of
        a failed copy, call it again.
        """
        return self.swapper.swap_in(space.row, self.now, space.owner)

    def background_reclaim(self) -> SwapOrders:
        """Work ahead, once a turn: drop or order out idle cached pages while free frames are low."""
        victims = self.reclaimer.background_victims(self.arriving_frames, self.now)
        return self.swapper.swap_out_cached(victims, self.now, "background reclaim") if victims else NO_SWAPS

    def open_slots(self, slots: int) -> None:
        """The first `slots` slots have memory behind them from now on (mm/backing_store.py makes it in pieces)."""
        self.swap.open(slots)

    def complete(self, ticket: int) -> None:
        """Every copy of this swap order has been made."""
        self.swapper.complete(ticket)

    def fail(self, ticket: int) -> list[int]:
        """A copy of this swap order could not be made: none counts, nothing is lost but pages that were cached in swap
        alone, its frames were not freed. For a while nothing is copied out.

        Returns the rows whose pages should have come in by it. It can be ordered again, or they can be released.
        """
        return self.swapper.fail(ticket, self.now)

    # --- copies of somebody else's (mm/holds.py)

    def hold(self, space: AddressSpace, length: int) -> Hold:
        """Keep the pages of the first `length` positions where they are until `let_go`, whatever becomes of `space`.

        Raises ValueError if there are fewer positions.
        """
        if not 0 <= length <= space.length:
            raise ValueError(f"cannot hold {length} of {space.length} positions")
        return self.holds.pin(space.row, length)

    def fill(self, space: AddressSpace, length: int) -> Hold:
        """Frames for the first `length` positions of an empty `space`, to be written from elsewhere: it is not resident
        until `let_go`. Raises OutOfFrames, and then nothing has changed.
        """
        if space.length:
            raise ValueError(f"it has {space.length} positions already")
        return self.holds.fill(space.row, length, self.now, space.owner)

    def let_go(self, hold: Hold) -> None:
        """Its copies are over, or will not be made."""
        self.holds.let_go(hold)

    # --- preemption

    def oom_table(self, candidates: Candidates, needed_frames: int) -> OomTable:
        """The score of each candidate as it would be used now. Changes nothing."""
        return self.scorer.table(candidates, needed_frames)

    def choose_victim(self, candidates: Candidates, needed_frames: int) -> Victim | None:
        """Whom to preempt so that `needed_frames` become free, and how; None if nobody's end would free any.

        The caller takes the frames: `swap_out` of the victim's spaces together, or `release` of each and computing
        them again later. The decision is kept in `victims`, with its table.
        """
        victim = self.scorer.choose(self.oom_table(candidates, needed_frames))
        if victim is not None:
            self.victims.append((self.recorder.step, victim))
            self.swap_preemptions += victim.action is Action.SWAP
            self.recompute_preemptions += victim.action is Action.RECOMPUTE
            for row in victim.rows.tolist():
                self._record(EventKind.PREEMPT, row, row, victim.frames)
                self.tenants.events[self.tables.tenants[row]].preempt += 1
        return victim

    def set_oom_score_adj(self, space: AddressSpace, adjustment: int) -> None:
        """Make `space` a likelier victim (up to 1000) or a less likely one (-1000: never)."""
        if not -1000 <= adjustment <= 1000:
            raise ValueError(f"oom_score_adj {adjustment} is not in -1000 ... 1000")
        self.scorer.adjustments[space.row] = adjustment

    def report_pressure(self, waiting: Mapping[str, int], progressing: Mapping[str, int]) -> None:
        """How many Sequences of each tenant stand still for want of pages from now on, and how many get on.

        Once a turn; costs next to nothing while that does not change.
        """
        self.pressure.report(self.now, waiting=sum(waiting.values()), progressing=sum(progressing.values()))
        for tenant in {*waiting, *progressing, *self._tenant_pressure}:
            meter = self.pressure_of(tenant)
            meter.report(self.now, waiting=waiting.get(tenant, 0), progressing=progressing.get(tenant, 0))

    def pressure_of(self, tenant: str) -> PressureMeter:
        """The pressure on one tenant's memory."""
        name = self.tenants.names[self.tenants.id(tenant)]
        return self._tenant_pressure.setdefault(name, PressureMeter())

    # --- pins and hints

    def pin(self, chain: ContentChain, owner: str, *, tenant: str = "default", ttl_s: float | None = None) -> Pin:
        """Hold the cached resident pages that `chain` begins with, whatever the need: Pin.tokens says how many.

        Raises QuotaExceeded, and then holds nothing.
        """
        return self.pin_entries(self.cache.walk(chain, chain.tokens // self.page_size), owner, tenant, ttl_s)

    def pin_entries(self, entries: list[int], owner: str, tenant: str, ttl_s: float | None) -> Pin:
        """The same for cached pages that follow each other, from a first one on."""
        resident = next((i for i, entry in enumerate(entries) if self.cache.frame[entry] == ABSENT), len(entries))
        expires_s = None if ttl_s is None else self.now + ttl_s
        pin = self.pins.pin(owner, tenant, entries[:resident], resident * self.page_size, self.now, expires_s)
        self._record(EventKind.PIN, ABSENT, pin.number, len(pin.frames))
        return pin

    def unpin(self, number: int) -> bool:
        """End a pin. False if it has ended before."""
        pin = self.pins.unpin(number)
        if pin is not None:
            self._record(EventKind.UNPIN, ABSENT, number, len(pin.frames))
        return pin is not None

    def advise(self, space: AddressSpace, advice: Advice) -> SwapOrders:
        """What will become of the pages of `space` (mm/advice.py). The order, if any, is to be carried out."""
        return advise_space(self, space.row, advice)

    def advise_prefix(self, chain: ContentChain, advice: Advice) -> SwapOrders:
        """The same for the cached pages that `chain` begins with."""
        return advise_prefix(self, chain, advice)

    def drop_caches(self) -> int:
        """Forget every cached page that nobody maps and no copy holds. Returns how many."""
        return drop_caches(self)

    def forget_shadows(self) -> int:
        """Forget which pages were evicted: what comes back is no refault. Returns how many were known."""
        known = len(self.shadows)
        self.shadows.clear()
        return known

    def note_action(self, row: int, number: int) -> None:
        """An operator has done something, to a row or (ABSENT) to the whole."""
        self._record(EventKind.ACTION, row, number, 1)

    # --- resizing (mm/resizing.py)

    def beyond(self, frames: int, slots: int) -> Beyond:
        """What stands in the way of a pool of `frames` frames and an area of `slots` slots. Changes nothing."""
        return beyond(self, frames, slots)

    def resize(self, frames: int, slots: int) -> None:
        """Use the first `frames` frames and `slots` slots from now on. Nothing must stand in the way; idle cached pages
        beyond go. Raises ValueError.
        """
        resize(self, frames, slots)

    # --- asking ahead

    def would_run(self, chain: ContentChain, max_tokens: int, tenant: str = "default") -> DryRun:
        """What would become of a prompt that may grow to `max_tokens` tokens, if it came now. Changes nothing."""
        return would_run(self, chain, max_tokens, tenant)

    # --- looking at it: snapshots (mm/statistics.py) that read every count there is, for operators

    def information(self) -> MemoryInformation:
        """Memory in total."""
        return accounting.information(self)

    def counters(self) -> EventCounters:
        """What has happened since the start."""
        return accounting.counters(self)

    def sequence_memory(self, space: AddressSpace) -> SequenceMemory:
        """What one address space holds: RSS, PSS, USS, swap."""
        return accounting.sequence_memory(self, space.row)

    def maps(self, space: AddressSpace) -> list[MappedRun]:
        """The pages of one address space, in runs of equal kind."""
        return accounting.maps(self, space.row)

    def tenant_memory(self, now: float | None = None) -> list[TenantMemory]:
        """Every tenant: use, limits, events, pressure (up to `now`; None: up to this turn)."""
        until = self.now if now is None else now
        return [accounting.tenant_memory(self, tenant, until) for tenant in range(len(self.tenants.names))]

    def working_set(self) -> WorkingSet:
        """Whether memory is large enough for what comes back."""
        return accounting.working_set(self)

    def find_events(
        self,
        most: int,
        *,
        after: int = -1,
        kind: EventKind | None = None,
        tenant: str | None = None,
        owner: str | None = None,
    ) -> list[Event]:
        """The last `most` kept events after number `after` that agree with all that is asked for, oldest first."""
        return accounting.find_events(self, most, after=after, kind=kind, tenant=tenant, owner=owner)

    def events_of_frame(self, frame: int, most: int) -> list[Event]:
        """The last kept events whose place is this frame, oldest first."""
        return accounting.events_of_frame(self, frame, most)

    def last_owner(self, frame: int) -> str:
        """Whom a frame was last allocated for; "" if for nobody, or so long ago that the name is forgotten."""
        return self.tables.name(int(self.frames.last_owner[frame]))

    def audit(self) -> list[str]:
        """Recompute every count from what it counts, and list each discrepancy; empty when all is well."""
        return [found for found in look_through(self) if found is not None]

    def auditing(self) -> Iterator[str | None]:
        """The same, in portions of a millisecond or two: None after each. Memory must stay as it is meanwhile."""
        return look_through(self)

    def check_invariants(self) -> None:
        """Raise MemoryCorruption with everything that `audit` lists."""
        if found := self.audit():
            raise MemoryCorruption(found)
