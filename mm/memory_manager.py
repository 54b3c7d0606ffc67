"""The facade that service calls: address spaces over one pool of frames, and everything that can be asked about it.

It never touches keys or values: what must happen on the device is returned as orders (mm/page_copies.py), which the
caller hands to an executor in the order they were given. It reads no clock: `turn` tells the time.

    chain, lookup, create        a prompt, what of it is cached, an address space that begins with that
    grow                         every step, for all rows that run in it
    publish                      at commit: the pages that became full can be found from now on
    fork, truncate, release      of one address space
    swap_out, swap_in,           of pages that are not needed now; `complete` and `fail` report what became of it
    background_reclaim
"""

import secrets

import numpy as np

from mm.address_space import AddressSpace, Faults, find_faults
from mm.addresses import ABSENT, PAGE_SIZE, IndexArray, Int32Array, empty_int32, pages_for, slot_entry
from mm.audit import find_discrepancies
from mm.content import ContentChain, Namespace
from mm.errors import MemoryCorruption, OutOfFrames, PageNotResident
from mm.frame_allocator import FrameAllocator
from mm.lookup import Awaited, Lookup, PrefixMatch
from mm.lru import PageLru
from mm.page_cache import PageCache
from mm.page_copies import MemoryOrders, PageCopies, SwapOrders, TableChanges
from mm.page_table import PageTables
from mm.publisher import Publisher
from mm.reclaim import Reclaimer, Watermarks
from mm.refault import Shadows
from mm.residency import Residency
from mm.statistics import EventCounters, MemoryInformation
from mm.swap_space import SwapBounds, SwapSpace
from mm.swapper import Swapper
from mm.tenants import Tenants


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
        watermarks: Watermarks | None = None,
        swap_bounds: SwapBounds | None = None,
        secret: bytes | None = None,
    ) -> None:
        self.page_size = page_size
        self.now = 0.0
        self.step = 0
        self.tenants = Tenants(frames, slots)
        self.frames = FrameAllocator(frames, self.tenants)
        self.tables = PageTables(max_rows, max_pages, page_size)
        self.swap = SwapSpace(slots, frames, self.tenants, swap_bounds)
        self.cache = PageCache(frames + slots, frames, page_size)
        self.lru = PageLru(frames + slots)
        self.shadows = Shadows(frames + slots)
        self.residency = Residency(self.frames, self.swap, self.cache, self.lru, self.shadows, self.tenants)
        self.reclaimer = Reclaimer(self.residency, watermarks or Watermarks.from_shares(frames))
        self.swapper = Swapper(self.tables, self.residency, self.reclaimer)
        self.publisher = Publisher(self.tables, self.residency)
        self._lookup = Lookup(self.residency, self.publisher, page_size)
        self._secret = secrets.token_bytes(32) if secret is None else secret  # a client cannot know a digest
        self._cow_faults = self._forks = self._truncates = self._queried_tokens = self._hit_tokens = 0

    def turn(self, now: float, step: int) -> None:
        """A turn of the engine begins: its time and its step stamp all that happens until the next."""
        self.now = now
        self.step = step

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
        return min(self.frames.total, self.tables.max_pages) * self.page_size

    def frames_needed(self, rows: Int32Array, counts: Int32Array) -> int:
        """Frames that `grow` would allocate for the same arguments. Changes nothing. Raises PageNotResident."""
        return len(self._faults(rows.astype(np.intp), counts).rows)

    def shortage(self, rows: Int32Array, counts: Int32Array) -> OutOfFrames | None:
        """What `grow` would raise for the same arguments: of the pool, or of one tenant. Changes nothing."""
        tenants = self.tables.tenants[self._faults(rows.astype(np.intp), counts).rows]
        return self.reclaimer.shortage(np.bincount(tenants, minlength=len(self.tenants.names)).astype(np.int64))

    # --- the prefix cache

    def chain(self, tokens: Int32Array, namespace: Namespace = Namespace(), tenant: str = "default") -> ContentChain:  # noqa: B008  (frozen)
        """The pages of a prompt (its token ids), as they are named in the cache. Made once per Sequence."""
        if self.tenants.limits[self.tenants.id(tenant)].isolate:
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

    def create(self, owner: str, *, tenant: str = "default", match: PrefixMatch | None = None) -> AddressSpace:
        """An address space: empty, or beginning with the pages of `match`. Raises OutOfRows.

        Its length is then what was found; its further pages are published under match.chain. If the match is out of
        date, it is looked up again. If it has pages in swap, the space is not resident until `swap_in` is complete.
        """
        number = self.tenants.id(tenant)
        row = self.tables.allocate_row(owner, number)
        if match is not None:
            if not self.cache.is_current(match.entries, match.serials):
                match = self.lookup(match.chain)
            self._map(row, number, match)
        return AddressSpace(self, row, owner)

    def _map(self, row: int, tenant: int, match: PrefixMatch) -> None:
        entries: list[int] = match.entries.tolist()
        frames = self.cache.frames[match.entries]
        is_resident = frames != ABSENT
        self.residency.used(entries, self.now)
        self.residency.map(frames[is_resident], tenant)
        slots = self.cache.slots[match.entries[~is_resident]]
        for slot in slots.tolist():
            self.swap.add_reference(slot)
        mapped = self.tables.entries[row, : len(entries)]
        mapped[is_resident] = frames[is_resident]
        mapped[~is_resident] = slot_entry(slots)
        self.tables.lengths[row] = match.cached_tokens
        self.tables.barred[row] = len(slots)
        self.tables.exposed[row] = match.cached_tokens % self.page_size != 0
        self.tables.note(row, np.flatnonzero(is_resident).astype(np.int32))
        whole = match.cached_tokens // self.page_size
        self.publisher.begin(row, self.tables.owners[row] or "", match.chain, entries[:whole])
        self._queried_tokens += match.chain.tokens
        self._hit_tokens += match.cached_tokens

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
        tables = self.tables
        index = rows.astype(np.intp)
        faults = self._faults(index, counts)
        if len(rows) and faults.ends.max() > tables.max_pages * self.page_size:
            raise ValueError(f"{faults.ends.max()} positions do not fit into {tables.max_pages} pages")
        where = faults.rows, faults.pages
        frames = empty_int32()
        if len(where[0]):
            owner = tables.owners[where[0][0]] or ""
            frames = self.reclaimer.allocate(tables.tenants[where[0]], self.now, owner)
            self.frames.last_owner[frames] = tables.serials[where[0]]
            tables.entries[where] = frames
        tables.lengths[index] = faults.ends
        if len(faults.exposed):
            tables.exposed[faults.exposed] = False
        copies = len(faults.copy_sources)
        if copies:
            self._cow_faults += copies
            self.residency.unmap(faults.copy_sources, tables.tenants[where[0][:copies]])
        changes = TableChanges(where[0].astype(np.int32), where[1], frames)
        return MemoryOrders(
            PageCopies(faults.copy_sources, frames[:copies]),
            self._with_unsent(changes) if tables.has_unsent else changes,
        )

    def _faults(self, rows: IndexArray, counts: Int32Array) -> Faults:
        """Raises PageNotResident."""
        if np.count_nonzero(self.tables.barred[rows]):
            raise PageNotResident(f"rows {rows[self.tables.barred[rows] > 0].tolist()} have pages elsewhere")
        return find_faults(self.tables, self.frames, rows, counts)

    def _with_unsent(self, changes: TableChanges) -> TableChanges:
        """These changes, and those of all entries that changed outside a step: each entry once, as it is now."""
        rows, pages = self.tables.take_unsent()
        keys = np.concatenate((rows, changes.rows)).astype(np.int64) * self.tables.max_pages
        keys = np.unique(keys + np.concatenate((pages, changes.pages)))
        rows, pages = (part.astype(np.int32) for part in np.divmod(keys, self.tables.max_pages))
        return TableChanges(rows, pages, self.tables.entries[rows, pages])

    def fork(self, space: AddressSpace, owner: str) -> tuple[AddressSpace, MemoryOrders]:
        """A second address space over the pages of `space`: each gains a reference, no frame is allocated.

        Raises OutOfRows. O(pages), vectorised.
        """
        tables, row = self.tables, space.row
        tenant = int(tables.tenants[row])
        child = tables.allocate_row(owner, tenant, int(tables.families[row]))
        entries = tables.mapped(row)
        pages = np.flatnonzero(entries >= 0).astype(np.int32)
        frames = entries[pages]
        self.residency.map(frames, tenant)
        for slot in slot_entry(entries[entries < ABSENT]).tolist():
            self.swap.add_reference(slot)
        tables.entries[child, : len(entries)] = entries
        tables.lengths[child] = tables.lengths[row]
        tables.barred[child] = len(entries) - len(pages)
        tables.exposed[[row, child]] = True
        self.publisher.fork(row, child)
        self._forks += 1
        changes = TableChanges(np.full(len(pages), child, np.int32), pages, frames)
        return AddressSpace(self, child, owner), MemoryOrders(table_changes=changes)

    def truncate(self, space: AddressSpace, length: int) -> None:
        """Shorten `space` to `length` positions; pages with no position left are released."""
        before = int(self.tables.lengths[space.row])
        if not 0 <= length <= before:
            raise ValueError(f"cannot truncate {before} positions to {length}")
        self._drop_pages(space.row, pages_for(length, self.page_size))
        self.tables.lengths[space.row] = length
        self.tables.exposed[space.row] = True
        self.publisher.truncate(space.row, length)
        self._truncates += 1

    def release(self, space: AddressSpace) -> None:
        """Drop every reference of `space` and its row. Cached pages stay, as long as there is room."""
        self.publisher.end(space.row)
        self._drop_pages(space.row, 0)
        self.tables.release_row(space.row)

    def _drop_pages(self, row: int, first: int) -> None:
        """Unmap the pages of `row` from `first` on."""
        entries = self.tables.mapped(row)[first:]
        frames = entries[entries >= 0]
        slots = slot_entry(entries[entries < ABSENT])
        entries[:] = ABSENT
        self.residency.unmap(frames, np.full(len(frames), self.tables.tenants[row], np.int32))
        self.tables.barred[row] -= len(slots)
        for slot in slots.tolist():
            self.residency.unmap_slot(slot)

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
        return self.swapper.swap_out_cached(victims, self.now, "background reclaim") if victims else SwapOrders()

    def complete(self, ticket: int) -> None:
        """Every copy of this swap order has been made."""
        self.swapper.complete(ticket)

    def fail(self, ticket: int) -> None:
        """A copy of this swap order could not be made: none counts, nothing is lost, its frames were not freed."""
        self.swapper.fail(ticket)

    # --- looking at it

    def information(self) -> MemoryInformation:
        """Memory in total, now. Reads every count: for operators, not for a step."""
        references, rows = self.frames.references, self.tables.rows_in_use()
        tokens = int(self.tables.lengths[rows].sum())
        mapped = int(self.tables.pages(rows).sum())
        active = int(np.count_nonzero(references))
        return MemoryInformation(
            total_frames=self.frames.total,
            free_frames=self.frames.free_frames,
            active_frames=active,
            shared_frames=int(np.count_nonzero(references > 1)),
            references=int(references.sum()),
            rows=len(rows),
            tokens=tokens,
            unused_tokens=mapped * self.page_size - tokens,
            page_size=self.page_size,
            cached_frames=self.lru.idle_pages,
            copying_frames=self.frames.total - self.frames.free_frames - active - self.lru.idle_pages,
            available_frames=self.available_frames,
            cached_pages=len(self.cache),
            total_slots=self.swap.total,
            free_slots=self.swap.free_slots,
            sequence_slots=self.swap.sequence_slots,
        )

    def counters(self) -> EventCounters:
        return EventCounters(
            allocate=self.frames.allocated,
            free=self.frames.freed,
            cow_fault=self._cow_faults,
            fork=self._forks,
            truncate=self._truncates,
            prefix_query=self._queried_tokens,
            prefix_hit=self._hit_tokens,
            evict=self.shadows.evictions,
            refault=self.shadows.refaults,
            direct_reclaim=self.reclaimer.direct,
            background_reclaim=self.reclaimer.background,
            scan=self.reclaimer.scanned,
            activate=self.lru.activated,
            demote=self.lru.demoted,
            swap_out=self.swapper.swapped_out,
            swap_in=self.swapper.swapped_in,
            swap_failed=self.swapper.failed,
            collision=self.cache.collisions,
        )

    def last_owner(self, frame: int) -> str:
        """Whom a frame was last allocated for; "" if for nobody, or so long ago that the name is forgotten."""
        return self.tables.name(int(self.frames.last_owner[frame]))

    def audit(self) -> list[str]:
        """Recompute every count from what it counts, and list each discrepancy; empty when all is well."""
        return find_discrepancies(self)

    def check_invariants(self) -> None:
        """Raise MemoryCorruption with everything that `audit` lists."""
        if found := self.audit():
            raise MemoryCorruption(found)
