"""The whole network over the CUDA kernels, from a plan to sampled tokens, against the CPU executor."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from network import Network
from plan_driver import PlanDriver
from program_executor import BUDGET, PAGES, ROWS, ProgramExecutor, cpu_executor, spread, tiny_config

from cuda.batch_linear import BatchLinear
from mm import MemoryManager, MemoryOrders, SharedPrefixes
from model import cuda_kernels, thin_layers
from model.cuda_executor import CudaExecutor
from model.device_program import DeviceProgram
from model.step_graphs import Kind, StepGraphs, ladder
from model.step_plan import SamplingParameters, StepPlan
from service.engine_client import Submit
from service.request import Sequence
from service.scheduler import Scheduler, SchedulerSettings

pytestmark = pytest.mark.slow


def prompts() -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 211, length).tolist() for length in (1, 15, 16, 17, 40, 70)]


CONFIGS = {
    "Llama, groups of 3": tiny_config(),
    "Qwen3, norms, tied": tiny_config("Qwen3ForCausalLM", tie_word_embeddings=True),
    "Qwen2, biases, head size 128": tiny_config(
        "Qwen2ForCausalLM", head_dim=128, num_attention_heads=2, num_key_value_heads=1
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_tokens_are_those_of_the_cpu_executor(name: str, device: Any) -> None:
    """Greedy and drawn, prefill in chunks, decode, feedback: the same plans give exactly the same tokens."""
    config = CONFIGS[name]
    sampling = [SamplingParameters(temperature=0.0)] * 3 + [
        SamplingParameters(temperature=0.8, seed=5),
        SamplingParameters(temperature=1.0, top_k=20, seed=2**64 - 1),
        SamplingParameters(temperature=1.2, top_k=50, top_p=0.9, seed=9),
    ]
    outputs = []
    for executor in (cpu_executor(config, torch.float32), ProgramExecutor(device, config, torch.float32)):
        everyone = PlanDriver(executor).generate(prompts(), 20, budget=BUDGET // 2, sampling=sampling, arrive=2)
        assert not any(sequence.failed for sequence in everyone)
        outputs.append([sequence.output for sequence in everyone])
        executor.close()
    assert outputs[0] == outputs[1]


NEAR_TIE_16_BITS = 0.3
"""How far, in log-probability, the token chosen in 16 bits may lie behind the best one in float32."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("is_padded", [False, True], ids=["exact sizes", "padded"])
def test_sixteen_bit_tokens_differ_at_near_ties_only(
    name: str, dtype: torch.dtype, is_padded: bool, device: Any
) -> None:
    """The tensor cores' kernels in the network: every greedy token is float32's best, or nearly. Padded steps have too
    many tokens for ThinLayers; of the others, those that only decode have few enough.
    """
    config = CONFIGS[name]
    if device.is_emulated and (dtype == torch.float16 or (is_padded and not name.startswith("Llama"))):
        pytest.skip("a minute of emulation: the GPU runs them all")
    executor = ProgramExecutor(device, config, dtype, is_padded=is_padded)
    everyone = PlanDriver(executor).generate(prompts(), 20, budget=BUDGET // 2, arrive=2)
    exact = Network(config, spread(config, torch.float32, "cpu"))
    for sequence in everyone:
        ids = sequence.prompt + sequence.output
        scores = exact.logits(ids, [len(ids)])[len(sequence.prompt) - 1 : -1].log_softmax(-1)
        chosen = scores.gather(1, torch.tensor(sequence.output)[:, None]).squeeze(1)
        assert (scores.amax(-1) - chosen).max() < NEAR_TIE_16_BITS


GATE_BYTES = 2 * 2 * 112 * 96
"""Of the gate's and up's matrix, the largest of a layer."""


@pytest.mark.gpu  # torch has the head's product on GPUs only
@pytest.mark.parametrize(
    ("vocabulary", "most", "rows"), [(211, GATE_BYTES - 1, 0), (256, GATE_BYTES, 16)], ids=["all", "head"]
)
def test_large_matrices_are_left_to_cublas(
    device: Any, monkeypatch: pytest.MonkeyPatch, vocabulary: int, most: int, rows: int
) -> None:
    """All layers of a network whose gate is large, where there is no BatchLinear; or only its head.
    To the same tokens.
    """
    monkeypatch.setattr(thin_layers, "CUBLAS_BYTES", most)
    monkeypatch.setattr(BatchLinear, "is_possible", lambda loader, dtype: False)
    config = tiny_config(vocab_size=vocabulary)
    assert thin_layers.useful_rows(config, device.loader.capability, beside_batches=False) == rows
    executor = ProgramExecutor(device, config, torch.bfloat16)
    everyone = PlanDriver(executor).generate(prompts()[:3], 8, budget=BUDGET, arrive=3)
    exact = Network(config, spread(config, torch.float32, "cpu"))
    for sequence in everyone:
        assert is_near_best(exact, sequence.prompt, sequence.output)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("is_padded", [False, True], ids=["exact sizes", "padded"])
def test_tokens_of_batches_of_large_matrices_differ_at_near_ties_only(
    name: str, is_padded: bool, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BatchLinear has steps of 9 to 64 tokens; padded, all. The head is ThinLayers', which the emulation has, too."""
    if not BatchLinear.is_possible(device.loader, torch.bfloat16):
        pytest.skip("BatchLinear is Hopper's")
    if device.is_emulated and not (is_padded and name.startswith("Qwen2")):
        pytest.skip("a minute of emulation: the GPU runs them all")
    config = CONFIGS[name]
    monkeypatch.setattr(thin_layers, "CUBLAS_BYTES", GATE_BYTES - 1)
    monkeypatch.setattr(cuda_kernels, "useful_rows", lambda *_, **__: ROWS)
    rows, multiply = set[int](), BatchLinear.product

    def counted(batch: BatchLinear, stream: int, x: torch.Tensor, *more: Any) -> torch.Tensor:
        rows.add(len(x))
        return multiply(batch, stream, x, *more)

    monkeypatch.setattr(BatchLinear, "product", counted)
    executor = ProgramExecutor(device, config, torch.bfloat16, is_padded=is_padded)
    everyone = PlanDriver(executor).generate(prompts(), 20, budget=BUDGET // 2, arrive=2)
    assert max(rows) == (BUDGET if is_padded else BUDGET // 2)
    exact = Network(config, spread(config, torch.float32, "cpu"))
    for sequence in everyone:
        assert is_near_best(exact, sequence.prompt, sequence.output)


def test_steps_of_large_networks() -> None:
    """Those of one token take ThinLayers where BatchLinear has the others of tens; else a few more do."""
    config = tiny_config(hidden_size=4096, intermediate_size=14336)
    assert thin_layers.useful_rows(config, 90, beside_batches=True) == 1
    assert thin_layers.useful_rows(config, 90, beside_batches=False) > 1
    assert thin_layers.useful_rows(config, 80, beside_batches=False) == 0


COMMON = np.random.default_rng(1).integers(0, 211, 50).tolist()
SHARING = [[*COMMON, 3], [*COMMON, 5, 7], [9, 8], [*COMMON[:33], 1], [*COMMON, *COMMON]]
"""Prompts of which four begin with the same pages."""


def test_shared_prefixes_change_no_token_but_near_ties(device: Any) -> None:
    """The whole path, scheduler to kernels: who begins with the same frames decodes together, to the same tokens."""
    config = CONFIGS["Llama, groups of 3"]
    exact = Network(config, spread(config, torch.float32, "cpu"))
    for finds in (True, False):
        executor = ProgramExecutor(device, config, torch.bfloat16)
        program = executor.program
        accept_all_groups(program)
        for prompt, output, steps in scheduled(executor, program.has_groups, finds_shared_prefixes=finds):
            assert is_near_best(exact, prompt, output)
            assert (steps > 8) == finds


def test_groups_that_do_not_pay_are_ignored(device: Any) -> None:
    """Short prefixes of few rows: the hint is there, and the step runs as without it."""
    executor = ProgramExecutor(device, CONFIGS["Llama, groups of 3"], torch.bfloat16)
    plan = StepPlan(
        step=1,
        orders=MemoryOrders(),
        settings=None,
        rows=np.arange(2, dtype=np.int32),
        starts=np.full(2, 20, np.int32),
        query_starts=np.arange(3, dtype=np.int32),
        token_ids=np.zeros(2, np.int32),
        samples=np.ones(2, np.bool_),
        decodes=2,
        groups=SharedPrefixes(np.arange(2, dtype=np.int32), np.array([0, 2], np.int32), np.array([1], np.int32)),
    )
    executor.program.upload(plan, 1, device.stream)
    assert not executor.program.has_groups(plan)
    accept_all_groups(executor.program)
    again = replace(plan, step=2, groups=replace(plan.groups))  # type: ignore[type-var]
    executor.program.upload(again, 2, device.stream)
    assert executor.program.has_groups(again)
    assert not executor.program.has_groups(plan)


@pytest.mark.gpu
def test_graphs_with_groups_and_without() -> None:
    """The executor replays the graph that a step needs, and rows that leave or come change nothing. Nor do graphs that
    are captured while steps are under way.
    """
    config = CONFIGS["Llama, groups of 3"]
    exact = Network(config, spread(config, torch.float32, "cpu"))
    for finds in (True, False):
        executor = CudaExecutor(
            config,
            spread(config, torch.bfloat16, "cuda"),
            frames=60,
            utilization=0.5,
            max_running=ROWS,
            max_rows=ROWS,
            max_pages=PAGES,
            max_batched_tokens=BUDGET,
        )
        accept_all_groups(executor._program)
        before = executor._graphs  # they keep the memory of graphs, which they share, while others are captured
        tiny_ladder = ladder(max_running=ROWS, max_tokens=BUDGET, reads_shared=True)
        with torch.cuda.stream(executor.stream):
            executor._graphs = StepGraphs(tiny_ladder, executor._captured, seconds=0.0)
        before.clear()
        at_first = executor.captured_graphs

        def has_groups(plan: StepPlan, executor: CudaExecutor = executor) -> bool:
            executor.use_idle_time()
            graph, graphs = executor._graph_for(plan), executor._graphs._graphs
            return any(graph in graphs[Kind.SHARED, weighs].values() for weighs in (False, True))

        for prompt, output, steps in scheduled(executor, has_groups, finds_shared_prefixes=finds):
            assert is_near_best(exact, prompt, output)
            assert (steps > 8) == finds
        assert executor.captured_graphs > at_first
        executor.close()


def accept_all_groups(program: DeviceProgram) -> None:
    """Tiny ones too, though they do not pay."""
    assert program.kernels.shared_prefix is not None
    program.kernels.shared_prefix._least_pages = 1
    program.kernels.shared_prefix._always = True


def is_near_best(exact: Network, prompt: list[int], output: list[int]) -> bool:
    """Whether every token of the output is float32's best after those before it, or nearly."""
    ids = prompt + output
    scores = exact.logits(ids, [len(ids)])[len(prompt) - 1 : -1].log_softmax(-1)
    chosen = scores.gather(1, torch.tensor(output)[:, None]).squeeze(1)
    return bool((scores.amax(-1) - chosen).max() < NEAR_TIE_16_BITS)


def scheduled(
    executor: Any, has_groups: Callable[[StepPlan], bool], *, finds_shared_prefixes: bool
) -> list[tuple[list[int], list[int], int]]:
    """12 tokens of each prompt of SHARING, by the real scheduler: (prompt, output, steps for which has_groups)."""
    memory = MemoryManager(frames=executor.frames, max_rows=ROWS, max_pages=PAGES)
    bounds = SchedulerSettings(
        max_running=ROWS, max_batched_tokens=BUDGET, max_length=127, finds_shared_prefixes=finds_shared_prefixes
    )
    scheduler = Scheduler(memory, bounds)
    outputs: list[list[int]] = [[] for _ in SHARING]
    for number, prompt in enumerate(SHARING):
        message = Submit(number, "r", prompt, 12, SamplingParameters(temperature=0.0), [])
        scheduler.add(Sequence.from_submit(message, 0, 0.0))
    steps = 0
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        ticket = executor.submit(plan)
        steps += has_groups(plan)
        committed = scheduler.commit(ticket.wait(), 0.0)
        for number, token in zip(committed.sequence_ids.tolist(), committed.tokens.tolist(), strict=True):
            outputs[number].append(token)
    return [(prompt, output, steps) for prompt, output in zip(SHARING, outputs, strict=True)]
