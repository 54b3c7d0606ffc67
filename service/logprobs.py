"""Log-probabilities as answers have them: the four arrays of completions, the entries of chats, the prompt's own.

The values are natural logarithms, after penalties, bias and masks, before temperature and truncation. Minus infinity,
which JSON does not know, is written -9999.0.

A token's name is its text, with U+FFFD where it is no whole character (chats also give its bytes), or `token_id:123`
where the client asked for that. Two tokens may have one text (parts of characters often do). The object of the
likeliest tokens in completions must not lose one by that, so there the chosen token keeps the text as its key, then the
likeliest that has it, and every other one is called `token_id:123`.

Arrays of places are JSON already (msgspec.Raw): those of long prompts are megabytes.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from service.engine_client import Scores
from service.token_bytes import TokenBytes

LOWEST = -9999.0

PLACES_AT_ONCE = 256
"""An encoder lets no other thread run before it is done: so many with 20 tokens each take it 2 ms."""

_encode = msgspec.json.Encoder().encode


class ScoredToken(NamedTuple):
    """A token of a choice's text. `scores` is None where there are none: the first token of a prompt."""

    token: int
    scores: Scores | None
    offset: int  # characters of the text before it


def finite(value: float) -> float:
    """The value as JSON can have it."""
    return max(LOWEST, value)


class Spelling:
    """How one request wants its tokens named."""

    def __init__(self, token_bytes: TokenBytes, *, as_ids: bool) -> None:
        self._bytes = token_bytes
        self._as_ids = as_ids

    def name(self, token: int) -> str:
        return by_id(token) if self._as_ids else self._bytes.text(token)

    def bytes(self, token: int) -> list[int]:
        return list(self._bytes.of(token))


def by_id(token: int) -> str:
    """The name that no two tokens share."""
    return f"token_id:{token}"


def completion_logprobs(tokens: Sequence[ScoredToken], top: int, spelling: Spelling) -> dict[str, Any]:
    """Four arrays of equal length; top_logprobs has the `top` likeliest and the chosen one, the likeliest first."""
    return {
        "tokens": [spelling.name(entry.token) for entry in tokens],
        "token_logprobs": [None if scores is None else finite(scores.chosen) for _, scores, _ in tokens],
        "text_offset": [entry.offset for entry in tokens],
        "top_logprobs": _array(
            None if scores is None else _by_name(token, scores, top, spelling) for token, scores, _ in tokens
        ),
    }


def _array(places: Iterable[dict[str, Any] | None]) -> msgspec.Raw:
    """Made and encoded in portions."""
    rest, parts = iter(places), []
    while portion := list(islice(rest, PLACES_AT_ONCE)):
        parts.append(_encode(portion)[1:-1])
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


def _by_name(chosen: int, scores: Scores, top: int, spelling: Spelling) -> dict[str, float]:
    named: dict[str, float] = {}
    own = spelling.name(chosen)
    for token, value in likeliest_tokens(chosen, scores, top):
        name = own if token == chosen else spelling.name(token)
        if token != chosen and (name == own or name in named):
            name = by_id(token)
        named[name] = value
    return named


def likeliest_tokens(chosen: int, scores: Scores, top: int) -> Iterable[tuple[int, float]]:
    """The `top` likeliest with their values, falling, then the chosen one if it is not among them.

    The chosen token's value is the very same number in both places: clients compare them with `==`.
    """
    is_there = False
    for token, value in zip(scores.ids[:top], scores.values[:top], strict=True):
        is_there |= token == chosen
        yield token, finite(scores.chosen if token == chosen else value)
    if not is_there:
        yield chosen, finite(scores.chosen)


def chat_logprobs(tokens: Sequence[ScoredToken], top: int, spelling: Spelling) -> dict[str, Any]:
    """One entry for each token; top_logprobs has exactly the `top` likeliest, falling."""
    return {"content": _array(_with_likeliest(entry, top, spelling) for entry in tokens)}


def _with_likeliest(scored: ScoredToken, top: int, spelling: Spelling) -> dict[str, Any]:
    token, scores, _ = scored
    assert scores is not None, "only a prompt's first token has none"
    likeliest = zip(scores.ids[:top], scores.values[:top], strict=True)
    return _entry(token, scores.chosen, spelling) | {
        "top_logprobs": [
            _entry(other, scores.chosen if other == token else value, spelling) for other, value in likeliest
        ]
    }


def _entry(token: int, value: float, spelling: Spelling) -> dict[str, Any]:
    return {"token": spelling.name(token), "logprob": finite(value), "bytes": spelling.bytes(token)}


def prompt_logprobs(ids: Sequence[int], scores: Sequence[Scores | None], top: int, spelling: Spelling) -> msgspec.Raw:
    """One for each token of the prompt: null for the first, else {id: …} of the token itself and of the likeliest."""
    return _array(
        None if found is None else _by_id(token, found, top, spelling) for token, found in zip(ids, scores, strict=True)
    )


def _by_id(token: int, scores: Scores, top: int, spelling: Spelling) -> dict[str, Any]:
    place = {str(token): _ranked(token, scores.chosen, scores.rank, spelling)}
    for rank, (other, value) in enumerate(zip(scores.ids[:top], scores.values[:top], strict=True), 1):
        if other != token:
            place[str(other)] = _ranked(other, value, rank, spelling)
    return place


def _ranked(token: int, value: float, rank: int, spelling: Spelling) -> dict[str, Any]:
    return {"logprob": finite(value), "rank": rank, "decoded_token": spelling.name(token)}
