"""Names pages by their content: a chain of digests, so that a page is tied to everything before it.

    root = sha256(secret, adapter)        digest of page i = sha256(digest of page i - 1, its token ids)
    key of page i in the page cache = its digest, and after it the namespace where there is one

The secret is random for each process, so a client cannot know a digest, let alone make two prompts meet. Nothing rests
on that alone: whoever finds a page by its key compares its tokens and checks that it follows the page before
(mm/page_cache.py), and adapters and salts are compared byte by byte as part of the key.
"""

from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

import numpy as np

from mm.addresses import Int32Array

BYTES_PER_TOKEN = 4
DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Namespace:
    """Whose pages may serve a prompt: equal in all fields, or nothing is shared. (One pool serves one model.)"""

    adapter: str = ""  # and whatever else changes keys and values
    salt: str = ""  # shared among those who know it
    tenant: str = ""  # set for a tenant that is isolated


def digest_page(before: bytes, page: bytes) -> bytes:
    """The digest of a page whose tokens are `page`, after the page or root with digest `before`. 0.7 us."""
    return sha256(before + page).digest()


@lru_cache(1024)
def _root_and_suffix(secret: bytes, namespace: Namespace) -> tuple[bytes, bytes]:
    """What stands before the first digest, and behind every key."""
    parts = [part.encode("utf-8", "surrogatepass") for part in (namespace.adapter, namespace.salt, namespace.tenant)]
    return sha256(secret + parts[0]).digest(), b"\0".join(parts) if any(parts) else b""


class ContentChain:
    """The pages of one Sequence by content. Digests are computed when first asked for, each once."""

    __slots__ = ("digests", "page_bytes", "raw", "root", "suffix", "tokens")

    def __init__(self, secret: bytes, namespace: Namespace, tokens: Int32Array, page_size: int) -> None:
        self.root, self.suffix = _root_and_suffix(secret, namespace)
        self.page_bytes = BYTES_PER_TOKEN * page_size
        self.tokens = len(tokens)
        self.raw = np.ascontiguousarray(tokens, np.int32).tobytes()  # those it was made with; later ones are digests
        self.digests: list[bytes] = []

    def page(self, number: int) -> bytes:
        """The token ids of a page of the tokens it was made with; the last one may be short."""
        return self.raw[number * self.page_bytes : (number + 1) * self.page_bytes]

    def digest(self, number: int) -> bytes:
        """The digest of page `number`, which must be full."""
        digests = self.digests
        if len(digests) <= number:
            raw, width = self.raw, self.page_bytes
            assert (number + 1) * width <= len(raw)
            before = digests[-1] if digests else self.root
            for start in range(len(digests) * width, (number + 1) * width, width):
                before = digest_page(before, raw[start : start + width])
                digests.append(before)
        return digests[number]

    def key(self, number: int) -> bytes:
        """What page `number` is found by."""
        return self.digest(number) + self.suffix

    def extend(self, page: bytes) -> None:
        """Append the digest of the next full page."""
        digests = self.digests
        digests.append(digest_page(digests[-1] if digests else self.root, page))

    def fork(self) -> "ContentChain":
        """A chain that goes on by itself."""
        other = ContentChain.__new__(ContentChain)
        other.root, other.suffix, other.page_bytes = self.root, self.suffix, self.page_bytes
        other.tokens, other.raw, other.digests = self.tokens, self.raw, list(self.digests)
        return other
