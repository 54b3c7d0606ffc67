"""Choice: tokens to text where the order of events matters; the rest is tested through HTTP."""

from typing import Any

import pytest
from tiny_tokenizer import END, tiny_tokenizer

from service.answer_parts import THINKING_MARKS, CallArguments, CallStart, Content, Reading, Reasoning, joined
from service.chat_deltas import part_deltas
from service.choice import MERGE_ABOVE, PIECE_DELTAS, Choice, Delta, Said, TextRules, merged
from service.engine_client import Ended, Scores
from service.prompts import Prompt
from service.stop_strings import StopMatcher
from service.token_stream import TokenStream


def make_choice(
    stops: list[str], finished: list[int], reading: Reading | None = None, **rules: Any
) -> tuple[Choice, TokenStream]:
    stream = TokenStream()
    choice = Choice(
        index=0,
        prompt=Prompt([5], reading=reading),
        stream=stream,
        detokenizer=tiny_tokenizer().detokenizer(skip_special_tokens=True),
        rules=TextRules(matcher=StopMatcher(stops) if stops else None, **rules),
        finish=finished.append,
    )
    return choice, stream


def ids(text: str) -> list[int]:
    return tiny_tokenizer().encode(text, add_special_tokens=False)


def test_tokens_after_a_stop_string_were_never_made() -> None:
    """The engine may be steps ahead when it reads the Finish; how it then ends changes nothing either."""
    finished: list[int] = []
    choice, stream = make_choice(["b"], finished)
    stream.put(ids(" a b"))
    assert [delta.text for delta in choice.read()] == [" a", " "]
    stream.put(ids(" c d"))
    assert choice.read() == []
    stream.put(END)
    stream.end(Ended(1, "abort"))
    assert choice.read() == []
    assert (choice.finish_reason, choice.completion_tokens, finished) == ("stop", 2, [2])
    assert choice.ended == Ended(1, "abort")


def test_text_that_is_read_alone_is_the_same_as_that_of_deltas() -> None:
    """Also of tokens that are part of a character, and counted alike."""
    tokens = ids(" a \U0001fae0 b")
    choice, stream = make_choice([], [])
    other, others = make_choice([], [])
    texts = []
    for token in tokens:
        stream.put(token)
        others.put(token)
        text = choice.read_text()
        assert text is not None
        assert other.read() == [Delta(text, [token])]
        texts.append(text)
    assert "".join(texts) == " a \U0001fae0 b"
    assert choice.completion_tokens == other.completion_tokens == len(tokens)


@pytest.mark.parametrize("kind", ["stop string", "reasoning", "scores", "end"])
def test_text_is_read_alone_only_where_nothing_else_is_to_be_said(kind: str) -> None:
    reading = Reading(thinking=THINKING_MARKS[0]) if kind == "reasoning" else None
    choice, stream = make_choice(["x"] if kind == "stop string" else [], [], reading)
    stream.put(ids(" a")[0], Scores(-1.0, 1, [], []) if kind == "scores" else None)
    if kind == "end":
        stream.end(Ended(1, "length"))
    assert choice.read_text() is None
    assert [delta.token_ids for delta in choice.read()] == [ids(" a")[:1]]


def test_an_end_token_in_the_middle_is_no_end() -> None:
    """Only the last token of an ended Sequence is its end token: with ignore_eos it may occur before."""
    choice, stream = make_choice([], [])
    stream.put([END, *ids(" a"), END])
    stream.end(Ended(1, "stop", end_token=END))
    assert [delta.token_ids for delta in choice.read()] == [[END], ids(" a"), [END]]
    assert choice.completion_tokens == 3


@pytest.mark.parametrize("together", [False, True])
def test_text_behind_reasoning_is_all_there(together: bool) -> None:
    """Also what ends in the middle of a character, and however many tokens are read at once."""
    choice, stream = make_choice([], [], reading=Reading(thinking=THINKING_MARKS[0], is_thinking=True))
    tokens = [*ids("a b c d e f g</think>\n\nh i j k \U0001fae0 l m"), *ids("\U0001fae0")[:2]]
    deltas = []
    for token in tokens:
        stream.put(token)
        deltas += [] if together else choice.read()
    stream.end(Ended(1, "length"))
    whole = merged([*deltas, *choice.read()])
    assert whole.text == "h i j k \U0001fae0 l m\ufffd"
    assert part_deltas(whole.parts) == [
        {"reasoning_content": "a b c d e f g", "reasoning": "a b c d e f g", "content": whole.text}
    ]
    assert len(ids("a b c d e f g")) < choice.reasoning_tokens <= len(ids("a b c d e f g</think>\n\n"))


@pytest.mark.parametrize("cut", range(1, 23))
def test_a_choice_that_follows_another_answer_has_what_that_left_unfinished(cut: int) -> None:
    """Wherever an answer is cut in two, in a mark, in a character, in the reasoning or behind it: nothing is lost."""
    tokens = ids("a b \U0001fae0</think>\n\nh \U0001fae0 i")
    reading = Reading(thinking=THINKING_MARKS[0], is_thinking=True)
    first, stream = make_choice([], [], reading=reading)
    stream.put(tokens[:cut])
    before = merged(first.read())
    child, own = make_choice([], [], reading=reading)
    child.follow(tokens[:cut])
    own.put(tokens[cut:])
    own.end(Ended(1, "length"))
    after = merged(child.read())
    assert before.text + after.text == "h \U0001fae0 i"
    reasoning = [part.text for part in (*before.parts, *after.parts) if isinstance(part, Reasoning)]
    assert "".join(reasoning) == "a b \U0001fae0"
    assert child.completion_tokens == len(tokens) - cut
    mark_end = 1 + tokens.index(*ids(">"))
    assert child.reasoning_tokens == max(0, mark_end - cut)


def test_many_waiting_tokens_become_one_delta_with_everything() -> None:
    choice, stream = make_choice([], [])
    tokens = ids(" a b c d e f g h i j k l m n o p q r s t u v")
    assert len(tokens) > MERGE_ABOVE
    stream.put(tokens)
    stream.end(Ended(1, "length"))
    text = tiny_tokenizer().decode(tokens, skip_special_tokens=True)
    assert choice.read() == [Delta(text, tokens, "length", None)]


def test_what_a_whole_answer_gathers_is_kept_in_few_pieces() -> None:
    """Of each kind of part one, however many tokens brought it."""
    said = Said()
    for i in range(3 * PIECE_DELTAS + 5):
        kind = Reasoning if i < PIECE_DELTAS + 9 else Content
        said.add([Delta("c" if kind is Content else "", [i], parts=(kind("c"),))])
    assert len(said._pieces) + len(said._latest) == 3 + 5
    whole = said.whole()
    assert whole.token_ids == list(range(3 * PIECE_DELTAS + 5))
    assert whole.parts == (Reasoning("c" * (PIECE_DELTAS + 9)), Content("c" * (2 * PIECE_DELTAS - 4)))
    assert whole.text == whole.parts[1].text


def test_joined_parts_keep_calls_apart() -> None:
    calls = [CallStart(0, "a", "f"), CallArguments(0, "{"), CallArguments(0, "}"), CallStart(1, "b", "f")]
    rest = [CallArguments(1, "{"), CallArguments(1, "}"), Content("x"), Content("y")]
    assert joined([*calls, *rest]) == (
        CallStart(0, "a", "f"), CallArguments(0, "{}"), CallStart(1, "b", "f"), CallArguments(1, "{}"), Content("xy"),
    )  # fmt: skip


def test_an_end_without_a_token_still_ends() -> None:
    choice, stream = make_choice(["bc"], [])
    stream.put(ids(" a b"))
    assert [delta.text for delta in choice.read()] == [" a", " "]
    stream.end(Ended(1, "length"))
    assert choice.read() == [Delta("b", [], "length", None)]


def test_an_entry_waits_until_no_stop_string_can_take_the_text_before_it() -> None:
    choice, stream = make_choice([" b c d"], [])
    tokens = ids(" a b c x b c d")
    scores = [Scores(-float(i), 1, [], []) for i in range(len(tokens))]
    events = []
    for token, score in zip(tokens, scores, strict=True):
        stream.put(token, score)
        events += choice.read()
    assert [delta.text for delta in events] == [" a", "", "", " b c x", "", "", ""]
    assert [[entry.offset for entry in delta.scored] for delta in events] == [[0], [2], [], [4, 6], [8], [], [8, 8]]
    assert [entry.scores for delta in events for entry in delta.scored] == scores


def test_entries_of_a_text_that_is_not_cut_come_with_their_tokens() -> None:
    choice, stream = make_choice([], [])
    tokens = ids(" a b")
    for token in tokens:
        stream.put(token, Scores(-1.0, 1, [], []))
    stream.put(END, Scores(-2.0, 1, [], []))
    stream.end(Ended(1, "stop", end_token=END))
    deltas = choice.read()
    assert [[(entry.token, entry.offset) for entry in delta.scored] for delta in deltas] == [
        [(tokens[0], 0)],
        [(tokens[1], 2)],
        [(END, 4)],
    ]


def test_stop_strings_do_not_stop_within_the_minimum() -> None:
    """One that begins in it and is complete after it does."""
    finished: list[int] = []
    choice, stream = make_choice([" a b", " d e"], finished, min_tokens=4)
    stream.put(ids(" a b c d e f"))
    assert "".join(delta.text for delta in choice.read()) == " a b c"
    assert (choice.finish_reason, choice.stop_reason, finished) == ("stop", " d e", [5])
