"""Log-probabilities as answers have them: the four arrays of completions, the entries of chats, the prompt's own.

The values are natural logarithms, after penalties, bias and masks, before temperature and truncation. Minus infinity,
which JSON does not know, is written -9999.0.

A token's name is its text, with U+FFFD where it is no whole character (chats also give its bytes), or `token_id:123`
where the client asked for that. Two tokens may have one text (parts of characters often do). The object of the
likeliest tokens in completions must not lose one by that, so there the chosen token keeps the text as its key, then the
likeliest that has it, and every other one is called `token_id:123`.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from service.engine_client import Scores
from service.token_bytes import TokenBytes

LOWEST = -9999.0


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
    chosen: list[float | None] = []
    likeliest: list[dict[str, float] | None] = []
    for token, scores, _ in tokens:
        chosen.append(None if scores is None else finite(scores.chosen))
        likeliest.append(None if scores is None else _by_name(token, scores, top, spelling))
    return {
        "tokens": [spelling.name(entry.token) for entry in tokens],
        "token_logprobs": chosen,
        "text_offset": [entry.offset for entry in tokens],
        "top_logprobs": likeliest,
    }


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
    content = []
    for token, scores, _ in tokens:
        assert scores is not None, "only a prompt's first token has none"
        likeliest = zip(scores.ids[:top], scores.values[:top], strict=True)
        content.append(
            _entry(token, scores.chosen, spelling)
            | {
                "top_logprobs": [
                    _entry(other, scores.chosen if other == token else value, spelling) for other, value in likeliest
                ]
            }
        )
    return {"content": content}


def _entry(token: int, value: float, spelling: Spelling) -> dict[str, Any]:
    return {"token": spelling.name(token), "logprob": finite(value), "bytes": spelling.bytes(token)}


def prompt_logprobs(
    ids: Sequence[int], scores: Sequence[Scores | None], top: int, spelling: Spelling
) -> list[dict[str, Any] | None]:
    """One for each token of the prompt: null for the first, else {id: …} of the token itself and of the likeliest."""
    places: list[dict[str, Any] | None] = []
    for token, found in zip(ids, scores, strict=True):
        if found is None:
            places.append(None)
            continue
        place = {str(token): _ranked(token, found.chosen, found.rank, spelling)}
        for rank, (other, value) in enumerate(zip(found.ids[:top], found.values[:top], strict=True), 1):
            if other != token:
                place[str(other)] = _ranked(other, value, rank, spelling)
        places.append(place)
    return places


def _ranked(token: int, value: float, rank: int, spelling: Spelling) -> dict[str, Any]:
    return {"logprob": finite(value), "rank": rank, "decoded_token": spelling.name(token)}
