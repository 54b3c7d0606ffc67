"""The official client of OpenAI, sync and async, against our server: it must read everything we write."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import openai
import pytest
from http_house import Server, Start, says

from service.engine_client import QueueState

MESSAGES: Any = [{"role": "user", "content": "the"}]
SAID = " quick \U0001fae0 fox"


@pytest.fixture
def talking(server: Server) -> Server:
    server.engine.script = says(SAID)
    return server


@asynccontextmanager
async def async_client(server: Server, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", **{"api_key": "any", "max_retries": 0, "timeout": 10} | options
    ) as client:
        yield client


@contextmanager
def sync_client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=10) as client:
        yield client


async def in_thread(server: Server, work: Callable[[openai.OpenAI], Any]) -> Any:
    def run() -> Any:
        with sync_client(server) as client:
            return work(client)

    return await asyncio.to_thread(run)


async def test_async_chat(talking: Server) -> None:
    async with async_client(talking) as client:
        answer = await client.chat.completions.create(model="tiny", messages=MESSAGES)
        assert answer.choices[0].message.content == SAID
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        text, roles, usage = "", [], None
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                roles += [choice.delta.role] if choice.delta.role else []
        assert (text, roles, usage) == (SAID, ["assistant"], answer.usage)


async def test_async_stream_helper(talking: Server) -> None:
    async with async_client(talking) as client:
        async with client.chat.completions.stream(model="tiny", messages=MESSAGES) as stream:
            pieces = [event.delta async for event in stream if event.type == "content.delta"]
            final = await stream.get_final_completion()
        assert "".join(pieces) == final.choices[0].message.content == SAID


async def test_async_completions(talking: Server) -> None:
    async with async_client(talking) as client:
        answer = await client.completions.create(model="tiny", prompt=["the", "a"], max_tokens=50)
        assert [choice.text for choice in answer.choices] == [SAID, SAID]
        stream = await client.completions.create(model="tiny", prompt="the", max_tokens=50, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == SAID


async def test_sync_chat_and_completions(talking: Server) -> None:
    def whole(client: openai.OpenAI) -> Any:
        return client.chat.completions.create(model="tiny", messages=MESSAGES, stop=["fox"], temperature=0, seed=1)

    def streamed(client: openai.OpenAI) -> str:
        chunks = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    def completed(client: openai.OpenAI) -> tuple[str, str]:
        answer = client.completions.create(model="tiny", prompt="the", max_tokens=50)
        chunks = client.completions.create(model="tiny", prompt="the", max_tokens=50, stream=True)
        return answer.choices[0].text, "".join(chunk.choices[0].text for chunk in chunks)

    answer = await in_thread(talking, whole)
    assert answer.choices[0].message.content == SAID.removesuffix("fox")
    assert answer.choices[0].stop_reason == "fox"
    assert await in_thread(talking, streamed) == SAID
    assert await in_thread(talking, completed) == (SAID, SAID)


async def test_several_choices(talking: Server) -> None:
    async with async_client(talking) as client:
        answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, n=3, seed=5)
        assert [choice.message.content for choice in answer.choices] == [SAID] * 3
        texts: dict[int, str] = {}
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, n=3, stream=True)
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        assert texts == dict.fromkeys(range(3), SAID)
        completion = await client.completions.create(model="tiny", prompt=["the", "a"], n=2, max_tokens=50, best_of=2)
        assert [(choice.index, choice.text) for choice in completion.choices] == [(i, SAID) for i in range(4)]


async def test_logprobs_of_a_chat(talking: Server) -> None:
    """Whole, streamed, and by the client's own accumulation, which concatenates the entries."""
    asked: Any = {"model": "tiny", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    async with async_client(talking) as client:
        answer = await client.chat.completions.create(**asked)
        assert answer.choices[0].logprobs is not None
        entries = answer.choices[0].logprobs.content
        assert entries is not None
        assert b"".join(bytes(entry.bytes or []) for entry in entries[:-1]).decode() == SAID
        assert all(len(entry.top_logprobs) == 2 for entry in entries)
        streamed = []
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                streamed += (choice.logprobs and choice.logprobs.content) or []
        assert streamed == entries
        async with client.chat.completions.stream(**asked) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].logprobs is not None
        assert final.choices[0].logprobs.content == entries


async def test_logprobs_of_a_completion(talking: Server) -> None:
    asked: Any = {"model": "tiny", "prompt": [[5, 6, 7], [8, 9]], "logprobs": 1, "echo": True, "max_tokens": 1}
    async with async_client(talking) as client:
        answer = await client.completions.create(**asked)
        for choice, length in zip(answer.choices, (4, 3), strict=True):
            found = choice.logprobs
            assert found is not None
            assert found.token_logprobs is not None
            assert found.top_logprobs is not None
            assert len(found.token_logprobs) == length
            # how an evaluation tells whether a continuation is the greedy one
            pairs = zip(found.token_logprobs[1:], found.top_logprobs[1:], strict=True)
            assert all(value in likeliest.values() for value, likeliest in pairs)


async def test_an_answer_can_be_sent_back_as_it_came(talking: Server) -> None:
    """Clients append the message object of the last answer to the next request, nulls and all."""
    async with async_client(talking) as client:
        answer = await client.chat.completions.create(model="tiny", messages=MESSAGES)
        history: Any = [*MESSAGES, answer.choices[0].message.model_dump(), *MESSAGES]
        again = await client.chat.completions.create(model="tiny", messages=history)
        assert again.choices[0].message.content == SAID


async def test_models(talking: Server) -> None:
    async with async_client(talking) as client:
        assert [model.id async for model in client.models.list()] == ["tiny", "org/tiny"]
        assert (await client.models.retrieve("org/tiny")).id == "org/tiny"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-4")


async def test_errors_become_the_clients_own(start: Start) -> None:
    server = await start(settings={"api_keys": ("good",)})
    async with async_client(server) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    async with async_client(server, api_key="good") as client:
        with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
            await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=10_000)
        assert caught.value.param == "max_tokens"
        assert caught.value.type == "BadRequestError"
        server.engine.queue = QueueState(10_000)
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="tiny", messages=MESSAGES)


async def test_an_error_event_is_raised(talking: Server) -> None:
    talking.engine.fail_after = 2
    async with async_client(talking) as client:
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="not finite"):
            async for _ in stream:
                pass


async def test_requests_of_later_releases_are_not_tried_again(talking: Server) -> None:
    async with async_client(talking, max_retries=2) as client:
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"priority": 1})
    assert sum(talking.metrics.ended.values()) == 1
