"""langchain-openai's ChatOpenAI against the demo model."""

import pytest
from compat_server import Served
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

pytestmark = pytest.mark.compat
ASKED = [SystemMessage("Be brief."), HumanMessage("Name the capital of France.")]


@pytest.fixture
def chat(server: Served) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=server.base_url, api_key=server.key, model="served", temperature=0, max_tokens=24, stream_usage=True
    )


def test_invoke_and_stream(chat: ChatOpenAI) -> None:
    answer = chat.invoke(ASKED)
    assert "Paris" in answer.content
    assert answer.usage_metadata is not None
    chunks = list(chat.stream(ASKED))
    assert "".join(chunk.content for chunk in chunks) == answer.content
    used = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert [usage["output_tokens"] for usage in used] == [answer.usage_metadata["output_tokens"]]


async def test_async_and_batch(chat: ChatOpenAI) -> None:
    answers = await chat.abatch([ASKED, ASKED])
    assert answers[0].content == answers[1].content
    assert [chunk async for chunk in chat.astream(ASKED)]


def test_completions(server: Served) -> None:
    model = OpenAI(base_url=server.base_url, api_key=server.key, model="served", temperature=0, max_tokens=5)
    assert model.invoke("The capital of France is").startswith(" Paris")
