"""Reads frames, slots and their holders for operators, vectorised: what each frame is and who holds it.

Here a copy in flight is a holder too, as a Sequence or a pin is: the holder *transfer* has the frames that nothing but
a copy holds. So with `references` counted in that sense, of every frame that is neither free nor cached:

    total = free + cached + active      Σ proportional over all holders = active      Σ resident = Σ references

Everything reads the arrays of the manager once; nothing is changed.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mm.addresses import ABSENT, BoolArray, FloatArray, Int32Array, Int64Array

if TYPE_CHECKING:
    from mm.memory_manager import MemoryManager

Bytes = npt.NDArray[np.uint8]

MOST_OWNERS = 8
"""Holders that are named for one frame."""


class FrameState(IntEnum):
    """What a frame is, as the first byte of its two in a map. A later one wins over an earlier one."""

    FREE = 0
    PRIVATE = 1  # one holder
    SHARED = 2  # several
    INACTIVE = 3  # cached, held by nobody, used once
    ACTIVE = 4  # the same, used twice or more
    PINNED = 5  # held by a pin, whoever else maps it
    COPYING = 6  # in a copy to or from swap, whoever else maps it


class SlotState(IntEnum):
    """What a swap slot is."""

    FREE = 0
    SEQUENCE = 1  # page tables name it
    CACHED = 2  # the only copy of a cached page
    CLEAN = 3  # a frame has the same content
    COPYING = 4
    CLOSED = 5  # no memory behind it yet


STATE_BITS = 0x0F
IS_CACHED, IS_CLEAN = 0x10, 0x20
"""Flags beside the state: found by content; a slot has the same content."""


@dataclass(frozen=True, slots=True)
class FrameMap:
    """All frames and slots, a byte or two each."""

    states: Bytes  # (F,) FrameState, with flags
    shares: Bytes  # (F,) holders, 255 at most
    slots: Bytes  # (slots,) SlotState


@dataclass(frozen=True, slots=True)
class Holder:
    """Somebody who holds frames and is no Sequence: the copies in flight, or a pin."""

    name: str  # "transfer", or "pin N"
    tenant: str
    owner: str
    resident: int
    proportional: float
    expires_s: float | None = None


@dataclass(frozen=True, slots=True)
class FrameFacts:
    """One frame in full."""

    frame: int
    state: str
    references: int
    tenant: str  # that is charged
    hash: str | None  # of its content, if it is cached
    parent: str | None  # of the page before
    tokens: int  # positions that are filled
    uses: int  # times it was found
    idle_s: float | None  # since it was found or made last
    slot: int | None
    owners: list[str]  # MOST_OWNERS at most


def copied_alone(memory: "MemoryManager") -> BoolArray:
    """(total,) frames that nothing but a copy holds."""
    frames = memory.frames
    alone: BoolArray = (frames.pins > 0) & (frames.references == 0)
    return alone


def frame_map(memory: "MemoryManager") -> FrameMap:
    """Two bytes a frame, one a slot."""
    usable = slice(memory.frames.usable)
    shares = np.minimum(memory.frames.references[usable], 255).astype(np.uint8)
    if memory.frames.pinned:
        shares[copied_alone(memory)[usable]] = 1
    return FrameMap(frame_states(memory, usable), shares, slot_states(memory))


def frame_states(memory: "MemoryManager", which: Int32Array | slice) -> Bytes:
    """(N,) FrameState of some frames, with flags."""
    frames = memory.frames
    references, entries = frames.references[which], memory.cache.entries_of_frames[which]
    states: Bytes = np.minimum(references, 2).astype(np.uint8)  # FREE, PRIVATE, SHARED
    cached = entries >= 0
    idle = np.flatnonzero(cached & (references == 0))
    states[idle] = np.where(memory.lru.actives[entries[idle]], FrameState.ACTIVE, FrameState.INACTIVE)
    if memory.pins.held:
        states[held_by_pins(memory)[which]] = FrameState.PINNED
    if frames.pinned:
        states[frames.pins[which] > 0] = FrameState.COPYING
    states |= cached.view(np.uint8) << 4
    if memory.swap.total:
        states |= (memory.swap.slots_of_frames[which] >= 0).view(np.uint8) << 5
    return states


def held_by_pins(memory: "MemoryManager") -> BoolArray:
    """(total,) frames that operators hold."""
    held = np.zeros(memory.frames.total, np.bool_)
    for pin in memory.pins.held.values():
        held[pin.frames] = True
    return held


def slot_states(memory: "MemoryManager") -> Bytes:
    """(slots,) SlotState."""
    swap = memory.swap
    states: Bytes = np.zeros(swap.total, np.uint8)
    states[np.asarray(swap.entry) != ABSENT] = SlotState.CACHED
    states[np.asarray(swap.twin) != ABSENT] = SlotState.CLEAN
    states[np.asarray(swap.references) > 0] = SlotState.SEQUENCE
    states[np.asarray(swap.pins) > 0] = SlotState.COPYING
    states[swap.opened :] = SlotState.CLOSED
    return states[: swap.usable]


def resident_and_proportional(memory: "MemoryManager", rows: Int32Array) -> tuple[Int64Array, FloatArray]:
    """Of each of `rows` (N,): resident pages, and the same with each divided by its holders."""
    row_of, _, frames = memory.swapper.resident(rows)
    place_of = np.zeros(memory.tables.max_rows, np.int64)
    place_of[rows] = np.arange(len(rows))
    places = place_of[row_of]
    shares = 1 / memory.frames.references[frames]
    resident = np.bincount(places, minlength=len(rows)).astype(np.int64)
    return resident, np.bincount(places, weights=shares, minlength=len(rows)).astype(np.float64)


def holders(memory: "MemoryManager") -> list[Holder]:
    """The holders that are no Sequences: what the copies in flight hold alone, then every pin."""
    copying = int(np.count_nonzero(copied_alone(memory)))
    found = [Holder("transfer", "", "", copying, float(copying))]
    for pin in memory.pins.held.values():
        proportional = float((1 / memory.frames.references[pin.frames]).sum())
        name = f"pin {pin.number}"
        found.append(Holder(name, pin.tenant, pin.owner, len(pin.frames), proportional, pin.expires_s))
    return found


def free_runs(memory: "MemoryManager") -> list[int]:
    """[k] counts runs of neighbouring free frames that are 2**k to 2**(k + 1) - 1 long."""
    is_free = np.zeros(memory.frames.total + 2, np.int8)
    is_free[memory.frames.free_list + 1] = 1
    edges = np.diff(is_free)
    lengths = np.flatnonzero(edges == -1) - np.flatnonzero(edges == 1)
    orders = np.bincount(np.log2(lengths).astype(np.int64), minlength=11) if len(lengths) else np.zeros(11, np.int64)
    counts: list[int] = orders.tolist()
    return counts


def use_counts(memory: "MemoryManager") -> list[tuple[int, int, int, int]]:
    """(uses, pages, mapped ones, clean ones) of the cached pages that have a frame; the last line counts 5 and more."""
    entries = np.flatnonzero(memory.cache.in_use() & (memory.cache.frames >= 0))
    uses = np.minimum(np.asarray(memory.cache.hits)[entries], 5)
    mapped = memory.frames.references[memory.cache.frames[entries]] > 0
    clean = memory.cache.slots[entries] >= 0
    tables = [np.bincount(uses[which], minlength=6).tolist() for which in (slice(None), mapped, clean)]
    return [(i, *(table[i] for table in tables)) for i in range(6)]


def owners_of(memory: "MemoryManager", frames: Int32Array) -> dict[int, list[str]]:
    """Who maps each of `frames`, MOST_OWNERS of each at most; pins and copies count."""
    row_of, _, mapped = memory.swapper.resident(memory.tables.rows_in_use())
    return _owners(memory, frames, row_of, mapped)


def _owners(
    memory: "MemoryManager", frames: Int32Array, row_of: Int32Array, mapped: Int32Array
) -> dict[int, list[str]]:
    """row_of, mapped (N,): every page that is mapped to a frame, as its row and that."""
    is_wanted = np.zeros(memory.frames.total, np.bool_)
    is_wanted[frames] = True
    found: dict[int, list[str]] = {frame: [] for frame in frames.tolist()}
    hits = np.flatnonzero(is_wanted[mapped])
    named = [(int(mapped[hit]), memory.tables.owners[row_of[hit]] or "") for hit in hits.tolist()]
    for pin in memory.pins.held.values():
        named += [(frame, f"pin {pin.number}") for frame in pin.frames[is_wanted[pin.frames]].tolist()]
    named += [(frame, "transfer") for frame in frames[memory.frames.pins[frames] > 0].tolist()]
    for frame, name in named:
        if len(found[frame]) < MOST_OWNERS:
            found[frame].append(name)
    return found


def frame_facts(memory: "MemoryManager", frames: Int32Array, now: float) -> list[FrameFacts]:
    """Each of `frames` in full, at a time of the engine's clock: in proportion to the mapped pages."""
    cache, swap = memory.cache, memory.swap
    row_of, _, mapped = memory.swapper.resident(memory.tables.rows_in_use())
    owners, filled = _owners(memory, frames, row_of, mapped), _filled(memory, mapped)
    states, alone = frame_states(memory, frames).tolist(), copied_alone(memory)
    facts = []
    for bits, frame in zip(states, frames.tolist(), strict=True):
        entry, slot = cache.entry_of_frame[frame], swap.slot_of_frame[frame]
        is_cached = entry != ABSENT
        has_parent = is_cached and cache.parent[entry] != ABSENT and cache.has_parent(entry)
        state = FrameState(bits & STATE_BITS)
        facts.append(
            FrameFacts(
                frame=frame,
                state=state.name.lower(),
                references=int(memory.frames.references[frame]) + int(alone[frame]),
                tenant="" if state is FrameState.FREE else memory.tenants.names[memory.tenants.of_frame[frame]],
                hash=page_hash(memory, entry) if is_cached else None,
                parent=page_hash(memory, cache.parent[entry]) if has_parent else None,
                tokens=memory.page_size if is_cached else int(filled[frame]),
                uses=cache.hits[entry] if is_cached else 0,
                idle_s=now - cache.used_s[entry] if is_cached else None,
                slot=None if slot == ABSENT else slot,
                owners=owners[frame],
            )
        )
    return facts


def _filled(memory: "MemoryManager", mapped: Int32Array) -> Int32Array:
    """(F,) positions that are filled in the frames of page tables, which are `mapped`."""
    tables, rows = memory.tables, memory.tables.rows_in_use()
    filled = np.zeros(memory.frames.total, np.int32)
    filled[mapped] = memory.page_size
    pages = tables.pages(rows)
    partly = rows[(tables.lengths[rows] % memory.page_size != 0) & (pages > 0)]
    last = tables.entries[partly, tables.pages(partly) - 1]
    here = last >= 0
    filled[last[here]] = np.maximum(
        filled[last[here]] % memory.page_size, tables.lengths[partly[here]] % memory.page_size
    )
    return filled


def page_hash(memory: "MemoryManager", entry: int) -> str:
    """What a cached page is called for people: the beginning of its digest, which tells nothing of its tokens."""
    key = memory.cache.keys[entry]
    assert key is not None
    return key[:8].hex()
