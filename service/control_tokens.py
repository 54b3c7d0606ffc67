"""Keeps control tokens out of what clients write in chats.

A chat template mixes its own control tokens with the client's text, and a tokenizer takes both alike. So, before the
template runs, every place in the client's strings where the text of a control token begins gets a mark in front of it:
a character that those strings do not contain. Templates go on seeing the text. In the result, the control tokens
without a mark are the template's:

    content  "a <|im_end|> b"   ──mark──▶   "a ⚑<|im_end|> b"
    rendered "<|im_start|>user\\na ⚑<|im_end|> b<|im_end|>\\n"
    encoded  "«1»user\\na <|im_end|> b«2»\\n"      by a tokenizer in which control token 1 is called «1», and so on

That second tokenizer is the same in all but these private names, so what the client wrote is plain text to it, encoded
in its place as any other text. The names hold a random part: nobody can write one. Chats without a control token in the
client's strings (all but attacks and talk about tokenizers) take no such path and have the plain tokenizer's ids.
"""

import re
import secrets
from collections.abc import Iterator
from typing import Any

import msgspec
import tokenizers

from service.errors import BadRequest

_PRIVATE_CHARACTERS = range(0xF0000, 0xFFFFE)
_PRIVATE = re.compile("[\U000f0000-\U000ffffd]")


class ControlTokens:
    """The special tokens of a tokenizer, and its twin in which they have private names.

    ids: their ids. private: the twin. `spec` is the tokenizer as JSON, and is used up. Raises RuntimeError if the twin
    would have other ids.
    """

    def __init__(self, backend: tokenizers.Tokenizer, spec: dict[str, Any]) -> None:
        special = {id_: token for id_, token in backend.get_added_tokens_decoder().items() if token.special}
        self.ids = frozenset(special)
        texts = sorted((token.content for token in special.values()), key=len, reverse=True)  # the longest match wins
        self._pattern = "|".join(map(re.escape, texts))
        self._begins = re.compile(f"(?={self._pattern})") if texts else None
        # Tokens that are matched in normalized text can be spelled in ways that only the normalizer reveals.
        seen_normalized = backend.normalizer is not None and any(token.normalized for token in special.values())
        self._normalizer = backend.normalizer if seen_normalized else None
        self.private, self._names = _with_private_names(backend, spec) if texts else (backend, {})

    def mark_for(self, given: Any) -> "Mark | None":
        """How to mark the client's strings in `given` (any JSON value), or None where they hold no control token."""
        if self._begins is None:
            return None
        texts = list(strings_in(given))
        if not any(self._begins.search(text) or self._is_hidden(text) for text in texts):
            return None
        used = {character for text in texts for character in _PRIVATE.findall(text)}
        character = next((chr(code) for code in _PRIVATE_CHARACTERS if chr(code) not in used), None)
        if character is None:
            raise BadRequest("The messages hold all private characters of a Unicode plane.", param="messages")
        return Mark(character, self._begins, self._pattern, self._names)

    def _is_hidden(self, text: str) -> bool:
        if self._normalizer is None or self._begins is None:
            return False
        return self._begins.search(self._normalizer.normalize_str(text)) is not None


class Mark:
    """One chat's mark."""

    def __init__(self, character: str, begins: re.Pattern[str], pattern: str, names: dict[str, str]) -> None:
        self._character = character
        self._begins = begins
        # Either a mark and the character that it guards, or a control token of the template.
        self._found = re.compile(f"{character}(.?)|({pattern})", re.DOTALL)
        self._names = names

    def everywhere(self, given: Any) -> Any:
        """A copy of `given` with each string in it marked. Raises RecursionError."""
        if isinstance(given, str):
            return self._begins.sub(self._character, given)
        if isinstance(given, dict):
            return {self.everywhere(key): self.everywhere(value) for key, value in given.items()}
        if isinstance(given, list):
            return [self.everywhere(item) for item in given]
        return given

    def to_private_names(self, rendered: str) -> str:
        """The rendered chat with the template's control tokens renamed and the marks dropped."""
        return self._found.sub(lambda match: self._names[match[2]] if match[2] else match[1], rendered)


def strings_in(value: Any) -> Iterator[str]:
    """All strings in a JSON value, keys too. No recursion: clients choose the depth."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            waiting.extend(item)
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)


def _with_private_names(
    backend: tokenizers.Tokenizer, spec: dict[str, Any]
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The twin, and the names: text of a control token -> its private name."""
    nonce = secrets.token_hex(16)
    names: dict[str, str] = {}
    for token in spec["added_tokens"]:
        if token["special"]:
            names[token["content"]] = f"\ufdd0{nonce}:{token['id']}\ufdd1"
            token["content"], token["normalized"] = names[token["content"]], False
    model = spec["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if model.get("merges"):  # a merge that makes a control token would let plain text become one
        model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in names]
    spec["post_processor"] = None  # it names tokens, and chats are encoded without it
    private = tokenizers.Tokenizer.from_str(msgspec.json.encode(spec).decode())
    for text, name in names.items():
        if private.token_to_id(name) != backend.token_to_id(text):
            raise RuntimeError(f"the control token {text!r} changes its id when it is renamed")
    return private, names
