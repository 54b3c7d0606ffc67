"""A GPU whose memory is full, to the last block, while requests come: nobody sees it."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_engine import Choice, engine, finish, prefer
from server_process import Process
from tiny_model import write_tiny_model

from model.config import read_config
from model.cuda_executor import CudaExecutor
from model.kv_pool import frame_bytes
from model.out_of_memory import is_out_of_memory
from model.step_plan import SamplingParameters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "PYTEST_XDIST_WORKER" in os.environ, reason="it takes the whole card, also from tests beside it"
    ),
]

SHAPE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 9}
SHAPE |= {"num_key_value_heads": 3, "torch_dtype": "float32", "max_position_embeddings": 8192}
PROMPTS = [[7 * i % 300 + 5 for i in range(begin, begin + 60)] for begin in range(0, 800, 50)]
KINDS: list[tuple[SamplingParameters, dict[str, Any]]] = [
    (SamplingParameters(temperature=0.0), {}),
    (SamplingParameters(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5), {}),
    (SamplingParameters(temperature=0.9, seed=7, top_p=0.9, logprobs=5), {}),
    (SamplingParameters(temperature=0.0, logit_bias={9: 3.0}, bad_words=[[5, 6]]), {"prompt_logprobs": 3}),
]


BODIES: list[dict[str, Any]] = [
    {"prompt": PROMPTS[0], "max_tokens": 30},
    {"prompt": PROMPTS[1], "max_tokens": 30, "frequency_penalty": 1.0, "logit_bias": {"9": 5}, "logprobs": 3},
    {"prompt": PROMPTS[2], "max_tokens": 30, "prompt_logprobs": 2, "echo": True, "logprobs": 1},
    {"prompt": PROMPTS[3], "max_tokens": 30, "structured_outputs": {"regex": "[a-f]{9} is [0-9]{9}"}},
    {"prompt": PROMPTS[4], "max_tokens": 30, "n": 4, "temperature": 1.0, "seed": 5},
    {"prompt": PROMPTS[5], "max_tokens": 10, "n": 2, "use_beam_search": True},
]


@contextmanager
def full_card() -> Iterator[None]:
    """Nothing is left that the driver or torch would give out in pieces of 64 KiB or more."""
    torch.cuda.empty_cache()
    held, size = [], 64 << 30
    while size >= 1 << 16:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    try:
        yield
    finally:
        held.clear()
        torch.cuda.empty_cache()


async def outputs(assembly: Any) -> list[tuple[Any, ...]]:
    """Of all prompts at once, each of its kind."""

    async def one(place: int, prompt: list[int]) -> tuple[Any, ...]:
        sampling, options = KINDS[place % len(KINDS)]
        (choice,) = await finish(assembly, prompt, 24, sampling, prefix_cache=False, **options)
        return facts(choice)

    return await asyncio.gather(*(one(place, prompt) for place, prompt in enumerate(PROMPTS)))


def facts(choice: Choice) -> tuple[Any, ...]:
    ended = choice.ended.result()
    ids = [[int(token) for token in scores.ids] for scores in choice.prompt_scores if hasattr(scores, "ids")]
    return ended.reason, ended.message, choice.tokens, len(choice.scores), len(choice.prompt_scores), ids


@pytest.mark.parametrize("is_swapping", [False, True], ids=["roomy", "swapping"])
async def test_requests_of_all_kinds_run_on_a_full_card_as_on_an_empty_one(
    tmp_path: Path, *, is_swapping: bool
) -> None:
    """Also those for which no CUDA graph exists yet, and none can be made; and those that go to swap and come back."""
    frame = frame_bytes(read_config(write_tiny_model(tmp_path, **SHAPE)), torch.float32, 16)
    settings = {"load_format": "dummy", "kv_cache_memory_bytes": 256 << 20, "max_num_seqs": 64}
    if is_swapping:  # a third of what all of them need
        settings |= {"kv_cache_memory_bytes": 32 * frame, "swap_memory_bytes": 200 * frame}
    async with engine(tmp_path, "cuda", **settings) as assembly:
        alone = []
        for place, prompt in enumerate(PROMPTS):
            sampling, options = KINDS[place % len(KINDS)]
            (choice,) = await finish(assembly, prompt, 24, sampling, prefix_cache=False, **options)
            alone.append(facts(choice))
        executor, memory = assembly.executor, assembly.engine.scheduler.memory
        assert isinstance(executor, CudaExecutor)
        await prefer(assembly, swap=is_swapping)
        with full_card():
            with pytest.raises(torch.OutOfMemoryError) as refusal:
                torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
            assert is_out_of_memory(refusal.value)
            before = executor.captured_graphs
            for _ in range(3):
                assert await outputs(assembly) == alone
            tries = [executor.use_idle_time() for _ in range(8)]
            sys.stdout.write(f"{before} graphs, then {executor.captured_graphs}: {tries}\n")
            assert (memory.counters().swap_in > 0) == is_swapping
            assert await outputs(assembly) == alone
        assert await outputs(assembly) == alone


async def test_a_row_that_needs_memory_of_its_own_fails_alone_on_a_full_card(tmp_path: Path) -> None:
    """A history of 8,000 tokens and 4,000 biases do not fit anywhere; a neighbour goes on."""
    settings = {"load_format": "dummy", "kv_cache_memory_bytes": 256 << 20, "max_num_seqs": 64, "max_model_len": 8192}
    folder = write_tiny_model(tmp_path, **SHAPE)
    hungry = SamplingParameters(temperature=0.0, repetition_penalty=1.3, bad_words=[[5, 6]] * 300_000)
    async with engine(folder, "cuda", **settings) as assembly:
        (before,) = await finish(assembly, PROMPTS[0], 200, prefix_cache=False)
        with full_card():
            fed, starved = await asyncio.gather(
                finish(assembly, PROMPTS[0], 200, prefix_cache=False),
                finish(assembly, PROMPTS[1], 200, hungry, prefix_cache=False),
            )
        assert fed[0].tokens == before.tokens
        assert starved[0].ended.result().reason == "error"
        assert "no memory" in starved[0].ended.result().message
        (after,) = await finish(assembly, PROMPTS[1], 20, hungry, prefix_cache=False)
        assert after.ended.result().reason == "length"


def test_another_process_that_takes_the_whole_card_changes_no_answer(tmp_path: Path) -> None:
    """In bfloat16, through front ends: one after the other the same answers, and all at once no refusal."""
    folder = write_tiny_model(tmp_path, **SHAPE | {"torch_dtype": "bfloat16"})
    sizes = ["--kv-cache-memory-bytes", "64MiB", "--max-num-seqs", "64", "--max-num-batched-tokens", "512"]
    arguments = ["--model", str(folder), "--load-format", "dummy", "--device", "cuda", "--front-ends", "2"]
    server = Process(*arguments, "--log-format", "json", *sizes, folder=tmp_path)

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        fixed = {"ignore_eos": "structured_outputs" not in body, "prefix_cache": False}
        response = server.open("POST", "/v1/completions", {"temperature": 0} | fixed | body)
        return response.status, json.loads(response.read()).get("choices")

    try:
        server.until(lambda: server.status("/ready") == 200)
        with full_card():
            full = [answer(body) for body in BODIES]
            with ThreadPoolExecutor(32) as clients:
                assert {status for status, _ in clients.map(answer, BODIES * 8)} == {200}
        assert {status for status, _ in full} == {200}
        assert [answer(body) for body in BODIES] == full
        assert server.status("/health") == 200
    finally:
        lines = [line for line in server.err.read_text().splitlines() if '"level":"info"' not in line]
        sys.stdout.write(f"{server.process.poll()}\n" + "\n".join(lines[-50:]))
        server.stop()
