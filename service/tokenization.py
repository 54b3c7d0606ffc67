"""Text to token ids and back: encoding, chat prompts, incremental decoding.

Owns the `tokenizers` object of the model. Three promises:

1. Encoding lets go of the GIL, so a long text in a worker thread does not stop the event loop (`encode_async`).
2. In a chat, what a client wrote never becomes a control token (control_tokens.py). Plain completions may write them:
   that is how a client prompts a model by hand.
3. `Detokenizer`, and `ByteDetokenizer` where tokens stand for bytes: what `push` and `flush` return, joined, is the
   text of all ids decoded at once. Streamed and non-streamed answers are both made by it, so they are equal also where
   a tokenizer's own decoding is not additive (runs of byte tokens that are no valid UTF-8, in the sentence-piece kind).
"""

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import msgspec
import tokenizers
from tokenizers.decoders import DecodeStream

from service.answer_parts import thinking_marks_of
from service.byte_detokenizer import ByteDetokenizer, IncrementalDecoder, TokenTexts
from service.call_readers import CallFormat, CallFormatSetting, detected_format
from service.chat_template import FILES as TEMPLATES
from service.chat_template import ChatTemplate, Message, TemplateNotUsable
from service.control_tokens import ControlTokens
from service.errors import BadRequest
from service.token_bytes import TokenBytes

OFF_LOOP_CHARACTERS = 8_192
"""Texts longer than this are encoded in a worker thread: about 2 ms of work, against 0.1 ms for the hand-over."""

OFF_LOOP_TOKENS = 512
"""The same for ids that are decoded one by one: about 4 us each."""

TAIL_TOKENS = 16
"""Tokens at the end of a prompt that may hold a mark and the white space behind it."""

TOKENIZER = "tokenizer.json"
CONFIGS = "special_tokens_map.json", "tokenizer_config.json"
"""Both may be absent. The second wins: the first is of older models."""

_LINE_BREAK = "\n"

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerNotUsable(Exception):
    """The model's tokenizer files are missing or contradict themselves; the message says which and how."""


class Tokenizer:
    """The tokenizer of one model. Nothing of it changes once it is made, and several threads may use it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: dict[str, Any],
        template: ChatTemplate | None,
        embedded: int | None = None,
        tool_call_format: CallFormatSetting = "auto",
    ) -> None:
        """embedded: ids that the model has an embedding for, 0 ... embedded - 1; None: all that the tokenizer has.

        tool_call_format: how the model writes calls of tools; auto: what its template and vocabulary have marks for.
        """
        self.backend = backend
        self.template = template
        self.vocabulary: int = backend.get_vocab_size(with_added_tokens=True)
        self._embedded = self.vocabulary if embedded is None else embedded
        self._config = config
        self._named = {name: text for name in NAMED_TOKENS if (text := _content(config.get(name))) is not None}
        spec = msgspec.json.decode(backend.to_str())
        self.token_bytes = TokenBytes(backend, spec)
        self._texts = TokenTexts.of(backend, spec)
        self._control = ControlTokens(backend, spec)
        self._added = frozenset(token.content for token in backend.get_added_tokens_decoder().values())
        self._before, self._after = self._added_around()
        self.call_format = self._call_format(tool_call_format)
        self.thinking_marks = None if template is None else thinking_marks_of(template.all_sources)
        # One thread: two long prompts take turns, so a burst of them leaves a core for the engine.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    @classmethod
    def load(cls, folder: Path, chat_template: str | None = None, embedded: int | None = None) -> Self:
        """That of a model's folder. Raises TokenizerNotUsable, OSError."""
        return cls.of(read_files(folder), chat_template, embedded)

    @classmethod
    def of(
        cls,
        files: Mapping[str, bytes],
        chat_template: str | None = None,
        embedded: int | None = None,
        tool_call_format: CallFormatSetting = "auto",
    ) -> Self:
        """That of the files that `read_files` has found.

        What is added around a text (a start token) is what tokenizer.json says, as in transformers: `add_bos_token` in
        tokenizer_config.json speaks to those who build a tokenizer without it.

        chat_template: the text of a template to use in place of the model's own. embedded, tool_call_format: as in the
        constructor. Raises TokenizerNotUsable.
        """
        try:
            backend = tokenizers.Tokenizer.from_buffer(files[TOKENIZER])
        except Exception as error:  # the library raises plain Exception
            raise TokenizerNotUsable(f"{TOKENIZER} cannot be used: {error}") from error
        config = _config_of(files)
        # Files carry over what training used: neither may shorten or lengthen a prompt here.
        backend.no_truncation()
        backend.no_padding()
        _add_configured_tokens(backend, config)
        try:
            template = ChatTemplate.of(files, config, chat_template)
        except TemplateNotUsable as error:
            raise TokenizerNotUsable(str(error)) from error
        return cls(backend, config, template, embedded, tool_call_format)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The end token of the tokenizer's own files; the model's configuration may name more."""
        token = self._named.get("eos_token")
        token_id = None if token is None else self.backend.token_to_id(token)
        return () if token_id is None else (token_id,)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a plain text; control tokens written in it are taken as such. Raises BadRequest."""
        return self._encode(self.backend, text, add_special_tokens=add_special_tokens, param="prompt")

    async def encode_async(self, text: str, *, add_special_tokens: bool, among: int = 0) -> list[int]:
        """Like `encode`, off the event loop for long texts. among: characters of all texts that it is one of."""
        if max(len(text), among) <= OFF_LOOP_CHARACTERS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._worker, lambda: self.encode(text, add_special_tokens=add_special_tokens)
        )

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        kwargs: dict[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Token ids of a chat, exactly those that the template gives, unless add_special_tokens puts more around them.

        kwargs: further variables for the template. Raises BadRequest: no template, the template's own refusal.
        """
        if self.template is None:
            raise BadRequest(
                "This model has no chat template, so it cannot answer chats: use /v1/completions, or start the server "
                "with --chat-template FILE.",
                param="messages",
            )
        given: dict[str, Any] = {"messages": list(messages), "tools": tools or None, "kwargs": kwargs or {}}
        mark = self._control.mark_for(given)
        if mark is not None:
            try:
                given = mark.everywhere(given)
            except RecursionError:
                raise BadRequest("The messages are nested too deeply.", param="messages") from None
        text = self.template.render(
            given["messages"],
            tools=given["tools"],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self._named, **given["kwargs"]},
        )
        backend = self.backend
        if mark is not None:
            backend, text = self._control.private, mark.to_private_names(text)
        ids = self._encode(backend, text, add_special_tokens=False, param="messages")
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    async def render_chat_async(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        kwargs: dict[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Like `render_chat`, off the event loop for long chats."""

        def render() -> list[int]:
            return self.render_chat(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                kwargs=kwargs,
                add_special_tokens=add_special_tokens,
            )

        if json_length([list(messages), tools, kwargs]) <= OFF_LOOP_CHARACTERS:
            return render()
        return await asyncio.get_running_loop().run_in_executor(self._worker, render)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of ids, decoded at once. Ids without a token (padding rows of the output matrix) have none."""
        text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    async def decode_async(self, ids: Sequence[int]) -> str:
        """The text of ids, with special tokens. Many are decoded off the event loop, and one by one: the library holds
        the interpreter while it decodes, 1 us an id.
        """
        if len(ids) <= OFF_LOOP_TOKENS:
            return self.decode(ids, skip_special_tokens=False)
        return "".join(await self.pieces_async(ids, skip_special_tokens=False, is_encoded_text=False))

    def detokenizer(self, *, skip_special_tokens: bool, shown: frozenset[str] = frozenset()) -> IncrementalDecoder:
        """Incremental decoding of one Sequence's output. shown: tokens that are not skipped, whatever they are."""
        skip = self._control.ids if skip_special_tokens else frozenset()
        if skip and shown:
            skip -= {self.backend.token_to_id(text) for text in shown}
        return Detokenizer(self.backend, skip) if self._texts is None else ByteDetokenizer(self._texts, skip)

    def pieces(self, ids: Sequence[int], *, skip_special_tokens: bool, is_encoded_text: bool) -> list[str]:
        """What each id adds to the text of all of them, which is these pieces joined.

        is_encoded_text: the ids are `encode`'s, with special tokens added; those have no text, whatever is skipped.
        """
        first, last = 0, len(ids)
        if is_encoded_text:
            first, last = len(self._before), last - len(self._after)
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        pieces = [detokenizer.push(token_id) for token_id in ids[first:last]]
        if pieces:
            pieces[-1] += detokenizer.flush()
        return [""] * first + pieces + [""] * (len(ids) - last)

    async def pieces_async(self, ids: Sequence[int], *, skip_special_tokens: bool, is_encoded_text: bool) -> list[str]:
        """Like `pieces`, off the event loop for many ids."""

        def cut() -> list[str]:
            return self.pieces(ids, skip_special_tokens=skip_special_tokens, is_encoded_text=is_encoded_text)

        if len(ids) <= OFF_LOOP_TOKENS:
            return cut()
        return await asyncio.get_running_loop().run_in_executor(self._worker, cut)

    def spellings(self, words: Sequence[str], *, param: str) -> list[list[int]]:
        """The token sequences that write any of `words` inside of a text: straight on, and after a space.

        Each is encoded behind a line break, because the first word of a text has a spelling of its own in some
        tokenizers. A word's own leading spaces count as that one space. Raises BadRequest.
        """
        bare = [word.lstrip(" ") or word for word in words]
        forms = dict.fromkeys(form for word in bare for form in (word, word if word[0] == " " else f" {word}"))
        alone = self._encode_all(self.backend, [_LINE_BREAK], add_special_tokens=False, param=param)[0]
        found: dict[tuple[int, ...], None] = {}
        inside = self._encode_all(
            self.backend, [_LINE_BREAK + form for form in forms], add_special_tokens=False, param=param
        )
        for form, ids in zip(forms, inside, strict=True):
            own = ids[len(alone) :]
            if ids[: len(alone)] != alone or not own:  # the line break is part of a longer token
                own = self._encode(self.backend, form, add_special_tokens=False, param=param)
            if own:
                found[tuple(own)] = None
        return [list(ids) for ids in found]

    def ends_with(self, ids: Sequence[int], text: str) -> bool:
        """Whether the text of `ids` ends with this, but for white space behind it. Looks at the last ids only."""
        return self.decode(ids[-TAIL_TOKENS:], skip_special_tokens=False).rstrip().endswith(text)

    def grammar_token(self, text: str) -> int | None:
        """The id of a token that no text of a grammar can spell, or None.

        Control tokens, and what else was added to the vocabulary in angle brackets: llguidance takes both as such.
        """
        token_id: int | None = self.backend.token_to_id(text)
        is_bracketed = text in self._added and text.startswith("<") and text.endswith(">")
        return token_id if is_bracketed or token_id in self._control.ids else None

    def token_strings(self, ids: Iterable[int]) -> list[str]:
        """The vocabulary's own spelling of each id ("Ġthe"), empty for ids without a token."""
        return [self.backend.id_to_token(token_id) or "" for token_id in ids]

    def info(self) -> dict[str, Any]:
        """What GET /tokenizer_info answers: the fields of tokenizer_config.json that say how text becomes ids."""
        fields = ("add_bos_token", "add_eos_token", "additional_special_tokens", "clean_up_tokenization_spaces")
        return {
            "tokenizer_class": self._config.get("tokenizer_class", "PreTrainedTokenizerFast"),
            **{name: self._named.get(name) for name in NAMED_TOKENS},
            **{name: self._config[name] for name in fields if name in self._config},
            "chat_template": None if self.template is None else self.template.source,
        }

    def _call_format(self, setting: CallFormatSetting) -> CallFormat | None:
        if setting == "none" or self.template is None or not self.template.takes_tools:
            return None
        if setting != "auto":
            return setting
        return detected_format(self.template.all_sources, lambda text: self.backend.token_to_id(text) is not None)

    def _encode(self, backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        return self._encode_all(backend, [text], add_special_tokens=add_special_tokens, param=param)[0]

    def _encode_all(
        self, backend: tokenizers.Tokenizer, texts: list[str], *, add_special_tokens: bool, param: str
    ) -> list[list[int]]:
        """`param`: the field that the texts came in. Raises BadRequest."""
        try:
            # A batch: unlike `encode`, it lets go of the GIL, and it skips the offsets that nobody reads.
            encodings = backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except TypeError:
            surrogate = next((character for character in "".join(texts) if "\ud800" <= character <= "\udfff"), None)
            if surrogate is None:
                raise
            message = f"The text holds a lone surrogate (U+{ord(surrogate):04X}), which is no character."
            raise BadRequest(message, param=param) from None
        lists: list[list[int]] = [encoding.ids for encoding in encodings]
        if self._embedded < self.vocabulary:
            # Tokens that somebody added to a tokenizer and not to the model (a padding token, often).
            unknown = next((token_id for ids in lists for token_id in ids if token_id >= self._embedded), None)
            if unknown is not None:
                name = self.backend.id_to_token(unknown)
                raise BadRequest(f"The text holds {name!r}, which the model does not know.", param=param)
        return lists

    def _added_around(self) -> tuple[list[int], list[int]]:
        """The special tokens that `encode` puts before and behind a text when it is asked to."""
        plain, whole = (self.backend.encode("a", add_special_tokens=added).ids for added in (False, True))
        at = next(i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain)
        return whole[:at], whole[at + len(plain) :]

    def close(self) -> None:
        """Let the worker thread end. Idempotent."""
        self._worker.shutdown(wait=False, cancel_futures=True)


class Detokenizer:
    """Turns one Sequence's ids into text as they come, a whole character at a time.

    `DecodeStream` decodes a short window of ids again with each new one, which keeps leading spaces right in both kinds
    of tokenizer. Two things are added to it. It holds back text that ends in U+FFFD, as an unfinished character does,
    so its window grows with a run of invalid bytes: every `WINDOW` ids the part that can no longer change is let go.
    And it has no end: `flush` gives what was held back.
    """

    WINDOW = 32

    def __init__(self, backend: tokenizers.Tokenizer, skip: frozenset[int]) -> None:
        self._backend = backend
        self._skip = skip
        self._stream = DecodeStream(skip_special_tokens=False)
        self._context: list[int] = []  # ids of the last text given out: leading spaces depend on them
        self._held: list[int] = []  # ids whose text has not been given out

    def push(self, token_id: int) -> str:
        """The text that became complete with this id, perhaps empty."""
        if token_id in self._skip:
            return ""
        self._held.append(token_id)
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception:  # noqa: BLE001 - the library raises plain Exception: the window decodes to other text than before
            # Byte tokens next to each other decode as one run: one invalid byte changes what was already given out.
            return self._give_out(self._held, rest=[])
        if text is not None:
            self._context, self._held = self._held, []
            return text
        if len(self._held) % self.WINDOW == 0:
            return self._let_go()
        return ""

    def flush(self) -> str:
        """The text still held back; an unfinished character is U+FFFD. The Sequence has ended."""
        return self._give_out(self._held, rest=[]) if self._held else ""

    def _let_go(self) -> str:
        """Give out held text but for what may still begin a character: 3 bytes at most, so 3 ids at most."""
        whole = self._decode(self._held)
        for count in range(1, 4):
            settled, rest = self._held[:-count], self._held[-count:]
            # An unfinished character cut in two would be two U+FFFD; whole, it is one.
            if whole and self._decode(settled) + self._decode(rest) == whole:
                return self._give_out(settled, rest=rest)
        return ""

    def _give_out(self, ids: list[int], *, rest: list[int]) -> str:
        """The text of `ids`, which follow the context; `rest` stays held."""
        before, text = self._decode(self._context), self._decode(self._context + ids)
        text = text[len(before) :] if text.startswith(before) else self._decode(ids)
        self._context, self._held = ids, rest
        self._stream = DecodeStream(ids=None if rest else ids, skip_special_tokens=False)
        for token_id in rest:
            self._stream.step(self._backend, token_id)
        return text

    def _decode(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text


def json_length(value: Any) -> float:
    """How long a JSON value is as text, in bytes: numbers count too. Infinite where that cannot be said."""
    try:
        return len(msgspec.json.encode(value))
    except (RecursionError, UnicodeError):
        return math.inf


def _content(token: Any) -> str | None:
    """A token in a configuration file is a string, an object with its content, or null."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def read_files(folder: Path) -> dict[str, bytes]:
    """What of a model's folder a tokenizer is made of. Raises TokenizerNotUsable, OSError."""
    paths = {name: folder / name for name in (TOKENIZER, *CONFIGS, *TEMPLATES)}
    files = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
    if TOKENIZER not in files:
        raise TokenizerNotUsable(f"{folder} has no {TOKENIZER}")
    return files


def _config_of(files: Mapping[str, bytes]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name in CONFIGS:
        try:
            config |= msgspec.json.decode(files.get(name, b"{}"), type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise TokenizerNotUsable(f"{name} is not a JSON object: {error}") from error
    return config


def _add_configured_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Tokens that only tokenizer_config.json knows of: named ones, and those of added_tokens_decoder."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    for token_id, fields in sorted(listed.items(), key=lambda item: int(item[0])):
        if fields["content"] in known:
            continue
        flags = {name: fields.get(name, False) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        backend.add_tokens([tokenizers.AddedToken(fields["content"], **flags)])
        if backend.token_to_id(fields["content"]) != int(token_id):
            raise TokenizerNotUsable(
                f"tokenizer_config.json gives {fields['content']!r} the id {token_id}, but tokenizer.json leads to "
                f"{backend.token_to_id(fields['content'])}"
            )
        known.add(fields["content"])
    for name in NAMED_TOKENS:
        text = _content(config.get(name))
        if text is not None and text not in known and backend.token_to_id(text) is not None:
            backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])
