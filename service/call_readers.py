"""Takes tool calls out of what a model writes, in the forms of three families:

    hermes    <tool_call>{"name": "f", "arguments": {...}}</tool_call>            Hermes, Qwen2.5, Qwen3
    llama3    {"name": "f", "parameters": {...}}; {...}                           Llama 3.1 and later
              as the whole answer, or behind <|python_tag|>
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}, {...}]              Mistral
              and the newer [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g[ARGS]{...}

A call begins for the client when its name is known, one of the request's tools, and its arguments begin. From there on
what the model writes goes out as it comes, also if it turns out to be no valid JSON. A call whose members stand in
another order is read as a whole first. Anything else behind a mark, a name that the request does not know included, is
content, mark and all.
"""

import re
import secrets
import string
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import msgspec

from service.answer_parts import CallArguments, CallStart, Content, Part, is_settled, unsettled

NAME_PATTERN = r"[a-zA-Z0-9_-]{1,64}"
"""What a tool may be called."""

LOOK_AHEAD = 256
"""Characters in which the name, or the end of a call behind its arguments, must be found."""

_MEMBER = r'\s*,\s*"[^"\\]*"\s*:\s*(?:"[^"\\]*"|[\w.+-]+)'
_CALL_END = re.compile(rf"(?:{_MEMBER})*\s*\}}")
_OBJECT_HEAD = re.compile(rf'\{{\s*"name"\s*:\s*"({NAME_PATTERN})"\s*,\s*"(?:arguments|parameters)"\s*:\s*')
_NAME_HEAD = re.compile(rf"({NAME_PATTERN})(?:\[CALL_ID\]{NAME_PATTERN})?(?:\[ARGS\])?\s*")
_LLAMA_SEPARATOR = re.compile(r"\s*(?:[;,]\s*)?")

CallFormat = Literal["hermes", "llama3", "mistral"]
CallFormatSetting = CallFormat | Literal["auto", "none"]


class JsonNesting:
    """How deep a place in JSON text is, found piece by piece. Brackets in strings do not count."""

    _OUTSIDE = re.compile(r'["{}\[\]]')
    _INSIDE = re.compile(r'["\\]')

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self._is_in_string = self._is_escaped = False

    def find(self, text: str, at: int, *depths: int) -> int:
        """Go on from text[at]; the place behind the bracket that leads to one of `depths`, or -1 at the end."""
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (self._INSIDE if self._is_in_string else self._OUTSIDE).search(text, at)
            if found is None:
                return -1
            at = found.end()
            match found[0]:
                case '"':
                    self._is_in_string = not self._is_in_string
                case "\\":
                    self._is_escaped = True
                case bracket:
                    self.depth += 1 if bracket in "{[" else -1
                    if self.depth in depths:
                        return at
        return -1


class _WholeCall(msgspec.Struct, frozen=True):
    """A call as an object."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


class CallReader:
    """What the three have in common: states, each a method that takes what it can from `_held`.

    A state gives True if it got somewhere, False if more text is needed; with the last piece it must get somewhere.
    """

    mark: ClassVar[str]
    spelled: ClassVar[tuple[str, ...]]  # marks that may be control tokens of the vocabulary

    def __init__(self, names: frozenset[str], most: int | None = None) -> None:
        """names: of the request's tools. most: calls that there may be."""
        self.calls = 0
        self.is_done = False
        self._names = names
        self._most = most
        self._held = ""
        self._opened = ""  # taken for the beginning of a call; content if it is none
        self._is_last = False
        self._skips_space = False
        self._nesting = JsonNesting()
        self._scanned = 0  # characters of `_held` that `_nesting` has seen
        self._arguments_end = 0  # the depth behind a call's arguments
        self._state: Callable[[list[Part]], bool] = self._read_content

    def push(self, text: str) -> list[Part]:
        """What this piece settles."""
        if not self._held and self._is_in_content and is_settled(text, self.mark):
            return [Content(text)]
        self._held += text
        parts: list[Part] = []
        while self._held and not self.is_done and self._state(parts):
            pass
        return parts

    def flush(self) -> list[Part]:
        """What was held back: the text has ended."""
        self._is_last = True
        parts = self.push("")
        if self._opened and not self.is_done:
            parts.append(Content(self._opened))
            self._opened = ""
        return parts

    @property
    def _is_in_content(self) -> bool:
        return self._state == self._read_content and not self._skips_space and not self.is_done

    # -- states

    def _read_content(self, parts: list[Part]) -> bool:
        if self._skips_space:
            self._held = self._held.lstrip()
            if not self._held:
                return False
            self._skips_space = False
        at = self._held.find(self.mark)
        if at >= 0:
            text = self._held[:at].rstrip()
            end = at + len(self.mark)
            self._opened, self._held = self._held[len(text) : end], self._held[end:]
            self._enter(self._read_head)
        else:
            settled = len(self._held) - (0 if self._is_last else unsettled(self._held, self.mark))
            text, self._held = self._held[:settled], self._held[settled:]
        if text:
            parts.append(Content(text))
        return at >= 0

    def _read_head(self, parts: list[Part]) -> bool:
        """Behind the mark."""
        self._open_space()
        return bool(self._held) and self._read_object(parts)

    def _read_object(self, parts: list[Part]) -> bool:
        """{"name": ..., "arguments": ...}"""
        if self._held[0] != "{":
            return self._give_back(parts)
        while (end := self._nesting.find(self._held, self._scanned, 0, 2)) >= 0:
            self._scanned = end
            if self._nesting.depth == 0:
                return self._take_whole(parts, end)
            head = _OBJECT_HEAD.fullmatch(self._held, 0, end - 1)
            if head is not None and self._held[end - 1] == "{":
                return self._begin_call(parts, head[1], end)
        self._scanned = len(self._held)
        return self._is_last and self._give_back(parts)

    def _take_whole(self, parts: list[Part], end: int) -> bool:
        found = _read_whole(self._held[:end])
        if found is None or found[0] not in self._names:
            return self._give_back(parts)
        parts.append(self._started(found[0]))
        parts.append(CallArguments(self.calls - 1, found[1]))
        self._held = self._held[end:]
        return self._end_call()

    def _begin_call(self, parts: list[Part], name: str, end: int) -> bool:
        """Its arguments begin with the character before `end`; they are one level below what is open now."""
        if name not in self._names:
            return self._give_back(parts)
        parts.append(self._started(name))
        parts.append(CallArguments(self.calls - 1, "{"))
        self._held = self._held[end:]
        self._arguments_end = self._nesting.depth - 1
        self._state = self._read_arguments
        return True

    def _read_arguments(self, parts: list[Part]) -> bool:
        end = self._nesting.find(self._held, 0, self._arguments_end)
        text, self._held = (self._held, "") if end < 0 else (self._held[:end], self._held[end:])
        parts.append(CallArguments(self.calls - 1, text))
        if end >= 0:
            if self._arguments_end == 0:
                return self._end_call()
            self._state = self._read_call_end
        return end >= 0

    def _read_call_end(self, parts: list[Part]) -> bool:
        """The rest of the object around the arguments."""
        end = JsonNesting(1).find(self._held[:LOOK_AHEAD], 0, 0)
        if end < 0 and len(self._held) < LOOK_AHEAD and not self._is_last:
            return False
        if end >= 0 and _CALL_END.fullmatch(self._held, 0, end):
            self._held = self._held[end:]
        return self._end_call()

    def _read_between(self, parts: list[Part]) -> bool:
        """Behind a call."""
        raise NotImplementedError

    # -- steps from one to another

    def _enter(self, state: Callable[[list[Part]], bool]) -> None:
        """A state that may read an object."""
        self._state, self._nesting, self._scanned = state, JsonNesting(), 0

    def _started(self, name: str) -> CallStart:
        self.calls += 1
        self._opened = ""
        return CallStart(self.calls - 1, self._new_id(), name)

    def _end_call(self) -> bool:
        self.is_done = self._most is not None and self.calls >= self._most
        self._state = self._read_between
        return True

    def _give_back(self, parts: list[Part]) -> bool:
        """No call: what was taken for the beginning of one is content."""
        if self._opened:
            parts.append(Content(self._opened))
            self._opened = ""
        return self._go_on(skips_space=False)

    def _go_on(self, *, skips_space: bool) -> bool:
        self._state, self._skips_space = self._read_content, skips_space
        return True

    def _open_space(self) -> None:
        text = self._held.lstrip()
        self._opened += self._held[: len(self._held) - len(text)]
        self._held = text

    def _new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"


class HermesReader(CallReader):
    """<tool_call>{...}</tool_call>"""

    mark = "<tool_call>"
    end = "</tool_call>"
    spelled = (mark, end)

    def _read_between(self, parts: list[Part]) -> bool:
        text = self._held.lstrip()
        if text.startswith(self.end):
            self._held = text[len(self.end) :]
            return self._go_on(skips_space=True)
        if self.end.startswith(text) and not self._is_last:
            return False
        return self._go_on(skips_space=True)


class Llama3Reader(CallReader):
    """An answer that is nothing but objects, or objects behind <|python_tag|>."""

    mark = "<|python_tag|>"
    spelled = (mark,)

    def __init__(self, names: frozenset[str], most: int | None = None) -> None:
        super().__init__(names, most)
        self._state = self._read_beginning

    def _read_beginning(self, parts: list[Part]) -> bool:
        self._open_space()
        if not self._held:
            return False
        if self._held[0] == "{":
            self._enter(self._read_head)
        else:
            self._held, self._opened = self._opened + self._held, ""
            self._go_on(skips_space=False)
        return True

    def _read_between(self, parts: list[Part]) -> bool:
        separator = _LLAMA_SEPARATOR.match(self._held)
        assert separator is not None, "it matches the empty text"
        if separator.end() == len(self._held):
            if self._is_last:
                self._held = ""
            return False
        if self._held[separator.end()] != "{":
            return self._go_on(skips_space=True)
        self._opened, self._held = self._held[: separator.end()], self._held[separator.end() :]
        self._enter(self._read_head)
        return True


class MistralReader(CallReader):
    """[TOOL_CALLS] and a list of objects, or a name and its arguments. Ids have the form that its templates want."""

    mark = "[TOOL_CALLS]"
    arguments_mark = "[ARGS]"
    spelled = (mark, arguments_mark, "[CALL_ID]")

    def __init__(self, names: frozenset[str], most: int | None = None) -> None:
        super().__init__(names, most)
        self._is_in_list = False

    def _read_head(self, parts: list[Part]) -> bool:
        self._open_space()
        if not self._held:
            return False
        self._is_in_list = self._held[0] == "["
        if self._is_in_list:
            self._opened, self._held = self._opened + "[", self._held[1:]
            self._enter(self._read_item)
            return True
        return self._read_object(parts) if self._held[0] == "{" else self._read_named(parts)

    def _read_item(self, parts: list[Part]) -> bool:
        self._open_space()
        return bool(self._held) and self._read_object(parts)

    def _read_named(self, parts: list[Part]) -> bool:
        at = self._held.find("{", 0, LOOK_AHEAD)
        if at < 0:
            return (self._is_last or len(self._held) >= LOOK_AHEAD) and self._give_back(parts)
        head = _NAME_HEAD.fullmatch(self._held, 0, at)
        if head is None:
            return self._give_back(parts)
        self._nesting = JsonNesting(1)
        return self._begin_call(parts, head[1], at + 1)

    def _read_between(self, parts: list[Part]) -> bool:
        text = self._held.lstrip()
        if not self._is_in_list or (text and text[0] not in ",]"):
            self._is_in_list = False
            return self._go_on(skips_space=True)
        if not text:
            return False
        self._held = text[1:]
        if text[0] == "]":
            self._is_in_list = False
            return self._go_on(skips_space=True)
        self._opened = self._opened + ","
        self._enter(self._read_item)
        return True

    def _new_id(self) -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


READERS: Mapping[CallFormat, type[CallReader]] = {
    "hermes": HermesReader,
    "llama3": Llama3Reader,
    "mistral": MistralReader,
}


def detected_format(template: str, has_token: Callable[[str], bool]) -> CallFormat | None:
    """The form that a model writes calls in, by its chat template and its vocabulary; None if that cannot be told.

    The template counts first: a model is often trained further in another form than its vocabulary has marks for.
    """
    if HermesReader.mark in template:
        return None if "<function=" in template else "hermes"  # Qwen3-Coder's form is another one inside of that mark
    if MistralReader.mark in template:
        return "mistral"
    if Llama3Reader.mark in template or has_token(Llama3Reader.mark):
        return "llama3"
    return "mistral" if has_token(MistralReader.mark) else None


def _read_whole(text: str) -> tuple[str, str] | None:
    """(name, arguments) of an object that is a call."""
    try:
        call = msgspec.json.decode(text, type=_WholeCall)
        arguments = (bytes(call.arguments) or bytes(call.parameters) or b"{}").decode()
        if arguments.startswith('"'):  # JSON in a string
            arguments = msgspec.json.decode(arguments, type=str)
        msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return call.name, arguments
