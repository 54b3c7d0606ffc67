"""Structured output over HTTP: the real engine with a tiny random model, and what is refused before it runs."""

import asyncio
import io
import json
import math
import re
import threading
from collections.abc import AsyncIterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import openai
import pydantic
import pytest
import pytest_asyncio
from llguidance import LLParserLimits
from real_house import PATIENCE_S, RealHouse, real_house
from tiny_model import write_tiny_model
from tiny_tokenizer import END, tiny_tokenizer

from service.constraint import Constraint
from service.grammars import Grammars

FRAME_BYTES = 2048  # of the tiny model in float32

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


async def name_of(house: RealHouse) -> str:
    async with house.session.get(f"{house.url}/v1/models") as response:
        name: str = (await response.json())["data"][0]["id"]
        return name


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


async def test_responses_take_a_format(house: RealHouse) -> None:
    form = {"type": "json_schema", "name": "x", "schema": PERSON, "strict": True}
    answer = await house.post("/v1/responses", {"input": "the", "max_output_tokens": 400, "text": {"format": form}})
    assert answer["status"] == "completed"
    jsonschema.validate(json.loads(answer["output"][0]["content"][0]["text"]), PERSON)


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Part(pydantic.BaseModel):
    """What the official client makes a schema of: references, unions, defaults."""

    kind: Literal["wheel", "door"]
    colour: Colour
    size: int | None = pydantic.Field(description="in cm", ge=0, le=99)


class Car(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=5)]
    parts: Annotated[list[Part], pydantic.Field(max_length=2)]
    spare: Part | None


async def test_the_official_client_parses_into_a_model_of_its_own(house: RealHouse) -> None:
    async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.parse(
            model=await name_of(house),
            messages=[{"role": "user", "content": "the"}],
            response_format=Car,
            max_tokens=900,
            seed=1,
        )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Car)


async def test_requests_without_a_grammar_say_what_they_say_alone(house: RealHouse) -> None:
    """In the same steps as masked ones."""
    free = {"max_tokens": 60, "temperature": 1.0, "ignore_eos": True}
    alone = [await text_of(house, **free, seed=seed) for seed in range(3)]
    together = await asyncio.gather(
        *(text_of(house, **free, seed=seed) for seed in range(3)),
        *(text_of(house, response_format=asks(PERSON), seed=seed) for seed in range(5)),
    )
    assert together[:3] == alone
    for text, _ in together[3:]:
        jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize("swap_memory_bytes", [0, 1 << 20], ids=["recomputed", "swapped"])
async def test_preempted_sequences_go_on_where_they_were_in_their_grammars(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, swap_memory_bytes: int
) -> None:
    folder = write_tiny_model(tmp_path)
    held = {"response_format": asks(PERSON), "max_tokens": 300, "prefix_cache": False}
    asked: list[dict[str, Any]] = [held | {"seed": seed} for seed in range(12)]
    asked += [{"seed": seed, "max_tokens": 100, "ignore_eos": True, "prefix_cache": False} for seed in range(4)]
    found = []
    for frames in (1000, 40):
        bounds = {"kv_cache_memory_bytes": frames * FRAME_BYTES, "max_model_len": 400, "dtype": "float32"}
        async with real_house(monkeypatch, folder, **bounds, swap_memory_bytes=swap_memory_bytes) as house:
            house.engine.scheduler.memory.costs.copy_page_s = 1e-9  # swap is always worth it
            found.append(await asyncio.gather(*(text_of(house, **body) for body in asked)))
            preemptions = house.engine.scheduler.preemptions
    assert preemptions > 0
    assert found[0] == found[1]
    for text, reason in found[0][:12]:
        if reason == "stop":
            jsonschema.validate(json.loads(text), PERSON)
    assert sum(reason == "stop" for _, reason in found[0][:12]) > 6


# ---------------------------------------------------------------- with other fields


async def test_ends_by_other_fields_and_by_the_grammar(house: RealHouse) -> None:
    """A grammar that can only end ends the choice, whatever min_tokens and ignore_eos say; stops end it anywhere."""
    asked = {"structured_outputs": {"regex": "[a-c]{3}x"}}
    for more in ({"min_tokens": 50}, {"ignore_eos": True}, {"logit_bias": {"2": 100.0}}):
        text, reason = await text_of(house, **asked, **more)
        assert re.fullmatch("[a-c]{3}x", text)
        assert reason == "stop"
    endless = {"structured_outputs": {"regex": "[ab]+"}, "max_tokens": 40}
    assert (await text_of(house, **endless, ignore_eos=True))[1] == "length"
    text, reason = await text_of(house, **endless, logit_bias={str(END): 100.0}, min_tokens=7)
    assert reason == "stop"
    assert 7 <= len(text) <= 30
    text, reason = await text_of(house, **endless, ignore_eos=True, stop=["ab"])
    assert reason == "stop"
    assert "ab" not in text


async def test_penalties_biases_and_reports_see_the_masked_logits(house: RealHouse) -> None:
    asked = {"structured_outputs": {"choice": ["a", "b"]}, "logprobs": 5, "temperature": 0}
    choice = (await house.post("/v1/completions", {"prompt": "the", **asked}))["choices"][0]
    likely = choice["logprobs"]["top_logprobs"][0]
    assert sum(math.exp(value) for value in likely.values() if value > -9000) == pytest.approx(1, abs=1e-5)
    (one,), (other,) = (tiny_tokenizer().encode(text, add_special_tokens=False) for text in "ab")
    for biased, text in ((one, "a"), (other, "b")):
        body = {"prompt": "the", **asked, "logit_bias": {str(biased): 50.0}, "repetition_penalty": 1.3}
        assert (await house.post("/v1/completions", body))["choices"][0]["text"] == text


async def test_fields_that_leave_no_token_end_that_request_alone_and_by_its_own_fault(house: RealHouse) -> None:
    asked = {"prompt": "the", "structured_outputs": {"regex": "[0-9]{9}"}, "allowed_token_ids": [50, 51]}
    other = asyncio.create_task(text_of(house, response_format=asks(PERSON)))
    async with house.session.post(f"{house.url}/v1/completions", json=asked) as response:
        answer = await response.json()
    assert response.status == 400
    assert "none that may come next" in answer["error"]["message"]
    jsonschema.validate(json.loads((await other)[0]), PERSON)


async def test_a_grammar_that_outgrows_its_bounds_ends_its_request_alone_and_is_let_go(
    house: RealHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LLParserLimits(max_lexer_states=1500, verbose_errors=False)
    monkeypatch.setattr("service.grammars.LIMITS", limits)
    hungry = {"regex": r"(?s:.*)a(?s:.{40})b"}
    body = {"prompt": "the", "max_tokens": 400, "structured_outputs": hungry, "ignore_eos": True, "seed": 1}
    other = asyncio.create_task(text_of(house, structured_outputs={"regex": "[ab]{300}"}))
    async with house.session.post(f"{house.url}/v1/completions", json=body) as response:
        answer = await response.json()
    assert response.status == 400
    assert "cannot go on in its grammar" in answer["error"]["message"]
    assert house.engine.held.grammars is not None
    assert house.engine.held.grammars.cached(Constraint("regex", hungry["regex"])) is None
    async with house.session.post(f"{house.url}/v1/completions", json=body | {"stream": True}) as response:
        events = (await response.text()).split("\n\n")
    assert json.loads(events[-3].removeprefix("data: "))["error"]["code"] == 400
    assert (await other)[1] in ("stop", "length")


# ---------------------------------------------------------------- C28, C29: what is refused, and nobody waits for it

BAD: list[tuple[str, Any]] = [
    ("response_format", {"type": "json_schema"}), ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("response_format", {"type": "xml"}), ("response_format", {}), ("response_format", "json"),
    ("response_format", {"type": "text", "json_schema": {"schema": {}}}),
    ("response_format", {"type": "json_object", "schema": {}}),
    *(("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}) for schema in (
        {"properties": {"a": "a string"}}, {"foo": 1}, {"nullable": True}, {"$ref": "#/$defs/none"}, {"enum": []},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, {"type": "nothing"}, {"type": 7}, False,
        {"allOf": [{"type": "string"}, {"type": "number"}]}, {"pattern": "(" * 60_000}, {"pattern": "(?=a)"},
        {"title": "x" * 1_000_000}, {"required": "a"}, {"minimum": "1"}, {"multipleOf": 999_983}, [], "x", 3,
    )),
    *(("structured_outputs", asked) for asked in (
        {}, {"json_object": False}, {"regex": "a", "choice": ["b"]}, {"regex": ""}, {"regex": "(["},
        {"regex": "(?<=x)*"}, {"regex": "(" * 60_000}, {"regex": 1}, {"regex": "\ud800"}, {"choice": []},
        {"choice": [""]}, {"choice": ["a"] * 5000}, {"choice": [1]}, {"choice": "a"}, {"grammar": ""},
        {"grammar": "start: ("}, {"grammar": "start: " + "(" * 60_000}, {"grammar": "root ::= " + "(" * 60_000},
        {"json": "{"}, {"json": '{"type": "string"} x'}, {"json": ""}, {"grammar": "x" * 200_000}, {"guide": "x"},
        {"regex": "a", "backend": "x"},
    )),
]  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_c28_bad_schemas_regexes_and_grammars_are_a_400_with_the_reason(house: RealHouse, path: str) -> None:
    prompt = {"prompt": "the"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "the"}]}
    for stream in (False, True):
        for param, value in BAD:
            body = prompt | {param: value, "stream": stream, "max_tokens": 3}
            async with house.session.post(house.url + path, json=body) as response:
                answer = await response.json()
            assert response.status == 400, body
            assert answer["error"]["param"] == param, (body, answer)
            assert 10 < len(answer["error"]["message"]) <= 1000
    assert not house.engine.scheduler.has_work
    async with house.session.post(f"{house.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}) as response:
        assert response.status == 200


async def test_c28_both_fields_beams_and_removed_names_are_refused(house: RealHouse) -> None:
    both = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    beams = {"structured_outputs": {"regex": "a"}, "use_beam_search": True, "temperature": 0}
    for body, words in ((both, "both"), (beams, "use_beam_search"), ({"guided_json": {}}, "structured_outputs")):
        async with house.session.post(f"{house.url}/v1/completions", json={"prompt": "a"} | body) as response:
            assert response.status == 400
            assert words in (await response.json())["error"]["message"]
    text = {"response_format": {"type": "text"}, "structured_outputs": {"regex": "ab"}}
    assert (await text_of(house, **text))[0] == "ab"


async def test_c28_other_streams_go_on_while_a_grammar_is_compiled(
    house: RealHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler stands still in its thread; meanwhile another stream comes to its end, and probes are answered."""
    gate, threads, compile_ = threading.Event(), [], Grammars._compile

    def slow(self: Grammars, constraint: Constraint) -> Any:
        threads.append(threading.current_thread())
        gate.wait(PATIENCE_S)
        return compile_(self, constraint)

    monkeypatch.setattr(Grammars, "_compile", slow)
    waiting = asyncio.create_task(text_of(house, structured_outputs={"regex": "abc"}))
    try:
        while not threads:  # noqa: ASYNC110 - a thread announces nothing
            await asyncio.sleep(0.001)
        events = await house.events("/v1/completions", {"prompt": "the", "max_tokens": 50, "ignore_eos": True})
        assert len(events) == 50
        async with house.session.get(f"{house.url}/ready") as response:
            assert response.status == 200
        assert not waiting.done()
    finally:
        gate.set()
    assert await waiting == ("abc", "stop")
    assert threading.current_thread() not in threads


def deep(levels: int) -> dict[str, str]:
    """Bodies with a schema of so many levels, as text: an encoder would recurse."""
    reference = "".join(f'"d{i}":{{"$ref":"#/$defs/d{i + 1}"}},' for i in range(levels))
    schemas = {
        "properties": '{"properties":{"a":' * levels + "{}" + "}}" * levels,
        "items": '{"items":' * levels + "{}" + "}" * levels,
        "anyOf": '{"anyOf":[' * levels + "{}" + "]}" * levels,
        "$ref": '{"$ref":"#/$defs/d0","$defs":{' + reference + f'"d{levels}":{{}}}}}}',
        "const": '{"const":' + "[" * levels + "]" * levels + "}",
    }
    form = '{"prompt":"a","max_tokens":1,"response_format":{"type":"json_schema","json_schema":{"schema":%s}}}'
    return {name: form % schema for name, schema in schemas.items()}


@pytest.mark.parametrize("levels", [100, 1000, 50_000])
async def test_c29_deeply_nested_schemas_are_a_400_and_the_process_lives(house: RealHouse, levels: int) -> None:
    headers = {"Content-Type": "application/json"}
    for name, body in deep(levels).items():
        data = io.BytesIO(body.encode())
        async with house.session.post(f"{house.url}/v1/completions", data=data, headers=headers) as response:
            refused = (400, 413) if levels > 1_000 else (400,)  # as a schema, or as a body of so many objects
            expected = (200,) if (name, levels) == ("const", 100) else refused
            assert response.status in expected, (name, await response.text())
    assert (await text_of(house, structured_outputs={"regex": "ab"}))[0] == "ab"
