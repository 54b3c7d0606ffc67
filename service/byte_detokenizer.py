"""Incremental decoding where tokens stand for bytes (byte-level BPE: GPT-2, Llama 3, Qwen, SmolLM).

There the text of a list of ids is the UTF-8 of their bytes one after the other, so what an id adds depends on nothing
but an unfinished character before it. A token that is whole characters, as nearly all are, costs a look in a table:
0.2 us, where decoding a window again takes 3.
"""

import codecs
from collections.abc import Mapping
from typing import Any, Protocol

import tokenizers

from service.token_bytes import BYTE_OF

_utf8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDecoder(Protocol):
    """What `push` and `flush` return, joined, is the text of all ids decoded at once."""

    def push(self, token_id: int) -> str:
        """The text that became complete with this id, perhaps empty."""
        ...

    def flush(self) -> str:
        """The text still held back; an unfinished character is U+FFFD. The Sequence has ended."""
        ...


class TokenTexts:
    """What each id of one tokenizer stands for. Filled as it is asked: at most the vocabulary."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.texts: dict[int, str] = {}  # of tokens that are whole characters
        self._parts: dict[int, bytes] = {}  # of others

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer, spec: Mapping[str, Any]) -> "TokenTexts | None":
        """None if the decoder does more than to join bytes. spec: the content of tokenizer.json."""
        decoder = spec.get("decoder") or {}
        steps = decoder.get("decoders", [decoder])
        return cls(backend) if [step.get("type") for step in steps] == ["ByteLevel"] else None

    def text_of(self, token_id: int) -> str | None:
        """The text of a token that `texts` has not, if it is whole characters; from then on `texts` has it."""
        if token_id in self._parts:
            return None
        read = self._read(token_id)
        try:
            text = self.texts[token_id] = read.decode()
        except UnicodeDecodeError:
            self._parts[token_id] = read
            return None
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token, none for an id without one."""
        text = self.texts.get(token_id)
        if text is None:
            text = self.text_of(token_id)
        return self._parts[token_id] if text is None else text.encode()

    def _read(self, token_id: int) -> bytes:
        """As the library's ByteLevel decoder does, also for added tokens."""
        spelling: str = self._backend.id_to_token(token_id) or ""
        try:
            return bytes(map(BYTE_OF.__getitem__, spelling))
        except KeyError:
            return spelling.encode()


class ByteDetokenizer:
    """Of one Sequence (IncrementalDecoder)."""

    __slots__ = ("_decoder", "_skip", "_table", "_texts")

    def __init__(self, table: TokenTexts, skip: frozenset[int]) -> None:
        """skip: ids whose text is left out."""
        self._table = table
        self._texts = table.texts
        self._skip = skip
        self._decoder: codecs.IncrementalDecoder | None = None  # while a character is unfinished

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        if self._decoder is None:
            text = self._texts.get(token_id)
            if text is None:
                text = self._table.text_of(token_id)
            if text is not None:
                return text
            self._decoder = _utf8("replace")
        text = self._decoder.decode(self._table.bytes_of(token_id))
        if not self._decoder.getstate()[0]:
            self._decoder = None
        return text

    def flush(self) -> str:
        if self._decoder is None:
            return ""
        decoder, self._decoder = self._decoder, None
        return decoder.decode(b"", final=True)
