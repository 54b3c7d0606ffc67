"""What operators do to the page cache: hold a prefix, give advice for it, forget what is cached (operations.py)."""

from typing import TYPE_CHECKING

import numpy as np

from mm import ABSENT, Advice, ContentChain, MemoryManager, Namespace, OutOfFrames, QuotaExceeded
from mm.frame_views import page_hash
from service.admin_bodies import AdvisePrefix, DropCaches, PinPrefix, Prefix, Unpin
from service.admin_views import Facts
from service.errors import BadRequest

if TYPE_CHECKING:
    from service.operations import Change, Operations


def pin(operations: "Operations", of: str, body: PinPrefix) -> "Change":
    """Hold a cached prefix whatever the need. What of it is not cached, or in swap alone, is not held."""
    memory, inside = operations.inside.memory, operations.inside
    if body.hash is not None:
        entries = _entries_of_hash(operations, body.hash)
    else:
        entries = _entries_of_chain(memory, _chain_of(operations, body))
    resident = next((i for i, entry in enumerate(entries) if memory.cache.frame[entry] == ABSENT), len(entries))
    if not resident:
        raise BadRequest("nothing of this prefix is cached in frames: send a request that begins with it first")
    pinned = resident * memory.page_size
    operations.check_all_still_fit(lambda tenant: memory.max_tokens_of(tenant) - pinned)
    before: Facts = {"pinned_frames": memory.pins.pages}
    try:
        held = memory.pin_entries(entries, body.owner, body.tenant, body.ttl_s)
    except QuotaExceeded as error:
        raise BadRequest(str(error)) from None
    expires_ts = None if held.expires_s is None else inside.wall_clock(held.expires_s)
    return before, {
        "pinned_frames": memory.pins.pages,
        "pin": held.number,
        "tokens": held.tokens,
        "frames": len(held.frames),
        "expires_ts": expires_ts,
    }


def _chain_of(operations: "Operations", body: Prefix) -> ContentChain:
    memory, vocabulary = operations.inside.memory, operations.inside.engine.limits.vocabulary
    tokens = body.tokens or []
    if tokens and max(tokens) >= vocabulary:
        raise BadRequest(f"the token id {max(tokens)} is not below {vocabulary}", param="tokens")
    return memory.chain(np.array(tokens, np.int32), Namespace(salt=body.salt), body.tenant)


def _entries_of_chain(memory: MemoryManager, chain: ContentChain) -> list[int]:
    return memory.cache.walk(chain, chain.tokens // memory.page_size)


def _entries_of_hash(operations: "Operations", wanted: str) -> list[int]:
    memory = operations.inside.memory
    for entry in np.flatnonzero(memory.cache.in_use()).tolist():
        if page_hash(memory, entry) == wanted:
            if (found := memory.cache.beginning(entry)) is not None:
                return found
            raise BadRequest("the pages before this one are not cached: it cannot be found any more", param="hash")
    raise BadRequest("no cached page has this hash", param="hash")


def unpin(operations: "Operations", of: str, body: Unpin) -> "Change":
    memory = operations.inside.memory
    before: Facts = {"pinned_frames": memory.pins.pages}
    numbers = [held.number for held in memory.pins.held.values() if body.pin == held.number or body.owner == held.owner]
    for number in numbers:
        memory.unpin(number)
    return before, {"pinned_frames": memory.pins.pages, "ended": numbers}


def advise_prefix(operations: "Operations", of: str, body: AdvisePrefix) -> "Change":
    """Of cached pages: those that are mapped stay where they are."""
    memory, chain = operations.inside.memory, _chain_of(operations, body)
    before = _places(memory, chain)
    if not any(before.values()):
        raise BadRequest("nothing of this prefix is cached")
    try:
        orders = memory.advise_prefix(chain, Advice(body.advice))
    except OutOfFrames as error:
        raise BadRequest(f"there is no room for it: {error}") from None
    operations.inside.engine.scheduler.sequences.swap_orders.append(orders)
    return before | {"advice": None}, _places(memory, chain) | {"advice": body.advice}


def _places(memory: MemoryManager, chain: ContentChain) -> Facts:
    """Where the cached pages of a prefix are; copies that are ordered have not begun."""
    entries = _entries_of_chain(memory, chain)
    resident = sum(memory.cache.frame[entry] != ABSENT for entry in entries)
    return {"frames": resident, "swap_alone": len(entries) - resident}


def drop(operations: "Operations", of: str, body: DropCaches) -> "Change":
    memory = operations.inside.memory
    before: Facts = {"cached_pages": len(memory.cache), "shadows": len(memory.shadows)}
    if body.level & 1:
        memory.drop_caches()
    if body.level & 2:
        memory.forget_shadows()
    return before, {"cached_pages": len(memory.cache), "shadows": len(memory.shadows)}
