"""What a refusal says where few values would do."""

import msgspec
import pytest

from service.admin_bodies import DropCaches, SetLimits
from service.anthropic_body import MessagesBody
from service.decoding import decode
from service.errors import BadRequest
from service.schema import Body, ChatBody

HELLO = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("kind", "fields", "values"),
    [
        (ChatBody, {"messages": [HELLO, HELLO | {"role": "usr"}]}, "assistant, developer, system, tool, user"),
        (ChatBody, {"messages": [HELLO], "tool_choice": "perhaps"}, "auto, none, required"),
        (ChatBody, {"messages": [HELLO], "response_format": {"type": "xml"}}, "json_object, json_schema, text"),
        (MessagesBody, {"max_tokens": 1, "messages": [HELLO | {"role": "usr"}]}, "assistant, user"),
        (DropCaches, {"level": 4}, "1, 2, 3"),
    ],
    ids=["role", "tool choice", "format", "another form", "numbers"],
)
def test_a_value_that_is_none_of_a_few_is_told_which_those_are(kind: type[Body], fields: dict, values: str) -> None:
    with pytest.raises(BadRequest) as refused:
        decode(msgspec.json.encode(fields), kind)
    assert f", not one of {values} - at " in str(refused.value)


def test_where_any_number_would_do_no_list_is_given() -> None:
    with pytest.raises(BadRequest) as refused:
        decode(b'{"high": "most"}', SetLimits)
    assert str(refused.value) == "Invalid enum value 'most' - at `$.high`"
