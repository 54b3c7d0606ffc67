"""The language that a constrained answer must be of, as a grammar: reasoning if the model marks it, then calls, or text
in which calls may begin, or what `response_format` asks for. In llguidance's dialect of Lark.

Calls are written as the model's family was trained to (call_readers.py has the forms); their arguments are of a JSON
schema each. A mark that is a token of its own stands in the grammar as that token: no text of a grammar can spell it. A
mark in text ends a lazy lexeme: the first place where it is complete is where the call begins. A model may spell out
what is a token, and readers look at text, so where a mark may come in text both are taken.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from service.answer_parts import ThinkingMarks
from service.call_readers import CallFormat, HermesReader, Llama3Reader, MistralReader

ANY_TEXT = r"(.|\n)*"
NO_OBJECT = r"\s*[^\s{](.|\n)*"
"""Text that Llama 3 does not begin with the object of a call."""

TokenOf = Callable[[str], int | None]
"""The id of a token that no text of a grammar can spell, by its text (Tokenizer.grammar_token); None for others."""


class CallableTool(NamedTuple):
    """A tool as the grammar knows it. schema: of its arguments, an object."""

    name: str
    schema: dict[str, Any]


def calls_only(
    call_format: CallFormat, tools: Sequence[CallableTool], most: int | None, token_of: TokenOf
) -> list[str]:
    """Rules by which `answer` is at least one call, and nothing else."""
    form = _form(call_format, token_of)
    return [f"answer: {form.calls(most)}", *form.call_rules(tools)]


def calls_or_structured(
    call_format: CallFormat, tools: Sequence[CallableTool], most: int | None, structured: str, token_of: TokenOf
) -> list[str]:
    """Rules by which `answer` is calls, or else `structured`, a piece of a rule."""
    form = _form(call_format, token_of)
    # an object that an answer begins with is then no call
    mark = "" if form.first_mark else _spelled(form.mark, token_of)
    return [
        "answer: called | structured",
        f"called: {mark} {form.calls(most)}",
        f"structured: {structured}",
        *form.call_rules(tools),
    ]


def text_and_calls(call_format: CallFormat, tools: Sequence[CallableTool], token_of: TokenOf) -> list[str]:
    """Rules by which `answer` is text in which calls may begin; what has begun as a call is one."""
    form = _form(call_format, token_of)
    rules = [f"run: {form.run()}", *form.call_rules(tools)]
    before = NO_OBJECT if call_format == "llama3" else ANY_TEXT
    rules += ["begun: head run", *_through("head", "TEXT", before, form.mark, token_of), f"TEXT: /{before}/"]
    if call_format == "llama3":
        return ["answer: run | begun | TEXT?", *rules]
    return ["answer: begun* TEXT?", *rules]


def thoughtful(answer: Sequence[str], thinking: ThinkingMarks | None, is_thinking: bool, token_of: TokenOf) -> str:
    """The grammar of `answer`, behind reasoning. is_thinking: it has begun in the prompt."""
    if thinking is None:
        return "\n".join(["start: answer", *answer])
    rules = [*_through("rest", "THOUGHT", ANY_TEXT, thinking.end, token_of), f"THOUGHT: /{ANY_TEXT}/"]
    rules += ["behind[lazy]: /[ \\n]/"]  # lazy: it could be the beginning of a text, too
    if is_thinking:
        start = "start: rest behind{0,4} answer"
    else:
        start = "start: (open rest behind{0,4})? answer"
        rules += _through("open", "", "", thinking.begin, token_of)
    return "\n".join([start, *rules, *answer])


def _through(rule: str, terminal: str, before: str, mark: str, token_of: TokenOf) -> list[str]:
    """Rules by which `rule` is a text and the mark behind it. terminal: the name of `before`, a regular expression."""
    spelled = f"{rule}_spelled[lazy]: /({before})?{_as_regex(mark)}/"
    if (token := token_of(mark)) is None:
        return [f"{rule}: {rule}_spelled", spelled]
    text = f"{terminal}?" if terminal else ""
    return [f"{rule}: {text} <[{token}]> | {rule}_spelled", spelled]


@dataclass(frozen=True, slots=True)
class _Form:
    """How one family writes calls, as pieces of rules; a piece that is not there is empty."""

    mark: str  # the text that calls in a text begin with
    head: str  # the text before the arguments, with a place for the name; empty: the name, then `named_by`
    named_by: str = ""
    tail: str = ""  # behind the arguments
    first_mark: str = ""
    each_mark: str = ""  # before each further call
    opening: str = ""
    between: str = ""
    closing: str = ""

    def calls(self, most: int | None) -> str:
        """A piece of a rule: one call or more."""
        more = "" if most == 1 else f"({self.between} {self.each_mark} call)*"
        return f"{self.first_mark} {self.opening} call {more} {self.closing}"

    def run(self) -> str:
        """The same without the first mark; where each call has a mark, just one."""
        return "call" if self.each_mark else f"{self.opening} call ({self.between} call)* {self.closing}"

    def call_rules(self, tools: Sequence[CallableTool]) -> list[str]:
        """`call` without the mark in front of it."""
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
        for i, tool in enumerate(tools):
            named = f"{_quoted(tool.name)} {self.named_by}"
            head = _quoted(self.head.replace("NAME", tool.name)) if self.head else named
            rules.append(f"call_{i}: {head} arguments_{i} {self.tail}")
            rules.append(f"arguments_{i}: %json {msgspec.json.encode(tool.schema).decode()}")
        return rules


def _form(call_format: CallFormat, token_of: TokenOf) -> _Form:
    match call_format:
        case "hermes":
            mark, end = (_spelled(text, token_of) for text in (HermesReader.mark, HermesReader.end))
            return _Form(
                HermesReader.mark,
                head='\n{"name": "NAME", "arguments": ',
                tail=_quoted("}\n") + " " + end,
                first_mark=mark,
                each_mark=mark,
                between=_quoted("\n"),
            )
        case "llama3":
            head = '{"name": "NAME", "parameters": '
            return _Form(Llama3Reader.mark, head=head, tail=_quoted("}"), between=_quoted("; "))
        case "mistral":
            mark = _spelled(MistralReader.mark, token_of)
            if token_of(MistralReader.arguments_mark) is not None:
                named_by = _spelled(MistralReader.arguments_mark, token_of)
                return _Form(MistralReader.mark, head="", named_by=named_by, first_mark=mark, each_mark=mark)
            return _Form(
                MistralReader.mark,
                head='{"name": "NAME", "arguments": ',
                tail=_quoted("}"),
                first_mark=mark,
                opening=_quoted("["),
                between=_quoted(", "),
                closing=_quoted("]"),
            )


def _spelled(mark: str, token_of: TokenOf) -> str:
    token = token_of(mark)
    return _quoted(mark) if token is None else f"<[{token}]>"


def _quoted(text: str) -> str:
    return json.dumps(text)


def _as_regex(text: str) -> str:
    """The text in a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/")
