"""A whole engine over a model's folder, for tests that compare its tokens with others': only HTTP is left out."""

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from model.config import ModelConfig, read_config
from model.kv_pool import frame_bytes
from model.loader import load_parameters
from model.parameters import Parameters
from model.step_plan import SamplingParameters
from service.assembly import Assembly, assemble
from service.engine import StepReport
from service.engine_client import Ended, Scores, Sibling, Submit
from service.request import Sequence
from service.settings import Settings

GREEDY = SamplingParameters(temperature=0.0)


class Nobody:
    """An observer that counts nothing."""

    def step_ended(self, report: StepReport) -> None: ...
    def sequence_ended(self, sequence: Sequence, ended: Ended, now: float) -> None: ...


_on_cpu = functools.lru_cache(maxsize=1)(load_parameters)


def _load_once(folder: Path, config: ModelConfig, dtype: torch.dtype, device: str, report: Any = None) -> Parameters:
    """For a CPU, read once for all engines of this process: each has its own places for the packed forms of weights."""
    if device != "cpu":
        return load_parameters(folder, config, dtype, device, report)
    plain = _on_cpu(folder, config, dtype)
    layers = [
        replace(
            layer,
            qkv=copy(layer.qkv),
            output=copy(layer.output),
            gate_up=copy(layer.gate_up),
            down=copy(layer.down),
        )
        for layer in plain.layers
    ]
    return replace(plain, layers=layers, head=copy(plain.head))


@asynccontextmanager
async def engine(folder: Path, device: str, **settings: Any) -> AsyncIterator[Assembly]:
    chosen = {"max_num_seqs": 24, "max_num_batched_tokens": 512, "max_model_len": 2048, "dtype": "float32"} | settings
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("service.assembly.load_parameters", _load_once)
        assembly = assemble(Settings(device=device, **chosen), folder, Nobody())
    assembly.engine.open()
    task = asyncio.create_task(assembly.engine.run())
    try:
        yield assembly
        assert assembly.engine.scheduler.memory.available_frames == assembly.executor.frames
        assembly.engine.scheduler.memory.check_invariants()
    finally:
        assembly.engine.stop()
        await asyncio.wait([task])
        assembly.executor.close()


@dataclass
class Choice:
    """A sink that keeps all that comes."""

    number: int
    tokens: list[int] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    prompt_scores: list[Scores] = field(default_factory=list)
    ended: asyncio.Future[Ended] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def put(self, tokens: int | list[int], scores: Scores | None = None) -> None:
        self.tokens += [tokens] if isinstance(tokens, int) else tokens
        if scores is not None:
            self.scores.append(scores)

    def put_prompt_scores(self, scores: list[Scores]) -> None:
        assert not self.tokens
        self.prompt_scores += scores

    def end(self, ended: Ended) -> None:
        self.ended.set_result(ended)

    def fail(self, message: str) -> None:
        self.ended.set_exception(RuntimeError(message))


def start(
    assembly: Assembly,
    prompt: list[int],
    tokens: int,
    sampling: SamplingParameters = GREEDY,
    *,
    count: int = 1,
    **options: Any,
) -> list[Choice]:
    """Submit `count` choices; the seed of choice i is that of `sampling` plus i."""
    client = assembly.client
    ids = [client.next_sequence_id() for _ in range(count)]
    siblings = [Sibling(number, sampling.seed + i) for i, number in enumerate(ids[1:], 1)]
    choices = [Choice(number) for number in ids]
    message = Submit(
        ids[0], f"r{ids[0]}", prompt, tokens, sampling, options.pop("end_ids", []), siblings=siblings, **options
    )
    client.submit(message, *choices)
    return choices


async def finish(assembly: Assembly, prompt: list[int], tokens: int, *sampling: Any, **options: Any) -> list[Choice]:
    """`start`, and wait for all to end."""
    choices = start(assembly, prompt, tokens, *sampling, **options)
    await asyncio.gather(*(choice.ended for choice in choices))
    return choices


async def generate(
    assembly: Assembly, prompt: list[int], tokens: int, sampling: SamplingParameters = GREEDY
) -> list[int]:
    """The tokens of a single choice that ends by its length."""
    (choice,) = await finish(assembly, prompt, tokens, sampling)
    assert choice.ended.result().reason == "length", choice.ended
    return choice.tokens


def frames_for(assembly_tokens: int, folder: Path) -> int:
    """Bytes of a pool of so many tokens."""
    return frame_bytes(read_config(folder), torch.float32, 16) * (assembly_tokens // 16)


async def prefer(assembly: Assembly, *, swap: bool) -> None:
    """Preempt by swap, or by recomputation."""
    assembly.engine.scheduler.memory.costs.prefill_token_s = 1e3 if swap else 1e-9
    assembly.executor.want_slots(assembly.executor.slots)
    while assembly.executor.ready_slots < assembly.executor.slots:  # noqa: ASYNC110  (memory comes in a thread)
        await asyncio.sleep(0.01)
