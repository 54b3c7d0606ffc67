"""What a model's answer to a chat is made of: content, reasoning, tool calls; and what takes the text apart.

    text ──▶ ThinkingReader ──▶ CallReader (call_readers.py) ──▶ parts, in the order of the text
                    └──▶ reasoning

Readers get text in pieces, and what they give depends on the text alone, never on where the pieces end: so streamed and
whole answers agree. White space next to a mark belongs to the mark. Nothing else is lost: what only looked like a call
is content.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Protocol


class Content(NamedTuple):
    """Text for the user."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model wrote between its marks of thinking."""

    text: str


class CallStart(NamedTuple):
    """A call of a tool begins. Calls of one answer count from 0."""

    call: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """A further piece of a call's arguments: JSON, as the model wrote it."""

    call: int
    text: str


Part = Content | Reasoning | CallStart | CallArguments


class PartReader(Protocol):
    """Takes calls out of text that comes in pieces."""

    calls: int  # that have begun
    is_done: bool  # as many calls as there may be are complete: what follows is not part of the answer

    def push(self, text: str) -> list[Part]:
        """What this piece settles."""
        ...

    def flush(self) -> list[Part]:
        """What was held back: the text has ended."""
        ...


class ThinkingMarks(NamedTuple):
    """What a model writes around its reasoning."""

    begin: str
    end: str


THINKING_MARKS = (ThinkingMarks("<think>", "</think>"), ThinkingMarks("[THINK]", "[/THINK]"))


def thinking_marks_of(template: str) -> ThinkingMarks | None:
    """The marks that a chat template knows, or None."""
    return next((marks for marks in THINKING_MARKS if marks.end in template), None)


class ThinkingReader:
    """Splits off the reasoning that an answer begins with.

    is_open: the prompt ends with the mark that begins it. characters: how much of the text the reasoning was, with its
    marks; None until that is known.
    """

    def __init__(self, marks: ThinkingMarks, *, is_open: bool) -> None:
        self._marks = marks
        self._is_inside = is_open
        self._held = ""
        self._skips_space = is_open  # white space behind a mark
        self._pushed = 0  # characters
        self.characters: int | None = None

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """(reasoning, what comes behind it), as far as they are settled. is_last: the text ends with this piece."""
        self._pushed += len(text)
        if self._is_inside and not (self._held or self._skips_space or is_last) and is_settled(text, self._marks.end):
            return text, ""
        self._held += text
        if self.characters is None and not self._is_inside:
            self._begin(is_last)
        reasoning = self._inside(is_last) if self._is_inside else ""
        if self.characters is None:
            return reasoning, ""
        behind, self._held = self._held, ""
        if self._skips_space:
            behind = behind.lstrip()
            self._skips_space = not behind
        return reasoning, behind

    @property
    def is_through(self) -> bool:
        """Whether all that may follow comes as it is."""
        return self.characters is not None and not self._skips_space

    def _begin(self, is_last: bool) -> None:
        text = self._held.lstrip()
        if text.startswith(self._marks.begin):
            self._held = text[len(self._marks.begin) :]
            self._is_inside = self._skips_space = True
        elif is_last or not self._marks.begin.startswith(text):
            self.characters = 0

    def _inside(self, is_last: bool) -> str:
        if self._skips_space:
            self._held = self._held.lstrip()
            self._skips_space = not self._held
        at = self._held.find(self._marks.end)
        if at >= 0:
            text, self._held = self._held[:at].rstrip(), self._held[at + len(self._marks.end) :]
            self._is_inside, self._skips_space = False, True
            self.characters = self._pushed - len(self._held)
            return text
        settled = len(self._held) - (0 if is_last else unsettled(self._held, self._marks.end))
        text, self._held = self._held[:settled], self._held[settled:]
        if is_last:
            self.characters = self._pushed
        return text


class AnswerReader:
    """Takes the answer of one choice apart."""

    def __init__(
        self, thinking: ThinkingReader | None, calls: PartReader | None, *, shows_reasoning: bool = True
    ) -> None:
        """shows_reasoning: otherwise reasoning is split off and left out."""
        self._thinking = thinking
        self._calls = calls
        self._shows_reasoning = shows_reasoning

    def push(self, text: str, *, is_last: bool = False) -> tuple[Part, ...]:
        """What this piece settles; with the last piece, everything."""
        parts: list[Part] = []
        if self._thinking is not None:
            reasoning, text = self._thinking.push(text, is_last=is_last)
            if reasoning and self._shows_reasoning:
                parts.append(Reasoning(reasoning))
        if self._calls is not None:
            parts += self._calls.push(text)
            if is_last:
                parts += self._calls.flush()
        elif text:
            parts.append(Content(text))
        return tuple(parts)

    @property
    def is_through(self) -> bool:
        """Whether all that may follow is content."""
        return self._calls is None and (self._thinking is None or self._thinking.is_through)

    @property
    def has_calls(self) -> bool:
        return self._calls is not None and self._calls.calls > 0

    @property
    def is_done(self) -> bool:
        """Whether nothing that may follow is part of the answer."""
        return self._calls is not None and self._calls.is_done

    @property
    def reasoning_characters(self) -> int | None:
        """How much of the text was reasoning; None until that is known."""
        return 0 if self._thinking is None else self._thinking.characters


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers to one prompt are read."""

    thinking: ThinkingMarks | None = None
    is_thinking: bool = False  # the prompt ends inside of the reasoning
    shows_reasoning: bool = True
    call_reader: Callable[[], PartReader] | None = None  # makes a fresh one for each choice
    marks: frozenset[str] = frozenset()  # tokens whose text is needed, though they may be control tokens

    def reader(self) -> AnswerReader:
        """A reader for one choice."""
        thinking = None if self.thinking is None else ThinkingReader(self.thinking, is_open=self.is_thinking)
        calls = None if self.call_reader is None else self.call_reader()
        return AnswerReader(thinking, calls, shows_reasoning=self.shows_reasoning)


def unsettled(text: str, mark: str) -> int:
    """How many characters at the end of `text` may turn out to be a mark, or white space before one."""
    begun = next((size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), 0)
    before = text[: len(text) - begun]
    return len(text) - len(before.rstrip())


def is_settled(text: str, mark: str) -> bool:
    """Whether the text, looked at in a moment, holds nothing that may belong to a mark: true of nearly all tokens."""
    return bool(text) and mark[0] not in text and not text[-1].isspace()


def content_of(parts: tuple[Part, ...]) -> str:
    """The content alone."""
    if len(parts) == 1:
        return parts[0].text if isinstance(parts[0], Content) else ""
    return "".join(part.text for part in parts if isinstance(part, Content))


def joined(parts: Iterable[Part]) -> tuple[Part, ...]:
    """The same with fewer parts: neighbours of one kind, and of one call, are one."""
    whole: list[Part] = []
    for (kind, call), group in groupby(parts, _kind_of):
        if kind is CallStart:
            whole += group
        else:
            text = "".join(part.text for part in group if not isinstance(part, CallStart))
            whole.append(CallArguments(call, text) if kind is CallArguments else kind(text))
    return tuple(whole)


def _kind_of(part: Part) -> tuple[type[Any], int]:
    return type(part), part.call if isinstance(part, CallStart | CallArguments) else 0
