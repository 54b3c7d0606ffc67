"""Two hundred generations from forty schemas, by a random model: what ends parses and satisfies its schema."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
from real_house import RealHouse, real_house
from tiny_model import write_tiny_model
from tiny_tokenizer import tiny_tokenizer

from service.constraint import Constraint

SHORT = {"type": "string", "maxLength": 5}
FLAT = {"type": "object", "additionalProperties": False}


def of(**properties: Any) -> dict[str, Any]:
    return FLAT | {"properties": properties, "required": list(properties)}


SCHEMAS: list[Any] = [
    SHORT, {"type": "integer", "minimum": -20, "maximum": 1000}, {"type": "boolean"}, {"type": "null"},
    {"type": "number", "minimum": 0, "maximum": 1}, {"enum": ["a", 1, None, True, [1], {"b": 2}]},
    {"const": {"a": [1, "x"]}},
    {"type": ["string", "null"], "maxLength": 4}, {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    {"type": "string", "pattern": "^[a-c]{2,4}-[0-9]+$", "maxLength": 9}, {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"}, {"type": "string", "format": "ipv4"},
    {"type": "string", "minLength": 3, "maxLength": 6}, {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    {"type": "array", "items": SHORT, "minItems": 1, "maxItems": 2},
    {"type": "array", "prefixItems": [{"enum": [1, 2, 3]}, SHORT], "items": False, "minItems": 2},
    of(a=SHORT), of(a={"type": "integer", "minimum": 0, "maximum": 9}, b=SHORT), of(a=of(b=of(c={"type": "boolean"}))),
    FLAT | {"properties": {"a": SHORT, "b": {"type": "null"}}, "required": ["b"]},
    FLAT | {"properties": {"a": SHORT, "b": SHORT}},
    FLAT | {"properties": {}, "maxProperties": 0},
    FLAT | {"patternProperties": {"^x[0-9]$": {"type": "boolean"}}, "maxProperties": 2},
    {"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"], "additionalProperties": {"type": "null"},
     "maxProperties": 2, "minProperties": 1},
    {"anyOf": [of(kind={"const": "a"}, x=SHORT), of(kind={"const": "b"}, y={"type": "boolean"})]},
    {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}]},
    {"allOf": [{"type": "string", "maxLength": 4}, {"type": "string", "minLength": 2}]},
    {"allOf": [of(a={"type": "boolean"}), {"required": ["a"]}]},
    {"$ref": "#/$defs/s", "$defs": {"s": SHORT}},
    of(a={"$ref": "#/$defs/s"}, b={"$ref": "#/$defs/s"}) | {"$defs": {"s": {"enum": ["x", "y"]}}},
    of(v={"type": "boolean"}, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]})
    | {"$defs": {"n": of(v={"type": "boolean"}, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]})}},
    of(name=SHORT, tags={"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2}),
    of(size={"type": "number", "exclusiveMinimum": 0, "maximum": 100}, unit={"enum": ["cm", "in"]}),
    of(when={"type": "string", "format": "time"}), of(mail={"type": "string", "pattern": "^[a-z]{1,5}@x[.]org$"}),
    of(**{"ä \"quoted\" \n key": {"type": "boolean"}}), of(a={"enum": ["€", "\"", "\\", "\n", "😀"]}),
    {"title": "T", "description": "d", "default": 1, "examples": [1], "type": "integer", "minimum": 1, "maximum": 3},
    {"type": "array", "items": of(a={"type": "boolean"}), "minItems": 2, "maxItems": 2},
]  # fmt: skip
JUDGE = jsonschema.FormatChecker(["date", "uuid", "ipv4"])


@pytest_asyncio.fixture
async def house(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[RealHouse]:
    """With so little memory that some Sequences are preempted."""
    folder, frame = write_tiny_model(tmp_path), 2048
    settings = {"kv_cache_memory_bytes": 48 * frame, "max_model_len": 480, "max_num_seqs": 16, "dtype": "float32"}
    async with real_house(monkeypatch, folder, swap_memory_bytes=64 * frame, **settings) as running:
        yield running


def asks(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


async def check(house: RealHouse, schema: Any, text: str, reason: str) -> None:
    """It satisfies its schema, or begins a text that does."""
    if reason == "stop":
        jsonschema.validate(json.loads(text), schema, format_checker=JUDGE)
        return
    assert reason == "length"
    assert house.engine.held.grammars is not None
    grammar = await house.engine.held.grammars.compile(Constraint("json_schema", json.dumps(schema)))
    tokens = tiny_tokenizer().encode(text, add_special_tokens=False)
    assert grammar.start([])._inner.try_consume_tokens(tokens) >= len(tokens) - 4  # a character may have been cut


@pytest.mark.slow
async def test_two_hundred_generations_satisfy_their_schemas(house: RealHouse) -> None:
    """For each schema two alone, two choices of one request, and a stream; many at once, some of them preempted."""
    assert len(SCHEMAS) == 40
    ends: list[str] = []

    async def whole(schema: Any, seed: int, n: int) -> None:
        body = {"prompt": "the", "max_tokens": 440, "seed": seed, "n": n, "response_format": asks(schema)}
        for choice in (await house.post("/v1/completions", body))["choices"]:
            await check(house, schema, choice["text"], choice["finish_reason"])
            ends.append(choice["finish_reason"])

    async def streamed(schema: Any, seed: int) -> None:
        body = {"prompt": "the", "max_tokens": 440, "seed": seed, "response_format": asks(schema)}
        events = await house.events("/v1/completions", body)
        text = "".join(event["choices"][0]["text"] for event in events)
        await check(house, schema, text, events[-1]["choices"][0]["finish_reason"])
        ends.append(events[-1]["choices"][0]["finish_reason"])

    work = []
    for i, schema in enumerate(SCHEMAS):
        work += [whole(schema, i, 1), whole(schema, i + 100, 1), whole(schema, i + 200, 2), streamed(schema, i + 300)]
    await asyncio.gather(*work)
    assert len(ends) == 200
    assert ends.count("stop") >= 190
    assert house.engine.scheduler.preemptions > 0


@pytest.mark.slow
async def test_clients_that_leave_amid_their_grammars_harm_nobody(house: RealHouse) -> None:
    """Constrained and free requests at once, choices, stops and preemption; every third client goes away early."""
    chance = random.Random(5)

    async def one(number: int) -> None:
        body: dict[str, Any] = {"prompt": "the", "max_tokens": 200, "seed": number, "stream": True}
        schema = chance.choice(SCHEMAS)
        is_held, leaves_after = number % 4 > 0, chance.randrange(1, 2000) if number % 3 == 0 else None
        body |= {"response_format": asks(schema)} if is_held else {"ignore_eos": True, "stop": ["xyz"]}
        async with house.session.post(f"{house.url}/v1/completions", json=body) as response:
            assert response.status == 200
            if leaves_after is not None:
                await response.content.read(leaves_after)
                response.close()
                return
            *frames, done, _ = (await response.text()).split("\n\n")
        assert done == "data: [DONE]"
        events = [json.loads(frame.removeprefix("data: ")) for frame in frames]
        if is_held:
            text = "".join(event["choices"][0]["text"] for event in events)
            await check(house, schema, text, events[-1]["choices"][0]["finish_reason"])

    await asyncio.gather(*map(one, range(90)))
    async with asyncio.timeout(20):
        while house.engine.scheduler.has_work:  # noqa: ASYNC110 - those that left are cancelled by and by
            await asyncio.sleep(0.01)
    assert house.engine.scheduler.preemptions > 0
    assert len(house.engine.held) == 0
