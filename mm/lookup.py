"""Answers what of a prompt is cached already, and why the next page is not.

The last token of a prompt is never taken from the cache: its logits are needed, so it is computed. What is cached is a
run of whole pages and then, where the prompt goes on like a cached page for some tokens, that page too: it is mapped
like the others, and copied when the first token that differs is written (copy-on-write).
"""

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from mm.addresses import ABSENT, Int32Array, Int64Array, pages_for
from mm.content import ContentChain
from mm.page_cache import PageCache
from mm.publisher import Publisher, Writer
from mm.residency import Residency


class MissReason(StrEnum):
    """Why the page after the cached ones could not be served."""

    LAST_TOKEN = "last_token"  # the whole prompt is cached; one token is computed all the same
    TAIL_SHORTER_THAN_PAGE = "tail_shorter_than_page"
    NEVER_COMPUTED = "never_computed"  # or so long ago that its shadow is forgotten
    TOKEN_DIFFERS = "token_differs"  # a cached page goes on like the prompt up to `position`
    OTHER_SALT = "other_salt"  # cached, but under another salt
    BEING_WRITTEN = "being_written"
    EVICTED = "evicted"
    SWAPPED = "swapped"  # in swap, and only resident pages were asked for
    DISABLED = "disabled"  # the request does not use the cache


@dataclass(frozen=True, slots=True)
class Miss:
    """The first miss. `position`: the first token that is not served from the cache."""

    reason: MissReason
    position: int
    evicted_s: float | None = None  # EVICTED: the engine's clock when it went, ...
    evicted_for: str | None = None  # ... and who needed the frame
    writer: str | None = None  # BEING_WRITTEN: who computes it


@dataclass(frozen=True, slots=True)
class Awaited:
    """The last of the missing pages that one other Sequence is computing."""

    key: bytes
    writer: Writer


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What of a prompt is cached. Valid until the next change of memory; `MemoryManager.create` checks that."""

    chain: ContentChain
    entries: Int32Array  # (P,) cached pages in page order; the last one may match in part
    serials: Int64Array  # (P,)
    cached_tokens: int
    swapped_pages: int  # of `entries`: to be brought in before the Sequence can run
    frames_saved: int  # whole pages that are mapped as they are
    idle_frames: int  # frames that cannot be reclaimed any more once this is mapped
    last_is_swapped: bool  # the last of `entries` is counted in swapped_pages, ...
    last_is_idle: bool  # ... or in idle_frames
    miss: Miss
    awaited: Awaited | None

    def frames_for(self, tokens: int, page_size: int) -> int:
        """Frames to allocate until the first `tokens` positions are there, swap-in and copy-on-write included."""
        return pages_for(tokens, page_size) - self.frames_saved

    def unread(self) -> "PrefixMatch":
        """Nothing of it: for who must compute every token, and fills the cache all the same."""
        return replace(
            self,
            entries=self.entries[:0],
            serials=self.serials[:0],
            cached_tokens=0,
            swapped_pages=0,
            frames_saved=0,
            idle_frames=0,
            last_is_swapped=False,
            last_is_idle=False,
            miss=Miss(MissReason.DISABLED, 0),
            awaited=None,
        )

    def whole_pages(self, page_size: int) -> "PrefixMatch":
        """The same without the page that matches in part: so that no frame is held twice while it is copied."""
        pages = self.cached_tokens // page_size
        if pages == len(self.entries):
            return self
        return replace(
            self,
            entries=self.entries[:pages],
            serials=self.serials[:pages],
            cached_tokens=pages * page_size,
            swapped_pages=self.swapped_pages - self.last_is_swapped,
            frames_saved=self.frames_saved + self.last_is_swapped,
            idle_frames=self.idle_frames - self.last_is_idle,
            last_is_swapped=False,
            last_is_idle=False,
        )


class Lookup:
    """Reads the cache, the shadows and the pages being written; changes nothing."""

    def __init__(self, residency: Residency, publisher: Publisher, page_size: int) -> None:
        self._cache: PageCache = residency.cache
        self._residency = residency
        self._publisher = publisher
        self._page_size = page_size

    def find(self, chain: ContentChain, *, resident_only: bool) -> PrefixMatch:
        """The longest cached beginning of `chain`, its last token left out."""
        cache, page_size = self._cache, self._page_size
        usable = chain.tokens - 1
        found = cache.walk(chain, usable // page_size)
        is_cut = False
        if resident_only:
            resident = next((i for i, entry in enumerate(found) if cache.frame[entry] == ABSENT), len(found))
            is_cut = resident < len(found)
            found = found[:resident]
        whole = len(found)
        cached = whole * page_size
        child, common = (ABSENT, 0) if is_cut else self._partly_matching(chain, found, usable - cached)
        if child != ABSENT and resident_only and cache.frame[child] == ABSENT:
            child, common = ABSENT, 0
        if child != ABSENT:
            found.append(child)
            cached += common
        entries = np.array(found, np.int32)
        frame, is_idle = cache.frame, self._residency.lru.is_idle
        swapped = sum(frame[entry] == ABSENT for entry in found)
        miss, awaited = self._explain(chain, whole, cached, is_cut=is_cut)
        return PrefixMatch(
            chain=chain,
            entries=entries,
            serials=cache.serials[entries],
            cached_tokens=cached,
            swapped_pages=swapped,
            frames_saved=whole - swapped,  # a partly matching page in swap is brought in, and copied besides
            idle_frames=sum(map(is_idle, found)),
            last_is_swapped=len(found) > 0 and frame[found[-1]] == ABSENT,
            last_is_idle=len(found) > 0 and is_idle(found[-1]),
            miss=miss,
            awaited=awaited,
        )

    def _partly_matching(self, chain: ContentChain, found: list[int], usable: int) -> tuple[int, int]:
        """The cached page after `found` that serves the most of the next `usable` tokens: (entry, tokens)."""
        if usable < 1:
            return ABSENT, 0
        cache, number = self._cache, len(found)
        parent = found[-1] if found else ABSENT
        page = chain.page(number)
        if len(page) == chain.page_bytes and usable < self._page_size:  # the whole page, but for the last token
            serial = cache.serial[parent] if found else 0
            if (entry := cache.find(chain.key(number), page, serial)) != ABSENT:
                return entry, usable
        return cache.closest_child(parent, chain, page[: 4 * usable])

    def _explain(self, chain: ContentChain, whole: int, cached: int, *, is_cut: bool) -> tuple[Miss, Awaited | None]:
        """Why page `whole` is not served in full."""
        if cached == chain.tokens - 1:
            return Miss(MissReason.LAST_TOKEN, cached), None
        if is_cut:
            return Miss(MissReason.SWAPPED, cached), None
        if (whole + 1) * self._page_size > chain.tokens:
            return Miss(MissReason.TAIL_SHORTER_THAN_PAGE, cached), None
        key = chain.key(whole)
        if (writer := self._publisher.writing.get(key)) is not None:
            awaited = self._last_written_by(writer, chain, whole)
            return Miss(MissReason.BEING_WRITTEN, cached, writer=writer.owner), awaited
        if (shadow := self._residency.shadows.find(key)) is not None:
            reason = MissReason.EVICTED
            return Miss(reason, cached, evicted_s=shadow.evicted_s, evicted_for=shadow.evicted_for), None
        if self._cache.is_elsewhere(chain, whole):
            return Miss(MissReason.OTHER_SALT, cached), None
        if cached > whole * self._page_size:
            return Miss(MissReason.TOKEN_DIFFERS, cached), None
        return Miss(MissReason.NEVER_COMPUTED, cached), None

    def _last_written_by(self, writer: Writer, chain: ContentChain, first: int) -> Awaited:
        """The last page of the run from `first` on that `writer` computes and `chain` needs."""
        number = first
        while (number + 2) * self._page_size <= chain.tokens:
            if self._publisher.writing.get(chain.key(number + 1)) != writer:
                break
            number += 1
        return Awaited(chain.key(number), writer)
