"""Grammars of constrained answers: what they admit, what they refuse, and that whatever they admit is read as calls."""

import functools
import json
import random
from functools import partial
from typing import Any, Literal

import jsonschema
import llguidance.numpy
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer
from tiny_tokenizer import END
from tool_chats import FORMATS, tool_tokenizer

from service.answer_grammar import CallableTool, calls_only, text_and_calls, thoughtful
from service.answer_parts import THINKING_MARKS, CallArguments, CallStart, Content, Reading, Reasoning, ThinkingMarks
from service.call_readers import READERS, CallFormat
from service.tokenization import Tokenizer

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [CallableTool("get_weather", CITY), CallableTool("get_wind", CITY), CallableTool("clock", NOTHING)]
ROME, NOON = ("get_weather", {"city": "Rome"}), ("clock", {})
MARKS = {"hermes": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
Kind = Literal["calls", "one call", "text"]


def matcher(
    call_format: CallFormat,
    kind: Kind = "calls",
    thinking: ThinkingMarks | None = None,
    *,
    is_thinking: bool = False,
    tokenizer: Tokenizer | None = None,
) -> LLMatcher:
    tokenizer = tokenizer or tool_tokenizer(call_format)
    token_of = tokenizer.grammar_token
    if kind == "text":
        answer = text_and_calls(call_format, TOOLS, token_of)
    else:
        answer = calls_only(call_format, TOOLS, 1 if kind == "one call" else None, token_of)
    text = thoughtful(answer, thinking, is_thinking, token_of)
    prepared = LLTokenizer(tokenizer.backend.to_str(), n_vocab=tokenizer.vocabulary, eos_token=[END])
    made = LLMatcher(prepared, LLMatcher.grammar_from_lark(text), log_level=0)
    assert not made.is_error(), (made.get_error(), text)
    return made


def admits(made: LLMatcher, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the whole text is of the language."""
    twin = made.deep_copy()
    return all(map(twin.consume_token, tokenizer.encode(text, add_special_tokens=False))) and twin.is_accepting()


def written(call_format: CallFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    """As the grammar wants it: the white space of the form that the family is trained in."""
    if call_format == "mistral":
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)
    key = "parameters" if call_format == "llama3" else "arguments"
    objects = [f'{{"name": "{name}", "{key}": {json.dumps(arguments)}}}' for name, arguments in calls]
    if call_format == "hermes":
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
    return "; ".join(objects)


@pytest.mark.parametrize("call_format", FORMATS)
def test_calls_that_must_come(call_format: CallFormat) -> None:
    tokenizer, any_number, one = tool_tokenizer(call_format), matcher(call_format), matcher(call_format, "one call")
    for calls in ((ROME,), (NOON,), (("get_wind", {"city": "Oslo", "days": 3}),)):
        assert admits(any_number, tokenizer, written(call_format, *calls))
        assert admits(one, tokenizer, written(call_format, *calls))
    assert admits(any_number, tokenizer, written(call_format, ROME, NOON, ROME))
    assert not admits(one, tokenizer, written(call_format, ROME, NOON))
    for text in (
        "", "The fox.", written(call_format, ROME) + " The fox.", " " + written(call_format, ROME),
        written(call_format, ROME)[:-1], written(call_format, ("get_weather", {"city": "Bonn"})),
        written(call_format, ("get_weather", {})), written(call_format, ("get_weather", {"city": "Rome", "x": 1})),
        written(call_format, ("clock", {"city": "Rome"})), written(call_format, ("get", {})),
    ):  # fmt: skip
        assert not admits(any_number, tokenizer, text), text


@pytest.mark.parametrize("call_format", FORMATS)
def test_text_in_which_calls_may_begin(call_format: CallFormat) -> None:
    tokenizer, made = tool_tokenizer(call_format), matcher(call_format, "text")
    tag = {"hermes": "", "mistral": "", "llama3": "<|python_tag|>"}[call_format]
    good, bad = (tag + written(call_format, call) for call in (ROME, ("get_weather", {"city": "Bonn"})))
    for text in ("", "The fox.", " <dog [x\n", "The {", good, f"The fox. {good}", written(call_format, ROME, NOON)):
        assert admits(made, tokenizer, text), text
    for text in (bad, f"The fox. {bad}", good[:-1]):
        assert not admits(made, tokenizer, text), text
    if call_format == "llama3":
        assert not admits(made, tokenizer, '{"city": "Rome"}'), "an object that an answer begins with is a call"
    else:
        assert admits(made, tokenizer, f"{good} and {good}.")


def test_the_older_form_of_mistral() -> None:
    """A vocabulary without [ARGS]; its mark a control token or not."""
    tokenizer = tool_tokenizer("hermes")  # with neither
    text = '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome"}}, {"name": "clock", "arguments": {}}]'
    assert admits(matcher("mistral", tokenizer=tokenizer), tokenizer, text)
    assert admits(matcher("mistral", "text", tokenizer=tokenizer), tokenizer, f"The fox. {text}")
    assert not admits(matcher("mistral", "text", tokenizer=tokenizer), tokenizer, text.replace("Rome", "Bonn"))
    assert not admits(matcher("mistral", "one call", tokenizer=tokenizer), tokenizer, text)


@pytest.mark.parametrize("marks", THINKING_MARKS)
@pytest.mark.parametrize("kind", ["calls", "text"])
def test_reasoning_comes_first_and_is_free(marks: ThinkingMarks, kind: Kind) -> None:
    tokenizer, call = tool_tokenizer("hermes"), written("hermes", ROME)
    thought = f"the <tool_call> fox{marks.end}"
    for is_thinking in (False, True):
        made = matcher("hermes", kind, marks, is_thinking=is_thinking)
        begin = "" if is_thinking else marks.begin
        for between in ("", "\n", "\n\n"):
            assert admits(made, tokenizer, f"{begin}{thought}{between}{call}")
            assert not admits(made, tokenizer, f"{begin}{thought}{between}{call.replace('Rome', 'Bonn')}")
        assert admits(made, tokenizer, call) != is_thinking
        assert not admits(made, tokenizer, f"{begin}the fox")


@functools.cache
def tokenizer_of_marks(*, special: bool) -> Tokenizer:
    """All marks of this file but [ARGS] are tokens of it, control tokens or not."""
    backend = tokenizers.Tokenizer.from_str(tool_tokenizer("hermes").backend.to_str())
    marks = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"]
    marks += [text for pair in THINKING_MARKS for text in pair]
    backend.add_tokens([tokenizers.AddedToken(text, special=special, normalized=False) for text in marks])
    assert len(backend.encode("<tool_call>", add_special_tokens=False).ids) == 1
    return Tokenizer(backend, {}, None)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("marks", [None, *THINKING_MARKS])
@pytest.mark.parametrize("call_format", FORMATS)
def test_marks_that_are_tokens(call_format: CallFormat, marks: ThinkingMarks | None, special: bool) -> None:
    tokenizer = tokenizer_of_marks(special=special)
    spelled_call = "[TOOL_CALLS]" if special else "<tool_call>"
    assert tokenizer.grammar_token(spelled_call) is not None
    call = '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome"}}]'
    if call_format != "mistral":
        call = written(call_format, ROME)
    thought = "" if marks is None else f"{marks.begin}the fox{marks.end}\n\n"
    tag = "<|python_tag|>" if call_format == "llama3" else ""
    forced = matcher(call_format, "calls", marks, tokenizer=tokenizer)
    text = matcher(call_format, "text", marks, tokenizer=tokenizer)
    assert admits(forced, tokenizer, thought + call)
    assert not admits(forced, tokenizer, thought + "The fox.")
    for good in (call, tag + call, f"The fox. {tag}{call}", "The fox.", ""):
        assert admits(text, tokenizer, thought + good), good
    assert not admits(text, tokenizer, f"{thought}The fox. {tag}{call.replace('Rome', 'Bonn')}")
    if marks is not None:
        opened = matcher(call_format, "text", marks, is_thinking=True, tokenizer=tokenizer)
        assert admits(opened, tokenizer, f"the fox{marks.end}The dog. {tag}{call}")
        assert not admits(opened, tokenizer, "the fox")


def test_a_mark_that_is_spelled_out_begins_a_call_too() -> None:
    """Readers look at text, so what they would take for a call has to be held to its form."""
    tokenizer = tokenizer_of_marks(special=True)
    for marks in (None, THINKING_MARKS[0]):
        made = matcher("hermes", "text", marks, is_thinking=marks is not None, tokenizer=tokenizer)
        begin = [] if marks is None else ["the fox", marks.end[:3], marks.end[3:]]
        for city, is_admitted in (("Rome", True), ("Bonn", False)):
            pieces = [
                *begin,
                "The fox <tool_",
                'call>\n{"name": "get_weather", "arguments": ',
                f'{{"city": "{city}"}}}}\n',
            ]
            ids = [id_ for text in pieces for id_ in tokenizer.encode(text, add_special_tokens=False)]
            ids += tokenizer.encode("</tool_call>", add_special_tokens=False)
            twin = made.deep_copy()
            assert (all(map(twin.consume_token, ids)) and twin.is_accepting()) == is_admitted


@pytest.mark.parametrize("call_format", FORMATS)
@pytest.mark.parametrize("kind", ["calls", "one call", "text"])
@pytest.mark.parametrize("thinks", [False, True])
def test_whatever_is_admitted_is_read_as_valid_calls(call_format: CallFormat, kind: Kind, thinks: bool) -> None:
    """Random walks through the masks, read as an answer is."""
    tokenizer = tool_tokenizer(call_format)
    marks = THINKING_MARKS[0] if thinks else None
    made = matcher(call_format, kind, marks, is_thinking=thinks)
    names = frozenset(tool.name for tool in TOOLS)
    reading = Reading(
        thinking=marks, is_thinking=thinks,
        call_reader=partial(READERS[call_format], names, 1 if kind == "one call" else None),
    )  # fmt: skip
    schemas = {tool.name: tool.schema for tool in TOOLS}
    ended = called = 0
    for seed in range(25):
        begin = "The </think>" if thinks else ""
        if kind == "text":
            begin += "a fox " + MARKS[call_format] * (seed % 2)
        text = _walk(made.deep_copy(), tokenizer, begin, random.Random(seed))
        if text is None:
            continue
        ended += 1
        parts = reading.reader().push(text, is_last=True)
        starts = [part for part in parts if isinstance(part, CallStart)]
        called += bool(starts)
        for start in starts:
            said = "".join(part.text for part in parts if isinstance(part, CallArguments) and part.call == start.call)
            jsonschema.validate(json.loads(said), schemas[start.name])
        if kind != "text":
            assert starts
            assert not any(isinstance(part, Content) for part in parts), text
        if kind == "one call":
            assert len(starts) == 1
        assert thinks or not any(isinstance(part, Reasoning) for part in parts)
    assert ended > 10
    assert called > 5


def _walk(made: LLMatcher, tokenizer: Tokenizer, begin: str, dice: random.Random) -> str | None:
    """A text of the language that begins so, drawn token by token; None if it does not end soon."""
    mask = llguidance.numpy.allocate_token_bitmask(1, tokenizer.vocabulary)
    ids = tokenizer.encode(begin, add_special_tokens=False)
    assert all(map(made.consume_token, ids))
    while len(ids) < 300 and not made.is_stopped():
        llguidance.numpy.fill_next_token_bitmask(made, mask)
        allowed = [id_ for id_ in range(tokenizer.vocabulary) if mask[0, id_ // 32] >> (id_ % 32) & 1]
        token = END if END in allowed and dice.random() < 0.3 else dice.choice(allowed)
        assert made.consume_token(token)
        if token != END:
            ids.append(token)
    return tokenizer.decode(ids, skip_special_tokens=False) if made.is_stopped() else None
