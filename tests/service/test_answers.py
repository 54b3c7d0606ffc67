"""The forms of answers where they promise the same bytes in two ways; what they write is tested through HTTP."""

from typing import Any

import msgspec
import pytest
from tiny_tokenizer import tiny_tokenizer

from service.answers import ChatForm, CompletionForm, Wishes
from service.choice import Choice, Delta, TextRules
from service.logprobs import Spelling
from service.prompts import Prompt
from service.token_stream import TokenStream

FormKind = type[CompletionForm] | type[ChatForm]


def make_form(kind: FormKind, **wishes: Any) -> CompletionForm | ChatForm:
    spelling = Spelling(tiny_tokenizer().token_bytes, as_ids=False)
    return kind(
        request_id="r", created=1, model="m", fingerprint="f", wishes=Wishes(spelling, **wishes), more={"parent": "p"}
    )


def make_choice(index: int = 0) -> Choice:
    return Choice(
        index=index,
        prompt=Prompt([5]),
        stream=TokenStream(),
        detokenizer=tiny_tokenizer().detokenizer(skip_special_tokens=True),
        rules=TextRules(),
        finish=lambda _: None,
    )


@pytest.mark.parametrize("kind", [CompletionForm, ChatForm])
@pytest.mark.parametrize("text", [" fox", "", '"\\\n\u2028\U0001fae0'])
def test_what_stands_around_the_text_of_an_event_is_the_same_for_all_texts(kind: FormKind, text: str) -> None:
    form, choice = make_form(kind), make_choice(3)
    around = form.around_text(choice)
    assert around is not None
    before, behind = around
    assert before + msgspec.json.encode(text) + behind == form.event(choice, Delta(text, [7]), None, is_first=False)


@pytest.mark.parametrize("kind", [CompletionForm, ChatForm])
@pytest.mark.parametrize("wish", [{"top_choices": 0}, {"token_ids": True}])
def test_nothing_fixed_stands_around_the_text_where_events_tell_more(kind: FormKind, wish: dict[str, Any]) -> None:
    assert make_form(kind, **wish).around_text(make_choice()) is None
