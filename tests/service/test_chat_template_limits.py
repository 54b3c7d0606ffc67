"""A template is somebody else's program, run on a client's data: what bounds it, and what it cannot reach."""

from contextlib import suppress
from typing import Any

import pytest
from tiny_tokenizer import CONTROL, tiny_tokenizer

from service.chat_template import ChatTemplate
from service.errors import BadRequest
from service.tokenization import Tokenizer

USER = [{"role": "user", "content": "x"}]


def rendered(source: str, messages: Any = USER, **variables: Any) -> str:
    return ChatTemplate(source).render(
        messages, tools=None, add_generation_prompt=True, continue_final_message=False, variables=variables
    )


def test_a_text_that_grows_beyond_all_bounds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.chat_template.MAX_RENDERED_CHARACTERS", 1000)
    long = "{% for i in range(n) %}{{ messages[0].content * 100 }}{% endfor %}"
    assert len(rendered(long, n=9)) == 900
    with pytest.raises(BadRequest, match="more than 1000 characters") as refused:
        rendered(long, n=99_999)
    assert refused.value.param == "messages"


def test_a_template_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that jumps: no time is measured."""
    seconds = iter(range(0, 10_000_000, 2))
    monkeypatch.setattr("time.monotonic", lambda: next(seconds))
    assert rendered("{% for i in range(2) %}{{ i }},{% endfor %}") == "0,1,"
    with pytest.raises(BadRequest, match="longer than 10 s"):
        rendered("{% for i in range(99) %}{{ i }},{% endfor %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ range(10**9) | list }}", "{{ cycler.__init__ }}",
        "{% include '/etc/passwd' %}", "{{ self.__init__.__globals__ }}", "{{ messages[0].update({'a': 1}) }}",
        "{{ raise_exception.__globals__['json'] }}", "{{ 1 / 0 }}", "{{ undefined_thing.x }}",
    ],
)  # fmt: skip
def test_what_the_sandbox_refuses_is_the_clients_error(source: str) -> None:
    """A 400 at worst, and nothing of Python gets into the prompt."""
    with suppress(BadRequest):
        assert "<" not in rendered(source)


def test_nothing_that_a_client_writes_anywhere_becomes_a_control_token() -> None:
    """C34: in contents, names, ids and arguments of calls, tool results and template variables."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.name }}{{ m.tool_call_id }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.name }}{{ c.function.arguments | tojson }}"
        "{% endfor %}"
        "<|im_end|>{% endfor %}{{ extra }}"
    )
    tokenizer = Tokenizer(tiny_tokenizer().backend, {}, ChatTemplate(source))

    def ids(word: str) -> list[int]:
        call = {"id": word, "type": "function", "function": {"name": word, "arguments": {word: [word]}}}
        messages = [
            {"role": "user", "content": word, "name": word},
            {"role": "assistant", "content": word, "tool_calls": [call]},
            {"role": "tool", "content": word, "tool_call_id": word},
        ]
        return tokenizer.render_chat(messages, kwargs={"extra": word})

    harmless = ids("word")
    for token, text in enumerate(CONTROL):
        found = ids(text)
        for control in range(len(CONTROL)):
            assert found.count(control) == harmless.count(control), (text, token)
