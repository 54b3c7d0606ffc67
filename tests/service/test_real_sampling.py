"""Sampling fields, log-probabilities and beams, from the socket to the tiny model and back (C07, C17, C23-C27)."""

import asyncio
import itertools
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from http_events import joined, logprobs
from real_house import RealHouse, real_house
from tiny_model import write_tiny_model
from tiny_tokenizer import END, tiny_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
VOCABULARY = tiny_tokenizer().vocabulary
NEAR = 1e-3
"""Between log-probabilities of one prefix that were computed in steps of another shape, in float32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch, folder: Path) -> AsyncIterator[RealHouse]:
    async with real_house(monkeypatch, folder, dtype="float32") as house:
        yield house


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [3 + (position * 37 + salt * 11) % 250 for position in range(length)]


async def complete(house: RealHouse, **fields: Any) -> dict[str, Any]:
    asked = {"prompt": prompt_of(40), "max_tokens": 20, "temperature": 0, "return_token_ids": True} | fields
    choice: dict[str, Any] = (await house.post(COMPLETIONS, asked))["choices"][0]
    return choice


# ---------------------------------------------------------------- values

EXTREMES: list[dict[str, Any]] = [
    {"temperature": 1e-8}, {"temperature": 1e-5}, {"temperature": 2}, {"top_p": 1e-9}, {"top_p": 1}, {"top_k": -1},
    {"top_k": 1}, {"top_k": VOCABULARY}, {"top_k": VOCABULARY + 1}, {"top_k": 10**9}, {"min_p": 0}, {"min_p": 1},
    {"typical_p": 1e-9}, {"typical_p": 1}, {"repetition_penalty": 1e-300}, {"repetition_penalty": 1e300},
    {"repetition_penalty": 1e-6}, {"presence_penalty": 2, "frequency_penalty": -2}, {"logit_bias": {"5": 1e9}},
    {"temperature": 1e-5, "logit_bias": {"7": -1e9}, "repetition_penalty": 1e300},
]  # fmt: skip


async def test_c23_extreme_values_harm_nobody(house: RealHouse) -> None:
    """Alone and all in one batch beside a greedy request, whose text stays what it was."""
    alone = (await complete(house, ignore_eos=True))["text"]
    for values in EXTREMES:
        await complete(house, temperature=1, **{k: v for k, v in values.items() if k != "temperature"})
    together = [
        complete(house, **{"temperature": 1, "logprobs": 2} | values, prompt=prompt_of(30)) for values in EXTREMES
    ]
    greedy, *_ = await asyncio.gather(complete(house, ignore_eos=True), *together)
    assert greedy["text"] == alone
    assert (await complete(house, ignore_eos=True))["text"] == alone


async def test_c23_values_that_leave_one_token_are_greedy(house: RealHouse) -> None:
    greedy = await complete(house, ignore_eos=True)
    for values in ({"temperature": 1e-8}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1}):
        found = await complete(house, ignore_eos=True, **{"temperature": 1, "seed": 3} | values)
        assert found["token_ids"] == greedy["token_ids"], values


async def test_c25_bias_and_bans_at_the_edge_of_the_vocabulary(house: RealHouse) -> None:
    top = VOCABULARY - 1
    assert (await complete(house, logit_bias={str(top): 100}))["token_ids"] == [top] * 20
    found = await complete(house, allowed_token_ids=[top, 7], temperature=1, max_tokens=50)
    assert set(found["token_ids"]) == {top, 7}
    greedy = (await complete(house, ignore_eos=True))["token_ids"]
    without = await complete(house, ignore_eos=True, logit_bias={str(greedy[0]): -100})
    assert greedy[0] not in without["token_ids"]


async def test_bad_words_are_never_said(house: RealHouse) -> None:
    """Words of one token and of several, with and without a space before."""
    words = ["a", "e", "qu", "th", "\U0001fae0"]
    asked = {"temperature": 2, "max_tokens": 300, "ignore_eos": True, "seed": 1, "top_k": 0}
    free, found = await complete(house, **asked), await complete(house, **asked, bad_words=words)
    spelled = [tiny_tokenizer().encode(word, add_special_tokens=False) for word in words]

    def said(ids: list[int]) -> int:
        return sum(ids[i : i + len(word)] == word for word in spelled for i in range(len(ids)))

    assert said(free["token_ids"]) > 0
    assert said(found["token_ids"]) == 0


@pytest.mark.parametrize("minimum", [0, 1, 4, 16])
async def test_c27_exactly_the_minimum_comes_before_a_forced_end(house: RealHouse, minimum: int) -> None:
    asked = {"logit_bias": {str(END): 100, "9": 99}, "stop_token_ids": [9], "min_tokens": minimum}
    found = await complete(house, **asked)
    assert len(found["token_ids"]) == minimum + 1
    assert found["token_ids"][-1] == END
    assert not {END, 9} & set(found["token_ids"][:-1])
    ignoring = await complete(house, **asked, ignore_eos=True)
    assert ignoring["token_ids"] == [END] * 20, "no end any more, so nothing is barred but the client's own"


# ---------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("values", [{}, {"temperature": 1, "seed": 1, "top_k": 0}, {"temperature": 2, "min_p": 0.1}])
async def test_c26_of_sampled_tokens(house: RealHouse, values: dict[str, Any]) -> None:
    """Before temperature: drawn wildly or not, a token has the value that the model gives it."""
    found = await complete(house, logprobs=5, ignore_eos=True, **values)
    scored = found["logprobs"]
    assert {len(entries) for entries in scored.values()} == {20}
    for token, value, likeliest in zip(scored["tokens"], scored["token_logprobs"], scored["top_logprobs"], strict=True):
        best = list(likeliest.values())
        assert len(best) in (5, 6)
        assert best == sorted(best, reverse=True)
        assert likeliest[token] == value
        assert sum(math.exp(each) for each in best) < 1 + 1e-6
    if not values:
        assert all(
            value == max(best.values())
            for value, best in zip(scored["token_logprobs"], scored["top_logprobs"], strict=True)
        )
    again = await complete(house, prompt=[*prompt_of(40), *found["token_ids"]], echo=True, logprobs=0, max_tokens=0)
    assert again["logprobs"]["token_logprobs"][40:] == pytest.approx(scored["token_logprobs"], abs=NEAR)


async def test_c26_forbidden_tokens_and_all_others(house: RealHouse) -> None:
    """After masks and bias: what cannot come is -9999, and what is forced is nearly certain."""
    found = await complete(house, allowed_token_ids=[7, 8], logprobs=4, max_tokens=3)
    for likeliest in found["logprobs"]["top_logprobs"]:
        values = list(likeliest.values())
        assert values[2:] == [-9999.0] * 2
        assert sum(math.exp(value) for value in values[:2]) == pytest.approx(1, abs=1e-5)
    found = await complete(house, logit_bias={"7": 100}, logprobs=1, max_tokens=3)
    assert found["logprobs"]["token_logprobs"] == pytest.approx([0, 0, 0], abs=1e-6)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_c07_streamed_entries_of_the_real_engine(house: RealHouse, path: str) -> None:
    prompt: dict[str, Any] = {"prompt": prompt_of(20), "logprobs": 3}
    if path == CHAT:
        prompt = {"messages": [{"role": "user", "content": "the"}], "logprobs": True, "top_logprobs": 3}
    asked = prompt | {
        "n": 3,
        "seed": 5,
        "temperature": 1,
        "max_tokens": 40,
        "stop": ["a", "e f"],
        "prefix_cache": False,
    }
    whole = await house.post(path, asked)
    events = await house.events(path, asked)
    for choice in whole["choices"]:
        assert joined(events)[choice["index"]] == choice.get("text", choice.get("message", {}).get("content"))
        assert logprobs(events)[choice["index"]] == choice["logprobs"]


async def test_an_evaluation_sees_which_continuation_is_greedy(house: RealHouse) -> None:
    """echo, max_tokens 1, logprobs 1, with ids: prompt + 1 entries, and `==` tells. Cached prompts are scored too."""
    context = prompt_of(50)
    greedy = (await complete(house, prompt=context, ignore_eos=True, max_tokens=6))["token_ids"]
    other = [(greedy[0] + 1) % VOCABULARY, *greedy[1:]]
    for _ in range(2):
        for continuation, is_greedy in ((greedy, True), (other, False)):
            asked = {"prompt": [*context, *continuation], "echo": True, "max_tokens": 1, "logprobs": 1, "seed": 1234}
            found = (await complete(house, **asked))["logprobs"]
            assert {len(entries) for entries in found.values()} == {57}
            values, likeliest = found["token_logprobs"][50:-1], found["top_logprobs"][50:-1]
            pairs = zip(values, likeliest, strict=True)
            assert all(value == max(best.values()) for value, best in pairs) == is_greedy


async def test_prompt_logprobs_are_the_same_cold_and_cached(house: RealHouse) -> None:
    asked = {"prompt": prompt_of(70, 3), "prompt_logprobs": 2, "max_tokens": 1, "n": 2}
    cold, cached = await complete(house, **asked), await complete(house, **asked)
    assert len(cold["prompt_logprobs"]) == 70
    for one, other in zip(cold["prompt_logprobs"][1:], cached["prompt_logprobs"][1:], strict=True):
        assert all(other[id_]["logprob"] == pytest.approx(one[id_]["logprob"], abs=NEAR) for id_ in one if id_ in other)
        ranks = sorted(entry["rank"] for entry in one.values())
        assert ranks[:2] == [1, 2]


# ---------------------------------------------------------------- beams (C17)


async def beams(house: RealHouse, **fields: Any) -> list[dict[str, Any]]:
    asked = {"prompt": prompt_of(37), "use_beam_search": True, "beam_width": 4, "n": 4, "max_tokens": 10}
    answer = await house.post(COMPLETIONS, asked | {"return_token_ids": True} | fields)
    choices: list[dict[str, Any]] = answer["choices"]
    return choices


async def total(house: RealHouse, tokens: list[int]) -> float:
    """The log-probability of an output, by scoring it as a prompt."""
    scored = await complete(house, prompt=[*prompt_of(37), *tokens], echo=True, logprobs=0, max_tokens=0)
    return math.fsum(scored["logprobs"]["token_logprobs"][37:])


async def test_c17_beams_come_best_first_and_beat_greedy(house: RealHouse) -> None:
    """Twice: cold, and when the prompt is cached."""
    greedy = await complete(house, prompt=prompt_of(37), ignore_eos=True, max_tokens=10)
    for _ in range(2):
        found = await beams(house, ignore_eos=True, length_penalty=0)
        assert all(len(beam["token_ids"]) == 10 for beam in found)
        totals = [await total(house, beam["token_ids"]) for beam in found]
        assert all(later < earlier + NEAR for earlier, later in itertools.pairwise(totals))
        assert totals[0] >= await total(house, greedy["token_ids"]) - NEAR
        assert len({tuple(beam["token_ids"]) for beam in found}) == 4


async def test_c17_beams_with_a_stop_string_and_a_stop_id(house: RealHouse) -> None:
    plain = await beams(house)
    text = plain[0]["text"]
    stop = text[3:5]
    cut = await beams(house, stop=stop)
    assert cut[0]["text"] == text[: text.index(stop)]
    assert (cut[0]["finish_reason"], cut[0]["stop_reason"]) == ("stop", stop)
    id_ = plain[0]["token_ids"][4]
    ended = await beams(house, stop_token_ids=[id_])
    assert any(beam["stop_reason"] == id_ for beam in ended)
    for beam in ended:
        assert len(beam["token_ids"]) <= 10
        assert id_ not in beam["token_ids"][:-1]


async def test_c17_beams_beside_other_requests(house: RealHouse) -> None:
    alone = await beams(house)
    others = [complete(house, prompt=prompt_of(30, salt), temperature=1, n=2) for salt in range(5)]
    together, *_ = await asyncio.gather(beams(house), *others)
    assert [beam["token_ids"] for beam in together] == [beam["token_ids"] for beam in alone]
