"""openai-python against the demo model: whole and streamed, sync and async, chats, completions, responses, errors."""

from typing import Any

import openai
import pytest
from compat_server import Served

pytestmark = pytest.mark.compat
ASKED: Any = [{"role": "user", "content": "Name the capital of France."}]


@pytest.fixture
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key=server.key, max_retries=0)


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="served", messages=ASKED, temperature=0, max_tokens=24)
    assert "Paris" in (whole.choices[0].message.content or "")
    text, usage = "", None
    for chunk in client.chat.completions.create(
        model="served",
        messages=ASKED,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


async def test_async_stream_helper_and_completions(server: Served) -> None:
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.key) as client:
        async with client.chat.completions.stream(
            model="served", messages=ASKED, max_tokens=400, temperature=0
        ) as stream:
            pieces = [event.delta async for event in stream if event.type == "content.delta"]
            final = await stream.get_final_completion()
        assert "".join(pieces) == final.choices[0].message.content
        completion = await client.completions.create(
            model="served", prompt="The capital of France is", max_tokens=5, temperature=0, logprobs=2
        )
        assert completion.choices[0].text.startswith(" Paris")


def test_responses_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="served", input="Name the capital of France.", temperature=0)
    assert "Paris" in whole.output_text
    with client.responses.stream(model="served", input="Name the capital of France.", temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == whole.output_text
    assert final.usage is not None
    assert final.usage.output_tokens > 0


def test_models_and_errors(client: openai.OpenAI, server: Served) -> None:
    assert [model.id for model in client.models.list()] == ["served"]
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.chat.completions.create(model="served", messages=ASKED, max_tokens=100_000)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=ASKED)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.base_url, api_key="wrong").models.list()
