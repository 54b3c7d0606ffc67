"""Answers "would this request run now?" without running it: what it needs and could reuse, what would have to go."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from mm.addresses import ABSENT, Int64Array, pages_for
from mm.content import ContentChain
from mm.errors import OverCommit
from mm.lookup import PrefixMatch

if TYPE_CHECKING:
    from mm.memory_manager import MemoryManager


class WouldRun(StrEnum):
    """What would become of a request that came in now."""

    NOW = "now"
    WAIT = "wait"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class DryRun:
    """The answer, in pages and frames. `limit` names what the request meets, with the numbers; None if nothing."""

    verdict: WouldRun
    pages: int  # of the prompt
    pages_at_limit: int  # of prompt and output
    reusable_pages: int  # cached, resident or not
    swapped_pages: int  # of these, in swap
    frames_needed: int  # to allocate for the prompt
    would_evict: int  # idle cached pages that would have to go for it
    limit: str | None


def would_run(memory: "MemoryManager", chain: ContentChain, max_tokens: int, tenant: str) -> DryRun:
    """For a prompt that may grow to `max_tokens` tokens. Changes nothing."""
    match, number = memory.lookup(chain), memory.tenants.id(tenant)
    needs = np.zeros(len(memory.tenants.names), np.int64)
    needs[number] = match.frames_for(chain.tokens, memory.page_size)
    verdict, limit = _verdict(memory, match, max_tokens, needs, number)
    return DryRun(
        verdict=verdict,
        pages=pages_for(chain.tokens, memory.page_size),
        pages_at_limit=pages_for(max_tokens, memory.page_size),
        reusable_pages=len(match.entries),
        swapped_pages=match.swapped_pages,
        frames_needed=int(needs[number]),
        would_evict=max(0, int(needs[number]) - memory.free_frames) if verdict is WouldRun.NOW else 0,
        limit=limit,
    )


def _verdict(
    memory: "MemoryManager", match: PrefixMatch, max_tokens: int, needs: Int64Array, tenant: int
) -> tuple[WouldRun, str | None]:
    """The first limit that the request meets: those that never pass first."""
    pages = pages_for(match.chain.tokens, memory.page_size)
    limit = memory.tenants.limits[tenant].max
    if max_tokens > memory.max_tokens:
        return WouldRun.NEVER, f"{max_tokens} tokens, and one Sequence can hold {memory.max_tokens}"
    if pages > limit:
        return WouldRun.NEVER, f"{pages} pages, and the tenant's memory.max is {limit}"
    if not memory.tables.free_rows:
        return WouldRun.WAIT, f"all {memory.tables.max_rows} page table rows are taken"
    promised = max(0, pages_for(max_tokens, memory.page_size) - max(0, match.frames_saved))
    try:
        memory.ledger.check(promised, memory.pins.pages)
    except OverCommit as refusal:
        return WouldRun.WAIT, str(refusal)
    frames = memory.cache.frames[match.entries]
    if shortage := memory.reclaimer.shortage(needs, frames[frames != ABSENT], tenant):
        return WouldRun.WAIT, str(shortage)
    return WouldRun.NOW, None
