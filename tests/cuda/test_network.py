"""The whole network over the CUDA kernels, from a plan to sampled tokens, against the CPU executor."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from network import Network
from plan_driver import PlanDriver
from program_executor import BUDGET, ProgramExecutor, cpu_executor, spread, tiny_config

from model.cuda_executor import DeviceProgram
from model.step_plan import SamplingParameters


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
    """The tensor cores' kernels in the network: every greedy token is float32's best, or nearly."""
    config = CONFIGS[name]
    if device.is_emulated and (dtype == torch.float16 or is_padded != name.startswith("Qwen3")):
        pytest.skip("a minute of emulation: the GPU runs them all")
    executor = ProgramExecutor(device, config, dtype, is_padded=is_padded)
    if device.is_emulated:  # torch has no product of 16-bit matrices into float32 on the CPU
        executor.program.kernels.logits = partial(plain_logits, executor.program)  # type: ignore[method-assign]
    everyone = PlanDriver(executor).generate(prompts(), 20, budget=BUDGET // 2, arrive=2)
    exact = Network(config, spread(config, torch.float32, "cpu"))
    for sequence in everyone:
        ids = sequence.prompt + sequence.output
        scores = exact.logits(ids, [len(ids)])[len(sequence.prompt) - 1 : -1].log_softmax(-1)
        chosen = scores.gather(1, torch.tensor(sequence.output)[:, None]).squeeze(1)
        assert (scores.amax(-1) - chosen).max() < NEAR_TIE_16_BITS


def plain_logits(program: DeviceProgram, hidden: torch.Tensor, parameters: Any, step: Any) -> torch.Tensor:
    last = hidden[program.state.last_query[: step.sequences].long()]
    return last.float() @ parameters.head.weight.float().t()
