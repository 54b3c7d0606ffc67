"""A tiny network over the CUDA kernels, without graphs, on any loader; and the same on the CPU executor."""

from typing import Any, NamedTuple

import torch

from model.config import ModelConfig, parse_config
from model.cpu_executor import CpuExecutor
from model.cuda_kernels import CudaStep
from model.device_program import RING, DeviceProgram, Reports, read_result
from model.parameters import allocate, parts_of, random_parameters
from model.step_plan import StepPlan, StepResult

ROWS, PAGES, BUDGET = 8, 8, 64


def tiny_config(architecture: str = "LlamaForCausalLM", **fields: Any) -> ModelConfig:
    settings = {
        "architectures": [architecture],
        "vocab_size": 211,
        "hidden_size": 96,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
    }
    return parse_config(settings | fields)


class ProgramExecutor:
    """An Executor that runs each step to its end: DeviceProgram without graphs, on any loader."""

    polls = 0

    def __init__(self, device: Any, config: ModelConfig, dtype: torch.dtype, *, is_padded: bool = False) -> None:
        """is_padded: run every step at the largest sizes, as a graph of mixed steps does."""
        self.device = device
        self.is_padded = is_padded
        parameters = spread(config, dtype, device.name)
        self.program = DeviceProgram(
            config,
            parameters,
            device.loader,
            frames=60,
            utilization=0.5,
            max_running=ROWS,
            max_rows=ROWS,
            max_pages=PAGES,
            max_tokens=BUDGET,
            page_locked=not device.is_emulated,
        )
        self.frames, self.frame_bytes = 60, self.program.pool.layout.frame_bytes
        self.vocabulary = config.vocabulary

    def submit(self, plan: StepPlan) -> Any:
        slot, stream = plan.step % RING, self.device.stream
        reports = self.program.upload(plan, slot, stream)
        step = self.program.sizes(plan, stream)
        if self.is_padded:
            blocks = self.program.kernels.prefill_blocks(BUDGET, ROWS)
            step = CudaStep(stream, ROWS, BUDGET, decodes=ROWS, prefill_blocks=blocks)
        if plan.masked is not None:
            reports.scored = self.program.compute(step, plan.scored, slot=slot)
            self.unsampled = Waiting(plan.step, self, step, reports, len(plan.rows))
            return self.unsampled
        lost = None
        if self.is_padded:
            reports.scored = self.program.run(step, plan.scored, slot=slot)
        else:
            reports.scored, lost = self.program.launch(plan, stream, None, slot=slot)
        return Done(plan.step, lost or self.result(plan.step, len(plan.rows), reports))

    @property
    def masks(self) -> Any:
        return self.program.masks.words

    def sample(self, plan: StepPlan) -> None:
        step = self.unsampled.program_step
        self.program.sample(step.stream, step.sequences, weighs=step.weighs, masked=plan.masked)

    def result(self, step: int, sequences: int, reports: Reports) -> StepResult:
        self.device.synchronize()
        assert self.program.results.is_done(step % RING, step)
        return read_result(self.program.results, step % RING, sequences, reports)

    def close(self) -> None: ...


class Waiting(NamedTuple):
    """The ticket of a step that has not sampled yet."""

    step: int
    executor: ProgramExecutor
    program_step: CudaStep
    reports: Reports
    sequences: int

    def is_done(self) -> bool:
        return self.executor.program.results.is_done(self.step % RING, self.step)

    def wait(self) -> StepResult:
        return self.executor.result(self.step, self.sequences, self.reports)


class Done:
    def __init__(self, step: int, result: StepResult) -> None:
        self.step, self.result = step, result

    def is_done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self.result


def spread(config: ModelConfig, dtype: torch.dtype, device: str) -> Any:
    """Random parameters whose logits differ clearly; the same on every device."""
    parameters = random_parameters(config, torch.float32, "cpu", seed=3)
    target = allocate(config, dtype, device)
    for source, part in zip(parts_of(config, parameters), parts_of(config, target), strict=True):
        scale = 1.0 if source.name.endswith("norm.weight") else 8.0
        part.target.copy_(source.target * scale)
    return target


def cpu_executor(config: ModelConfig, dtype: torch.dtype) -> CpuExecutor:
    parameters = spread(config, dtype, "cpu")
    return CpuExecutor(config, parameters, frames=60, max_rows=ROWS, max_pages=PAGES, threads=1)
