"""Readers of tool calls and of reasoning: what they find, what they give back, and that pieces do not matter."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.answer_parts import (
    THINKING_MARKS,
    AnswerReader,
    CallArguments,
    CallStart,
    Content,
    Part,
    Reasoning,
    ThinkingReader,
)
from service.call_readers import READERS, CallFormat, JsonNesting, detected_format

NAMES = frozenset({"f", "get_weather"})
FORMATS: tuple[CallFormat, ...] = ("hermes", "llama3", "mistral")
WEATHER = '{"city": "Rome", "days": [1, {"x": "}]\\""}]}'
Summary = tuple[str, str, list[tuple[str, str]]]


def summary(parts: list[Part]) -> Summary:
    """(content, reasoning, calls with their arguments)."""
    content = "".join(part.text for part in parts if isinstance(part, Content))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallStart):
            assert part.call == len(calls)
            calls.append((part.name, ""))
        elif isinstance(part, CallArguments):
            assert part.call == len(calls) - 1, "arguments of a call that is over"
            calls[-1] = calls[-1][0], calls[-1][1] + part.text
    return content, reasoning, calls


def read(reader: AnswerReader, pieces: list[str]) -> Summary:
    parts: list[Part] = []
    for piece in pieces:
        parts += reader.push(piece)
    return summary([*parts, *reader.push("", is_last=True)])


def calls_in(call_format: CallFormat, text: str, most: int | None = None) -> Summary:
    whole = read(AnswerReader(None, READERS[call_format](NAMES, most)), [text])
    assert read(AnswerReader(None, READERS[call_format](NAMES, most)), list(text)) == whole
    return whole


def content_and_calls(call_format: CallFormat, text: str, most: int | None = None) -> Any:
    content, _, calls = calls_in(call_format, text, most)
    return content, calls


ONE = [("get_weather", WEATHER)]


@pytest.mark.parametrize(
    ("call_format", "text", "content", "calls"),
    [
        ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>', "", ONE),
        ("hermes", f'Let me see.\n<tool_call>{{"name":"get_weather","arguments":{WEATHER}}}</tool_call>',
         "Let me see.", ONE),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n'
         f'{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>\n', "", [("f", "{}"), *ONE]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n done', "done", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"arguments": {"name": 1}, "name": "f"}</tool_call>', "", [("f", '{"name": 1}')]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", '{"x": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": [1}}</tool_call>', "", [("f", '{"x": [1}}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "a', "", [("f", '{"x": "a')]),
        ("llama3", f'{{"name": "get_weather", "parameters": {WEATHER}}}', "", ONE),
        ("llama3", f'<|python_tag|>{{"name": "get_weather", "parameters": {WEATHER}}}', "", ONE),
        ("llama3", f'\n{{"type": "function", "name": "get_weather", "parameters": {WEATHER}}}', "", ONE),
        ("llama3", f'{{"name": "f", "parameters": {{}}}}; {{"name": "get_weather", "parameters": {WEATHER}}}\n', "",
         [("f", "{}"), *ONE]),
        ("llama3", 'Yes: <|python_tag|>{"name": "f", "parameters": {}}', "Yes:", [("f", "{}")]),
        ("mistral", f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {WEATHER}}}]', "", ONE),
        ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}, "id": "abcdefghi"}}]', "", ONE),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, '
         f'{{"name": "get_weather", "arguments": {WEATHER}}}]', "", [("f", "{}"), *ONE]),
        ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{WEATHER}", "", ONE),
        ("mistral", f"ok[TOOL_CALLS]f{{}}[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{WEATHER}", "ok",
         [("f", "{}"), *ONE]),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    ],
)  # fmt: skip
def test_calls_are_found(call_format: CallFormat, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert content_and_calls(call_format, text) == (content, calls)


@pytest.mark.parametrize(
    ("call_format", "text"),
    [
        ("hermes", "plain <tool text"), ("hermes", " spaces around \n"), ("hermes", "<tool_call>"),
        ("hermes", "<tool_call> not an object </tool_call>"), ("hermes", '<tool_call>\n{"name": "f", "argu'),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}, "name": "unknown"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "no json"}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5}</tool_call>'), ("hermes", "<tool_call>{]}</tool_call> x"),
        ("hermes", '{"name": "f", "arguments": {}}'),
        ("llama3", '{"answer": {"name": "f"}}'), ("llama3", ' {"name": "unknown", "parameters": {}} '),
        ("llama3", 'see {"name": "f", "parameters": {}}'), ("llama3", "<|python_tag|>print(1)"), ("llama3", " \n"),
        ("llama3", '{"name": "f", "par'), ("llama3", ""), ("llama3", "{" * 50),
        ("mistral", "[TOOL_CALLS]"), ("mistral", "[TOOL_CALLS][]"), ("mistral", "[TOOL_CALLS]unknown[ARGS]{}"),
        ("mistral", "[TOOL_CALLS]" + "words " * 100 + "{}"), ("mistral", '[TOOL_CALLS][{"name": "f"'),
        ("mistral", "[TOOL_CALLS]f[ARGS]"), ("mistral", "[TOOL_CALLS] [ [1] ]"), ("mistral", "[TOOL [TOOL_CALLS"),
    ],
)  # fmt: skip
def test_what_only_looks_like_a_call_is_content_to_the_last_character(call_format: CallFormat, text: str) -> None:
    assert content_and_calls(call_format, text) == (text, [])


def test_a_call_behind_one_that_was_none() -> None:
    text = '<tool_call>no</tool_call> <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert content_and_calls("hermes", text) == ("<tool_call>no</tool_call>", [("f", "{}")])
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "unknown", "arguments": {}}]'
    content, calls = content_and_calls("mistral", text)
    assert (content, calls) == (', {"name": "unknown", "arguments": {}}]', [("f", "{}")])


def test_junk_in_the_end_of_a_call_is_content() -> None:
    junk = ', "x": ' + "y" * 400
    assert content_and_calls("hermes", f'<tool_call>{{"name": "f", "arguments": {{}}{junk}') == (junk, [("f", "{}")])


@pytest.mark.parametrize("call_format", FORMATS)
def test_nothing_follows_the_last_call_that_there_may_be(call_format: CallFormat) -> None:
    two = {
        "hermes": '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2,
        "llama3": '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}',
        "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]',
    }[call_format]
    reader = READERS[call_format](NAMES, 1)
    parts = reader.push(two)
    assert reader.is_done
    assert summary([*parts, *reader.push(" more"), *reader.flush()]) == ("", "", [("f", "{}")])
    assert content_and_calls(call_format, two, 1) == ("", [("f", "{}")])
    assert content_and_calls(call_format, two) == ("", [("f", "{}")] * 2)


def test_a_call_is_opened_before_its_arguments_are_complete() -> None:
    reader = READERS["hermes"](NAMES)
    reader.push('<tool_call>{"name": "f", "arguments": ')
    start, *begun = reader.push('{"x')
    assert isinstance(start, CallStart)
    assert start.name == "f"
    assert summary([start, *begun, *reader.push('": 1')]) == ("", "", [("f", '{"x": 1')])


def test_ids_differ_and_have_the_form_that_templates_want() -> None:
    def ids(call_format: CallFormat, text: str) -> list[str]:
        return [part.id for part in READERS[call_format](NAMES).push(text) if isinstance(part, CallStart)]

    of_hermes = ids("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 50)
    of_mistral = ids("mistral", "[TOOL_CALLS]f[ARGS]{}" * 50)
    assert (len(set(of_hermes)), len(set(of_mistral))) == (50, 50)
    assert all(id_.startswith("call_") for id_ in of_hermes)
    assert all(len(id_) == 9 and id_.isalnum() for id_ in of_mistral)


# ---------------------------------------------------------------- any text, any pieces

FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[", "]", ",", ";", "{", "}",
    " ", "\n", '"', "\\", '"name": "f"', '"name": "x"', '"arguments": ', '"parameters": ', '{"x": "}"}', "{}", "f",
    '{"name": "f", "arguments": {"a": [1, 2]}}', '{"name": "f", "parameters": {"b": "\\""}}', "<think>", "</think>",
    "[THINK]", "[/THINK]", "words", "\U0001fae0",
]  # fmt: skip


@given(
    st.sampled_from(FORMATS),
    st.sampled_from([None, *THINKING_MARKS]),
    st.booleans(),
    st.lists(st.sampled_from(FRAGMENTS), max_size=24),
    st.sampled_from([None, 1]),
    st.randoms(use_true_random=False),
)
def test_pieces_do_not_matter(
    call_format: CallFormat, marks: Any, is_open: bool, fragments: list[str], most: int | None, dice: random.Random
) -> None:
    def reader() -> AnswerReader:
        thinking = None if marks is None else ThinkingReader(marks, is_open=is_open)
        return AnswerReader(thinking, READERS[call_format](NAMES, most))

    text = "".join(fragments)
    whole = read(reader(), [text])
    cuts = sorted(dice.randrange(len(text) + 1) for _ in range(5))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(reader(), pieces) == whole
    assert read(reader(), list(text)) == whole
    if marks is None and not whole[2]:
        assert whole[0] == text, "characters were lost"


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=4)
       | st.dictionaries(st.text(), inner, max_size=4), max_leaves=20).filter(lambda value: isinstance(value, dict)),
       st.sampled_from(FORMATS), st.sampled_from([None, 1]))  # fmt: skip
def test_arguments_come_through_as_they_are(arguments: Any, call_format: CallFormat, indent: int | None) -> None:
    said = json.dumps(arguments, ensure_ascii=False, indent=indent)
    call = f'{{"name": "f", "{"parameters" if call_format == "llama3" else "arguments"}": {said}}}'
    text = {
        "hermes": f"<tool_call>\n{call}\n</tool_call>",
        "llama3": call,
        "mistral": f"[TOOL_CALLS][{call}]",
    }[call_format]
    assert content_and_calls(call_format, text) == ("", [("f", said)])


@given(st.text(alphabet='{}[]"\\a', max_size=60))
def test_nesting_is_found_in_pieces_as_in_the_whole(text: str) -> None:
    depth, inside, escaped, found = 0, False, False, -1
    for i, character in enumerate(text):
        if escaped:
            escaped = False
        elif inside:
            inside, escaped = character != '"', character == "\\"
        elif character == '"':
            inside = True
        elif character in "{}[]":
            depth += 1 if character in "{[" else -1
            if depth == 2:
                found = i + 1
                break
    assert JsonNesting().find(text, 0, 2) == found
    nesting = JsonNesting()
    places = [i + 1 for i, character in enumerate(text) if nesting.find(character, 0, 2) >= 0]
    assert (places or [-1])[0] == found


# ---------------------------------------------------------------- reasoning


def thoughts(text: str, *, is_open: bool = False) -> tuple[str, str, int | None]:
    reader = AnswerReader(ThinkingReader(THINKING_MARKS[0], is_open=is_open), None)
    content, reasoning, _ = read(reader, list(text))
    return reasoning, content, reader.reasoning_characters


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content", "characters"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes.", 20),
        ("\n<think></think>Yes", False, "", "Yes", 16),
        ("Hm.\n\n</think> Yes.", True, "Hm.", "Yes.", 13),
        ("Hm. Hm.", True, "Hm. Hm.", "", 7),
        ("<think>Hm </thi", False, "Hm </thi", "", 15),
        (" Yes. <think>no</think>", False, "", " Yes. <think>no</think>", 0),
        ("<thin", False, "", "<thin", 0), ("  ", False, "", "  ", 0), ("", False, "", "", 0),
    ],
)  # fmt: skip
def test_reasoning_is_what_an_answer_begins_with(
    text: str, is_open: bool, reasoning: str, content: str, characters: int
) -> None:
    assert thoughts(text, is_open=is_open) == (reasoning, content, characters)


def test_calls_follow_reasoning() -> None:
    """A call in the reasoning is none; the answer behind it is read as if it began there."""
    text = '<think>\n{"name": "f", "parameters": {}}\n</think>\n\n{"name": "f", "parameters": {"x": 1}}'
    reader = AnswerReader(ThinkingReader(THINKING_MARKS[0], is_open=False), READERS["llama3"](NAMES))
    assert read(reader, list(text)) == ("", '{"name": "f", "parameters": {}}', [("f", '{"x": 1}')])


def test_reasoning_that_nobody_wants_is_left_out() -> None:
    reader = AnswerReader(ThinkingReader(THINKING_MARKS[0], is_open=False), None, shows_reasoning=False)
    assert read(reader, ["<think>a</think>b"]) == ("b", "", [])
    assert reader.reasoning_characters == 16


# ---------------------------------------------------------------- which form


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        ("{{ tools }}<tool_call>", ["[TOOL_CALLS]", "<|python_tag|>"], "hermes"),
        ("{{ tools }}<tool_call><function=f>", [], None),
        ("{{ tools }}[TOOL_CALLS]", ["<|python_tag|>"], "mistral"),
        ("{{ tools }}", ["<|python_tag|>"], "llama3"),
        ("{{ tools }}<|python_tag|>", [], "llama3"),
        ("{{ tools }}", ["[TOOL_CALLS]"], "mistral"),
        ("{{ tools }}", [], None),
    ],
)
def test_the_form_is_told_by_marks(template: str, tokens: list[str], expected: str | None) -> None:
    assert detected_format(template, tokens.__contains__) == expected
