"""How much a body of JSON holds, seen before it is decoded.

Decoding takes time by the value, not by the byte, and nothing else of the process runs meanwhile: a body of many small
ones, within the limit on bytes, would hold every stream up for seconds. So they are counted first, and in pieces that
let others run, since large bodies are read in a thread (body.py).
"""

import re

from service.errors import PayloadTooLarge

MAX_PARTS = 200_000
"""Strings, with those that are keys, objects and arrays: 100 ns to 1 us each."""

MAX_NUMBERS = 2_000_000
"""Commas, and so numbers: 1,024 prompts of 2,000 token ids. 30 ns each."""

PIECE_BYTES = 1 << 20

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""Also one that does not end, to the end: each byte is looked at once, whatever the body is."""


def check_values(raw: bytes) -> None:
    """Raises PayloadTooLarge."""
    if len(raw) <= MAX_PARTS:
        return  # there is no room for so many
    about = _roughly(raw, b'"') // 2 + _roughly(raw, b"[") + _roughly(raw, b"{")
    if about <= MAX_PARTS and _roughly(raw, b",") <= MAX_NUMBERS:
        return  # nearly all bodies: text may hold these marks, too, but not so many
    parts = commas = at = 0
    for string in _STRING.finditer(raw):
        begin = string.start()
        parts += 1 + raw.count(b"[", at, begin) + raw.count(b"{", at, begin)
        commas += raw.count(b",", at, begin)
        at = string.end()
        if parts > MAX_PARTS or commas > MAX_NUMBERS:
            break
    else:
        parts += _roughly(raw, b"[", at) + _roughly(raw, b"{", at)
        commas += _roughly(raw, b",", at)
    if parts > MAX_PARTS:
        raise PayloadTooLarge(f"The body has more than {MAX_PARTS} strings, objects and arrays.")
    if commas > MAX_NUMBERS:
        raise PayloadTooLarge(f"The body has more than {MAX_NUMBERS} values.")


def _roughly(raw: bytes, mark: bytes, begin: int = 0) -> int:
    """How often it is there, in strings too."""
    return sum(raw.count(mark, at, at + PIECE_BYTES) for at in range(begin, len(raw), PIECE_BYTES))
