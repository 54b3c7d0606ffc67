"""Checkpoints of an engine without a network, under pressure: each page must be right, or all later tokens differ."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from simulated_executor import VOCABULARY, expected_output
from stepped_engine import PAGE, SteppedEngine

from model.step_plan import SamplingParameters
from service.checkpoint_file import CheckpointFolder, Header, ModelIdentity
from service.checkpoints import Checkpoints
from service.engine_client import BeamSearch, Event, TokenBatch
from service.errors import BadRequest, NotFound, NotStarted, QueueFull, ServiceUnavailable
from service.questions import Answers, Restore, Restored, SaveCheckpoint

MODEL = ModelIdentity("Simulated", 1, 1, 1024 // 16 // PAGE, VOCABULARY, "int64", PAGE, "c", "w")


class House(SteppedEngine):
    """With a front end that keeps what each Sequence got, and a folder."""

    def __init__(self, folder: Path, seed: int = 0, model: ModelIdentity = MODEL, **more: Any) -> None:
        super().__init__(seed, **more)
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.engine.connect(0, self)
        self.folder = CheckpointFolder(folder)
        self.checkpoints = Checkpoints(self.operations, model, self.folder)
        self.executor.end_swaps = lambda ticket: True

    def deliver(self, event: Event) -> None:
        assert isinstance(event, TokenBatch)
        for number, token in zip(event.sequence_ids, event.tokens, strict=True):
            self.tokens.setdefault(number, []).append(token)
        self.ended.update({each.sequence_id: each.reason for each in event.ended})

    async def steps(self, count: int) -> None:
        for _ in range(count):
            await self.step()

    async def until(self, job: Any) -> Any:
        """Step until it is done."""
        task = asyncio.ensure_future(job)
        for _ in range(4_000):
            if task.done():
                return task.result()
            await asyncio.sleep(0)
            self.now += 0.01
            if self.engine._has_work:
                await self.engine.step()
            else:
                await asyncio.sleep(0.001)  # a thread works
        raise AssertionError("it never ends")

    async def save(self, number: int, name: str = "a") -> Any:
        answer = await self.until(self.checkpoints.save(SaveCheckpoint(f"0.{number}", name, "")))
        return msgspec.json.decode(answer)["after"]

    async def restore(self, name: str = "a") -> tuple[int, Restored]:
        self.submitted += 1
        number = self.submitted
        return number, await self.until(self.checkpoints.restore(0, Restore(name, number, "", "")))

    async def end(self, *numbers: int) -> None:
        for _ in range(3000):
            if all(number in self.ended for number in numbers):
                break
            await self.step()
            await asyncio.sleep(0)
        assert all(self.ended[number] == "length" for number in numbers), self.ended
        self.memory.check_invariants()


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


PROMPT = list(range(1, 12))


async def test_a_refusal_that_nobody_waits_for_any_more_is_no_fault(house: House) -> None:
    """Whoever asked has left, or died: asyncio must not complain of a refusal that was not fetched."""
    faults: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
    answers = Answers()
    house.checkpoints.answer_with(answers)
    asking = asyncio.create_task(answers.answer(0, Restore("none", 1, "", "")))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    with pytest.raises(NotFound):
        await answers.answer(0, Restore("none", 2, "", ""))  # after the one before
    gc.collect()
    assert not faults


@pytest.mark.parametrize("made", range(1, 11))
async def test_all_but_the_last_token_is_there_wherever_the_pages_end(house: House, made: int) -> None:
    number = house.submit(PROMPT, 40)
    while len(house.tokens.get(number, [])) < made:
        await house.step()
    after = await house.save(number)
    again, restored = await house.restore()
    assert restored.tokens == PROMPT + house.tokens[number][: after["tokens"] - len(PROMPT)]
    assert (restored.answer_begin, restored.max_tokens) == (11, 40 - (after["tokens"] - 11))
    before = len(house.executor.plans)
    await house.end(number, again)
    assert house.tokens[number] == expected_output(PROMPT, 40)
    assert house.tokens[again] == house.tokens[number][after["tokens"] - 11 :]
    computed = sum(len(plan.token_ids) - plan.decodes for plan in house.executor.plans[before:])
    assert computed == 0, "nothing of it was a prompt"


async def test_a_pool_with_other_frames_has_the_same_tokens(house: House, tmp_path: Path) -> None:
    number = house.submit(PROMPT, 30)
    await house.steps(12)
    after = await house.save(number)
    other = House(tmp_path, 1, frames=30, slots=0)
    neighbour = other.submit([9] * 20, 30)
    await other.steps(3)
    again, _ = await other.restore()
    await other.end(again, neighbour)
    assert other.tokens[again] == expected_output(PROMPT, 30)[after["tokens"] - 11 :]
    assert other.tokens[neighbour] == expected_output([9] * 20, 30)


async def test_pages_in_swap_are_saved_from_there(house: House) -> None:
    number = house.submit(PROMPT, 40)
    await house.steps(9)
    house.do("sequences/{of}/swap_out", f"0.{number}")
    await house.steps(6)
    assert house.memory.swap.used_slots > 0
    after = await house.save(number)
    assert after["pages"] == (after["tokens"] - 1 + PAGE - 1) // PAGE
    again, _ = await house.restore()
    house.do("sequences/{of}/swap_in", f"0.{number}")
    await house.end(number, again)
    assert house.tokens[again] == house.tokens[number][after["tokens"] - 11 :]


async def test_one_that_holds_nothing_is_saved_by_its_tokens(house: House) -> None:
    number = house.submit(PROMPT, 40)
    await house.steps(9)
    sequence = house.engine.scheduler.find((0, number))
    assert sequence is not None
    house.do("sequences/{of}/pause", f"0.{number}")
    house.engine.scheduler.sequences.recompute(sequence)
    assert (await house.save(number))["pages"] == 0
    again, restored = await house.restore()
    house.do("sequences/{of}/resume", f"0.{number}")
    await house.end(number, again)
    assert restored.tokens + house.tokens[again] == PROMPT + expected_output(PROMPT, 40)


@pytest.mark.parametrize("seed", range(4))
async def test_many_are_saved_and_restored_under_pressure(tmp_path: Path, seed: int) -> None:
    """Preempted, swapped, with copies that end late or fail, and with clients that leave: the tokens are right."""
    house = House(tmp_path, seed, frames=26, slots=14)
    chance = house.chance
    house.executor.end_swaps = lambda ticket: None if chance.random() < 0.5 else chance.random() < 0.97 or ticket > 0
    begun: dict[int, Restored] = {}
    saved = 0
    for turn in range(140):
        house.act()
        if turn % 5 == 0:
            names = [
                each.sequence_id for each in house.engine.scheduler.open_sequences() if each.sequence_id in house.tokens
            ]
            try:
                if names:
                    await house.save(chance.choice(names), f"f{turn % 3}")
                    saved += 1
                if saved and chance.random() < 0.7:
                    number, restored = await house.restore(f"f{turn % 3}")
                    begun[number] = restored
            except (NotFound, NotStarted, QueueFull):
                continue
            except ServiceUnavailable:
                continue  # a copy has failed
        await house.step()
        await asyncio.sleep(0)
        house.memory.check_invariants()
    for _ in range(4000):
        if not house.engine._has_work and not house.memory.is_copying:
            break
        await house.step()
        await asyncio.sleep(0)
    whole = [number for number in begun if house.ended.get(number) == "length"]
    assert len(whole) > 2
    assert house.engine.scheduler.preemptions
    for number in whole:
        assert house.tokens[number] == expected_output(begun[number].tokens, begun[number].max_tokens)
    for number in list(house.memory.pins.held):
        house.memory.unpin(number)
    assert house.memory.available_frames == house.memory.frames.usable


async def test_what_was_restored_is_not_in_the_page_cache(house: House) -> None:
    number = house.submit(PROMPT, 30)
    await house.steps(12)
    after = await house.save(number)
    await house.end(number)
    house.memory.drop_caches()
    again, restored = await house.restore()
    await house.end(again)
    assert after["pages"] > 2
    chain = house.memory.chain(torch.tensor(restored.tokens, dtype=torch.int32).numpy())
    assert house.memory.lookup(chain).cached_tokens == 0


async def test_a_restored_one_that_ends_while_its_pages_come_leaves_nothing(house: House) -> None:
    number = house.submit(PROMPT, 30)
    await house.steps(12)
    await house.save(number)
    house.executor.end_swaps = lambda ticket: None
    again, _ = await house.restore()
    await house.steps(3)
    assert house.memory.holds.held
    house.do("sequences/{of}/abort", f"0.{again}")
    await house.steps(3)
    house.executor.end_swaps = lambda ticket: True
    await house.end(number)
    await house.steps(5)
    assert not house.memory.holds.held
    house.memory.check_invariants()


async def test_pages_that_cannot_be_copied_are_computed(house: House) -> None:
    number = house.submit(PROMPT, 30)
    await house.steps(12)
    after = await house.save(number)
    house.executor.end_swaps = lambda ticket: False
    again, _ = await house.restore()
    await house.end(number, again)
    assert house.tokens[again] == house.tokens[number][after["tokens"] - 11 :]


async def test_where_there_is_no_room_for_all_pages_at_once_they_are_computed(tmp_path: Path) -> None:
    """Nobody runs, and one that an operator has paused holds most frames."""
    house = House(tmp_path, frames=20, slots=0)
    number = house.submit(PROMPT, 60)
    while len(house.tokens.get(number, [])) < 40:
        await house.step()
    house.do("sequences/{of}/pause", f"0.{number}")  # first: while the file is written, it would go on to its end
    after = await house.save(number)
    again, restored = await house.restore()
    await house.end(again)
    assert restored.tokens + house.tokens[again] == PROMPT + expected_output(PROMPT, 60)
    house.do("sequences/{of}/resume", f"0.{number}")
    await house.end(number)
    assert after["pages"] > 10


async def test_nothing_begins_for_a_front_end_that_has_gone(house: House) -> None:
    number = house.submit(PROMPT, 30)
    await house.steps(9)
    await house.save(number)
    with pytest.raises(ServiceUnavailable):
        await house.until(house.checkpoints.restore(7, Restore("a", 1, "", "")))
    await house.end(number)


async def test_what_cannot_be_saved_is_refused(house: House) -> None:
    with pytest.raises(NotFound):
        await house.save(99)
    number = house.submit(PROMPT, 30)
    house.engine.read_messages()
    with pytest.raises(NotStarted):
        house.checkpoints._take(f"0.{number}")
    search = house.submit([1, 2], 20, 2, beam_search=BeamSearch(2))
    await house.steps(4)
    with pytest.raises(BadRequest, match="beam search"):
        await house.save(search)
    tools = house.submit([1, 2], 20, form="tools")
    await house.steps(4)
    with pytest.raises(BadRequest, match="tools"):
        await house.save(tools)


@pytest.mark.parametrize(
    ("fact", "value"), [("dtype", "bfloat16"), ("page_tokens", 16), ("weights", "x"), ("config", "x"), ("layers", 3)]
)
async def test_a_file_of_another_model_is_refused(house: House, tmp_path: Path, fact: str, value: object) -> None:
    number = house.submit(PROMPT, 30)
    await house.steps(9)
    await house.save(number)
    other = House(tmp_path, model=msgspec.structs.replace(MODEL, **{fact: value}))
    with pytest.raises(BadRequest, match=f"another model: {fact}"):
        await other.restore()


BAD: dict[str, dict[str, Any]] = {
    "a token that is none": {"prompt_ids": [1, 2, VOCABULARY]},
    "a negative token": {"prompt_ids": [1, -1, 2]},
    "no tokens": {"prompt_ids": []},
    "an end token beyond all": {"end_ids": [2**40]},
    "nothing to say": {"max_tokens": 0},
    "too much to say": {"max_tokens": 10**9},
    "a search": {"beam_search": BeamSearch(2)},
    "tools": {"form": "tools"},
    "hot": {"sampling": SamplingParameters(temperature=1e9)},
    "a bias of a token that is none": {"sampling": SamplingParameters(logit_bias={VOCABULARY: 1.0})},
    "a word of a token that is none": {"sampling": SamplingParameters(bad_words=[[2**40]])},
    "log-probabilities of all": {"sampling": SamplingParameters(logprobs=10**6)},
    "an empty stop": {"text": {"stops": [""]}},
    "no name": {"request_id": ""},
    "priority": {"priority": 2**40},
}


@pytest.mark.parametrize("name", BAD)
async def test_a_file_with_a_right_checksum_and_wrong_values_is_refused(house: House, name: str) -> None:
    """Whoever made it: nothing that a request could not have reaches the engine."""
    number = house.submit(PROMPT, 30)
    await house.steps(9)
    await house.save(number)
    header, pages = house.folder.read("a", 1 << 20)
    fields = {key: msgspec.convert(value, type(getattr(header.submit, key))) if isinstance(value, dict) else value
              for key, value in BAD[name].items()}  # fmt: skip
    submit = msgspec.structs.replace(header.submit, **fields)
    house.folder.write("a", msgspec.structs.replace(header, submit=submit), pages)
    with pytest.raises(BadRequest):
        await house.restore()
    await house.end(number)


@pytest.mark.parametrize(
    "change",
    [
        {"positions": 10**6},
        {"positions": -1},
        {"answer_begin": 0},
        {"answer_begin": 99},
        {"text_begin": 1},
        {"text_begin": 99},
    ],
)
async def test_a_header_that_contradicts_its_pages_is_refused(house: House, change: dict[str, int]) -> None:
    number = house.submit(PROMPT, 30)
    await house.steps(9)
    await house.save(number)
    header, pages = house.folder.read("a", 1 << 20)
    changed: Header = msgspec.structs.replace(header, **change)
    house.folder.write("a", changed, pages)
    with pytest.raises(BadRequest):
        await house.restore()


async def test_the_rest_of_the_last_page_is_not_told(house: House) -> None:
    """What somebody else had there before."""
    house.executor.device.pool[:] = 77
    number = house.submit(PROMPT, 30)
    while len(house.tokens.get(number, [])) < 3:
        await house.step()
    after = await house.save(number)
    header, pages = house.folder.read("a", 1 << 20)
    flat = pages[:, 0, 0, 0, :, 0].flatten()
    assert header.positions == after["tokens"] - 1
    assert flat[: header.positions].tolist() == header.submit.prompt_ids[:-1]
    assert not flat[header.positions :].any()
