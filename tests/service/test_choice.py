"""Choice: tokens to text where the order of events matters; the rest is tested through HTTP."""

from tiny_tokenizer import END, tiny_tokenizer

from service.choice import MERGE_ABOVE, Choice, Delta
from service.engine_client import Ended
from service.token_stream import TokenStream
from service.tokenization import StopMatcher


def make_choice(stops: list[str], finished: list[int]) -> tuple[Choice, TokenStream]:
    stream = TokenStream()
    choice = Choice(
        index=0,
        prompt_ids=[5],
        stream=stream,
        detokenizer=tiny_tokenizer().detokenizer(skip_special_tokens=True),
        matcher=StopMatcher(stops) if stops else None,
        include_stop=False,
        stop_token_ids=frozenset(),
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


def test_an_end_token_in_the_middle_is_no_end() -> None:
    """Only the last token of an ended Sequence is its end token: with ignore_eos it may occur before."""
    choice, stream = make_choice([], [])
    stream.put([END, *ids(" a"), END])
    stream.end(Ended(1, "stop", end_token=END))
    assert [delta.token_ids for delta in choice.read()] == [[END], ids(" a"), [END]]
    assert choice.completion_tokens == 3


def test_many_waiting_tokens_become_one_delta_with_everything() -> None:
    choice, stream = make_choice([], [])
    tokens = ids(" a b c d e f g h i j k l m n o p q r s t u v")
    assert len(tokens) > MERGE_ABOVE
    stream.put(tokens)
    stream.end(Ended(1, "length"))
    text = tiny_tokenizer().decode(tokens, skip_special_tokens=True)
    assert choice.read() == [Delta(text, tokens, "length", None)]


def test_an_end_without_a_token_still_ends() -> None:
    choice, stream = make_choice(["bc"], [])
    stream.put(ids(" a b"))
    assert [delta.text for delta in choice.read()] == [" a", " "]
    stream.end(Ended(1, "length"))
    assert choice.read() == [Delta("b", [], "length", None)]
