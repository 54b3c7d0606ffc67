"""Owns the cached pages: full pages that can be found by content, with or without somebody who maps them.

A cached page is an *entry*: a small number, for as long as the page is cached. Its content is in a frame, in a swap
slot, or in both (then it is clean). Entries form a forest, each below the page that precedes it:

    index: key ──▶ entry ──▶ frame and/or slot          key = digest of the whole chain + salt (mm/content.py)
                     │ ▲
             parent  ▼ │ children, newest first          entry.parent is believed only if the serial agrees:
                    entry                                a number is used again, a serial is not

Finding is exact, whatever the digest is worth: an entry matches if its token ids are equal and its parent is the very
entry that the walk came from. So a collision costs a miss and never a wrong page. A page whose parent was evicted first
cannot be reached any more; it goes with the next reclaim, or when the same page is published again.
"""

import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np

from mm.addresses import ABSENT, BoolArray, Int32Array, Int64Array
from mm.content import BYTES_PER_TOKEN, DIGEST_BYTES, ContentChain

ROOT_SERIAL = 0
"""The serial of what precedes a first page. No entry has it."""

CHILDREN_LOOKED_AT = 16
"""Children that are compared with a prompt to find a partly matching page: the newest ones."""


class PageCache:
    """Up to `capacity` entries. It knows frames and slots as numbers only; who frees them is not its business."""

    def __init__(self, capacity: int, frames: int, page_size: int) -> None:
        self.capacity = capacity
        self.page_size = page_size
        self.index: dict[bytes, int] = {}
        self.keys: list[bytes | None] = [None] * capacity
        self.content: list[bytes] = [b""] * capacity  # the page's token ids
        self.collisions = 0  # pages that were not cached because another page has their key
        # One place per entry: numpy for batches, and a memoryview of the same memory, which is twice as fast for one.
        self.serials: Int64Array = np.zeros(capacity, np.int64)  # 0 for a number that is not in use
        self.frames: Int32Array = np.full(capacity, ABSENT, np.int32)
        self.slots: Int32Array = np.full(capacity, ABSENT, np.int32)
        self.serial = self.serials.data
        self.frame = self.frames.data
        self.slot = self.slots.data
        self.parent = np.full(capacity, ABSENT, np.int32).data
        self.parent_serial = np.zeros(capacity, np.int64).data
        self.hits = np.zeros(capacity, np.int32).data
        self.used_s: list[float] = [0.0] * capacity  # when it was mapped or made last, by the engine's clock
        self._first_child = np.full(capacity, ABSENT, np.int32).data
        self._older = np.full(capacity, ABSENT, np.int32).data  # sibling
        self._newer = np.full(capacity, ABSENT, np.int32).data
        self._salted: Counter[bytes] = Counter()  # digest -> entries that have it under some salt
        self._first_of_root: dict[bytes, int] = {}
        self._root_of: dict[int, bytes] = {}  # first pages only
        # One place per frame.
        self.entries_of_frames: Int32Array = np.full(frames, ABSENT, np.int32)
        self.entry_of_frame = self.entries_of_frames.data
        self._free: list[int] = list(range(capacity - 1, -1, -1))
        self._last_serial = ROOT_SERIAL

    def __len__(self) -> int:
        return len(self.index)

    # --- finding

    def walk(self, chain: ContentChain, pages: int) -> list[int]:
        """Entries of the first pages of `chain`, `pages` at most, up to the first that is not cached."""
        index, content, parent_serial, suffix = self.index, self.content, self.parent_serial, chain.suffix
        raw, width, digests = chain.raw, chain.page_bytes, chain.digests
        found: list[int] = []
        before = ROOT_SERIAL
        for number in range(pages):
            digest = digests[number] if number < len(digests) else chain.digest(number)
            entry = index.get(digest + suffix, ABSENT)
            if (
                entry == ABSENT
                or content[entry] != raw[number * width : number * width + width]
                or parent_serial[entry] != before
            ):
                break
            found.append(entry)
            before = self.serial[entry]
        return found

    def find(self, key: bytes, page: bytes, parent_serial: int) -> int:
        """The entry with this key, if it holds this very page after this very parent; else ABSENT."""
        entry = self.index.get(key, ABSENT)
        return entry if entry != ABSENT and self.matches(entry, page, parent_serial) else ABSENT

    def matches(self, entry: int, page: bytes, parent_serial: int) -> bool:
        """Whether an entry holds this very page after this very parent (invariant 10)."""
        return self.content[entry] == page and self.parent_serial[entry] == parent_serial

    def closest_child(self, parent: int, chain: ContentChain, page: bytes) -> tuple[int, int]:
        """The child of `parent` (ABSENT: of the root) that shares the longest beginning with `page`.

        Returns (entry, tokens in common); (ABSENT, 0) if none shares any. Only the newest children are compared.
        """
        if parent == ABSENT:
            child = self._first_of_root.get(chain.root + chain.suffix, ABSENT)
        else:
            child = self._first_child[parent]
        children: list[int] = []
        content, older, first_token = self.content, self._older, page[:BYTES_PER_TOKEN]
        for _ in range(CHILDREN_LOOKED_AT):
            if child == ABSENT:
                break
            if content[child].startswith(first_token):  # most share nothing: no need to compare these in full
                children.append(child)
            child = older[child]
        if not children or not page:
            return ABSENT, 0
        wanted = np.frombuffer(page, np.int32)
        have = np.frombuffer(b"".join([self.content[child] for child in children]), np.int32)
        equal = have.reshape(len(children), -1)[:, : len(wanted)] == wanted
        common = np.where(equal.all(axis=1), len(wanted), equal.argmin(axis=1))
        best = int(common.argmax())
        return (children[best], int(common[best])) if common[best] else (ABSENT, 0)

    def beginning(self, entry: int) -> list[int] | None:
        """The cached pages from a first one up to and with `entry`; None if one between is not cached."""
        found = [entry]
        while self.parent[entry] != ABSENT:
            if not self.has_parent(entry):
                return None
            entry = self.parent[entry]
            found.append(entry)
        return found[::-1]

    def is_current(self, entries: Int32Array, serials: Int64Array) -> bool:
        """Whether these entries are still the ones that had these serials."""
        return bool((self.serials[entries] == serials).all())

    def is_elsewhere(self, chain: ContentChain, number: int) -> bool:
        """Whether page `number` of `chain` is cached for others: under another salt, or under none."""
        digest = chain.digest(number)
        return digest in self._salted or (bool(chain.suffix) and digest in self.index)

    # --- changing

    def insert(
        self, key: bytes, page: bytes, root: bytes, parent: int, parent_serial: int, frame: int, now: float
    ) -> int:
        """Cache `page`, which is in `frame`, below the entry `parent`; a first page below `root` (with parent ABSENT).

        Its key must be free. Returns the entry.
        """
        entry = self._free.pop()
        self._last_serial = serial = self._last_serial + 1
        self.index[key] = entry
        self.keys[entry] = key
        self.content[entry] = page
        self.used_s[entry] = now
        self.serial[entry] = serial
        self.frame[entry] = frame
        self.entry_of_frame[frame] = entry
        self.parent[entry] = parent
        self.parent_serial[entry] = parent_serial
        if parent == ABSENT:
            self._root_of[entry] = root
            newest = self._first_of_root.get(root, ABSENT)
            self._first_of_root[root] = entry
        else:
            newest = self._first_child[parent]
            self._first_child[parent] = entry
        if newest != ABSENT:
            self._older[entry] = newest
            self._newer[newest] = entry
        if len(key) > DIGEST_BYTES:
            self._salted[key[:DIGEST_BYTES]] += 1
        return entry

    def remove(self, entry: int) -> bytes:
        """The page is not cached any more. Returns its key. Its children cannot be reached from now on."""
        key = self.keys[entry]
        assert key is not None
        del self.index[key]
        if len(key) > DIGEST_BYTES:
            digest = key[:DIGEST_BYTES]
            self._salted[digest] -= 1
            if not self._salted[digest]:
                del self._salted[digest]
        older, newer = self._older[entry], self._newer[entry]
        if older != ABSENT:
            self._newer[older] = newer
        if newer != ABSENT:
            self._older[newer] = older
        elif entry in self._root_of:
            root = self._root_of[entry]
            if older == ABSENT:
                del self._first_of_root[root]
            else:
                self._first_of_root[root] = older
        elif self.has_parent(entry):
            self._first_child[self.parent[entry]] = older
        self._root_of.pop(entry, None)
        if self.frame[entry] != ABSENT:
            self.entry_of_frame[self.frame[entry]] = ABSENT
        self.keys[entry] = None
        self.content[entry] = b""
        self.serial[entry] = self.hits[entry] = 0
        self.frame[entry] = self.slot[entry] = ABSENT
        self._first_child[entry] = self._older[entry] = self._newer[entry] = ABSENT
        self._free.append(entry)
        return key

    def has_parent(self, entry: int) -> bool:
        """Whether the page that precedes this one is cached, so that this one can be reached."""
        return self.parent[entry] == ABSENT or self.serial[self.parent[entry]] == self.parent_serial[entry]

    def in_use(self) -> BoolArray:
        """(capacity,) which numbers are entries, for audits and views."""
        used: BoolArray = self.serials != 0
        return used

    def discrepancies(self, at_once: int, most: int) -> Iterator[str | None]:
        """What is wrong with the links between entries, for the audit: `most` of a kind; None after every `at_once`."""
        used = np.flatnonzero(self.in_use())
        parents = used[np.asarray(self._first_child)[used] != ABSENT].tolist()
        heads = [(root, child, ABSENT) for root, child in self._first_of_root.items()]
        yield None
        listed, count = np.zeros(self.capacity, np.int32), 0
        times = listed.data
        below = ((b"", self._first_child[entry], entry) for entry in parents)
        for root, child, parent in itertools.chain(heads, below):
            newer = ABSENT
            while child != ABSENT and count <= len(used):
                times[child] += 1
                count += 1
                if count % at_once == 0:
                    yield None
                if self._newer[child] != newer:
                    yield f"entry {child}: newer sibling {self._newer[child]}, should be {newer}"
                if self.parent[child] != parent or not self.has_parent(child) or self._root_of.get(child, b"") != root:
                    yield f"entry {child} stands among the children of {parent} and is not one"
                newer, child = child, self._older[child]
        yield None
        above = np.asarray(self.parent)[used]
        is_reachable = (above == ABSENT) | (self.serials[above] == np.asarray(self.parent_serial)[used])
        yield None
        should = np.zeros(self.capacity, np.int32)
        should[used[is_reachable]] = 1
        for entry in np.flatnonzero(listed != should)[:most].tolist():
            yield f"entry {entry} stands {listed[entry]} times among children, should {should[entry]} times"
        salted: Counter[bytes] = Counter()
        for number, key in enumerate(self.index):
            if number % at_once == 0:
                yield None
            if len(key) > DIGEST_BYTES:
                salted[key[:DIGEST_BYTES]] += 1
        if salted != self._salted:
            yield f"{len(self._salted)} salted digests, counted {len(salted)}"
