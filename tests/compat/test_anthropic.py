"""anthropic-sdk-python against the demo model: whole and streamed, sync and async, counting, errors."""

from typing import Any

import anthropic
import pytest
from compat_server import Served

pytestmark = pytest.mark.compat
GREEDY = {"top_k": 1}  # of the API, but not of this client any more
ASKED: Any = [{"role": "user", "content": "Name the capital of France."}]


@pytest.fixture
def client(server: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.root, api_key=server.key, max_retries=0)


def test_whole_and_streamed(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model="served", max_tokens=24, messages=ASKED, extra_body=GREEDY, system="Be brief.")
    (block,) = whole.content
    assert block.type == "text"
    assert "Paris" in block.text
    with client.messages.stream(
        model="served", max_tokens=24, messages=ASKED, extra_body=GREEDY, system="Be brief."
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    read = (final.usage.input_tokens, final.usage.cache_read_input_tokens)
    assert sum(map(int, map(str, read))) == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_stop_sequences_and_a_started_answer(client: anthropic.Anthropic) -> None:
    history: Any = [*ASKED, {"role": "assistant", "content": "The capital of France is"}]
    answer = client.messages.create(
        model="served", max_tokens=24, messages=history, extra_body=GREEDY, stop_sequences=["."]
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", ".")
    assert "Paris" in answer.content[0].text


async def test_async(server: Served) -> None:
    async with anthropic.AsyncAnthropic(base_url=server.root, api_key=server.key) as client:
        answer = await client.messages.create(model="served", max_tokens=2, messages=ASKED)
        assert answer.stop_reason == "max_tokens"
        stream = await client.messages.create(model="served", max_tokens=8, messages=ASKED, stream=True)
        kinds = [event.type async for event in stream]
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        counted = await client.messages.count_tokens(model="served", messages=ASKED)
        assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def test_errors(client: anthropic.Anthropic, server: Served) -> None:
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        client.messages.create(model="served", max_tokens=4000, messages=ASKED)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude", max_tokens=2, messages=ASKED)
    with pytest.raises(anthropic.AuthenticationError) as caught:
        anthropic.Anthropic(base_url=server.root, api_key="no").messages.create(
            model="served", max_tokens=8, messages=ASKED
        )
    assert caught.value.request_id is not None
