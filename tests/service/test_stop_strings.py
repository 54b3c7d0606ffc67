"""StopMatcher: which stop string ends a text, and what may be sent before it is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.stop_strings import StopMatcher


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition, character by character."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include)
    sent = ""
    for piece in pieces:
        result = matcher.push(piece)
        sent += result.text
        if result.stopped:
            return sent, result.which
    return sent + matcher.flush(), None


few_letters = st.text("abc", max_size=40)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=6), max_size=5)


@given(pieces=st.lists(few_letters, max_size=12), stops=stop_lists, include=st.booleans())
def test_any_pieces_give_what_the_whole_text_gives(pieces: list[str], stops: list[str], include: bool) -> None:
    assert run(pieces, stops, include) == naive("".join(pieces), stops, include)


@given(pieces=st.lists(few_letters, max_size=12), stops=stop_lists)
def test_only_the_beginning_of_a_stop_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    sent, seen = "", ""
    for piece in pieces:
        result = matcher.push(piece)
        sent, seen = sent + result.text, seen + piece
        if result.stopped:
            break
        held = seen.removeprefix(sent)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
        assert not any(stop.startswith(seen[at:]) and stop != seen[at:] for stop in stops for at in range(len(sent))), (
            "text that may still become a stop was sent"
        )


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_over_several_pieces(include: bool) -> None:
    assert run(["one tw", "o th", "ree"], ["two three"], include) == (
        "one two three" if include else "one ",
        "two three",
    )


def test_of_a_stop_and_its_beginning_the_shorter_ends_the_text() -> None:
    """It is complete first, and generation ends there."""
    assert run(["1 2 3 4"], ["2 3", "2 "], True) == ("1 2 ", "2 ")


def test_of_stops_that_end_together_the_longest_wins() -> None:
    assert run(["a</answer>b"], ["answer>", "</answer>"], False) == ("a", "</answer>")


def test_characters_with_a_meaning_in_patterns() -> None:
    assert run(["x]^-\\", ".*y"], ["]^-\\.*"], False) == ("x", "]^-\\.*")


def test_nothing_is_given_after_a_stop() -> None:
    matcher = StopMatcher(["b"])
    assert matcher.push("abc") == ("a", True, "b")
    assert matcher.push("more") == ("", True, "b")
    assert matcher.flush() == ""


def test_no_stops_hold_nothing_back() -> None:
    assert StopMatcher([]).push("any text") == ("any text", False, None)


def test_each_character_is_looked_at_once() -> None:
    """The worst text for a matcher that starts again at each character: its states are walked in linear time."""

    class Counted(dict[str, int]):
        looked_up = 0

        def __contains__(self, key: object) -> bool:
            Counted.looked_up += 1
            return super().__contains__(key)

    matcher = StopMatcher(["a" * 1000 + "b"])
    matcher._next = [Counted(entries) for entries in matcher._next]
    for _ in range(100):
        matcher.push("a" * 1000)
    assert Counted.looked_up <= 2 * 100_000
