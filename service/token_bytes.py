"""The bytes that each token stands for, where it stands alone: what log-probabilities name tokens by.

Decoding one id by the tokenizer would not do: a decoder takes the space from the first word of a text, and turns part
of a character into U+FFFD. So the bytes are read from the vocabulary's own spelling ("Ġthe", "▁the", "<0xF0>"), and
the text of a token is these bytes as UTF-8, with U+FFFD for what is no whole character.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """Of one tokenizer. Remembers what was asked: at most the vocabulary."""

    def __init__(self, backend: tokenizers.Tokenizer, spec: Mapping[str, Any]) -> None:
        """spec: the content of tokenizer.json; read here, not kept."""
        self._backend = backend
        self._added = {id_: token.content for id_, token in backend.get_added_tokens_decoder().items()}
        steps = list(_steps(spec.get("decoder")))
        kinds = {step["type"] for step in steps}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        self._spaces = {step["replacement"] for step in steps if step["type"] == "Metaspace"}
        self._spaces |= {
            step["pattern"]["String"]
            for step in steps
            if step["type"] == "Replace" and step["content"] == " " and "String" in step["pattern"]
        }
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """The bytes of a token; none for ids without one. A control token has those of its name."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._read(token_id)
        return found

    def text(self, token_id: int) -> str:
        """The same as text."""
        return self.of(token_id).decode("utf-8", "replace")

    def _read(self, token_id: int) -> bytes:
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        spelling = self._backend.id_to_token(token_id)
        if spelling is None:
            return b""
        if self._is_byte_level:
            codes = [BYTE_OF.get(character) for character in spelling]
            known = [code for code in codes if code is not None]
            return bytes(known) if len(known) == len(codes) else spelling.encode()
        if self._has_byte_tokens and (byte := _BYTE.fullmatch(spelling)):
            return bytes([int(byte[1], 16)])
        if self._spaces:
            for space in self._spaces:
                spelling = spelling.replace(space, " ")
            return spelling.encode()
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return text.encode()


def _steps(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The decoder's steps, those in sequences too."""
    if decoder is None:
        return
    yield decoder
    for step in decoder.get("decoders", ()):
        yield from _steps(step)


def _byte_of_character() -> dict[str, int]:
    """Byte-level vocabularies spell every byte as one visible character (GPT-2, encoder.py): itself where it is one."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTE_OF = _byte_of_character()
"""The byte that a character of a byte-level vocabulary stands for."""
