"""Structured output over HTTP: the real engine with a tiny random model, and what is refused before it runs."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
from real_house import RealHouse, real_house
from tiny_model import write_tiny_model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest_asyncio.fixture
async def house(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[RealHouse]:
    async with real_house(monkeypatch, write_tiny_model(tmp_path), max_num_seqs=8) as running:
        yield running


def asks(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


async def text_of(house: RealHouse, **body: Any) -> tuple[str, str]:
    answer = await house.post("/v1/completions", {"prompt": "the", "max_tokens": 400, "seed": 1} | body)
    choice = answer["choices"][0]
    return choice["text"], choice["finish_reason"]


async def test_a_schema_is_kept_to(house: RealHouse) -> None:
    text, reason = await text_of(house, response_format=asks(PERSON))
    jsonschema.validate(json.loads(text), PERSON)
    assert reason == "stop"


async def test_chats_and_streams_are_constrained_too(house: RealHouse) -> None:
    body = {"messages": [{"role": "user", "content": "the"}], "response_format": asks(PERSON), "max_tokens": 400}
    answer = await house.post("/v1/chat/completions", body | {"seed": 3})
    events = await house.events("/v1/chat/completions", body | {"seed": 3})
    streamed = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert streamed == answer["choices"][0]["message"]["content"]
    jsonschema.validate(json.loads(streamed), PERSON)


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": r"[0-9]{3}-[a-f]{2}"}, r"[0-9]{3}-[a-f]{2}"),
        ({"choice": ["yes", "no", 'per"haps\n', "ä"]}, 'yes|no|per"haps\n|ä'),
        ({"grammar": 'start: "<" /[a-z]{1,3}/ ">"'}, "<[a-z]{1,3}>"),
        ({"grammar": 'root ::= "<" [a-z] [a-z] ">"'}, "<[a-z]{2}>"),
    ],
)
async def test_every_other_kind_is_kept_to(house: RealHouse, asked: dict[str, Any], pattern: str) -> None:
    for seed in range(4):
        text, reason = await text_of(house, structured_outputs=asked, seed=seed)
        assert re.fullmatch(pattern, text), text
        assert reason == "stop"


async def test_an_output_that_is_cut_is_a_beginning(house: RealHouse) -> None:
    text, reason = await text_of(house, structured_outputs={"regex": "[a-z]{50}[0-9]"}, max_tokens=5)
    assert reason == "length"
    assert re.fullmatch("[a-z]{5,50}", text)


async def test_choices_of_one_prompt_go_their_own_ways(house: RealHouse) -> None:
    body = {"prompt": "the", "n": 6, "seed": 1, "max_tokens": 400, "response_format": asks(PERSON)}
    texts = [choice["text"] for choice in (await house.post("/v1/completions", body))["choices"]]
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    assert len(set(texts)) > 1
